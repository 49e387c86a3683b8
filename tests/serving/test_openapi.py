"""The description of the API says all that the server does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from serving import errors
from serving.app import _described
from serving.edge import UNKNOWNS
from serving.openapi import document
from serving.schemas import (
    Answer,
    Answers,
    ErrorAnswer,
    ImageBody,
    ImagesBody,
    ModelDescription,
    ServerStatus,
    SwapAnswer,
)
from serving.unknowns import document as unknowns

PREDICTIONS = ("/predict", "/predict_many")
ADMIN = {"/admin/reload", "/admin/rollback", "/admin/status"}
ITEM = {"/unknowns/items/{id}" + page for page in ("", "/image", "/thumbnail")}
SHAPES = (Answer, Answers, ErrorAnswer, ImageBody, ImagesBody, ModelDescription, ServerStatus, SwapAnswer)
MODELS = {model.__name__: model for model in (*SHAPES, *unknowns.ANSWERS, *unknowns.BODIES)}


def operations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for operation in methods.values():
            yield path, operation


def walk(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from walk(value)


def test_it_is_served(client: httpx.Client) -> None:
    response = client.get("/docs.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == document()


def test_it_is_worked_out_once() -> None:
    """It takes longer than many answers, and the event loop would wait for it."""
    assert _described() is _described()


def test_every_page_and_body_form_is_there() -> None:
    paths = document()["paths"]
    pages = {"/predict", "/predict_many", "/model", "/livez", "/healthz", "/readyz", "/metrics"}
    assert set(paths) == pages | ADMIN | UNKNOWNS | ITEM
    one, many = (set(paths[path]["post"]["requestBody"]["content"]) for path in PREDICTIONS)
    assert one == {"multipart/form-data", "image/*", "application/octet-stream", "application/json"}
    assert many == {"multipart/form-data", "application/json"}
    for path in PREDICTIONS:
        names = [parameter["name"] for parameter in paths[path]["post"]["parameters"]]
        assert names == ["task", "alpha", "top", "x-request-id"]


def test_every_error_has_its_example() -> None:
    codes = {
        error.code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.RequestError) and hasattr(error, "code")
    }
    shown = {
        name
        for _, operation in operations(document())
        for response in operation["responses"].values()
        for name in response["content"].get("application/json", {}).get("examples", {})
    }
    # Of other pages, of the command line, and of nobody who could read it.
    assert codes - shown == {"not_found", "unreadable_file", "client_gone"}


@pytest.mark.parametrize("path", PREDICTIONS)
def test_a_prediction_shows_all_that_can_be_wrong_with_it(path: str) -> None:
    responses = document()["paths"][path]["post"]["responses"]
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
        431: {"head_too_large"},
        500: {"model_failed", "server_failed"},
        503: {"busy"},
        504: {"deadline_exceeded"},
    }
    assert "retry-after" in responses["503"]["headers"]


def test_every_field_has_an_example() -> None:
    for name, schema in document()["components"]["schemas"].items():
        for field, said in schema["properties"].items():
            assert said["examples"], f"{name}.{field}"
            if name in MODELS:
                (wanted,) = (each for key, each in MODELS[name].model_fields.items() if (each.alias or key) == field)
                TypeAdapter(wanted.annotation).validate_python(said["examples"][0])


def test_every_body_has_an_example() -> None:
    for path, operation in operations(document()):
        bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
        for media_type, content in (each for body in bodies for each in body.get("content", {}).items()):
            assert "example" in content or "examples" in content, f"{path}: {media_type}"


def test_every_example_is_valid() -> None:
    checked = 0
    for part in walk(document()["paths"]):
        reference = part.get("schema", {}).get("$ref", "") if isinstance(part.get("schema"), dict) else ""
        model = MODELS.get(reference.rpartition("/")[2])
        if model is None:
            continue
        examples = [part["example"]] if "example" in part else [entry["value"] for entry in part["examples"].values()]
        for example in examples:
            model.model_validate(example)
            checked += 1
    assert checked > 10


def test_every_reference_leads_somewhere() -> None:
    described = document()
    references = [part["$ref"] for part in walk(described) if "$ref" in part]
    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in described["components"]["schemas"]


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz", "/metrics", "/model"])
def test_what_is_described_is_there(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    described = document()["paths"][path]["get"]["responses"]["200"]
    assert response.headers["content-type"].partition(";")[0] in described["content"]
    assert set(described["headers"]) <= set(response.headers)
