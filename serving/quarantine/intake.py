"""How arrivals become items: image files first, rows after, and what is there already is only counted.

    1. look      what is new, as far as can be seen without holding up other writers
    2. files     of what looks new
    3. rows      in one transaction, alone among all writers, after a second look

Killed anywhere before the transaction is committed, there is no row, and at most files that `Store.sweep` finds.
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
from serving.quarantine.duplicates import Fingerprints, Look, look_at
from serving.quarantine.images import Images, new_name
from serving.quarantine.records import Added, Arrival, UnavailableError
from serving.quarantine.schema import items


@dataclass(frozen=True)
class _Candidate:
    """An arrival, ready to be written."""

    arrival: Arrival
    sha256: str
    file: str
    look: Look
    answer: str
    features: bytes

    @classmethod
    def of(cls, arrival: Arrival, mark: str) -> _Candidate:
        digest = hashlib.sha256(arrival.content).hexdigest()
        features = np.asarray(arrival.features, dtype="<f4").ravel().tobytes()
        answer = json.dumps(arrival.answer, separators=(",", ":"))
        return cls(arrival, digest, new_name(digest, mark), look_at(arrival.content), answer, features)

    @property
    def said(self) -> dict[str, object]:
        """The columns that tell what the model made of it."""
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
            **self.said,
            "sha256": self.sha256,
            "file": self.file,
            "fingerprint": self.look.fingerprint,
            "state": "new",
            "seen_at": self.arrival.received_at,
            "copies": 1,
            "width": self.look.width,
            "height": self.look.height,
            "size": len(self.arrival.content),
            "media_type": self.look.media_type,
        }


class Intake:
    """Adds to a store, and remembers the fingerprints of what is in it."""

    def __init__(self, database: Database, images: Images) -> None:
        self._database = database
        self._images = images
        self._one_at_a_time = threading.Lock()
        self._fingerprints = Fingerprints()
        self._newest = 0

    def add(self, arrivals: Sequence[Arrival]) -> Added:
        """Keep what is new, count what is not; when it returns, both are durable."""
        if not arrivals:
            return Added([], 0)
        mark = self._database.mark()
        candidates = [_Candidate.of(arrival, mark) for arrival in arrivals]
        with self._one_at_a_time:
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
                # Once the commit was sent nobody knows whether it was done: then the files stay for the sweep.
                if not committing:
                    self._remove(written)
                raise
            self._remove(written.keys() - used)
            return added

    def forget(self, ids: Iterable[int]) -> None:
        """Those were deleted here."""
        with self._one_at_a_time:
            for item_id in ids:
                self._fingerprints.forget(item_id)

    def tidy(self, held: int) -> None:
        """Start over if most of what is remembered was deleted by others."""
        with self._one_at_a_time:
            if len(self._fingerprints) > 2 * held + 1000:
                self.forget_all()

    def forget_all(self) -> None:
        self._fingerprints, self._newest = Fingerprints(), 0

    def _new_ones(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        with self._database.reading() as connection:
            self._catch_up(connection)
            there = _ids_by_sha256(connection, candidates)
        looks = Fingerprints()
        new: dict[str, _Candidate] = {}
        for one in candidates:
            fingerprint = one.look.fingerprint
            if one.sha256 in there or one.sha256 in new or self._fingerprints.same_as(fingerprint):
                continue
            if not looks.same_as(fingerprint):
                looks.add(len(new), fingerprint)
                new[one.sha256] = one
        return list(new.values())

    def _write_rows(
        self, connection: Connection, candidates: Sequence[_Candidate], written: dict[str, bytes]
    ) -> tuple[Added, set[str]]:
        self._catch_up(connection)
        there = _ids_by_sha256(connection, candidates)
        kept: list[int] = []
        used: set[str] = set()
        for one in candidates:
            if self._count_copy(connection, one, there):
                continue
            if one.file not in written:
                # What it was a copy of has been deleted since the first look.
                self._images.write({one.file: one.arrival.content})
                written[one.file] = one.arrival.content
            used.add(one.file)
            item_id = connection.execute(insert(items).values(one.row).returning(items.c.id)).scalar_one()
            self._remember(item_id, one.look.fingerprint)
            there[one.sha256] = item_id
            kept.append(item_id)
        return Added(kept, len(candidates) - len(kept)), used

    def _count_copy(self, connection: Connection, one: _Candidate, there: dict[str, int]) -> bool:
        """Whether there is an item that shows the same, byte by byte or to the eye; then it is counted there."""
        if one.sha256 in there:
            return _count(connection, there[one.sha256], one)
        for item_id in self._fingerprints.same_as(one.look.fingerprint):
            if _count(connection, item_id, one):
                return True
            self._fingerprints.forget(item_id)
        return False

    def _catch_up(self, connection: Connection) -> None:
        """Learn the fingerprints of what other processes added: as writers take turns, ids come in order."""
        rows = select(items.c.id, items.c.fingerprint).where(items.c.id > self._newest).order_by(items.c.id)
        for item_id, fingerprint in connection.execute(rows):
            self._remember(item_id, fingerprint)

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
    """One more copy of an item, if it is (still) there."""
    seen_at = case((items.c.seen_at < one.arrival.received_at, one.arrival.received_at), else_=items.c.seen_at)
    counted = update(items).where(items.c.id == item_id).values(copies=items.c.copies + 1, seen_at=seen_at)
    if connection.execute(counted).rowcount == 0:
        return False
    if one.arrival.kind == "unknown":
        # Accepted and kept for an audit before, and now unknown: from here on it counts as that.
        audited = (items.c.id == item_id) & (items.c.kind == "audit") & (items.c.state == "new")
        said = {**one.said, "bytes": items.c.size + len(one.answer.encode()) + len(one.features)}
        connection.execute(update(items).where(audited).values(said))
    return True
