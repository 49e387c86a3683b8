"""Answers prediction requests: one image or many, within the deadline, for as long as somebody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from starlette.types import Receive, Scope

from serving.answer import Question
from serving.errors import ClientGoneError, DeadlineError, RequestError
from serving.held import Held, Take
from serving.meter import Meter
from serving.patience import Watch
from serving.queue import SMALL, InferenceQueue
from serving.schemas import error_answer
from serving.served import Served
from serving.settings import Settings
from serving.upload import Upload, limit_for_many, limit_for_one, read_body, read_question

REQUEST_ID, REFUSED = "openworld_request_id", "openworld_refused"
"""Where a scope holds its id, and the code of the error that answers it."""


class Reply(NamedTuple):
    """A response, always JSON."""

    status: int
    body: str
    headers: dict[str, str]


class Predictions:
    """What stands behind `/predict` and `/predict_many`."""

    def __init__(self, queue: InferenceQueue, meter: Meter, settings: Settings) -> None:
        self._queue = queue
        self._meter = meter
        self._settings = settings
        self._held = Held(settings.max_held)

    async def one(self, scope: Scope, receive: Receive) -> Reply:
        """Say what an image shows, or that it is unknown."""
        return await self._reply(self._one, scope, receive)

    async def many(self, scope: Scope, receive: Receive) -> Reply:
        """Say what each of several images shows; a bad one spoils only its own answer."""
        return await self._reply(self._many, scope, receive)

    async def _reply(self, answer: Callable[[Scope, Receive], Awaitable[str]], scope: Scope, receive: Receive) -> Reply:
        try:
            async with asyncio.timeout(self._settings.deadline):
                return Reply(200, await answer(scope, receive), {})
        except RequestError as error:
            return self._refused(error.alone(), scope)
        except TimeoutError:
            allowed = f"{self._settings.deadline:g} seconds from the request's head to its answer"
            return self._refused(DeadlineError("the deadline passed", got="no answer", allowed=allowed), scope)

    def _refused(self, error: RequestError, scope: Scope) -> Reply:
        self._meter.rejected(error.code)
        scope[REFUSED] = error.code
        return Reply(error.status, error_answer(error, scope.get(REQUEST_ID)).model_dump_json(), error.headers)

    async def _one(self, scope: Scope, receive: Receive) -> str:
        served = self._queue.served
        question = _question(scope, served)
        request_id = scope.get(REQUEST_ID)
        # A place is taken by what can be answered: who only begins to send holds up nobody.
        self._queue.check_room()
        with self._held.share() as take:
            upload = await _upload(scope, receive, limit_for_one, self._settings.max_bytes, take)
            with self._queue.admitted():
                if len(upload.body) <= SMALL.size:
                    said = await self._queue.answer_in_place(upload.image, question, served, request_id)
                    if said is not None:
                        return said
                done = self._queue.ask(upload.image, question, served, request_id)
                with Watch(receive, [done]) as watch:
                    try:
                        return await done
                    except asyncio.CancelledError:
                        if watch.gone:
                            raise _gone() from None
                        raise

    async def _many(self, scope: Scope, receive: Receive) -> str:
        served = self._queue.served
        question = _question(scope, served)
        self._queue.check_room()
        with self._held.share() as take:
            upload = await _upload(scope, receive, limit_for_many, self._settings.max_body, take)
            with self._queue.admitted():
                images = await asyncio.to_thread(upload.images, self._settings.max_images)
                # The images are copies: what they came in need not wait for their answers.
                del upload
                with self._queue.admitted(len(images) - 1, own=1):
                    ask = partial(self._queue.ask, question=question, served=served, request_id=scope.get(REQUEST_ID))
                    said = await self._each([ask(partial(_unwrap, image)) for image in images], receive)
        return f'{{"answers":[{",".join(said)}]}}'

    async def _each(self, asked: list[asyncio.Future[str]], receive: Receive) -> list[str]:
        with Watch(receive, asked) as watch:
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        if watch.gone:
            raise _gone()
        return [self._said(outcome) for outcome in outcomes]

    def _said(self, outcome: str | BaseException) -> str:
        if isinstance(outcome, str):
            return outcome
        if not isinstance(outcome, RequestError):
            raise outcome
        self._meter.rejected(outcome.code)
        return error_answer(outcome).model_dump_json(exclude_none=True)


def _question(scope: Scope, served: Served) -> Question:
    query: bytes = scope["query_string"]
    return read_question(served.model, query) if query else served.question


async def _upload(scope: Scope, receive: Receive, limit: Callable[[str, int], int], size: int, take: Take) -> Upload:
    content_type = announced = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value
        elif name == b"content-length":
            announced = value
    kind = content_type.decode("latin-1")
    return Upload(kind, await read_body(receive, announced, limit(kind, size), take))


def _unwrap(image: bytes | RequestError) -> bytes:
    if isinstance(image, RequestError):
        raise image
    return image


def _gone() -> ClientGoneError:
    return ClientGoneError("nobody waits for the answer", got="a closed connection", allowed="an open one")
