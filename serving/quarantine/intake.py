"""How arrivals become items. Duplicates of existing items are only counted.

    1. find the new images, without blocking other writers
    2. write their files
    3. write the rows in one transaction as the only writer, after checking for duplicates again

If the process is killed before the commit there is no row, and at most files that `Store.sweep` removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, case, insert, select, update

from serving.quarantine.database import Database
from serving.quarantine.duplicates import Fingerprints, ImageSummary, is_fingerprint, summarize
from serving.quarantine.images import ImageStore, new_name
from serving.quarantine.records import Added, Arrival, UnavailableError
from serving.quarantine.schema import items
from serving.telemetry import log


@dataclass(frozen=True)
class _Candidate:
    """An arrival that is ready to be written."""

    arrival: Arrival
    sha256: str
    file: str
    summary: ImageSummary
    answer: str
    features: bytes

    @classmethod
    def of(cls, arrival: Arrival, mark: str) -> _Candidate:
        digest = hashlib.sha256(arrival.content).hexdigest()
        features = np.asarray(arrival.features, dtype="<f4").ravel().tobytes()
        answer = json.dumps(arrival.answer, separators=(",", ":"))
        return cls(arrival, digest, new_name(digest, mark), summarize(arrival.content), answer, features)

    @property
    def prediction(self) -> dict[str, object]:
        """The columns with the model's outputs for it."""
        return {
            "kind": self.arrival.kind,
            "received_at": self.arrival.received_at,
            "model_version": self.arrival.model_version,
            "answer": self.answer,
            "features": self.features,
            "bytes": len(self.arrival.content) + len(self.answer.encode()) + len(self.features),
        }

    @property
    def row(self) -> dict[str, object]:
        return {
            **self.prediction,
            "sha256": self.sha256,
            "file": self.file,
            "fingerprint": self.summary.fingerprint,
            "state": "new",
            "seen_at": self.arrival.received_at,
            "copies": 1,
            "width": self.summary.width,
            "height": self.summary.height,
            "size": len(self.arrival.content),
            "media_type": self.summary.media_type,
        }


class Intake:
    """Adds items to a store, and remembers the fingerprints of the stored ones."""

    def __init__(self, database: Database, images: ImageStore) -> None:
        self._database = database
        self._images = images
        self._lock = threading.Lock()
        self._fingerprints = Fingerprints()
        self._newest = 0
        self._without_fingerprint: set[int] = set()
        """Items whose row was changed by something else; the log has named them."""

    def add(self, arrivals: Sequence[Arrival]) -> Added:
        """Store new images and count duplicates; both are durable when this returns."""
        if not arrivals:
            return Added([], 0, [])
        mark = self._database.mark()
        candidates = [_Candidate.of(arrival, mark) for arrival in arrivals]
        with self._lock:
            written = {one.file: one.arrival.content for one in self._new_ones(candidates)}
            self._images.write(written)
            committing = False
            used: set[str] = set()
            try:
                with self._database.writing() as connection:
                    added, used = self._write_rows(connection, candidates, written)
                    committing = True
            except BaseException:
                self.forget_all()
                # If the commit itself failed, it may have happened: the files are left for the sweep.
                if not committing:
                    self._remove(written)
                raise
            self._remove(written.keys() - used)
            return added

    def forget(self, ids: Iterable[int]) -> None:
        """Forget the fingerprints of deleted items."""
        with self._lock:
            for item_id in ids:
                self._fingerprints.forget(item_id)

    def forget_if_stale(self, stored: int) -> None:
        """Start over if most of the remembered items were deleted by other processes."""
        with self._lock:
            if len(self._fingerprints) > 2 * stored + 1000:
                self.forget_all()

    def forget_all(self) -> None:
        self._fingerprints, self._newest = Fingerprints(), 0

    def _new_ones(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        with self._database.reading() as connection:
            self._catch_up(connection)
            existing = _ids_by_sha256(connection, candidates)
        seen = Fingerprints()
        new: dict[str, _Candidate] = {}
        for one in candidates:
            fingerprint = one.summary.fingerprint
            if one.sha256 in existing or one.sha256 in new or self._fingerprints.same_as(fingerprint):
                continue
            if not seen.same_as(fingerprint):
                seen.add(len(new), fingerprint)
                new[one.sha256] = one
        return list(new.values())

    def _write_rows(
        self, connection: Connection, candidates: Sequence[_Candidate], written: dict[str, bytes]
    ) -> tuple[Added, set[str]]:
        self._catch_up(connection)
        existing = _ids_by_sha256(connection, candidates)
        kept: list[int] = []
        ids: list[int] = []
        used: set[str] = set()
        for one in candidates:
            if (same := self._count_copy(connection, one, existing)) is not None:
                ids.append(same)
                continue
            if one.file not in written:
                # The item that it duplicates has been deleted since the first check.
                self._images.write({one.file: one.arrival.content})
                written[one.file] = one.arrival.content
            used.add(one.file)
            item_id = connection.execute(insert(items).values(one.row).returning(items.c.id)).scalar_one()
            self._remember(item_id, one.summary.fingerprint)
            existing[one.sha256] = item_id
            kept.append(item_id)
            ids.append(item_id)
        return Added(kept, len(candidates) - len(kept), ids), used

    def _count_copy(self, connection: Connection, one: _Candidate, existing: dict[str, int]) -> int | None:
        """Count the candidate on an identical or near-duplicate item, which is returned; None if there is none."""
        if one.sha256 in existing:
            item_id = existing[one.sha256]
            return item_id if _count(connection, item_id, one) else None
        for item_id in self._fingerprints.same_as(one.summary.fingerprint):
            if _count(connection, item_id, one):
                return item_id
            self._fingerprints.forget(item_id)
        return None

    def _catch_up(self, connection: Connection) -> None:
        """Read the fingerprints that other processes added. Ids are in order because there is one writer at a time."""
        rows = select(items.c.id, items.c.fingerprint).where(items.c.id > self._newest).order_by(items.c.id)
        damaged = set()
        for item_id, fingerprint in connection.execute(rows):
            if is_fingerprint(fingerprint):
                self._remember(item_id, fingerprint)
            else:
                damaged.add(item_id)
                self._newest = item_id
        if found := sorted(damaged - self._without_fingerprint):
            self._without_fingerprint.update(found)
            log.warning(
                "the fingerprints of %d images of the quarantine are damaged, so copies of them are stored again: %s",
                len(found),
                found[:20],
            )

    def _remember(self, item_id: int, fingerprint: bytes) -> None:
        self._fingerprints.add(item_id, fingerprint)
        self._newest = max(self._newest, item_id)

    def _remove(self, files: Iterable[str]) -> None:
        with contextlib.suppress(UnavailableError):
            self._images.remove(files)


def _ids_by_sha256(connection: Connection, candidates: Sequence[_Candidate]) -> dict[str, int]:
    digests = {one.sha256 for one in candidates}
    found = connection.execute(select(items.c.sha256, items.c.id).where(items.c.sha256.in_(digests)))
    return {row.sha256: row.id for row in found}


def _count(connection: Connection, item_id: int, one: _Candidate) -> bool:
    """Count one more copy of an item; whether the item still exists."""
    seen_at = case((items.c.seen_at < one.arrival.received_at, one.arrival.received_at), else_=items.c.seen_at)
    counted = update(items).where(items.c.id == item_id).values(copies=items.c.copies + 1, seen_at=seen_at)
    if connection.execute(counted).rowcount == 0:
        return False
    if one.arrival.kind == "unknown":
        # It was known and kept for an audit before; now it counts as unknown.
        audited = (items.c.id == item_id) & (items.c.kind == "audit") & (items.c.state == "new")
        changed = {**one.prediction, "bytes": items.c.size + len(one.answer.encode()) + len(one.features)}
        connection.execute(update(items).where(audited).values(changed))
    return True
