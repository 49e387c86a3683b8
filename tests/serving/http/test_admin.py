"""The admin pages of a real server: access, responses, and the token stays secret."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from starlette.responses import PlainTextResponse

from serving.http.app import make_app
from serving.http.schemas import ErrorAnswer, ServerStatus, SwapAnswer
from serving.settings import Settings
from serving.swap.leader import SwapOutcome
from tests.helpers_serving import (
    GRAPH,
    PATIENCE,
    Server,
    edit_manifest,
    eventually,
    free_port,
    http_get,
    http_post,
    image_bytes,
    metric,
    refused,
    serve_command,
    serving,
    write_bundle,
)

TOKEN = "f00dfacef00dface-token"
WRONG = "cafebabecafebabe-token"
BEARER = {"authorization": f"Bearer {TOKEN}"}
BASIC = base64.b64encode(f"ada:{TOKEN}".encode()).decode()
PAGES = (("POST", "/admin/reload"), ("POST", "/admin/rollback"), ("GET", "/admin/status"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture(scope="module")
def guarded(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an admin token from a file, and a separate API key."""
    secret = tmp_path_factory.mktemp("secret") / "token"
    secret.write_text(f"{TOKEN}\n")
    settings = {"OPENWORLD_ADMIN_TOKEN_FILE": str(secret), "OPENWORLD_API_KEY": "a-key-for-predictions"}
    with serving(tmp_path_factory.mktemp("home"), path, settings=settings) as running:
        yield running


@pytest.fixture
def admin(guarded: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, headers=BEARER, timeout=PATIENCE) as client:
        yield client


def refusal(response: httpx.Response) -> tuple[int, str]:
    error_answer = ErrorAnswer.model_validate(response.json())
    assert error_answer.request_id == response.headers["x-request-id"]
    assert "'none'" in response.headers["content-security-policy"]
    assert response.headers["x-frame-options"] == "DENY"
    return response.status_code, error_answer.error.code


@pytest.mark.parametrize(
    ("method", "page"), [*PAGES, ("GET", "/admin"), ("GET", "/admin/nothing"), ("GET", "/unknowns/x")]
)
def test_without_the_token_access_is_refused(guarded: Server, method: str, page: str) -> None:
    url = f"{guarded.url}{page}"
    for headers in (
        {},
        {"authorization": f"Bearer {WRONG}"},
        {"authorization": "Basic " + base64.b64encode(f"{TOKEN}:".encode()).decode()},
        {"x-api-key": "a-key-for-predictions"},
        {"authorization": "Bearer a-key-for-predictions"},
    ):
        response = httpx.request(method, url, headers=headers, timeout=PATIENCE)
        assert refusal(response) == (401, "unauthorized")
        assert response.headers["www-authenticate"] == 'Basic realm="openworld"'


@pytest.mark.parametrize(
    "target",
    [
        "/admin%2fstatus",
        "/%61dmin/status",
        "/admin/status/",
        "http://x/admin/status",
        "//admin/status",
        "/%2fadmin/status",
        "/./admin/status",
        "/page/../admin/status",
        "/Admin/status",
    ],
)
def test_no_spelling_of_the_path_bypasses_the_token(guarded: Server, target: str) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=PATIENCE) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        with connection.makefile("rb") as stream:
            response = stream.read()
    assert response.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 404 "))
    assert b"workers" not in response


@pytest.mark.parametrize(("method", "page"), PAGES)
def test_where_no_token_is_set_it_is_off(client: httpx.Client, method: str, page: str) -> None:
    assert refusal(client.request(method, page)) == (403, "admin_off")
    assert refusal(client.request(method, page, headers=BEARER)) == (403, "admin_off")
    assert refusal(client.get("/unknowns", headers=BEARER)) == (403, "admin_off")


def test_the_token_is_no_key_for_predictions(admin: httpx.Client) -> None:
    assert admin.post("/predict", content=image_bytes()).status_code == 401


def test_only_our_own_pages_may_ask_for_a_change(admin: httpx.Client) -> None:
    assert refusal(admin.post("/admin/reload", headers={"origin": "http://evil.example"})) == (403, "cross_site")
    assert refusal(admin.post("/admin/reload", headers={"sec-fetch-site": "cross-site"})) == (403, "cross_site")
    assert refusal(admin.post("/admin/reload", data={"a": "b"})) == (415, "unsupported_media_type")
    assert admin.post("/admin/reload", headers={"origin": str(admin.base_url).rstrip("/")}).status_code == 200
    assert admin.post("/admin/reload", json={}).status_code == 200


def test_pages_take_one_method_each(admin: httpx.Client) -> None:
    assert refusal(admin.get("/admin/reload")) == (405, "method_not_allowed")
    assert refusal(admin.post("/admin/status")) == (405, "method_not_allowed")
    assert refusal(admin.get("/admin/nothing")) == (404, "not_found")


def test_the_status_lists_every_worker(guarded: Server, admin: httpx.Client) -> None:
    response = http_get(f"{guarded.url}/admin/status", headers={"authorization": f"Basic {BASIC}"})
    status = ServerStatus.model_validate(response.json())
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert status.version == status.workers[0].version == admin.get("/model").json()["version"]
    assert len(status.workers) == 1


def test_a_reload_and_a_rollback_are_seen_everywhere(guarded: Server, admin: httpx.Client, path: Path) -> None:
    before = admin.get("/model").json()["version"]
    edit_manifest(path, metrics={"accuracy": 0.5})
    # A user name that tries to inject a line into the log.
    swapped = SwapAnswer.model_validate(admin.post("/admin/reload", headers={"x-openworld-user": "Ada\tL"}).json())
    assert (swapped.changed, swapped.previous) == (True, before)
    assert swapped.version != before
    for version, page in ((swapped.version, None), (before, "/admin/rollback")):
        if page is not None:
            assert admin.post(page).json()["version"] == version
        assert (admin.get("/model").json()["version"], admin.get("/admin/status").json()["version"]) == (
            version,
            version,
        )
        assert metric(guarded, "openworld_model_info") == metric(guarded, "openworld_model_info", version=version) == 1
    eventually(lambda: "AdaL asks for a reload" in guarded.log.read_text())


def test_a_refused_bundle_is_in_the_status(guarded: Server, admin: httpx.Client, path: Path) -> None:
    before = admin.get("/model").json()["version"]
    whole = (path / GRAPH).read_bytes()
    (path / GRAPH).write_bytes(whole[:-1])
    try:
        assert refusal(admin.post("/admin/reload")) == (422, "bundle_refused")
    finally:
        (path / GRAPH).write_bytes(whole)
    status = admin.get("/admin/status").json()
    assert (status["version"], status["workers"][0]["version"]) == (before, before)
    assert f"{GRAPH}: corrupt" in status["refused"]
    assert status["workers"][0]["error"].startswith(f"{GRAPH}: corrupt")
    assert metric(guarded, "openworld_swaps_total", outcome="refused") >= 1


def test_no_secret_is_ever_written_down(guarded: Server, admin: httpx.Client) -> None:
    """The token is sent in many ways, correct and incorrect."""
    for secret in (TOKEN, WRONG):
        http_get(f"{guarded.url}/admin/status?token={secret}", headers={"authorization": secret})
        http_get(f"{guarded.url}/admin/status", headers={"authorization": f"Bearer {secret}", "x-request-id": "last"})
        http_get(f"{guarded.url}/unknowns", auth=("ada", secret))
        http_post(f"{guarded.url}/admin/reload", headers={"authorization": f"Bearer {secret}", "origin": "null"})
        http_post(f"{guarded.url}/admin/reload", headers={"authorization": f"Bearer {secret}", "x-api-key": secret})
    lines = eventually(lambda: (text := guarded.log.read_text()).count('"request_id":"last"') == 2 and text)
    for secret in (TOKEN, WRONG):
        assert secret not in lines
        assert base64.b64encode(f"ada:{secret}".encode()).decode() not in lines
    assert all(TOKEN not in " ".join(line) for line in _commands())
    assert "Traceback" not in lines


def _commands() -> list[list[str]]:
    listed = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = []
    for entry in listed:
        try:
            found.append((entry / "cmdline").read_text().split("\0"))
        except OSError:
            continue
    return found


def test_a_shelf_without_a_bundle_refuses_to_start(tmp_path: Path) -> None:
    errors = refused(serve_command(free_port()), tmp_path / "home", None, {"OPENWORLD_BUNDLES": str(tmp_path)})
    assert errors == [f"error: {tmp_path}: no link `current` to a bundle; publish one there first"]


def test_without_token_and_shelf_nothing_is_added(server: Server) -> None:
    """No thread, no folder, no copy."""
    assert not list(server.log.parent.glob("openworld-*"))


def test_a_swap_that_takes_long_goes_on_after_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    swap: Future[SwapOutcome] = Future()
    engine = SimpleNamespace(swaps=SimpleNamespace(reload=lambda: swap))
    settings = Settings(admin_token=TOKEN, deadline=0.01, access_log=False)
    app = make_app(settings, lambda: engine, PlainTextResponse(""))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr("serving.http.admin.MIN_DEADLINE", 0.01)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post("/admin/reload", headers=BEARER)

    assert refusal(asyncio.run(ask())) == (504, "deadline_exceeded")
    assert not swap.cancelled()
