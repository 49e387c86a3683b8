"""The way of an image through a worker: taken in or refused at once, decoded, run, put into words.

Threads decode, and whichever of them finds the graph idle runs it for all that is decoded by then, so that a batch is
what came while the last one ran: nobody ever waits for a batch to fill. Where batches do not pay, one image is run at
a time. The event loop does nothing but hand over and take back, except that it answers a small image by itself while
there is no other: two threads that wake each other up take longer than the answer.

What is served may be swapped at any time: an image is answered by what was served when it was asked about.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from serving.answer import Question
from serving.errors import BusyError, EmptyImageError, RequestError, ServerError, TooManyBytesError, TooManyPixelsError
from serving.jobs import Job, answer
from serving.meter import Meter
from serving.preprocess import Limits
from serving.quarantine import Arrival
from serving.served import Served

if TYPE_CHECKING:
    from serving.quarantine.keeper import Keeper

QUICK = 0.004
"""Seconds: a graph that answers an image faster is worth no thread of its own while there is nothing else to do."""
SMALL = Limits(size=16 * 1024, pixels=128 * 128)
"""Images that are decoded in less time than it takes to hand them to a thread and back."""
PATIENCE = 2.0
"""Seconds at the end for an image that nobody waits for any more: a thread cannot be stopped, and ends with us."""

log = logging.getLogger("bentoml.openworld")


class Alone:
    """How long one image alone takes, of late."""

    def __init__(self) -> None:
        self._version: str | None = None
        self._seconds = math.inf

    def took(self, version: str, seconds: float) -> None:
        """Note a run; a single one that was held up by something else does not make a quick graph slow."""
        seconds = min(seconds, 2 * QUICK)
        if version != self._version:
            self._version, self._seconds = version, seconds
        else:
            self._seconds += 0.1 * (seconds - self._seconds)

    def quick(self, version: str) -> bool:
        """Whether this model's graph is known to be quick."""
        return version == self._version and self._seconds <= QUICK


class InferenceQueue:
    """A worker's one way to the graph; made and asked on the event loop."""

    def __init__(
        self,
        served: Served,
        meter: Meter,
        *,
        limit: int,
        threads: int,
        limits: Limits,
        keeper: Keeper | None = None,
    ) -> None:
        self.served = served
        """May be set from any thread; what is in line keeps what it was asked of."""
        self.depth = 0
        self._keeper = keeper
        self._meter = meter
        self._limit = limit
        self._limits = limits
        self._small = Limits(min(limits.size, SMALL.size), min(limits.pixels, SMALL.pixels))
        self._seconds_an_image = 0.0
        self._alone = Alone()
        self._loop = asyncio.get_running_loop()
        self._incoming: SimpleQueue[Job | None] = SimpleQueue()
        self._large: deque[Job] = deque()
        self._decoding_large = threading.Lock()
        self._decoded: deque[Job] = deque()
        self._graph = threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"image-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def check_room(self, images: int = 1, *, own: int = 0) -> None:
        """A BusyError if so many more do not fit in; `own` are of the same request."""
        # More than fit are still taken when there is nothing else to do: they could never be answered otherwise.
        if self.depth > own and self.depth + images > self._limit:
            raise BusyError(
                "too much to do",
                got=f"{images} more beside {self.depth}",
                allowed=f"{self._limit} images at a time in this worker",
                retry_after=max(1, math.ceil(self.depth * self._seconds_an_image)),
            )

    @contextlib.contextmanager
    def admitted(self, images: int = 1, *, own: int = 0) -> Iterator[None]:
        """Room for so many images until the block ends, or a BusyError at once."""
        self.check_room(images, own=own)
        self.depth += images
        try:
            yield
        finally:
            self.depth -= images

    def ask(
        self, read: Callable[[], bytes], question: Question, served: Served, request_id: str | None = None
    ) -> asyncio.Future[str]:
        """Put an image in line; the future gets the answer as JSON, or a RequestError. To cancel it is to give up.

        `question` was checked against `served`, which may have been replaced since; `request_id` is for the log.
        """
        done: asyncio.Future[str] = self._loop.create_future()
        self._incoming.put(Job(read, question, served, done, request_id))
        return done

    async def answer_in_place(
        self, read: Callable[[], bytes], question: Question, served: Served, request_id: str | None = None
    ) -> str | None:
        """As `ask`, but worked out here and now; None if the image has to stand in line.

        That is so unless it is small, the only one that was admitted, and `served` known to be quick.
        """
        if self.depth > 1 or not self._alone.quick(served.version):
            return None
        # Those that came at the same time are admitted meanwhile: they are better run together.
        await asyncio.sleep(0)
        if self.depth > 1 or not self._graph.acquire(blocking=False):
            return None
        job = Job(read, question, served, self._loop.create_future(), request_id)
        try:
            job.open(self._small, keep=self._keeper is not None)
            job.decode()
            (said,) = self._answer([job])
        except (EmptyImageError, TooManyBytesError, TooManyPixelsError):
            # Their errors name limits, which must be the server's own: the way through the threads has these.
            return None
        except RequestError:
            raise
        except Exception as error:
            raise _told(error, [job]) from error
        finally:
            self._graph.release()
            # Only what was abandoned can have come meanwhile, and goes.
            self._run_decoded()
        self._loop.call_soon(self._note, [job])
        if isinstance(said, RequestError):
            raise said
        return said

    def close(self, patience: float = PATIENCE) -> None:
        """End the threads, once they are done with what is in line; one that takes longer is left to itself."""
        for _ in self._threads:
            self._incoming.put(None)
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._incoming.get()) is not None:
            self._open(job)
            # What stands in line is worth decoding first, as long as it fits into the same batch.
            if self._incoming.empty() or len(self._decoded) >= self.served.max_batch:
                self._run_decoded()
            # While it waits for the next one, a thread holds neither an image nor a model that is no longer served.
            del job
        self._run_decoded()

    def _open(self, job: Job) -> None:
        if job.abandoned:
            return
        try:
            job.open(self._limits, keep=self._keeper is not None)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, [job], error)
            return
        if job.large:
            self._large.append(job)
            self._decode_large()
        else:
            self._decode(job)

    def _decode_large(self) -> None:
        """One at a time, for the memory that each takes; meanwhile the other threads decode small ones."""
        # As with the graph: whoever does not get the lock may leave.
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
            self._loop.call_soon_threadsafe(self._fail, [job], error)
            return
        self._decoded.append(job)

    def _run_decoded(self) -> None:
        # Whoever does not get the lock may leave: its holder looks again after it let go.
        while self._decoded and self._graph.acquire(blocking=False):
            try:
                batch = self._next_batch()
                if batch:
                    self._run(batch)
            finally:
                self._graph.release()

    def _next_batch(self) -> list[Job]:
        """Those in front that one graph can run together."""
        batch: list[Job] = []
        while self._decoded and (not batch or self._fits(self._decoded[0], batch)):
            job = self._decoded.popleft()
            if not job.abandoned:
                batch.append(job)
        return batch

    @staticmethod
    def _fits(job: Job, batch: list[Job]) -> bool:
        served = batch[0].served
        return job.served is served and len(batch) < served.max_batch

    def _run(self, batch: list[Job]) -> None:
        try:
            said = self._answer(batch)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, batch, error)
            return
        self._loop.call_soon_threadsafe(self._finish, batch, said)

    def _answer(self, batch: list[Job]) -> list[str | RequestError]:
        """By whoever holds the graph."""
        said = answer(batch, features=self._keeper is not None)
        seconds = batch[0].inference
        if len(batch) == 1:
            self._alone.took(batch[0].served.version, seconds)
        self._seconds_an_image += 0.1 * (seconds / len(batch) - self._seconds_an_image)
        return said

    def _finish(self, batch: list[Job], said: Sequence[str | RequestError]) -> None:
        for job, outcome in zip(batch, said, strict=True):
            if job.done.done():
                continue
            if isinstance(outcome, RequestError):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)
        # After those who wait have been woken, so that their answers are written first.
        self._loop.call_soon(self._note, batch)

    def _fail(self, batch: list[Job], error: Exception) -> None:
        told = _told(error, batch)
        for job in batch:
            if not job.done.done():
                job.done.set_exception(told)

    def _note(self, batch: list[Job]) -> None:
        self._meter.batch(len(batch))
        for job in batch:
            self._meter.stages(job.decoding, job.waited, job.inference)
            if job.fields is not None:
                fields = job.fields
                self._meter.answer(fields["task"], fields["best_guess"], fields["known"], fields["p_value"])
                if self._keeper is not None:
                    self._keep(self._keeper, job, fields)

    @staticmethod
    def _keep(keeper: Keeper, job: Job, fields: dict[str, Any]) -> None:
        """Hand over what is worth a second look; the keeper has a thread of its own."""
        kind = keeper.wants(fields["known"])
        if kind is not None and job.content is not None and job.features is not None:
            # A copy of its own row: the others of its batch are not to be held with it.
            keeper.offer(Arrival(job.content, kind, time.time(), job.served.version, fields, job.features.copy()))


def _told(error: Exception, batch: list[Job]) -> RequestError:
    """What the caller hears of it; what is our own fault is told to the log."""
    if isinstance(error, RequestError):
        return error.alone()
    requests = ", ".join(sorted({job.request_id for job in batch if job.request_id is not None})) or None
    log.error("no answer for an image of request %s", requests, exc_info=error, extra={"request_id": requests})
    return ServerError("the server failed on this image", got=type(error).__name__, allowed="see its log")
