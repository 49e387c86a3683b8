"""From an HTTP request to image files and a question; nothing is fetched, no body is read past its limit."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import QueryParams
from starlette.types import Receive

from serving.answer import Question
from serving.errors import (
    ClientGoneError,
    MalformedRequestError,
    MediaTypeError,
    ParameterError,
    RequestError,
    TooManyBytesError,
    TooManyImagesError,
)
from serving.forms import read_files
from serving.held import Take
from serving.runtime import Model
from serving.schemas import ImageBody, ImagesBody

ENVELOPE = 64 * 1024
"""Room around the image: form boundaries and part headers, or JSON."""
FEW_PARTS = 16
"""Commas and opening brackets of a JSON body that holds one thing; of each image in a list it may have four more."""
_WHITESPACE = b" \t\r\n\f\v"

FORM, JSON, RAW = "multipart/form-data", "application/json", "application/octet-stream"
ONE_FORMS = f"{FORM} with one file, image/* or {RAW}, or JSON with base64 in `image`"
MANY_FORMS = f"{FORM} with several files, or JSON with a list of base64 in `images`"
PARAMETERS: dict[str, Callable[[str], int | float]] = {"task": int, "alpha": float, "top": int}

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class Upload:
    """A body that was read, and not yet looked into."""

    content_type: str
    body: bytes

    @property
    def media_type(self) -> str:
        return media_type(self.content_type)

    def image(self) -> bytes:
        """The one image in it, whichever of the three forms it has."""
        if self.media_type == FORM:
            files = read_files(self.body, self.content_type, most=8)
            if len(files) != 1:
                raise MalformedRequestError("form must hold one file", got=f"{len(files)} files", allowed="one file")
            return files[0]
        if self.media_type == JSON:
            return _from_base64(from_json(ImageBody, self.body, '{"image": "<base64>"}', FEW_PARTS).image)
        return self.body

    def images(self, most: int) -> list[bytes | RequestError]:
        """All images in it; what is wrong with one of them stands in its place."""
        if self.media_type == FORM:
            images: list[bytes | RequestError] = [*read_files(self.body, self.content_type, most)]
        else:
            allowed = '{"images": ["<base64>", ...]}'
            texts = list(from_json(ImagesBody, self.body, allowed, FEW_PARTS + 4 * most).images)
            if len(texts) > most:
                raise TooManyImagesError("too many images", got=str(len(texts)), allowed=f"1 to {most}")
            # Each text makes room for its image.
            images = [_or_error(texts.pop(0)) for _ in range(len(texts))]
        if not images:
            raise MalformedRequestError("no images", got="0 images", allowed=f"1 to {most}")
        return images


def media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def read_question(model: Model, query: bytes) -> Question:
    """What the query string asks for; a name that is not known would otherwise be ignored in silence."""
    asked: dict[str, Any] = {}
    for name, text in QueryParams(query).multi_items():
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


def limit_for_one(content_type: str, size: int) -> int:
    """How many bytes a body with one image of `size` bytes may have, or a MediaTypeError."""
    kind = media_type(content_type)
    if kind == FORM:
        return size + ENVELOPE
    if kind == JSON:
        return size * 4 // 3 + ENVELOPE
    if kind in ("", RAW) or kind.startswith("image/"):
        return size
    raise MediaTypeError("body cannot be read", got=f"Content-Type {kind}", allowed=ONE_FORMS)


def limit_for_many(content_type: str, size: int) -> int:
    """`size`, if several images can be read from such a body."""
    kind = media_type(content_type)
    if kind in (FORM, JSON):
        return size
    raise MediaTypeError("body cannot be read", got=f"Content-Type {kind or 'not given'}", allowed=MANY_FORMS)


async def read_body(receive: Receive, announced: bytes, limit: int, take: Take = lambda size: None) -> bytes:
    """The whole body; no more than `limit` bytes are ever held, whatever was announced, and all that `take` allows."""
    if announced.isdigit() and int(announced) > limit:
        raise _too_many_bytes(announced.decode(), limit)
    chunks: list[bytes] = []
    held = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("body incomplete", got="a closed connection", allowed="a whole body")
        chunk = message.get("body", b"")
        held += len(chunk)
        if held > limit:
            raise _too_many_bytes(f"at least {held}", limit)
        take(len(chunk))
        chunks.append(chunk)
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_many_bytes(got: str, limit: int) -> TooManyBytesError:
    return TooManyBytesError("body too large", got=f"{got} bytes", allowed=f"up to {limit} bytes for this content type")


def from_json(model: type[Body], body: bytes, allowed: str, most_parts: int) -> Body:
    """What a JSON body says, or a MalformedRequestError."""
    # Every little value takes many times its two bytes once it is parsed, and hundreds of times if it is an error.
    parts = body.count(b",") + body.count(b"[") + body.count(b"{")
    if parts > most_parts:
        got = f"{parts} commas and opening brackets"
        raise MalformedRequestError("JSON body has too many parts", got=got, allowed=f"{allowed}, up to {most_parts}")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        got = " ".join([first["msg"], *map(str, first["loc"])])
        raise MalformedRequestError("JSON body cannot be read", got=got, allowed=allowed) from None


def _from_base64(text: str) -> bytes:
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise MalformedRequestError("data: URL cannot be read", got=head, allowed="data:image/...;base64,...")
    try:
        # Without a list of the pieces, which may be as many as the letters.
        return base64.b64decode(text.encode("ascii").translate(None, _WHITESPACE), validate=True)
    except ValueError as error:
        raise MalformedRequestError("image is not base64", got=str(error), allowed="base64 of an image file") from None


def _or_error(text: str) -> bytes | RequestError:
    try:
        return _from_base64(text)
    except RequestError as error:
        return error.alone()
