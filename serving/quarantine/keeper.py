"""Brings a worker's unknown images into the store, off the request path.

Whoever answers a request only puts an image in line, or is turned away at once if the line is full. A thread writes,
many images in one transaction, and waits for a database or a disk that is away; nothing else ever waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal

from serving import metrics
from serving.quarantine.records import Arrival, Caps, Kind, UnavailableError
from serving.quarantine.store import Store
from serving.settings import Settings

BATCH, BATCH_BYTES = 64, 8 * 1024 * 1024
LINE_BYTES = 64 * 1024 * 1024
"""What may stand in line at most, however many images that are: a worker's memory is not ours to fill."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
RETRY_FOR = 300.0
"""Seconds before the images in hand are given up, and the next ones are tried."""
ROUNDS_EVERY = 60.0
SWEEP_EVERY = 3600.0

Reason = Literal["queue_full", "database", "images", "unreadable", "shutdown"]

log = logging.getLogger("bentoml.openworld")


class Keeper:
    """One a worker; all methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        *,
        caps: Caps | None = None,
        audit_share: float = 0.0,
        queue: int = 256,
        queue_bytes: int = LINE_BYTES,
        retry_for: float = RETRY_FOR,
    ) -> None:
        self.store = store
        self._caps = caps or Caps()
        self._audit_share = audit_share
        self._most, self._most_bytes = queue, queue_bytes
        self._retry_for = retry_for
        self._line: deque[Arrival] = deque()
        self._line_bytes = 0
        self._in_hand = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._give_up_at = float("inf")
        self._failing_since: float | None = None
        self._next_sweep = 0.0
        self._thread = threading.Thread(target=self._work, name="quarantine", daemon=True)
        self._thread.start()

    @classmethod
    def from_settings(cls, settings: Settings) -> Keeper:
        """Needs no database yet: it is opened by the thread, when it is there."""
        if settings.quarantine_url is None:
            raise ValueError("no quarantine_url in the settings; see serving.quarantine.keeper_of")
        return cls(
            Store(settings.quarantine_url, settings.quarantine_images),
            caps=Caps(settings.quarantine_max_items, settings.quarantine_max_bytes, settings.quarantine_max_days),
            audit_share=settings.quarantine_audit_share,
            queue=settings.quarantine_queue,
        )

    def wants(self, known: bool) -> Kind | None:
        """Whether an image with such an answer is to be offered, and as what."""
        if not known:
            return "unknown"
        return "audit" if random.random() < self._audit_share else None

    def offer(self, arrival: Arrival) -> None:
        """Put an image in line, or count it as dropped; at once, and without an error in any case."""
        try:
            if reason := self._put(arrival):
                _drop(1, reason)
        except Exception:
            log.exception("an image could not be offered to the quarantine")

    def close(self, patience: float) -> None:
        """Write what is in line, for so many seconds at most; what is left then is lost, and counted."""
        self._give_up_at = time.monotonic() + patience
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(patience)
        with self._changed:
            lost, self._in_hand = len(self._line) + self._in_hand, 0
            self._line.clear()
        if lost:
            _drop(lost, "shutdown")
            log.warning("%d images were still to be kept in the quarantine when the server stopped", lost)
        if not self._thread.is_alive():
            self.store.close()

    def _put(self, arrival: Arrival) -> Reason | None:
        size = len(arrival.content)
        with self._changed:
            if self._closing.is_set():
                return "shutdown"
            # One that is larger than the whole line is still taken when there is nothing else.
            if len(self._line) >= self._most or (self._line and self._line_bytes + size > self._most_bytes):
                return "queue_full"
            self._line.append(arrival)
            self._line_bytes += size
            self._changed.notify()
        return None

    def _work(self) -> None:
        self._make_rounds()
        rounds_at = time.monotonic() + ROUNDS_EVERY
        while not self._closing.is_set() or self._line:
            if batch := self._take(rounds_at - time.monotonic()):
                self._write(batch, until=time.monotonic() + self._retry_for)
            if time.monotonic() >= rounds_at and not self._closing.is_set():
                self._make_rounds()
                rounds_at = time.monotonic() + ROUNDS_EVERY

    def _take(self, patience: float) -> list[Arrival]:
        """The first in line, as many as make one transaction."""
        batch: list[Arrival] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closing.is_set(), timeout=max(0.0, patience))
            while self._line and len(batch) < BATCH and size < BATCH_BYTES:
                batch.append(self._line.popleft())
                size += len(batch[-1].content)
            self._line_bytes -= size
            self._in_hand = len(batch)
        return batch

    def _write(self, batch: list[Arrival], until: float) -> None:
        """Write, or try again; what the store refuses for other reasons is tried alone, so that it harms no other."""
        pause = FIRST_PAUSE
        while True:
            try:
                added = self.store.add(batch)
            except UnavailableError as error:
                self._failed(error.part, error)
                if time.monotonic() + pause > min(until, self._give_up_at):
                    self._lose(batch, error.part)
                    return
                self._wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception as error:
                if len(batch) > 1:
                    for arrival in batch:
                        self._write([arrival], until)
                    return
                metrics.FAILURES.labels("image").inc()
                log.warning("an image cannot be kept: %s: %s", type(error).__name__, error)
                self._lose(batch, "unreadable")
                return
            else:
                self._done(len(batch))
                metrics.KEPT.inc(len(added.kept))
                metrics.COPIES.inc(added.copies)
                self._worked()
                self._keep_to_caps()
                return

    def _wait(self, seconds: float) -> None:
        """Shorter once the server is about to stop: there is no time to lose then."""
        if self._closing.is_set():
            time.sleep(min(seconds, FIRST_PAUSE))
        else:
            self._closing.wait(seconds)

    def _make_rounds(self) -> None:
        self._keep_to_caps()
        if time.monotonic() >= self._next_sweep:
            with self._tolerant():
                if swept := self.store.sweep():
                    log.info("removed %d image files that nothing in the quarantine refers to", swept)
                self._next_sweep = time.monotonic() + SWEEP_EVERY

    def _keep_to_caps(self) -> None:
        with self._tolerant():
            for cap, count in self.store.enforce(self._caps).items():
                metrics.EVICTED.labels(cap).inc(count)
            held = self.store.held()
            metrics.HELD_ITEMS.set(held.items)
            metrics.HELD_BYTES.set(held.bytes)
            self._worked()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except UnavailableError as error:
            self._failed(error.part, error)
        except Exception:
            metrics.FAILURES.labels("other").inc()
            log.exception("the quarantine could not be looked after")

    def _failed(self, part: Literal["database", "images"], error: UnavailableError) -> None:
        metrics.FAILURES.labels(part).inc()
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            log.error("the quarantine does not work, predictions go on: %s", error)

    def _worked(self) -> None:
        if self._failing_since is not None:
            log.warning("the quarantine works again, after %.0f seconds", time.monotonic() - self._failing_since)
            self._failing_since = None

    def _lose(self, batch: list[Arrival], reason: Reason) -> None:
        # `close` may have counted them already, when its patience was at an end.
        if self._done(len(batch)):
            _drop(len(batch), reason)

    def _done(self, count: int) -> bool:
        with self._changed:
            there = self._in_hand >= count
            self._in_hand = max(0, self._in_hand - count)
        return there


def _drop(count: int, reason: Reason) -> None:
    metrics.DROPPED.labels(reason).inc(count)
