"""False alarms and delays of the drift tests, on the test images of a run: `python -m tests.benchmarks.drift RUN`.

Streams are drawn with replacement from the answers of the run's bundle (RUN/bundle) for its test images, some
of them of unknown classes. After a change, the images are darker. Prints shares with their 95 % confidence intervals.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from serving.bundle.model import BundleModel
from serving.telemetry.drift import ALL, BETS, EDGES, EVERY, LEAST_P, POWERS, Alarm, DriftMonitor, Watched, wilson
from training.data.datasets import load_source
from training.measure.evaluation import known_and_unknown
from training.run import open_run


class Answered(NamedTuple):
    """What is watched of one answer."""

    task: int
    score: float
    brightness: float
    known: bool

    @property
    def watched(self) -> Watched:
        return Watched(self.score, self.brightness)

    @property
    def bins(self) -> list[int]:
        return [bisect_right(edges, value) for edges, value in zip(EDGES, self.watched, strict=True)]


@dataclass(frozen=True)
class Stream:
    """Where the images of a stream are drawn from."""

    known: Sequence[Answered]
    unknown: Sequence[Answered]
    share: float

    def draw(self, chance: random.Random) -> Answered:
        return chance.choice(self.unknown if chance.random() < self.share else self.known)

    @cached_property
    def tables(self) -> list[NDArray[np.int64]]:
        """Task and bins of known and of unknown images."""
        parts = (self.known, self.unknown)
        return [np.array([(each.task, *each.bins) for each in part]) for part in parts]


def answers(model: BundleModel, pixels: NDArray[np.uint8]) -> list[Answered]:
    found = model.predict(pixels)
    brightness = pixels.reshape(len(pixels), -1).mean(axis=1)
    columns = (found.task.tolist(), found.unknown_score.tolist(), brightness.tolist(), found.known.tolist())
    return [Answered(*row) for row in zip(*columns, strict=True)]


def follow(monitor: DriftMonitor, stream: Stream, images: int, chance: random.Random) -> tuple[int, Alarm | None]:
    """Show so many images, or until an alarm; returns how many were shown, and the alarm."""
    for number in range(images):
        image = stream.draw(chance)
        if (alarm := monitor.add(image.task, image.watched, "")) is not None:
            return number + 1, alarm
    return images, None


class ManyStreams:
    """The same statistics as a DriftMonitor, for a block of images of many streams; `agrees` compares both."""

    def __init__(self, streams: int, tasks: int) -> None:
        self._rows = np.arange(streams)
        self._tasks = tasks
        self._counts = [np.zeros((streams, tasks, len(edges) + 1), np.int32) for edges in EDGES]
        self._sums = np.zeros((streams * tasks, BETS * len(EDGES)))
        self._all = np.zeros((streams, BETS * len(EDGES)))
        self.alarmed = np.zeros(streams, bool)

    @property
    def sums(self) -> NDArray[np.float64]:
        """[streams, tasks and all, betting functions]"""
        by_task = self._sums.reshape(len(self._rows), self._tasks, -1)
        return np.concatenate([by_task, self._all[:, None]], axis=1)

    def add(self, images: NDArray[np.int64], chances: NDArray[np.float64]) -> None:
        """The next images of every stream [streams, images, task and bins], and what breaks their ties."""
        tasks = images[:, :, 0]
        stakes = [
            _stakes(self._p_values(counts, tasks, images[:, :, place + 1], chances[:, :, place]))
            for place, counts in enumerate(self._counts)
        ]
        # [images, streams, betting functions]
        factors = np.ascontiguousarray(np.concatenate(stakes, axis=0).transpose(2, 1, 0))
        for number, factor in enumerate(factors):
            own = self._rows * self._tasks + tasks[:, number]
            self._all = (1 + self._all) * factor
            found = (1 + self._sums[own]) * factor
            self._sums[own] = found
            self.alarmed |= np.maximum(self._all @ MEAN, found @ MEAN) >= 2.0 * EVERY

    def _p_values(
        self,
        counts: NDArray[np.int32],
        tasks: NDArray[np.int64],
        bins: NDArray[np.int64],
        chances: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Of each image among the earlier ones of its task [streams, images]; counts them."""
        _, _, width = counts.shape
        # Images before this block that have the same task, and the same bin or a higher one.
        at_least = counts[:, :, ::-1].cumsum(axis=2, dtype=np.int32)[:, :, ::-1].ravel()
        first = (self._rows[:, None] * self._tasks + tasks) * width
        same = counts.ravel()[first + bins]
        above, images = at_least[first + bins] - same, at_least[first]
        # Images of this block, one after another; the number of a place tells task and bin.
        places = np.ascontiguousarray((tasks * width + bins).T.astype(np.int16))
        ends = np.ascontiguousarray((tasks * width + width - 1).T.astype(np.int16))
        for number in range(1, len(places)):
            place, end, before = places[number], ends[number], places[:number]
            within = (before <= end) & (before > end - width)
            images[:, number] += np.add.reduce(within, axis=0, dtype=np.int8)
            same[:, number] += np.add.reduce(before == place, axis=0, dtype=np.int8)
            above[:, number] += np.add.reduce(within & (before > place), axis=0, dtype=np.int8)
        counts += np.bincount((first + bins).ravel(), minlength=counts.size).reshape(counts.shape).astype(np.int32)
        return (above + chances * (same + 1)) / (images + 1)


def _stakes(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factor of the stake of each betting function [betting functions, streams, images]."""
    sides = [np.log(np.maximum(side, LEAST_P)) for side in (p_values, 1 - p_values)]
    return np.stack([power * np.exp((power - 1) * side) for side in sides for power in POWERS])


BLOCK = 24
MEAN = np.full(BETS * len(EDGES), 1 / (BETS * len(EDGES)))


def drawn(stream: Stream, shape: tuple[int, int], chance: np.random.Generator) -> NDArray[np.int64]:
    """Task and bins of images that are drawn at random [*shape, task and bins]."""
    unknown = chance.random(shape) < stream.share
    picked = [table[chance.integers(len(table), size=shape)] for table in stream.tables]
    return np.where(unknown[:, :, None], picked[1], picked[0])


def agrees(stream: Stream, tasks: int, images: int = 50 * BLOCK) -> bool:
    """Whether the fast form computes what a DriftMonitor computes from the same images and the same chances."""
    chances = np.random.default_rng(5).random((images, len(EDGES)))
    given = iter(chances.ravel().tolist())
    fast, slow, chance = ManyStreams(1, tasks), DriftMonitor(tasks, EVERY, chance=lambda: next(given)), random.Random(3)
    shown = [stream.draw(chance) for _ in range(images)]
    for image in shown:
        slow.add(image.task, image.watched, "")
    numbers = np.array([[image.task, *image.bins] for image in shown])
    for start in range(0, images, BLOCK):
        block = slice(start, start + BLOCK)
        fast.add(numbers[None, block], chances[None, block])
    names = [*map(str, range(tasks)), ALL]
    return bool(np.allclose(fast.sums[0].mean(axis=1) / slow.threshold, [slow.evidence(name) for name in names]))


def false_alarms(stream: Stream, tasks: int, streams: int, images: int) -> int:
    """How many of the unchanged streams raise an alarm within so many images, rounded up to whole blocks."""
    chance, state = np.random.default_rng(0), ManyStreams(streams, tasks)
    for _ in range(0, images, BLOCK):
        shape = (streams, BLOCK)
        state.add(drawn(stream, shape, chance), chance.random((*shape, len(EDGES))))
    return int(state.alarmed.sum())


def interval(count: int, total: int) -> str:
    low, high = wilson(count, total)
    return f"{count} of {total} ({100 * count / total:.2f} %, {100 * low:.2f} to {100 * high:.2f} %)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--streams", type=int, default=1_000, help="unchanged streams")
    parser.add_argument("--images", type=int, default=100_000, help="images of an unchanged stream")
    parser.add_argument(
        "--changes", type=int, default=200, help="streams that change, for each number of images before"
    )
    parser.add_argument("--before", type=int, nargs="+", default=[500, 2_000])
    parser.add_argument("--dark", type=float, default=2 / 3, help="factor of brightness after the change")
    parser.add_argument("--unknown", type=float, default=0.1, help="share of unknown images")
    chosen = parser.parse_args()
    finished = open_run(chosen.run, torch.device("cpu"))
    preset = finished.config.preset
    known, unknown = known_and_unknown(load_source(preset.dataset, preset.image, None), finished.config)
    model = BundleModel.load(chosen.run / "bundle", provider="cpu")
    tasks = len(model.manifest.tasks)

    def streams(factor: float) -> Stream:
        both = [answers(model, np.round(part.pixels * factor).astype(np.uint8)) for part in (known, unknown)]
        return Stream(*both, chosen.unknown)

    usual, dark = streams(1.0), streams(chosen.dark)
    for name, stream in (("unchanged", usual), (f"brightness times {chosen.dark:.2f}", dark)):
        rejected = sum(not each.known for each in stream.known)
        print(f"{name}: known test images called unknown {interval(rejected, len(stream.known))}", flush=True)
    assert agrees(usual, tasks), "the fast form of the tests differs from the served one"
    started, chance = time.process_time(), random.Random(0)
    follow(DriftMonitor(tasks, EVERY, chance=chance.random), usual, 20_000, chance)
    each = (time.process_time() - started) / 20_000
    print(f"an image takes {1e6 * each:.1f} microseconds of processor time, with drawing it", flush=True)
    late = 0
    for before in chosen.before:
        delays, errors, changes = [], list[int](), Counter[str]()
        for seed in range(chosen.changes):
            chance = random.Random(1_000_000 + seed)
            monitor = DriftMonitor(tasks, EVERY, chance=chance.random)
            follow(monitor, usual, before, chance)
            delay, alarm = follow(monitor, dark, 10 * 500, chance)
            delays.append(delay if alarm else sys.maxsize)
            changes[f"{alarm.change}, {'all tasks' if alarm.task == ALL else 'one task'}" if alarm else "none"] += 1
            if alarm and alarm.task == ALL:
                errors.append(alarm.before - before)
        late += sum(delay > 500 for delay in delays)
        delays.sort()
        shown = ", ".join(f"{name} {delays[place]}" for name, place in (("median", len(delays) // 2), ("longest", -1)))
        within = interval(sum(delay <= 500 for delay in delays), len(delays))
        print(
            f"after {before:,} images: alarm within 500 images in {within}; {shown} images; {dict(changes)}; "
            f"alarms of all tasks name a beginning that is {np.mean(np.abs(errors)) if errors else 0:.1f} images off",
            flush=True,
        )
    alarms = false_alarms(usual, tasks, chosen.streams, chosen.images)
    print(f"streams of {chosen.images:,} unchanged images with a false alarm: {interval(alarms, chosen.streams)}")
    return 1 if late or wilson(alarms, chosen.streams)[0] > 0.01 else 0


if __name__ == "__main__":
    sys.exit(main())
