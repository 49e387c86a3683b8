"""The API's description. BentoML's own sees neither our body forms nor our parameters, headers and errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from serving.answer import DEFAULT_TOP
from serving.errors import (
    BrokenImageError,
    BusyError,
    DeadlineError,
    ImageFormatError,
    MalformedRequestError,
    MethodError,
    OutputError,
    ParameterError,
    RequestError,
    ServerError,
    TooManyBytesError,
    TooManyImagesError,
    TooManyPixelsError,
    UnauthorizedError,
)
from serving.schemas import (
    SCHEMA,
    Answer,
    Answers,
    ErrorAnswer,
    ImageBody,
    ImagesBody,
    ModelDescription,
    error_answer,
)

_REF = "#/components/schemas/{model}"
_FILE = {"type": "string", "format": "binary"}
_REQUEST_ID = "5f2c9a7b1e604d83"
_MEANINGS = {
    400: "the request cannot be taken apart",
    401: "no valid API key; asked for only where the server has one",
    405: "the page takes another method",
    413: "too many bytes, pixels or images",
    415: "neither a body form nor an image format that is read here",
    422: "the image is broken or a parameter is out of range",
    500: "the model or the server failed",
    503: "too much to do; send the same request again after Retry-After seconds",
    504: "not answered before the deadline",
}
_EXAMPLES: list[RequestError] = [
    MalformedRequestError("form must hold one file", got="2 files", allowed="one file"),
    UnauthorizedError("predictions need an API key", got="none that is valid", allowed="authorization: Bearer KEY"),
    MethodError("the page takes another method", got="GET", allowed="POST"),
    TooManyBytesError("body too large", got="20971520 bytes", allowed="up to 10485760 bytes for this content type"),
    TooManyPixelsError("image too large", got="12000 x 12000 pixels", allowed="up to 16000000 pixels"),
    TooManyImagesError("too many images", got="65", allowed="1 to 64"),
    ImageFormatError("not an image that is read here", got="content that starts with b'GIF89a'", allowed="PNG, JPEG"),
    BrokenImageError("image cannot be read", got="300 bytes of PNG", allowed="a complete, undamaged file"),
    ParameterError("no such task", got="task=9", allowed="0 to 3"),
    OutputError("the network failed on this image", got="a number not finite", allowed="finite numbers"),
    ServerError("the server failed", got="status 500", allowed="see its log"),
    BusyError("too much to do", got="1 more beside 128", allowed="128 images at a time in this worker", retry_after=1),
    DeadlineError("the deadline passed", got="no answer", allowed="30 seconds from the request's head to its answer"),
]
_EVERYWHERE = (405, 500)
_PREDICTION = (400, 401, 405, 413, 415, 422, 500, 503, 504)


def document() -> dict[str, Any]:
    """The whole API, as OpenAPI."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "openworld",
            "version": str(SCHEMA),
            "description": "Says what an image shows, or that it shows nothing that was taught.",
        },
        "paths": {
            "/predict": {"post": _predict()},
            "/predict_many": {"post": _predict_many()},
            "/model": {
                "get": _page("model", "What is being served", _json(ModelDescription, _example(ModelDescription)))
            },
            "/livez": {"get": _page("livez", "The process is alive", _text("an empty line"))},
            "/healthz": {"get": _page("healthz", "The same as /livez", _text("an empty line"))},
            "/readyz": {"get": _page("readyz", "The golden images gave the golden answers", _text("an empty line"))},
            "/metrics": {"get": _page("metrics", "Metrics of all workers", _text("Prometheus' text format"))},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for model in (Answer, Answers, ErrorAnswer, ImageBody, ImagesBody, ModelDescription):
        schema = model.model_json_schema(ref_template=_REF, mode="serialization")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return schemas


def _predict() -> dict[str, Any]:
    form = {"type": "object", "properties": {"image": _FILE}, "required": ["image"]}
    return {
        "operationId": "predict",
        "summary": "What an image shows, or that it is unknown",
        "parameters": _parameters(),
        "security": _SECURITY,
        "requestBody": {
            "required": True,
            "description": "One PNG, JPEG, WebP or BMP image, told by its content.",
            "content": {
                "multipart/form-data": {"schema": form},
                "image/*": {"schema": _FILE},
                "application/octet-stream": {"schema": _FILE},
                "application/json": {"schema": _reference(ImageBody), "example": _example(ImageBody)},
            },
        },
        "responses": {"200": _json(Answer, _example(Answer)), **_errors(_PREDICTION)},
    }


def _predict_many() -> dict[str, Any]:
    form = {"type": "object", "properties": {"images": {"type": "array", "items": _FILE}}, "required": ["images"]}
    bad = error_answer(_of_status(422)[0]).model_dump(mode="json", exclude_none=True)
    return {
        "operationId": "predict_many",
        "summary": "What each of several images shows; a bad one spoils only its own answer",
        "parameters": _parameters(),
        "security": _SECURITY,
        "requestBody": {
            "required": True,
            "description": "PNG, JPEG, WebP or BMP images, each told by its content; answered in order.",
            "content": {
                "multipart/form-data": {"schema": form},
                "application/json": {"schema": _reference(ImagesBody), "example": _example(ImagesBody)},
            },
        },
        "responses": {"200": _json(Answers, {"answers": [_example(Answer), bad]}), **_errors(_PREDICTION)},
    }


_SECURITY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"key": []}]
"""An empty entry: most servers ask for no key."""


def _parameters() -> list[dict[str, Any]]:
    share = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    return [
        _parameter("task", {"type": "integer", "minimum": 0}, "answer within this task", 2),
        _parameter("alpha", share, "share of known images that may be called unknown; the model's by default", 0.05),
        _parameter("top", {"type": "integer", "minimum": 1, "default": DEFAULT_TOP}, "how many classes to list", 3),
        {
            "name": "x-request-id",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,64}$"},
            "description": "comes back in the response and stands in the log; made up where it is not given",
            "example": _REQUEST_ID,
        },
    ]


def _parameter(name: str, schema: dict[str, Any], description: str, example: float) -> dict[str, Any]:
    given = {"name": name, "in": "query", "required": False, "schema": schema}
    return {**given, "description": description, "example": example}


def _page(name: str, summary: str, response: dict[str, Any]) -> dict[str, Any]:
    return {"operationId": name, "summary": summary, "responses": {"200": response, **_errors(_EVERYWHERE)}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {str(status): _error(status) for status in statuses}


def _error(status: int) -> dict[str, Any]:
    examples = {
        error.code: {"value": error_answer(error, _REQUEST_ID).model_dump(mode="json")} for error in _of_status(status)
    }
    headers = _headers()
    for error in _of_status(status):
        headers.update({name: _header("string", value) for name, value in error.headers.items()})
    content = {"application/json": {"schema": _reference(ErrorAnswer), "examples": examples}}
    return {"description": _MEANINGS[status], "headers": headers, "content": content}


def _of_status(status: int) -> list[RequestError]:
    return [error for error in _EXAMPLES if error.status == status]


def _json(model: type[BaseModel], example: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(model), "example": example}}
    return {"description": model.__doc__ or model.__name__, "headers": _headers(), "content": content}


def _text(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "headers": _headers(),
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }


def _headers() -> dict[str, Any]:
    return {"x-request-id": _header("string", _REQUEST_ID), "x-openworld-schema": _header("integer", SCHEMA)}


def _header(kind: str, example: Any) -> dict[str, Any]:
    return {"schema": {"type": kind}, "example": example}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _example(model: type[BaseModel]) -> dict[str, Any]:
    """What the fields' own examples make together."""
    return {field.alias or name: _value(field) for name, field in model.model_fields.items()}


def _value(field: Any) -> Any:
    if field.examples:
        return field.examples[0]
    inner = getattr(field.annotation, "__args__", None)
    return [_example(inner[0])] if inner else _example(field.annotation)
