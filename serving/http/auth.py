"""Authentication of predictions and of changes, and the security headers of responses."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from serving.errors import AdminOffError, AdminTokenError, CrossSiteError, MediaTypeError, UnauthorizedError

Headers = Iterable[tuple[bytes, bytes]]

TEACH_UPLOADS = frozenset(("/teach/examples", "/teach/import"))
"""Paths of which the body may be a file."""
FILE_TYPES = (b"application/octet-stream", b"application/zip")
"""Content types of files other than images. Browsers send them from pages of another site only after a preflight."""
DEFAULT_NAME, MAX_NAME = "admin", 64

API_HEADERS: list[tuple[bytes, bytes]] = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
"""For responses that no browser shows as a page."""

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
    """Refuse a request without the key in `authorization: Bearer` or in `x-api-key`."""
    for name, value in headers:
        if name == b"x-api-key" and _same(value, key):
            return
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and _same(token.strip(), key):
                return
    # What was sent is not echoed: it may be a key for something else.
    raise UnauthorizedError(
        "predictions need an API key", got="none that is valid", allowed="authorization: Bearer KEY, or x-api-key: KEY"
    )


def check_admin(headers: Headers, token: str | None) -> str:
    """The name that the caller gives; a request without the token is refused.

    Accepted are `authorization: Bearer TOKEN` with a name in `x-openworld-user`, and Basic with a name and the token
    as password, which a browser can ask for.
    """
    if token is None:
        raise AdminOffError(
            "the admin routes are disabled",
            got="no admin token in the server's settings",
            allowed="OPENWORLD_ADMIN_TOKEN set",
        )
    given = list(headers)
    for name, value in given:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer" and _same(credentials.strip(), token):
                return _readable(next((value for header, value in given if header == b"x-openworld-user"), b""))
            if scheme.lower() == b"basic":
                user, _, password = _from_base64(credentials.strip()).partition(b":")
                if _same(password, token):
                    return _readable(user)
    raise AdminTokenError(
        "the admin token is needed",
        got="none that is valid",
        allowed="authorization: Bearer TOKEN, or Basic with the token as password",
    )


def check_change(method: str, path: str, headers: Headers) -> None:
    """Refuse a change that a page of another site could make a browser send, which adds the password automatically."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return
    given = dict(headers)
    allowed = "the same site, or a program"
    site, origin = given.get(b"sec-fetch-site"), given.get(b"origin")
    # Prefer the browser's own verdict: behind a proxy the host may have another name.
    if site is not None:
        if site != b"same-origin":
            raise CrossSiteError("requested by another site", got=_readable(site), allowed=allowed)
    elif origin is not None and _host(origin) != given.get(b"host", b"").lower():
        raise CrossSiteError("requested by another site", got=_readable(origin), allowed=allowed)
    bodyless = given.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in given
    kind = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # Another site can make a browser send a form without permission, but not JSON.
    if bodyless or kind == b"application/json":
        return
    is_file = kind in FILE_TYPES or kind.startswith(b"image/")
    if not (path in TEACH_UPLOADS and is_file):
        got = f"Content-Type {_readable(kind) if kind else 'not given'}"
        files = ", image/*, application/octet-stream, application/zip" if path in TEACH_UPLOADS else ""
        raise MediaTypeError("body cannot be read", got=got, allowed=f"application/json{files}, or no body")


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
    """A name that is safe in a log and on a page."""
    shown = "".join(letter for letter in name.decode("utf-8", "replace") if letter.isprintable()).strip()
    return shown[:MAX_NAME] or DEFAULT_NAME


def _same(given: bytes, key: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, key.encode())
