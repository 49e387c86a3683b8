"""Request ids, headers and the shape of every error, over real HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import APIRouter
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from serving.http.app import ROUTERS, make_app
from serving.http.guards import Guard, GuardedRouter
from serving.http.middleware import RequestMiddleware
from serving.http.schemas import ErrorAnswer
from serving.settings import Settings
from tests.helpers_serving import PATIENCE, Server, http_get, image_bytes

RED = image_bytes()
TOKEN = "f00dfacef00dface-token"


def test_a_valid_request_id_is_returned(client: httpx.Client) -> None:
    for path in ("/livez", "/nothing"):
        assert client.get(path, headers={"x-request-id": "job:7.a-B_3"}).headers["x-request-id"] == "job:7.a-B_3"
    response = client.post("/predict", content=b"junk", headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == response.json()["request_id"] == "mine"


@pytest.mark.parametrize("sent", ["", "x" * 65, "a b", "<script>", 'a"b', "ä".encode()])
def test_any_other_request_id_is_replaced(client: httpx.Client, sent: str | bytes) -> None:
    got = client.get("/livez", headers=[(b"x-request-id", sent.encode() if isinstance(sent, str) else sent)])
    assert re.fullmatch("[0-9a-f]{16}", got.headers["x-request-id"])


def test_ids_that_were_made_up_differ(client: httpx.Client) -> None:
    assert len({client.get("/livez").headers["x-request-id"] for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/samples/none.png", 404, "not_found"),
        ("GET", "/predict", 405, "method_not_allowed"),
        ("PUT", "/predict_many", 405, "method_not_allowed"),
        ("POST", "/model", 405, "method_not_allowed"),
        ("POST", "/readyz", 405, "method_not_allowed"),
        ("POST", "/predict", 422, "empty_image"),
    ],
)
def test_every_error_has_one_shape(client: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    parsed = ErrorAnswer.model_validate(response.json())
    assert parsed.error.code == code
    assert parsed.request_id == response.headers["x-request-id"]
    assert len(response.text) < 1000


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/predict", {"POST"}), ("PUT", "/model", {"GET", "HEAD"}), ("POST", "/readyz", {"GET", "HEAD"})],
)
def test_allowed_methods_are_in_the_header_too(client: httpx.Client, method: str, path: str, allowed: set[str]) -> None:
    assert set(client.request(method, path).headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ["/predict/", "/predict_many/", "/model/", "/readyz/", "/docs/", "/unknowns/"])
def test_a_slash_more_is_another_page_and_leads_nowhere(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        response = client.request(method, path, headers={"host": "evil.example"})
        assert response.status_code in (403, 404)
        assert "location" not in response.headers
        assert "evil" not in response.text


def test_a_long_path_is_not_repeated(client: httpx.Client) -> None:
    assert len(client.get("/" + "x" * 5000).text) < 1000


def test_every_response_names_its_schema(client: httpx.Client) -> None:
    responses = [client.get(path) for path in ("/", "/model", "/readyz", "/metrics", "/nothing")]
    responses.append(client.post("/predict", content=RED))
    assert {response.headers["x-openworld-schema"] for response in responses} == {"1"}


@pytest.mark.parametrize("path", ["/", "/docs", "/model", "/nothing"])
def test_pages_are_locked_down(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_answers_are_not_sniffed_or_kept(client: httpx.Client) -> None:
    headers = client.post("/predict", content=RED).headers
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")


def asked(app: RequestMiddleware, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(main())


def test_a_web_socket_is_not_opened(server: Server) -> None:
    """No route accepts WebSockets."""
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    assert http_get(f"{server.url}/predict", headers=upgrade).status_code in (403, 405)


async def _serve_anything(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("end", ["%0A", "%0a%0a", "%0D", "%00", "%7F", "%E2%80%A8"])
@pytest.mark.parametrize(
    "path", ["/predict", "/predict_many", "/admin/reload", "/unknowns", "/unknowns/label", "/model"]
)
def test_a_path_with_control_characters_is_no_page(path: str, end: str) -> None:
    """A framework that normalises such a path must never see it."""
    settings = Settings(access_log=False, api_key="k" * 16, admin_token="t" * 16)
    app = RequestMiddleware(_serve_anything, settings, ROUTERS)
    for headers in ({}, {"x-api-key": "k" * 16, "authorization": "Bearer " + "t" * 16}):
        response = asked(app, "POST", path + end, headers)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/predict", "/predict_many", "/predict/", "/predict%2F", "/predict;x", "/predict%20"])
def test_what_begins_like_a_prediction_needs_the_key(path: str) -> None:
    app = RequestMiddleware(_serve_anything, Settings(access_log=False, api_key="k" * 16), ROUTERS)
    assert asked(app, "POST", path).status_code == 401
    assert asked(app, "POST", path, {"x-api-key": "k" * 16}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 401) for path in ("/secret", "/secrets", "/secret/7", "/secret%2F7", "/secret//")),
        *(("POST", path, 401) for path in ("/vault", "/vault/", "/vaults", "/vault/open", "/vault/nothing")),
        *(("GET", path, 200) for path in ("/", "/secre", "/open", "/open/secret", "/x/vault")),
    ],
)
def test_a_router_declares_what_its_paths_need(method: str, path: str, status: int) -> None:
    """Nothing else has to be told, and what starts like its paths needs the same."""
    secrets, vault, free = GuardedRouter(Guard.KEY), GuardedRouter(Guard.ADMIN, prefix="/vault"), APIRouter()
    for router, route in ((secrets, "/secret/{number}"), (vault, "/open"), (free, "/open")):
        router.add_api_route(route, lambda: None)
    settings = Settings(access_log=False, api_key="k" * 16, admin_token="t" * 16)
    app = RequestMiddleware(_serve_anything, settings, (secrets, vault, free))
    assert asked(app, method, path).status_code == status
    key, token = {"x-api-key": "k" * 16}, {"authorization": "Bearer " + "t" * 16}
    assert asked(app, method, path, token if "/vault" in path else key).status_code == 200


@pytest.mark.parametrize("query", ["top=1&%74op=2", "top=1&t%6Fp", "a+b=1&a%20b=1", "top&alpha=0.1&top=1"])
def test_a_parameter_is_given_once_however_it_is_written(query: str) -> None:
    app = RequestMiddleware(_serve_anything, Settings(), ())
    refused = asked(app, "GET", f"/model?{query}")
    assert refused.status_code == 422
    assert "parameter given twice" in refused.json()["error"]["message"]
    assert asked(app, "GET", f"/model?{query.replace('&', '&other-')}").status_code == 200


async def _fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError("a mistake of ours")


@pytest.mark.parametrize(("method", "path"), [("POST", "/predict"), ("GET", "/model")])
def test_an_internal_error_is_logged_and_has_the_same_shape(
    method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = RequestMiddleware(_fail, Settings(access_log=False), ())
    response = asked(app, method, path)
    parsed = ErrorAnswer.model_validate(response.json())
    assert (response.status_code, parsed.error.code) == (500, "server_failed")
    assert "a mistake of ours" in caplog.text
    assert "mistake" not in response.text


def test_a_body_that_trickles_in_meets_the_deadline() -> None:
    """Of any route; predictions have a deadline of their own."""
    settings = Settings(admin_token=TOKEN, deadline=0.2)
    app = make_app(settings, lambda: None, PlainTextResponse(""))  # type: ignore[arg-type, return-value]
    sent: list[Message] = []

    async def trickle() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def keep(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/unknowns/label", "query_string": b"", "headers": headers}
    asyncio.run(asyncio.wait_for(app({**scope, "http_version": "1.1"}, trickle, keep), PATIENCE))
    assert sent[0]["status"] == 504
    error = ErrorAnswer.model_validate_json(sent[1]["body"]).error
    assert error.code == "deadline_exceeded"
    assert error.allowed == "0.2 seconds from the request's head to the end of its body"


DEADLINE = 1.0
UPLOAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def refusing() -> Iterator[int]:
    """The port of a server that refuses every upload of text before its body has arrived, in a thread."""
    settings = Settings(deadline=DEADLINE, access_log=False, api_key="k" * 16)
    app = make_app(settings, lambda: None, PlainTextResponse(""))  # type: ignore[arg-type, return-value]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(PATIENCE)


def head_of_reply(connection: socket.socket) -> bytes:
    reply = b""
    while b'"request_id"' not in reply:
        reply += connection.recv(65536)
    assert b"connection: close\r\n" in reply
    return reply.partition(b"\r\n")[0]


def send_until(connection: socket.socket, end: float) -> None:
    while time.monotonic() < end:
        connection.sendall(b"x" * 1000)
        time.sleep(0.01)


def test_an_upload_that_continues_after_it_was_refused_ends_with_the_deadline(refusing: int) -> None:
    with socket.create_connection(("127.0.0.1", refusing), timeout=PATIENCE) as connection:
        connection.sendall(UPLOAD % 10**12)
        assert head_of_reply(connection) == b"HTTP/1.1 401 Unauthorized"
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            send_until(connection, started + PATIENCE)
    assert DEADLINE / 2 < time.monotonic() - started < PATIENCE


def test_a_client_that_sends_its_whole_upload_first_still_reads_why_it_was_refused(refusing: int) -> None:
    """More than fits into the buffers of the connection, so the server has to receive it."""
    body = b"x" * 20_000_000
    with socket.create_connection(("127.0.0.1", refusing), timeout=PATIENCE) as connection:
        connection.sendall(UPLOAD % len(body) + body)
        assert head_of_reply(connection) == b"HTTP/1.1 401 Unauthorized"
        assert connection.recv(1) == b"", "the connection is closed as soon as the body has ended"


def test_a_request_whose_body_was_read_keeps_its_connection(refusing: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{refusing}", timeout=PATIENCE) as client:
        for _ in range(2):
            assert "connection" not in client.get("/livez").headers
            assert client.post("/predict", content=b"x").headers["connection"] == "close"
