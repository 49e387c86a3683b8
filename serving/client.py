"""A typed client for the HTTP API, synchronous and for asyncio:

    with Client("http://127.0.0.1:3000") as client:
        answer = client.predict("photo.jpg")

    async with AsyncClient("http://127.0.0.1:3000") as client:
        answer = await client.predict("photo.jpg")

Both share all code except sending and waiting. A request that does not reach the server, or that the server is too busy
to answer, is sent again. That is safe because predictions change nothing on the server. `teaching` has the requests
that do (`serving/teaching/client.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, TypeVar, Unpack

import httpx
from PIL import Image
from pydantic import BaseModel, ValidationError

from serving.errors import BY_CODE
from serving.http.schemas import (
    SCHEMA,
    Answer,
    Answers,
    DriftReport,
    ErrorAnswer,
    ErrorDetail,
    Explain,
    ModelDescription,
)
from serving.pictures import png_of
from serving.teaching.calls import Call
from serving.teaching.client import AsyncTeaching, Teaching

Picture = bytes | str | os.PathLike[str] | Image.Image
"""The bytes of an image file, its path, or an image in memory."""

ANSWERED, TRY_AGAIN = frozenset((200, 202)), frozenset((429, 503))
UNREACHABLE, UNREADABLE = "unreachable", "unreadable_answer"
"""Error codes of the client itself: the server did not respond, or its response cannot be parsed."""

_TRANSIENT = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
Outcome = httpx.Response | httpx.TransportError


class ServiceError(Exception):
    """Why there is no answer; `code` is short and stable, for programs."""

    def __init__(self, detail: ErrorDetail, *, status: int | None, request_id: str | None) -> None:
        super().__init__(detail.message)
        self.code = detail.code
        self.message = detail.message
        self.got = detail.got
        self.allowed = detail.allowed
        self.status = status
        """None without a response; for one image of several, the status that it would have got alone."""
        self.request_id = request_id


@dataclass(frozen=True)
class Retries:
    """How often and when a request is sent again: after `first` seconds, then twice as long each time, with jitter."""

    attempts: int = 5
    first: float = 0.1
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first <= self.longest:
            raise ValueError(f"allowed: attempts from 1, 0 <= first <= longest, such as Retries(); got {self}")

    def pause(self, attempt: int, outcome: Outcome) -> float | None:
        """Seconds to wait after the `attempt`-th attempt, counted from 1; None if its outcome is final."""
        requested = 0.0
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in TRY_AGAIN:
                return None
            requested = _retry_after(outcome)
        elif not isinstance(outcome, _TRANSIENT):
            return None
        # If the server asks for a longer pause than this client waits, there is no retry.
        if attempt >= self.attempts or requested > self.longest:
            return None
        # Random, so that refused clients do not all return at the same moment.
        return requested + random.uniform(0.5, 1.0) * min(self.first * 2.0 ** (attempt - 1), self.longest)


class PredictOptions(TypedDict, total=False):
    """The optional parameters of a prediction; all but the last are those of the API."""

    task: int | None
    alpha: float | None
    top: int | None
    explain: Explain | None
    store: bool | None
    request_id: str | None


class _BaseClient:
    """Everything except sending and waiting."""

    _transport: ClassVar[type[httpx.Client | httpx.AsyncClient]]
    _http: httpx.Client | httpx.AsyncClient

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 30.0, retries: Retries | None = None
    ) -> None:
        key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = self._transport(base_url=url, headers=key, timeout=timeout)
        self._retries = retries or Retries()

    def _one(self, image: bytes, options: PredictOptions) -> httpx.Request:
        body = {"content": image, "headers": {"content-type": "application/octet-stream"}}
        return self._post("/predict", body, **options)

    def _many(self, images: Sequence[bytes], options: PredictOptions) -> httpx.Request:
        body = {"files": [("image", (f"{place}", image)) for place, image in enumerate(images)]}
        return self._post("/predict_many", body, **options)

    def _call(self, call: Call[Any], token: str, user: str) -> httpx.Request:
        headers = {**_identity(None), "authorization": f"Bearer {token}", "x-openworld-user": user}
        if call.content_type is not None:
            headers["content-type"] = call.content_type
        return self._http.build_request(
            call.method, call.path, params=call.params, json=call.json, content=call.content, headers=headers
        )

    def _get(self, path: str) -> httpx.Request:
        return self._http.build_request("GET", path, headers=_identity(None))

    def _post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        task: int | None = None,
        alpha: float | None = None,
        top: int | None = None,
        explain: Explain | None = None,
        store: bool | None = None,
        request_id: str | None = None,
    ) -> httpx.Request:
        headers = {**body.pop("headers", {}), **_identity(request_id)}
        parameters = {"task": task, "alpha": alpha, "top": top, "explain": explain, "store": store}
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._http.build_request("POST", path, params=given, headers=headers, **body)


class Client(_BaseClient):
    """A client that blocks until the response arrives."""

    _transport = httpx.Client
    _http: httpx.Client

    def predict(self, image: Picture, **options: Unpack[PredictOptions]) -> Answer:
        """Classify an image, or find that it is unknown."""
        return self._result(self._one(_file(image), options), _parse_answer)

    def predict_many(self, images: Sequence[Picture], **options: Unpack[PredictOptions]) -> list[Answer | ServiceError]:
        """The answers for several images, in order; an invalid image yields an error in its own place."""
        files = [_file(image) for image in images]
        return self._result(self._many(files, options), _parse_answers) if files else []

    def model(self) -> ModelDescription:
        """The model that is served."""
        return self._result(self._get("/model"), _parse_model)

    def drift(self) -> DriftReport:
        """Whether the images that are answered are still like those before."""
        return self._result(self._get("/drift"), _parse_drift)

    def teaching(self, admin_token: str, user: str = "admin") -> Teaching:
        """The requests of somebody who teaches the server, under a name that its log shows."""

        def send(call: Call[Any]) -> Any:
            request, parse = self._call(call, admin_token, user), partial(_parse_called, call.result)
            return self._result(request, parse) if call.again else parse(_received(request, self._send(request)))

        return Teaching(send, _file)

    def ready(self) -> bool:
        """Whether the server would answer now."""
        return _is_ready(self._send(self._get("/readyz")))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, request: httpx.Request, parse: Callable[[httpx.Response], Result]) -> Result:
        attempt = 1
        while (pause := self._retries.pause(attempt, outcome := self._send(request))) is not None:
            time.sleep(pause)
            attempt += 1
        return parse(_received(request, outcome))

    def _send(self, request: httpx.Request) -> Outcome:
        try:
            return self._http.send(request)
        except httpx.TransportError as error:
            return error


class AsyncClient(_BaseClient):
    """The same as `Client`, for asyncio."""

    _transport = httpx.AsyncClient
    _http: httpx.AsyncClient

    async def predict(self, image: Picture, **options: Unpack[PredictOptions]) -> Answer:
        """Classify an image, or find that it is unknown."""
        return await self._result(self._one(await _file_in_thread(image), options), _parse_answer)

    async def predict_many(
        self, images: Sequence[Picture], **options: Unpack[PredictOptions]
    ) -> list[Answer | ServiceError]:
        """The answers for several images, in order; an invalid image yields an error in its own place."""
        files = [await _file_in_thread(image) for image in images]
        return await self._result(self._many(files, options), _parse_answers) if files else []

    async def model(self) -> ModelDescription:
        """The model that is served."""
        return await self._result(self._get("/model"), _parse_model)

    async def drift(self) -> DriftReport:
        """Whether the images that are answered are still like those before."""
        return await self._result(self._get("/drift"), _parse_drift)

    def teaching(self, admin_token: str, user: str = "admin") -> AsyncTeaching:
        """The requests of somebody who teaches the server, under a name that its log shows."""

        async def send(call: Call[Any]) -> Any:
            request, parse = self._call(call, admin_token, user), partial(_parse_called, call.result)
            if call.again:
                return await self._result(request, parse)
            return parse(_received(request, await self._send(request)))

        return AsyncTeaching(send, _file_in_thread)

    async def ready(self) -> bool:
        """Whether the server would answer now."""
        return _is_ready(await self._send(self._get("/readyz")))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _result(self, request: httpx.Request, parse: Callable[[httpx.Response], Result]) -> Result:
        attempt = 1
        while (pause := self._retries.pause(attempt, outcome := await self._send(request))) is not None:
            await asyncio.sleep(pause)
            attempt += 1
        return parse(_received(request, outcome))

    async def _send(self, request: httpx.Request) -> Outcome:
        try:
            return await self._http.send(request)
        except httpx.TransportError as error:
            return error


def _received(request: httpx.Request, outcome: Outcome) -> httpx.Response:
    """The response, or a ServiceError if there is none."""
    if isinstance(outcome, httpx.Response):
        return outcome
    detail = _detail(
        UNREACHABLE,
        f"no answer from {request.url}",
        got=f"{type(outcome).__name__} {outcome}".strip(),
        allowed="a response within the client's timeout",
    )
    raise ServiceError(detail, status=None, request_id=request.headers["x-request-id"]) from outcome


def _identity(request_id: str | None) -> dict[str, str]:
    """The same for every attempt of a request, so that the attempts can be found in the server's log."""
    return {"x-request-id": request_id or uuid.uuid4().hex}


def _is_ready(outcome: Outcome) -> bool:
    return isinstance(outcome, httpx.Response) and outcome.status_code == 200


def _file(image: Picture) -> bytes:
    """The bytes of an image file that shows the image upright."""
    if isinstance(image, bytes):
        return image
    if not isinstance(image, Image.Image):
        return Path(image).read_bytes()
    return png_of(image)


async def _file_in_thread(image: Picture) -> bytes:
    """Reading a file or encoding an image would block the event loop."""
    return image if isinstance(image, bytes) else await asyncio.to_thread(_file, image)


def _parse(model: type[Body], response: httpx.Response) -> Body:
    if response.status_code not in ANSWERED:
        raise _refusal(response)
    try:
        # A newer server with the same schema may send further fields.
        return model.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        raise _unreadable(response) from None


def _parse_called(result: type[Any], response: httpx.Response) -> Any:
    if result is not bytes:
        return _parse(result, response)
    if response.status_code != 200:
        raise _refusal(response)
    return response.content


_parse_answer, _parse_model = partial(_parse, Answer), partial(_parse, ModelDescription)
_parse_drift = partial(_parse, DriftReport)


def _parse_answers(response: httpx.Response) -> list[Answer | ServiceError]:
    request_id = response.headers.get("x-request-id")
    answers = _parse(Answers, response).answers
    return [entry if isinstance(entry, Answer) else _image_error(entry.error, request_id) for entry in answers]


def _image_error(detail: ErrorDetail, request_id: str | None) -> ServiceError:
    status = BY_CODE[detail.code].status if detail.code in BY_CODE else None
    return ServiceError(detail, status=status, request_id=request_id)


def _refusal(response: httpx.Response) -> ServiceError:
    try:
        refused = ErrorAnswer.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        # Not a response of this service, but of a proxy in front of it.
        return _unreadable(response)
    request_id = refused.request_id or response.headers.get("x-request-id")
    return ServiceError(refused.error, status=response.status_code, request_id=request_id)


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
    """Seconds, from a number or a date; 0 if the server does not give any."""
    text = response.headers.get("retry-after", "")
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
