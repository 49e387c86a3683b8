"""The shared state of one server's workers: a few small files in a folder of the server.

    state.json          the bundle that all workers serve, the one before it, and the proposed one
    server.lock         locked while the server lives
    leading.lock        locked by the worker that leads a swap
    workers/NAME.json   the bundle that one worker serves, and its result for the last proposal
    workers/NAME.lock   locked while that worker lives
    bundles/            copies of bundles that do not come from a shelf

Files are replaced atomically. The kernel releases a lock when its holder dies in any way, so no worker waits for a dead
one, and a reused process id cannot be mistaken for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from serving.bundle.atomic import replace_file, replacing
from serving.bundle.errors import BundleError
from serving.bundle.files import MOST_MANIFEST, copy_regular, read_regular
from serving.bundle.layout import MANIFEST

PREFIX = "openworld-"


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BundleLocation(_File):
    """A bundle directory that does not change, and the version in it."""

    path: Path
    version: str

    @classmethod
    def of(cls, path: Path) -> BundleLocation:
        """With the version that the manifest names; it is verified when the bundle is loaded."""
        try:
            return cls(path=path, version=str(from_json(read_regular(path / MANIFEST, MOST_MANIFEST))["version"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path / MANIFEST}: has no version: {error}") from error


class Refusal(_File):
    """A bundle that was refused."""

    path: Path
    reason: str
    at: float
    """On the monotonic clock, which all workers share: the clock on the wall may be set back."""
    times: int


class SwapState(_File):
    """What the workers of a server agree on; written only by the worker that leads."""

    round: int = 0
    serving: BundleLocation
    previous: BundleLocation | None = None
    proposed: Path | None = None
    refused: Refusal | None = None


class WorkerReport(_File):
    """The published status of one worker."""

    pid: int
    version: str = ""
    """Empty until it has loaded a bundle."""
    path: Path | None = None
    previous: str | None = None
    round: int = 0
    """The last proposal that it processed."""
    prepared: str | None = None
    """The version of the proposed bundle, after it was loaded and tested."""
    error: str | None = None
    """Why the bundle could not be loaded."""


class WorkerGroup:
    """The workers of one server, seen from any of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = str(folder / "state.json")
        self._read: tuple[bytes, SwapState] | None = None

    @classmethod
    def create(cls, home: Path) -> WorkerGroup:
        """Make a folder in `home` that is removed when this process ends; removes those of killed servers."""
        home.mkdir(parents=True, exist_ok=True)
        for lock in home.glob(f"{PREFIX}*/server.lock"):
            if not _is_locked(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
        group = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=home)))
        # Never closed: the lock shows that this process lives.
        _lock_new(group.folder / "server.lock")
        atexit.register(_remove_if_owner, group.folder, os.getpid())
        (group.folder / "workers").mkdir()
        (group.folder / "bundles").mkdir()
        return group

    def state(self) -> SwapState:
        with open(self._file, "rb") as file:
            content = file.read()
        # Every worker reads it many times per second, and it hardly ever changes.
        read = self._read
        if read is None or read[0] != content:
            self._read = read = content, SwapState.model_validate_json(content)
        return read[1]

    def publish(self, state: SwapState) -> None:
        """Show a new state to all workers."""
        replace_file(Path(self._file), state.model_dump_json().encode(), durable=False)

    @contextlib.contextmanager
    def leading(self, again: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Whether this worker alone leads while the block lasts; tries again as long as `again` returns true."""
        with (self.folder / "leading.lock").open("a") as file:
            while not (alone := _try_lock(file.fileno())) and again():
                pass
            yield alone

    def reports(self) -> list[WorkerReport]:
        """The reports of all live workers, by process id."""
        found = []
        for lock in (self.folder / "workers").glob("*.lock"):
            file = lock.with_suffix(".json")
            if _is_locked(lock):
                # It may die now, and another worker remove its files.
                with contextlib.suppress(FileNotFoundError):
                    found.append(WorkerReport.model_validate_json(file.read_bytes()))
            else:
                lock.unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        return sorted(found, key=lambda report: report.pid)

    def copy_bundle(self, bundle: Path) -> Path:
        """A copy that does not change with the original."""
        copy = Path(tempfile.mkdtemp(dir=self.folder / "bundles"))
        try:
            shutil.copytree(bundle, copy, copy_function=copy_regular, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise BundleError(f"{bundle}: cannot be copied to {copy}: {error}") from error
        return copy

    def remove_unused_copies(self, state: SwapState) -> None:
        """Remove all copies of bundles except the served and the previous one."""
        kept = {place.path for place in (state.serving, state.previous) if place is not None}
        for copy in (self.folder / "bundles").iterdir():
            if copy not in kept:
                shutil.rmtree(copy, ignore_errors=True)


class GroupMember:
    """This process as one of the workers, until it leaves or dies."""

    def __init__(self, group: WorkerGroup) -> None:
        folder, name = group.folder / "workers", f"{os.getpid()}-{os.urandom(4).hex()}"
        self._file = folder / f"{name}.json"
        self._report = WorkerReport(pid=os.getpid())
        self.report()
        self._lock = _lock_new(folder / f"{name}.lock")

    def report(self, **changes: object) -> None:
        """Publish changes of this worker's status."""
        self._report = self._report.model_copy(update=changes)
        replace_file(self._file, self._report.model_dump_json().encode(), durable=False)

    def leave(self) -> None:
        """Release the lock, so that no other worker waits for this one."""
        os.close(self._lock)


def _lock_new(path: Path) -> int:
    """Make a file that is locked before it gets its name: if its lock is free, its holder is dead."""
    with replacing(path, durable=False) as temporary:
        descriptor = os.open(temporary, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            # Shared, so that two processes that check at the same time do not mistake each other for the holder.
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _remove_if_owner(folder: Path, owner: int) -> None:
    # Forked processes run this function too when they end.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
