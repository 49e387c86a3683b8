"""A task's logits, measurements and decision as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from export.graph.baked_task import BakedTask
from export.graph.writer import GraphWriter
from models.detectors.mahalanobis import write_standardised
from models.detectors.score import FLOAT, Features, write_directions

DEPTHS = Features._fields


class TaskOps:
    """models.detectors.score.GraphOps for one task: writes its nodes and constants below a path of the graph."""

    def __init__(self, writer: GraphWriter, path: str, rotations: slice | None = None) -> None:
        """`rotations` are those that the nodes compute; None: the nodes come after the mean over the rotations."""
        self._writer = writer
        self._path = path
        self._rotations = rotations
        self._written: dict[str, str] = {}

    def add(self, kind: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        return self._writer.add(kind, f"{self._path}/{name}" if name else self._path, inputs, **attributes)

    def fitted(self, name: str, values: Tensor) -> str:
        """All rotations are stored; the graph takes those that it computes."""
        whole = self._writer.constant(f"{self._path}/{name}", values)
        if self._rotations is None or values.dim() == 0:
            return whole
        start, stop = self._rotations.start, self._rotations.stop
        if stop - start == len(values):
            return whole
        bounds = [self._writer.constant(f"rotation_{number}", [number]) for number in (start, stop, 0)]
        return self._writer.add_constant("Slice", f"{whole}/{start}", [whole, *bounds])

    def constant(self, name: str, value: Sequence[int] | float) -> str:
        return self._writer.constant(name, value)

    def fold(self, kind: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        return self._writer.add_constant(kind, f"{inputs[0]}/{name}", inputs, **attributes)

    def once(self, name: str, write: Callable[[], str]) -> str:
        if name not in self._written:
            self._written[name] = write()
        return self._written[name]


def write_measurements(
    writer: GraphWriter, path: str, task: BakedTask, features: Mapping[str, str], rotations: slice
) -> tuple[dict[str, str], str]:
    """The measurements that the task's decision needs, [rotations, n, columns], and its standardised features [n,
    features] of upright images, which are empty where no upright image is computed."""
    ops = TaskOps(writer, path, rotations)
    needs = task.detector.needs(task.scorer.decision)
    measured = {
        name: _logits(ops, task, features) if name == "logits"
        else task.detector.score(name).write_measure(ops, features)
        for name in needs
    }  # fmt: skip
    if rotations.start != 0:
        return measured, ""
    return measured, _standardised_features(writer, ops, path, task, features, stored="mahalanobis" in needs)


def _logits(ops: TaskOps, task: BakedTask, features: Mapping[str, str]) -> str:
    products = ops.add("MatMul", "head/score", [features["deep"], ops.fitted("head/weight", task.head.weight)])
    return ops.add("Add", "head/biased", [products, ops.fitted("head/bias", task.head.bias)])


def _standardised_features(
    writer: GraphWriter, ops: TaskOps, path: str, task: BakedTask, features: Mapping[str, str], *, stored: bool
) -> str:
    """The features that the quarantine stores: equals Mahalanobis.standardised for upright images."""
    score = task.detector.mahalanobis
    upright = writer.constant("upright", np.array(0))
    first = ops.add("Gather", "features/first", [write_directions(ops, features, "deep"), upright], axis=0)
    names = ("axes", "scales", "gain")
    if stored:
        # The decision needs all rotations of these, so the first one is taken from what is stored anyway.
        whole = [writer.constant(f"{path}/{score.name}/{name}", getattr(score, name)) for name in names]
        stored_axes, scales, gain = (
            writer.add_constant("Gather", f"{name}/first", [name, upright], axis=0) for name in whole
        )
    else:
        stored_axes, scales, gain = (
            writer.constant(f"{path}/features/{name}", getattr(score, name)[0]) for name in names
        )
    level = writer.constant(f"{path}/features/level", score.level[0])
    axes = ops.fold("Mul", "scaled", [ops.fold("Cast", "float", [stored_axes], to=FLOAT), scales])
    return write_standardised(ops, "features", first, axes, gain, level, [1, 0])


def write_decision_of_task(
    writer: GraphWriter, path: str, task: BakedTask, means: Mapping[str, str]
) -> tuple[str, str]:
    """Means of the measurements [n, columns] -> calibrated logits and distances [n, classes], as TaskScorer."""
    scorer, owner = task.scorer, path.partition("/")[0]
    scale, shift = (writer.constant(f"{owner}/calibration/{name}", float(value)) for name, value in
                    (("scale", scorer.scale), ("shift", scorer.shift)))  # fmt: skip
    logits = writer.add("Mul", f"{path}/logits", [means["logits"], scale])
    logits = writer.add("Add", f"{path}/logits", [logits, shift])
    total = ""
    for score, weights in zip(scorer.scores, scorer.weights, strict=True):
        place = f"score/{score.name}"
        part = score.write_score(TaskOps(writer, f"{path}/{place}"), {**means, "logits": logits})
        weighted = writer.add(
            "Mul", f"{path}/{place}/weighted", [part, writer.constant(f"{owner}/{place}/weight", Tensor([weights]))]
        )
        total = writer.add("Add", f"{path}/{place}/sum", [total, weighted]) if total else weighted
    # A score of the whole task is broadcast to all its classes.
    biases = writer.constant(f"{owner}/score/bias", Tensor([scorer.bias]))
    return logits, writer.add("Add", f"{path}/distances", [total, biases])
