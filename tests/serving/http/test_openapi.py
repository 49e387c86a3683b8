"""The API document describes everything that the server does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from serving import errors
from serving.bundle import run_verdict
from serving.http import open_inference, schemas
from serving.http.app import ROUTERS, make_app
from serving.http.openapi import document
from serving.quarantine.api import schemas as quarantine_schemas
from serving.settings import Settings
from serving.teaching.api import schemas as teaching_schemas

PREDICTIONS = ("/predict", "/predict_many")
HIDDEN = {"/", "/docs", "/features", "/samples", "/samples/{name}"}
HIDDEN |= {"/docs.json", "/schema.json", "/static_content/{file}"}
"""Pages, and what is not for callers."""
OPEN = HIDDEN | {"/model", "/metrics", "/livez", "/healthz", "/readyz", "/v2", "/v2/health/live", "/v2/health/ready"}
"""Every other route needs the key or the token. A route that is added is answered to everyone only if it is here."""
MODELS = {
    name: model
    for module in (schemas, open_inference, quarantine_schemas, teaching_schemas, run_verdict)
    for name, model in vars(module).items()
    if isinstance(model, type) and issubclass(model, BaseModel)
}


def no_engine() -> Any:
    raise AssertionError("this needs no engine")


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return document(make_app(Settings(), no_engine, PlainTextResponse("")))


def operations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for operation in methods.values():
            yield path, operation


def walk(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from walk(value)


def test_it_is_served(client: httpx.Client, described: dict[str, Any]) -> None:
    response = client.get("/docs.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == described


def test_every_route_and_body_form_is_there(described: dict[str, Any]) -> None:
    paths = described["paths"]
    assert set(paths) == {route.path for router in ROUTERS for route in router.routes} - HIDDEN
    assert {"/predict", "/predict_many", "/model", "/metrics", "/livez", "/readyz", "/admin/reload"} < set(paths)
    one, many = (set(paths[path]["post"]["requestBody"]["content"]) for path in PREDICTIONS)
    assert one == {"multipart/form-data", "image/*", "application/octet-stream", "application/json"}
    assert many == {"multipart/form-data", "application/json"}
    for path in PREDICTIONS:
        names = [parameter["name"] for parameter in paths[path]["post"]["parameters"]]
        assert names == ["task", "alpha", "top", "store", "explain", "x-request-id"]
    names = [operation["operationId"] for _, operation in operations(described)]
    assert len(names) == len(set(names))


def test_routes_are_grouped(described: dict[str, Any]) -> None:
    groups = [tag["name"] for tag in described["tags"]]
    assert groups[0] == "Predictions"
    found = {path: operation.get("tags", []) for path, operation in operations(described)}
    assert {group for tags in found.values() for group in tags} == set(groups), "a group without routes, or none"
    assert all(len(tags) == 1 for tags in found.values()), "a router without its tag, or two"
    assert found["/predict"] == ["Predictions"]
    assert found["/v2/health/live"] == ["Open Inference Protocol"]
    assert found["/unknowns/groups"] == ["Unknown images"]


def test_every_error_has_its_example(described: dict[str, Any]) -> None:
    codes = {
        error.code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.RequestError) and hasattr(error, "code")
    }
    shown = {
        name
        for _, operation in operations(described)
        for response in operation["responses"].values()
        for name in response.get("content", {}).get("application/json", {}).get("examples", {})
    }
    # An unknown page, the command line, and a client that is gone.
    assert codes - shown == {"not_found", "unreadable_file", "client_gone"}


@pytest.mark.parametrize("path", PREDICTIONS)
def test_a_prediction_lists_all_its_errors(described: dict[str, Any], path: str) -> None:
    responses = described["paths"][path]["post"]["responses"]
    shown = {
        int(status): set(response["content"]["application/json"]["examples"])
        for status, response in responses.items()
        if status != "200"
    }
    assert shown == {
        400: {"malformed_request"},
        401: {"unauthorized"},
        405: {"method_not_allowed"},
        413: {"too_many_bytes", "too_many_pixels", "too_many_images"},
        415: {"unsupported_media_type", "unsupported_image"},
        422: {"empty_image", "broken_image", "bad_parameter"},
        500: {"model_failed", "server_failed"},
        503: {"busy", "quarantine_unavailable"},
        504: {"deadline_exceeded"},
    }
    assert "retry-after" in responses["503"]["headers"]


def test_protected_routes_declare_their_security(described: dict[str, Any]) -> None:
    for path, operation in operations(described):
        needed = {name for choice in operation.get("security", []) for name in choice}
        if path.startswith(("/admin", "/unknowns", "/teach")):
            assert needed == {"admin", "admin_page"}
            assert {"401", "403"} < set(operation["responses"])
        else:
            with_key = path in (*PREDICTIONS, "/drift") or path.startswith("/v2/models")
            assert needed == ({"bearer", "key"} if with_key else set())
    assert set(described["components"]["securitySchemes"]) == {"bearer", "key", "admin", "admin_page"}


def test_every_route_but_the_open_ones_refuses_a_request_without_credentials(described: dict[str, Any]) -> None:
    settings = Settings(api_key="0123456789abcdef", admin_token="a-token-of-its-own")
    client = TestClient(make_app(settings, no_engine, PlainTextResponse("")))
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes} > OPEN
    for route in routes:
        if route.path in OPEN:
            assert "401" not in described["paths"].get(route.path, {}).get("get", {"responses": {}})["responses"]
            continue
        assert route.include_in_schema, route.path
        for method in route.methods:
            response = client.request(method, re.sub(r"\{\w+\}", "1", route.path))
            assert response.status_code == 401, route.path
            operation = described["paths"][route.path][method.lower()]
            assert "401" in operation["responses"], "the document has to show it"
            assert operation["security"]


def test_every_field_has_a_valid_example(described: dict[str, Any]) -> None:
    checked = 0
    for name, schema in described["components"]["schemas"].items():
        for field, shown in schema.get("properties", {}).items():
            # A field of other objects shows the examples of these.
            if "$ref" in str(shown):
                continue
            (wanted,) = (each for key, each in MODELS[name].model_fields.items() if (each.alias or key) == field)
            TypeAdapter(wanted.annotation).validate_python(shown["examples"][0])
            checked += 1
    assert checked > 100


def test_every_error_example_is_valid(described: dict[str, Any]) -> None:
    examples = [part["value"] for part in walk(described["paths"]) if isinstance(part.get("value"), dict)]
    assert len(examples) > 10
    for example in examples:
        schemas.ErrorAnswer.model_validate(example)


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    references = [part["$ref"] for part in walk(described) if "$ref" in part]
    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in described["components"]["schemas"]


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz", "/metrics", "/model"])
def test_what_is_described_is_there(client: httpx.Client, described: dict[str, Any], path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    shown = described["paths"][path]["get"]["responses"]["200"]
    assert response.headers["content-type"].partition(";")[0] in shown["content"]
    assert set(shown["headers"]) <= set(response.headers)
