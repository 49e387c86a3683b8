"""A job in a separate process: `python -m serving.teaching.work JOB`, started by a worker of a server.

It learns or groups with what the store and the shelf have, and stores the result. Its memory is returned when it ends,
its low priority leaves the processors to requests, and nothing waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.bundle.errors import BundleError
from serving.bundle.model import BundleModel
from serving.quarantine.records import StoreError
from serving.settings import Settings
from serving.teaching.errors import TeachError
from serving.teaching.jobs import SHOWN_EVERY, JobRecord, Jobs

if TYPE_CHECKING:
    from serving.quarantine.store import Store

NICE = 5
"""Below requests, which are answered first if all processors are busy."""


class Display:
    """Shows in the store that the job lives and how far it is; ends the process if the job is no longer wanted."""

    def __init__(self, jobs: Jobs, job_id: int) -> None:
        self._jobs, self._id = jobs, job_id
        self._progress, self._step = 0.0, "starting"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def part(self, step: str, start: float, end: float) -> Callable[[float], None]:
        """Begin a step, from one share of the job to another; the function is called with the share of the step."""

        def progress(share: float) -> None:
            self._progress = start + share * (end - start)

        self._step = step
        progress(0.0)
        self._show()
        return progress

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SHOWN_EVERY / 4):
            self._show()

    def _show(self) -> None:
        try:
            wanted = self._jobs.show(self._id, self._progress, self._step)
        except StoreError:
            # The store may be back before the job ends.
            return
        if not wanted:
            os._exit(3)


def run(job_id: int, settings: Settings) -> int:
    """Do one job. Exit code 1: it failed, and the store has the reason."""
    from serving.quarantine.store import Store

    assert settings.quarantine_url is not None
    assert settings.bundles is not None
    store = Store(settings.quarantine_url, settings.quarantine_images)
    jobs = Jobs(store.database)
    job = jobs.get(job_id)
    display = Display(jobs, job_id)
    try:
        display.part("loading the model", 0.0, 0.05)
        model = BundleModel.load(settings.bundles / job.base, provider="cpu", precision="fp32", threads=1)
        result, candidate = _work(job, store, model, settings.bundles, display)
    except (TeachError, StoreError, BundleError) as error:
        display.close()
        jobs.fail(job_id, str(error))
        return 1
    except BaseException as error:
        display.close()
        jobs.fail(job_id, f"{type(error).__name__}: {error}")
        raise
    display.close()
    jobs.finish(job_id, result, candidate)
    return 0


def _work(
    job: JobRecord, store: Store, model: BundleModel, shelf: Path, display: Display
) -> tuple[dict[str, Any], str | None]:
    if job.kind == "learn":
        from serving.teaching.lesson_job import learn_labels

        return learn_labels(job, store, model, shelf, display)
    if job.kind == "auto":
        from serving.teaching.auto_job import learn_groups

        return learn_groups(job, store, model, shelf, display)
    from serving.teaching.group_job import group_unknowns

    return group_unknowns(store, model, display), None


def main(arguments: Sequence[str] | None = None) -> int:
    (job_id,) = sys.argv[1:] if arguments is None else arguments
    os.nice(NICE)
    return run(int(job_id), Settings.from_environment())


if __name__ == "__main__":
    sys.exit(main())
