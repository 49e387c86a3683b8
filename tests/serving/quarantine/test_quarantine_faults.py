"""The quarantine when something breaks: full disk, no folder, database gone and back, kill -9."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.quarantine import database as database_module
from serving.quarantine import keeper as keeper_module
from serving.quarantine.images import ImageFolder
from serving.quarantine.keeper import Keeper
from serving.quarantine.records import UnavailableError
from serving.quarantine.store import Store
from tests.helpers_quarantine import Counters, Place, Postgres, arrival, arrivals, noise, run_python
from tests.helpers_serving import PATIENCE, eventually, saved

SMALL = 16 * 1024


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(keeper_module, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(database_module, "PATIENCE", 0.2)


@contextlib.contextmanager
def keeping(store: Store) -> Iterator[Keeper]:
    keeper = Keeper(store)
    try:
        yield keeper
    finally:
        keeper.close(PATIENCE)


def offer_all(keeper: Keeper, numbers: range) -> None:
    """Offer images as the server does; no error may reach it."""
    for one in arrivals(numbers):
        keeper.offer(one)


# ---- the disk


FULL_DISK = f"""
import json, resource, sys
from serving.quarantine.records import UnavailableError
from serving.quarantine.store import Store
from tests.helpers_quarantine import arrival, noise
from tests.helpers_serving import saved

large = arrival(content=saved(noise(2, side=100), "BMP"))
assert len(large.content) > {SMALL}
store = Store.open(sys.argv[1], sys.argv[2])
store.add([arrival(0)])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({SMALL}, hard))
try:
    store.add([arrival(1), large, arrival(3)])
except UnavailableError as error:
    part = error.part
held = store.usage().items
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
added = store.add([arrival(1), large, arrival(3)])
print(json.dumps([part, held, len(added.kept), store.usage().items]))
"""


def test_a_full_disk_leaves_nothing_half_written(place: Place) -> None:
    """The kernel refuses to write more, as on a full disk; later there is space again."""
    child = run_python(FULL_DISK, place.url, place.images)
    output, _ = child.communicate(timeout=PATIENCE)
    # A database file cannot grow either, if it is written first.
    part, held, kept, after = json.loads(output)
    assert part in ("images", "database")
    assert (held, kept, after) == (1, 3, 4)
    store = place.open()
    assert store.image(2) == saved(noise(1))
    assert len(place.files()) == 4
    assert store.sweep(unowned_for=-1) == 0


def test_a_disk_that_is_full_half_way_through_a_batch_gives_back_what_it_took(tmp_path: Path) -> None:
    code = f"""
import resource, sys
from pathlib import Path
from serving.quarantine.images import ImageFolder, new_name

resource.setrlimit(resource.RLIMIT_FSIZE, ({SMALL}, {SMALL}))
small, large = new_name("0" * 64, "0" * 8), new_name("1" * 64, "0" * 8)
ImageFolder(Path(sys.argv[1])).write({{small: b"x", large: bytes({SMALL} + 1)}})
"""
    child = run_python(code, str(tmp_path / "images"), stderr=subprocess.PIPE)
    _, problem = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1
    assert "UnavailableError: images at" in problem
    assert "File too large" in problem
    assert list((tmp_path / "images").iterdir()) == []


def test_without_a_folder_offers_go_on_and_nothing_is_lost(place: Place, counted: Counters) -> None:
    """A file is in place of the folder: unlike permissions, this also stops the superuser."""
    images = Path(place.images)
    images.write_text("in the way")
    with keeping(place.open()) as keeper:
        offer_all(keeper, range(10))
        eventually(lambda: counted("failures", part="images") >= 3)
        assert keeper.store.items() == [], "no row without its image"
        images.unlink()
        eventually(lambda: counted("kept") == 10)
    store = place.open()
    assert {store.image(item.id) for item in store.items()} == {saved(noise(number)) for number in range(10)}
    assert counted("dropped", reason="images") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for the superuser")
def test_a_read_only_folder_is_waited_for(place: Place, counted: Counters) -> None:
    images = Path(place.images)
    images.mkdir(mode=0o500)
    with keeping(place.open()) as keeper:
        offer_all(keeper, range(3))
        eventually(lambda: counted("failures", part="images") >= 3)
        images.chmod(0o700)
        eventually(lambda: counted("kept") == 3)


def test_a_deletion_without_the_disk_is_finished_by_the_sweep(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise UnavailableError("away", part="images")

    store.add(arrivals(range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(ImageFolder, "remove", away)
        assert store.delete([1, 2]) == 2
    assert "files of 2 deleted images are left for the next sweep" in caplog.text
    assert (len(store.items()), len(place.files())) == (1, 3)
    assert store.sweep(unowned_for=-1) == 2
    assert len(place.files()) == 1


# ---- the database


def test_a_locked_file_is_waited_for(tmp_path: Path, counted: Counters) -> None:
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    place.open().close()
    with keeping(Store(place.url, place.images)) as keeper:
        keeper.offer(arrival(100))
        eventually(lambda: counted("kept") == 1)
        other = sqlite3.connect(tmp_path / "quarantine.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        offer_all(keeper, range(10))
        eventually(lambda: counted("failures", part="database") >= 2)
        assert counted("kept") == 1
        other.execute("ROLLBACK")
        other.close()
        eventually(lambda: counted("kept") == 11)
    assert len(place.files()) == 11, "attempts that failed leave nothing behind"


def test_a_server_that_is_gone_is_waited_for(
    running_postgres: Postgres, tmp_path: Path, counted: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(running_postgres.new_database(), str(tmp_path / "images"))
    with keeping(place.open()) as keeper:
        keeper.offer(arrival(100))
        eventually(lambda: counted("kept") == 1)
        running_postgres.stop()
        try:
            offer_all(keeper, range(10))
            eventually(lambda: counted("failures", part="database") >= 3)
            with pytest.raises(UnavailableError, match="cannot be used"):
                keeper.store.groups()
        finally:
            running_postgres.start()
        eventually(lambda: counted("kept") == 11)
    assert {item.answer["number"] for item in place.open().items()} == {100, *range(10)}
    assert len(place.files()) == 11
    assert "secret" not in caplog.text


def test_a_server_may_be_away_when_the_keeper_starts(
    running_postgres: Postgres, tmp_path: Path, counted: Counters
) -> None:
    place = Place(running_postgres.new_database(), str(tmp_path / "images"))
    running_postgres.stop()
    try:
        keeper = Keeper(Store(place.url, place.images))
        keeper.offer(arrival(1))
        eventually(lambda: counted("failures", part="database") >= 3)
    finally:
        running_postgres.start()
    eventually(lambda: counted("kept") == 1)
    keeper.close(PATIENCE)


def test_a_database_that_was_emptied_is_made_anew(place: Place, tmp_path: Path, store: Store) -> None:
    """The database file, or all tables, are removed while the server runs."""
    store.add(arrivals(range(3)))
    if place.server is None:
        for path in tmp_path.glob("quarantine.db*"):
            path.unlink()
    else:
        place.server.execute(f"DROP DATABASE {place.url.rpartition('/')[2]} WITH (FORCE)")
        place.server.execute(f"CREATE DATABASE {place.url.rpartition('/')[2]}")
        with pytest.raises(UnavailableError):
            store.add([arrival(1)])
    assert eventually(lambda: _added(store)) == 1
    assert len(place.open().items()) == 1


def _added(store: Store) -> int:
    with contextlib.suppress(UnavailableError):
        return len(store.add([arrival(1)]).kept)
    return 0


# ---- kill -9

ENDLESS = """
import hashlib, sys
from serving.quarantine.store import Store
from tests.helpers_quarantine import arrivals

store = Store.open(sys.argv[1], sys.argv[2])
for start in range(int(sys.argv[3]), 10**9, 4):
    some = arrivals(range(start, start + 4))
    store.add(some)
    print(*(hashlib.sha256(one.content).hexdigest() for one in some), flush=True)
"""


@pytest.mark.long
def test_kill_9_loses_nothing_that_was_acknowledged(place: Place) -> None:
    acknowledged: set[str] = set()
    for attempt in range(4):
        child = run_python(ENDLESS, place.url, place.images, str(1000 * attempt))
        assert child.stdout is not None
        for _ in range(3):
            acknowledged.update(child.stdout.readline().split())
        # Kill it in the middle of the next images, at a different point each time.
        time.sleep(0.007 * attempt)
        os.kill(child.pid, signal.SIGKILL)
        acknowledged.update(child.stdout.read().rpartition("\n")[0].split())
        child.wait()
    assert len(acknowledged) >= 4 * 3 * 4
    store = place.open()
    items = store.items()
    kept = {hashlib.sha256(store.image(item.id)).hexdigest() for item in items}
    assert acknowledged <= kept
    assert all(item.answer["label"] == "unknown" and len(item.features) == 6 for item in items)
    # All other files belong to rows that were never written; only these are removed.
    left = len(place.files()) - len(items)
    assert store.sweep(unowned_for=-1) == left
    assert len(place.files()) == len(items)
    assert {hashlib.sha256(store.image(item.id)).hexdigest() for item in items} == kept


def test_killed_between_file_and_row_there_is_no_row(place: Place) -> None:
    """The one moment that a random kill rarely hits."""
    code = """
import os, signal, sys
from serving.quarantine.intake import Intake
from serving.quarantine.store import Store
from tests.helpers_quarantine import arrivals

store = Store.open(sys.argv[1], sys.argv[2])
Intake._write_rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.add(arrivals(range(3)))
"""
    assert run_python(code, place.url, place.images).wait(timeout=PATIENCE) == -signal.SIGKILL
    store = place.open()
    assert store.items() == []
    assert len(place.files()) == 3
    assert store.sweep() == 0
    assert store.sweep(unowned_for=-1) == 3
