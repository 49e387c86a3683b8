"""Two replicas with one PostgreSQL database and one shelf, where two people teach at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from serving import errors
from serving.client import Client
from serving.quarantine.store import Store
from serving.settings import Settings
from serving.swap.leader import SwapLeader
from serving.teaching import class_changes
from serving.teaching.jobs import JobRecord
from serving.teaching.lesson_job import Wanted
from serving.teaching.teacher import PublishedVersion, Teacher
from tests.helpers_quarantine import Postgres, arrival
from tests.helpers_serving import eventually, serving
from tests.helpers_teacher import OneWorker, finished, make_shelf
from tests.helpers_teaching import picture, pictures

pytestmark = pytest.mark.long

TOKEN = "a-token-of-enough-length"


@pytest.fixture
def replicas(
    running_postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Teacher, Teacher]]:
    make_shelf(tmp_path)
    monkeypatch.setenv("OPENWORLD_BUNDLES", str(tmp_path / "shelf"))
    monkeypatch.setenv("OPENWORLD_ADMIN_TOKEN", "a-token-of-enough-length")
    monkeypatch.setenv("OPENWORLD_QUARANTINE_URL", running_postgres.new_database())
    monkeypatch.setenv("OPENWORLD_QUARANTINE_IMAGES", str(tmp_path / "images"))
    settings = Settings.from_environment()
    assert settings.quarantine_url is not None
    made = []
    for _ in range(2):
        store = Store.open(settings.quarantine_url, settings.quarantine_images)
        made.append(Teacher(settings, store, cast(SwapLeader, OneWorker(tmp_path / "shelf"))))
    yield made[0], made[1]
    for each in made:
        each.store.close()


def label(teacher: Teacher, name: str, who: str) -> None:
    added = teacher.store.add([arrival(content=content) for content in pictures(name, 8)])
    teacher.store.teach(added.ids, name, teacher.current().labels, who)


def both(one: Any, other: Any) -> list[Any]:
    """The results of two calls at the same time; errors are results."""

    def result(call: Any) -> Any:
        try:
            return call()
        except errors.RequestError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(result, (one, other)))


def test_two_people_teach_at_once(replicas: tuple[Teacher, Teacher]) -> None:
    ada, bob = replicas
    label(ada, "elk", "ada")
    label(bob, "fox", "bob")
    begun = both(lambda: ada.learn("ada", Wanted(only=("elk",))), lambda: bob.learn("bob", Wanted(only=("fox",))))
    (first,) = (each for each in begun if isinstance(each, JobRecord))
    (busy,) = (each for each in begun if isinstance(each, errors.TeachBusyError))
    assert f"job {first.id} (learn) of {first.who}" in str(busy)
    finished(ada, first)
    # Whoever comes second begins another lesson, which has what both have labelled.
    second = finished(bob, bob.learn("bob", Wanted()))
    with pytest.raises(errors.JobStateError, match=f"bob began job {second.id}, which learns all that is labelled"):
        ada.accept(first.id, "ada")
    # Both accept it. One of them publishes it, and it is noted once.
    accepted = both(lambda: ada.accept(second.id, "ada"), lambda: bob.accept(second.id, "bob"))
    assert any(isinstance(each, PublishedVersion) for each in accepted)
    assert all(isinstance(each, PublishedVersion | errors.JobStateError) for each in accepted)
    for each in replicas:
        each.reconcile()
        assert each.current().labels[-2:] == ("elk", "fox")
    # A class is taken out while the other person's change of a class waits.
    renamed = class_changes.rename(ada, "ada", "bee", "wasp", accept=False).job
    assert renamed is not None
    finished(ada, renamed, "done")
    deleted = class_changes.delete(bob, "bob", "ant", images=False, accept=False).job
    assert deleted is not None
    finished(bob, deleted, "done")
    told = f"job {deleted.id}, which is for deleting 'ant'; .* ask again for renaming 'bee' to 'wasp'"
    with pytest.raises(errors.JobStateError, match=told):
        ada.accept(renamed.id, "ada")
    accepted = both(lambda: ada.accept(deleted.id, "ada"), lambda: bob.accept(deleted.id, "bob"))
    assert any(isinstance(each, PublishedVersion) for each in accepted)
    for each in replicas:
        each.reconcile()
        assert "ant" not in each.current().labels
        assert {"elk", "fox", "bee"} <= {*each.current().labels}
    noted = Counter(change.what for change in ada.store.changes(100))
    assert (noted["forget"], noted["publish"], noted["accept"], noted["learn"]) == (1, 2, 2, 4)


def test_two_real_replicas_on_one_store_and_shelf(tmp_path: Path) -> None:
    """What one server is taught, the other one serves; what either acknowledges, both have."""
    make_shelf(tmp_path)
    settings = {
        "OPENWORLD_BUNDLES": str(tmp_path / "shelf"),
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{tmp_path}/quarantine.db",
        "OPENWORLD_WORKERS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (
        serving(tmp_path / "one", None, settings=settings) as one,
        serving(tmp_path / "two", None, settings=settings) as two,
        Client(one.url, timeout=60) as ada_client,
        Client(two.url, timeout=60) as bob_client,
    ):
        ada, bob = ada_client.teaching(TOKEN, "ada"), bob_client.teaching(TOKEN, "bob")
        for number in range(8):
            ada.add("elk", picture("elk", number))
            bob.add("fox", picture("fox", number))
        assert ada.status().classes == bob.status().classes == {"elk": 8, "fox": 8}
        job = ada.wait(ada.learn())
        # The other replica shows the same job, and can accept it.
        assert bob.job(job.id) == job
        version = bob.accept(job.id).version
        eventually(lambda: ada_client.predict(picture("elk", 100)).model.version == version)
        assert {"elk", "fox"} <= {entry.label for entry in ada.classes().classes if entry.in_model}
        deleted = ada.delete("fox")
        assert deleted.job is not None
        gone = ada.wait(deleted.job)
        assert gone.state == "accepted"
        eventually(lambda: bob_client.predict(picture("elk", 101)).model.version == gone.candidate)
        assert bob.status().unknown == ada.status().unknown
        assert bob.roll_back(version).version == version
        eventually(lambda: ada_client.predict(picture("fox", 101)).model.version == version)
