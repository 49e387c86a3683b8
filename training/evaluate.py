"""Measure a run on its test images: `python -m training.evaluate RUN [--json]`.

By the rule that is served, or by another way to read the same run: --tp, --corrected, --odin.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.counting import capacity_used, count_parameters
from models.network import Network
from models.scores import DECISIONS
from serving.decision import Outputs, Rule, Verdicts, complete, judge
from training import metrics, theory
from training.buffer import Buffer
from training.calibration import Correction
from training.checkpoint import RunError, load, read_config
from training.config import RunConfig, system_title
from training.datasets import SOURCES, load_source
from training.decisions import AUTO, Decider, SaidByTasks, all_said, choose, make_decider
from training.device import choose_device, prepare
from training.images import DataError, Images, Source
from training.prediction import Reader, ReaderMaker, Reading, add_options, reading_of
from training.report import summary
from training.sources import Sources
from training.task_prediction import TaskPredictor
from training.theory import Detectors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run with every task learned."""

    config: RunConfig
    network: Network
    decider: Decider
    seconds: float
    correction_history: tuple[tuple[Correction, ...], ...] = ()
    """Of a run with a buffer: every task's scale and shift, as they were after each task was learned."""
    buffer: Buffer | None = None

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """Every task's scale and shift (the paper's alpha and beta); none without a buffer."""
        return self.correction_history[-1] if self.correction_history else ()

    @property
    def rule(self) -> Rule:
        return self.decider.rule

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.preset.name}, {system_title(config.method, config.loss)}, seed {config.seed}"

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
    progress = checkpoint.progress
    name = (progress.decision or choose(progress.nats)) if decision == AUTO else decision
    history = checkpoint.progress.corrections
    decider = make_decider(network, name, config.preset.alpha, history[-1] if history else ())
    return Run(config, network, decider, checkpoint.progress.seconds, history, checkpoint.buffer())


def known_and_unknown(source: Source, config: RunConfig) -> tuple[Images, Images]:
    """The test images of learned classes, and those of classes that no task has."""
    return source.test.of(config.labels), source.test.of(set(source.classes) - set(config.labels))


class Detected(NamedTuple):
    """The tasks' detectors of one reading: what P'_k is, and what it says of known images."""

    formula: str
    detectors: Detectors
    temperatures: theory.Floats | None = None
    """tau_k [T] where TP_k is P'_k ** (1 / tau_k) / sum, near 0 where the largest takes all; None: it is another."""


@dataclass(frozen=True)
class Tested:
    """The test images of a run that are at hand, and what its network says of them."""

    run: Run
    known: Images
    unknown: Images
    outputs: Outputs
    unknown_outputs: Outputs
    decide: metrics.Decision
    about: dict[str, Any]
    """How the run was read, and what was chosen for that."""
    said: tuple[SaidByTasks, ...] = ()
    """Where the rule that is served decides: what every task says of the known images, and of unknown ones if any."""

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
    def detected(self) -> Detected:
        """What the tasks' detectors say of the known images."""
        rule = self.run.rule
        if self.decide is judge:
            # A score is a log-likelihood ratio of foreign against own. TP normalises the odds, not the probabilities.
            scores = complete(self.outputs, rule)["scores"]
            return Detected("sigmoid(-s_k), s_k the task's score", Detectors.of_log_odds(-scores))
        if isinstance(self.decide, TaskPredictor):
            definition = self.decide.definition
            formula = "sigmoid(max f_k)" if definition.detector == "sigmoid" else "max softmax(f_k / tau)"
            taus = np.broadcast_to(definition.taus or theory.SMALLEST, len(rule.tasks)).astype(np.float64)
            return Detected(formula, self.decide.detectors(self.outputs, rule), taus)
        implied = theory.detectors_from_tasks(self.verdicts.p_task)
        return Detected("TP_k, for want of others", implied, np.ones(len(rule.tasks)))

    @cached_property
    def losses(self) -> theory.Losses:
        """On the known images."""
        verdicts, detectors = self.verdicts, self.detected.detectors
        of_class = self.run.rule.task_of_class
        return theory.losses(verdicts.p_within_task, verdicts.p_task, detectors, self.class_ids, of_class)


def reader_of(run: Run, sources: Sources, device: torch.device, reading: Reading) -> Reader:
    """How the run is read where that is not by the rule that is served."""
    maker = ReaderMaker(run.config, run.network, run.rule, run.correction_history, run.buffer, sources, device)
    return maker.make(reading)


def examine(
    run: Run,
    sources: Sources,
    device: torch.device,
    reading: Reading | None = None,
    other_unknown: Images | None = None,
) -> Tested:
    """Ask a finished run about the test images that are at hand, and name those that are not.

    Unknown are those of classes that no task has, or others that are given.
    """
    source, missing = sources.test_images()
    for problem in missing:
        log.warning("not measured: %s", problem)
    known, unknown = known_and_unknown(source, run.config)
    unknown = unknown if other_unknown is None else other_unknown
    # A large network takes minutes for many images.
    log.info("measuring on %d test images of learned classes and %d unknown ones ...", len(known), len(unknown))
    pixels = [images.pixels for images in (known, unknown) if len(images)]
    said: tuple[SaidByTasks, ...] = ()
    decide: metrics.Decision = judge
    if reading is None:
        about: dict[str, Any] = {"prediction": "served"}
        said = tuple(all_said(run.network, each, device) for each in pixels)
        outputs: list[Outputs] = [run.decider.outputs(each) for each in said]
    else:
        says, decide, about = reader_of(run, sources, device, reading)
        outputs = [says(each) for each in pixels]
    none = {name: values[:0] for name, values in outputs[0].items()}
    return Tested(run, known, unknown, outputs[0], outputs[1] if len(unknown) else none, decide, about, said)


def measure(tested: Tested) -> dict[str, Any]:
    """All metrics of a run: what RUN/metrics.json holds."""
    run, verdicts, class_ids, true_task = tested.run, tested.verdicts, tested.class_ids, tested.tasks
    per_task = metrics.task_auroc(verdicts.task_unknown_score, true_task)
    stages = metrics.stages(tested.outputs, run.rule, class_ids, tested.decide)
    matrix = metrics.accuracy_matrix(stages)
    accuracies = metrics.after_each_task(stages, matrix)
    result: dict[str, Any] = {
        "method": run.config.method,
        "loss": run.config.loss,
        "buffer": run.config.buffer,
        "decision": run.decider.name,
        **tested.about,
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
        "parameters": count_parameters(run.network, corrected=bool(run.corrections)),
        "capacity_used": capacity_used(run.network),
        "unknown": None,
    }
    if len(tested.unknown):
        result["unknown_images"] = len(tested.unknown)
        result["unknown"] = metrics.unknown_metrics(verdicts, tested.unknown_verdicts, class_ids)
    return result


def _rounded(value: float) -> float | None:
    """What a network says depends in its last bits on which images it is asked about together; none if infinite."""
    return round(float(value), 6) if np.isfinite(value) else None


def run_parser(module: str, description: str) -> argparse.ArgumentParser:
    """For a command about a finished run; `examine_chosen` takes what it parsed."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    parser.add_argument("--data", help="where the images are now, if not where they were learned from")
    parser.add_argument("--decision", choices=(AUTO, *DECISIONS), default=AUTO, help="default: what the run chose")
    add_options(parser)
    return parser


def add_unknown_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unknown",
        nargs=2,
        metavar=("KIND", "FOLDER"),
        help=f"images of another data set as unknowns: {', '.join(SOURCES)}; default: classes that no task has",
    )


def chosen_unknown(chosen: argparse.Namespace, config: RunConfig) -> Images | None:
    """The images that --unknown names, if the command has it and was given it."""
    named: list[str] | None = getattr(chosen, "unknown", None)
    return None if named is None else load_source(named[0], config.preset.image, named[1]).test


def examine_chosen(chosen: argparse.Namespace) -> Tested:
    """The run that a command line names, on the test images that are at hand, by the decision that it names."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = choose_device()
    prepare(device)
    reading = reading_of(chosen)
    run = open_run(chosen.run, device, chosen.decision)
    return examine(run, Sources(run.config, chosen.data), device, reading, chosen_unknown(chosen, run.config))


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("training.evaluate", __doc__.splitlines()[0])
    add_unknown_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    try:
        result = measure(examine_chosen(chosen))
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
