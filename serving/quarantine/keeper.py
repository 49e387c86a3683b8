"""Writes a worker's unknown images to the store, off the request path.

Requests only put an image into a bounded queue; if it is full the image is dropped at once. A thread writes many images
in one transaction, and waits for an unavailable database or disk. Nothing else waits for that thread, unless the
server is to answer only after the write (`durable`).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from serving.quarantine.records import Arrival, Caps, ItemKind, UnavailableError
from serving.quarantine.store import Store
from serving.telemetry import log, metrics

BATCH, BATCH_BYTES = 64, 8 * 1024 * 1024
QUEUE_BYTES = 64 * 1024 * 1024
"""The limit of all queued images together, to bound the worker's memory."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
RETRY_FOR = 300.0
"""Seconds before the images of a failing write are dropped and the next ones are tried."""
MAINTAIN_EVERY = 60.0
SWEEP_EVERY = 3600.0

Reason = Literal["queue_full", "database", "images", "unreadable", "shutdown"]


class Keeper:
    """One per worker; all methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        *,
        caps: Caps | None = None,
        audit_share: float = 0.0,
        queue: int = 256,
        queue_bytes: int = QUEUE_BYTES,
        retry_for: float = RETRY_FOR,
        durable: bool = False,
    ) -> None:
        self.store = store
        self.durable = durable
        """Whether an image is answered only once it is written."""
        self._caps = caps or Caps()
        self._audit_share = audit_share
        self._most, self._most_bytes = queue, queue_bytes
        self._retry_for = retry_for
        self._queue: deque[Arrival] = deque()
        self._queued_bytes = 0
        self._writing = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._give_up_at = float("inf")
        self._failing_since: float | None = None
        self._next_sweep = 0.0
        for reason in get_args(Reason):
            # From 0 on: Prometheus sees no increase of a series that begins with its first loss.
            metrics.DROPPED.labels(reason).inc(0)
        self._thread = threading.Thread(target=self._work, name="quarantine", daemon=True)
        self._thread.start()

    def wants(self, known: bool) -> ItemKind | None:
        """The kind that an image with such an answer is to be offered as; None: not at all."""
        if not known:
            return "unknown"
        return "audit" if random.random() < self._audit_share else None

    def offer(self, arrival: Arrival) -> None:
        """Queue an image, or count it as dropped. Returns at once and never raises."""
        try:
            metrics.OFFERED.inc()
            if reason := self._put(arrival):
                metrics.DROPPED.labels(reason).inc()
                _tell([arrival], reason)
        except Exception:
            log.exception("an image could not be offered to the quarantine")

    def close(self, patience: float) -> None:
        """Write the queued images for at most `patience` seconds; the others are dropped and counted."""
        self._give_up_at = time.monotonic() + patience
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(patience)
        with self._changed:
            waiting = list(self._queue)
            lost, self._writing = len(waiting) + self._writing, 0
            self._queue.clear()
        _tell(waiting, "shutdown")
        if lost:
            metrics.DROPPED.labels("shutdown").inc(lost)
            log.warning("%d images were not yet written to the quarantine when the server stopped", lost)
        if not self._thread.is_alive():
            self.store.close()

    def _put(self, arrival: Arrival) -> Reason | None:
        size = len(arrival.content)
        with self._changed:
            if self._closing.is_set():
                return "shutdown"
            # An image larger than the whole budget is accepted if the queue is empty.
            if len(self._queue) >= self._most or (self._queue and self._queued_bytes + size > self._most_bytes):
                return "queue_full"
            self._queue.append(arrival)
            self._queued_bytes += size
            self._changed.notify()
        return None

    def _work(self) -> None:
        self._maintain()
        maintain_at = time.monotonic() + MAINTAIN_EVERY
        while not self._closing.is_set() or self._queue:
            if batch := self._take(maintain_at - time.monotonic()):
                self._write(batch, until=time.monotonic() + self._retry_for)
                # While it waits for the next images, the thread does not keep these in memory.
                batch = []
            if time.monotonic() >= maintain_at and not self._closing.is_set():
                self._maintain()
                maintain_at = time.monotonic() + MAINTAIN_EVERY

    def _take(self, patience: float) -> list[Arrival]:
        """The first queued images, as many as make one transaction."""
        batch: list[Arrival] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set(), timeout=max(0.0, patience))
            while self._queue and len(batch) < BATCH and size < BATCH_BYTES:
                batch.append(self._queue.popleft())
                size += len(batch[-1].content)
            self._queued_bytes -= size
            self._writing = len(batch)
        return batch

    def _write(self, batch: list[Arrival], until: float) -> None:
        """Write a batch, retrying while the store is unavailable; after another error each image is tried alone."""
        pause = FIRST_PAUSE
        while True:
            try:
                added = self.store.add(batch)
            except UnavailableError as error:
                self._failed(error.part, error)
                if time.monotonic() + pause > min(until, self._give_up_at):
                    self._drop_batch(batch, error.part)
                    return
                self._wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception as error:
                if len(batch) > 1:
                    for arrival in batch:
                        self._write([arrival], until)
                    return
                metrics.FAILURES.labels("image").inc()
                log.warning("an image cannot be stored in the quarantine: %s: %s", type(error).__name__, error)
                self._drop_batch(batch, "unreadable")
                return
            else:
                self._done(len(batch))
                metrics.KEPT.inc(len(added.kept))
                metrics.COPIES.inc(added.copies)
                _tell(batch, None)
                self._recovered()
                self._enforce_caps()
                return

    def _wait(self, seconds: float) -> None:
        """Sleep, but only briefly once the server is stopping."""
        if self._closing.is_set():
            time.sleep(min(seconds, FIRST_PAUSE))
        else:
            self._closing.wait(seconds)

    def _maintain(self) -> None:
        self._enforce_caps()
        if time.monotonic() >= self._next_sweep:
            with self._tolerant():
                if swept := self.store.sweep():
                    log.info("removed %d image files that no item of the quarantine refers to", swept)
                self._next_sweep = time.monotonic() + SWEEP_EVERY

    def _enforce_caps(self) -> None:
        with self._tolerant():
            for cap, count in self.store.enforce(self._caps).items():
                metrics.EVICTED.labels(cap).inc(count)
            usage = self.store.usage()
            metrics.HELD_ITEMS.set(usage.items)
            metrics.HELD_BYTES.set(usage.bytes)
            self._recovered()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except UnavailableError as error:
            self._failed(error.part, error)
        except Exception:
            metrics.FAILURES.labels("other").inc()
            log.exception("maintenance of the quarantine failed")

    def _failed(self, part: Literal["database", "images"], error: UnavailableError) -> None:
        metrics.FAILURES.labels(part).inc()
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            log.error("the quarantine does not work, predictions continue: %s", error)

    def _recovered(self) -> None:
        if self._failing_since is not None:
            log.warning("the quarantine works again, after %.0f seconds", time.monotonic() - self._failing_since)
            self._failing_since = None

    def _drop_batch(self, batch: list[Arrival], reason: Reason) -> None:
        # `close` may have counted them already after its timeout.
        if self._done(len(batch)):
            metrics.DROPPED.labels(reason).inc(len(batch))
        _tell(batch, reason)

    def _done(self, count: int) -> bool:
        """Whether these images were still counted as being written."""
        with self._changed:
            counted_here = self._writing >= count
            self._writing = max(0, self._writing - count)
        return counted_here


def _tell(arrivals: Sequence[Arrival], reason: Reason | None) -> None:
    for arrival in arrivals:
        if arrival.when_stored is not None:
            arrival.when_stored(reason)
