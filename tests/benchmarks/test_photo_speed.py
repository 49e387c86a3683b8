"""The cost of an answer for a photo: against the bare trunk, with many tasks, in int8, and with decoding.

Contestants take turns, and medians are compared; times mean something only as ratios within one run.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from export.__main__ import main as export
from models.trunks.cache_settings import FOLDER_VARIABLE
from serving.bundle.layout import EMBEDDING, GOLDEN, STATISTICS, TRUNK
from serving.bundle.lessons import archive
from serving.bundle.manifest import INPUT_NAME, load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.pixels import open_image, to_pixels
from serving.bundle.pooled.adapters import Adapter
from tests.benchmarks.conftest import Report, table
from tests.benchmarks.timing import take_turns
from tests.helpers_photos import PICTURES, photo
from tests.helpers_serving import ROOT, saved
from training import fit
from training.learn.photos import WIDTH

ROUNDS = 40
MANY, CLASSES, PHOTOS = 20, 10, 30
MOST_OF_TRUNK, MOST_OF_ONE_TASK, MOST_BYTES_PER_TASK = 1.3, 1.25, 1.5e6
MOST_BYTES_ONCE = 1e6
"""A bundle with one task may have as much more."""
LEAST_AGREEMENT = 0.99
KINDS = [*PICTURES]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


def write_classes(folder: Path, classes: int) -> Path:
    """Classes of a few drawn photos; some differ in nothing but their noise, which is enough to measure time."""
    for number in range(classes):
        (folder / f"{number:03}").mkdir(parents=True)
        for each in range(PHOTOS):
            picture = photo(KINDS[number % len(KINDS)], 1000 * number + each)
            picture.save(folder / f"{number:03}" / f"{each}.jpg", quality=90)
    return folder


@pytest.fixture(scope="module")
def bundles(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A bundle with one task of ten classes, and one with twenty."""
    place, found = tmp_path_factory.mktemp("bundles"), {}
    for tasks in (1, MANY):
        data = write_classes(place / f"photos{tasks}", tasks * CLASSES)
        words = [
            "--data",
            str(data),
            "--classes-per-task",
            str(CLASSES),
            "--quick",
            "--out",
            str(place / f"run{tasks}"),
        ]
        assert fit.main(words) == 0
        found[tasks] = place / f"bundle{tasks}"
        words = [str(place / f"run{tasks}"), "--out", str(found[tasks]), "--force"]
        assert export([*words, *(["--precision", "int8"] if tasks == 1 else [])]) == 0
    return found


def processor_times(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of processor time, which is the latency of one thread on a machine that does nothing else."""
    return {name: taken.processor for name, taken in take_turns(works, ROUNDS).items()}


def test_an_answer_costs_little_more_than_the_trunk(bundles: dict[int, Path], report: Report) -> None:
    models = {
        tasks: BundleModel.load(path, provider="cpu", precision="fp32", threads=1) for tasks, path in bundles.items()
    }
    one = np.ascontiguousarray(models[1].bundle.golden.pixels[2:3])
    content = saved(photo("disc", 5).resize((500, 400)), "JPEG", quality=90)
    spec = models[1].manifest.image

    def whole() -> None:
        models[1].predict(to_pixels(open_image(content), spec)[None])

    works = {
        "bare trunk": partial(models[1].session.run, None, {INPUT_NAME: one}),
        "answer, 1 task": partial(models[1].predict, one),
        f"answer, {MANY} tasks": partial(models[MANY].predict, one),
        "answer with decoding a photo of 500x400": whole,
    }
    taken = processor_times(works)
    bare = taken["bare trunk"]
    rows = [(name, f"{each:.2f}", f"{each / bare:.2f}") for name, each in taken.items()]
    print(f"\n{table(('one photo, one thread', 'ms', 'of the bare trunk'), rows)}")
    for name, each in taken.items():
        report.add(f"photos: {name}", each, "ms", bare)
    assert taken["answer, 1 task"] <= MOST_OF_TRUNK * bare
    assert taken[f"answer, {MANY} tasks"] <= MOST_OF_ONE_TASK * taken["answer, 1 task"]


def largest_adapter(dim: int) -> int:
    """Bytes of the adapter of a task that reads all rotations and uses all units of the preset."""
    random = np.random.default_rng(0)
    layers = [(random.normal(size=(WIDTH, width)), np.zeros(WIDTH)) for width in (dim, WIDTH)]
    heads, biases = random.normal(size=(4, WIDTH, CLASSES)), np.zeros((4, CLASSES))
    return len(archive(Adapter.of((np.ones(dim), np.zeros(dim)), layers, heads, biases, 1.0).to_arrays()))


def test_a_bundle_is_the_trunk_and_little_more(bundles: dict[int, Path], report: Report) -> None:
    for tasks, path in bundles.items():
        manifest = load_bundle(path).manifest
        assert manifest.trunk is not None
        files = manifest.files
        rest = sum(info.size for name, info in files.items() if not name.startswith(TRUNK.partition(".")[0]))
        # The run was quick, for time: with adapters, every task has at most this much more.
        rest += tasks * (adapter := largest_adapter(manifest.trunk.dim))
        teaching = files[STATISTICS].size
        name = f"photos: bytes per task of {CLASSES} classes of {PHOTOS} photos, {tasks} tasks"
        report.add(name, rest / tasks, "bytes", MOST_BYTES_PER_TASK)
        report.add(f"{name}, --no-teaching", (rest - teaching) / tasks, "bytes", MOST_BYTES_PER_TASK)
        print(
            f"\n{tasks} tasks: trunk {files[TRUNK].size / 1e6:.2f} MB, {rest / tasks / 1e6:.3f} MB per task, ", end=""
        )
        print(f"{(rest - teaching) / tasks / 1e6:.3f} MB with --no-teaching, {adapter / 1e6:.3f} MB of it an adapter")
        # What a server learns from is more than that by itself. Golden images and the map are there once.
        once = sum(files[name].size for name in (GOLDEN, EMBEDDING))
        assert once <= MOST_BYTES_ONCE
        assert rest - teaching <= MOST_BYTES_PER_TASK * tasks + (once if tasks == 1 else 0)


def test_int8_against_fp32(bundles: dict[int, Path], report: Report) -> None:
    models = {
        name: BundleModel.load(bundles[1], provider="cpu", precision=name, threads=1) for name in ("fp32", "int8")
    }
    one = np.ascontiguousarray(models["fp32"].bundle.golden.pixels[2:3])
    works = {name: partial(model.predict, one) for name, model in models.items()}
    taken = processor_times(works)
    checked = models["int8"].manifest.verification["int8"]
    print(f"\nfp32 {taken['fp32']:.2f} ms, int8 {taken['int8']:.2f} ms: ", end="")
    print(f"{taken['fp32'] / taken['int8']:.2f} times as fast; labels of drawn photos agree by ", end="")
    print(f"{checked['label_agreement']:.2%} of {checked['images']:.0f}")
    report.add("photos: int8", taken["int8"], "ms", taken["fp32"])
    assert taken["int8"] < taken["fp32"]
    assert checked["label_agreement"] >= LEAST_AGREEMENT


DECODE = """
import sys, time
from pathlib import Path
from serving.bundle.sections import ImageSpec
from serving.bundle.pixels import open_image, to_pixels
content, spec = open(sys.argv[1], "rb").read(), ImageSpec(height=224, width=224, mode="RGB")
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
before = peak()
seconds = []
for _ in range(5):
    started = time.process_time()
    to_pixels(open_image(content), spec)
    seconds.append(time.process_time() - started)
print(min(seconds), peak() - before)
"""


@pytest.mark.parametrize(("megapixels", "size"), [(12, (4000, 3000)), (50, (8650, 5770))])
@pytest.mark.parametrize("kind", ["JPEG", "progressive JPEG", "PNG"])
def test_decoding_large_photos(
    megapixels: int, size: tuple[int, int], kind: str, report: Report, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    file = tmp_path / "photo"
    options = {"progressive": True} if "progressive" in kind else {}
    coarse.save(file, kind.split()[-1], **({"quality": 90, **options} if "JPEG" in kind else {"compress_level": 1}))
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    name = f"{kind} of {megapixels} megapixels, {file.stat().st_size / 1e6:.1f} MB"
    if done.returncode:
        print(f"\n{name}: {done.stderr.strip().splitlines()[-1]}")
        assert "allowed: up to" in done.stderr, "refused because of its size or memory"
        return
    seconds, megabytes = map(float, done.stdout.split())
    print(f"\n{name}: {1e3 * seconds:.0f} ms of processor time, {megabytes:.0f} MB more memory at the peak")
    report.add(f"decoding: {name}", 1e3 * seconds, "ms")
    assert megabytes <= 256


def test_encoding_rate(own_cache: None, report: Report, tmp_path: Path) -> None:
    from models.trunks.trunk import open_trunk
    from training.data.encoder import Encoder
    from training.data.originals import FileOriginal

    data = write_classes(tmp_path / "photos", 50)
    files = [FileOriginal(file) for file in sorted(data.glob("*/*"))]
    encoder = Encoder(open_trunk("efficientnet-lite0"), provider="cpu", folder=tmp_path / "cache")
    used, started = time.process_time(), time.perf_counter()
    assert len(encoder.read(files, ["x"] * len(files)).images) == len(files)
    used, taken = time.process_time() - used, time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"\n{len(files) / taken:.1f} photos/s, {1e3 * used / len(files):.1f} ms of processor time each, {peak:.0f} MB"
    )
    report.add("photos: encoding", len(files) / taken, "photos/s")
