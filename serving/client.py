"""A typed client, in two flavours:

    with Client("http://127.0.0.1:3000") as client:
        answer = client.predict("photo.jpg")

    async with AsyncClient("http://127.0.0.1:3000") as client:
        answer = await client.predict("photo.jpg")

Requests and answers are made and read in one place; the two flavours only send and wait. What fails on the way there,
or meets a server that has too much to do, is sent again: every request may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import httpx
from PIL import Image, ImageOps
from pydantic import BaseModel, ValidationError

from serving.errors import RequestError
from serving.schemas import SCHEMA, Answer, Answers, ErrorAnswer, ErrorDetail, ModelDescription

Picture = bytes | str | os.PathLike[str] | Image.Image
"""An image file's bytes, its path, or an image in memory."""

TRY_AGAIN = frozenset((429, 503))
UNREACHABLE, UNREADABLE = "unreachable", "unreadable_answer"
"""Codes of our own, for a server that says nothing, and for one that says what we cannot read."""

_TRANSIENT = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
_PNG_MODES = frozenset(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"))
_STATUS = {error.code: error.status for error in RequestError.__subclasses__()}

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)


class ServiceError(Exception):
    """Why there is no answer; `code` is short and stable, for programs."""

    def __init__(self, detail: ErrorDetail, *, status: int | None, request_id: str | None) -> None:
        super().__init__(detail.message)
        self.code = detail.code
        self.message = detail.message
        self.got = detail.got
        self.allowed = detail.allowed
        self.status = status
        """None where nothing came back; for one image of several, what it would have got alone."""
        self.request_id = request_id


@dataclass(frozen=True)
class Retries:
    """How often and when a request is sent again: after `first` seconds, then twice as long each time, less a bit."""

    attempts: int = 5
    first: float = 0.1
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first <= self.longest:
            raise ValueError(f"allowed: attempts from 1, 0 <= first <= longest, such as Retries(); got {self}")

    def pause(self, attempt: int, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds to wait after the `attempt`-th try (1 is the first); None if its outcome is final."""
        asked = 0.0
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in TRY_AGAIN:
                return None
            asked = _retry_after(outcome)
        elif not isinstance(outcome, _TRANSIENT):
            return None
        # A server that wants to be left alone for longer than we wait is not asked sooner.
        if attempt >= self.attempts or asked > self.longest:
            return None
        # Random, so that all who were sent away do not come back at the same moment.
        return asked + random.uniform(0.5, 1.0) * min(self.first * 2.0 ** (attempt - 1), self.longest)


@dataclass(frozen=True)
class _Ask(Generic[Result]):
    """A request, and how its outcome becomes a result or a ServiceError."""

    request: httpx.Request
    read: Callable[[httpx.Response], Result]

    def result(self, outcome: httpx.Response | httpx.TransportError) -> Result:
        if isinstance(outcome, httpx.Response):
            return self.read(outcome)
        detail = _detail(
            UNREACHABLE,
            f"no answer from {self.request.url}",
            got=f"{type(outcome).__name__} {outcome}".strip(),
            allowed="a server that answers in time",
        )
        raise ServiceError(detail, status=None, request_id=self.request.headers["x-request-id"]) from outcome


class _Asks:
    """Makes requests, with what all of them share."""

    def __init__(self, http: httpx.Client | httpx.AsyncClient) -> None:
        self._http = http

    def predict(self, image: Picture, request_id: str | None, parameters: dict[str, Any]) -> _Ask[Answer]:
        body = {"content": _file(image), "headers": {"content-type": "application/octet-stream"}}
        return _Ask(self._post("/predict", request_id, parameters, body), partial(_read, Answer))

    def predict_many(
        self, images: Sequence[Picture], request_id: str | None, parameters: dict[str, Any]
    ) -> _Ask[list[Answer | ServiceError]]:
        body = {"files": [("image", (f"{place}", _file(image))) for place, image in enumerate(images)]}
        return _Ask(self._post("/predict_many", request_id, parameters, body), _read_many)

    def model(self) -> _Ask[ModelDescription]:
        request = self._http.build_request("GET", "/model", headers=_identity(None))
        return _Ask(request, partial(_read, ModelDescription))

    def ready(self) -> httpx.Request:
        return self._http.build_request("GET", "/readyz", headers=_identity(None))

    def _post(
        self, path: str, request_id: str | None, parameters: dict[str, Any], body: dict[str, Any]
    ) -> httpx.Request:
        headers = {**body.pop("headers", {}), **_identity(request_id)}
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._http.build_request("POST", path, params=given, headers=headers, **body)


class Client:
    """Asks a server and waits for it."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 30.0, retries: Retries | None = None
    ) -> None:
        self._http = httpx.Client(**_settings(url, api_key, timeout))
        self._asks = _Asks(self._http)
        self._retries = retries or Retries()

    def predict(
        self,
        image: Picture,
        *,
        task: int | None = None,
        alpha: float | None = None,
        top: int | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """What an image shows, or that it is unknown."""
        return self._result(self._asks.predict(image, request_id, {"task": task, "alpha": alpha, "top": top}))

    def predict_many(
        self,
        images: Sequence[Picture],
        *,
        task: int | None = None,
        alpha: float | None = None,
        top: int | None = None,
        request_id: str | None = None,
    ) -> list[Answer | ServiceError]:
        """The same for several images, in order; a bad one gives an error in its own place."""
        if not images:
            return []
        return self._result(self._asks.predict_many(images, request_id, {"task": task, "alpha": alpha, "top": top}))

    def model(self) -> ModelDescription:
        """What is being served."""
        return self._result(self._asks.model())

    def ready(self) -> bool:
        """Whether the server would answer now."""
        outcome = self._try(self._asks.ready())
        return isinstance(outcome, httpx.Response) and outcome.status_code == 200

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, ask: _Ask[Result]) -> Result:
        attempt = 1
        while (pause := self._retries.pause(attempt, outcome := self._try(ask.request))) is not None:
            time.sleep(pause)
            attempt += 1
        return ask.result(outcome)

    def _try(self, request: httpx.Request) -> httpx.Response | httpx.TransportError:
        try:
            return self._http.send(request)
        except httpx.TransportError as error:
            return error


class AsyncClient:
    """As `Client`, for asyncio."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 30.0, retries: Retries | None = None
    ) -> None:
        self._http = httpx.AsyncClient(**_settings(url, api_key, timeout))
        self._asks = _Asks(self._http)
        self._retries = retries or Retries()

    async def predict(
        self,
        image: Picture,
        *,
        task: int | None = None,
        alpha: float | None = None,
        top: int | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """What an image shows, or that it is unknown."""
        parameters = {"task": task, "alpha": alpha, "top": top}
        return await self._result(self._asks.predict(await _apart(image), request_id, parameters))

    async def predict_many(
        self,
        images: Sequence[Picture],
        *,
        task: int | None = None,
        alpha: float | None = None,
        top: int | None = None,
        request_id: str | None = None,
    ) -> list[Answer | ServiceError]:
        """The same for several images, in order; a bad one gives an error in its own place."""
        if not images:
            return []
        parameters = {"task": task, "alpha": alpha, "top": top}
        files = [await _apart(image) for image in images]
        return await self._result(self._asks.predict_many(files, request_id, parameters))

    async def model(self) -> ModelDescription:
        """What is being served."""
        return await self._result(self._asks.model())

    async def ready(self) -> bool:
        """Whether the server would answer now."""
        outcome = await self._try(self._asks.ready())
        return isinstance(outcome, httpx.Response) and outcome.status_code == 200

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _result(self, ask: _Ask[Result]) -> Result:
        attempt = 1
        while (pause := self._retries.pause(attempt, outcome := await self._try(ask.request))) is not None:
            await asyncio.sleep(pause)
            attempt += 1
        return ask.result(outcome)

    async def _try(self, request: httpx.Request) -> httpx.Response | httpx.TransportError:
        try:
            return await self._http.send(request)
        except httpx.TransportError as error:
            return error


def _settings(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"base_url": url, "headers": key, "timeout": timeout}


def _identity(request_id: str | None) -> dict[str, str]:
    """The same for every try of a request, so that the server's log tells them apart from others."""
    return {"x-request-id": request_id or uuid.uuid4().hex}


def _file(image: Picture) -> bytes:
    """The bytes of an image file that shows the image as it stands."""
    if isinstance(image, bytes):
        return image
    if not isinstance(image, Image.Image):
        return Path(image).read_bytes()
    # Stored as PNG, which keeps every pixel but not the note that a photograph lies on its side.
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "F":
        raise ValueError("image is of mode F, whose range is not known; convert it to one of 8 or 16 bit first")
    if upright.mode.startswith("I"):
        upright = upright.convert("I").convert("I;16")
    elif upright.mode not in _PNG_MODES:
        upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    stored = io.BytesIO()
    upright.save(stored, "PNG", compress_level=1)
    return stored.getvalue()


async def _apart(image: Picture) -> bytes:
    """The same in a thread: a disk or an encoder would hold up everything else on the event loop."""
    return image if isinstance(image, bytes) else await asyncio.to_thread(_file, image)


def _read(model: type[Body], response: httpx.Response) -> Body:
    if response.status_code != 200:
        raise _refusal(response)
    try:
        # A newer server of the same schema may say more than we know of.
        return model.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        raise _unreadable(response) from None


def _read_many(response: httpx.Response) -> list[Answer | ServiceError]:
    identity = response.headers.get("x-request-id")
    return [
        entry
        if isinstance(entry, Answer)
        else ServiceError(entry.error, status=_STATUS.get(entry.error.code), request_id=identity)
        for entry in _read(Answers, response).answers
    ]


def _refusal(response: httpx.Response) -> ServiceError:
    try:
        said = ErrorAnswer.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        # Not from our server: something stands between.
        return _unreadable(response)
    identity = said.request_id or response.headers.get("x-request-id")
    return ServiceError(said.error, status=response.status_code, request_id=identity)


def _unreadable(response: httpx.Response) -> ServiceError:
    schema = response.headers.get("x-openworld-schema", "none")
    detail = _detail(
        UNREADABLE,
        f"no answer that can be read from {response.request.url}",
        got=f"status {response.status_code}, schema {schema}, {response.text[:100]!r}",
        allowed=f"schema {SCHEMA}",
    )
    return ServiceError(detail, status=response.status_code, request_id=response.headers.get("x-request-id"))


def _detail(code: str, problem: str, *, got: str, allowed: str) -> ErrorDetail:
    return ErrorDetail(code=code, message=f"{problem}: got {got}; allowed: {allowed}", got=got, allowed=allowed)


def _retry_after(response: httpx.Response) -> float:
    """Seconds, from a number of them or a date; 0 where the server does not say."""
    text = response.headers.get("retry-after", "")
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
