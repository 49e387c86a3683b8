"""Open a finished run: `open_run(folder, device)` returns a `Run`, or raises a `RunError` that says what to do.

This module imports what a trained network needs and nothing of how it was trained: no data source, no command.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from models.detectors import decisions
from models.network import Network
from models.parameter_counts import ParameterCounts, count_parameters
from serving.bundle.decision import Outputs, Rule
from training.config import POOLED, RunConfig, system_title
from training.learn.buffer import Buffer
from training.learn.correction import Correction
from training.learn.decisions import AUTO, Decider, choose, make_decider, offered_decisions
from training.learn.measurements import all_measurements
from training.learn.pooled_decision import PooledDecider
from training.learn.pooled_state import PooledState
from training.show.suggest import unknown_name
from training.store.checkpoint import Checkpoint, RunError, load_finished

__all__ = ["Readings", "Run", "RunError", "open_run"]

Readings = Any
"""What decisions are computed from: every task's `Measurements` of a batch, or with a trunk its vectors [n, dim]."""


@dataclass(frozen=True)
class Run:
    """A run whose tasks are all learned."""

    config: RunConfig
    network: Network | None
    """None if the run has statistics only."""
    decider: Decider | PooledDecider
    seconds: float
    correction_history: tuple[tuple[Correction, ...], ...] = ()
    """With a buffer: the scale and shift of every task, as they were after each task was learned."""
    buffer: Buffer | None = None

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """The scale and shift of every task (the paper's alpha and beta); empty without a buffer."""
        return self.correction_history[-1] if self.correction_history else ()

    @property
    def rule(self) -> Rule:
        return self.decider.rule

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.preset.name}, {system_title(config.method, config.loss)}, seed {config.seed}"

    @property
    def changes_with_tasks(self) -> bool:
        """Whether the outputs of earlier tasks change, as those of pooled statistics do, when a task is learned."""
        return isinstance(self.decider, PooledDecider)

    def need_network(self, what: str) -> Network:
        """The network; raises a RunError that names what is not available without one."""
        if self.network is None:
            raise RunError(f"{what} is not available for this run: it has statistics only, and no network was learned")
        return self.network

    def need_decider(self, what: str) -> tuple[Network, Decider]:
        """The network and the decision by its scores; raises a RunError that names what is not available without."""
        network = self.need_network(what)
        if isinstance(self.decider, PooledDecider):
            raise RunError(f"{what} is not available for this run: it decides by statistics")
        return network, self.decider

    def need_pooled(self) -> PooledDecider:
        """The decision by statistics, of a run with a trunk."""
        if not isinstance(self.decider, PooledDecider):
            raise RunError("this run has no pooled statistics: it was learned without a trunk")
        return self.decider

    def read(self, pixels: NDArray[Any], device: torch.device) -> Readings:
        """What the decisions are computed from, for uint8 images [n, height, width, channels] or vectors [n, dim]."""
        return pixels if self.network is None else all_measurements(self.network, pixels, device)

    def outputs(self, pixels: NDArray[Any], device: torch.device) -> dict[str, NDArray[Any]]:
        """The inputs of the decision rule for uint8 images [n, height, width, channels], or for vectors [n, dim], the
        columns of all tasks side by side."""
        return self.decider.outputs(self.read(pixels, device))

    def outputs_after(self, tasks: int, readings: Readings) -> Outputs:
        """The same as it was when so many tasks were learned, if `changes_with_tasks`."""
        return self.need_pooled().outputs_after(tasks, readings)

    def offered(self) -> Iterator[Decider | PooledDecider]:
        """Every decision that the run allows."""
        if self.network is None:
            yield self.decider
            return
        for name in offered_decisions(self.network, self.corrections):
            yield make_decider(self.network, name, self.rule.alpha, self.corrections)

    def parameters(self) -> ParameterCounts:
        """How many numbers the run needs at inference, without those of a trunk."""
        if isinstance(self.decider, PooledDecider):
            return self.decider.parameters()
        return count_parameters(self.need_network("a count of parameters"), corrected=bool(self.corrections))


def open_run(folder: Path, device: torch.device, decision: str = AUTO) -> Run:
    """Load a finished run, with the decision that it chose or with another one."""
    config, checkpoint = load_finished(folder)
    if config.quick:
        return _open_quick(config, checkpoint, decision)
    progress = checkpoint.progress
    if decision not in (AUTO, *decisions()):
        raise RunError(unknown_name("decision", decision, (AUTO, *decisions())))
    network = Network(config.preset.network)
    checkpoint.load_network(network, [len(labels) for labels in config.tasks])
    network.to(device).eval()
    name = (progress.decision or choose(progress.nats)) if decision == AUTO else decision
    history = progress.corrections
    decider = make_decider(network, name, config.preset.alpha, history[-1] if history else ())
    return Run(config, network, decider, progress.seconds, history, checkpoint.buffer())


def _open_quick(config: RunConfig, checkpoint: Checkpoint, decision: str) -> Run:
    if decision not in (AUTO, POOLED):
        raise RunError(
            f"decision {decision} is not available for this run: it has statistics only, and no network was learned; "
            f"allowed: {AUTO}, {POOLED}"
        )
    decider = PooledState.of(checkpoint, config).decider(config.preset.alpha)
    return Run(config, None, decider, checkpoint.progress.seconds)
