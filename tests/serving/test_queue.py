"""The inference queue on a real graph, without HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.answer import Question, answer_image
from serving.errors import BusyError, ImageFormatError, OutputError, ServerError
from serving.meter import Meter
from serving.preprocess import LIMITS
from serving.queue import CPU_BATCH, CUDA_BATCH, InferenceQueue, best_batch
from serving.runtime import CUDA, Model
from tests.helpers_serving import COLOURS, image_bytes

IMAGES = [image_bytes(colour) for colour in ((255, 0, 0), (10, 200, 30), (90, 90, 90), (3, 4, 250), (240, 250, 9))]


class Watched(Model):
    """A model that remembers its batches and can be held up."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.bundle, model.session)
        object.__setattr__(self, "sizes", [])
        object.__setattr__(self, "free", threading.Event())
        object.__setattr__(self, "busy", threading.Event())
        self.free.set()

    sizes: list[int]
    free: threading.Event
    busy: threading.Event

    def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        self.sizes.append(len(pixels))
        self.busy.set()
        assert self.free.wait(20)
        return super().run(pixels)


def with_queue(
    model: Model, body: Callable[[InferenceQueue], Awaitable[Any]], *, max_batch: int = 8, limit: int = 100
) -> Any:
    async def main() -> Any:
        meter = Meter(window=10)
        queue = InferenceQueue(model, meter, limit=limit, threads=2, max_batch=max_batch, limits=LIMITS)
        try:
            return await body(queue)
        finally:
            await asyncio.to_thread(queue.close)

    return asyncio.run(asyncio.wait_for(main(), 30))


def said_alone(model: Model, content: bytes, question: Question) -> dict[str, Any]:
    return answer_image(model, content, question).model_dump(mode="json")


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_answers_are_those_of_single_images_whatever_the_batch(model: Model, max_batch: int) -> None:
    questions = [Question.ask(model), Question.ask(model, task=1), Question.ask(model, alpha=0.3, top=1)]
    asked = [(content, questions[number % 3]) for number, content in enumerate(IMAGES * 4)]
    watched = Watched(model)

    async def body(queue: InferenceQueue) -> list[str]:
        return await asyncio.gather(*(queue.ask(lambda c=content: c, question) for content, question in asked))

    for said, (content, question) in zip(with_queue(watched, body, max_batch=max_batch), asked, strict=True):
        got, wanted = json.loads(said), said_alone(model, content, question)
        assert (got["label"], got["top"][0]["label"]) == (wanted["label"], wanted["top"][0]["label"])
        assert got["unknown_score"] == pytest.approx(wanted["unknown_score"], abs=1e-5)
        assert got["confidence"] == pytest.approx(wanted["confidence"], abs=1e-5)
        assert got.keys() == wanted.keys()
    assert max(watched.sizes) <= max_batch
    assert sum(watched.sizes) == len(asked)


def test_a_batch_is_what_came_while_the_last_one_ran(model: Model) -> None:
    watched = Watched(model)
    watched.free.clear()

    async def body(queue: InferenceQueue) -> None:
        question = Question.ask(model)
        first = queue.ask(lambda: IMAGES[0], question)
        await asyncio.to_thread(watched.busy.wait, 20)
        others = [queue.ask(lambda c=content: c, question) for content in IMAGES[1:]]
        while len(queue._decoded) < len(others):
            await asyncio.sleep(0.001)
        watched.free.set()
        await asyncio.gather(first, *others)

    with_queue(watched, body)
    assert watched.sizes == [1, len(IMAGES) - 1]


def test_what_nobody_waits_for_is_not_run(model: Model) -> None:
    watched = Watched(model)
    watched.free.clear()

    async def body(queue: InferenceQueue) -> None:
        question = Question.ask(model)
        first = queue.ask(lambda: IMAGES[0], question)
        await asyncio.to_thread(watched.busy.wait, 20)
        abandoned = [queue.ask(lambda: IMAGES[1], question) for _ in range(5)]
        wanted = queue.ask(lambda: IMAGES[2], question)
        while len(queue._decoded) < 6:
            await asyncio.sleep(0.001)
        for future in abandoned:
            future.cancel()
        read: list[int] = []
        late = queue.ask(lambda: read.append(1) or IMAGES[0], question)  # type: ignore[func-returns-value]
        late.cancel()
        watched.free.set()
        await asyncio.gather(first, wanted)
        assert read == []

    with_queue(watched, body)
    assert watched.sizes == [1, 1]


def test_one_bad_image_spoils_nothing_else(model: Model) -> None:
    async def body(queue: InferenceQueue) -> list[Any]:
        contents = [IMAGES[0], b"junk", IMAGES[1]]
        asked = [queue.ask(lambda c=content: c, Question.ask(model)) for content in contents]
        asked.append(queue.ask(lambda: 1 / 0, Question.ask(model)))  # type: ignore[arg-type, return-value]
        return await asyncio.gather(*asked, return_exceptions=True)

    red, junk, green, broken = with_queue(model, body)
    assert json.loads(red)["best_guess"] == "red"
    assert json.loads(green)["best_guess"] == "green"
    assert isinstance(junk, ImageFormatError)
    assert isinstance(broken, ServerError)
    assert "ZeroDivisionError" in str(broken)


def test_a_row_that_is_not_finite_spoils_only_its_own(model: Model) -> None:
    class Failing(Watched):
        def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
            outputs = super().run(pixels)
            outputs["distances"][pixels[:, 0, 0, 0] == 90] = np.nan
            return outputs

    async def body(queue: InferenceQueue) -> list[Any]:
        asked = [queue.ask(lambda c=content: c, Question.ask(model)) for content in IMAGES]
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = with_queue(Failing(model), body)
    assert [isinstance(outcome, OutputError) for outcome in outcomes] == [False, False, True, False, False]


def test_a_graph_that_fails_answers_those_in_its_batch(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Watched):
        def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
            super().run(pixels)
            raise RuntimeError("out of memory")

    async def body(queue: InferenceQueue) -> None:
        with pytest.raises(ServerError):
            await queue.ask(lambda: IMAGES[0], Question.ask(model))

    with_queue(Failing(model), body)
    assert "out of memory" in caplog.text


def test_room_is_kept_and_given_back(model: Model) -> None:
    async def body(queue: InferenceQueue) -> None:
        with queue.admitted(2):
            with queue.admitted():
                assert queue.depth == 3
                with pytest.raises(BusyError) as refused, queue.admitted():
                    pass
                assert refused.value.headers == {"retry-after": "1"}
            with pytest.raises(BusyError), queue.admitted(2):
                pass
            assert queue.depth == 2
        assert queue.depth == 0
        # More than fit are taken when there is nothing else to do.
        with queue.admitted(4):
            pass

    with_queue(model, body, limit=3)


@pytest.mark.parametrize(("together", "expected"), [(0.002, CPU_BATCH), (0.0085, 1)])
def test_batches_on_a_cpu_are_measured(
    model: Model, monkeypatch: pytest.MonkeyPatch, together: float, expected: int
) -> None:
    monkeypatch.setattr("serving.queue._fastest", lambda _, size: 0.001 if size == 1 else together)
    assert best_batch(model) == expected


def test_batches_on_a_gpu_are_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "provider", CUDA)
    assert best_batch(model) == CUDA_BATCH


def test_a_measurement_is_one_of_this_model(model: Model) -> None:
    watched = Watched(model)
    best_batch(watched)
    assert set(watched.sizes) == {1, 8}


def test_a_huge_image_does_not_hold_up_a_small_one(model: Model) -> None:
    """Two threads decode: one is stuck in the huge image, the other answers."""
    stuck = threading.Event()

    async def body(queue: InferenceQueue) -> None:
        huge = queue.ask(lambda: stuck.wait(20) and saved_large(), Question.ask(model))  # type: ignore[return-value]
        assert json.loads(await queue.ask(lambda: IMAGES[0], Question.ask(model)))["label"] == "red"
        assert not huge.done()
        stuck.set()
        await huge

    with_queue(model, body, max_batch=1)


def saved_large() -> bytes:
    return image_bytes(COLOURS["red"], size=(500, 500))
