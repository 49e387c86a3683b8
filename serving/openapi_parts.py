"""Pieces of an OpenAPI document, and what all its operations have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode

from serving.errors import RequestError
from serving.schemas import SCHEMA, ErrorAnswer, error_answer

_REF = "#/components/schemas/{model}"
A_FILE = "the bytes of seven.png"
"""What stands for bytes where only text can."""
REQUEST_ID = "5f2c9a7b1e604d83"
ADMIN_ONLY: list[dict[str, list[str]]] = [{"admin": []}, {"admin_page": []}]
"""Who may: by the admin token alone, or as a browser asks for it."""


def schemas(models: Iterable[type[BaseModel]], mode: JsonSchemaMode = "serialization") -> dict[str, Any]:
    """The models by name, with all that they are made of; `validation` says what may be left out of a request."""
    found: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REF, mode=mode)
        found.update(schema.pop("$defs", {}))
        found[model.__name__] = schema
    return found


def with_examples(found: dict[str, Any]) -> dict[str, Any]:
    """The same schemas: a field that is made of others shows what these show."""
    for schema in found.values():
        for field in schema.get("properties", {}).values():
            field.setdefault("examples", [_shown(field, found)])
    return found


def _shown(part: dict[str, Any], found: dict[str, Any]) -> Any:
    if part.get("examples"):
        return part["examples"][0]
    if "$ref" in part:
        return _shown(found[part["$ref"].rpartition("/")[2]], found)
    if "anyOf" in part:
        return _shown(part["anyOf"][0], found)
    if part.get("type") == "array":
        return [_shown(part["items"], found)]
    return {name: _shown(field, found) for name, field in part["properties"].items()}


def parameter(
    name: str, schema: dict[str, Any], description: str, example: Any, place: str = "query"
) -> dict[str, Any]:
    """In the query string, where it may be left out, or in the path."""
    given = {"name": name, "in": place, "required": place == "path", "schema": schema}
    return {**given, "description": description, "example": example}


def errors(
    statuses: Iterable[int], meanings: Mapping[int, str], examples: Sequence[RequestError]
) -> dict[str, dict[str, Any]]:
    """The responses that tell why there is no answer."""
    return {str(status): _error(meanings[status], of_status(status, examples)) for status in statuses}


def of_status(status: int, examples: Sequence[RequestError]) -> list[RequestError]:
    return [error for error in examples if error.status == status]


def _error(meaning: str, examples: list[RequestError]) -> dict[str, Any]:
    shown = {error.code: {"value": error_answer(error, REQUEST_ID).model_dump(mode="json")} for error in examples}
    headers = _headers()
    for error in examples:
        headers.update({name: _header("string", value) for name, value in error.headers.items()})
    content = {"application/json": {"schema": reference(ErrorAnswer), "examples": shown}}
    return {"description": meaning, "headers": headers, "content": content}


def json(model: type[BaseModel], shown: Any = None) -> dict[str, Any]:
    """A response of that shape."""
    content = {"application/json": {"schema": reference(model), "example": shown or example(model)}}
    return {"description": model.__doc__ or model.__name__, "headers": _headers(), "content": content}


def file(description: str, example: str, *media_types: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """A response that is no JSON; text, unless the schema says otherwise."""
    shown = {"schema": schema or {"type": "string"}, "example": example}
    content = dict.fromkeys(media_types, shown)
    return {"description": description, "headers": _headers(), "content": content}


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def example(model: type[BaseModel]) -> dict[str, Any]:
    """What the fields' own examples make together."""
    return {field.alias or name: _value(field) for name, field in model.model_fields.items()}


def _headers() -> dict[str, Any]:
    return {"x-request-id": _header("string", REQUEST_ID), "x-openworld-schema": _header("integer", SCHEMA)}


def _header(kind: str, value: Any) -> dict[str, Any]:
    return {"schema": {"type": kind}, "example": value}


def _value(field: Any) -> Any:
    if field.examples:
        return field.examples[0]
    inner = getattr(field.annotation, "__args__", None)
    return [example(inner[0])] if inner else example(field.annotation)
