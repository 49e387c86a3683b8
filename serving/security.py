"""Who may ask for predictions and who may change things, and what browsers are told about our pages."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from serving.errors import AdminOffError, AdminTokenError, CrossSiteError, MediaTypeError, UnauthorizedError

Headers = Iterable[tuple[bytes, bytes]]

KEY_PATHS = ("/predict",)
"""What starts with one of these needs the API key, where the server has one."""
ADMIN_PATHS = ("/admin", "/unknowns")
"""What starts with one of these needs the admin token."""
USER = "openworld_user"
"""Where a scope holds who asks, once the token was right."""
SOMEBODY, LONGEST_NAME = "admin", 64

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


def check_admin(headers: Headers, token: str | None) -> str:
    """Who asks, as they call themselves; refuses who does not bear the token.

    `authorization: Bearer TOKEN`, with a name in `x-openworld-user`; or Basic, with a name and the token as password,
    which is what a browser can ask a person for.
    """
    if token is None:
        raise AdminOffError("this part is off", got="no admin token in the server's settings", allowed="see its manual")
    given = list(headers)
    for name, value in given:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer" and _same(credentials.strip(), token):
                return _readable(next((said for header, said in given if header == b"x-openworld-user"), b""))
            if scheme.lower() == b"basic":
                user, _, password = _from_base64(credentials.strip()).partition(b":")
                if _same(password, token):
                    return _readable(user)
    raise AdminTokenError(
        "this part needs the admin token",
        got="none that is valid",
        allowed="authorization: Bearer TOKEN, or Basic with the token as password",
    )


def check_change(method: str, headers: Headers) -> None:
    """Refuse a change that a page of another site could have asked a browser for, which adds the password by itself."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return
    given = dict(headers)
    allowed = "the same site, or a program"
    site, origin = given.get(b"sec-fetch-site"), given.get(b"origin")
    # The browser's own word counts: behind a proxy the host may bear another name.
    if site is not None:
        if site != b"same-origin":
            raise CrossSiteError("asked for by another site", got=_readable(site), allowed=allowed)
    elif origin is not None and _host(origin) != given.get(b"host", b"").lower():
        raise CrossSiteError("asked for by another site", got=_readable(origin), allowed=allowed)
    bodyless = given.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in given
    kind = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A form of another site can be sent unasked; JSON cannot.
    if not bodyless and kind != b"application/json":
        got = f"Content-Type {_readable(kind) if kind else 'not given'}"
        raise MediaTypeError("body cannot be read", got=got, allowed="application/json, or no body")


def _host(origin: bytes) -> bytes | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _from_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _readable(name: bytes) -> str:
    """A name that may stand in a log or on a page."""
    shown = "".join(letter for letter in name.decode("utf-8", "replace") if letter.isprintable()).strip()
    return shown[:LONGEST_NAME] or SOMEBODY


def _same(given: bytes, key: str) -> bool:
    """In a time that says nothing about how much of it is right."""
    return hmac.compare_digest(given, key.encode())
