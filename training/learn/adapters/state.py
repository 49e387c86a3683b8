"""What a run has learned with adapters, besides the weights of their network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from models.network import Network
from serving.bundle.pooled.adapters import Adapter
from training.config import RunConfig
from training.learn.adapters.baking import baked_adapter
from training.learn.adapters.choice import Choice, JudgedAdapters, choose
from training.store.checkpoint import Checkpoint

JUDGED = "adapter{}."


@dataclass(frozen=True)
class AdapterState:
    """What was measured of every task's adapter when it was learned."""

    judged: tuple[JudgedAdapters, ...] = ()

    def with_task(self, judged: JudgedAdapters) -> AdapterState:
        return AdapterState((*self.judged, judged))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a checkpoint."""
        arrays: dict[str, NDArray[Any]] = {}
        for task, judged in enumerate(self.judged):
            arrays |= {JUDGED.format(task) + name: values for name, values in judged.to_arrays().items()}
        return arrays

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> AdapterState:
        """The state in a checkpoint; raises a RunError if it is not complete."""
        arrays = checkpoint.pooled()
        try:
            tasks = range(checkpoint.progress.task)
            judged = tuple(JudgedAdapters.from_arrays(_below(arrays, JUDGED.format(task))) for task in tasks)
        except (KeyError, ValueError) as error:
            raise checkpoint.misfit(f"its adapters are not complete ({error})") from None
        return cls(judged)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run whose tasks are all learned."""

    network: Network
    state: AdapterState

    @cached_property
    def choice(self) -> Choice:
        return choose(self.state.judged, self.network.config.rotations)

    @cached_property
    def baked(self) -> tuple[Adapter, ...]:
        """Every task's adapter with the rotations that it reads, as a bundle stores it."""
        return tuple(task_adapter(self.network, task, each, self.choice.best.rotations)
                     for task, each in enumerate(self.state.judged))  # fmt: skip

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: RunConfig) -> Adapters:
        """The adapters in a checkpoint; raises a RunError if they do not fit the configuration of the run."""
        network = Network(config.preset.network)
        checkpoint.load_network(network, [len(labels) for labels in config.tasks])
        network.eval()
        return cls(network, AdapterState.of(checkpoint))


def task_adapter(network: Network, task: int, judged: JudgedAdapters, rotations: int) -> Adapter:
    """The adapter of a finished task that reads one rotation or all."""
    whole = baked_adapter(network, task)
    if rotations == 1:
        return replace(whole.upright(), scale=float(judged.scales[0]))
    return replace(whole, scale=float(judged.scales[1]))


def _below(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
