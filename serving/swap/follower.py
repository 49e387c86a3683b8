"""A worker's part in a swap: it loads and tests the proposed bundle, and switches when all workers have done so.

This happens in a background thread while requests are answered. A proposal that fails changes only this worker's
report. The bundle before the last switch stays in memory, so that rolling back is quick.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from serving.host.memory import release_memory
from serving.inference.loaded import LoadedModel
from serving.swap.agreement import GroupMember, SwapState, WorkerGroup
from serving.telemetry import log

POLL = 0.05
"""Seconds between two reads of the shared state."""
RETRY_AFTER = 5.0
"""Seconds until a worker that could not load the bundle of the others tries again."""

Load = Callable[[Path, LoadedModel | None], LoadedModel]
"""Loads a bundle, given the one that is served."""


class Follower:
    """Keeps this worker on the bundle that the group agreed on; calls `switch` when that changes."""

    def __init__(self, group: WorkerGroup, load: Load, switch: Callable[[LoadedModel], None]) -> None:
        self._group = group
        self._load = load
        self._switch = switch
        # Before the state is read: a worker that leads a swap from now on waits for this one.
        self._member = GroupMember(group)
        self._current = load(group.state().serving.path, None)
        self._previous: LoadedModel | None = None
        self._staged: LoadedModel | None = None
        self._round = 0
        self._last_failure = -RETRY_AFTER
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def served(self) -> LoadedModel:
        return self._current

    def start(self, each_step: Callable[[], None] = lambda: None) -> None:
        """Report the served bundle, and follow the group in a thread, which also calls `each_step` at every step."""
        self._report_served()

        def run() -> None:
            failing = False
            while not self._end.wait(POLL):
                try:
                    self.step()
                    each_step()
                    failing = False
                except Exception:
                    # Logged once, because it may go on for long.
                    if not failing:
                        log.exception("this worker cannot follow the others")
                    failing = True

        self._thread = threading.Thread(target=run, name="follow", daemon=True)
        self._thread.start()

    def close(self, patience: float = 5.0) -> None:
        """Stop following; other workers no longer wait for this one."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(patience)
        self._member.leave()

    def step(self) -> None:
        """Read the shared state once and act on it."""
        state = self._group.state()
        if state.proposed is not None and state.round != self._round:
            self._prepare(state.round, state.proposed)
        if state.serving.path != self._current.path:
            self._follow(state)
        if state.proposed is None and self._staged is not None:
            self._staged = None
            release_memory()
        elif state.proposed is not None:
            self._withdraw_if_nobody_leads(state)

    def _prepare(self, number: int, path: Path) -> None:
        self._round = number
        try:
            self._staged = self._find(path) or self._load(path, self._current)
        except Exception as error:
            log.error("bundle refused: %s", error)
            self._member.report(round=number, prepared=None, error=_reason(error, path))
            return
        self._member.report(round=number, prepared=self._staged.version, error=None)

    def _find(self, path: Path) -> LoadedModel | None:
        """The bundle of this path if it is in memory; a bundle on disk never changes."""
        in_memory = (self._current, self._previous, self._staged)
        return next((loaded for loaded in in_memory if loaded is not None and loaded.path == path), None)

    def _follow(self, state: SwapState) -> None:
        path = state.serving.path
        loaded = self._find(path)
        if loaded is None:
            # This worker started after the others had prepared.
            if time.monotonic() < self._last_failure + RETRY_AFTER:
                return
            try:
                loaded = self._load(path, self._current)
            except Exception as error:
                self._last_failure = time.monotonic()
                log.error("the bundle of the other workers could not be loaded: %s", error)
                self._member.report(round=state.round, error=_reason(error, path))
                return
        # The same version from another path is not worth going back to.
        if loaded.version != self._current.version:
            self._previous = self._current
        self._current, self._staged = loaded, None
        self._switch(loaded)
        self._report_served()
        release_memory()
        log.info("switched to %s %s", loaded.model.manifest.name, loaded.version)

    def _report_served(self) -> None:
        current, previous = self._current, self._previous
        self._member.report(
            version=current.version,
            path=current.path,
            previous=None if previous is None else previous.version,
            error=None,
        )

    def _withdraw_if_nobody_leads(self, seen: SwapState) -> None:
        """A leader that was killed leaves its proposal behind."""
        with self._group.leading() as alone:
            if alone and (state := self._group.state()).round == seen.round and state.proposed is not None:
                self._group.publish(state.model_copy(update={"proposed": None}))


def _reason(error: Exception, path: Path) -> str:
    """Without the path, which may be that of an internal copy."""
    return str(error).replace(f"{path}/", "") or type(error).__name__
