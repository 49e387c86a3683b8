"""Throughput, memory and resumption of `openworld predict --out`: `python -m tests.benchmarks.batch BUNDLE`.

Draws the images itself, answers them once without a disturbance and once while the command is killed again and again,
and compares both files byte by byte. The bare graph reads, decodes and runs the same files with as many processes, and
does nothing else.
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image, ImageDraw

from serving.batch.answering import Answerer
from serving.batch.plan import CHUNK, BatchOptions, BatchPlan, WorkFolder
from serving.batch.sources import SUFFIXES, Chunk
from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.manifest import INPUT_NAME
from serving.bundle.model import ENCODED, BundleModel
from serving.bundle.pixels import open_image, to_pixels
from serving.inference.loaded import LoadedModel
from tests.helpers_serving import ROOT

SAMPLE_SECONDS = 0.2
LEAST_RATIO = 0.9
"""Of the rate of the bare graph."""


class Setup(NamedTuple):
    """How both the command and the bare graph run."""

    bundle: Path
    workers: int
    precision: str
    batch: int


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


def bare(bundle: str, precision: str, batch: int, files: list[str], ready: Any, seconds: Any) -> None:
    """Read, decode and run; nothing else."""
    model = BundleModel.load(bundle, provider="cpu", precision=precision, threads=1)
    ready.wait()
    started = time.perf_counter()
    run_bare(model, files, batch)
    seconds.put(time.perf_counter() - started)


def run_bare(model: BundleModel, files: list[str], batch: int) -> None:
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


def bare_rate(bundle: Path, files: list[str], workers: int, precision: str, batch: int) -> float:
    """Images per second with one process per processor, until the last of them is done."""
    context = multiprocessing.get_context("spawn")
    ready, seconds = context.Barrier(workers), context.Queue()
    shares = [files[place::workers] for place in range(workers)]
    pool = [
        context.Process(target=bare, args=(str(bundle), precision, batch, share, ready, seconds)) for share in shares
    ]
    for process in pool:
        process.start()
    taken = max(seconds.get() for _ in pool)
    for process in pool:
        process.join()
    return len(files) / taken


def command(bundle: Path, images: Path, out: Path, workers: int, precision: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "serving.predict", bundle, images, "--out", out, "--workers", workers]
    environment = {**os.environ, "OPENWORLD_PROVIDER": "cpu", "OPENWORLD_PRECISION": precision}
    return subprocess.Popen(list(map(str, words)), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def watched(process: subprocess.Popen[str]) -> list[float]:
    """Megabytes of the command and its processes over time, until it ends."""
    memory, main = [], psutil.Process(process.pid)
    while process.poll() is None:
        try:
            everyone = [main, *main.children(recursive=True)]
            memory.append(sum(one.memory_full_info().uss for one in everyone) / 1e6)
        except psutil.NoSuchProcess:
            pass
        time.sleep(SAMPLE_SECONDS)
    return memory


def chunks_in(out: Path) -> int:
    folder = WorkFolder(out).path
    return len(list(folder.glob("*.arrow"))) if folder.exists() else 0


def killed(bundle: Path, images: Path, out: Path, workers: int, precision: str, kills: int, total: int) -> int:
    """Kill the command at random moments of its work, then let it finish; returns how often it was killed."""
    done = 0
    choose = random.Random(0)
    while True:
        process = command(bundle, images, out, workers, precision)
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


def rates(setup: Setup, images: Path, rounds: int) -> list[float]:
    """The rate of the command as a share of the bare graph's, on the same files, in turn so that both see the same
    machine. Starting the processes is in neither."""
    files = sorted(str(path) for path in images.rglob("*") if path.suffix in SUFFIXES)
    out, ratios = images.with_name("rate.parquet"), []
    for number in range(rounds):
        fastest = bare_rate(setup.bundle, files, setup.workers, setup.precision, setup.batch)
        out.unlink(missing_ok=True)
        process = command(setup.bundle, images, out, setup.workers, setup.precision)
        printed = process.communicate()[1]
        rate = float(re.findall(r"([\d,]+) per second", printed)[-1].replace(",", ""))
        ratios.append(rate / fastest)
        print(
            f"round {number}: bare graph {fastest:,.0f} images per second, command {rate:,.0f}, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    return ratios


def processor_ratios(setup: Setup, images: Path, rounds: int) -> list[float]:
    """The same by processor time, in one process and in turn: what counts on a machine that is busy with other work."""
    files = sorted(str(path) for path in images.rglob("*") if path.suffix in SUFFIXES)[:CHUNK]
    model = BundleModel.load(setup.bundle, provider="cpu", precision=setup.precision, threads=1)
    options = BatchOptions(
        source=str(images), version=model.manifest.version, column="image", keep=(), task=None, alpha=0.05, top=0
    )
    plan = BatchPlan(
        options=options,
        kind="files",
        bundle=str(setup.bundle),
        provider="cpu",
        precision=setup.precision,
        batch=setup.batch,
        chunk=CHUNK,
        images=len(files),
    )
    chunk = Chunk(0, 0, len(files), tuple(os.path.relpath(file, images) for file in files))
    answerer, work = Answerer(plan), WorkFolder(images.with_name("processor.parquet"))
    work.path.mkdir()
    ratios = []
    for number in range(rounds + 1):
        started = time.process_time()
        run_bare(model, files, setup.batch)
        between = time.process_time()
        work.store(0, answerer.answer(chunk))
        bare_seconds, seconds = between - started, time.process_time() - between
        # The first round warms up.
        if number:
            ratios.append(bare_seconds / seconds)
            each = [1000 * taken / len(files) for taken in (bare_seconds, seconds)]
            print(f"processor time per image: bare graph {each[0]:.2f} ms, command {each[1]:.2f} ms", flush=True)
    return ratios


def undisturbed(setup: Setup, images: Path, out: Path) -> None:
    """Answer all images once, and print the memory of the command and its processes over time."""
    started = time.perf_counter()
    process = command(setup.bundle, images, out, setup.workers, setup.precision)
    memory = watched(process)
    tenths = [memory[len(memory) * tenth // 10] for tenth in range(1, 10)]
    print(f"answered in {time.perf_counter() - started:.0f} s with its start and its end", flush=True)
    print(f"megabytes after each tenth of the time: {', '.join(f'{each:.0f}' for each in tenths)}; ", end="")
    print(f"most {max(memory):.0f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--images", type=int, default=20_000, help="for memory and kills; 0: only rates")
    parser.add_argument("--side", type=int, default=16, help="pixels per side of the drawn images")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5, help="of both rates, in turn; 0: only memory and kills")
    parser.add_argument("--rate-images", type=int, default=4096, help="images of a round")
    parser.add_argument("--processor-time", action="store_true", help="compare only that, not the rates")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    model = BundleModel.load(chosen.bundle, provider="cpu")
    setup = Setup(chosen.bundle, chosen.workers, model.precision, LoadedModel.prepare(model).max_batch)
    print(f"{model.precision}, batches of {setup.batch}, {chosen.workers} processes", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images, some = folder / "images", folder / "some"
        for place, count in ((images, chosen.images), (some, chosen.rate_images if chosen.rounds else 0)):
            place.mkdir()
            draw(place, count, chosen.side, model.manifest.image.mode)
        ratios = []
        if chosen.rounds:
            for what, measure in (("processor time", processor_ratios), ("rate", rates)):
                if what == "rate" and chosen.processor_time:
                    break
                ratios = measure(setup, some, chosen.rounds)
                spread = f"median {np.median(ratios):.3f}, lowest {min(ratios):.3f}, highest {max(ratios):.3f}"
                print(f"ratio by {what}, {len(ratios)} rounds: {spread}", flush=True)
        fast = not ratios or float(np.median(ratios)) >= LEAST_RATIO
        if not chosen.images:
            return 0 if fast else 1
        out, other, total = folder / "answers.parquet", folder / "killed.parquet", -(-chosen.images // CHUNK)
        print(f"{chosen.images:,} images", flush=True)
        undisturbed(setup, images, out)
        kills = killed(setup.bundle, images, other, setup.workers, setup.precision, chosen.kills, total)
        equal = out.read_bytes() == other.read_bytes()
        print(f"killed {kills} times; the files are {'equal byte by byte' if equal else 'DIFFERENT'}")
        return 0 if fast and equal and kills == chosen.kills else 1


if __name__ == "__main__":
    sys.exit(main())
