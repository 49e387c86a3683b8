"""The number of parameters that a network needs at inference, counted as in the paper's table."""

from collections.abc import Iterator
from typing import TypedDict

from torch import nn

from models.masks.task_layer import TaskLayer
from models.network import Network


class ParameterCounts(TypedDict):
    """Parameters that all tasks share, those of each task, and their total."""

    inference: int
    shared: int
    per_task: list[int]
    detectors_per_task: list[int]
    """Fitted unknown scores and their memory, which the paper does not have; not part of the other counts."""


def count_parameters(network: Network, *, corrected: bool = False) -> ParameterCounts:
    """Weights, gates, norms and heads, without the projection, which only training needs; a correction adds two.

    All of HAT's weights count, as in the paper. For Sup, the weights that each task keeps count.
    """
    layers = list(_inference_layers(network))
    shared = sum(layer.shared_numbers() for layer in layers)
    own = sum(layer.task_numbers() for layer in layers) + (2 if corrected else 0)
    per_task = [own + sum(each.numel() for each in head.parameters()) for head in network.heads]
    return ParameterCounts(
        inference=shared + sum(per_task),
        shared=shared,
        per_task=per_task,
        detectors_per_task=[sum(each.numel() for each in detector.buffers()) for detector in network.detectors],
    )


def _inference_layers(network: Network) -> Iterator[TaskLayer]:
    projection = network.projection
    unused: set[nn.Module] = set() if projection is None else {*projection.modules(), projection.connection.after}
    return (layer for layer in network.task_layers() if layer not in unused)


def capacity_used(network: Network) -> float | None:
    """The share of the shared weights that finished tasks use; None if tasks share no weights (Sup)."""
    pairs = [pair for layer in _inference_layers(network) for pair in layer.frozen()]
    if not pairs:
        return None
    return sum(int(frozen.sum()) for _, frozen in pairs) / sum(frozen.numel() for _, frozen in pairs)
