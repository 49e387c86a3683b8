"""Predictions in this process: what a refused request leaves behind, who gives up, and who waits too long."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.types import Message, Receive

from serving import patience
from serving.meter import Meter
from serving.predictions import REQUEST_ID, Predictions, Reply
from serving.preprocess import LIMITS
from serving.queue import InferenceQueue
from serving.runtime import Model
from serving.served import Served
from serving.settings import Settings
from tests.helpers_serving import image_bytes, saved
from tests.serving.test_queue import Watched

RED = image_bytes()
NOISE = saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)))
JSON = b"application/json"


def with_predictions(
    model: Model, body: Callable[[Predictions, InferenceQueue], Awaitable[Any]], settings: Settings | None = None
) -> Any:
    chosen = settings or Settings()

    async def main() -> Any:
        meter = Meter(window=10)
        queue = InferenceQueue(Served.of(model, 8), meter, limit=chosen.queue, threads=2, limits=LIMITS)
        try:
            return await body(Predictions(queue, meter, chosen), queue)
        finally:
            await asyncio.to_thread(queue.close)

    return asyncio.run(asyncio.wait_for(main(), 30))


def scope(content_type: bytes = b"image/png", query: bytes = b"") -> dict[str, Any]:
    return {"headers": [(b"content-type", content_type)], "query_string": query}


def sends(body: bytes, then: asyncio.Event | None = None) -> Receive:
    """A client that sends a body and hangs up after `then`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await (then or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    return receive


def code(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


def many(*images: str) -> bytes:
    return json.dumps({"images": images}).encode()


REFUSED: dict[str, tuple[bytes, bytes, bytes]] = {
    "broken_image": (NOISE[: len(NOISE) // 2], b"image/png", b""),
    "unsupported_image": (b"junk", b"image/png", b""),
    "malformed_request": (b"{", JSON, b""),
    "bad_parameter": (RED, b"image/png", b"task=9"),
    "unsupported_media_type": (RED, b"text/plain", b""),
    "empty_image": (b"", b"image/png", b""),
}


@pytest.mark.parametrize("expected", REFUSED)
@pytest.mark.parametrize("quick", [0, 60], ids=["in line", "in place"])
def test_a_refused_image_is_gone_with_its_answer(
    model: Model, monkeypatch: pytest.MonkeyPatch, expected: str, quick: float
) -> None:
    """A worker hardly ever looks for cycles: what a request held must go without that."""
    monkeypatch.setattr("serving.queue.QUICK", quick)
    body, content_type, query = REFUSED[expected]

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        assert (await predictions.one(scope(), sends(RED))).status == 200

        async def refused() -> None:
            assert code(await predictions.one(scope(content_type, query), sends(body))) == expected

        assert await left_behind(queue, refused) == {}

    with_predictions(model, ask)


def test_refused_images_among_many_are_gone_too(model: Model) -> None:
    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def refused() -> None:
            reply = await predictions.many(scope(JSON), sends(many("", "????", "aGVsbG8=")))
            assert [answer["error"]["code"] for answer in json.loads(reply.body)["answers"]] == [
                "empty_image",
                "malformed_request",
                "unsupported_image",
            ]

        assert await left_behind(queue, refused) == {}

    with_predictions(model, ask)


def test_what_nobody_answered_in_time_is_gone_too(model: Model) -> None:
    """The deadline passes while the image stands in line."""
    watched = Watched(model)

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def late() -> None:
            watched.free.clear()
            assert code(await predictions.one(scope(), sends(NOISE))) == "deadline_exceeded"
            assert queue.depth == 0
            watched.free.set()

        assert await left_behind(queue, late) == {}

    with_predictions(watched, ask, Settings(deadline=0.2))


@pytest.mark.parametrize("path", ["one", "many"])
def test_a_client_that_hangs_up_in_line_costs_nothing_more(
    model: Model, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(patience, "SOON", 0.001)
    watched = Watched(model)

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        async def gone() -> None:
            watched.free.clear()
            watched.busy.clear()
            first = asyncio.create_task(predictions.one(scope(), sends(NOISE)))
            await asyncio.to_thread(watched.busy.wait, 20)
            hangs_up = asyncio.Event()
            if path == "one":
                waiting = asyncio.create_task(predictions.one(scope(), sends(NOISE, hangs_up)))
            else:
                body = many(base64.b64encode(NOISE).decode())
                waiting = asyncio.create_task(predictions.many(scope(JSON), sends(body, hangs_up)))
            while not queue._decoded:
                await asyncio.sleep(0.001)
            hangs_up.set()
            assert code(await waiting) == "client_gone"
            assert queue.depth == 1
            watched.free.set()
            assert (await first).status == 200

        assert await left_behind(queue, gone) == {}
        assert watched.sizes == [1]

    with_predictions(watched, ask)


def test_a_failure_of_ours_is_logged_with_its_request(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Watched):
        def run(self, pixels: Any) -> Any:
            raise RuntimeError("out of memory")

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        assert code(await predictions.one(scope() | {REQUEST_ID: "mine"}, sends(NOISE))) == "server_failed"

    failing = Failing(model)
    with_predictions(failing, ask)
    (record,) = caplog.records
    assert vars(record)["request_id"] == "mine"
    assert "out of memory" in caplog.text


def test_more_images_than_there_is_room_for_are_answered_when_there_are_no_others(model: Model) -> None:
    body = many(*[base64.b64encode(RED).decode()] * 4)

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        reply = await predictions.many(scope(JSON), sends(body))
        assert [answer["label"] for answer in json.loads(reply.body)["answers"]] == ["red"] * 4
        with queue.admitted():
            busy = await predictions.many(scope(JSON), sends(body))
            assert (busy.status, code(busy)) == (503, "busy")
        assert queue.depth == 0

    with_predictions(model, ask, Settings(queue=3))


@pytest.mark.parametrize("path", ["one", "many"])
def test_where_there_is_no_room_no_body_is_read(model: Model, path: str) -> None:
    async def never() -> Message:
        raise AssertionError("the body was asked for")

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        with queue.admitted():
            reply = await getattr(predictions, path)(scope(JSON), never)
            assert (reply.status, code(reply)) == (503, "busy")

    with_predictions(model, ask, Settings(queue=1))


@pytest.mark.parametrize("path", ["one", "many"])
def test_a_place_is_taken_by_a_whole_body(model: Model, path: str) -> None:
    """Who only begins to send keeps nobody out; who sent all of it while others took the last place is told so."""
    whole = json.dumps({"image": base64.b64encode(RED).decode()}).encode() if path == "one" else many("")

    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        begun, rest = asyncio.Event(), asyncio.Event()

        async def slowly() -> Message:
            begun.set()
            await rest.wait()
            return {"type": "http.request", "body": whole, "more_body": False}

        waiting = asyncio.create_task(getattr(predictions, path)(scope(JSON), slowly))
        await begun.wait()
        assert queue.depth == 0
        assert (await predictions.one(scope(), sends(RED))).status == 200
        with queue.admitted():
            rest.set()
            assert code(await waiting) == "busy"
        assert (queue.depth, predictions._held.bytes) == (0, 0)

    with_predictions(model, ask, Settings(queue=1))


def test_bodies_have_a_bound_together(model: Model) -> None:
    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        rest = asyncio.Event()

        async def slowly() -> Message:
            """All but one byte, and that much later."""
            if not predictions._held.bytes:
                return {"type": "http.request", "body": NOISE[:-1], "more_body": True}
            await rest.wait()
            return {"type": "http.request", "body": NOISE[-1:], "more_body": False}

        first = asyncio.create_task(predictions.one(scope(), slowly))
        while not predictions._held.bytes:
            await asyncio.sleep(0)
        assert (await predictions.one(scope(), sends(RED))).status == 200
        refused = await predictions.one(scope(), sends(NOISE))
        assert (refused.status, code(refused), refused.headers) == (503, "busy", {"retry-after": "1"})
        rest.set()
        assert (await first).status == 200
        assert predictions._held.bytes == 0

    with_predictions(model, ask, Settings(max_held=len(NOISE) + len(RED) - 1))


def test_a_body_that_is_alone_may_be_larger_than_the_bound(model: Model) -> None:
    async def ask(predictions: Predictions, queue: InferenceQueue) -> None:
        assert (await predictions.one(scope(), sends(NOISE))).status == 200

    with_predictions(model, ask, Settings(max_held=1))


async def left_behind(queue: InferenceQueue, request: Callable[[], Awaitable[None]]) -> Counter[str]:
    """What such a request leaves to the garbage collector, by type."""
    gc.collect()
    # What was there before is not looked at.
    gc.freeze()
    gc.disable()
    try:
        await request()
        # A thread lets go of a job a moment after its answer.
        await asyncio.to_thread(queue.close)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
