"""A teacher without a server: its jobs are real processes, and its only worker accepts everything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from serving.bundle.manifest import load_bundle
from serving.bundle.shelf import Shelf
from serving.quarantine.store import Store
from serving.settings import Settings
from serving.swap.agreement import BundleLocation, SwapState, WorkerReport
from serving.swap.leader import SwapLeader, SwapOutcome
from serving.teaching.jobs import JobRecord
from serving.teaching.teacher import Teacher
from tests.helpers_teaching import write_bundle


class OneWorker:
    """The swaps of a server whose only worker accepts everything: the shelf is what counts here."""

    late = False
    """Whether the worker still answers by another version than the current one."""

    def __init__(self, folder: Path) -> None:
        self._shelf = Shelf(folder)

    def status(self) -> SwapOutcome:
        current = self._shelf.current()
        assert current is not None
        worker = WorkerReport(pid=1, path=None if self.late else current.resolve())
        place = BundleLocation(path=current, version=current.name)
        return SwapOutcome(changed=False, state=SwapState(serving=place), workers=[worker])

    def publish(self, name: str, instead_of: str) -> Future[SwapOutcome]:
        self._shelf.point_at(name, instead_of)
        done: Future[SwapOutcome] = Future()
        place = BundleLocation(path=self._shelf.folder / name, version=name)
        done.set_result(SwapOutcome(changed=True, state=SwapState(serving=place), workers=[]))
        return done


def make_shelf(place: Path) -> str:
    """A shelf with the small bundle; its version."""
    bundle = write_bundle(place / "bundle")
    version = load_bundle(bundle).manifest.version
    (place / "shelf").mkdir()
    bundle.rename(place / "shelf" / version)
    Shelf(place / "shelf").point_at(version)
    return version


@contextmanager
def teacher_of(place: Path, patch: pytest.MonkeyPatch, **more: str) -> Iterator[tuple[Teacher, Settings]]:
    """A teacher with a store and a shelf in a folder, and its settings."""
    make_shelf(place)
    variables = {
        "OPENWORLD_BUNDLES": str(place / "shelf"),
        "OPENWORLD_ADMIN_TOKEN": "a-token-of-enough-length",
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{place}/quarantine.db",
        **more,
    }
    for name, value in variables.items():
        patch.setenv(name, value)
    settings = Settings.from_environment()
    store = Store.open(str(settings.quarantine_url), settings.quarantine_images)
    try:
        yield Teacher(settings, store, cast(SwapLeader, OneWorker(place / "shelf"))), settings
    finally:
        store.close()


def finished(teacher: Teacher, job: JobRecord, *states: str) -> JobRecord:
    """The job when it is in one of some states, or at first no longer running."""
    until = time.monotonic() + 120
    while (found := teacher.jobs.get(job.id)).state == "running" or (states and found.state not in states):
        assert time.monotonic() < until, found
        assert found.state != "failed" or not states, found
        time.sleep(0.05)
    return found
