"""Workers that agree on a bundle, as threads of one process; some fail, die or start late."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from serving.bundle.errors import BundleError
from serving.bundle.layout import MANIFEST
from serving.bundle.shelf import Shelf
from serving.errors import BundleRefusedError, RequestError, SwapError
from serving.inference.loaded import LoadedModel
from serving.swap import leader as swap
from serving.swap.agreement import BundleLocation, SwapState, WorkerGroup
from serving.swap.follower import Follower
from serving.swap.leader import SwapLeader
from serving.telemetry.metrics import SWAPS
from tests.helpers_serving import PATIENCE, eventually


class FakeManifest:
    name = "fake"

    def __init__(self, version: str) -> None:
        self.version = version


class FakeModel:
    def __init__(self, path: Path, version: str) -> None:
        self.manifest = FakeManifest(version)
        self.bundle = SimpleNamespace(path=path)


def load(path: Path) -> LoadedModel:
    """A bundle here is a directory whose manifest contains only the version."""
    version = BundleLocation.of(path).version
    if version.startswith("bad"):
        raise BundleError(f"{path}/golden.npz: not as recorded")
    return LoadedModel(FakeModel(path, version), 1, None, None)  # type: ignore[arg-type]


def write(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(f'{{"version": "{version}"}}')
    return folder


class Worker:
    """The follower of a worker process, without the process."""

    def __init__(self, group: WorkerGroup, load: Callable[[Path], LoadedModel] = load) -> None:
        self.served: list[str] = []
        self.beside: list[str | None] = []

        def load_beside(path: Path, like: LoadedModel | None) -> LoadedModel:
            self.beside.append(None if like is None else like.version)
            return load(path)

        self.follower = Follower(group, load_beside, lambda served: self.served.append(served.version))
        self.served.append(self.follower.served.version)

    @property
    def version(self) -> str:
        return self.served[-1]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    for version in ("one", "two", "three", "bad"):
        write(tmp_path / "shelf" / version, version)
    made = Shelf(tmp_path / "shelf")
    made.point_at("one")
    return made


@pytest.fixture
def group(shelf: Shelf, tmp_path: Path) -> WorkerGroup:
    made = WorkerGroup.create(tmp_path / "home")
    made.publish(SwapState(serving=BundleLocation.of(shelf.folder / "one")))
    return made


@pytest.fixture
def swaps(group: WorkerGroup, shelf: Shelf) -> Iterator[SwapLeader]:
    made = SwapLeader(group, shelf=shelf.folder, bundle=Path("unused"), patience=PATIENCE)
    yield made
    made.close()


@pytest.fixture
def start(group: WorkerGroup) -> Iterator[Callable[..., Worker]]:
    """Workers that follow until the test ends."""
    started: list[Worker] = []

    def make(load: Callable[[Path], LoadedModel] = load) -> Worker:
        worker = Worker(group, load)
        worker.follower.start()
        started.append(worker)
        return worker

    yield make
    for worker in started:
        worker.follower.close()


Start = Callable[..., Worker]


def test_swaps_are_counted_from_zero_on(group: WorkerGroup, shelf: Shelf) -> None:
    """A series that begins with its first refusal has no increase, and no alert would fire."""
    SWAPS.clear()
    SwapLeader(group, shelf=shelf.folder, bundle=Path("unused")).close()
    for outcome in ("switched", "refused"):
        assert REGISTRY.get_sample_value("openworld_swaps_total", {"outcome": outcome}) == 0


def test_a_bundle_is_loaded_beside_the_one_that_is_served(shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    """What both have in common, such as the session of a trunk, need not be loaded twice."""
    worker = start()
    for version in ("two", "three"):
        shelf.point_at(version)
        swaps.reload().result(PATIENCE)
    assert worker.beside == [None, "one", "two"]


def test_all_switch_before_the_call_returns(shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    workers = [start(), start(), start()]
    shelf.point_at("two")
    outcome = swaps.reload().result()
    assert [worker.served for worker in workers] == [["one", "two"]] * 3
    assert (outcome.changed, outcome.state.serving.version, outcome.state.previous) == (
        True,
        "two",
        BundleLocation(path=shelf.folder / "one", version="one"),
    )
    assert [(report.version, report.previous, report.error) for report in outcome.workers] == [("two", "one", None)] * 3


def test_nothing_new_changes_nothing(group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    worker = start()
    shelf.point_at("two")
    swaps.reload().result()
    outcome = swaps.reload().result()
    assert (outcome.changed, worker.served) == (False, ["one", "two"])
    assert group.state().previous == BundleLocation(path=shelf.folder / "one", version="one")


def test_if_one_worker_cannot_load_none_switches(
    group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start
) -> None:
    def no_room(path: Path) -> LoadedModel:
        if path.name == "two":
            raise MemoryError("no room for it")
        return load(path)

    workers = [start(), start(no_room), start()]
    shelf.point_at("two")
    with pytest.raises(BundleRefusedError, match="no room for it"):
        swaps.reload().result()
    eventually(lambda: group.state().proposed is None)
    shelf.point_at("three")
    swaps.reload().result()
    assert [worker.served for worker in workers] == [["one", "three"]] * 3


def test_a_refusal_does_not_reveal_the_path_of_the_bundle(
    group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start
) -> None:
    worker = start()
    shelf.point_at("bad")
    with pytest.raises(BundleRefusedError) as refused:
        swaps.reload().result()
    assert "got golden.npz: not as recorded;" in str(refused.value)
    state, (report,) = group.state(), group.reports()
    assert state.refused is not None
    assert "not as recorded" in state.refused.reason
    assert (report.error, report.version, worker.served) == ("golden.npz: not as recorded", "one", ["one"])


def test_dead_workers_are_not_waited_for(group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    alive = start()
    dead = Worker(group)
    dead.follower.close()
    shelf.point_at("two")
    assert len(swaps.reload().result().workers) == 1
    assert (alive.version, dead.version) == ("two", "one")


def test_a_silent_worker_stops_the_swap(group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    alive = start()
    stuck = Worker(group)
    hasty = SwapLeader(group, shelf=shelf.folder, bundle=Path("unused"), patience=0.5)
    shelf.point_at("two")
    with pytest.raises(SwapError, match="not all workers followed"):
        hasty.reload().result()
    assert group.state().serving.version == alive.version == "one"
    hasty.close()
    stuck.follower.close()
    assert swaps.reload().result().changed


def test_a_late_worker_follows(group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    """The worker has read the served version but does not follow yet when the others switch."""
    first = start()
    late = Worker(group)
    shelf.point_at("two")
    swapped = swaps.reload()
    eventually(lambda: group.state().proposed is not None and first.follower._staged is not None)
    assert not swapped.done()
    late.follower.start()
    assert len(swapped.result().workers) == 2
    assert (first.version, late.version) == ("two", "two")
    late.follower.close()


def test_one_that_comes_after_the_others_agreed_loads_what_they_serve(group: WorkerGroup, shelf: Shelf) -> None:
    late = Worker(group)
    group.publish(SwapState(round=1, serving=BundleLocation.of(shelf.folder / "two")))
    late.follower.step()
    assert late.served == ["one", "two"]
    assert Worker(group).served == ["two"]


def test_a_leader_that_dies_is_not_waited_for(group: WorkerGroup, shelf: Shelf, start: Start) -> None:
    """The proposal is still there, and no worker holds the lock."""
    worker = start()
    group.publish(group.state().model_copy(update={"round": 1, "proposed": shelf.folder / "two"}))
    eventually(lambda: group.state().proposed is None)
    eventually(lambda: worker.follower._staged is None)
    assert worker.served == ["one"]


def test_a_proposal_stands_while_somebody_leads(group: WorkerGroup, shelf: Shelf) -> None:
    worker = Worker(group)
    with group.leading() as alone:
        assert alone
        group.publish(group.state().model_copy(update={"round": 1, "proposed": shelf.folder / "two"}))
        worker.follower.step()
        assert group.state().proposed is not None
        with group.leading() as second:
            assert not second


def test_rolling_back_needs_no_second_load(group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    loaded: list[str] = []

    def counted(path: Path) -> LoadedModel:
        loaded.append(path.name)
        return load(path)

    worker = start(counted)
    shelf.point_at("two")
    swaps.reload().result()
    outcome = swaps.roll_back().result()
    assert (outcome.state.serving.version, loaded) == ("one", ["one", "two"])
    assert shelf.current() == shelf.folder / "one"
    swaps.roll_back().result()
    assert (worker.served, loaded) == (["one", "two", "one", "two"], ["one", "two"])


def test_rolling_back_what_was_refused_puts_the_shelf_right(shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    worker = start()
    shelf.point_at("bad")
    with pytest.raises(BundleRefusedError):
        swaps.reload().result()
    outcome = swaps.roll_back().result()
    assert (outcome.changed, worker.served, shelf.current()) == (False, ["one"], shelf.folder / "one")


def test_a_shelf_that_can_only_be_read_is_not_rolled_back(
    group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    with pytest.raises(SwapError, match="nothing to roll back to"):
        swaps.roll_back().result()
    shelf.point_at("two")
    swaps.reload().result()
    monkeypatch.setattr(Shelf, "writable", False)
    with pytest.raises(SwapError, match="read-only here"):
        swaps.roll_back().result()

    def fail(self: Shelf) -> Path:
        raise OSError(30, "Read-only file system")

    # The permission check may be wrong: a network drive fails only at the write.
    monkeypatch.setattr(Shelf, "writable", True)
    monkeypatch.setattr(Shelf, "roll_back", fail)
    with pytest.raises(SwapError, match="Read-only file system"):
        swaps.roll_back().result()
    assert (worker.version, group.state().serving.version) == ("two", "two")


def test_a_shelf_is_watched(group: WorkerGroup, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two workers at once; one of them leads."""
    monkeypatch.setattr(swap, "WATCH", 0.0)
    # Nothing is tried again by itself while this test looks.
    monkeypatch.setattr(swap, "FIRST_RETRY", PATIENCE)
    monkeypatch.setattr(swap, "LONGEST_RETRY", PATIENCE)
    workers = [Worker(group), Worker(group)]
    leaders = [SwapLeader(group, shelf=shelf.folder, bundle=Path("unused"), patience=PATIENCE) for _ in workers]
    for worker, leader in zip(workers, leaders, strict=True):
        worker.follower.start(each_step=leader.watch)
    for version in ("two", "three", "one"):
        shelf.point_at(version)
        eventually(lambda version=version: all(worker.version == version for worker in workers))
    shelf.point_at("bad")
    eventually(lambda: group.state().refused)
    assert [worker.served for worker in workers] == [["one", "two", "three", "one"]] * 2
    # The next worker that looks sees that it was tried.
    refused = group.state().refused
    assert refused is not None
    assert not leaders[1]._is_new(shelf.folder / "bad")
    # Also if the clock on the wall was set back in between.
    assert refused.at <= time.monotonic()
    long_ago = refused.model_copy(update={"at": refused.at - 2 * PATIENCE})
    group.publish(group.state().model_copy(update={"refused": long_ago}))
    eventually(lambda: (again := group.state().refused) is not None and again.times == 2)
    for worker, leader in zip(workers, leaders, strict=True):
        leader.close()
        worker.follower.close()


def test_a_path_is_copied_so_that_what_is_served_stays(group: WorkerGroup, start: Start, tmp_path: Path) -> None:
    path = write(tmp_path / "bundle", "two")
    worker = start()
    swaps = SwapLeader(group, shelf=None, bundle=path, patience=PATIENCE)
    swaps.reload().result()
    write(path, "three")
    assert Worker(group).version == worker.version == "two"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[SwapLeader, Worker, Path]]:
    """One worker that serves a path."""
    path = write(tmp_path / "bundle", "one")
    group = WorkerGroup.create(tmp_path / "home")
    group.publish(SwapState(serving=BundleLocation.of(group.copy_bundle(path))))
    worker, swaps = Worker(group), SwapLeader(group, shelf=None, bundle=path, patience=PATIENCE)
    worker.follower.start()
    yield swaps, worker, path
    swaps.close()
    worker.follower.close()


def test_no_more_than_two_copies_are_kept(alone: tuple[SwapLeader, Worker, Path]) -> None:
    swaps, worker, path = alone
    for version in ("two", "three", "four"):
        write(path, version)
        swaps.reload().result()
    assert not swaps.reload().result().changed
    copies = path.parent.glob("home/*/bundles/*")
    assert sorted(BundleLocation.of(copy).version for copy in copies) == ["four", "three"]
    assert swaps.roll_back().result().state.serving.version == worker.version == "three"


def test_a_path_without_a_bundle_is_refused(alone: tuple[SwapLeader, Worker, Path]) -> None:
    swaps, worker, path = alone
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(BundleRefusedError, match="cannot be copied"):
        swaps.reload().result()
    assert worker.served == ["one"]
    assert swaps.status().state.refused is not None


def test_what_is_neither_served_nor_previous_is_let_go(alone: tuple[SwapLeader, Worker, Path]) -> None:
    swaps, worker, path = alone
    first = weakref.ref(worker.follower.served)
    for version in ("two", "three"):
        write(path, version)
        swaps.reload().result()
    gc.collect()
    assert first() is None


def test_swaps_wait_for_each_other(group: WorkerGroup, shelf: Shelf, swaps: SwapLeader, start: Start) -> None:
    start()
    other = SwapLeader(group, shelf=shelf.folder, bundle=Path("unused"), patience=0.1)
    shelf.point_at("two")
    with group.leading():
        waiting = swaps.reload()
        with pytest.raises(SwapError, match="another swap is under way"):
            other.reload().result()
        assert not waiting.done()
    assert waiting.result().changed
    other.close()


def test_the_end_of_a_server_does_not_wait_for_a_swap(group: WorkerGroup, shelf: Shelf) -> None:
    Worker(group)
    swaps = SwapLeader(group, shelf=shelf.folder, bundle=Path("unused"), patience=600)
    swapped = swaps.reload()
    eventually(lambda: group.state().proposed is not None)
    ended = threading.Thread(target=swaps.close)
    ended.start()
    with pytest.raises(RequestError):
        swapped.result(timeout=PATIENCE)
    ended.join()


def test_folders_of_servers_that_were_killed_are_removed(tmp_path: Path) -> None:
    alive = WorkerGroup.create(tmp_path)
    killed = tmp_path / "openworld-killed"
    killed.mkdir()
    (killed / "server.lock").touch()
    other = WorkerGroup.create(tmp_path)
    assert set(tmp_path.iterdir()) == {alive.folder, other.folder}
