"""Request ids, headers and the shape of every error, over real HTTP."""

from __future__ import annotations

import re

import httpx
import pytest

from serving.schemas import ErrorAnswer
from tests.helpers_serving import image_bytes

RED = image_bytes()


def test_a_sane_request_id_comes_back(client: httpx.Client) -> None:
    for path in ("/livez", "/nothing"):
        assert client.get(path, headers={"x-request-id": "job:7.a-B_3"}).headers["x-request-id"] == "job:7.a-B_3"
    response = client.post("/predict", content=b"junk", headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == response.json()["request_id"] == "mine"


@pytest.mark.parametrize("sent", ["", "x" * 65, "a b", "<script>", 'a"b', "ä".encode()])
def test_any_other_is_replaced(client: httpx.Client, sent: str | bytes) -> None:
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
    said = ErrorAnswer.model_validate(response.json())
    assert said.error.code == code
    assert said.request_id == response.headers["x-request-id"]
    assert len(response.text) < 1000


def test_a_long_path_is_not_repeated(client: httpx.Client) -> None:
    assert len(client.get("/" + "x" * 5000).text) < 1000


def test_every_response_says_its_schema(client: httpx.Client) -> None:
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
