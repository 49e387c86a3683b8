"""From a request body to image files; nothing is fetched, and no body is read beyond its limit."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive

from serving.errors import (
    ClientGoneError,
    MalformedRequestError,
    MediaTypeError,
    RequestError,
    TooManyBytesError,
    TooManyImagesError,
)
from serving.http.forms import read_files
from serving.http.inflight_bytes import Reserve
from serving.http.schemas import ImageBody, ImagesBody

ENVELOPE = 64 * 1024
"""Bytes that a body may have in addition to the image: form boundaries and part headers, or JSON."""
FEW_PARTS = 16
"""Commas and opening brackets that a JSON body with one image may have; each image in a list allows four more."""
_WHITESPACE = b" \t\r\n\f\v"

FORM, JSON, RAW = "multipart/form-data", "application/json", "application/octet-stream"
ONE_FORMS = f"{FORM} with one file, image/* or {RAW}, or JSON with base64 in `image`"
MANY_FORMS = f"{FORM} with several files, or JSON with a list of base64 in `images`"

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class Upload:
    """A body that was read and not yet parsed."""

    content_type: str
    body: bytes

    def image(self) -> bytes:
        """The one image in the body, in any of the three forms."""
        kind = media_type(self.content_type)
        if kind == FORM:
            files = read_files(self.body, self.content_type, most=8)
            if len(files) != 1:
                raise MalformedRequestError("form must hold one file", got=f"{len(files)} files", allowed="one file")
            return files[0]
        if kind == JSON:
            return from_base64(from_json(ImageBody, self.body, '{"image": "<base64>"}', FEW_PARTS).image)
        return self.body

    def images(self, most: int) -> list[bytes | RequestError]:
        """All images in the body; an invalid one is an error in its place."""
        if media_type(self.content_type) == FORM:
            images: list[bytes | RequestError] = [*read_files(self.body, self.content_type, most)]
        else:
            allowed = '{"images": ["<base64>", ...]}'
            texts = list(from_json(ImagesBody, self.body, allowed, FEW_PARTS + 4 * most).images)
            if len(texts) > most:
                raise TooManyImagesError("too many images", got=str(len(texts)), allowed=f"1 to {most}")
            # Each text is released when its image is decoded.
            images = [_or_error(texts.pop(0)) for _ in range(len(texts))]
        if not images:
            raise MalformedRequestError("no images", got="0 images", allowed=f"1 to {most}")
        return images


def media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def limit_for_one(content_type: str, size: int) -> int:
    """The largest body with one image of `size` bytes; a MediaTypeError if the content type is not accepted."""
    kind = media_type(content_type)
    if kind == FORM:
        return size + ENVELOPE
    if kind == JSON:
        return size * 4 // 3 + ENVELOPE
    if kind in ("", RAW) or kind.startswith("image/"):
        return size
    raise MediaTypeError("body cannot be read", got=f"Content-Type {kind}", allowed=ONE_FORMS)


def limit_for_many(content_type: str, size: int) -> int:
    """`size`; a MediaTypeError if several images cannot be read from such a body."""
    kind = media_type(content_type)
    if kind in (FORM, JSON):
        return size
    raise MediaTypeError("body cannot be read", got=f"Content-Type {kind or 'not given'}", allowed=MANY_FORMS)


async def read_body(receive: Receive, announced: str, limit: int, reserve: Reserve) -> bytes:
    """The whole body, of at most `limit` bytes whatever was announced; `reserve` is called for every chunk."""
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise _too_many_bytes(announced, limit)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("body incomplete", got="a closed connection", allowed="a complete body")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_many_bytes(f"at least {size}", limit)
        reserve(len(chunk))
        chunks.append(chunk)
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_many_bytes(got: str, limit: int) -> TooManyBytesError:
    return TooManyBytesError("body too large", got=f"{got} bytes", allowed=f"up to {limit} bytes for this content type")


def from_json(model: type[Body], body: bytes, allowed: str, most_parts: int) -> Body:
    """Parse a JSON body, or raise a MalformedRequestError."""
    # Each small value takes many times its two bytes once it is parsed, and hundreds of times if it is invalid.
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


def from_base64(text: str) -> bytes:
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise MalformedRequestError("data: URL cannot be read", got=head, allowed="data:image/...;base64,...")
    try:
        # Without a list of pieces, which could be as many as the letters.
        return base64.b64decode(text.encode("ascii").translate(None, _WHITESPACE), validate=True)
    except ValueError as error:
        raise MalformedRequestError("image is not base64", got=str(error), allowed="base64 of an image file") from None


def _or_error(text: str) -> bytes | RequestError:
    try:
        return from_base64(text)
    except RequestError as error:
        return error.without_traceback()
