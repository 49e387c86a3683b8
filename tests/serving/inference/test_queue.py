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
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.bundle.model import BundleModel
from serving.bundle.pixels import LIMITS, to_pixels
from serving.bundle.providers import CUDA
from serving.errors import BusyError, ImageFormatError, OutputError, QuarantineAwayError, ServerError
from serving.inference.answers import AnswerFormatter, PredictionOptions, answer_image
from serving.inference.job import Job
from serving.inference.loaded import CPU_BATCH, CUDA_BATCH, TRIAL_BATCH, LoadedModel
from serving.inference.queue import SMALL_BYTES, InferenceQueue
from serving.quarantine.records import Arrival
from tests.helpers_hostile import with_scans
from tests.helpers_serving import COLOURS, GREY, PATIENCE, image_bytes

IMAGES = [image_bytes(colour) for colour in ((255, 0, 0), (10, 200, 30), (90, 90, 90), (3, 4, 250), (240, 250, 9))]


options = PredictionOptions.for_model


class Watched(BundleModel):
    """A model that records its batches and can be blocked."""

    def __init__(self, model: BundleModel) -> None:
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
        assert self.free.wait(PATIENCE)
        return super().run(pixels)


def unmeasured(model: BundleModel, max_batch: int = 8, *, quick: bool = False) -> LoadedModel:
    """A loaded model whose batches and speed are given."""
    return LoadedModel(model, max_batch, AnswerFormatter(model.manifest), options(model), quick)


def with_queue(
    model: BundleModel,
    body: Callable[[InferenceQueue], Awaitable[Any]],
    *,
    max_batch: int = 8,
    limit: int = 100,
    keeper: Any = None,
    threads: int = 2,
    quick: bool = False,
) -> Any:
    async def main() -> Any:
        loaded = unmeasured(model, max_batch, quick=quick)
        queue = InferenceQueue(loaded, limit=limit, threads=threads, limits=LIMITS, keeper=keeper)
        del loaded
        try:
            return await body(queue)
        finally:
            await asyncio.to_thread(queue.close)

    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


def answered_alone(model: BundleModel, content: bytes, chosen: PredictionOptions) -> dict[str, Any]:
    return answer_image(model, content, chosen).model_dump(mode="json")


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_answers_are_those_of_single_images_whatever_the_batch(model: BundleModel, max_batch: int) -> None:
    choices = [
        options(model),
        PredictionOptions.for_model(model, task=1),
        PredictionOptions.for_model(model, alpha=0.3, top=1),
    ]
    asked = [(content, choices[number % 3]) for number, content in enumerate(IMAGES * 4)]
    watched = Watched(model)

    async def body(queue: InferenceQueue) -> list[str]:
        return await asyncio.gather(
            *(queue.submit(lambda c=content: c, chosen, queue.loaded) for content, chosen in asked)
        )

    for answer, (content, chosen) in zip(with_queue(watched, body, max_batch=max_batch), asked, strict=True):
        got, wanted = json.loads(answer), answered_alone(model, content, chosen)
        assert (got["label"], got["top"][0]["label"]) == (wanted["label"], wanted["top"][0]["label"])
        assert got["unknown_score"] == pytest.approx(wanted["unknown_score"], abs=1e-5)
        assert got["confidence"] == pytest.approx(wanted["confidence"], abs=1e-5)
        assert got.keys() == wanted.keys()
    assert max(watched.sizes) <= max_batch
    assert sum(watched.sizes) == len(asked)


def test_a_batch_is_what_came_while_the_last_one_ran(model: BundleModel) -> None:
    watched = Watched(model)
    watched.free.clear()

    async def body(queue: InferenceQueue) -> None:
        chosen = options(model)
        first = queue.submit(lambda: IMAGES[0], chosen, queue.loaded)
        await asyncio.to_thread(watched.busy.wait, PATIENCE)
        others = [queue.submit(lambda c=content: c, chosen, queue.loaded) for content in IMAGES[1:]]
        while len(queue._decoded) < len(others):
            await asyncio.sleep(0.001)
        watched.free.set()
        await asyncio.gather(first, *others)

    with_queue(watched, body)
    assert watched.sizes == [1, len(IMAGES) - 1]


def test_a_cancelled_request_is_not_run(model: BundleModel) -> None:
    watched = Watched(model)
    watched.free.clear()

    async def body(queue: InferenceQueue) -> None:
        chosen = options(model)
        first = queue.submit(lambda: IMAGES[0], chosen, queue.loaded)
        await asyncio.to_thread(watched.busy.wait, PATIENCE)
        abandoned = [queue.submit(lambda: IMAGES[1], chosen, queue.loaded) for _ in range(5)]
        wanted = queue.submit(lambda: IMAGES[2], chosen, queue.loaded)
        while len(queue._decoded) < 6:
            await asyncio.sleep(0.001)
        # One thread runs the graph; the other one reads this image, so that neither can begin with a late request.
        reading, going_on = threading.Event(), threading.Event()

        def slowly() -> bytes:
            reading.set()
            assert going_on.wait(PATIENCE)
            return IMAGES[3]

        abandoned.append(queue.submit(slowly, chosen, queue.loaded))
        await asyncio.to_thread(reading.wait, PATIENCE)
        read: list[int] = []
        late = queue.submit(lambda: read.append(1) or IMAGES[0], chosen, queue.loaded)  # type: ignore[func-returns-value]
        for future in (*abandoned, late):
            future.cancel()
        going_on.set()
        watched.free.set()
        await asyncio.gather(first, wanted)
        await asyncio.to_thread(queue.close, PATIENCE)
        assert read == []

    with_queue(watched, body)
    assert watched.sizes == [1, 1]


def test_an_invalid_image_does_not_affect_the_others(model: BundleModel) -> None:
    async def body(queue: InferenceQueue) -> list[Any]:
        contents = [IMAGES[0], b"junk", IMAGES[1]]
        asked = [queue.submit(lambda c=content: c, options(model), queue.loaded) for content in contents]
        asked.append(queue.submit(lambda: 1 / 0, options(model), queue.loaded))  # type: ignore[arg-type, return-value]
        return await asyncio.gather(*asked, return_exceptions=True)

    red, junk, green, broken = with_queue(model, body)
    assert json.loads(red)["best_guess"] == "red"
    assert json.loads(green)["best_guess"] == "green"
    assert isinstance(junk, ImageFormatError)
    assert isinstance(broken, ServerError)
    assert "ZeroDivisionError" in str(broken)


def test_a_non_finite_row_is_an_error_in_its_own_slot_only(model: BundleModel) -> None:
    class Failing(Watched):
        def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
            outputs = super().run(pixels)
            outputs["distances"][pixels[:, 0, 0, 0] == 90] = np.nan
            return outputs

    async def body(queue: InferenceQueue) -> list[Any]:
        asked = [queue.submit(lambda c=content: c, options(model), queue.loaded) for content in IMAGES]
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = with_queue(Failing(model), body)
    assert [isinstance(outcome, OutputError) for outcome in outcomes] == [False, False, True, False, False]


def test_a_graph_that_fails_answers_those_in_its_batch(model: BundleModel, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Watched):
        def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
            super().run(pixels)
            raise RuntimeError("out of memory")

    async def body(queue: InferenceQueue) -> None:
        with pytest.raises(ServerError):
            await queue.submit(lambda: IMAGES[0], options(model), queue.loaded)

    with_queue(Failing(model), body)
    assert "out of memory" in caplog.text


def test_an_explanation_that_fails_is_an_error_of_its_own(
    model: BundleModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours, which have waited with it, are answered in batches without it."""

    def explained(*_: object) -> dict[str, Any]:
        raise ValueError("no feature maps")

    monkeypatch.setattr("serving.inference.job.explained", explained)
    watched = Watched(model)
    watched.free.clear()

    async def body(queue: InferenceQueue) -> list[Any]:
        plain = options(model)
        why = dataclasses.replace(plain, explain="true")
        first = queue.submit(lambda: IMAGES[0], plain, queue.loaded)
        await asyncio.to_thread(watched.busy.wait, PATIENCE)
        others = [queue.submit(lambda: IMAGES[1], each, queue.loaded) for each in (plain, plain, why, plain, plain)]
        while len(queue._decoded) < len(others):
            await asyncio.sleep(0.001)
        watched.free.set()
        await first
        return await asyncio.gather(*others, return_exceptions=True)

    *before, failed, one, other = with_queue(watched, body)
    assert [json.loads(answer)["best_guess"] for answer in (*before, one, other)] == ["green"] * 4
    assert isinstance(failed, ServerError)
    assert "ValueError" in str(failed)
    assert sorted(watched.sizes) == [1, 1, 2, 2]


def test_room_is_kept_and_given_back(model: BundleModel) -> None:
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
        # A request larger than the limit is accepted when the queue is empty.
        with queue.admitted(4):
            pass

    with_queue(model, body, limit=3)


@pytest.mark.parametrize(
    ("alone", "together", "max_batch", "quick"),
    [(0.001, 0.002, CPU_BATCH, True), (0.001, 0.0085, 1, True), (0.003, 0.016, CPU_BATCH, False)],
)
def test_batches_and_quick_graphs_are_measured(
    model: BundleModel, monkeypatch: pytest.MonkeyPatch, alone: float, together: float, max_batch: int, quick: bool
) -> None:
    monkeypatch.setattr("serving.inference.loaded.fastest_runs", lambda *_: {1: alone, TRIAL_BATCH: together})
    loaded = LoadedModel.prepare(model)
    assert (loaded.max_batch, loaded.quick) == (max_batch, quick)


def test_batches_on_a_gpu_are_on(model: BundleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BundleModel, "provider", CUDA)
    assert LoadedModel.prepare(model).max_batch == CUDA_BATCH


def test_a_measurement_is_one_of_this_model(model: BundleModel) -> None:
    watched = Watched(model)
    LoadedModel.prepare(watched)
    assert set(watched.sizes) == {1, 8}


def test_small_images_are_answered_together_without_a_thread(model: BundleModel) -> None:
    """Two at a time, as the largest batch is 2; an invalid image does not affect the others."""
    watched = Watched(model)

    async def body(queue: InferenceQueue) -> list[Any]:
        readers = [partial(bytes, content) for content in (*IMAGES[:4], b"junk")]
        return await queue.predict(readers, options(model), queue.loaded, size=1000)

    *answers, junk = with_queue(watched, body, max_batch=2, threads=0, quick=True)
    wanted = [answered_alone(model, content, options(model)) for content in IMAGES[:4]]
    assert [json.loads(answer)["label"] for answer in answers] == [answer["label"] for answer in wanted]
    assert isinstance(junk, ImageFormatError)
    assert watched.sizes == [2, 2]


@pytest.mark.parametrize(("size", "side"), [(None, 8), (SMALL_BYTES + 1, 8), (1000, 500)])
def test_threads_answer_what_may_take_long(
    model: BundleModel, monkeypatch: pytest.MonkeyPatch, size: int | None, side: int
) -> None:
    """An upload that is large or of unknown size, and a small file of many pixels."""
    decoding: list[int] = []

    def recorded(image: Any, spec: Any) -> NDArray[np.uint8]:
        decoding.append(threading.get_ident())
        return to_pixels(image, spec)

    monkeypatch.setattr("serving.inference.job.to_pixels", recorded)
    content = image_bytes(COLOURS["red"], size=(side, side))

    async def body(queue: InferenceQueue) -> int:
        (answer,) = await queue.predict([lambda: content], options(model), queue.loaded, size=size)
        assert json.loads(answer)["label"] == "red"
        return threading.get_ident()

    loop = with_queue(model, body, quick=True)
    assert len(decoding) == 1
    assert decoding[0] != loop


def test_a_huge_image_does_not_hold_up_a_small_one(model: BundleModel) -> None:
    """Two threads decode: one is busy with the huge image, the other answers."""
    stuck = threading.Event()

    async def body(queue: InferenceQueue) -> None:
        huge = queue.submit(lambda: stuck.wait(PATIENCE) and saved_large(), options(model), queue.loaded)  # type: ignore[return-value]
        assert json.loads(await queue.submit(lambda: IMAGES[0], options(model), queue.loaded))["label"] == "red"
        assert not huge.done()
        stuck.set()
        await huge

    with_queue(model, body, max_batch=1)


def test_large_images_are_decoded_one_at_a_time(model: BundleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes much memory; while one is decoded and the next waits, the other thread decodes small images."""
    going_on = threading.Event()
    at_once: list[int] = []
    decoding = threading.Semaphore(2)

    def slow(image: Any, spec: Any) -> NDArray[np.uint8]:
        if image.width > 8:
            assert decoding.acquire(blocking=False)
            at_once.append(2 - decoding._value)
            assert going_on.wait(PATIENCE)
            decoding.release()
        return to_pixels(image, spec)

    monkeypatch.setattr("serving.inference.job.LARGE", 64)
    monkeypatch.setattr("serving.inference.job.to_pixels", slow)

    async def body(queue: InferenceQueue) -> None:
        large = [queue.submit(saved_large, queue.loaded.default_options, queue.loaded) for _ in range(2)]
        small = await queue.submit(lambda: IMAGES[0], queue.loaded.default_options, queue.loaded)
        assert json.loads(small)["label"] == "red"
        assert not any(future.done() for future in large)
        going_on.set()
        assert [json.loads(answer)["label"] for answer in await asyncio.gather(*large)] == ["red", "red"]

    with_queue(model, body)
    assert at_once == [1, 1]


def test_large_images_leave_half_of_the_room_to_small_ones(model: BundleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()

    def slow(image: Any, spec: Any) -> NDArray[np.uint8]:
        assert image.width == 8 or going_on.wait(PATIENCE)
        return to_pixels(image, spec)

    monkeypatch.setattr("serving.inference.job.LARGE", 64)
    monkeypatch.setattr("serving.inference.job.to_pixels", slow)

    async def body(queue: InferenceQueue) -> None:
        chosen, loaded = queue.loaded.default_options, queue.loaded
        # One is decoded, two wait: half of four.
        accepted = [queue.submit(saved_large, chosen, loaded) for _ in range(3)]
        with pytest.raises(BusyError, match="2 large images at a time"):
            await queue.submit(saved_large, chosen, loaded)
        # A request that exceeds this by itself is accepted: it would never fit otherwise.
        accepted += [queue.submit(saved_large, chosen, loaded, images=3)]
        assert json.loads(await queue.submit(lambda: IMAGES[0], chosen, loaded))["label"] == "red"
        assert not any(future.done() for future in accepted)
        going_on.set()
        assert [json.loads(answer)["label"] for answer in await asyncio.gather(*accepted)] == ["red"] * 4

    with_queue(model, body, limit=4)


def test_many_scans_make_an_image_large(model: BundleModel) -> None:
    def opened(content: bytes) -> Job:
        loop = asyncio.new_event_loop()
        job = Job(lambda: content, options(model), LoadedModel.prepare(model, 1), loop.create_future())
        loop.close()
        job.open(LIMITS, keep_content=False)
        return job

    assert not opened(with_scans(0, size=(800, 800))).large
    assert opened(with_scans(50, size=(800, 800))).large


def test_a_swap_does_not_change_the_answers_of_queued_requests(model: BundleModel) -> None:
    """Each request is answered by the model it was submitted to, and no batch mixes two models."""
    old, new = Watched(model), Watched(named(model, "new"))
    old.free.clear()

    async def body(queue: InferenceQueue) -> list[str]:
        before, after = queue.loaded, unmeasured(new)
        asked = [queue.submit(lambda: IMAGES[0], before.default_options, before)]
        await asyncio.to_thread(old.busy.wait, PATIENCE)
        for loaded, count in ((before, 2), (after, 3), (before, 2)):
            # One after the other, so that the order of the queue is known.
            for content in IMAGES[:count]:
                waiting = len(queue._decoded)
                asked.append(queue.submit(lambda c=content: c, loaded.default_options, loaded))
                while len(queue._decoded) == waiting:
                    await asyncio.sleep(0.001)
            queue.loaded = after
        old.free.set()
        return await asyncio.gather(*asked)

    versions = [json.loads(answer)["model"]["version"] for answer in with_queue(old, body)]
    was = model.manifest.version
    assert versions == [was] * 3 + ["new"] * 3 + [was] * 2
    assert (old.sizes, new.sizes) == ([1, 2, 2], [3])


def test_the_old_model_is_released_while_the_threads_wait(model: BundleModel) -> None:
    async def body(queue: InferenceQueue) -> None:
        old = weakref.ref(queue.loaded)
        for content in (*IMAGES, b"junk"):
            asked = queue.submit(lambda c=content: c, options(model), queue.loaded)
            await asyncio.gather(asked, return_exceptions=True)
        queue.loaded = unmeasured(model)
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
    """Accepts every unknown image, and records whether it was answered before it was offered."""

    durable = False

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


def test_unknowns_are_offered_once_they_are_answered(model: BundleModel) -> None:
    keeper = FakeKeeper()

    async def body(queue: InferenceQueue) -> list[str | BaseException]:
        for content in (*IMAGES, b"junk"):
            keeper.futures[content] = queue.submit(lambda c=content: c, options(model), queue.loaded)
        answers = await asyncio.gather(*keeper.futures.values(), return_exceptions=True)
        await asyncio.sleep(0)
        return answers

    replies = with_queue(WithFeatures(model), body, keeper=keeper)
    answers = {content: json.loads(answer) for content, answer in zip(IMAGES, replies[:-1], strict=True)}
    unknown = [content for content in IMAGES if not answers[content]["known"]]
    assert sorted(arrival.content for arrival in keeper.kept) == sorted(unknown)
    assert unknown == [IMAGES[2]]
    assert keeper.too_early == []
    for arrival in keeper.kept:
        assert arrival.answer == answers[arrival.content]
        assert (arrival.kind, arrival.model_version) == ("unknown", model.manifest.version)
        assert abs(arrival.received_at - time.time()) < 10 * PATIENCE
        assert arrival.features.base is None, "a row must not hold its batch"
        assert arrival.features.tolist() == [90, 90, 90]


class DurableKeeper(FakeKeeper):
    """Leaves it to the test when an image is stored."""

    durable = True

    def offer(self, arrival: Arrival) -> None:
        self.kept.append(arrival)


def test_a_durable_quarantine_comes_before_the_answer(model: BundleModel) -> None:
    keeper = DurableKeeper()
    grey = image_bytes(GREY)

    async def body(queue: InferenceQueue) -> None:
        def submit(content: bytes) -> asyncio.Future[str]:
            return queue.submit(lambda: content, options(model), queue.loaded)

        assert json.loads(await submit(IMAGES[0]))["label"] == "red", "a known image waits for nothing"
        # One after the other: two threads would offer them to the keeper in any order.
        waiting = []
        for count in (1, 2):
            waiting.append(submit(grey))
            while len(keeper.kept) < count:
                await asyncio.sleep(0.001)
        unknown, lost = waiting
        await asyncio.sleep(0.01)
        assert not unknown.done()
        first, second = (arrival.when_stored for arrival in keeper.kept)
        assert first is not None
        assert second is not None
        await asyncio.to_thread(first, None)
        assert json.loads(await unknown)["label"] == "unknown"
        await asyncio.to_thread(second, "queue_full")
        with pytest.raises(QuarantineAwayError, match="not stored: queue_full"):
            await lost

    # One thread, so that the images are stored in the order in which they were submitted.
    with_queue(WithFeatures(model), body, keeper=keeper, threads=1)


def test_without_a_keeper_no_features_are_asked_for(model: BundleModel) -> None:
    class Strict(Watched):
        def run(self, pixels: NDArray[np.uint8], **more: Any) -> dict[str, NDArray[np.float32]]:
            assert more == {}
            return super().run(pixels)

    async def body(queue: InferenceQueue) -> str:
        return await queue.submit(lambda: IMAGES[2], options(model), queue.loaded)

    assert json.loads(with_queue(Strict(model), body))["label"] == "unknown"


def named(model: BundleModel, version: str) -> BundleModel:
    """The same model under another version."""
    manifest = model.manifest.model_copy(update={"version": version})
    return dataclasses.replace(model, bundle=dataclasses.replace(model.bundle, manifest=manifest))


def saved_large() -> bytes:
    return image_bytes(COLOURS["red"], size=(500, 500))
