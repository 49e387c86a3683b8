"""The path of an image through a worker: accepted or refused at once, decoded, run, answered.

Threads decode images. The first thread that finds the graph idle runs it for all images that are decoded by then. So a
batch consists of the images that arrived during the previous run, and no request waits for a batch to fill. If batches
are not faster, images are run one at a time, as are images whose answer is explained. The event loop only submits
images and returns answers. Small images on a quick graph are an exception: passing one to a thread and back would take
longer than the work, so the event loop answers them directly.

The bundle may be swapped at any time: an image is answered by the model that was loaded when it was submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from serving.bundle.errors import ImageError
from serving.bundle.pixels import Limits
from serving.errors import BusyError, ClientGoneError, QuarantineAwayError, RequestError, ServerError, refused_image
from serving.inference.answers import PredictionOptions
from serving.inference.disconnect import DisconnectWatcher
from serving.inference.job import Job, ReadImage, answer_batch
from serving.inference.loaded import LoadedModel
from serving.quarantine.records import Arrival
from serving.telemetry import log, metrics
from serving.telemetry.drift import EVERY
from serving.telemetry.drift_board import DriftBoard

if TYPE_CHECKING:
    from serving.quarantine.keeper import Keeper

SMALL_BYTES, SMALL_PIXELS = 16 * 1024, 128 * 128
"""The size of an upload and of an image up to which the event loop may decode it."""
CLOSE_TIMEOUT = 2.0
"""Seconds that `close` waits for a thread; one that is still decoding cannot be stopped and ends with the process."""


class InferenceQueue:
    """A worker's only path to the graph; used on the event loop."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        limit: int,
        threads: int,
        limits: Limits,
        window: int = 1000,
        drift_every: int = EVERY,
        keeper: Keeper | None = None,
    ) -> None:
        self.loaded = loaded
        """May be set from any thread; queued images keep the model that they were submitted with."""
        self.depth = 0
        self._keeper = keeper
        self._limit = limit
        self._limits = limits
        self._window = metrics.SlidingWindow(window)
        self.drift = DriftBoard(drift_every, self._window)
        self._seconds_per_image = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._small: list[Job] = []
        self._incoming: SimpleQueue[Job | None] = SimpleQueue()
        self._large: deque[Job] = deque()
        self._decoding_large = threading.Lock()
        self._decoded: deque[Job] = deque()
        self._graph = threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"image-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def check_room(self, images: int = 1) -> None:
        """Raise a BusyError if there is no room for this number of images."""
        # A request that is larger than the whole limit is accepted if the queue is empty, because it could never be
        # accepted otherwise.
        if self.depth and self.depth + images > self._limit:
            got = f"{images} more, while {self.depth} are in progress"
            raise self._busy(got, f"{self._limit} images at a time in this worker")

    def _busy(self, got: str, allowed: str) -> BusyError:
        retry_after = max(1, math.ceil(self.depth * self._seconds_per_image))
        return BusyError("too much to do", got=got, allowed=allowed, retry_after=retry_after)

    @contextlib.contextmanager
    def admitted(self, images: int = 1) -> Iterator[None]:
        """Reserve room for this number of images until the block ends, or raise a BusyError at once."""
        self.check_room(images)
        self.depth += images
        metrics.DEPTH.set(self.depth)
        try:
            yield
        finally:
            self.depth -= images
            metrics.DEPTH.set(self.depth)

    def submit(
        self,
        read: ReadImage,
        options: PredictionOptions,
        loaded: LoadedModel,
        request_id: str | None = None,
        *,
        images: int = 1,
        size: int | None = None,
    ) -> asyncio.Future[str]:
        """Queue one of the `images` of a request; the future gets the answer as JSON, or a RequestError.

        Cancel it to give up. `options` were checked against `loaded`, which may have been replaced since; `request_id`
        is for the log. `size` is the number of bytes that the image is read from, if it is known.
        """
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        done: asyncio.Future[str] = self._loop.create_future()
        job = Job(read, options, loaded, done, request_id, images)
        if loaded.quick and size is not None and size <= SMALL_BYTES:
            if not self._small:
                # After the other requests that have arrived by now, which then are in the same batch.
                self._loop.call_soon(self._answer_small)
            self._small.append(job)
        else:
            self._incoming.put(job)
        return done

    async def predict(
        self,
        images: Sequence[ReadImage],
        options: PredictionOptions,
        loaded: LoadedModel,
        *,
        request_id: str | None = None,
        receive: Receive | None = None,
        size: int | None = None,
    ) -> list[str | RequestError]:
        """The answer of each image as JSON, or its error, in order; a BusyError if there is no room for them.

        `options` were checked against `loaded`. `receive` is used to notice that the client has disconnected. `size` is
        the number of bytes that the images are read from, if it is known.
        """
        with self.admitted(len(images)):
            futures = [self.submit(read, options, loaded, request_id, images=len(images), size=size) for read in images]
            with DisconnectWatcher(receive, futures) as watcher:
                try:
                    return [await _outcome(future) for future in futures]
                except asyncio.CancelledError:
                    if watcher.disconnected:
                        raise ClientGoneError(
                            "the client closed the connection", got="a closed connection", allowed="an open connection"
                        ) from None
                    raise
                finally:
                    for future in futures:
                        # Cancel it, or take note of its error, which asyncio would log otherwise.
                        if not future.cancel() and not future.cancelled():
                            future.exception()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the threads once they are done with the queue."""
        for _ in self._threads:
            self._incoming.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _answer_small(self) -> None:
        """Open and decode the small images that wait, and run a batch; on the event loop."""
        jobs, self._small = self._small, []
        for job in jobs:
            if self._open(job):
                if job.work > SMALL_PIXELS:
                    # A few bytes may hold many pixels: a thread goes on.
                    self._incoming.put(job)
                else:
                    self._decode(job)
        self._run_small()

    def _run_small(self) -> None:
        """Run one batch, and the next one after the loop has served others."""
        assert self._loop is not None
        if self._decoded and self._graph.acquire(blocking=False):
            self._run_batch()
            if self._decoded:
                self._loop.call_soon(self._run_small)

    def _work(self) -> None:
        while (job := self._incoming.get()) is not None:
            self._open_and_decode(job)
            # Decode what is queued first, as long as it fits into the same batch.
            if self._incoming.empty() or len(self._decoded) >= self.loaded.max_batch:
                self._run_decoded()
            # While it waits for the next job, a thread refers neither to an image nor to a replaced model.
            del job
        self._run_decoded()

    def _open(self, job: Job) -> bool:
        """Whether the image's header could be read, and the answer is still needed."""
        if job.abandoned:
            return False
        try:
            job.open(self._limits, keep_content=self._keeper is not None and job.options.store)
        except Exception as error:
            self._on_loop(self._fail, [job], error)
            return False
        return True

    def _open_and_decode(self, job: Job) -> None:
        if job.image is None and not self._open(job):
            return
        if not job.large:
            self._decode(job)
        # Half of the room is left to small images, however many large ones wait.
        elif len(self._large) < max(self._limit // 2, job.images):
            self._large.append(job)
            self._decode_large()
        else:
            allowed = f"{self._limit // 2} large images at a time in this worker"
            self._on_loop(self._fail, [job], self._busy("one more large image", allowed))

    def _decode_large(self) -> None:
        """Decode large images one at a time, because each takes much memory; other threads decode small ones."""
        # As with the graph: a thread that does not get the lock leaves, because its holder looks again.
        while self._large and self._decoding_large.acquire(blocking=False):
            try:
                if self._large:
                    self._decode(self._large.popleft())
            finally:
                self._decoding_large.release()
            self._run_decoded()

    def _decode(self, job: Job) -> None:
        if job.abandoned:
            return
        try:
            job.decode()
        except Exception as error:
            self._on_loop(self._fail, [job], error)
            return
        self._decoded.append(job)

    def _run_decoded(self) -> None:
        # A thread that does not get the lock leaves: its holder looks again after releasing it.
        while self._decoded and self._graph.acquire(blocking=False):
            self._run_batch()

    def _run_batch(self) -> None:
        """Run the next batch and release the graph."""
        try:
            batch = self._next_batch()
            if batch:
                self._run(batch)
        finally:
            self._graph.release()

    def _next_batch(self) -> list[Job]:
        """The first decoded jobs that one graph can run together."""
        batch: list[Job] = []
        while self._decoded:
            if batch and not _together(batch, self._decoded[0]):
                break
            job = self._decoded.popleft()
            if not job.abandoned:
                batch.append(job)
        return batch

    def _run(self, batch: list[Job]) -> None:
        try:
            answers = answer_batch(batch, features=self._keeper is not None)
        except Exception as error:
            self._on_loop(self._fail, batch, error)
            return
        self._seconds_per_image += 0.1 * (batch[0].inference_seconds / len(batch) - self._seconds_per_image)
        self._on_loop(self._finish, batch, answers)

    def _on_loop(self, function: Any, *arguments: Any) -> None:
        """Call a function on the event loop of the requests, from a thread or from the loop itself."""
        assert self._loop is not None
        if threading.get_ident() == self._loop_thread:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)

    def _finish(self, batch: list[Job], answers: Sequence[str | RequestError]) -> None:
        for job, outcome in zip(batch, answers, strict=True):
            if isinstance(outcome, RequestError):
                self._fail([job], outcome)
            elif self._keeper is not None and self._keeper.durable:
                self._answer_when_stored(self._keeper, job, outcome)
            elif not job.done.done():
                job.done.set_result(outcome)
        # After the waiting requests have been resumed, so that their responses are sent first.
        asyncio.get_running_loop().call_soon(self._record, batch)

    def _fail(self, batch: list[Job], error: Exception) -> None:
        request_error = _as_request_error(error, batch)
        for job in batch:
            if not job.done.done():
                job.done.set_exception(request_error)

    def _record(self, batch: list[Job]) -> None:
        metrics.BATCHES.observe(len(batch))
        for job in batch:
            metrics.DECODING.observe(job.decode_seconds)
            metrics.QUEUEING.observe(job.queue_seconds)
            metrics.INFERENCE.observe(job.inference_seconds)
            if (fields := job.fields) is not None:
                known = fields["known"]
                metrics.ANSWERS.labels(fields["task"], fields["best_guess"], str(known).lower()).inc()
                metrics.P_VALUES.observe(fields["p_value"])
                self._window.add(not known)
                # An answer within a given task, or of a model that was replaced, belongs to no stream that is watched.
                if job.options.task is None and job.loaded is self.loaded:
                    self.drift.record(job.loaded.version, job.loaded.tasks, fields, job.brightness, job.request_id)
                self.drift.publish_soon()
                keeper = self._keeper
                # The keeper writes in a separate thread.
                if keeper is not None and not keeper.durable and (arrival := _arrival(keeper, job)) is not None:
                    keeper.offer(arrival)

    def _answer_when_stored(self, keeper: Keeper, job: Job, answer: str) -> None:
        """Answer an image that the keeper wants only once it is written; if it cannot be, the request is refused."""

        def stored(reason: str | None) -> None:
            self._on_loop(finish, reason)

        def finish(reason: str | None) -> None:
            if job.done.done():
                return
            if reason is None:
                job.done.set_result(answer)
            else:
                got, allowed = f"not stored: {reason}", "the same request again, in a while"
                job.done.set_exception(QuarantineAwayError("the image must be stored first", got=got, allowed=allowed))

        if (arrival := _arrival(keeper, job)) is None:
            finish(None)
        else:
            keeper.offer(arrival._replace(when_stored=stored))


def _together(batch: list[Job], job: Job) -> bool:
    """Whether a job may join a batch."""
    first = batch[0]
    return job.loaded is first.loaded and len(batch) < first.loaded.max_batch and not (job.explains or first.explains)


def _arrival(keeper: Keeper, job: Job) -> Arrival | None:
    """The image for the quarantine, if it wants it."""
    fields = job.fields
    kind = keeper.wants(fields["known"]) if fields is not None else None
    if fields is None or kind is None or job.content is None or job.features is None:
        return None
    # A copy of its own row, so that the rest of the batch is not kept in memory with it.
    return Arrival(job.content, kind, time.time(), job.loaded.version, job.loaded.noted(fields), job.features.copy())


async def _outcome(future: asyncio.Future[str]) -> str | RequestError:
    try:
        return await future
    except RequestError as error:
        return error.without_traceback()


def _as_request_error(error: Exception, batch: list[Job]) -> RequestError:
    """The error for the callers; an unexpected one is logged with its traceback."""
    if isinstance(error, ImageError):
        return refused_image(error)
    if isinstance(error, RequestError):
        return error.without_traceback()
    requests = ", ".join(sorted({job.request_id for job in batch if job.request_id is not None})) or None
    log.error("no answer for an image of request %s", requests, exc_info=error, extra={"request_id": requests})
    return ServerError("the server failed on this image", got=type(error).__name__, allowed="see its log")
