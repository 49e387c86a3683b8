"""How many numbers a network needs to answer, counted as the paper's table does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from torch import nn

from models.network import Network
from models.task_layer import TaskLayer


class ParameterCounts(TypedDict):
    """What all tasks share, what each has for itself, and both together."""

    inference: int
    shared: int
    per_task: list[int]
    detectors_per_task: list[int]
    """Class shapes and remembered scores of the rule that is served, which the paper has not; in none of the others."""


def count_parameters(network: Network, *, corrected: bool = False) -> ParameterCounts:
    """Weights, gates, norms and heads, without the projection, which only learning needs; a correction is two more.

    HAT's weights count whole, as in the paper. Sup's tasks count the weights that they keep.
    """
    layers = list(_answering(network))
    shared = sum(layer.shared_numbers() for layer in layers)
    own = sum(layer.task_numbers() for layer in layers) + (2 if corrected else 0)
    per_task = [own + _size(network.head(task)) for task in range(len(network.heads))]
    return ParameterCounts(
        inference=shared + sum(per_task),
        shared=shared,
        per_task=per_task,
        detectors_per_task=[
            sum(buffer.numel() for buffer in network.detector(task).buffers()) for task in range(len(network.heads))
        ],
    )


def _answering(network: Network) -> Iterator[TaskLayer]:
    """The layers that a finished network answers with."""
    projection = network.projection
    unused: set[nn.Module] = set() if projection is None else {*projection.modules(), projection.wires.after}
    return (layer for layer in network.task_layers() if layer not in unused)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def capacity_used(network: Network) -> float | None:
    """The share of the shared weights that finished tasks have taken; None for Sup, which shares none."""
    pairs = [pair for layer in _answering(network) for pair in layer.frozen()]
    if not pairs:
        return None
    return sum(int(frozen.sum()) for _, frozen in pairs) / sum(frozen.numel() for _, frozen in pairs)
