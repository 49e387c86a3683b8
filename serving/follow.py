"""A worker's part in a swap: to load and test what is proposed, and to switch when all workers have done so.

A thread of its own does that, beside the requests. A proposal that fails changes nothing here but the report on it;
what was served before the last switch stays in memory, so that to go back takes a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serving.group import Group, Seat, State
from serving.memory import give_back
from serving.served import Served

POLL = 0.05
"""Seconds between two looks at what the workers agreed on."""
AGAIN = 5.0
"""Seconds until a worker that could not load what all others serve tries again."""

log = logging.getLogger("bentoml.openworld")

Load = Callable[[Path], Served]


@dataclass(frozen=True, eq=False)
class Held:
    """What a worker has in memory, and where it was read."""

    path: Path
    served: Served


class Follower:
    """Keeps what this worker serves as the group agreed; `switch` is called when that is something else."""

    def __init__(self, group: Group, load: Load, switch: Callable[[Served], None]) -> None:
        self._group = group
        self._load = load
        self._switch = switch
        # Before the state is read: whoever leads a swap from here on waits for this worker.
        self._seat: Seat = group.join()
        path = group.state().serving.path
        self._current = Held(path, load(path))
        self._previous: Held | None = None
        self._staged: Held | None = None
        self._round = 0
        self._failed_at = -AGAIN
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def served(self) -> Served:
        return self._current.served

    def start(self, beside: Callable[[], None] = lambda: None) -> None:
        """Say what is served here, and follow in a thread; `beside` is called at every look, too."""
        self._tell()

        def run() -> None:
            well = True
            while not self._end.wait(POLL):
                try:
                    self.look()
                    beside()
                    well = True
                except Exception:
                    # Once: it may stay so for long.
                    if well:
                        log.exception("this worker cannot follow the others")
                    well = False

        self._thread = threading.Thread(target=run, name="follow", daemon=True)
        self._thread.start()

    def close(self, patience: float = 5.0) -> None:
        """Stop following; nobody waits for this worker any more."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(patience)
        self._seat.leave()

    def look(self) -> None:
        """Do what the others ask for."""
        state = self._group.state()
        if state.proposed is not None and state.round != self._round:
            self._prepare(state.round, state.proposed)
        if state.serving.path != self._current.path:
            self._follow(state)
        if state.proposed is None and self._staged is not None:
            self._staged = None
            give_back()
        elif state.proposed is not None:
            self._give_up_if_nobody_leads(state)

    def _prepare(self, number: int, path: Path) -> None:
        self._round = number
        try:
            self._staged = self._held(path) or Held(path, self._load(path))
        except Exception as error:
            log.error("bundle refused: %s", error)
            self._seat.say(round=number, prepared=None, error=_reason(error, path))
            return
        self._seat.say(round=number, prepared=self._staged.served.version, error=None)

    def _held(self, path: Path) -> Held | None:
        """What was read there, if it is in memory; a bundle that has a place never changes."""
        known = (self._current, self._previous, self._staged)
        return next((held for held in known if held is not None and held.path == path), None)

    def _follow(self, state: State) -> None:
        path = state.serving.path
        held = self._held(path)
        if held is None:
            # It was not there when the others got ready.
            if time.monotonic() < self._failed_at + AGAIN:
                return
            try:
                held = Held(path, self._load(path))
            except Exception as error:
                self._failed_at = time.monotonic()
                log.error("what the other workers serve could not be loaded: %s", error)
                self._seat.say(round=state.round, error=_reason(error, path))
                return
        # The same version from another place is nothing to go back from.
        if held.served.version != self._current.served.version:
            self._previous = self._current
        self._current, self._staged = held, None
        self._switch(held.served)
        self._tell()
        give_back()
        log.info("switched to %s %s", held.served.model.manifest.name, held.served.version)

    def _tell(self) -> None:
        current, previous = self._current, self._previous
        self._seat.say(
            version=current.served.version,
            path=current.path,
            previous=None if previous is None else previous.served.version,
            error=None,
        )

    def _give_up_if_nobody_leads(self, seen: State) -> None:
        """A leader that was killed leaves its proposal behind."""
        with self._group.leading() as alone:
            if alone and (state := self._group.state()).round == seen.round and state.proposed is not None:
                self._group.agree(state.model_copy(update={"proposed": None}))


def _reason(error: Exception, path: Path) -> str:
    """Without the place, which may be a copy that nobody has heard of."""
    return str(error).replace(f"{path}/", "") or type(error).__name__
