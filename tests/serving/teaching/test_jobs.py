"""The jobs of a store: when one counts as lost, whatever the clock of the machine does, and damaged rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.quarantine.store import Store
from serving.teaching import jobs as jobs_module
from serving.teaching.api.views import job_view
from serving.teaching.jobs import LOST_AFTER, PUBLISHED_WITHIN, JobBusyError, Jobs, WrongStateError
from serving.teaching.teacher import described

DAY = 86_400.0


@dataclass
class Clocks:
    """What the jobs have instead of the module `time`."""

    wall: float = 1_700_000_000.0
    steady: float = 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(jobs_module, "time", clocks)
    return clocks


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/quarantine.db")
    yield opened
    opened.close()


@pytest.fixture
def jobs(store: Store, clocks: Clocks) -> Jobs:
    return Jobs(store.database)


@pytest.mark.parametrize("jump", [0.0, -DAY, DAY])
def test_a_job_whose_process_has_ended_is_lost(jobs: Jobs, clocks: Clocks, jump: float) -> None:
    dead = jobs.start("learn", "ann", "v0", {})
    clocks.wall += jump
    with pytest.raises(JobBusyError, match=r"job 1 \(learn\) of ann"):
        jobs.start("learn", "bob", "v0", {})
    clocks.sleep(LOST_AFTER)
    assert jobs.start("learn", "bob", "v0", {}).state == "running"
    assert jobs.get(dead.id).state == "failed"
    assert "process that ran it has ended" in str(jobs.get(dead.id).error)


@pytest.mark.parametrize("jump", [0.0, -DAY, 120.0, DAY])
def test_a_job_that_shows_that_it_lives_is_not_lost(jobs: Jobs, clocks: Clocks, jump: float) -> None:
    alive = jobs.start("learn", "ann", "v0", {})
    assert jobs.get(alive.id).state == "running"
    clocks.wall += jump
    for _ in range(5):
        assert jobs.get(alive.id).state == "running"
        clocks.sleep(LOST_AFTER / 2)
        assert jobs.get(alive.id).state == "running"
        clocks.sleep(LOST_AFTER / 4)
        jobs.keep_alive(alive.id)
    assert jobs.show(alive.id, 0.5, "learning")
    assert jobs.get(alive.id).seconds >= 0


def test_a_process_that_has_just_started_waits_before_it_calls_a_job_lost(
    store: Store, jobs: Jobs, clocks: Clocks
) -> None:
    dead = jobs.start("learn", "ann", "v0", {})
    clocks.sleep(3600)
    started = Jobs(store.database)
    assert started.get(dead.id).state == "running"
    clocks.sleep(LOST_AFTER - 1)
    assert started.get(dead.id).state == "running"
    clocks.sleep(1)
    assert started.get(dead.id).state == "failed"


def test_a_sign_of_life_between_look_and_write_counts(
    jobs: Jobs, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = jobs.start("learn", "ann", "v0", {})
    seen = jobs.get(alive.id).seen_at
    clocks.sleep(LOST_AFTER)
    jobs.keep_alive(alive.id)
    # The row as it was read before that.
    monkeypatch.setattr(jobs, "_is_lost", lambda number, _: True)
    with jobs._database.writing() as connection:
        assert not jobs._failed_as_lost(connection, alive.id, seen)
    monkeypatch.undo()
    assert jobs.get(alive.id).state == "running"


@pytest.mark.parametrize("jump", [PUBLISHED_WITHIN, DAY, -DAY])
def test_a_result_that_was_to_publish_itself_does_not_block_the_next_job_for_long(
    jobs: Jobs, clocks: Clocks, jump: float
) -> None:
    first = jobs.start("learn", "ann", "v0", {"accept": True})
    jobs.finish(first.id, {"gate": True}, "v1")
    with pytest.raises(JobBusyError, match="is being published"):
        jobs.start("learn", "bob", "v0", {})
    clocks.wall += jump
    jobs.start("learn", "bob", "v0", {})
    assert jobs.get(first.id).state == "discarded"


def test_the_last_job_is_not_recent_for_a_day_after_the_clock_was_set_back(jobs: Jobs, clocks: Clocks) -> None:
    jobs.fail(jobs.start("auto", "ann", "v0", {}).id, "no images")
    assert jobs.latest() is not None
    clocks.wall -= DAY
    assert jobs.latest() is None
    assert jobs.latest(within=0.0) is None


@pytest.mark.parametrize(
    "column",
    [
        "result = 'not json'",
        "result = '[1]'",
        """result = '{"gate": "\ud800"}'""".replace("\ud800", "\\ud800"),
        "result = x'00ff'",
        "request = 'not json'",
        "kind = 'odd'",
        "state = 'odd'",
        "who = x'00ff'",
        "started_at = 9e999",
        "seen_at = 'x'",
        "ended_at = 1e30",
        "progress = 'half'",
        "progress = 9e999",
        "base = '../v0'",
        "candidate = '../../victim'",
        "candidate = ''",
        "error = x'00'",
    ],
)
def test_a_damaged_row_is_a_job_that_has_failed(jobs: Jobs, tmp_path: Path, column: str) -> None:
    done = jobs.start("learn", "ann", "v0", {"accept": True})
    jobs.finish(done.id, {"gate": True}, "v1")
    with closing(sqlite3.connect(tmp_path / "quarantine.db")) as connection, connection:
        connection.execute(f"UPDATE openworld_jobs SET {column}")
    damaged = jobs.get(done.id)
    assert (damaged.state, damaged.candidate, damaged.result) == ("failed", None, None)
    assert "changed by something else" in str(damaged.error)
    assert job_view(damaged).model_dump_json()
    assert all(job.state == "failed" for job in (*jobs.waiting(), *jobs.of_kind("learn"), *jobs.not_accepted()))
    with pytest.raises(WrongStateError):
        jobs.discard(done.id, "ann")
    # The next job does not wait for it.
    following = jobs.start("learn", "bob", "v0", {})
    assert jobs.latest() == following


@pytest.mark.parametrize("column", ["seen_at = 'x'", "seen_at = 9e999", "result = 'not json'", "started_at = x'00'"])
def test_a_damaged_row_of_a_running_job_blocks_no_longer_than_a_lost_one(
    jobs: Jobs, clocks: Clocks, tmp_path: Path, column: str
) -> None:
    jobs.start("learn", "ann", "v0", {})
    with closing(sqlite3.connect(tmp_path / "quarantine.db")) as connection, connection:
        connection.execute(f"UPDATE openworld_jobs SET {column}")
    with pytest.raises(JobBusyError):
        jobs.start("learn", "bob", "v0", {})
    clocks.sleep(LOST_AFTER)
    assert jobs.start("learn", "bob", "v0", {}).state == "running"


@pytest.mark.parametrize("result", ['{"old_classes": 7}', '{"classes": [1], "old_classes": {}}', '{"deleted": 7}'])
def test_a_result_of_another_form_can_be_shown(jobs: Jobs, tmp_path: Path, result: str) -> None:
    done = jobs.start("learn", "ann", "v0", {})
    jobs.finish(done.id, {"gate": True}, "v1")
    with closing(sqlite3.connect(tmp_path / "quarantine.db")) as connection, connection:
        connection.execute("UPDATE openworld_jobs SET result = ?", (result,))
    shown = jobs.get(done.id)
    assert job_view(shown).learned is None
    assert described(shown) == "learn"
