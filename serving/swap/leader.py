"""Leads a swap: another bundle for all workers of a server, or for none. The worker that is asked for a swap leads it.

First every worker loads and tests the bundle. Only when all have done so do they switch, and the swap is complete when
all have switched. Nobody waits for a worker that dies meanwhile: its successor starts with the agreed bundle.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from serving.bundle.errors import BundleError
from serving.bundle.shelf import Shelf, ShelfError
from serving.errors import BundleRefusedError, RequestError, SwapError
from serving.swap.agreement import BundleLocation, Refusal, SwapState, WorkerGroup, WorkerReport
from serving.telemetry import log
from serving.telemetry.metrics import SWAPS

PATIENCE = 120.0
"""Seconds for all workers to load a bundle, and for another swap to end."""
POLL = 0.02
"""Seconds between two reads of the workers' reports."""
WATCH = 0.5
"""Seconds between two reads of a shelf."""
FIRST_RETRY, LONGEST_RETRY = 2.0, 60.0
"""Seconds until a refused bundle is tried again; doubled after every refusal."""


class SwapOutcome(NamedTuple):
    """The result of a swap."""

    changed: bool
    state: SwapState
    workers: list[WorkerReport]


class SwapLeader:
    """Leads swaps, one at a time, in its own thread. Bundles come from a shelf, or from one path."""

    def __init__(self, group: WorkerGroup, *, shelf: Path | None, bundle: Path, patience: float = PATIENCE) -> None:
        self._group = group
        self._shelf = None if shelf is None else Shelf(shelf)
        self._bundle = bundle
        self._patience = patience
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swaps")
        self._watched: Future[None] | None = None
        self._watched_at = -WATCH
        self._end = threading.Event()
        for outcome in ("switched", "refused"):
            # From 0 on: Prometheus sees no increase of a series that begins with its first swap.
            SWAPS.labels(outcome).inc(0)

    def status(self) -> SwapOutcome:
        return SwapOutcome(False, self._group.state(), self._group.reports())

    def reload(self) -> Future[SwapOutcome]:
        """Swap to the current bundle of the shelf, or to the bundle at the path."""
        return self._thread.submit(self._reload)

    def roll_back(self) -> Future[SwapOutcome]:
        """Swap to the previous bundle; the shelf is rolled back too, so that all replicas follow."""
        return self._thread.submit(self._roll_back)

    def publish(self, name: str, instead_of: str) -> Future[SwapOutcome]:
        """Swap to another bundle on the shelf, in place of the one that it continues.

        The shelf points at it only after all workers have loaded and tested it. A SwapError if the shelf points at a
        different bundle than `instead_of` by then.
        """
        return self._thread.submit(self._publish, name, instead_of)

    def watch(self) -> None:
        """Start a swap if the shelf has changed; called repeatedly."""
        if self._shelf is None or (self._watched is not None and not self._watched.done()):
            return
        now = time.monotonic()
        if now < self._watched_at + WATCH:
            return
        self._watched_at = now
        if self._is_new(self._shelf.current()):
            self._watched = self._thread.submit(self._follow_shelf)

    def close(self) -> None:
        """Abandon a swap that is under way."""
        self._end.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_new(self, path: Path | None) -> bool:
        state = self._group.state()
        if path is None or path == state.serving.path:
            return False
        refused = state.refused
        if refused is None or refused.path != path:
            return True
        return time.monotonic() > refused.at + min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** min(refused.times - 1, 10))

    def _follow_shelf(self) -> None:
        try:
            with self._leading():
                # Another worker may have noticed first, and have completed the swap.
                path = self._shelf.current() if self._shelf is not None else None
                if path is not None and self._is_new(path):
                    self._swap(path)
        except RequestError:
            # It is logged and counted where it is raised, and there is no request to answer.
            pass
        except Exception:
            log.exception("the shelf could not be followed")

    def _reload(self) -> SwapOutcome:
        with self._leading():
            if self._shelf is None:
                return self._swap(self._copy())
            path = self._shelf.current()
            if path is None:
                raise SwapError("nothing to load", got=f"no link `current` in {self._shelf.folder}", allowed="one")
            return self._swap(path)

    def _roll_back(self) -> SwapOutcome:
        with self._leading():
            if self._shelf is not None:
                path = self._shelf.previous()
            else:
                before = self._group.state().previous
                path = None if before is None else before.path
            if path is None:
                allowed = "a rollback after at least one swap"
                raise SwapError("nothing to roll back to", got="no previous bundle", allowed=allowed)
            if self._shelf is None:
                return self._swap(path)
            if not self._shelf.writable:
                raise SwapError(
                    "this server may not roll back",
                    got=f"{self._shelf.folder}, which is read-only here",
                    allowed="point `current` at the previous bundle where the shelf can be written",
                )
            return self._swap(path, before_switch=self._roll_back_shelf)

    def _publish(self, name: str, instead_of: str) -> SwapOutcome:
        shelf = self._shelf
        if shelf is None:
            raise SwapError("nothing to publish on", got="no shelf", allowed="a server with OPENWORLD_BUNDLES")

        def point() -> None:
            try:
                shelf.point_at(name, instead_of)
            except (OSError, ShelfError) as error:
                raise SwapError("the shelf cannot be changed", got=str(error), allowed="a writable shelf") from error

        with self._leading():
            return self._swap((shelf.folder / name).resolve(), before_switch=point)

    def _roll_back_shelf(self) -> None:
        assert self._shelf is not None
        try:
            self._shelf.roll_back()
        except (OSError, ShelfError) as error:
            problem = "the shelf cannot be rolled back"
            raise SwapError(problem, got=str(error), allowed="a writable shelf") from error

    def _copy(self) -> Path:
        try:
            return self._group.copy_bundle(self._bundle)
        except BundleError as error:
            refused = BundleRefusedError("no bundle to load", got=str(error), allowed="a bundle directory")
            self._refuse(self._group.state(), self._bundle, refused)
            raise refused from error

    @contextlib.contextmanager
    def _leading(self) -> Iterator[None]:
        until = time.monotonic() + self._patience
        with self._group.leading(lambda: not self._end.wait(POLL) and time.monotonic() < until) as alone:
            if not alone:
                got = f"no end of it in {self._patience:g} seconds"
                raise SwapError("another swap is under way", got=got, allowed="one at a time")
            yield

    def _swap(self, path: Path, before_switch: Callable[[], None] = lambda: None) -> SwapOutcome:
        """Two rounds: all workers prepare, then all switch. Only called by the leader."""
        before = self._group.state()
        proposal = before.model_copy(update={"round": before.round + 1, "proposed": path})
        self._group.publish(proposal)
        try:
            version = self._wait_until_ready(proposal.round)
            before_switch()
        except RequestError as error:
            self._refuse(proposal, path, error)
            raise
        changed = version != before.serving.version
        # A second copy of the served bundle is useless; on a shelf its path has changed.
        moved = changed or self._shelf is not None
        agreed = SwapState(
            round=proposal.round,
            serving=BundleLocation(path=path, version=version) if moved else before.serving,
            previous=before.serving if changed else before.previous,
        )
        self._group.publish(agreed)
        if changed:
            SWAPS.labels("switched").inc()
        workers = self._wait_until_switched(agreed)
        self._group.remove_unused_copies(agreed)
        log.info("all %d workers serve %s; before: %s", len(workers), version, before.serving.version)
        return SwapOutcome(changed, agreed, workers)

    def _refuse(self, proposal: SwapState, path: Path, error: RequestError) -> None:
        last = proposal.refused
        times = 1 + (last.times if last is not None and last.path == path else 0)
        refused = Refusal(path=path, reason=str(error), at=time.monotonic(), times=times)
        after = proposal.model_copy(update={"proposed": None, "refused": refused})
        self._group.publish(after)
        self._group.remove_unused_copies(after)
        SWAPS.labels("refused").inc()
        log.error("swap refused, %s is still served: %s", proposal.serving.version, error)

    def _wait_until_ready(self, number: int) -> str:
        """The version that every worker has loaded from the bundle."""

        def ready(worker: WorkerReport) -> bool:
            if worker.round == number and worker.error is not None:
                raise BundleRefusedError(
                    f"worker {worker.pid} refused the bundle",
                    got=worker.error,
                    allowed="a complete bundle that reproduces its golden outputs here",
                )
            return worker.round == number

        versions = {worker.prepared for worker in self._wait_for_all(ready)}
        if len(versions) != 1:
            raise BundleRefusedError(
                "workers read different bundles",
                got=", ".join(map(str, versions)),
                allowed="a bundle that does not change",
            )
        return str(versions.pop())

    def _wait_until_switched(self, state: SwapState) -> list[WorkerReport]:
        def switched(worker: WorkerReport) -> bool:
            there = worker.path == state.serving.path
            if not there and worker.round == state.round and worker.error is not None:
                problem = f"worker {worker.pid} did not follow the others"
                raise SwapError(problem, got=worker.error, allowed="all workers must load the same bundle")
            return there

        return self._wait_for_all(switched)

    def _wait_for_all(self, done: Callable[[WorkerReport], bool]) -> list[WorkerReport]:
        """The reports of all live workers, once each of them is done."""
        until = time.monotonic() + self._patience
        while True:
            workers = self._group.reports()
            late = [str(worker.pid) for worker in workers if not done(worker)]
            if not late:
                return workers
            if self._end.wait(POLL) or time.monotonic() > until:
                got = f"no answer from worker {', '.join(late)}"
                raise SwapError("not all workers followed", got=got, allowed=f"all in {self._patience:g} seconds")
