"""Jobs in the store: one at a time for all servers that share it, visible to all of them, and never lost.

    running -> done -> accepted | discarded
            -> discarded, if there was nothing to publish
            -> failed

A job runs in a separate process, which may be killed. It writes a heartbeat every few seconds, and counts as failed
when the heartbeat stops. Every process measures with its own monotonic clock how long a heartbeat has not changed,
because the clocks of servers may differ or be set.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sqlalchemy import Connection, insert, select, update

from serving.quarantine.database import Database
from serving.quarantine.examples import PublishedLabels
from serving.quarantine.labels import note
from serving.quarantine.records import StoreError, UnknownIdError
from serving.quarantine.rows import is_text, is_time, json_object
from serving.quarantine.schema import jobs

JobKind = Literal["learn", "group", "auto"]
JobState = Literal["running", "done", "failed", "accepted", "discarded"]

SHOWN_EVERY, LOST_AFTER = 2.0, 30.0
"""Seconds between two heartbeats of a job, and without one until it counts as lost."""
PUBLISHED_WITHIN = 20.0
"""Seconds after its end in which a job that publishes itself is not discarded by the next one."""
REPLACED = "replaced by a later job"
"""The last step of a job that was discarded by the next one, and not by a person."""
DAMAGED = "its row was changed by something else"
LOST = "the process that ran it has ended; start it again"


class JobBusyError(StoreError):
    """Another job is running."""


class WrongStateError(StoreError):
    """A job that is not in a state that allows this."""


@dataclass(frozen=True)
class JobRecord:
    """One job. `request` is what it was asked for, `result` what it found."""

    id: int
    kind: JobKind
    state: JobState
    who: str
    started_at: float
    seen_at: float
    ended_at: float | None
    progress: float
    step: str
    request: dict[str, Any]
    base: str
    candidate: str | None
    error: str | None
    result: dict[str, Any] | None

    @property
    def asks(self) -> bool:
        """Whether its result is to be published automatically, and the gate does not object."""
        asked = self.state == "done" and self.candidate is not None and bool(self.request.get("accept"))
        return asked and bool(self.request.get("force") or (self.result or {}).get("gate", False))

    @property
    def seconds(self) -> float:
        """How long it took, or takes so far."""
        return max(0.0, (self.ended_at or time.time()) - self.started_at)

    @property
    def ended_ago(self) -> float:
        """The seconds since its end. After a clock was set back they are many, as after one was set forward."""
        return abs(time.time() - (self.ended_at or 0.0))


class _Look(NamedTuple):
    """When this process first saw a running job with this heartbeat, by the monotonic clock."""

    job: int
    seen_at: str
    first: float


class Jobs:
    """The jobs of all servers with the same store; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._look: _Look | None = None
        self._looking = threading.Lock()

    def start(self, kind: JobKind, who: str, base: str, request: dict[str, Any]) -> JobRecord:
        """Begin a job and discard candidates that were not accepted; raises a JobBusyError while another job runs."""
        now = time.time()
        with self._database.writing() as connection:
            row = connection.execute(select(jobs).where(jobs.c.state == "running")).first()
            if row is not None and not self._failed_as_lost(connection, row.id, row.seen_at):
                running = _record(row)
                raise JobBusyError(f"{_named(running)}, begun {running.seconds:.0f} seconds ago")
            if kind != "group":
                waiting = (jobs.c.state == "done") & (jobs.c.kind != "group")
                for done in map(_record, connection.execute(select(jobs).where(waiting))):
                    if done.base == base and done.asks and done.ended_ago < PUBLISHED_WITHIN:
                        raise JobBusyError(f"{_named(done)}, which is being published")
                    note(connection, who, "discard", 0, f"job {done.id}: {REPLACED}")
                connection.execute(update(jobs).where(waiting).values(state="discarded", step=REPLACED))
            values = {
                "kind": kind,
                "state": "running",
                "who": who,
                "started_at": now,
                "seen_at": now,
                "progress": 0.0,
                "step": "starting",
                "request": json.dumps(request),
                "base": base,
            }
            job_id = connection.execute(insert(jobs).values(values).returning(jobs.c.id)).scalar_one()
            note(connection, who, kind, 0, f"job {job_id}")
            return self._one(connection, job_id)

    def get(self, job_id: int) -> JobRecord:
        with self._database.reading() as connection:
            found = self._one(connection, job_id)
        if found.state == "running" and self._is_lost(job_id, found.seen_at):
            with self._database.writing() as connection:
                self._failed_as_lost(connection, job_id, found.seen_at)
                found = self._one(connection, job_id)
        return found

    def latest(self, within: float = 3600.0) -> JobRecord | None:
        """The job that runs or waits to be accepted, or else the last one that ended not long ago."""
        with self._database.reading() as connection:
            is_open = (jobs.c.state == "running") | ((jobs.c.state == "done") & (jobs.c.kind != "group"))
            open_jobs = select(jobs.c.id).where(is_open).order_by(jobs.c.id.desc())
            around = jobs.c.started_at.between(time.time() - within, time.time() + within)
            recent = select(jobs.c.id).where(around).order_by(jobs.c.id.desc())
            found = connection.execute(open_jobs).scalar() or connection.execute(recent).scalar()
        return None if found is None else self.get(found)

    def replacing(self, job: JobRecord) -> JobRecord | None:
        """The job by whose begin another one was discarded; None if a person discarded it."""
        later = (jobs.c.id > job.id) & (jobs.c.kind != "group")
        with self._database.reading() as connection:
            found = connection.execute(select(jobs).where(later).order_by(jobs.c.id).limit(1)).first()
        return None if found is None or job.step != REPLACED else _record(found)

    def waiting(self) -> list[JobRecord]:
        """Learned and neither accepted nor discarded."""
        query = select(jobs).where(jobs.c.state == "done", jobs.c.kind != "group")
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def of_kind(self, kind: JobKind) -> list[JobRecord]:
        """All jobs of a kind, in order."""
        query = select(jobs).where(jobs.c.kind == kind).order_by(jobs.c.id)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def not_accepted(self) -> list[JobRecord]:
        """Jobs with a candidate that no job of the same candidate was accepted for."""
        taken = select(jobs.c.candidate).where(jobs.c.state == "accepted", jobs.c.candidate.is_not(None))
        query = select(jobs).where(jobs.c.candidate.is_not(None), jobs.c.candidate.not_in(taken))
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def accepted(self) -> dict[str, JobRecord]:
        """The accepted jobs by the version that they made."""
        query = select(jobs).where(jobs.c.state == "accepted").order_by(jobs.c.id)
        with self._database.reading() as connection:
            return {row.candidate: _record(row) for row in connection.execute(query) if row.candidate}

    def show(self, job_id: int, progress: float, step: str) -> bool:
        """Show how far a running job is; False if it is not to go on."""
        own = (jobs.c.id == job_id) & (jobs.c.state == "running")
        values = {"seen_at": time.time(), "progress": min(max(progress, 0.0), 1.0), "step": step}
        with self._database.writing() as connection:
            return connection.execute(update(jobs).where(own).values(values)).rowcount == 1

    def keep_alive(self, job_id: int) -> None:
        """Show that the process of a running job lives."""
        own = (jobs.c.id == job_id) & (jobs.c.state == "running")
        with self._database.writing() as connection:
            connection.execute(update(jobs).where(own).values(seen_at=time.time()))

    def finish(self, job_id: int, result: dict[str, Any], candidate: str | None = None) -> None:
        """End a job with its result; one that has found nothing to publish is discarded by that."""
        values = {
            "state": "discarded" if candidate is None and "named" in result else "done",
            "result": json.dumps(result),
            "candidate": candidate,
            "progress": 1.0,
            "step": "done",
        }
        self._end(job_id, values)

    def fail(self, job_id: int, error: str) -> None:
        """End a job without a result; one that has ended is left as it is."""
        self._end(job_id, {"state": "failed", "error": error})

    def accept(self, job_id: int, who: str, labels: PublishedLabels) -> JobRecord:
        """Note that a job's candidate was published, in one transaction with the labels that follow it.

        The second call changes nothing: the request that published it and one that found it published may coincide.
        """
        return self._settle(job_id, "accepted", who, labels)

    def discard(self, job_id: int, who: str, reason: str = "") -> JobRecord:
        """Discard a finished job; discarding it twice changes nothing."""
        return self._settle(job_id, "discarded", who, None, reason)

    def _settle(
        self,
        job_id: int,
        state: Literal["accepted", "discarded"],
        who: str,
        labels: PublishedLabels | None,
        reason: str = "",
    ) -> JobRecord:
        with self._database.writing() as connection:
            found = self._one(connection, job_id)
            if found.state == state:
                return found
            if found.state != "done":
                raise WrongStateError(f"job {job_id} is {found.state}")
            if labels is not None:
                labels.apply(connection, who)
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(state=state))
            note(connection, who, state.removesuffix("ed"), 0, f"job {job_id}: {reason}" if reason else f"job {job_id}")
            return self._one(connection, job_id)

    def _end(self, job_id: int, values: dict[str, Any]) -> None:
        own = (jobs.c.id == job_id) & (jobs.c.state == "running")
        now = time.time()
        with self._database.writing() as connection:
            connection.execute(update(jobs).where(own).values(values | {"ended_at": now, "seen_at": now}))

    def _is_lost(self, job_id: int, seen_at: float) -> bool:
        """Whether the heartbeat of a running job has not changed since this process saw it LOST_AFTER seconds ago.

        A process that has just started waits as long, from its first look at a job.
        """
        now = time.monotonic()
        with self._looking:
            look = self._look
            # As text, because NaN would never be the same.
            if look is None or (look.job, look.seen_at) != (job_id, str(seen_at)):
                look = self._look = _Look(job_id, str(seen_at), now)
            return now - look.first >= LOST_AFTER

    def _failed_as_lost(self, connection: Connection, job_id: int, seen_at: float) -> bool:
        """Whether a running job is lost; if so, marks it as failed, unless its heartbeat has changed meanwhile."""
        if not self._is_lost(job_id, seen_at):
            return False
        own = (jobs.c.id == job_id) & (jobs.c.state == "running") & (jobs.c.seen_at == seen_at)
        values = {"state": "failed", "error": LOST, "ended_at": jobs.c.seen_at}
        return connection.execute(update(jobs).where(own).values(values)).rowcount == 1

    def _one(self, connection: Connection, job_id: int) -> JobRecord:
        row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
        if row is None:
            raise UnknownIdError(f"no job {job_id}")
        return _record(row)


def _is_folder_name(value: object) -> bool:
    """Whether it is the name of a folder on the shelf, and not a path to another one."""
    return is_text(value) and value not in ("", ".", "..") and Path(value).name == value


def _named(job: JobRecord) -> str:
    return f"job {job.id} ({job.kind}) of {job.who}"


def _record(row: Any) -> JobRecord:
    """The job in a row; one that something else has changed has failed, and nothing that it contains is trusted."""
    values = row._asdict()
    request, stored = json_object(values.pop("request")), values.pop("result")
    result = None if stored is None else json_object(stored)
    is_whole = (
        values["kind"] in get_args(JobKind)
        and values["state"] in get_args(JobState)
        and all(map(is_time, (values["started_at"], values["seen_at"], values["ended_at"] or 0.0)))
        and all(map(is_text, (values["who"], values["step"], values["error"] or "")))
        and _is_folder_name(values["base"])
        and (values["candidate"] is None or _is_folder_name(values["candidate"]))
        and isinstance(values["progress"], float)
        and 0 <= values["progress"] <= 1
    )
    if is_whole and request is not None and (stored is None or result is not None):
        return JobRecord(**values, request=request, result=result)
    return JobRecord(
        id=values["id"],
        kind=values["kind"] if values["kind"] in get_args(JobKind) else "learn",
        state="failed",
        who=values["who"] if is_text(values["who"]) else "",
        started_at=values["started_at"] if is_time(values["started_at"]) else 0.0,
        seen_at=0.0,
        ended_at=0.0,
        progress=0.0,
        step="",
        request={},
        base="",
        candidate=None,
        error=DAMAGED,
        result=None,
    )
