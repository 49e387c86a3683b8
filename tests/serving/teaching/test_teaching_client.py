"""The typed client of /teach: every method sends a request that the API describes, and returns what it describes."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from serving.client import AsyncClient, Client, Retries, ServiceError
from serving.http.app import make_app
from serving.http.openapi import document
from serving.settings import Settings
from serving.teaching.client import AsyncTeaching, Teaching
from tests.helpers_teaching import picture

Method = Callable[[Any], Any]

JSON, FILE = "application/json", b"a file"

CALLS: dict[str, Method] = {
    "status": lambda teaching: teaching.status(),
    "classes": lambda teaching: teaching.classes(3),
    "create": lambda teaching: teaching.create("cow"),
    "rename": lambda teaching: teaching.rename("cow", "ox"),
    "merge": lambda teaching: teaching.merge(["cow", "calf"], "ox"),
    "delete": lambda teaching: teaching.delete("cow", examples="delete"),
    "examples": lambda teaching: teaching.examples("cow", state="waiting", after=3, limit=7),
    "add": lambda teaching: teaching.add("cow", picture("elk", 1)),
    "label": lambda teaching: teaching.label([1, 2], "cow"),
    "label_group": lambda teaching: teaching.label_group(4, "cow"),
    "remove": lambda teaching: teaching.remove([1]),
    "right": lambda teaching: teaching.right(1),
    "wrong": lambda teaching: teaching.wrong(1, "cow"),
    "group": lambda teaching: teaching.group(),
    "groups": lambda teaching: teaching.groups(items=3),
    "items": lambda teaching: teaching.items(4, after=3, limit=7),
    "loose": lambda teaching: teaching.loose(after=3, limit=7),
    "image": lambda teaching: teaching.image(3),
    "split": lambda teaching: teaching.split([1, 2]),
    "move": lambda teaching: teaching.move([1, 2], None),
    "merge_groups": lambda teaching: teaching.merge_groups([4, 5]),
    "junk": lambda teaching: teaching.junk([1]),
    "junk_group": lambda teaching: teaching.junk_group(4),
    "learn": lambda teaching: teaching.learn(accept=True),
    "job": lambda teaching: teaching.job(7),
    "accept": lambda teaching: teaching.accept(7, force=True),
    "discard": lambda teaching: teaching.discard(7),
    "versions": lambda teaching: teaching.versions(),
    "roll_back": lambda teaching: teaching.roll_back("0123456789ab"),
    "log": lambda teaching: teaching.log(5),
    "import_archive": lambda teaching: teaching.import_archive(b"PK\x03\x04"),
    "export_archive": lambda teaching: teaching.export_archive("label-studio", "cow", part=2),
}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return document(make_app(Settings(), lambda: None, PlainTextResponse("")))  # type: ignore[arg-type,return-value]


class Recorder(BaseHTTPRequestHandler):
    """Answers every request with the example of the API document, and remembers it."""

    described: dict[str, Any]
    requests: list[tuple[str, str, dict[str, str], dict[str, str], bytes]]
    failures: int
    refusal: tuple[int, dict[str, Any]] | None = None

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.requests.append((self.command, url.path, dict(parse_qsl(url.query)), headers, body))
        cls = type(self)
        if cls.failures:
            cls.failures -= 1
            self.close_connection = True
            return
        status, media_type, schema = response_of(operation_of(self.described, self.command, url.path))
        content = FILE if media_type != JSON else json.dumps(example_of(self.described, schema)).encode()
        if self.refusal is not None:
            status, media_type, content = self.refusal[0], JSON, json.dumps(self.refusal[1]).encode()
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def operation_of(described: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    for pattern, methods in described["paths"].items():
        parts, given = pattern.split("/"), path.split("/")
        same = len(parts) == len(given) and all(
            one == other or one.startswith("{") for one, other in zip(parts, given, strict=True)
        )
        if same and method.lower() in methods:
            found: dict[str, Any] = methods[method.lower()]
            return found
    raise AssertionError(f"no route {method} {path}")


def response_of(operation: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """Status, media type and schema of a response without an error."""
    status = next(code for code in operation["responses"] if code.startswith("2"))
    media_type, described = next(iter(operation["responses"][status]["content"].items()))
    return int(status), media_type, described["schema"]


def resolved(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def example_of(described: dict[str, Any], schema: dict[str, Any]) -> Any:
    """A value that a schema describes: its example where it has one."""
    schema = resolved(described, schema)
    if schema.get("examples"):
        return schema["examples"][0]
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return example_of(described, options[0])
    if "properties" in schema:
        return {name: example_of(described, part) for name, part in schema["properties"].items()}
    empty = {"array": [], "object": {}, "string": "x", "integer": 1, "number": 0.5, "boolean": True}
    return empty.get(schema.get("type", ""))


@pytest.fixture
def recorder(described: dict[str, Any]) -> Iterator[tuple[str, type[Recorder]]]:
    handler = type("Handler", (Recorder,), {"described": described, "requests": [], "failures": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_method_is_tried() -> None:
    for client in (Teaching, AsyncTeaching):
        methods = {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
        assert methods == {*CALLS, "wait"}


@pytest.mark.parametrize("name", CALLS)
def test_requests_and_responses_are_those_of_the_document(
    name: str, recorder: tuple[str, type[Recorder]], described: dict[str, Any]
) -> None:
    url, handler = recorder
    with Client(url) as client:
        found = CALLS[name](client.teaching("a-token", "ada"))

    async def again() -> Any:
        async with AsyncClient(url) as client:
            return await CALLS[name](client.teaching("a-token", "ada"))

    assert asyncio.run(again()) == found
    first, second = handler.requests
    method, path, query, headers, body = first
    assert (method, path, query, body) == (second[0], second[1], second[2], second[4])
    assert (headers["authorization"], headers["x-openworld-user"]) == ("Bearer a-token", "ada")
    operation = operation_of(described, method, path)
    assert query.keys() <= {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
    if headers.get("content-type") == "application/json":
        # A request without fields has an empty object, which nothing needs to describe.
        given = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
        schema = resolved(described, given["content"]["application/json"]["schema"])
        sent = json.loads(body)
        assert sent.keys() <= schema.get("properties", {}).keys()
        assert set(schema.get("required", ())) <= sent.keys()
    _, media_type, schema = response_of(operation)
    if media_type != JSON:
        assert found == FILE
    else:
        assert isinstance(found, BaseModel)
        assert schema["$ref"].rpartition("/")[2] == type(found).__name__


def test_a_file_that_is_refused_is_an_error(recorder: tuple[str, type[Recorder]]) -> None:
    url, handler = recorder
    refused = {"error": {"code": "no_such_item", "message": "m", "got": "g", "allowed": "a"}, "request_id": "r"}
    handler.refusal = 404, refused
    with Client(url) as client, pytest.raises(ServiceError) as refusal:
        client.teaching("a-token").image(3)
    assert (refusal.value.status, refusal.value.code) == (404, "no_such_item")


def test_only_what_may_be_sent_twice_is_sent_again(recorder: tuple[str, type[Recorder]]) -> None:
    url, handler = recorder
    with Client(url, retries=Retries(attempts=3, first=0.01)) as client:
        teaching = client.teaching("a-token")
        handler.failures = 1
        teaching.label([1], "cow")
        assert len(handler.requests) == 2
        handler.failures = 1
        with pytest.raises(ServiceError):
            teaching.learn()
        assert len(handler.requests) == 3
