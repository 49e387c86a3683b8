"""From an HTTP request to one image file and one question; nothing is fetched, no body is read past its limit."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import anyio.to_thread
from pydantic import ValidationError
from starlette.datastructures import QueryParams, UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from serving.answer import Question
from serving.errors import MalformedRequestError, MediaTypeError, ParameterError, RequestError, TooManyBytesError
from serving.preprocess import LIMITS
from serving.runtime import Model
from serving.schemas import ImageBody

ENVELOPE = 64 * 1024
"""Room around the image: form boundaries and part headers, or JSON."""

BODY_FORMS = "multipart/form-data with one file, image/* or application/octet-stream, or JSON with base64 in `image`"
PARAMETERS: dict[str, Callable[[str], int | float]] = {"task": int, "alpha": float, "top": int}


def read_question(model: Model, query: QueryParams) -> Question:
    """What the query string asks for; a name that is not known would otherwise be ignored in silence."""
    asked: dict[str, Any] = {}
    for name, text in query.multi_items():
        if name not in PARAMETERS or name in asked:
            problem = "parameter given twice" if name in asked else "no such parameter"
            raise ParameterError(problem, got=name, allowed=f"{', '.join(PARAMETERS)}, each once")
        number = PARAMETERS[name]
        try:
            asked[name] = number(text)
        except ValueError:
            kind = "a whole number" if number is int else "a number"
            raise ParameterError("parameter cannot be read", got=f"{name}={text}", allowed=kind) from None
    return Question.ask(model, **asked)


async def read_image(request: Request) -> bytes:
    """The bytes of the one image in a request, whichever of the three forms it has."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if media_type == "multipart/form-data":
            return await _from_form(_limited(request, LIMITS.size + ENVELOPE))
        if media_type == "application/json":
            body = await _limited(request, LIMITS.size * 4 // 3 + ENVELOPE).body()
            return await anyio.to_thread.run_sync(_from_json, body)
        if media_type in ("", "application/octet-stream") or media_type.startswith("image/"):
            return await _limited(request, LIMITS.size).body()
    except ClientDisconnect:
        raise MalformedRequestError("body incomplete", got="a closed connection", allowed=BODY_FORMS) from None
    raise MediaTypeError("body cannot be read", got=f"Content-Type {media_type}", allowed=BODY_FORMS)


def _limited(request: Request, limit: int) -> Request:
    """The same request, refusing to be read past `limit` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_many_bytes(announced, limit)
    return Request(request.scope, _counted(request.receive, limit))


def _counted(receive: Receive, limit: int) -> Receive:
    read = 0

    async def counting() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise _too_many_bytes(f"at least {read}", limit)
        return message

    return counting


def _too_many_bytes(got: str, limit: int) -> TooManyBytesError:
    return TooManyBytesError("body too large", got=f"{got} bytes", allowed=f"up to {limit} bytes for this content type")


async def _from_form(request: Request) -> bytes:
    try:
        async with request.form(max_files=8, max_fields=8) as form:
            parts = form.multi_items()
            files = [part for _, part in parts if isinstance(part, UploadFile)]
            if len(files) == len(parts) == 1:
                return await files[0].read()
    except (RequestError, ClientDisconnect):
        raise
    except Exception as error:
        # Broken forms surface as exceptions of the framework, of its parser and of the codecs.
        raise MalformedRequestError("form cannot be read", got=_said(error), allowed="one file") from error
    raise MalformedRequestError(
        "form must hold one file and nothing else",
        got=f"{len(files)} files and {len(parts) - len(files)} text fields",
        allowed=f"one file; {', '.join(PARAMETERS)} go into the query string",
    )


def _said(error: Exception) -> str:
    return str(getattr(error, "detail", "") or error or type(error).__name__)


def _from_json(body: bytes) -> bytes:
    try:
        text = ImageBody.model_validate_json(body).image
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        got = " ".join([first["msg"], *map(str, first["loc"])])
        raise MalformedRequestError("JSON body cannot be read", got=got, allowed='{"image": "<base64>"}') from None
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise MalformedRequestError("data: URL cannot be read", got=head, allowed="data:image/...;base64,...")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise MalformedRequestError("image is not base64", got=str(error), allowed="base64 of an image file") from None
