"""The API document: FastAPI derives it from the routes, and this adds what their types cannot express."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from serving import errors
from serving.bundle.labels import NEW_LABEL
from serving.errors import RequestError
from serving.http.schemas import SCHEMA, error_answer

if TYPE_CHECKING:
    from serving.http.guards import GuardedPaths

REQUEST_ID = "5f2c9a7b1e604d83"
FILE_SCHEMA = {"type": "string", "format": "binary"}

EXAMPLES: dict[type[RequestError], tuple[str, str, str]] = {
    errors.MalformedRequestError: ("form must hold one file", "2 files", "one file"),
    errors.UnauthorizedError: ("predictions need an API key", "none that is valid", "authorization: Bearer KEY"),
    errors.AdminTokenError: ("the admin token is needed", "none that is valid", "authorization: Bearer TOKEN"),
    errors.AdminOffError: ("the admin routes are disabled", "no admin token", "OPENWORLD_ADMIN_TOKEN set"),
    errors.CrossSiteError: ("requested by another site", "cross-site", "the same site, or a program"),
    errors.NoSuchItemError: ("not in the quarantine", "no item 99", "what /unknowns/groups lists"),
    errors.MethodError: ("the page takes another method", "PUT", "POST"),
    errors.SwapError: ("nothing to roll back to", "no previous bundle", "a rollback after at least one swap"),
    errors.QuarantineOffError: ("no quarantine", "OPENWORLD_QUARANTINE_URL not set", "a server with it set"),
    errors.AlreadyLearnedError: ("learned already", "item 17 was learned as '8'", "images that are not learned yet"),
    errors.TeachOffError: ("teaching is off", "a bundle without a trunk", "a bundle of photos"),
    errors.TeachBusyError: ("another job is running", "job 7 (learn) of ada, begun 3 seconds ago", "one at a time"),
    errors.TeachChangedError: ("another version is served by now", "859549a0961c by bob", "learn again"),
    errors.NothingToLearnError: ("nothing to learn", "no new example", "label images first"),
    errors.GateError: ("earlier classes would lose too much", "'cat' 97 % -> 81 %", "force=true, or other examples"),
    errors.JobStateError: ("the job cannot be accepted", "job 7 is discarded", "a finished job"),
    errors.ClassExistsError: ("the class exists", "'cow'", "a new name"),
    errors.TooManyBytesError: ("body too large", "41943040 bytes", "up to 33554432 bytes for this content type"),
    errors.TooManyPixelsError: ("image too large", "12000 x 12000 pixels", "up to 50000000 pixels"),
    errors.TooManyImagesError: ("too many images", "65", "1 to 64"),
    errors.MediaTypeError: ("body cannot be read", "Content-Type text/plain", "application/json"),
    errors.ImageFormatError: ("not a supported image", "content that starts with b'GIF89a'", "PNG, JPEG, WebP, BMP"),
    errors.EmptyImageError: ("no image", "0 bytes", "1 to 33554432 bytes"),
    errors.BrokenImageError: ("image cannot be read", "300 bytes of PNG", "a complete, undamaged file"),
    errors.ParameterError: ("no such task", "task=9", "0 to 3"),
    errors.BadLabelError: ("label cannot be used", "label is ''", NEW_LABEL),
    errors.BundleRefusedError: ("worker 4711 refused the bundle", "rule.json: corrupt", "a complete bundle"),
    errors.OutputError: ("the network failed on this image", "NaN or infinity", "finite numbers"),
    errors.ServerError: ("the server failed", "an error", "see its log"),
    errors.BusyError: ("too much to do", "1 more, while 128 are in progress", "128 images at a time in this worker"),
    errors.QuarantineAwayError: ("the quarantine is unavailable", "database is locked", "the same request again"),
    errors.DeadlineError: ("the deadline passed", "no answer", "30 seconds from the request's head to its answer"),
}
"""Problem, what was received, and what is allowed."""

TAGS = {
    "Predictions": "Classify images, or find that they are unknown.",
    "Model": "The model that is served, and whether the images are still like those before.",
    "Open Inference Protocol": "Version 2 over REST, for clients of KServe, Triton and MLServer.",
    "Teaching": "Teach the server classes without a new run. Needs the admin token.",
    "Unknown images": "Images that the model did not know. Needs the admin token.",
    "Administration": "Swap the model. Needs the admin token.",
    "Health": "For probes and scrapers.",
}
"""Group of routes, which their router names -> what it is for."""

_KEY_SECURITY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"key": []}]
"""The empty entry: most servers ask for no key."""
_ADMIN_SECURITY: list[dict[str, list[str]]] = [{"admin": []}, {"admin_page": []}]
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "admin": {"type": "http", "scheme": "bearer", "description": "the admin token"},
    "admin_page": {"type": "http", "scheme": "basic", "description": "any name, with the admin token as password"},
}


def error_responses(*kinds: type[RequestError]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route for these errors, for FastAPI; every route may also answer 405 and 500."""
    examples = [_example(kind) for kind in (*kinds, errors.MethodError, errors.ServerError)]
    statuses = sorted({error.status for error in examples})
    return {status: _error_response([error for error in examples if error.status == status]) for status in statuses}


def file_response(description: str, *media_types: str, **numbers: int) -> dict[int | str, dict[str, Any]]:
    """A successful response that is a file; `numbers` are examples of headers, with underscores for hyphens."""
    content = {kind: {"schema": FILE_SCHEMA} for kind in media_types}
    headers = {name.replace("_", "-"): _header("integer", value) for name, value in numbers.items()}
    return {200: {"description": description, "content": content, "headers": headers}}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application, whose `state.guarded` are the guarded paths."""
    guarded: GuardedPaths = app.state.guarded
    described = get_openapi(
        title="openworld",
        version=str(SCHEMA),
        description="Classifies an image, or reports that it belongs to none of the learned classes.",
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    described["components"]["securitySchemes"] = _SECURITY_SCHEMES
    described["tags"] = [{"name": name, "description": about} for name, about in TAGS.items()]
    for path, operations in described["paths"].items():
        for operation in operations.values():
            if path.startswith(guarded.key):
                operation["security"] = _KEY_SECURITY
                operation.setdefault("parameters", []).append(_REQUEST_ID_PARAMETER)
            if path.startswith(guarded.admin):
                operation["security"] = _ADMIN_SECURITY
            for response in operation["responses"].values():
                response["headers"] = {**_HEADERS, **response.get("headers", {})}
    return described


def _example(kind: type[RequestError]) -> RequestError:
    problem, got, allowed = EXAMPLES[kind]
    return kind(problem, got=got, allowed=allowed)


def _error_response(examples: list[RequestError]) -> dict[str, Any]:
    shown = {error.code: {"value": error_answer(error, REQUEST_ID).model_dump(mode="json")} for error in examples}
    headers = {name: _header("string", value) for error in examples for name, value in (error.headers or {}).items()}
    schema = {"$ref": "#/components/schemas/ErrorAnswer"}
    return {
        "description": ", or ".join(error.__doc__ or error.code for error in examples),
        "headers": headers,
        "content": {"application/json": {"schema": schema, "examples": shown}},
    }


def _header(kind: str, value: Any) -> dict[str, Any]:
    return {"schema": {"type": kind}, "example": value}


_HEADERS = {"x-request-id": _header("string", REQUEST_ID), "x-openworld-schema": _header("integer", SCHEMA)}
_REQUEST_ID_PARAMETER = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,64}$"},
    "description": "returned in the response and logged; random if it is not given",
    "example": REQUEST_ID,
}
