from __future__ import annotations

import base64
import hmac

import pytest

from serving.errors import AdminOffError, AdminTokenError, CrossSiteError, MediaTypeError
from serving.http.auth import check_admin, check_change

TOKEN = "0123456789abcdef"
Pairs = list[tuple[bytes, bytes]]


def bearer(token: str = TOKEN) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()


def basic(user: str, password: str = TOKEN) -> tuple[bytes, bytes]:
    return b"authorization", b"Basic " + base64.b64encode(f"{user}:{password}".encode())


@pytest.mark.parametrize(
    ("headers", "who"),
    [
        ([bearer()], "admin"),
        ([(b"authorization", b"bearer  " + TOKEN.encode())], "admin"),
        ([bearer(), (b"x-openworld-user", b"Ada")], "Ada"),
        ([(b"x-openworld-user", "Zoë".encode()), bearer()], "Zoë"),
        ([basic("ada")], "ada"),
        ([basic("")], "admin"),
        ([(b"authorization", basic("ada")[1].replace(b"Basic", b"BASIC"))], "ada"),
        ([basic("a\nb\x1b[31m")], "ab[31m"),
        ([basic("x" * 100)], "x" * 64),
        ([bearer("wrong"), basic("ada")], "ada"),
    ],
)
def test_the_token_grants_access_and_identifies_the_user(headers: Pairs, who: str) -> None:
    assert check_admin(headers, TOKEN) == who


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer("")],
        [bearer(TOKEN[:-1])],
        [bearer(TOKEN + "0")],
        [bearer(TOKEN.upper())],
        [basic(TOKEN, "")],
        [basic("ada", "wrong")],
        [(b"authorization", b"Basic not base64")],
        [(b"authorization", b"Basic")],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", b"Digest " + TOKEN.encode())],
        [(b"x-api-key", TOKEN.encode())],
        [(b"x-openworld-user", b"ada")],
        [(b"cookie", TOKEN.encode())],
    ],
)
def test_nothing_else_does(headers: Pairs) -> None:
    with pytest.raises(AdminTokenError) as refused:
        check_admin(headers, TOKEN)
    assert (refused.value.status, refused.value.code) == (401, "unauthorized")
    assert refused.value.headers == {"www-authenticate": 'Basic realm="openworld"'}
    assert TOKEN[:-1] not in str(refused.value)


def test_without_a_token_it_is_off() -> None:
    for headers in ([], [bearer()], [bearer("")], [bearer("None")], [basic("ada", "")]):
        with pytest.raises(AdminOffError) as refused:
            check_admin(headers, None)
        assert (refused.value.status, refused.value.code) == (403, "admin_off")


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append((given, wanted))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for header in (bearer(), basic("ada")):
        with pytest.raises(AdminTokenError):
            check_admin([header], TOKEN)
    assert compared == [(TOKEN.encode(), TOKEN.encode())] * 2


HOST = (b"host", b"example.org:3000")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [HOST],
        [HOST, (b"content-length", b"0"), (b"content-type", b"application/x-www-form-urlencoded")],
        [HOST, (b"content-length", b"2"), (b"content-type", b"Application/JSON; charset=utf-8")],
        [HOST, (b"origin", b"http://example.org:3000")],
        [HOST, (b"origin", b"https://EXAMPLE.org:3000")],
        [HOST, (b"sec-fetch-site", b"same-origin")],
        # Behind a proxy the host name differs; the browser's Sec-Fetch-Site is authoritative.
        [HOST, (b"origin", b"https://public.example"), (b"sec-fetch-site", b"same-origin")],
    ],
)
def test_programs_and_our_own_pages_may_change_things(headers: Pairs) -> None:
    for method in ("POST", "DELETE", "PUT", "PATCH"):
        check_change(method, "/unknowns/label", headers)


@pytest.mark.parametrize(
    "headers",
    [
        [HOST, (b"origin", b"http://evil.example")],
        [HOST, (b"origin", b"http://example.org")],
        [HOST, (b"origin", b"http://example.org:3000.evil.example")],
        [HOST, (b"origin", b"null")],
        [HOST, (b"origin", b"")],
        [HOST, (b"origin", b"http://[")],
        [(b"origin", b"null")],
        [HOST, (b"sec-fetch-site", b"cross-site")],
        [HOST, (b"sec-fetch-site", b"same-site")],
        [HOST, (b"sec-fetch-site", b"none")],
        [HOST, (b"origin", b"http://example.org:3000"), (b"sec-fetch-site", b"cross-site")],
    ],
)
def test_other_sites_may_not(headers: Pairs) -> None:
    for method in ("POST", "DELETE"):
        with pytest.raises(CrossSiteError) as refused:
            check_change(method, "/unknowns/label", headers)
        assert (refused.value.status, refused.value.code) == (403, "cross_site")
    check_change("GET", "/unknowns/label", headers)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"2")],
        [(b"content-length", b"2"), (b"content-type", b"text/plain")],
        [(b"content-length", b"2"), (b"content-type", b"multipart/form-data; boundary=application/json")],
        [(b"transfer-encoding", b"chunked"), (b"content-type", b"application/x-www-form-urlencoded")],
        [(b"transfer-encoding", b"chunked")],
    ],
)
def test_what_a_form_can_send_is_not_read(headers: Pairs) -> None:
    with pytest.raises(MediaTypeError):
        check_change("POST", "/unknowns/label", headers)
