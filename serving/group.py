"""What the workers of one server tell each other about bundles: a few small files in a folder of their own.

    state.json          what all are to serve, what they served before, and what is proposed to them
    server.lock         locked for as long as the server lives
    leading.lock        locked by the worker that leads a swap
    workers/NAME.json   what one worker serves, and how it got on with the last proposal
    workers/NAME.lock   locked for as long as that worker lives
    bundles/            copies of bundles that do not come from a shelf

A file is replaced whole, so that no reader sees half of one. The kernel drops a lock when its holder dies, however it
dies: nobody waits for the dead, and a process id that is used again misleads nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from serving.layout import MANIFEST, BundleError

VARIABLE = "OPENWORLD_GROUP"
"""How a server tells its workers where the folder is."""
PREFIX = "openworld-"


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Place(_File):
    """A bundle directory that does not change, and the version in it."""

    path: Path
    version: str

    @classmethod
    def of(cls, path: Path) -> Place:
        """As its manifest says; whether that is true is found out when it is loaded."""
        try:
            return cls(path=path, version=str(json.loads((path / MANIFEST).read_bytes())["version"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path / MANIFEST}: says no version: {error}") from error


class Refusal(_File):
    """A bundle that was not taken."""

    path: Path
    reason: str
    at: float
    times: int


class State(_File):
    """What the workers of a server agree on; written only by the one that leads."""

    round: int = 0
    serving: Place
    previous: Place | None = None
    proposed: Path | None = None
    refused: Refusal | None = None


class Report(_File):
    """What one worker says of itself."""

    pid: int
    version: str = ""
    """Empty until it has loaded something."""
    path: Path | None = None
    previous: str | None = None
    round: int = 0
    """The last proposal that it dealt with."""
    prepared: str | None = None
    """The version that it found in that proposal, loaded and tested."""
    error: str | None = None
    """Why it could not."""


class Group:
    """One server's folder, as any of its processes sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = str(folder / "state.json")
        self._read: tuple[bytes, State] | None = None

    @classmethod
    def found(cls, home: Path) -> Group:
        """A new folder in `home`, which goes when this process does; those of servers that were killed go now."""
        home.mkdir(parents=True, exist_ok=True)
        for lock in home.glob(f"{PREFIX}*/server.lock"):
            if not _held(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
        group = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=home)))
        # Never closed: it says that this process lives.
        _locked(group.folder / "server.lock")
        atexit.register(_remove_if_owner, group.folder, os.getpid())
        (group.folder / "workers").mkdir()
        (group.folder / "bundles").mkdir()
        return group

    def state(self) -> State:
        with open(self._file, "rb") as file:
            content = file.read()
        # Every worker looks many times a second, and hardly ever finds anything new.
        read = self._read
        if read is None or read[0] != content:
            self._read = read = content, State.model_validate_json(content)
        return read[1]

    def agree(self, state: State) -> None:
        """Let all workers see a new state."""
        _write(Path(self._file), state.model_dump_json())

    @contextlib.contextmanager
    def leading(self, again: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Whether this is the one that leads for as long as the block lasts; tries while `again` says so."""
        with (self.folder / "leading.lock").open("a") as file:
            while not (alone := _lock(file.fileno())) and again():
                pass
            yield alone

    def join(self) -> Seat:
        """A place among the workers, until this process dies."""
        return Seat(self.folder / "workers")

    def reports(self) -> list[Report]:
        """Of all workers that are alive, by process id."""
        found = []
        for lock in (self.folder / "workers").glob("*.lock"):
            file = lock.with_suffix(".json")
            if _held(lock):
                # Another one may have seen the end of it, and have tidied up.
                with contextlib.suppress(FileNotFoundError):
                    found.append(Report.model_validate_json(file.read_bytes()))
            else:
                lock.unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        return sorted(found, key=lambda report: report.pid)

    def take_in(self, bundle: Path) -> Path:
        """A copy that stays as it is, whatever happens to the original."""
        copy = Path(tempfile.mkdtemp(dir=self.folder / "bundles"))
        try:
            shutil.copytree(bundle, copy, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise BundleError(f"{bundle}: cannot be copied to {copy}: {error}") from error
        return copy

    def throw_out(self, kept: set[Path]) -> None:
        """Remove all copies but these."""
        for copy in (self.folder / "bundles").iterdir():
            if copy not in kept:
                shutil.rmtree(copy, ignore_errors=True)


class Seat:
    """A worker's own place in the folder."""

    def __init__(self, folder: Path) -> None:
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._file = folder / f"{name}.json"
        self.report = Report(pid=os.getpid())
        self.say()
        self._lock = _locked(folder / f"{name}.lock")

    def say(self, **changes: object) -> None:
        """Tell the others."""
        self.report = self.report.model_copy(update=changes)
        _write(self._file, self.report.model_dump_json())

    def leave(self) -> None:
        """As if dead."""
        os.close(self._lock)


def _write(path: Path, content: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fresh.write_text(content)
    os.replace(fresh, path)


def _locked(path: Path) -> int:
    """A file that is locked before it bears its name: where its lock is free, its holder is dead."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(fresh, path)
    return descriptor


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            # Shared, so that two who look do not take each other for the holder.
            return not _lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _remove_if_owner(folder: Path, owner: int) -> None:
    # What this process forks runs the same code at its end.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
