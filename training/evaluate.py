"""Measure a run on its test images: `python -m training.evaluate RUN [--json]`.

By the rule that is served, or by another way to read the same run: --tp, --corrected, --odin.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.counting import capacity_used, count_parameters
from models.network import Network
from serving.decision import NETWORK_NAMES, Rule
from training import metrics
from training.calibration import Correction
from training.checkpoint import RunError, load, read_config
from training.classifier import task_outputs
from training.config import RunConfig
from training.datasets import DataError, Images, Source
from training.device import choose_device, prepare
from training.prediction import Reader, ReaderMaker, Reading, add_options, reading_of, served_reader
from training.report import summary
from training.sources import Sources
from training.tasks import to_device

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run with every task learned."""

    config: RunConfig
    network: Network
    rule: Rule
    seconds: float
    correction_history: tuple[tuple[Correction, ...], ...] = ()
    """Of a run with a buffer: every task's scale and shift, as they were after each task was learned."""

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """Every task's scale and shift (the paper's alpha and beta); none without a buffer."""
        return self.correction_history[-1] if self.correction_history else ()


def open_run(folder: Path, device: torch.device) -> Run:
    """Load a finished run, or say what is missing."""
    config = read_config(folder)
    checkpoint = load(folder)
    if checkpoint.progress.task < len(config.tasks):
        raise RunError(
            f"{folder}: {checkpoint.progress.task} of {len(config.tasks)} tasks are learned; "
            f"go on with `python -m training.fit --out {folder} --resume`"
        )
    network = Network(config.preset.network)
    checkpoint.load_network(network, [len(labels) for labels in config.tasks])
    network.to(device).eval()
    rule = Rule(alpha=config.preset.alpha, tasks=checkpoint.progress.rules)
    return Run(config, network, rule, checkpoint.progress.seconds, checkpoint.progress.corrections)


def all_outputs(network: Network, pixels: NDArray[np.uint8], device: torch.device) -> dict[str, NDArray[Any]]:
    """What the decision reads, for uint8 images [n, height, width, channels]: every task's columns side by side."""
    images = to_device(pixels, device)
    parts = [task_outputs(network, task, images) for task in range(len(network.heads))]
    every = [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]
    return dict(zip(NETWORK_NAMES, every, strict=True))


def known_and_unknown(source: Source, config: RunConfig) -> tuple[Images, Images]:
    """The test images of learned classes, and those of classes that no task has."""
    return source.test.of(config.labels), source.test.of(set(source.classes) - set(config.labels))


def reader_of(run: Run, sources: Sources, device: torch.device, reading: Reading | None) -> Reader:
    """How the run is read: by the rule that is served, or as asked."""
    if reading is None:
        return served_reader(partial(all_outputs, run.network, device=device))
    return ReaderMaker(run.config, run.network, run.rule, run.correction_history, sources, device).make(reading)


def measure(run: Run, sources: Sources, device: torch.device, reading: Reading | None = None) -> dict[str, Any]:
    """All metrics of a finished run, on the test images that are at hand."""
    source, missing = sources.test_images()
    for problem in missing:
        log.warning("not measured: %s", problem)
    known, unknown = known_and_unknown(source, run.config)
    class_ids = np.array([run.config.labels.index(str(label)) for label in known.labels])
    says, decide, about = reader_of(run, sources, device, reading)
    outputs = says(known.pixels)
    verdicts = decide(outputs, run.rule)
    true_task = metrics.task_of(class_ids, run.rule)
    per_task = metrics.task_auroc(verdicts.task_unknown_score, true_task)
    matrix = metrics.accuracy_matrix(outputs, run.rule, class_ids, decide)
    tasks = range(len(run.config.tasks))
    result: dict[str, Any] = {
        "method": run.config.method,
        "loss": run.config.loss,
        "buffer": run.config.buffer,
        **about,
        "preset": run.config.preset.name,
        "seed": run.config.seed,
        "wall_seconds": round(run.seconds, 1),
        "test_images": len(known),
        "untested_tasks": [task for task in tasks if not (true_task == task).any()],
        "cil_accuracy": float((verdicts.class_id == class_ids).mean()),
        "til_accuracy": metrics.til_accuracy(outputs, run.rule, class_ids, decide),
        "tp_accuracy": float((verdicts.task == true_task).mean()),
        "accepted_known": float(verdicts.known.mean()),
        "task_auroc": metrics.mean_of(per_task),
        "task_auroc_per_task": per_task,
        "forgetting": metrics.forgetting(matrix),
        "accuracy_matrix": matrix,
        "parameters": count_parameters(run.network, corrected=bool(run.corrections)),
        "capacity_used": capacity_used(run.network),
        "unknown": None,
    }
    if len(unknown):
        result["unknown_images"] = len(unknown)
        result["unknown"] = metrics.unknown_metrics(outputs, says(unknown.pixels), run.rule, decide)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--data", help="where the images are now, if not where they were learned from")
    add_options(parser)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = choose_device()
    prepare(device)
    try:
        reading = reading_of(chosen)
        run = open_run(chosen.run, device)
        result = measure(run, Sources(run.config, chosen.data), device, reading)
    except (RunError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        summary(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
