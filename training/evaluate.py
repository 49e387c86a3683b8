"""Measure a run on its test images: `python -m training.evaluate RUN [--json]`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.network import Network
from models.scores import DECISIONS
from serving.decision import Rule, judge
from training import metrics
from training.checkpoint import RunError, load, read_config
from training.config import RunConfig
from training.datasets import DataError, Images, Source
from training.decisions import AUTO, Decider, all_said, choose, make_decider
from training.device import choose_device, prepare
from training.report import summary
from training.sources import Sources

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run with every task learned."""

    config: RunConfig
    network: Network
    decider: Decider
    seconds: float

    @property
    def rule(self) -> Rule:
        return self.decider.rule

    def outputs(self, pixels: NDArray[np.uint8], device: torch.device) -> dict[str, NDArray[Any]]:
        """What the decision reads, for uint8 images [n, height, width, channels]: every task's columns side by side."""
        return self.decider.outputs(all_said(self.network, pixels, device))


def open_run(folder: Path, device: torch.device, decision: str = AUTO) -> Run:
    """Load a finished run with its own decision or another, or say what is missing."""
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
    name = choose(checkpoint.progress.right) if decision == AUTO else decision
    return Run(config, network, make_decider(network, name, config.preset.alpha), checkpoint.progress.seconds)


def known_and_unknown(source: Source, config: RunConfig) -> tuple[Images, Images]:
    """The test images of learned classes, and those of classes that no task has."""
    return source.test.of(config.labels), source.test.of(set(source.classes) - set(config.labels))


def measure(run: Run, sources: Sources, device: torch.device) -> dict[str, Any]:
    """All metrics of a finished run, on the test images that are at hand."""
    source, missing = sources.test_images()
    for problem in missing:
        log.warning("not measured: %s", problem)
    known, unknown = known_and_unknown(source, run.config)
    class_ids = np.array([run.config.labels.index(str(label)) for label in known.labels])
    outputs = run.outputs(known.pixels, device)
    verdicts = judge(outputs, run.rule)
    true_task = metrics.task_of(class_ids, run.rule)
    per_task = metrics.task_auroc(verdicts.task_unknown_score, true_task)
    matrix = metrics.accuracy_matrix(outputs, run.rule, class_ids)
    tasks = range(len(run.config.tasks))
    result: dict[str, Any] = {
        "method": run.config.method,
        "decision": run.decider.name,
        "preset": run.config.preset.name,
        "seed": run.config.seed,
        "wall_seconds": round(run.seconds, 1),
        "test_images": len(known),
        "untested_tasks": [task for task in tasks if not (true_task == task).any()],
        "cil_accuracy": float((verdicts.class_id == class_ids).mean()),
        "til_accuracy": metrics.til_accuracy(outputs, run.rule, class_ids),
        "tp_accuracy": float((verdicts.task == true_task).mean()),
        "accepted_known": float(verdicts.known.mean()),
        "task_auroc": metrics.mean_of(per_task),
        "task_auroc_per_task": per_task,
        "forgetting": metrics.forgetting(matrix),
        "accuracy_matrix": matrix,
        "unknown": None,
    }
    if len(unknown):
        result["unknown_images"] = len(unknown)
        result["unknown"] = metrics.unknown_metrics(outputs, run.outputs(unknown.pixels, device), run.rule)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--data", help="where the images are now, if not where they were learned from")
    parser.add_argument("--decision", choices=(AUTO, *DECISIONS), default=AUTO, help="default: what the run chose")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = choose_device()
    prepare(device)
    try:
        run = open_run(chosen.run, device, chosen.decision)
        result = measure(run, Sources(run.config, chosen.data), device)
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
