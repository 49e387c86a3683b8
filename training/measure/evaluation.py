"""A finished run on its test images: its outputs, verdicts and losses, and the metrics made from them."""

import argparse
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.parameter_counts import capacity_used
from serving.bundle.decision import Outputs, Verdicts, complete, judge
from serving.bundle.run_verdict import RunVerdict
from serving.bundle.terminal import log_to_terminal
from training.config import RunConfig
from training.data.images import Images, Source
from training.data.opening import open_sources
from training.data.sources import Sources
from training.data.views import in_rotations
from training.host.device import choose_device, prepare
from training.measure import metrics, theory, verdict
from training.measure.adapter_gain import adapter_gain
from training.measure.alternative_rules import AlternativeRule, RuleFitter, chosen_rule
from training.measure.memory import memory_in_words, memory_use
from training.measure.task_prediction import TaskPredictor
from training.measure.theory import DetectorProbabilities
from training.run import Readings, Run, open_run

SERVED = "served"
"""The name of the decision rule that servers use."""

log = logging.getLogger(__name__)


def known_and_unknown(source: Source, config: RunConfig) -> tuple[Images, Images]:
    """The test images of learned classes, and those of classes that no task has."""
    return source.test.of(config.labels), source.test.of(set(source.classes) - set(config.labels))


class TaskDetectors(NamedTuple):
    """P'_k of every task for the known images, under one decision rule."""

    formula: str
    """The formula of P'_k, as text."""
    probabilities: DetectorProbabilities
    temperatures: theory.Floats | None = None
    """tau_k [T] if TP_k is P'_k ** (1 / tau_k) / sum (near 0: the largest takes all); None if TP is made otherwise."""


@dataclass(frozen=True)
class Evaluation:
    """The test images of a run that are available, and the outputs of its network for them."""

    run: Run
    known: Images
    unknown: Images
    outputs: Outputs
    unknown_outputs: Outputs
    decide: metrics.DecisionFunction
    settings: dict[str, Any]
    """The decision rule that was used, and the numbers that were chosen for it."""
    measurements: tuple[Readings, ...] = ()
    """Under the served rule only: what decisions are computed from, for known images, and for unknown ones if any."""

    @property
    def is_served(self) -> bool:
        """Whether the served rule decides, and not another one."""
        return self.decide is judge

    @cached_property
    def class_ids(self) -> NDArray[np.int64]:
        """The classes of the known images [n]."""
        place = {label: class_id for class_id, label in enumerate(self.run.config.labels)}
        return np.array([place[str(label)] for label in self.known.labels])

    @cached_property
    def tasks(self) -> NDArray[np.integer]:
        """The tasks of the known images [n]."""
        return metrics.task_of(self.class_ids, self.run.rule)

    @cached_property
    def verdicts(self) -> Verdicts:
        """For the known images."""
        return self.decide(self.outputs, self.run.rule)

    @cached_property
    def unknown_verdicts(self) -> Verdicts:
        return self.decide(self.unknown_outputs, self.run.rule)

    @cached_property
    def verdict(self) -> RunVerdict:
        """How good the run is, in words."""
        rule = self.run.rule
        within, between = (
            count(self.verdicts, rule, self.class_ids) for count in (verdict.class_hits, verdict.task_hits)
        )
        separation = None
        if len(self.unknown):
            separation = verdict.never_learned(self.verdicts, self.unknown_verdicts)
        elif self.is_served:
            if self.run.changes_with_tasks:
                separation = verdict.not_yet_learned(rule, self.class_ids, lambda tasks: self._after[tasks - 1][0])
            separation = separation or verdict.left_out(self.outputs, rule, self.class_ids)
        photos = None if self.run.config.trunk is None else self.run.need_pooled().median_images
        return verdict.judge_run(within, between, separation, rule, photos)

    @cached_property
    def task_detectors(self) -> TaskDetectors:
        """P'_k of every task for the known images."""
        rule = self.run.rule
        if self.is_served:
            # exp(-s) is a likelihood ratio of own against foreign. TP normalises the odds, not the probabilities.
            scores = complete(self.outputs, rule)["scores"]
            return TaskDetectors("sigmoid(-s_k), s_k the task's score", DetectorProbabilities.of_log_odds(-scores))
        if isinstance(self.decide, TaskPredictor):
            definition = self.decide.definition
            formula = "sigmoid(max f_k)" if definition.detector == "sigmoid" else "max softmax(f_k / tau)"
            taus = np.broadcast_to(definition.taus or theory.SMALLEST, len(rule.tasks)).astype(np.float64)
            return TaskDetectors(formula, self.decide.detectors(self.outputs, rule), taus)
        implied = theory.detectors_from_tasks(self.verdicts.p_task)
        return TaskDetectors("TP_k, as this rule has no detectors", implied, np.ones(len(rule.tasks)))

    @cached_property
    def over_time(self) -> tuple[metrics.Matrix, list[metrics.Accuracies]]:
        """The accuracy on each task's images, and over all images, after each task was learned."""
        after = (lambda tasks: self._after[tasks - 1]) if self.run.changes_with_tasks else None
        every = metrics.stages(self.outputs, self.run.rule, self.class_ids, self.decide, self.unknown_outputs, after)
        matrix = metrics.accuracy_matrix(every)
        return matrix, metrics.after_each_task(every, matrix)

    @property
    def forgetting_in_words(self) -> dict[str, str]:
        """One sentence on each of the two numbers for forgetting."""
        return metrics.forgetting_in_words(changes_with_tasks=self.run.changes_with_tasks)

    @cached_property
    def _after(self) -> list[tuple[Outputs, Outputs]]:
        """The outputs for the known and the unknown images after each task, of a run that changes with tasks."""
        return [self._outputs_after(tasks) for tasks in range(1, len(self.run.rule.tasks) + 1)]

    def _outputs_after(self, tasks: int) -> tuple[Outputs, Outputs]:
        known, *unknown = (self.run.outputs_after(tasks, each) for each in self.measurements)
        return known, unknown[0] if unknown else {name: values[:0] for name, values in known.items()}

    @cached_property
    def losses(self) -> theory.Losses:
        """For the known images."""
        verdicts, detectors = self.verdicts, self.task_detectors.probabilities
        of_class = self.run.rule.task_of_class
        return theory.losses(verdicts.p_within_task, verdicts.p_task, detectors, self.class_ids, of_class)


def evaluate(
    run: Run,
    sources: Sources,
    device: torch.device,
    rule: AlternativeRule | None = None,
    other_unknown: Images | None = None,
) -> Evaluation:
    """Run the network on the test images that are available; a warning names those that are not.

    Unknown are the images of classes that no task has, or `other_unknown`. Without `rule` the served rule decides.
    """
    source, missing = sources.test_images()
    for problem in missing:
        log.warning("not measured: %s", problem)
    known, unknown = known_and_unknown(source, run.config)
    unknown = unknown if other_unknown is None else other_unknown
    # A large network takes minutes for many images.
    log.info("measuring on %d test images of learned classes and %d unknown ones ...", len(known), len(unknown))
    pixels = [run_inputs(run, images, sources) for images in (known, unknown) if len(images)]
    measurements: tuple[Readings, ...] = ()
    decide: metrics.DecisionFunction = judge
    if rule is None:
        settings: dict[str, Any] = {"prediction": SERVED}
        measurements = tuple(run.read(each, device) for each in pixels)
        outputs: list[Outputs] = [run.decider.outputs(each) for each in measurements]
    else:
        compute, decide, settings = RuleFitter(run, sources, device).fit(rule)
        outputs = [compute(each) for each in pixels]
    none = {name: values[:0] for name, values in outputs[0].items()}
    unknown_outputs = outputs[1] if len(unknown) else none
    return Evaluation(run, known, unknown, outputs[0], unknown_outputs, decide, settings, measurements)


def run_inputs(run: Run, images: Images, sources: Sources) -> NDArray[Any]:
    """What `Run.read` takes: the pixels or vectors of images, in all rotations if adapters read these."""
    if run.rotations == 1:
        return images.pixels
    return in_rotations(images, run.rotations, sources.views, "rotations of photos")


def evaluate_chosen(chosen: argparse.Namespace) -> Evaluation:
    """Evaluate the run that a command line names (`training.options.run_parser`, `add_rule_options`)."""
    log_to_terminal()
    device = prepare(choose_device())
    run = open_run(chosen.run, device, chosen.decision)
    rule = chosen_rule(chosen)
    sources = open_sources(run.config, chosen.data, weights=chosen.trunk_weights, run=chosen.run)
    return evaluate(run, sources, device, rule, chosen_unknown(chosen, sources))


def chosen_unknown(chosen: argparse.Namespace, sources: Sources) -> Images | None:
    """The images that --unknown names, if the command has this option and it was given."""
    named: list[str] | None = getattr(chosen, "unknown", None)
    return None if named is None else sources.read(*named).test


def measure(evaluation: Evaluation) -> dict[str, Any]:
    """All metrics of a run: the content of RUN/metrics.json."""
    run, verdicts, class_ids = evaluation.run, evaluation.verdicts, evaluation.class_ids
    true_task, config = evaluation.tasks, run.config
    per_task = metrics.task_auroc(verdicts.task_unknown_score, true_task)
    matrix, accuracies = evaluation.over_time
    losses = evaluation.losses
    result: dict[str, Any] = {
        "verdict": evaluation.verdict.model_dump(),
        "method": config.method,
        "loss": config.loss,
        "buffer": config.buffer,
        "decision": run.decider.name,
        **evaluation.settings,
        "preset": config.preset.name,
        "trunk": config.trunk and config.trunk.public_name,
        "seed": config.seed,
        "wall_seconds": round(run.seconds, 1),
        "test_images": len(evaluation.known),
        "untested_tasks": [task for task in range(len(config.tasks)) if not (true_task == task).any()],
        **{name: value for name, value in accuracies[-1].items() if name != "rejected_unknown"},
        "average_incremental_accuracy": metrics.average_incremental_accuracy(accuracies),
        "ece": _rounded(metrics.calibration_error(verdicts.probability.max(axis=1), verdicts.class_id == class_ids)),
        "task_auroc": metrics.mean_of(per_task),
        "task_auroc_per_task": per_task,
        "forgetting": metrics.forgetting(matrix),
        "forgetting_in_words": evaluation.forgetting_in_words,
        "after_each_task": accuracies,
        "accuracy_matrix": matrix,
        "nats": {
            **{name: _rounded(getattr(losses, name).mean()) for name in ("wp", "tp", "cil")},
            "ood_per_task": [_rounded(value) for value in losses.ood.mean(axis=0)],
        },
        "parameters": run.parameters(),
        "capacity_used": None if run.masked_network is None else capacity_used(run.masked_network),
        "adapters": adapter_gain(run, evaluation.measurements, class_ids),
        "memory": (memory := memory_use(run)),
        "memory_in_words": memory_in_words(memory),
        "uneven_tasks": _uneven_tasks(run),
        "unknown": None,
    }
    if len(evaluation.unknown):
        result["unknown_images"] = len(evaluation.unknown)
        result["unknown"] = metrics.unknown_metrics(verdicts, evaluation.unknown_verdicts, class_ids)
    return result


def _uneven_tasks(run: Run) -> list[dict[str, Any]]:
    """The tasks of which a class had many more training images than another, with the images of each class.

    Pooled statistics have one covariance for all classes and do not mind.
    """
    if run.network is None:
        return []
    found = []
    for task, labels in enumerate(run.config.tasks):
        detector = run.network.detector(task)
        if detector.is_uneven:
            counts = zip(labels, detector.class_images.tolist(), strict=True)
            found.append({"task": task, "training_images": dict(counts)})
    return found


def _rounded(value: float) -> float | None:
    """Six decimals, because the last bits of an output depend on its batch; None for infinity."""
    return round(float(value), 6) if np.isfinite(value) else None
