"""Who may ask for predictions, and what browsers are told about our pages."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from serving.errors import UnauthorizedError

Headers = Iterable[tuple[bytes, bytes]]

API_HEADERS: list[tuple[bytes, bytes]] = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
"""For answers that no browser shows as a page."""

PAGE_HEADERS: list[tuple[bytes, bytes]] = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


def check_key(headers: Headers, key: str) -> None:
    """Refuse a request that does not bear the key, in `authorization: Bearer` or in `x-api-key`."""
    for name, value in headers:
        if name == b"x-api-key" and _same(value, key):
            return
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and _same(token.strip(), key):
                return
    # What was sent is not repeated: it may be a key for something else.
    raise UnauthorizedError(
        "predictions need an API key", got="none that is valid", allowed="authorization: Bearer KEY, or x-api-key: KEY"
    )


def _same(given: bytes, key: str) -> bool:
    """In a time that says nothing about how much of it is right."""
    return hmac.compare_digest(given, key.encode())
