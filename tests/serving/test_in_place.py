"""A small image that is alone is answered on the event loop; all others stand in line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving import queue as queues
from serving.answer import Question
from serving.errors import ImageFormatError, OutputError, ServerError
from serving.meter import Meter
from serving.preprocess import LIMITS, Limits
from serving.queue import SMALL, Alone, InferenceQueue
from serving.runtime import Model
from serving.served import Served
from tests.helpers_serving import GREY, image_bytes
from tests.serving.test_queue import FakeKeeper, Watched, WithFeatures, named

RED = image_bytes()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph counts as quick, however busy the machine is."""
    monkeypatch.setattr("serving.queue.QUICK", 60)


class Traced(Watched):
    """Remembers which threads ran it."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        object.__setattr__(self, "threads", [])

    threads: list[threading.Thread]

    def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        self.threads.append(threading.current_thread())
        return super().run(pixels)


def with_queue(
    model: Model, body: Callable[[InferenceQueue], Awaitable[Any]], *, limits: Limits = LIMITS, keeper: Any = None
) -> Any:
    """`body` runs once the queue has answered an image, and so knows how quick the graph is."""

    async def main() -> Any:
        served = Served.of(model, 8)
        queue = InferenceQueue(served, Meter(window=10), limit=100, threads=2, limits=limits, keeper=keeper)
        try:
            await in_line(queue)
            return await body(queue)
        finally:
            await asyncio.to_thread(queue.close)

    return asyncio.run(asyncio.wait_for(main(), 30))


async def in_line(queue: InferenceQueue) -> str:
    """Comes back when the threads have nothing more to do."""
    said = await queue.ask(lambda: RED, queue.served.question, queue.served)
    while queue._graph.locked():
        await asyncio.sleep(0.001)
    return said


async def in_place(queue: InferenceQueue, content: bytes = RED, **asked: Any) -> str | None:
    served = queue.served
    with queue.admitted():
        return await queue.answer_in_place(lambda: content, Question.ask(served.model, **asked), served)


def test_the_answer_is_the_same_and_no_thread_is_asked(model: Model) -> None:
    traced = Traced(model)

    async def body(queue: InferenceQueue) -> tuple[str | None, str]:
        return await in_place(queue), await in_line(queue)

    here, there = with_queue(traced, body)
    assert here == there
    assert [thread is threading.main_thread() for thread in traced.threads] == [False, True, False]


def test_those_that_come_together_stand_in_line(model: Model) -> None:
    async def body(queue: InferenceQueue) -> str | None:
        first = asyncio.create_task(in_place(queue))
        # Now it is admitted, and the next one comes before it is run.
        await asyncio.sleep(0)
        assert queue.depth == 1
        with queue.admitted():
            return await first

    assert with_queue(model, body) is None


def test_what_is_not_small_stands_in_line(model: Model) -> None:
    side = int(SMALL.pixels**0.5) + 1

    async def body(queue: InferenceQueue) -> list[str | None]:
        large = image_bytes(size=(side, side))
        long = image_bytes(kind="BMP", size=(100, 100))
        assert len(large) < SMALL.size < len(long)
        return [await in_place(queue, large), await in_place(queue, long)]

    assert with_queue(model, body) == [None, None]


def test_limits_that_are_smaller_still_hold(model: Model) -> None:
    async def body(queue: InferenceQueue) -> str | None:
        return await in_place(queue, image_bytes(size=(9, 9)))

    assert with_queue(model, body, limits=Limits(pixels=64)) is None


def test_a_slow_graph_is_left_to_the_threads(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.queue.QUICK", 1e-9)
    assert with_queue(model, in_place) is None


def test_one_run_that_was_held_up_does_not_make_a_graph_slow() -> None:
    alone = Alone()
    assert not alone.quick("1")
    alone.took("1", queues.QUICK / 4)
    alone.took("1", 100 * queues.QUICK)
    assert alone.quick("1")
    assert not alone.quick("2")


def test_a_graph_that_has_become_slow_is_found_out() -> None:
    alone = Alone()
    alone.took("1", queues.QUICK / 4)
    for _ in range(10):
        alone.took("1", 2 * queues.QUICK)
    assert not alone.quick("1")


def test_how_quick_another_model_is_must_be_seen_first(model: Model) -> None:
    async def body(queue: InferenceQueue) -> list[bool]:
        queue.served = Served.of(named(model, "new"), 8)
        before = await in_place(queue)
        await in_line(queue)
        after = await in_place(queue)
        return [before is None, after is None]

    assert with_queue(model, body) == [True, False]


def test_while_a_thread_runs_the_graph_others_stand_in_line(model: Model) -> None:
    watched = Watched(model)

    async def body(queue: InferenceQueue) -> str | None:
        watched.free.clear()
        watched.busy.clear()
        # Nobody waits for it, so it takes no room; yet it runs.
        running = queue.ask(lambda: RED, queue.served.question, queue.served)
        await asyncio.to_thread(watched.busy.wait, 20)
        said = await in_place(queue)
        watched.free.set()
        await running
        return said

    assert with_queue(watched, body) is None


def test_what_is_wrong_is_said_and_the_graph_is_free_again(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Watched):
        def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
            outputs = super().run(pixels)
            if pixels[0, 0, 0, 0] == 3:
                raise RuntimeError("out of memory")
            outputs["distances"][pixels[:, 0, 0, 0] == 5] = np.nan
            return outputs

    async def body(queue: InferenceQueue) -> str | None:
        with pytest.raises(ImageFormatError):
            await in_place(queue, b"junk")
        with pytest.raises(OutputError):
            await in_place(queue, image_bytes((5, 5, 5)))
        with pytest.raises(ServerError):
            await in_place(queue, image_bytes((3, 3, 3)))
        return await in_place(queue)

    assert json.loads(with_queue(Failing(model), body))["label"] == "red"
    assert "out of memory" in caplog.text


def test_unknowns_are_offered_to_the_keeper(model: Model) -> None:
    keeper, grey = FakeKeeper(), image_bytes(GREY)

    async def body(queue: InferenceQueue) -> str | None:
        keeper.futures[grey] = asyncio.get_running_loop().create_future()
        keeper.futures[grey].set_result("")
        said = await in_place(queue, grey)
        assert keeper.kept == []
        await asyncio.sleep(0)
        return said

    said = with_queue(WithFeatures(model), body, keeper=keeper)
    (arrival,) = keeper.kept
    assert arrival.content == grey
    assert arrival.answer == json.loads(said)
