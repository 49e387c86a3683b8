"""What follows in the store when a version is served again: labels, so that the next lesson changes nothing back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from serving.bundle.errors import BundleError
from serving.bundle.lessons import taught_examples
from serving.bundle.manifest import Manifest, load_bundle
from serving.teaching.auto_job import WHO, is_made_up

if TYPE_CHECKING:
    from serving.quarantine.store import Store
    from serving.teaching.jobs import JobRecord


def follow_rollback(store: Store, folder: Path, manifest: Manifest, made: Mapping[str, JobRecord], who: str) -> None:
    """Bring the labels in line with a version that is served again; `made` are the accepted jobs by their version.

    A lesson makes the model agree with the labels, so the next one would otherwise do again what going back has undone.

    - Examples that the version has learned get the label that it learned, whether their class was renamed, merged or
      deleted since, or they were taken out.
    - Examples that were taken out on the way to this version are taken out again.
    - Names that nobody has given are removed from images of classes that the version lacks.
    - All others keep their label and wait: they were taught since.
    """
    known = manifest.labels
    taught = taught_examples(folder, len(manifest.lessons))
    people = {label: lesson.taught_by for lesson in manifest.lessons for label in lesson.images}
    store.go_back(taught, people, known, manifest.version, who)
    _take_out_again(store, folder, taught, made, who)
    given = (each for each in store.examples() if is_made_up(str(each.label), str(each.labelled_by)))
    if lacking := [each.id for each in given if each.label not in known]:
        store.clear(lacking, WHO)


def _take_out_again(
    store: Store, folder: Path, taught: Mapping[str, str], made: Mapping[str, JobRecord], who: str
) -> None:
    waiting = {each.digest: each for each in store.examples() if each.digest not in taught}
    deleted, removed = set(), set()
    for job, out in _taken_out(folder, made) if waiting else ():
        # Whoever has given an image another label since has taught something else.
        again = {
            waiting[digest] for digest, label in out.items() if digest in waiting and waiting[digest].label == label
        }
        gone = {each for each in again if each.label in job.request.get("forget", ())}
        deleted |= gone
        removed |= again - gone
    if ids := sorted(each.id for each in deleted):
        store.clear(ids, who)
    if ids := sorted(each.id for each in removed - deleted):
        store.withdraw(ids, who)


def _taken_out(folder: Path, made: Mapping[str, JobRecord]) -> Iterator[tuple[JobRecord, dict[str, str]]]:
    """The jobs on the way to a version that took examples out, the last first, with the digest and label of each."""
    name, seen = folder.name, set[str]()
    while name not in seen and (job := made.get(name)) is not None:
        seen.add(name)
        if _takes_out(job):
            before, after = (_examples(folder.parent / each) for each in (job.base, name))
            yield job, {digest: label for digest, label in before.items() if digest not in after}
        name = job.base


def _takes_out(job: JobRecord) -> bool:
    result = job.result or {}
    try:
        return bool(job.request.get("forget") or any(each["removed"] for each in result.get("classes", ())))
    except (KeyError, TypeError):
        # Something else has changed its row.
        return True


def _examples(folder: Path) -> dict[str, str]:
    """digest -> label of what a version was taught; nothing if it is no longer on the shelf."""
    try:
        return taught_examples(folder, len(load_bundle(folder).manifest.lessons))
    except (BundleError, OSError):
        return {}
