"""Unknown scores of the logits alone. They have nothing to fit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.detectors.score import GraphOps, Means, UnknownScore


class _LogitScore(UnknownScore):
    @property
    def needs(self) -> tuple[str, ...]:
        return ("logits",)


class MaxLogit(_LogitScore):
    """The negative logit of each class."""

    def score(self, means: Means) -> Tensor:
        return -means["logits"]

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        return ops.add("Neg", "", [means["logits"]])


class MaxSoftmax(_LogitScore):
    """The negative softmax probability of each class within the task."""

    def score(self, means: Means) -> Tensor:
        return -means["logits"].softmax(dim=1)

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        return ops.add("Neg", "", [ops.add("Softmax", "", [means["logits"]], axis=1)])


class Energy(_LogitScore):
    """The negative log-sum-exp of the task's logits."""

    def score(self, means: Means) -> Tensor:
        return energy(means)

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        return write_energy(ops, means)


def energy(means: Means) -> Tensor:
    """-log sum exp over the classes of a task, [n, 1]."""
    return -means["logits"].logsumexp(dim=1, keepdim=True)


def write_energy(ops: GraphOps, means: Mapping[str, str]) -> str:
    axis = ops.constant("row_axis", [1])
    return ops.add("Neg", "", [ops.add("ReduceLogSumExp", "", [means["logits"], axis], keepdims=1)])
