"""The API's description: BentoML's own, with the body forms, parameters and errors that it cannot see."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from serving.answer import DEFAULT_TOP
from serving.schemas import Answer, ErrorAnswer, ImageBody, ModelDescription

_REF = "#/components/schemas/{model}"
_FILE = {"type": "string", "format": "binary"}
_ERRORS = {
    400: "the request cannot be taken apart",
    413: "too many bytes or too many pixels",
    415: "neither a body form nor an image format that is read here",
    422: "the image is broken or a parameter is out of range",
    500: "the model failed",
}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add to an OpenAPI document what `/predict` and `/model` really take and give."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in (Answer, ErrorAnswer, ImageBody, ModelDescription):
        schema = model.model_json_schema(ref_template=_REF, mode="serialization")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    paths = document.setdefault("paths", {})
    paths["/predict"] = {"post": {**paths.get("/predict", {}).get("post", {}), **_predict()}}
    paths["/model"] = {"get": {"summary": "What is being served", "responses": {"200": _json(ModelDescription)}}}
    return document


def _predict() -> dict[str, Any]:
    form = {"type": "object", "properties": {"image": _FILE}, "required": ["image"]}
    return {
        "summary": "What an image shows, or that it is unknown",
        "parameters": [
            _parameter("task", {"type": "integer", "minimum": 0}, "answer within this task"),
            _parameter(
                "alpha",
                {"type": "number", "minimum": 0, "maximum": 1, "exclusiveMinimum": True, "exclusiveMaximum": True},
                "share of known images that may be called unknown; the model's own by default",
            ),
            _parameter("top", {"type": "integer", "minimum": 1, "default": DEFAULT_TOP}, "how many classes to list"),
        ],
        "requestBody": {
            "required": True,
            "description": "One PNG, JPEG, WebP or BMP image, told by its content.",
            "content": {
                "multipart/form-data": {"schema": form},
                "image/*": {"schema": _FILE},
                "application/octet-stream": {"schema": _FILE},
                "application/json": {"schema": _reference(ImageBody)},
            },
        },
        "responses": {
            "200": _json(Answer),
            **{str(status): _json(ErrorAnswer, description) for status, description in _ERRORS.items()},
        },
    }


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def _json(model: type[BaseModel], description: str | None = None) -> dict[str, Any]:
    return {
        "description": description or model.__doc__ or model.__name__,
        "content": {"application/json": {"schema": _reference(model)}},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
