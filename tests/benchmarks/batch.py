"""Rate, memory and resumption of `openworld predict --out`: `python -m tests.benchmarks.batch BUNDLE`.

Draws the images itself and checks three promises:

- the command answers at least 0.9 times as many images per second as the bare graph, which reads, decodes and runs the
  same files with as many processes and does nothing else, in batches of the size that is fastest for it;
- its memory does not grow;
- a command that is killed again and again writes the same file, byte for byte, as one that is left alone.

Prints a table, and exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image, ImageDraw

from serving.batch.answering import Answerer
from serving.batch.plan import CHUNK, BatchOptions, BatchPlan, WorkFolder, batch_size
from serving.batch.sources import SUFFIXES, Chunk
from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.manifest import INPUT_NAME
from serving.bundle.model import ENCODED, BundleModel
from serving.bundle.pixels import open_image, to_pixels
from tests.helpers_serving import ROOT

SAMPLE_SECONDS = 0.2
LEAST_RATIO = 0.9
"""Of the rate of the bare graph."""
MOST_GROWTH = 1.05
"""Median memory of the last third of the work, as a share of that of the first third."""
BATCHES = (1, 8, 16, 32, 64, 128)
"""Sizes that are tried for the bare graph."""


class Setup(NamedTuple):
    """How both the command and the bare graph run."""

    bundle: Path
    images: Path
    workers: int
    precision: str

    def files(self) -> list[str]:
        return sorted(str(path) for path in self.images.rglob("*") if path.suffix in SUFFIXES)

    def model(self) -> BundleModel:
        return BundleModel.load(self.bundle, provider="cpu", precision=self.precision, threads=1)


class Row(NamedTuple):
    """One line of the table; `kept` is None where nothing is promised."""

    what: str
    measured: str
    promised: str = ""
    kept: bool | None = None


def draw(folder: Path, count: int, side: int, mode: str) -> None:
    """Strokes on noise, as PNG for greyscale and as JPEG for colour; every hundredth file is damaged."""
    for number in range(count):
        numbers = np.random.default_rng(number)
        noise = numbers.integers(0, 40, (side, side, 3), dtype=np.uint8)
        image = Image.fromarray(noise).convert(mode)
        points = [tuple(point) for point in numbers.integers(0, side, (5, 2)).tolist()]
        ImageDraw.Draw(image).line(points, fill="white", width=max(1, side // 8))
        path = folder / f"{number // 1000:03}" / f"{number:06}.{'png' if mode == 'L' else 'jpg'}"
        path.parent.mkdir(exist_ok=True)
        image.save(path)
        if number % 100 == 99:
            path.write_bytes(path.read_bytes()[:60])


def run_bare(model: BundleModel, files: Iterable[str], batch: int) -> None:
    """Read, decode and run; nothing else."""
    names = list(OUTPUT_NAMES) if model.pooled is None else [ENCODED]
    spec, held = model.manifest.image, []
    for file in files:
        try:
            held.append(to_pixels(open_image(Path(file).read_bytes()), spec))
        except Exception:
            continue
        if len(held) == batch:
            model.session.run(names, {INPUT_NAME: np.stack(held)})
            held = []
    if held:
        model.session.run(names, {INPUT_NAME: np.stack(held)})


def _bare_process(setup: Setup, files: list[str], batch: int, taken: Any, times: Any) -> None:
    def mine() -> Iterator[str]:
        """Files that no other process has taken, as many at a time as the command hands out."""
        while True:
            with taken.get_lock():
                first = taken.value
                taken.value += CHUNK
            if first >= len(files):
                return
            yield from files[first : first + CHUNK]

    model = setup.model()
    started = time.monotonic()
    run_bare(model, mine(), batch)
    times.put((started, time.monotonic()))


def bare_rate(setup: Setup, files: list[str], batch: int) -> float:
    """Images per second from the moment when the first process is ready until the last of them is done: the command's
    clock starts at the same moment, and its processes share the work in the same way."""
    context = multiprocessing.get_context("spawn")
    taken, times = context.Value("q", 0), context.Queue()
    pool = [
        context.Process(target=_bare_process, args=(setup, files, batch, taken, times)) for _ in range(setup.workers)
    ]
    for process in pool:
        process.start()
    started, ended = zip(*(times.get() for _ in pool), strict=True)
    for process in pool:
        process.join()
    return len(files) / (max(ended) - min(started))


def command(setup: Setup, out: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "serving.predict", setup.bundle, setup.images, "--out", out]
    environment = {**os.environ, "OPENWORLD_PROVIDER": "cpu", "OPENWORLD_PRECISION": setup.precision}
    return subprocess.Popen(
        [*map(str, words), "--workers", str(setup.workers)],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def command_rate(setup: Setup, out: Path) -> float:
    """Images per second as the command prints it: from the first process that is ready to the complete file."""
    printed = command(setup, out).communicate()[1]
    return float(re.findall(r"([\d,]+) per second", printed)[-1].replace(",", ""))


def rates(setup: Setup, rounds: int, batch: int, folder: Path) -> Row:
    """Both rates on the same files, in turn so that both see the same machine.

    Both begin when the first process is ready, so that the start of the others, which answer nothing meanwhile, is in
    both; that of the command ends with the complete file.
    """
    files, ratios = setup.files(), []
    for number in range(rounds):
        out = folder / f"rate{number}.parquet"
        # Each is first in every second round.
        if number % 2:
            ours = command_rate(setup, out)
            bare = bare_rate(setup, files, batch)
        else:
            bare = bare_rate(setup, files, batch)
            ours = command_rate(setup, out)
        ratios.append(ours / bare)
        print(f"round {number}: bare graph {bare:,.0f}, command {ours:,.0f} images per second", flush=True)
    middle = float(np.median(ratios))
    measured = f"median {middle:.3f} of {rounds} rounds ({min(ratios):.3f} to {max(ratios):.3f})"
    title = f"rate / bare graph, {setup.workers} processes"
    return Row(title, measured, f"at least {LEAST_RATIO}", middle >= LEAST_RATIO)


def chunk_of_work(setup: Setup, folder: Path) -> tuple[Answerer, WorkFolder, Chunk]:
    """What one process of the command does with the first chunk."""
    files = setup.files()[:CHUNK]
    manifest = setup.model().manifest
    options = BatchOptions(
        source=str(setup.images),
        version=manifest.version,
        column="image",
        keep=(),
        task=None,
        alpha=0.05,
        top=0,
    )
    plan = BatchPlan(
        options=options,
        kind="files",
        bundle=str(setup.bundle),
        provider="cpu",
        precision=setup.precision,
        batch=batch_size(manifest.image.shape),
        chunk=CHUNK,
        images=len(files),
        threads=1,
        kept="",
    )
    work = WorkFolder(folder / "processor.parquet")
    work.path.mkdir()
    return Answerer(plan), work, Chunk(0, 0, len(files), tuple(os.path.relpath(file, setup.images) for file in files))


def processor_times(setup: Setup, rounds: int, folder: Path) -> tuple[int, list[Row]]:
    """The fastest batch size of the bare graph, and processor times per image in one process, in turn: what can be
    measured on a machine that is busy with other work."""
    answerer, work, chunk = chunk_of_work(setup, folder)
    files, model = setup.files()[:CHUNK], setup.model()
    works = {size: lambda size=size: run_bare(model, files, size) for size in BATCHES}
    works[0] = lambda: work.store(0, answerer.answer(chunk))
    taken: dict[int, list[float]] = {size: [] for size in works}
    # The first round warms up.
    for number in range(rounds + 1):
        for size, run in works.items():
            started = time.process_time()
            run()
            if number:
                taken[size].append(1000 * (time.process_time() - started) / len(files))
    batch = min(BATCHES, key=lambda size: float(np.median(taken[size])))
    ratio = float(np.median(np.array(taken[batch]) / np.array(taken[0])))
    each = ", ".join(f"{size}: {np.median(taken[size]):.2f}" for size in BATCHES)
    ours = batch_size(model.manifest.image.shape)
    return batch, [
        Row("processor ms per image, bare graph, by batch", each),
        Row(f"processor ms per image, command, batches of {ours}", f"{np.median(taken[0]):.2f}"),
        Row(f"processor time, bare graph (batches of {batch}) / command", f"{ratio:.3f}"),
    ]


def watched(process: subprocess.Popen[str], out: Path, total: int) -> list[float]:
    """Megabytes of the command and its processes over time, from a tenth of the chunks until the last one."""
    memory, main = [], psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        if not total // 10 <= chunks_in(out) < total:
            continue
        try:
            everyone = [main, *main.children(recursive=True)]
            memory.append(sum(one.memory_full_info().uss for one in everyone) / 1e6)
        except psutil.NoSuchProcess:
            pass
    return memory


def undisturbed(setup: Setup, out: Path) -> Row:
    """Answer all images once, and follow the memory of the command and its processes."""
    memory = watched(command(setup, out), out, -(-len(setup.files()) // CHUNK))
    third = max(1, len(memory) // 3)
    first, last = float(np.median(memory[:third])), float(np.median(memory[-third:]))
    tenths = ", ".join(f"{memory[len(memory) * tenth // 10]:.0f}" for tenth in range(10))
    measured = f"{first:.0f} MB, then {last:.0f} MB, at most {max(memory):.0f}; by tenths of the time {tenths}"
    promised = f"last third at most {MOST_GROWTH} x first"
    return Row("memory of all processes, first and last third", measured, promised, last <= MOST_GROWTH * first)


def chunks_in(out: Path) -> int:
    folder = WorkFolder(out).path
    return len(list(folder.glob("*.arrow"))) if folder.exists() else 0


def killed(setup: Setup, out: Path, kills: int, total: int) -> int:
    """Kill the command at random moments of its work, then let it finish; returns how often it was killed."""
    done = 0
    choose = random.Random(0)
    while True:
        process = command(setup, out)
        begun = chunks_in(out)
        left = total - begun
        wanted = begun + 1 + choose.randrange(max(1, left // (kills - done + 1))) if done < kills else sys.maxsize
        others: list[psutil.Process] = []
        while process.poll() is None:
            time.sleep(0.005)
            if chunks_in(out) >= wanted:
                others = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGKILL)
                process.wait()
                done += 1
        if wanted == sys.maxsize or process.returncode in (0, 1):
            return done
        _, alive = psutil.wait_procs(others, timeout=60)
        assert not alive, "processes of a killed command must end by themselves"


def kills_row(setup: Setup, whole: Path, folder: Path, kills: int) -> Row:
    out = folder / "killed.parquet"
    done = killed(setup, out, kills, -(-len(setup.files()) // CHUNK))
    equal = whole.read_bytes() == out.read_bytes()
    measured = f"killed {done} times; the files are {'equal byte by byte' if equal else 'DIFFERENT'}"
    return Row("kill -9 and the same command again", measured, f"{kills} kills, equal", equal and done == kills)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=16, help="pixels per side of the drawn images")
    parser.add_argument("--kills", type=int, default=10, help="0: neither memory nor kills")
    parser.add_argument("--rounds", type=int, default=5, help="of both rates, in turn; 0: no rates")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    model, started = BundleModel.load(chosen.bundle, provider="cpu"), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = Setup(chosen.bundle, folder / "images", chosen.workers, model.precision)
        setup.images.mkdir()
        draw(setup.images, chosen.images, chosen.side, model.manifest.image.mode)
        batch, rows = processor_times(setup, max(5, chosen.rounds), folder)
        if chosen.rounds:
            rows.append(rates(setup, chosen.rounds, batch, folder))
        if chosen.kills:
            out = folder / "answers.parquet"
            rows.append(undisturbed(setup, out))
            rows.append(Row("bytes per answer in the file", f"{out.stat().st_size / chosen.images:.0f}"))
            rows.append(kills_row(setup, out, folder, chosen.kills))
    print(f"\n{chosen.images:,} images, {model.precision}, {time.perf_counter() - started:.0f} s in all")
    for row in rows:
        verdict = "" if row.kept is None else f" | {row.promised} | {'kept' if row.kept else 'BROKEN'}"
        print(f"{row.what} | {row.measured}{verdict}")
    return 1 if any(row.kept is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
