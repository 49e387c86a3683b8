"""The thread between answers and the store: it never delays answers, and counts every lost image."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from prometheus_client import REGISTRY

from serving.quarantine import keeper as keeper_module
from serving.quarantine import keeper_of
from serving.quarantine.keeper import BATCH, Keeper
from serving.quarantine.records import Added, Arrival, Caps, UnavailableError
from serving.quarantine.store import Store
from serving.settings import Settings, SettingsError
from serving.telemetry import metrics
from tests.helpers_quarantine import Counters, arrival, arrivals, noise
from tests.helpers_serving import PATIENCE, ROOT, eventually, saved


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(keeper_module, "LONGEST_PAUSE", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path}/quarantine.db")


class Stuck(Store):
    """A store whose disk does not respond until it is released."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.busy, self.go_on, self.added = (threading.Event() for _ in range(3))

    def add(self, arrivals: Sequence[Arrival]) -> Added:
        self.busy.set()
        assert self.go_on.wait(PATIENCE)
        self.added.set()
        return super().add(arrivals)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Stuck]:
    store = Stuck(f"sqlite:///{tmp_path}/quarantine.db")
    yield store
    store.go_on.set()


def test_a_written_image_does_not_stay_in_memory(store: Store) -> None:
    """Not even while nothing else arrives: a batch may have 8 MB and a file."""
    keeper = Keeper(store)
    # A file is no object that can be watched, but what comes with it is.
    features = np.zeros(6, np.float32)
    watched = weakref.ref(features)
    keeper.offer(arrival(features=features))
    del features
    eventually(lambda: store.usage().items == 1)
    eventually(lambda: watched() is None, patience=10.0)
    keeper.close(PATIENCE)


def test_losses_are_counted_from_zero_on(store: Store) -> None:
    """A series that begins with its first loss has no increase, and no alert would fire."""
    metrics.DROPPED.clear()
    Keeper(store).close(PATIENCE)
    for reason in ("queue_full", "database", "images", "unreadable", "shutdown"):
        assert REGISTRY.get_sample_value("openworld_quarantine_dropped_total", {"reason": reason}) == 0


def test_what_is_offered_is_kept(store: Store, counted: Counters) -> None:
    keeper = Keeper(store)
    for one in [*arrivals(range(5)), arrival(2)]:
        keeper.offer(one)
    keeper.close(PATIENCE)
    assert [item.copies for item in store.items()] == [1, 1, 2, 1, 1]
    assert store.image(5) == saved(noise(4))
    assert (counted("kept"), counted("copies")) == (5, 1)
    assert REGISTRY.get_sample_value("openworld_quarantine_items") == 5
    assert REGISTRY.get_sample_value("openworld_quarantine_bytes") == store.usage().bytes


def test_unknown_is_wanted_always_and_known_as_often_as_asked_for(store: Store) -> None:
    never, always, sometimes = (Keeper(store, audit_share=share) for share in (0.0, 1.0, 0.25))
    assert {keeper.wants(known=False) for keeper in (never, always, sometimes)} == {"unknown"}
    assert {never.wants(known=True) for _ in range(100)} == {None}
    assert {always.wants(known=True) for _ in range(100)} == {"audit"}
    drawn = sum(sometimes.wants(known=True) == "audit" for _ in range(4000))
    assert 800 < drawn < 1200
    for keeper in (never, always, sometimes):
        keeper.close(PATIENCE)


def test_a_burst_of_ten_thousand_is_bounded_counted_and_over_at_once(stuck: Stuck, counted: Counters) -> None:
    keeper = Keeper(stuck, queue=100)
    keeper.offer(arrival(0))
    assert stuck.busy.wait(PATIENCE)
    burst = [arrival(number) for number in range(1, 21)] * 500
    for one in burst:
        keeper.offer(one)
    assert not stuck.go_on.is_set(), "ten thousand offers, while the disk does not respond"
    assert counted("dropped", reason="queue_full") == 10_000 - 100
    stuck.go_on.set()
    keeper.close(PATIENCE)
    assert sum(item.copies for item in stuck.items()) == 101
    assert counted("kept") + counted("copies") + counted("dropped", reason="queue_full") == 10_001


def test_the_line_is_bounded_in_bytes_too(stuck: Stuck, counted: Counters) -> None:
    large = saved(noise(1), "BMP")
    keeper = Keeper(stuck, queue_bytes=3 * len(large))
    keeper.offer(arrival(0))
    assert stuck.busy.wait(PATIENCE)
    for _ in range(5):
        keeper.offer(arrival(content=large))
    assert counted("dropped", reason="queue_full") == 2
    stuck.go_on.set()
    keeper.close(PATIENCE)
    # An empty queue accepts even an image that is larger than its limit.
    small = Keeper(stuck, queue_bytes=1)
    small.offer(arrival(7))
    small.close(PATIENCE)
    assert len(stuck.items()) == 3


def test_an_offer_never_raises(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper(store)
    keeper.offer(None)  # type: ignore[arg-type]
    assert "could not be offered" in caplog.text
    keeper.close(PATIENCE)


def test_an_image_that_cannot_be_kept_does_not_affect_others(store: Store, counted: Counters) -> None:
    keeper = Keeper(store)
    for one in (arrival(1), arrival(content=b"no image at all"), arrival(2, answer={"no": object()}), arrival(3)):
        keeper.offer(one)
    keeper.close(PATIENCE)
    assert {item.answer["number"] for item in store.items()} == {1, 3}
    assert counted("dropped", reason="unreadable") == 2
    assert counted("failures", part="image") == 2


def test_many_are_written_in_one_transaction(stuck: Stuck) -> None:
    sizes: list[int] = []
    add = stuck.add

    def noted(some: Sequence[Arrival]) -> Added:
        sizes.append(len(some))
        return add(some)

    stuck.add = noted  # type: ignore[method-assign]
    keeper = Keeper(stuck)
    keeper.offer(arrival(0))
    assert stuck.busy.wait(PATIENCE)
    for number in range(100):
        keeper.offer(arrival(number % 10))
    stuck.go_on.set()
    keeper.close(PATIENCE)
    assert sizes == [1, BATCH, 100 - BATCH]


class Failing(Store):
    """A store that is unavailable for the first few attempts."""

    def __init__(self, url: str, attempts: int) -> None:
        super().__init__(url)
        self.attempts = attempts

    def add(self, arrivals: Sequence[Arrival]) -> Added:
        self.attempts -= 1
        if self.attempts >= 0:
            raise UnavailableError("away", part="database")
        return super().add(arrivals)


def test_a_failed_write_is_retried(tmp_path: Path, counted: Counters, caplog: pytest.LogCaptureFixture) -> None:
    store = Failing(f"sqlite:///{tmp_path}/quarantine.db", attempts=5)
    keeper = Keeper(store)
    keeper.offer(arrival(1))
    eventually(lambda: counted("kept") == 1)
    assert counted("failures", part="database") == 5
    keeper.close(PATIENCE)
    assert len(store.items()) == 1
    messages = [record.message for record in caplog.records]
    assert [line.partition(",")[0] for line in messages] == [
        "the quarantine does not work",
        "the quarantine works again",
    ]


def test_retries_are_limited(tmp_path: Path, counted: Counters) -> None:
    store = Failing(f"sqlite:///{tmp_path}/quarantine.db", attempts=10**9)
    keeper = Keeper(store, retry_for=0.2)
    keeper.offer(arrival(1))
    eventually(lambda: counted("dropped", reason="database") == 1)
    store.attempts = 0
    keeper.offer(arrival(2))
    eventually(lambda: counted("kept") == 1)
    keeper.close(PATIENCE)


def test_closing_takes_no_longer_than_it_may(stuck: Stuck, counted: Counters) -> None:
    keeper = Keeper(stuck)
    for number in range(3):
        keeper.offer(arrival(number))
    assert stuck.busy.wait(PATIENCE)
    keeper.close(0.2)
    assert not stuck.added.is_set()
    assert counted("dropped", reason="shutdown") == 3
    keeper.offer(arrival(9))
    assert counted("dropped", reason="shutdown") == 4


def test_closing_does_not_wait_for_a_store_that_is_away(tmp_path: Path, counted: Counters) -> None:
    store = Failing(f"sqlite:///{tmp_path}/quarantine.db", attempts=10**9)
    keeper = Keeper(store)
    for number in range(3):
        keeper.offer(arrival(number))
    eventually(lambda: counted("failures", part="database") > 1)
    keeper.close(0.3)
    assert counted("dropped", reason="database") + counted("dropped", reason="shutdown") == 3


def test_caps_are_kept(store: Store, counted: Counters) -> None:
    keeper = Keeper(store, caps=Caps(items=4))
    for number in range(10):
        keeper.offer(arrival(number))
    keeper.close(PATIENCE)
    assert store.usage().items == 4
    assert counted("evicted", cap="items") == 6
    assert counted("kept") == 10


def test_age_is_looked_after_when_nothing_comes(
    store: Store, counted: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "MAINTAIN_EVERY", 0.05)
    keeper = Keeper(store, caps=Caps(days=1))
    Store(store._database._url.render_as_string()).add([arrival(1, received_at=time.time() - 2 * 86_400)])
    eventually(lambda: counted("evicted", cap="days") == 1)
    keeper.close(PATIENCE)


def test_what_a_killed_process_left_is_swept(store: Store, tmp_path: Path) -> None:
    store.add([arrival(1)])
    (kept,) = (tmp_path / "images").iterdir()
    left = kept.with_name(kept.name[:-8] + "00000000")
    left.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(left, (two_hours_ago, two_hours_ago))
    keeper = Keeper(store)
    keeper.close(PATIENCE)
    assert list((tmp_path / "images").iterdir()) == [kept]


# ---- settings


def test_without_a_url_there_is_no_keeper_and_no_database_library() -> None:
    assert keeper_of(Settings()) is None
    code = (
        "import sys, serving.quarantine, serving.settings\n"
        "assert serving.quarantine.keeper_of(serving.settings.Settings()) is None\n"
        "assert not {'sqlalchemy', 'fsspec', 'bentoml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_server_without_a_quarantine_does_not_load_the_database_library() -> None:
    code = "import sys, serving.http.app\nassert 'sqlalchemy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_store_needs_neither_bentoml_nor_torch() -> None:
    code = "import sys, serving.quarantine.store\nassert not {'bentoml', 'torch', 'starlette'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(("teach", "expire"), [("on", False), ("auto", False), ("off", True)])
def test_labels_expire_unless_the_server_can_be_taught(tmp_path: Path, teach: str, expire: bool) -> None:
    variables = {
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{tmp_path}/q.db",
        "OPENWORLD_ADMIN_TOKEN": "a-token-of-enough-length",
        "OPENWORLD_BUNDLES": str(tmp_path),
        "OPENWORLD_TEACH": teach,
    }
    with patch.dict(os.environ, variables):
        keeper = keeper_of(Settings.from_environment())
    assert keeper is not None
    keeper.close(PATIENCE)
    assert keeper._caps == Caps(labels_expire=expire)


def test_a_keeper_is_configured_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {
        "OPENWORLD_QUARANTINE_URL": "sqlite:///deep/q.db",
        "OPENWORLD_QUARANTINE_IMAGES": "elsewhere",
        "OPENWORLD_QUARANTINE_MAX_ITEMS": "5",
        "OPENWORLD_QUARANTINE_MAX_BYTES": "6000",
        "OPENWORLD_QUARANTINE_MAX_DAYS": "0.5",
        "OPENWORLD_QUARANTINE_AUDIT_SHARE": "1",
        "OPENWORLD_QUARANTINE_QUEUE": "7",
    }
    with patch.dict(os.environ, variables):
        settings = Settings.from_environment()
    # Workers may run in another directory.
    assert settings.quarantine_url == f"sqlite:///{tmp_path}/deep/q.db"
    assert settings.quarantine_images == str(tmp_path / "elsewhere")
    keeper = keeper_of(settings)
    assert keeper is not None
    assert (keeper._caps, keeper._most) == (Caps(items=5, bytes=6000, days=0.5), 7)
    assert keeper.wants(known=True) == "audit"
    keeper.offer(arrival(1))
    keeper.close(PATIENCE)
    assert len(Store.open(f"sqlite:///{tmp_path}/deep/q.db", str(tmp_path / "elsewhere")).items()) == 1
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("URL", "mysql://ann:secret@host/db", "a URL of 'mysql'; allowed: sqlite:///FILE, postgresql"),
        ("URL", "secret", "a URL of 'no scheme'"),
        ("URL", "sqlite://", "a URL of SQLite without a file"),
        ("URL", "postgresql://ann:secret@host/db", "OPENWORLD_QUARANTINE_IMAGES is not set"),
        ("MAX_ITEMS", "0", "a whole number from 1"),
        ("MAX_DAYS", "0", "days, more than 0"),
        ("AUDIT_SHARE", "1.5", "a number from 0 to 1"),
        ("AUDIT_SHARE", "nan", "a number from 0 to 1"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(name: str, value: str, problem: str) -> None:
    with (
        patch.dict(os.environ, {f"OPENWORLD_QUARANTINE_{name}": value}),
        pytest.raises(SettingsError, match=problem) as refused,
    ):
        Settings.from_environment()
    assert "secret" not in str(refused.value)


def test_a_password_is_never_shown() -> None:
    url = "postgresql://ann:secret@host/db"
    with patch.dict(os.environ, {"OPENWORLD_QUARANTINE_URL": url, "OPENWORLD_QUARANTINE_IMAGES": "s3://x/y"}):
        settings = Settings.from_environment()
    assert settings.quarantine_url == url
    assert settings.quarantine_images == "s3://x/y"
    assert "secret" not in repr(settings)


def test_who_waits_learns_when_it_is_durable_or_lost(stuck: Stuck) -> None:
    told: list[tuple[int, str | None, int]] = []

    def waiting(number: int) -> Arrival:
        return arrival(number)._replace(
            when_stored=lambda reason: told.append((number, reason, 0 if reason else stuck.usage().items))
        )

    keeper = Keeper(stuck, queue=1, durable=True)
    keeper.offer(waiting(0))
    assert stuck.busy.wait(PATIENCE)
    keeper.offer(waiting(1))
    keeper.offer(waiting(2))
    assert told == [(2, "queue_full", 0)]
    stuck.go_on.set()
    eventually(lambda: len(told) == 3)
    keeper.close(PATIENCE)
    keeper.offer(waiting(3))
    assert told == [(2, "queue_full", 0), (0, None, 1), (1, None, 2), (3, "shutdown", 0)]
