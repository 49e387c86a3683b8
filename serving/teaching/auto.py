"""Decides when a server learns automatically: a thread of a worker that checks the quarantine every few seconds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from serving.errors import RequestError
from serving.quarantine.records import StoreError
from serving.settings import Settings
from serving.teaching.auto_job import WHO
from serving.telemetry import log

if TYPE_CHECKING:
    from serving.teaching.jobs import JobRecord
    from serving.teaching.teacher import Teacher

LOOK_EVERY = 5.0
DAY = 86_400.0


class Autonomy:
    """Starts a job when enough unknown images have arrived since the last one."""

    def __init__(self, teacher: Teacher, settings: Settings) -> None:
        self._teacher, self._settings = teacher, settings
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autonomy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()

    def look(self) -> bool:
        """Start a job if enough new images have arrived; returns whether it did."""
        teacher, settings = self._teacher, self._settings
        if teacher.problem() is not None:
            return False
        teacher.reconcile()
        open_job = teacher.jobs.latest(within=0.0)
        if open_job is not None:
            # A job is running, or somebody else's result waits for a decision.
            if open_job.kind == "auto" and open_job.state == "done":
                self._settle(open_job)
            return False
        done = teacher.jobs.of_kind("auto")
        latest = max((int(job.request.get("latest", 0)) for job in done), default=0)
        fresh, newest = teacher.store.new_since(latest)
        since = time.time() - DAY
        learned = sum(
            len((job.result or {}).get("named", ()))
            for job in done
            if job.state == "accepted" and job.started_at > since
        )
        room = settings.teach_auto_classes - learned
        if fresh < settings.teach_auto_images or room < 1:
            return False
        request = {"images": settings.teach_auto_images, "classes": room, "latest": newest, "accept": True}
        teacher.start("auto", WHO, request)
        return True

    def _settle(self, job: JobRecord) -> None:
        """Discard a result that will not be published, and remove its labels: otherwise its images would stay named."""
        if (reason := self._teacher.refusal(job)) is None:
            return
        store, named = self._teacher.store, (job.result or {}).get("named", ())
        ids = [each.id for label in named for each in store.examples(label) if each.labelled_by == WHO]
        if ids:
            store.clear(ids, WHO)
        self._teacher.discard(job.id, WHO, reason)

    def _run(self) -> None:
        failing = False
        while not self._end.wait(LOOK_EVERY):
            try:
                self.look()
                failing = False
            except (RequestError, StoreError) as error:
                # Another worker was first, or the database is unavailable.
                log.debug("no automatic lesson: %s", error)
            except Exception:
                if not failing:
                    log.exception("automatic learning failed in this worker")
                failing = True
