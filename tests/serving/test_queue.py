"""The inference queue on a real graph, without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.answer import Question, answer_image
from serving.errors import BusyError, ImageFormatError, OutputError, ServerError
from serving.meter import Meter
from serving.preprocess import LIMITS, to_pixels
from serving.quarantine import Arrival
from serving.queue import InferenceQueue
from serving.runtime import CUDA, Model
from serving.served import CPU_BATCH, CUDA_BATCH, Served, best_batch
from tests.helpers_serving import COLOURS, image_bytes

IMAGES = [image_bytes(colour) for colour in ((255, 0, 0), (10, 200, 30), (90, 90, 90), (3, 4, 250), (240, 250, 9))]


class Watched(Model):
    """A model that remembers its batches and can be held up."""

    def __init__(self, model: Model) -> None:
        super().__init__(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})
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
    model: Model,
    body: Callable[[InferenceQueue], Awaitable[Any]],
    *,
    max_batch: int = 8,
    limit: int = 100,
    keeper: Any = None,
) -> Any:
    async def main() -> Any:
        meter = Meter(window=10)
        served = Served.of(model, max_batch)
        queue = InferenceQueue(served, meter, limit=limit, threads=2, limits=LIMITS, keeper=keeper)
        del served
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
        return await asyncio.gather(
            *(queue.ask(lambda c=content: c, question, queue.served) for content, question in asked)
        )

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
        first = queue.ask(lambda: IMAGES[0], question, queue.served)
        await asyncio.to_thread(watched.busy.wait, 20)
        others = [queue.ask(lambda c=content: c, question, queue.served) for content in IMAGES[1:]]
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
        first = queue.ask(lambda: IMAGES[0], question, queue.served)
        await asyncio.to_thread(watched.busy.wait, 20)
        abandoned = [queue.ask(lambda: IMAGES[1], question, queue.served) for _ in range(5)]
        wanted = queue.ask(lambda: IMAGES[2], question, queue.served)
        while len(queue._decoded) < 6:
            await asyncio.sleep(0.001)
        for future in abandoned:
            future.cancel()
        read: list[int] = []
        late = queue.ask(lambda: read.append(1) or IMAGES[0], question, queue.served)  # type: ignore[func-returns-value]
        late.cancel()
        watched.free.set()
        await asyncio.gather(first, wanted)
        assert read == []

    with_queue(watched, body)
    assert watched.sizes == [1, 1]


def test_one_bad_image_spoils_nothing_else(model: Model) -> None:
    async def body(queue: InferenceQueue) -> list[Any]:
        contents = [IMAGES[0], b"junk", IMAGES[1]]
        asked = [queue.ask(lambda c=content: c, Question.ask(model), queue.served) for content in contents]
        asked.append(queue.ask(lambda: 1 / 0, Question.ask(model), queue.served))  # type: ignore[arg-type, return-value]
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
        asked = [queue.ask(lambda c=content: c, Question.ask(model), queue.served) for content in IMAGES]
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
            await queue.ask(lambda: IMAGES[0], Question.ask(model), queue.served)

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
    monkeypatch.setattr("serving.served._fastest", lambda _, size: 0.001 if size == 1 else together)
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
        huge = queue.ask(lambda: stuck.wait(20) and saved_large(), Question.ask(model), queue.served)  # type: ignore[return-value]
        assert json.loads(await queue.ask(lambda: IMAGES[0], Question.ask(model), queue.served))["label"] == "red"
        assert not huge.done()
        stuck.set()
        await huge

    with_queue(model, body, max_batch=1)


def test_large_images_are_decoded_one_at_a_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes much memory; and while one is decoded and the next one waits, the other thread takes small ones."""
    going_on = threading.Event()
    at_once: list[int] = []
    decoding = threading.Semaphore(2)

    def slow(image: Any, spec: Any) -> NDArray[np.uint8]:
        if image.width > 8:
            assert decoding.acquire(blocking=False)
            at_once.append(2 - decoding._value)
            assert going_on.wait(20)
            decoding.release()
        return to_pixels(image, spec)

    monkeypatch.setattr("serving.jobs.LARGE", 64)
    monkeypatch.setattr("serving.jobs.to_pixels", slow)

    async def body(queue: InferenceQueue) -> None:
        large = [queue.ask(saved_large, queue.served.question, queue.served) for _ in range(2)]
        small = await queue.ask(lambda: IMAGES[0], queue.served.question, queue.served)
        assert json.loads(small)["label"] == "red"
        assert not any(future.done() for future in large)
        going_on.set()
        assert [json.loads(said)["label"] for said in await asyncio.gather(*large)] == ["red", "red"]

    with_queue(model, body)
    assert at_once == [1, 1]


def test_a_swap_in_the_middle_changes_nothing_for_those_in_line(model: Model) -> None:
    """Each is answered by what it was asked of, and no batch is of two models."""
    old, new = Watched(model), Watched(named(model, "new"))
    old.free.clear()

    async def body(queue: InferenceQueue) -> list[str]:
        before, after = queue.served, Served.of(new, 8)
        asked = [queue.ask(lambda: IMAGES[0], before.question, before)]
        await asyncio.to_thread(old.busy.wait, 20)
        for served, count in ((before, 2), (after, 3), (before, 2)):
            # One after the other, so that the line is as it is told here.
            for content in IMAGES[:count]:
                waiting = len(queue._decoded)
                asked.append(queue.ask(lambda c=content: c, served.question, served))
                while len(queue._decoded) == waiting:
                    await asyncio.sleep(0.001)
            queue.served = after
        old.free.set()
        return await asyncio.gather(*asked)

    said = [json.loads(answer)["model"]["version"] for answer in with_queue(old, body)]
    was = model.manifest.version
    assert said == [was] * 3 + ["new"] * 3 + [was] * 2
    assert (old.sizes, new.sizes) == ([1, 2, 2], [3])


def test_what_was_served_is_let_go_while_the_threads_wait(model: Model) -> None:
    async def body(queue: InferenceQueue) -> None:
        old = weakref.ref(queue.served)
        for content in (*IMAGES, b"junk"):
            asked = queue.ask(lambda c=content: c, Question.ask(model), queue.served)
            await asyncio.gather(asked, return_exceptions=True)
        queue.served = Served.of(model, 8)
        del asked
        while old() is not None:
            gc.collect()
            await asyncio.sleep(0.01)

    with_queue(model, body)


class WithFeatures(Watched):
    """Its features are the mean colour of an image."""

    def run(self, pixels: NDArray[np.uint8], *, features: bool = False) -> dict[str, NDArray[np.float32]]:
        outputs = Watched.run(self, pixels)
        if features:
            outputs["features"] = pixels.mean(axis=(1, 2), dtype=np.float32)
        return outputs


class FakeKeeper:
    """Wants every unknown image, and remembers whether its answer was out when it was offered."""

    def __init__(self) -> None:
        self.kept: list[Arrival] = []
        self.futures: dict[bytes, asyncio.Future[str]] = {}
        self.too_early: list[bytes] = []

    def wants(self, known: bool) -> str | None:
        return None if known else "unknown"

    def offer(self, arrival: Arrival) -> None:
        self.kept.append(arrival)
        if not self.futures[arrival.content].done():
            self.too_early.append(arrival.content)


def test_unknowns_are_offered_once_they_are_answered(model: Model) -> None:
    keeper = FakeKeeper()

    async def body(queue: InferenceQueue) -> list[str | BaseException]:
        for content in (*IMAGES, b"junk"):
            keeper.futures[content] = queue.ask(lambda c=content: c, Question.ask(model), queue.served)
        answers = await asyncio.gather(*keeper.futures.values(), return_exceptions=True)
        await asyncio.sleep(0)
        return answers

    said = with_queue(WithFeatures(model), body, keeper=keeper)
    answers = {content: json.loads(answer) for content, answer in zip(IMAGES, said[:-1], strict=True)}
    unknown = [content for content in IMAGES if not answers[content]["known"]]
    assert sorted(arrival.content for arrival in keeper.kept) == sorted(unknown)
    assert unknown == [IMAGES[2]]
    assert keeper.too_early == []
    for arrival in keeper.kept:
        assert arrival.answer == answers[arrival.content]
        assert (arrival.kind, arrival.model_version) == ("unknown", model.manifest.version)
        assert abs(arrival.received_at - time.time()) < 60
        assert arrival.features.base is None, "a row must not hold its batch"
        assert arrival.features.tolist() == [90, 90, 90]


def test_without_a_keeper_no_features_are_asked_for(model: Model) -> None:
    class Strict(Watched):
        def run(self, pixels: NDArray[np.uint8], **more: Any) -> dict[str, NDArray[np.float32]]:
            assert more == {}
            return super().run(pixels)

    async def body(queue: InferenceQueue) -> str:
        return await queue.ask(lambda: IMAGES[2], Question.ask(model), queue.served)

    assert json.loads(with_queue(Strict(model), body))["label"] == "unknown"


def named(model: Model, version: str) -> Model:
    """The same model under another version."""
    manifest = model.manifest.model_copy(update={"version": version})
    return dataclasses.replace(model, bundle=dataclasses.replace(model.bundle, manifest=manifest))


def saved_large() -> bytes:
    return image_bytes(COLOURS["red"], size=(500, 500))
