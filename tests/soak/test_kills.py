"""kill -9 at random moments of everything that writes files, many times: what was finished stays, and the rest goes on.

Each campaign prints one line with its counts. OPENWORLD_KILLS changes the number of kills per campaign.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from export import loop
from export.__main__ import main as export
from models.trunks.trunk import open_trunk
from serving.bundle.errors import BundleError
from serving.bundle.manifest import Manifest, load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.shelf import Shelf
from serving.quarantine.store import Store
from tests.conftest import ReportLine
from tests.helpers import HELD_OUT, assert_same_tensors, run_tensors, use_tiny_preset
from tests.helpers_quarantine import Place, run_python
from tests.helpers_serving import PATIENCE
from tests.serving.quarantine.test_quarantine_faults import ENDLESS
from tests.training.data.test_encoder import write_photos
from tests.training.test_add_unknowns import named
from training import fit
from training.data.encoder import Encoder
from training.data.originals import FileOriginal

KILLS = int(os.environ.get("OPENWORLD_KILLS", "50"))
MARGIN = 1.5
"""Kills come within so many times the usual time, so that the last steps are hit as well, and some runs finish."""


def kill_at_random(work: Callable[[], object], longest: float, noise: random.Random, *, shortest: float = 0.0) -> bool:
    """Run this in a fork and kill it within `longest` seconds; returns whether it was killed before it ended."""
    child = os.fork()
    if child == 0:
        try:
            # The other threads of OpenMP are not forked, and the process would wait for them.
            torch.set_num_threads(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(int(work() or 0))
        except BaseException:
            os._exit(99)
    until = time.monotonic() + noise.uniform(shortest, longest)
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0, "it failed by itself"
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def seconds_of(work: Callable[[], object]) -> float:
    started = time.monotonic()
    assert not work()
    return time.monotonic() - started


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)
    torch.set_num_threads(1)


@pytest.mark.usefixtures("tiny")
def test_fit_ends_the_same_however_often_it_is_killed(tmp_path: Path, report_line: ReportLine) -> None:
    noise, kills, runs = random.Random(1), 0, 0
    whole = tmp_path / "whole"
    longest = seconds_of(lambda: fit.main(["--out", str(whole)]))
    expected = run_tensors(whole)
    while kills < KILLS:
        folder = tmp_path / f"killed-{runs}"

        def go_on(folder: Path = folder) -> int:
            return fit.main(["--out", str(folder), *(["--resume"] if (folder / "config.json").exists() else [])])

        while kill_at_random(go_on, longest, noise):
            kills += 1
        assert_same_tensors(run_tensors(folder), expected)
        runs += 1
    report_line(f"fit: {kills} kill -9 in {runs} runs, all tensors bit-identical to a run without a kill")


@pytest.mark.usefixtures("tiny")
def test_a_killed_export_leaves_a_whole_bundle(tmp_path: Path, report_line: ReportLine) -> None:
    noise, kills, finished, versions = random.Random(2), 0, 0, set()
    for seed in range(2):
        assert fit.main(["--out", str(tmp_path / f"run{seed}"), "--seed", str(seed)]) == 0
    target = tmp_path / "bundle"
    longest = seconds_of(lambda: export([str(tmp_path / "run0"), "--out", str(target), "--force"]))
    while kills < KILLS or not finished:
        run = tmp_path / f"run{noise.randrange(2)}"
        killed = kill_at_random(
            lambda run=run: export([str(run), "--out", str(target), "--force"]), MARGIN * longest, noise
        )
        kills, finished = kills + killed, finished + (not killed)
        bundle = load_bundle(target)
        bundle.check()
        versions.add(bundle.manifest.version)
    assert export([str(tmp_path / "run1"), "--out", str(target), "--force"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "run0", "run1"}, "residue of killed exports"
    report_line(
        f"export: {kills} kill -9 and {finished} finished, a whole bundle after each ({len(versions)} versions seen), "
        "no residue"
    )


@pytest.mark.usefixtures("tiny")
def test_a_killed_publication_leaves_the_old_bundle_or_the_new_one(tmp_path: Path, report_line: ReportLine) -> None:
    noise, kills, finished = random.Random(3), 0, 0
    shelf, run, more = Shelf(tmp_path / "shelf"), tmp_path / "run", tmp_path / "more"
    assert fit.main(["--out", str(run)]) == 0
    shutil.copytree(run, more)
    assert fit.main(["--out", str(more), "--add-task", HELD_OUT]) == 0

    def publish(folder: Path = more) -> int:
        return export([str(folder), "--publish", str(shelf.folder), "--force"])

    assert publish(run) == 0
    first = current(shelf)
    longest = seconds_of(publish)
    second = current(shelf)
    assert first != second
    while kills < KILLS or not finished:
        shelf.point_at(first)
        shutil.rmtree(shelf.folder / second, ignore_errors=True)
        killed = kill_at_random(publish, MARGIN * longest, noise)
        kills, finished = kills + killed, finished + (not killed)
        assert current(shelf) == second or (killed and current(shelf) == first)
    assert publish() == 0
    assert current(shelf) == second
    left = {path.name for path in shelf.folder.iterdir()}
    assert left <= {"current", "previous", first, second}, f"residue of killed publications: {left}"
    report_line(f"publish: {kills} kill -9 and {finished} finished, the shelf's bundle whole after each, no residue")


def current(shelf: Shelf) -> str:
    """The version of the bundle that the shelf offers, which must be whole."""
    place = shelf.current()
    assert place is not None
    bundle = load_bundle(place)
    bundle.check()
    return bundle.manifest.version


def test_encoding_goes_on_after_each_kill(
    tmp_path: Path, report_line: ReportLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every encoder is forked: this process itself opens no session of onnxruntime, and so has none of its threads."""
    noise, kills, runs, partly = random.Random(4), 0, 0, 0
    photos = write_photos(tmp_path / "photos", {"cat": 200})
    files = [FileOriginal(file) for file in sorted(photos.glob("*/*"))]

    def encode(result: Path) -> int:
        read = Encoder(open_trunk("efficientnet-lite0", size=64)).read(files, ["cat"] * len(files))
        np.save(result, read.images.pixels)
        return 0

    def index() -> int:
        return sum(file.stat().st_size for file in Path(os.environ["OPENWORLD_CACHE"]).glob("encoded/*/index"))

    monkeypatch.setenv("OPENWORLD_CACHE", str(tmp_path / "whole-cache"))
    # The first run is not killed: it is what the others are compared with.
    started = time.monotonic()
    assert not kill_at_random(lambda: encode(tmp_path / "whole.npy"), PATIENCE, noise, shortest=PATIENCE)
    longest, everything = time.monotonic() - started, index()
    while kills < KILLS:
        result = tmp_path / f"{runs}.npy"
        monkeypatch.setenv("OPENWORLD_CACHE", str(tmp_path / f"cache{runs}"))
        before = 0
        while kill_at_random(lambda result=result: encode(result), longest, noise):
            kills += 1
            assert index() >= before, "the cache lost vectors that it had"
            before = index()
            partly += 0 < before < everything
        assert result.read_bytes() == (tmp_path / "whole.npy").read_bytes()
        runs += 1
    report_line(
        f"encode cache: {kills} kill -9 in {runs} runs of 200 photos, {partly} of them while the cache had some of the "
        "photos; it never lost a vector, and all vectors are bit-identical to those of a run without a kill"
    )


@pytest.mark.usefixtures("tiny")
def test_learning_unknowns_ends_the_same_however_often_it_is_killed(tmp_path: Path, report_line: ReportLine) -> None:
    """`learn-unknowns --publish`: learned once, published once, and every labelled image is marked as learned."""
    noise, kills, runs, finished_late = random.Random(7), 0, 0, 0
    first = tmp_path / "first"
    assert fit.main(["--out", str(first)]) == 0
    assert export([str(first), "--publish", str(tmp_path / "first-shelf"), "--force"]) == 0
    place = prepared(tmp_path, "whole")
    longest = seconds_of(lambda: learn_unknowns(place))
    expected, wanted = run_tensors(place / "run"), offered_by(place)
    old = current(Shelf(tmp_path / "first-shelf"))
    assert wanted.version != old
    while kills < KILLS:
        place = prepared(tmp_path, f"killed-{runs}")
        while kill_at_random(lambda place=place: learn_unknowns(place), 1.1 * longest, noise):
            kills += 1
            published = offered_by(place).version != old
            # Nothing is marked before it is published.
            assert published or not learned_items(place)
            finished_late += published
        assert_same_tensors(run_tensors(place / "run"), expected)
        # Its version covers how long it took to learn.
        manifest = offered_by(place)
        assert manifest.files == wanted.files
        assert {path.name for path in (place / "shelf").iterdir()} == {"current", "previous", old, manifest.version}
        assert learned_items(place) == [manifest.version] * 40
        runs += 1
    report_line(
        f"learn-unknowns --publish: {kills} kill -9 in {runs} runs ({finished_late} after it was published); run and "
        "bundle bit-identical to those without a kill, all 40 images marked as learned, no residue"
    )


def offered_by(place: Path) -> Manifest:
    """Of the bundle that the shelf points at, which is whole."""
    version = current(Shelf(place / "shelf"))
    return load_bundle(place / "shelf" / version).manifest


def learned_items(place: Path) -> list[str | None]:
    """The version in which each image was learned that is marked as learned."""
    with closing(Store.open(f"sqlite:///{place}/quarantine.db")) as store:
        return [item.learned_in for item in store.items(state="learned")]


def prepared(tmp_path: Path, name: str) -> Path:
    """A run, a shelf with its bundle, and a quarantine with labelled images."""
    place = tmp_path / name
    shutil.copytree(tmp_path / "first", place / "run")
    shutil.copytree(tmp_path / "first-shelf", place / "shelf", symlinks=True)
    with closing(Store.open(f"sqlite:///{place}/quarantine.db")) as store:
        named(store, {"five": 20, "six": 20})
    return place


def learn_unknowns(place: Path) -> int:
    """The command, or what its message advises after it was killed."""
    options = ["--publish", str(place / "shelf"), "--force", "--quarantine", f"sqlite:///{place}/quarantine.db"]
    code = loop.main([str(place / "run"), *options])
    return loop.main([str(place / "run"), "--resume", *options]) if code == 2 else code


def test_the_quarantine_keeps_what_it_acknowledged(tmp_path: Path, report_line: ReportLine) -> None:
    noise, acknowledged = random.Random(5), set[str]()
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    for attempt in range(KILLS):
        child = run_python(ENDLESS, place.url, place.images, str(1000 * attempt))
        assert child.stdout is not None
        acknowledged.update(child.stdout.readline().split())
        time.sleep(noise.uniform(0, 0.1))
        child.kill()
        acknowledged.update(child.stdout.read().rpartition("\n")[0].split())
        child.wait()
    store = place.open()
    kept = {hashlib.sha256(store.image(item.id)).hexdigest() for item in store.items()}
    assert acknowledged <= kept
    report_line(f"quarantine: {KILLS} kill -9, all {len(acknowledged)} acknowledged images are there")


@pytest.mark.usefixtures("tiny")
def test_two_publishers_at_once_never_lose_a_version(tmp_path: Path, report_line: ReportLine) -> None:
    """Both publish again and again; each publication ends with its bundle or with an error that names the reason."""
    shelf = Shelf(tmp_path / "shelf")
    for seed in range(2):
        assert fit.main(["--out", str(tmp_path / f"run{seed}"), "--seed", str(seed)]) == 0
    rounds, outcomes = max(KILLS // 10, 2), [0, 0]
    for _ in range(rounds):
        children = []
        for seed in range(2):
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                run = str(tmp_path / f"run{seed}")
                os._exit(export([run, "--publish", str(shelf.folder), "--force"]))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 1, 2}
        outcomes[0] += codes.count(0)
        outcomes[1] += len(codes) - codes.count(0)
        now = shelf.current()
        assert now is not None
        try:
            BundleModel.load(now, provider="cpu").self_test()
        except BundleError as error:
            pytest.fail(f"the shelf points at a bundle that no server can load: {error}")
    assert outcomes[0] >= rounds
    report_line(f"two publishers: {outcomes[0]} published, {outcomes[1]} refused, a whole bundle after every round")
