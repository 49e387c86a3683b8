"""What a decision reads of a task, as nodes of a graph: logits, distances at several depths, and the sum of scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import Tensor

from export.bake import BakedTask
from export.writer import GraphWriter
from models.distance import SHORTEST, ClassDistances
from models.mixtures import ClassMixtures
from models.scores import TINY

DEPTHS = ("shallow", "deep")


class IngredientWriter:
    """Writes what one task's decision reads, for some of its rotations, and nothing else."""

    def __init__(
        self, writer: GraphWriter, path: str, task: BakedTask, depths: Mapping[str, str], rotations: slice
    ) -> None:
        self._writer = writer
        self._path = path
        self._task = task
        self._depths = depths
        self._rotations = rotations
        self._directions: dict[str, str] = {}

    def write(self) -> tuple[dict[str, str], str]:
        """Ingredient -> [rotations, n, columns], and the standardised features [n, features] of upright images."""
        detectors = self._task.detectors
        made: dict[str, Callable[[], str]] = {
            "logits": self._logits,
            "tied": lambda: self._distances("tied", detectors.tied),
            "shallow": lambda: self._mixtures("shallow", "shallow", detectors.shallow),
            "deep": lambda: self._mixtures("deep", "deep", detectors.deep),
            "background": lambda: self._distances("background", detectors.background),
            "residual": self._residual,
        }
        needs = self._task.scorer.decision.needs
        said = {name: made[name]() for name in needs}
        return said, self._features() if self._rotations.start == 0 else ""

    def _add(self, kind: str, path: str, inputs: list[str], **attributes: Any) -> str:
        return self._writer.add(kind, f"{self._path}/{path}", inputs, **attributes)

    def _constant(self, name: str, values: Tensor) -> str:
        """The rotations in question of values [rotations, ...]; all are stored."""
        writer, (start, stop) = self._writer, (self._rotations.start, self._rotations.stop)
        whole = writer.constant(f"{self._path}/{name}", values)
        if stop - start == len(values):
            return whole
        names = [writer.constant(f"rotation_{number}", [number]) for number in (start, stop, 0)]
        return writer.add_constant("Slice", f"{whole}/{start}", [whole, *names])

    def _logits(self) -> str:
        head = self._task.head
        scored = self._add("MatMul", "head/score", [self._depths["deep"], self._constant("head/weight", head.weight)])
        return self._add("Add", "head/biased", [scored, self._constant("head/bias", head.bias)])

    def _direction(self, depth: str) -> str:
        """Features of length 1."""
        if depth not in self._directions:
            writer, features = self._writer, self._depths[depth]
            length = self._add(
                "ReduceL2", f"{depth}/length", [features, writer.constant("last_axis", [-1])], keepdims=1
            )
            length = self._add("Max", f"{depth}/length", [length, writer.constant("shortest", SHORTEST)])
            self._directions[depth] = self._add("Div", f"{depth}/direction", [features, length])
        return self._directions[depth]

    def _features(self) -> str:
        """What the quarantine keeps of an image: the same as models.distance.ClassDistances.standardised."""
        writer, tied, path = self._writer, self._task.detectors.tied, self._path
        upright = writer.constant("upright", np.array(0))
        first = self._add("Gather", "features/first", [self._direction("deep"), upright], axis=0)
        if "tied" in self._task.scorer.decision.needs:
            # All rotations are stored anyhow.
            stored = [writer.constant(f"{path}/tied/{name}", getattr(tied, name)) for name in ("basis", "gain")]
            basis, gain = (writer.add_constant("Gather", f"{name}/first", [name, upright], axis=0) for name in stored)
        else:
            basis = writer.constant(f"{path}/features/basis", tied.basis[0])
            gain = writer.constant(f"{path}/features/gain", tied.gain[0])
        back = self._gained(basis, gain, [1, 0])
        level = writer.constant(f"{path}/features/level", tied.level[0])
        along = self._add("MatMul", "features/along", [first, basis])
        correction = self._add("MatMul", "features/correction", [along, back])
        levelled = self._add("Mul", "features/levelled", [first, level])
        return self._add("Add", "features/standardised", [levelled, correction])

    def _gained(self, basis: str, gain: str, turned: list[int]) -> str:
        """A basis times its gains, with its last axes exchanged: made from what is stored when the graph is loaded."""
        gained = self._writer.add_constant("Mul", f"{basis}/gained", [basis, gain])
        return self._writer.add_constant("Transpose", f"{basis}/back", [gained], perm=turned)

    def _mixtures(self, name: str, depth: str, shapes: ClassMixtures) -> str:
        writer, direction = self._writer, self._direction(depth)
        last = writer.constant("last_axis", [-1])
        whole, scales = self._constant(f"{name}/axes", shapes.axes), self._constant(f"{name}/scales", shapes.scales)
        axes = writer.add_constant("Cast", f"{whole}/float", [whole], to=TensorProto.FLOAT)
        axes = writer.add_constant("Mul", f"{whole}/scaled", [axes, scales])
        along = self._add("MatMul", f"{name}/along", [direction, axes])
        along = self._add("Sub", f"{name}/along", [along, self._constant(f"{name}/shifts", shapes.shifts)])
        rank = shapes.axes.shape[2] // shapes.components
        table = writer.constant(f"table{shapes.components}x{rank}", [0, 0, shapes.components, rank])
        along = self._add("Reshape", f"{name}/components", [along, table])
        explained = self._add("ReduceSumSquare", f"{name}/explained", [along, last], keepdims=0)
        apart = self._squared(name, direction, shapes.means)
        apart = self._add("Mul", f"{name}/levelled", [apart, self._constant(f"{name}/levels", shapes.levels)])
        plain = self._add("Add", f"{name}/plain", [apart, self._constant(f"{name}/volumes", shapes.volumes)])
        return self._add("Sub", f"{name}/likelihood", [plain, explained])

    def _squared(self, name: str, rows: str, means: Tensor) -> str:
        """[rotations, n, features] -> squared distances from means [rotations, columns, features], one a column."""
        writer = self._writer
        rows = self._add("Unsqueeze", f"{name}/rows", [rows, writer.constant("class_axis", [2])])
        difference = self._add("Sub", f"{name}/difference", [rows, self._constant(f"{name}/means", means[:, None])])
        last = writer.constant("last_axis", [-1])
        return self._add("ReduceSumSquare", f"{name}/squared", [difference, last], keepdims=0)

    def _distances(self, name: str, distances: ClassDistances) -> str:
        direction = self._direction("deep")
        basis = self._constant(f"{name}/basis", distances.basis)
        gained = self._gained(basis, self._constant(f"{name}/gain", distances.gain), [0, 2, 1])
        along = self._add("MatMul", f"{name}/along", [direction, basis])
        correction = self._add("MatMul", f"{name}/correction", [along, gained])
        levelled = self._add("Mul", f"{name}/levelled", [direction, self._constant(f"{name}/level", distances.level)])
        white = self._add("Add", f"{name}/white", [levelled, correction])
        return self._squared(name, white, distances.means)

    def _residual(self) -> str:
        writer, residual = self._writer, self._task.detectors.residual
        last = writer.constant("last_axis", [-1])
        mean, axes = self._constant("residual/mean", residual.mean), self._constant("residual/axes", residual.axes)
        centred = self._add("Sub", "residual/centred", [self._depths["deep"], mean])
        back = writer.add_constant("Transpose", f"{axes}/back", [axes], perm=[0, 2, 1])
        inside = self._add("MatMul", "residual/inside", [self._add("MatMul", "residual/along", [centred, axes]), back])
        outside = self._add("Sub", "residual/outside", [centred, inside])
        length = self._add("ReduceL2", "residual/length", [outside, last], keepdims=1)
        return self._add(
            "Mul", "residual/scaled", [length, writer.constant(f"{self._path}/residual/gain", residual.gain)]
        )


def write_score(writer: GraphWriter, path: str, task: BakedTask, means: Mapping[str, str]) -> tuple[str, str]:
    """Ingredients [n, columns] -> calibrated logits and distances [n, classes], as models.scores.TaskScorer says."""
    scorer, owner = task.scorer, path.partition("/")[0]
    said = {name: _nearest(writer, f"{path}/{name}", task, name, values) for name, values in means.items()}
    scale, shift = (writer.constant(f"{owner}/calibration/{name}", float(value)) for name, value in
                    (("scale", scorer.scale), ("shift", scorer.shift)))  # fmt: skip
    logits = writer.add("Mul", f"{path}/logits", [said["logits"], scale])
    logits = writer.add("Add", f"{path}/logits", [logits, shift])
    total = ""
    for name, weight in zip(scorer.decision.parts, scorer.weights, strict=True):
        part = _part(writer, f"{path}/score/{name}", name, {**said, "logits": logits})
        factor = writer.constant(f"{owner}/score/{name}/weight", float(weight))
        weighted = writer.add("Mul", f"{path}/score/{name}/weighted", [part, factor])
        total = writer.add("Add", f"{path}/score/{name}/sum", [total, weighted]) if total else weighted
    # A row as long as the classes are many: what is said of the task is said of each of its classes.
    biases = writer.constant(f"{owner}/score/bias", _row(scorer.bias, scorer.classes))
    return logits, writer.add("Add", f"{path}/distances", [total, biases])


def _nearest(writer: GraphWriter, path: str, task: BakedTask, name: str, values: str) -> str:
    """Each class's likeliest component, where a class has several."""
    mixtures = getattr(task.detectors, name, None)
    if not isinstance(mixtures, ClassMixtures) or mixtures.components == mixtures.classes:
        return values
    each = mixtures.components // mixtures.classes
    shape = writer.constant(f"table{mixtures.classes}of{each}", [0, mixtures.classes, each])
    table = writer.add("Reshape", f"{path}/classes", [values, shape])
    return writer.add("ReduceMin", f"{path}/nearest", [table, writer.constant("last_axis", [-1])], keepdims=0)


def _row(value: float, classes: int) -> Tensor:
    return Tensor([[value] * classes])


def _part(writer: GraphWriter, path: str, name: str, said: Mapping[str, str]) -> str:
    """One score, [n, classes] or [n, 1]: every one of models.scores.PARTS is here, so a new one fails loudly."""
    match name:
        case "max_logit":
            return writer.add("Neg", path, [said["logits"]])
        case "max_softmax":
            return writer.add("Neg", path, [writer.add("Softmax", path, [said["logits"]], axis=1)])
        case "energy":
            return _energy(writer, path, said["logits"])
        case "relative":
            return writer.add("Sub", path, [said["tied"], said["background"]])
        case "vim":
            return writer.add("Add", path, [said["residual"], _energy(writer, path, said["logits"])])
        case "mahalanobis":
            return writer.add("Log", path, [writer.add("Max", path, [said["tied"], writer.constant("tiny", TINY)])])
        case "shallow" | "deep":
            return said[name]
    raise TypeError(f"no ONNX is known for the score {name!r}")


def _energy(writer: GraphWriter, path: str, logits: str) -> str:
    """-log sum exp over the classes of a task."""
    axis = writer.constant("row_axis", [1])
    return writer.add("Neg", path, [writer.add("ReduceLogSumExp", path, [logits, axis], keepdims=1)])
