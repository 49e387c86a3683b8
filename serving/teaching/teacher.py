"""A worker's part in teaching: starts jobs in separate processes, publishes their results, and rolls back.

A process may be killed at any time: labels and jobs are rows of the store, a bundle is complete on the shelf before it
gets its name, and the shelf's link changes in one step. A version that was published but not yet recorded is recorded
later (`reconcile`).
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serving import errors
from serving.bundle.errors import BundleError
from serving.bundle.layout import MANIFEST, STATISTICS
from serving.bundle.lessons import run_images, taught_examples
from serving.bundle.manifest import Manifest, load_bundle
from serving.bundle.shelf import Shelf
from serving.quarantine.examples import PublishedLabels
from serving.quarantine.records import Example, StoreError
from serving.settings import Settings
from serving.swap.leader import SwapLeader, SwapOutcome
from serving.teaching.going_back import follow_rollback
from serving.teaching.job_texts import described, objections, replaced
from serving.teaching.jobs import JobBusyError, JobKind, JobRecord, Jobs
from serving.teaching.jobs import WrongStateError as WrongState
from serving.teaching.lesson_job import Wanted, withdrawn
from serving.teaching.lesson_plan import LessonPlan, labels_of_run, plan_lesson
from serving.teaching.process import exit_code, start_process
from serving.telemetry import log

if TYPE_CHECKING:
    from serving.quarantine.store import Store

SWAP_SECONDS = 120.0
KEPT_VERSIONS = 200
"""Versions that were taught and are kept on the shelf, beside the current and the previous one."""
DUE_AFTER, GIVE_UP_AFTER = 5.0, 600.0
"""Seconds after its end from which any worker publishes a job that was to publish itself, and from which none does."""


class PublishedVersion(NamedTuple):
    """All workers of this server serve this version now."""

    version: str
    before: str
    changed: bool
    workers: int


class ShelvedVersion(NamedTuple):
    """A bundle on the shelf, without the rest of its manifest: there may be many, with many lessons each."""

    name: str
    """The name of its folder."""
    version: str
    created: str
    classes: int
    lessons: int


class Pending(NamedTuple):
    """What a lesson would change."""

    waiting: tuple[Example, ...]
    """Examples that it would add."""
    removed: tuple[str, ...]
    """Digests of examples that it would take out."""
    taught: dict[str, str]
    """digest -> label of what the served bundle was taught."""


class Teacher:
    """One per worker; all methods may be called from any thread. They raise RequestErrors and StoreErrors."""

    def __init__(self, settings: Settings, store: Store, swaps: SwapLeader) -> None:
        self._settings, self.store, self._swaps = settings, store, swaps
        self._shelf = None if settings.bundles is None else Shelf(settings.bundles)
        self._taught: tuple[str, dict[str, str]] | None = None
        self._of_run: tuple[str, dict[str, int]] | None = None
        self._latest: tuple[str, Manifest] | None = None
        self._versions: dict[str, ShelvedVersion] = {}
        self._lock = threading.Lock()
        self._tried: set[int] = set()
        """Jobs that this worker has accepted, or has tried to."""

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self.store.database)

    def problem(self) -> str | None:
        """Why this server cannot be taught; None if it can."""
        if self._shelf is None:
            return "no shelf for new versions: OPENWORLD_BUNDLES is not set"
        if not self._shelf.writable:
            return f"the shelf {self._shelf.folder} is read-only here"
        try:
            manifest = self.current()
        except BundleError as error:
            return str(error)
        if manifest.trunk is None:
            return "the bundle has no trunk: only bundles of photos can be taught"
        if STATISTICS not in manifest.files:
            return f"the bundle has no {STATISTICS}: export its run again"
        return None

    def current(self) -> Manifest:
        """The manifest of the shelf's current bundle, which the next lesson continues."""
        return self._manifest(self._current_name())

    def pending(self) -> Pending:
        """The difference between the labels in the store and the lessons of the current bundle."""
        taught = self._taught_by_current()
        labelled = {each.digest: each for each in self.store.examples()}
        removed = withdrawn(taught, labelled, self.store)
        out = set(removed)
        waiting = tuple(each for digest, each in labelled.items() if digest not in taught or digest in out)
        return Pending(waiting, tuple(removed), taught)

    def plan(self, pending: Pending) -> LessonPlan:
        """What the next lesson can learn of it."""
        return plan_lesson(pending.taught, pending.removed, pending.waiting, labels_of_run(self.current()))

    def images(self) -> dict[str, int]:
        """How many images the served classes were learned from, by label: those of the run and the taught examples."""
        name, kept = self._current_name(), self._of_run
        if kept is None or kept[0] != name:
            manifest = self._manifest(name)
            folder = self._need_shelf().folder / name
            kept = name, run_images(folder, manifest.labels) if STATISTICS in manifest.files else {}
            self._of_run = kept
        return dict(Counter(kept[1]) + Counter(self._taught_by_current().values()))

    def learn(self, who: str, wanted: Wanted, *, accept: bool = False, force: bool = False) -> JobRecord:
        """Start a job that learns what is labelled, or changes classes."""
        self._check_on()
        if not (wanted.forget or wanted.rename or wanted.merge) and (plan := self.plan(self.pending())).empty:
            got, allowed = "no example that waits", "label images first"
            if plan.short:
                got, allowed = f"too few examples: {plan.reason}", "add examples, or delete the class"
            raise errors.NothingToLearnError("nothing to learn", got=got, allowed=allowed)
        return self.start("learn", who, {**asdict(wanted), "accept": accept, "force": force})

    def group(self, who: str) -> JobRecord:
        """Start a job that groups the unlabelled images."""
        self._check_on()
        return self.start("group", who, {})

    def accept(self, job_id: int, who: str, *, force: bool = False) -> PublishedVersion:
        """Publish what a job has made; all workers serve it when this returns."""
        self._check_on()
        self._note_published()
        job = self.jobs.get(job_id)
        if job.state != "done" or job.candidate is None:
            got = f"job {job_id} is {job.state}{self._since(job)}"
            raise errors.JobStateError("the job cannot be accepted", got=got, allowed="a job that has learned")
        if not (force or (job.result or {}).get("gate", False)):
            raise errors.GateError(
                "earlier classes would lose too much", got=objections(job), allowed="force, or other examples"
            )
        self._check_base(job)
        published = self._publish(job.candidate, job.base)
        self._note(job, who)
        self._prune()
        return published

    def discard(self, job_id: int, who: str, reason: str = "") -> JobRecord:
        """Leave everything as it is; the candidate is removed."""
        self._note_published()
        try:
            job = self.jobs.discard(job_id, who, reason)
        except WrongState as error:
            raise errors.JobStateError("nothing to discard", got=str(error), allowed="a finished job") from None
        self._remove_candidate(job)
        return job

    def roll_back(self, version: str, who: str) -> PublishedVersion:
        """Serve a version of the shelf again; the examples that it has learned get the labels that it learned."""
        self._check_shelf()
        known = {each.version: each.name for each in self.versions()}
        if version not in known:
            got = f"no version {version}"
            raise errors.NoSuchItemError("not on the shelf", got=got, allowed=", ".join(list(known)[:20]))
        before = self._current_name()
        published = self._publish(known[version], before)
        folder = self._need_shelf().folder / known[version]
        follow_rollback(self.store, folder, self._manifest(known[version]), self.jobs.accepted(), who)
        return published

    def versions(self) -> list[ShelvedVersion]:
        """The bundles on the shelf, the newest first, without candidates that were not accepted."""
        shelf = self._need_shelf()
        current = self._current_name()
        candidates = {job.candidate: job for job in self.jobs.not_accepted() if job.candidate != current}
        found = []
        for folder in shelf.folder.iterdir():
            if folder.is_symlink() or not (folder / MANIFEST).is_file():
                continue
            if folder.name in candidates and _made_by(candidates[folder.name], folder):
                continue
            with contextlib.suppress(BundleError):
                found.append(self._version(folder.name))
        self._versions = {each.name: each for each in found}
        return sorted(found, key=lambda each: (each.created, each.name == current), reverse=True)

    def links(self) -> tuple[str, str | None]:
        """The folders of the current and the previous bundle."""
        previous = self._need_shelf().previous()
        return self._current_name(), None if previous is None else previous.name

    def reconcile(self) -> None:
        """Complete the work of killed processes: record what they had published, and publish results that are due.

        Publishing takes a while, so it is done in a separate thread.
        """
        if self._served_by_all():
            self._note_published()
        for job in self.jobs.waiting():
            if job.asks and job.id not in self._tried and job.ended_ago > DUE_AFTER:
                threading.Thread(target=self._accept_asked, args=(job,), name="teaching", daemon=True).start()

    def _served_by_all(self) -> bool:
        """Whether every worker serves the current version, which callers expect of an accepted job."""
        served = (self._need_shelf().folder / self._current_name()).resolve()
        return all(worker.path == served for worker in self._swaps.status().workers)

    def refusal(self, job: JobRecord) -> str | None:
        """Why a finished job will not be published automatically; None if it may be."""
        if not (job.request.get("force") or (job.result or {}).get("gate", False)):
            return f"the gate objects, because {objections(job)}"
        if self._current_name() not in (job.base, job.candidate):
            return "another version was published meanwhile"
        if job.ended_ago > GIVE_UP_AFTER:
            return "it could not be published"
        return None

    def _note_published(self) -> None:
        for job in self.jobs.waiting():
            if job.candidate is not None and job.candidate == self._current_name():
                self._note(job, job.who)

    def start(self, kind: JobKind, who: str, request: dict[str, Any]) -> JobRecord:
        """Start a job in a separate process."""
        self._note_published()
        waiting = self.jobs.waiting() if kind != "group" else []
        try:
            job = self.jobs.start(kind, who, self._current_name(), request)
        except JobBusyError as error:
            raise errors.TeachBusyError("another job is running", got=str(error), allowed="one at a time") from None
        for discarded in waiting:
            self._remove_candidate(discarded)
        try:
            child = start_process(job.id)
        except OSError as error:
            self.jobs.fail(job.id, f"no process could be started: {error}")
            raise
        threading.Thread(target=self._watch, args=(job, child), name="teaching", daemon=True).start()
        return job

    def _watch(self, job: JobRecord, child: subprocess.Popen[bytes]) -> None:
        """Wait for a job's process, and publish its result if that was requested."""
        try:
            while (code := exit_code(child)) is None:
                # On a busy machine it may take long until the process writes its first heartbeat.
                with contextlib.suppress(StoreError):
                    self.jobs.keep_alive(job.id)
            if code != 0:
                self.jobs.fail(job.id, f"its process ended with code {code}, see the log of the server")
            elif (ended := self.jobs.get(job.id)).asks:
                self._accept_asked(ended)
        except (errors.RequestError, StoreError) as error:
            log.warning("job %d could not be followed: %s", job.id, error)
        except Exception:
            log.exception("job %d could not be followed", job.id)

    def _accept_asked(self, job: JobRecord) -> None:
        """Accept a job whose result is to be published automatically; each worker tries it once."""
        with self._lock:
            if job.id in self._tried:
                return
            self._tried.add(job.id)
        try:
            self.accept(job.id, job.who, force=bool(job.request.get("force")))
        except errors.JobStateError as error:
            log.debug("job %d was settled by somebody else: %s", job.id, error)
        except errors.RequestError as error:
            log.warning("job %d was not accepted: %s", job.id, error)
        except StoreError as error:
            self._tried.discard(job.id)
            log.warning("job %d was not accepted, and will be: %s", job.id, error)
        except Exception:
            log.exception("job %d could not be accepted", job.id)

    def _publish(self, name: str, before: str) -> PublishedVersion:
        swap: Future[SwapOutcome] = self._swaps.publish(name, before)
        try:
            outcome = swap.result(SWAP_SECONDS)
        except TimeoutError:
            got = f"a swap of more than {SWAP_SECONDS:g} seconds"
            raise errors.DeadlineError("the swap is still running", got=got, allowed="poll /admin/status") from None
        return PublishedVersion(outcome.state.serving.version, before, outcome.changed, len(outcome.workers))

    def _check_base(self, job: JobRecord) -> None:
        current = self._current_name()
        if current == job.base or current == job.candidate:
            return
        made = self.jobs.accepted().get(current)
        changed = f"{current}, published by {made.who}: {described(made)}" if made else current
        raise errors.TeachChangedError(
            "another version is served by now",
            got=f"{changed}; the job continues {job.base}",
            allowed="learn again, which keeps both changes",
        )

    def _since(self, job: JobRecord) -> str:
        """Who began the later lesson that discarded a job before it was accepted; empty if there is none."""
        later = self.jobs.replacing(job) if job.state == "discarded" else None
        return "" if later is None else replaced(job, later)

    def _note(self, job: JobRecord, who: str) -> None:
        """Note in the store that a job's candidate is served: labels follow, and the job is accepted."""
        wanted = Wanted.of(job.request)
        manifest = self._manifest(str(job.candidate))
        objected = "" if (job.result or {}).get("gate", True) else ", although the gate objected"
        what = f"{manifest.version}: {described(job)}{objected}"
        renamed = {**wanted.relabel, **wanted.rename, **wanted.merge}
        if wanted.delete:
            # Before the job is recorded, so that after a kill in between `reconcile` repeats both.
            self.store.delete(wanted.delete, who)
        self.jobs.accept(job.id, who, PublishedLabels(wanted.forget, renamed, manifest.labels, what))

    def _prune(self) -> None:
        """Remove the oldest taught versions beyond a number; those that people published are never removed."""
        taught = self.jobs.accepted()
        kept = set(self.links())
        own = [each.name for each in self.versions() if each.name in taught and each.name not in kept]
        for name in own[KEPT_VERSIONS:]:
            shutil.rmtree(self._need_shelf().folder / name, ignore_errors=True)

    def _remove_candidate(self, job: JobRecord) -> None:
        name = job.candidate
        if name is None or name in self.links() or name in self.jobs.accepted() or name == job.base:
            return
        if any(other.candidate == name for other in self.jobs.waiting()):
            return
        folder = self._need_shelf().folder / name
        if _made_by(job, folder):
            shutil.rmtree(folder, ignore_errors=True)

    def _taught_by_current(self) -> dict[str, str]:
        name, kept = self._current_name(), self._taught
        if kept is None or kept[0] != name:
            kept = name, taught_examples(self._need_shelf().folder / name, len(self._manifest(name).lessons))
            self._taught = kept
        return kept[1]

    def _version(self, name: str) -> ShelvedVersion:
        """A bundle on the shelf never changes, so it is read once."""
        if (found := self._versions.get(name)) is None:
            manifest = load_bundle(self._need_shelf().folder / name).manifest
            found = ShelvedVersion(
                name, manifest.version, manifest.created, len(manifest.labels), len(manifest.lessons)
            )
        return found

    def _manifest(self, name: str) -> Manifest:
        """Only the latest is kept: with every lesson, a manifest is longer than the one before."""
        kept = self._latest
        if kept is None or kept[0] != name:
            kept = name, load_bundle(self._need_shelf().folder / name).manifest
            self._latest = kept
        return kept[1]

    def _current_name(self) -> str:
        current = self._need_shelf().current()
        if current is None:
            raise errors.TeachOffError("teaching is off", got="no link `current` on the shelf", allowed="one")
        return current.name

    def _check_on(self) -> None:
        if (problem := self.problem()) is not None:
            raise errors.TeachOffError("teaching is off", got=problem, allowed="a server that can be taught")

    def _check_shelf(self) -> None:
        if not self._need_shelf().writable:
            got = f"{self._need_shelf().folder}, which is read-only here"
            raise errors.TeachOffError("versions cannot be changed", got=got, allowed="a writable shelf")

    def _need_shelf(self) -> Shelf:
        if self._shelf is None:
            raise errors.TeachOffError(
                "teaching is off", got="OPENWORLD_BUNDLES not set", allowed="a shelf for new versions"
            )
        return self._shelf


def _made_by(job: JobRecord, folder: Path) -> bool:
    """Whether a version was written by a job; one that was there before is one that people published."""
    try:
        return folder.stat().st_ctime >= job.started_at
    except OSError:
        return False
