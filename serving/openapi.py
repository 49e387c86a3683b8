"""The API's description. BentoML's own sees neither our body forms nor our parameters, headers and errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from serving import openapi_parts as parts
from serving.answer import DEFAULT_TOP
from serving.errors import (
    AdminOffError,
    AdminTokenError,
    BrokenImageError,
    BundleRefusedError,
    BusyError,
    CrossSiteError,
    DeadlineError,
    EmptyImageError,
    HeadTooLargeError,
    ImageFormatError,
    MalformedRequestError,
    MediaTypeError,
    MethodError,
    OutputError,
    ParameterError,
    RequestError,
    ServerError,
    SwapError,
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
    ServerStatus,
    SwapAnswer,
    error_answer,
)
from serving.unknowns import document as unknowns

_MODELS = (Answer, Answers, ErrorAnswer, ImageBody, ImagesBody, ModelDescription, ServerStatus, SwapAnswer)
_FILE = {"type": "string", "format": "binary"}
_MEANINGS = {
    400: "the request cannot be taken apart",
    401: "no valid API key; asked for only where the server has one",
    405: "the page takes another method",
    413: "too many bytes, pixels or images",
    415: "neither a body form nor an image format that is read here",
    422: "the image is broken or a parameter is out of range",
    431: "too many bytes of headers; the connection is closed",
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
    MediaTypeError("body cannot be read", got="Content-Type text/plain", allowed="multipart/form-data, image/*, JSON"),
    ImageFormatError("not an image that is read here", got="content that starts with b'GIF89a'", allowed="PNG, JPEG"),
    EmptyImageError("no image", got="0 bytes", allowed="1 to 10485760 bytes"),
    BrokenImageError("image cannot be read", got="300 bytes of PNG", allowed="a complete, undamaged file"),
    ParameterError("no such task", got="task=9", allowed="0 to 3"),
    HeadTooLargeError("head too large", got="at least 65536 bytes", allowed="less than 65536 bytes"),
    OutputError("the network failed on this image", got="a number not finite", allowed="finite numbers"),
    ServerError("the server failed", got="status 500", allowed="see its log"),
    BusyError("too much to do", got="1 more beside 128", allowed="128 images at a time in this worker", retry_after=1),
    DeadlineError("the deadline passed", got="no answer", allowed="30 seconds from the request's head to its answer"),
]
_EVERYWHERE: list[RequestError] = [error for error in _EXAMPLES if isinstance(error, (MethodError, ServerError))]
_PREDICTION = (400, 401, 405, 413, 415, 422, 431, 500, 503, 504)
_ADMIN_MEANINGS = {
    401: "no valid admin token",
    403: "the server has no admin token, or a page of another site asked",
    405: "the page takes another method",
    409: "the workers cannot swap: there is nothing to go back to, the shelf cannot be written, one did not follow",
    415: "a body that is not JSON; none is needed",
    422: "the bundle is refused, and what was served before serves on in every worker",
    500: "the server failed",
}
_ADMIN_EXAMPLES: list[RequestError] = [
    AdminTokenError("this part needs the admin token", got="none that is valid", allowed="authorization: Bearer TOKEN"),
    AdminOffError("this part is off", got="no admin token in the server's settings", allowed="see its manual"),
    CrossSiteError("asked for by another site", got="cross-site", allowed="the same site, or a program"),
    MethodError("the page takes another method", got="PUT", allowed="POST"),
    SwapError("nothing to roll back to", got="no previous bundle", allowed="one, from the last swap"),
    MediaTypeError("body cannot be read", got="Content-Type text/plain", allowed="application/json, or no body"),
    BundleRefusedError("worker 4711 refused the bundle", got="rule.json: corrupt", allowed="a bundle that is whole"),
    ServerError("the server failed", got="status 500", allowed="see its log"),
]
_ADMIN, _SWAP = (401, 403, 405, 500), (401, 403, 405, 409, 415, 422, 500)


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
            "/model": {"get": _page("model", "What is being served", parts.json(ModelDescription))},
            "/livez": {"get": _page("livez", "The process is alive", _EMPTY)},
            "/healthz": {"get": _page("healthz", "The same as /livez", _EMPTY)},
            "/readyz": {"get": _page("readyz", "The golden images gave the golden answers", _EMPTY)},
            "/metrics": {"get": _page("metrics", "Metrics of all workers", _METRICS)},
            "/admin/reload": {"post": _admin("reload", "Serve the bundle that is there now", SwapAnswer, _SWAP)},
            "/admin/rollback": {"post": _admin("rollback", "Serve what was served before", SwapAnswer, _SWAP)},
            "/admin/status": {"get": _admin("status", "What every worker serves", ServerStatus, _ADMIN)},
            **unknowns.paths(),
        },
        "components": {
            "schemas": parts.with_examples({**parts.schemas(_MODELS), **unknowns.schemas()}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "admin": {"type": "http", "scheme": "bearer", "description": "the admin token"},
                "admin_page": {"type": "http", "scheme": "basic", "description": "any name, the admin token"},
            },
        },
    }


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
                "multipart/form-data": {"schema": form, "example": {"image": parts.A_FILE}},
                "image/*": {"schema": _FILE, "example": parts.A_FILE},
                "application/octet-stream": {"schema": _FILE, "example": parts.A_FILE},
                "application/json": {"schema": parts.reference(ImageBody), "example": parts.example(ImageBody)},
            },
        },
        "responses": {"200": parts.json(Answer), **_errors(_PREDICTION)},
    }


def _predict_many() -> dict[str, Any]:
    form = {"type": "object", "properties": {"images": {"type": "array", "items": _FILE}}, "required": ["images"]}
    bad = error_answer(parts.of_status(422, _EXAMPLES)[0]).model_dump(mode="json", exclude_none=True)
    return {
        "operationId": "predict_many",
        "summary": "What each of several images shows; a bad one spoils only its own answer",
        "parameters": _parameters(),
        "security": _SECURITY,
        "requestBody": {
            "required": True,
            "description": "PNG, JPEG, WebP or BMP images, each told by its content; answered in order.",
            "content": {
                "multipart/form-data": {"schema": form, "example": {"images": [parts.A_FILE] * 2}},
                "application/json": {"schema": parts.reference(ImagesBody), "example": parts.example(ImagesBody)},
            },
        },
        "responses": {"200": parts.json(Answers, {"answers": [parts.example(Answer), bad]}), **_errors(_PREDICTION)},
    }


_SECURITY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"key": []}]
"""An empty entry: most servers ask for no key."""


def _parameters() -> list[dict[str, Any]]:
    share = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    return [
        parts.parameter("task", {"type": "integer", "minimum": 0}, "answer within this task", 2),
        parts.parameter(
            "alpha", share, "share of known images that may be called unknown; the model's by default", 0.05
        ),
        parts.parameter(
            "top", {"type": "integer", "minimum": 1, "default": DEFAULT_TOP}, "how many classes to list", 3
        ),
        {
            "name": "x-request-id",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,64}$"},
            "description": "comes back in the response and stands in the log; made up where it is not given",
            "example": parts.REQUEST_ID,
        },
    ]


def _page(name: str, summary: str, response: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": response, **parts.errors((405, 500), _MEANINGS, _EVERYWHERE)},
    }


_EMPTY = parts.file("an empty line", "\n", "text/plain")
_METRICS = parts.file("Prometheus' text format", "openworld_queue_depth 0.0\n", "text/plain")


def _admin(name: str, summary: str, answer: type[BaseModel], statuses: tuple[int, ...]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "security": parts.ADMIN_ONLY,
        "responses": {"200": parts.json(answer), **parts.errors(statuses, _ADMIN_MEANINGS, _ADMIN_EXAMPLES)},
    }


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return parts.errors(statuses, _MEANINGS, _EXAMPLES)
