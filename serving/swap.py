"""Another bundle for all workers of a server, or for none: who asks for a swap leads it.

First every worker loads and tests the bundle; only when all have done so are they told to switch, and only when all
have switched is the swap over. A worker that dies meanwhile is not waited for: its successor starts with what was
agreed on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from serving.errors import BundleRefusedError, RequestError, SwapError
from serving.group import Group, Place, Refusal, Report, State
from serving.layout import BundleError
from serving.metrics import SWAPS
from serving.shelf import Shelf, ShelfError

PATIENCE = 120.0
"""Seconds for all workers to load a bundle, and for another swap to end."""
LOOK = 0.02
WATCH = 0.5
"""Seconds between two looks at a shelf."""
SOON, LATE = 2.0, 60.0
"""Seconds until a bundle that was refused is tried again, at first and at last."""

log = logging.getLogger("bentoml.openworld")


class Outcome(NamedTuple):
    """How a swap went."""

    changed: bool
    state: State
    workers: list[Report]


class Swaps:
    """Leads swaps, one at a time, in a thread of its own; bundles come from a shelf, or from one path."""

    def __init__(self, group: Group, *, shelf: Path | None, bundle: Path, patience: float = PATIENCE) -> None:
        self._group = group
        self._shelf = None if shelf is None else Shelf(shelf)
        self._bundle = bundle
        self._patience = patience
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swaps")
        self._watched: Future[None] | None = None
        self._looked = -WATCH
        self._end = threading.Event()

    def status(self) -> Outcome:
        return Outcome(False, self._group.state(), self._group.reports())

    def reload(self) -> Future[Outcome]:
        """Take what is on the shelf now, or at the path."""
        return self._thread.submit(self._reload)

    def roll_back(self) -> Future[Outcome]:
        """Take what was served before; the shelf is put back, too, so that all replicas follow."""
        return self._thread.submit(self._roll_back)

    def watch(self) -> None:
        """Take what the shelf has become, if it has changed since the last look; called again and again."""
        if self._shelf is None or (self._watched is not None and not self._watched.done()):
            return
        now = time.monotonic()
        if now < self._looked + WATCH:
            return
        self._looked = now
        if self._is_news(self._shelf.current()):
            self._watched = self._thread.submit(self._take_news)

    def close(self) -> None:
        """Give up what is under way."""
        self._end.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_news(self, path: Path | None) -> bool:
        state = self._group.state()
        if path is None or path == state.serving.path:
            return False
        refused = state.refused
        if refused is None or refused.path != path:
            return True
        return time.time() > refused.at + min(LATE, SOON * 2.0 ** min(refused.times - 1, 10))

    def _take_news(self) -> None:
        try:
            with self._leading():
                # Another worker may have seen it first, and be done with it by now.
                path = self._shelf.current() if self._shelf is not None else None
                if path is not None and self._is_news(path):
                    self._swap(path)
        except RequestError:
            # It is logged and counted where it is raised; there is nobody to tell.
            pass
        except Exception:
            log.exception("the shelf could not be followed")

    def _reload(self) -> Outcome:
        with self._leading():
            if self._shelf is None:
                return self._swap(self._copy())
            path = self._shelf.current()
            if path is None:
                raise SwapError("nothing to load", got=f"no link `current` in {self._shelf.folder}", allowed="one")
            return self._swap(path)

    def _roll_back(self) -> Outcome:
        with self._leading():
            if self._shelf is None:
                previous = self._group.state().previous
                if previous is None:
                    raise _no_previous()
                return self._swap(previous.path)
            path = self._shelf.previous()
            if path is None:
                raise _no_previous()
            if not self._shelf.writable:
                raise SwapError(
                    "this server may not roll back",
                    got=f"{self._shelf.folder}, which it can only read",
                    allowed="to point `current` at the previous bundle where the shelf can be written",
                )
            return self._swap(path, before_switch=self._put_back)

    def _put_back(self) -> None:
        assert self._shelf is not None
        try:
            self._shelf.roll_back()
        except (OSError, ShelfError) as error:
            raise SwapError("the shelf cannot be put back", got=str(error), allowed="a shelf to write to") from error

    def _copy(self) -> Path:
        try:
            return self._group.take_in(self._bundle)
        except BundleError as error:
            refused = BundleRefusedError("no bundle to load", got=str(error), allowed="a bundle directory")
            self._refuse(self._group.state(), self._bundle, refused)
            raise refused from error

    @contextlib.contextmanager
    def _leading(self) -> Iterator[None]:
        until = time.monotonic() + self._patience
        with self._group.leading(lambda: not self._end.wait(LOOK) and time.monotonic() < until) as alone:
            if not alone:
                got = f"no end of it in {self._patience:g} seconds"
                raise SwapError("another swap is under way", got=got, allowed="one at a time")
            yield

    def _swap(self, path: Path, before_switch: Callable[[], None] = lambda: None) -> Outcome:
        """Two rounds: all get ready, all switch. Only the leader comes here."""
        before = self._group.state()
        proposal = before.model_copy(update={"round": before.round + 1, "proposed": path})
        self._group.agree(proposal)
        try:
            version = self._until_ready(proposal.round)
            before_switch()
        except RequestError as error:
            self._refuse(proposal, path, error)
            raise
        changed = version != before.serving.version
        # A second copy of what is served already is of no use; on a shelf, it has moved.
        moved = changed or self._shelf is not None
        agreed = State(
            round=proposal.round,
            serving=Place(path=path, version=version) if moved else before.serving,
            previous=before.serving if changed else before.previous,
        )
        self._group.agree(agreed)
        if changed:
            SWAPS.labels("switched").inc()
        workers = self._until_switched(agreed)
        self._tidy(agreed)
        log.info("all %d workers serve %s; before it was %s", len(workers), version, before.serving.version)
        return Outcome(changed, agreed, workers)

    def _refuse(self, proposal: State, path: Path, error: RequestError) -> None:
        last = proposal.refused
        times = 1 + (last.times if last is not None and last.path == path else 0)
        refused = Refusal(path=path, reason=str(error), at=time.time(), times=times)
        after = proposal.model_copy(update={"proposed": None, "refused": refused})
        self._group.agree(after)
        self._tidy(after)
        SWAPS.labels("refused").inc()
        log.error("swap refused, %s serves on: %s", proposal.serving.version, error)

    def _tidy(self, state: State) -> None:
        kept = {place.path for place in (state.serving, state.previous) if place is not None}
        self._group.throw_out(kept)

    def _until_ready(self, number: int) -> str:
        """The version that every worker found in the bundle."""

        def ready(worker: Report) -> bool:
            if worker.round == number and worker.error is not None:
                raise BundleRefusedError(
                    f"worker {worker.pid} refused the bundle",
                    got=worker.error,
                    allowed="a bundle that is whole and gives its golden answers here",
                )
            return worker.round == number

        versions = {worker.prepared for worker in self._until(ready)}
        if len(versions) != 1:
            raise BundleRefusedError(
                "workers read different bundles", got=", ".join(map(str, versions)), allowed="one that does not change"
            )
        return str(versions.pop())

    def _until_switched(self, state: State) -> list[Report]:
        def switched(worker: Report) -> bool:
            there = worker.path == state.serving.path
            if not there and worker.round == state.round and worker.error is not None:
                problem = f"worker {worker.pid} did not follow the others"
                raise SwapError(problem, got=worker.error, allowed="what the others could load")
            return there

        return self._until(switched)

    def _until(self, done: Callable[[Report], bool]) -> list[Report]:
        """All workers that live, once each of them is done."""
        until = time.monotonic() + self._patience
        while True:
            workers = self._group.reports()
            late = [str(worker.pid) for worker in workers if not done(worker)]
            if not late:
                return workers
            if self._end.wait(LOOK) or time.monotonic() > until:
                got = f"no answer of {', '.join(late)}"
                raise SwapError("not all workers followed", got=got, allowed=f"all in {self._patience:g} seconds")


def _no_previous() -> SwapError:
    return SwapError("nothing to roll back to", got="no previous bundle", allowed="one, from the last swap")
