"""Measure a run on its test images: `python -m training.evaluate RUN [--json]`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.network import Network
from serving.decision import NETWORK_NAMES, Outputs, Rule, Verdicts, judge
from training import metrics, theory
from training.checkpoint import RunError, load, read_config
from training.classifier import task_outputs
from training.config import RunConfig
from training.datasets import DataError, Images, Source
from training.device import choose_device, prepare
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

    @property
    def title(self) -> str:
        return f"{self.config.preset.name}, {self.config.method.upper()}+CSI, seed {self.config.seed}"


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
    return Run(config, network, rule, checkpoint.progress.seconds)


def all_outputs(network: Network, pixels: NDArray[np.uint8], device: torch.device) -> dict[str, NDArray[Any]]:
    """What the decision reads, for uint8 images [n, height, width, channels]: every task's columns side by side."""
    images = to_device(pixels, device)
    parts = [task_outputs(network, task, images) for task in range(len(network.heads))]
    every = [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]
    return dict(zip(NETWORK_NAMES, every, strict=True))


def known_and_unknown(source: Source, config: RunConfig) -> tuple[Images, Images]:
    """The test images of learned classes, and those of classes that no task has."""
    return source.test.of(config.labels), source.test.of(set(source.classes) - set(config.labels))


@dataclass(frozen=True)
class Tested:
    """The test images of a run that are at hand, and what its network says of them."""

    run: Run
    known: Images
    unknown: Images
    outputs: Outputs
    unknown_outputs: Outputs
    decide: metrics.Decision = judge

    @cached_property
    def class_ids(self) -> NDArray[np.int64]:
        """Of the known images."""
        place = {label: class_id for class_id, label in enumerate(self.run.config.labels)}
        return np.array([place[str(label)] for label in self.known.labels])

    @cached_property
    def tasks(self) -> NDArray[np.integer]:
        """Of the known images."""
        return metrics.task_of(self.class_ids, self.run.rule)

    @cached_property
    def verdicts(self) -> Verdicts:
        """On the known images."""
        return self.decide(self.outputs, self.run.rule)

    @cached_property
    def unknown_verdicts(self) -> Verdicts:
        return self.decide(self.unknown_outputs, self.run.rule)

    @cached_property
    def losses(self) -> theory.Losses:
        """On the known images; a task's detector is the one that TP implies (Theorem 2 i)."""
        verdicts = self.verdicts
        p_in = theory.detectors_from_tasks(verdicts.p_task)
        return theory.losses(verdicts.p_within_task, verdicts.p_task, p_in, self.class_ids, self.run.rule.task_of_class)


def examine(run: Run, sources: Sources, device: torch.device) -> Tested:
    """Ask a finished run about the test images that are at hand, and name those that are not."""
    source, missing = sources.test_images()
    for problem in missing:
        log.warning("not measured: %s", problem)
    known, unknown = known_and_unknown(source, run.config)
    outputs = all_outputs(run.network, known.pixels, device)
    none = {name: values[:0] for name, values in outputs.items()}
    of_unknown = all_outputs(run.network, unknown.pixels, device) if len(unknown) else none
    return Tested(run, known, unknown, outputs, of_unknown)


def measure(tested: Tested) -> dict[str, Any]:
    """All metrics of a run: what RUN/metrics.json holds."""
    run, verdicts, class_ids, true_task = tested.run, tested.verdicts, tested.class_ids, tested.tasks
    per_task = metrics.task_auroc(verdicts.task_unknown_score, true_task)
    matrix = metrics.accuracy_matrix(tested.outputs, run.rule, class_ids, tested.decide)
    accuracies = metrics.after_each_task(tested.outputs, run.rule, class_ids, tested.decide)
    result: dict[str, Any] = {
        "method": run.config.method,
        "preset": run.config.preset.name,
        "seed": run.config.seed,
        "wall_seconds": round(run.seconds, 1),
        "test_images": len(tested.known),
        "untested_tasks": [task for task in range(len(run.config.tasks)) if not (true_task == task).any()],
        **{name: value for name, value in accuracies[-1].items() if name != "forgetting"},
        "accepted_known": float(verdicts.known.mean()),
        "average_incremental_accuracy": metrics.average_incremental_accuracy(accuracies),
        "ece": _rounded(metrics.calibration_error(verdicts.probability.max(axis=1), verdicts.class_id == class_ids)),
        "task_auroc": metrics.mean_of(per_task),
        "task_auroc_per_task": per_task,
        "forgetting": metrics.forgetting(matrix),
        "after_each_task": accuracies,
        "accuracy_matrix": matrix,
        "nats": {
            **{name: _rounded(getattr(tested.losses, name).mean()) for name in ("wp", "tp", "cil")},
            "ood_per_task": [_rounded(value) for value in tested.losses.ood.mean(axis=0)],
        },
        "unknown": None,
    }
    if len(tested.unknown):
        result["unknown_images"] = len(tested.unknown)
        result["unknown"] = metrics.unknown_metrics(verdicts, tested.unknown_verdicts, class_ids)
    return result


def _rounded(value: float) -> float:
    """What a network says depends in its last bits on which images it is asked about together."""
    return round(float(value), 6)


def run_parser(module: str, description: str) -> argparse.ArgumentParser:
    """For a command about a finished run; `examine_chosen` takes what it parsed."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    parser.add_argument("--data", help="where the images are now, if not where they were learned from")
    return parser


def examine_chosen(chosen: argparse.Namespace) -> Tested:
    """The run that a command line names, on the test images that are at hand."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = choose_device()
    prepare(device)
    run = open_run(chosen.run, device)
    return examine(run, Sources(run.config, chosen.data), device)


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("training.evaluate", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    try:
        result = measure(examine_chosen(chosen))
    except (RunError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        summary(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
