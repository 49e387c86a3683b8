"""Predictions in this process: what a refused request leaves behind, who gives up, and who waits too long."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request
from starlette.types import Message, Receive

from serving.bundle.model import BundleModel
from serving.bundle.pixels import LIMITS
from serving.errors import RequestError
from serving.http.context import RequestContext
from serving.http.predict_routes import PredictionQuery, Predictions
from serving.inference import disconnect
from serving.inference.queue import InferenceQueue
from serving.settings import Settings
from tests.helpers_serving import PATIENCE, image_bytes, saved
from tests.serving.inference.test_queue import Watched, unmeasured

RED = image_bytes()
NOISE = saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)))
JSON = b"application/json"


def with_predictions(
    model: BundleModel,
    body: Callable[[Predictions, InferenceQueue], Awaitable[Any]],
    settings: Settings | None = None,
    *,
    quick: bool = False,
) -> Any:
    chosen = settings or Settings()

    async def main() -> Any:
        queue = InferenceQueue(unmeasured(model, quick=quick), limit=chosen.queue, threads=2, limits=LIMITS)
        try:
            return await body(Predictions(chosen, lambda: queue), queue)
        finally:
            await asyncio.to_thread(queue.close, PATIENCE)

    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


def request(receive: Receive, content_type: bytes = b"image/png", request_id: bytes = b"") -> Request:
    headers = [(b"content-type", content_type), (b"x-request-id", request_id)]
    scope = {"type": "http", "method": "POST", "headers": headers, "query_string": b""}
    RequestContext.attach(scope)
    return Request(scope, receive)


def sends(body: bytes, then: asyncio.Event | None = None) -> Receive:
    """A client that sends a body and hangs up after `then`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await (then or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    return receive


class Refused(NamedTuple):
    status: int
    code: str
    headers: Mapping[str, str] | None


async def refusal(answering: Awaitable[str]) -> Refused:
    """The error response of a request, handled as in the application."""
    try:
        raise AssertionError(await answering)
    except RequestError as error:
        error.without_traceback()
        return Refused(error.status, error.code, error.headers)


def many(*images: str) -> bytes:
    return json.dumps({"images": images}).encode()


ANY = PredictionQuery()


REFUSED: dict[str, tuple[bytes, bytes, PredictionQuery]] = {
    "broken_image": (RED[: len(RED) // 2], b"image/png", ANY),
    "unsupported_image": (b"junk", b"image/png", ANY),
    "malformed_request": (b"{", JSON, ANY),
    "bad_parameter": (RED, b"image/png", PredictionQuery(task=9)),
    "unsupported_media_type": (RED, b"text/plain", ANY),
    "empty_image": (b"", b"image/png", ANY),
}


@pytest.mark.long
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("expected", REFUSED)
def test_a_refused_image_is_gone_with_its_answer(model: BundleModel, expected: str, quick: bool) -> None:
    """A worker rarely collects cycles, so the memory of a request must be freed without the collector."""
    body, content_type, query = REFUSED[expected]

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def refused() -> None:
            assert (await refusal(predictions.one(request(sends(body), content_type), query))).code == expected

        assert await left_behind(queue, refused) == {}

    with_predictions(model, ask, quick=quick)


def test_refused_images_among_many_are_gone_too(model: BundleModel) -> None:
    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def refused() -> None:
            answers = await predictions.many(request(sends(many("", "????", "aGVsbG8=")), JSON), ANY)
            assert [answer["error"]["code"] for answer in json.loads(answers)["answers"]] == [
                "empty_image",
                "malformed_request",
                "unsupported_image",
            ]

        assert await left_behind(queue, refused) == {}

    with_predictions(model, ask)


def test_what_nobody_answered_in_time_is_gone_too(model: BundleModel) -> None:
    """The deadline passes while the image is in the queue."""
    watched = Watched(model)

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def too_late() -> None:
            watched.free.clear()
            late = await refusal(predictions.one(request(sends(NOISE)), ANY))
            assert (late.status, late.code) == (504, "deadline_exceeded")
            assert queue.depth == 0
            watched.free.set()

        assert await left_behind(queue, too_late) == {}

    with_predictions(watched, ask, Settings(deadline=0.2))


@pytest.mark.parametrize("path", ["one", "many"])
def test_a_client_that_hangs_up_in_line_costs_nothing_more(
    model: BundleModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(disconnect, "LISTEN_AFTER", 0.001)
    watched = Watched(model)

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def gone() -> None:
            watched.free.clear()
            watched.busy.clear()
            first = asyncio.ensure_future(predictions.one(request(sends(NOISE)), ANY))
            await asyncio.to_thread(watched.busy.wait, PATIENCE)
            hangs_up = asyncio.Event()
            if path == "one":
                waiting = asyncio.create_task(refusal(predictions.one(request(sends(NOISE, hangs_up)), ANY)))
            else:
                body = many(base64.b64encode(NOISE).decode())
                waiting = asyncio.create_task(refusal(predictions.many(request(sends(body, hangs_up), JSON), ANY)))
            while not queue._decoded:
                await asyncio.sleep(0.001)
            hangs_up.set()
            assert (await waiting).code == "client_gone"
            assert queue.depth == 1
            watched.free.set()
            assert json.loads(await first)

        assert await left_behind(queue, gone) == {}
        assert watched.sizes == [1]

    with_predictions(watched, ask)


def test_an_internal_error_is_logged_with_its_request(model: BundleModel, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Watched):
        def run(self, pixels: Any) -> Any:
            raise RuntimeError("out of memory")

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        failed = await refusal(predictions.one(request(sends(NOISE), request_id=b"mine"), ANY))
        assert failed.code == "server_failed"

    failing = Failing(model)
    with_predictions(failing, ask)
    (record,) = caplog.records
    assert vars(record)["request_id"] == "mine"
    assert "out of memory" in caplog.text


def test_more_images_than_there_is_room_for_are_answered_when_there_are_no_others(model: BundleModel) -> None:
    body = many(*[base64.b64encode(RED).decode()] * 4)

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        answers = await predictions.many(request(sends(body), JSON), ANY)
        assert [answer["label"] for answer in json.loads(answers)["answers"]] == ["red"] * 4
        with queue.admitted():
            busy = await refusal(predictions.many(request(sends(body), JSON), ANY))
            assert (busy.status, busy.code) == (503, "busy")
        assert queue.depth == 0

    with_predictions(model, ask, Settings(queue=3))


@pytest.mark.parametrize("path", ["one", "many"])
def test_where_there_is_no_room_no_body_is_read(model: BundleModel, path: str) -> None:
    async def never() -> Message:
        raise AssertionError("the body was asked for")

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        with queue.admitted():
            busy = await refusal(getattr(predictions, path)(request(never, JSON), ANY))
            assert (busy.status, busy.code) == (503, "busy")

    with_predictions(model, ask, Settings(queue=1))


@pytest.mark.parametrize("path", ["one", "many"])
def test_a_place_is_taken_by_a_whole_body(model: BundleModel, path: str) -> None:
    """A partial upload takes no place in the queue; a complete upload to a full queue is refused."""
    whole = json.dumps({"image": base64.b64encode(RED).decode()}).encode() if path == "one" else many("")

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        begun, rest = asyncio.Event(), asyncio.Event()

        async def slowly() -> Message:
            begun.set()
            await rest.wait()
            return {"type": "http.request", "body": whole, "more_body": False}

        waiting = asyncio.create_task(refusal(getattr(predictions, path)(request(slowly, JSON), ANY)))
        await begun.wait()
        assert queue.depth == 0
        assert json.loads(await predictions.one(request(sends(RED)), ANY))
        with queue.admitted():
            rest.set()
            assert (await waiting).code == "busy"
        assert (queue.depth, predictions.inflight.bytes) == (0, 0)

    with_predictions(model, ask, Settings(queue=1))


def test_bodies_have_a_bound_together(model: BundleModel) -> None:
    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        rest = asyncio.Event()

        async def slowly() -> Message:
            """All but one byte, and that much later."""
            if not predictions.inflight.bytes:
                return {"type": "http.request", "body": NOISE[:-1], "more_body": True}
            await rest.wait()
            return {"type": "http.request", "body": NOISE[-1:], "more_body": False}

        first = asyncio.create_task(predictions.one(request(slowly), ANY))
        while not predictions.inflight.bytes:
            await asyncio.sleep(0)
        assert json.loads(await predictions.one(request(sends(RED)), ANY))
        refused = await refusal(predictions.one(request(sends(NOISE)), ANY))
        assert refused == (503, "busy", {"retry-after": "1"})
        rest.set()
        assert json.loads(await first)
        assert predictions.inflight.bytes == 0

    with_predictions(model, ask, Settings(max_held=len(NOISE) + len(RED) - 1))


def test_a_body_that_is_alone_may_be_larger_than_the_bound(model: BundleModel) -> None:
    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        assert json.loads(await predictions.one(request(sends(NOISE)), ANY))

    with_predictions(model, ask, Settings(max_held=1))


async def left_behind(queue: InferenceQueue, ask: Callable[[], Awaitable[None]]) -> Counter[str]:
    """The objects that such a request leaves to the garbage collector, by type."""
    gc.collect()
    # Objects that existed before are ignored.
    gc.freeze()
    gc.disable()
    try:
        await ask()
        # A thread releases a job shortly after its answer.
        await asyncio.to_thread(queue.close, PATIENCE)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
