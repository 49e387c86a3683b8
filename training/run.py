"""Open a finished run: `open_run(folder, device)` returns a `Run`, or raises a `RunError` with what to do.

This module imports what a trained network needs and nothing of how it was trained: no data source, no command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from models.detectors import decisions
from models.network import Network
from models.parameter_counts import ParameterCounts, count_parameters
from models.suggest import unknown_name
from serving.bundle.decision import Outputs, Rule
from training.config import POOLED, POOLED_AND_LOGITS, RunConfig, system_title
from training.learn.adapters.state import Adapters
from training.learn.buffer import Buffer
from training.learn.correction import Correction
from training.learn.decisions import AUTO, Decider, choose, make_decider, offered_decisions
from training.learn.measurements import all_measurements
from training.learn.pooled_decision import PooledDecider
from training.learn.pooled_state import PooledState
from training.store.checkpoint import Checkpoint, RunError, load_finished

__all__ = ["Readings", "Run", "RunError", "open_run"]

Readings = Any
"""What decisions are computed from: every task's `Measurements` of a batch, or with a trunk its vectors [n, dim], or
[n, rotations, dim] if adapters read all rotations."""


@dataclass(frozen=True)
class Run:
    """A run whose tasks are all learned."""

    config: RunConfig
    network: Network | None
    """The network that decides; None with a trunk."""
    decider: Decider | PooledDecider
    seconds: float
    correction_history: tuple[tuple[Correction, ...], ...] = ()
    """With a buffer: the scale and shift of every task, as they were after each task was learned."""
    buffer: Buffer | None = None
    adapters: Adapters | None = None
    """With a trunk, unless the run is quick."""
    adapter_seconds: float = 0.0
    """The part of `seconds` that the adapters took."""
    folder: Path | None = None
    """The folder that it was read from."""

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, decision: str = AUTO, device: str | None = None) -> Run:
        """A finished run, for programs; on a GPU if there is one. Raises a RunError with what to do."""
        from training.host.device import choose_device, prepare

        return open_run(Path(folder), prepare(choose_device() if device is None else torch.device(device)), decision)

    def evaluate(self, data: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """All metrics on the test images, and the verdict: the content of RUN/metrics.json.

        `data` is where the images are now, if they were moved. Raises a DataError if they are not at hand.
        """
        from training.data.opening import open_sources
        from training.measure.evaluation import evaluate, measure

        sources = open_sources(self.config, None if data is None else os.fspath(data), run=self.folder)
        return measure(evaluate(self, sources, self.device))

    @property
    def device(self) -> torch.device:
        """Where its network is."""
        network = self.masked_network if self.network is None else self.network
        return torch.device("cpu") if network is None else next(network.parameters()).device

    @property
    def masked_network(self) -> Network | None:
        """The network whose units or weights tasks share, be it of adapters; None if there are statistics only."""
        return self.network if self.adapters is None else self.adapters.network

    @property
    def rotations(self) -> int:
        """With a trunk: how many rotations of an image are encoded to decide on it."""
        return self.decider.model.rotations if isinstance(self.decider, PooledDecider) else 1

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
            raise RunError(f"{what} is not available for this run: it decides by statistics of encoded vectors")
        return self.network

    def need_decider(self, what: str) -> tuple[Network, Decider]:
        """The network and the decision by its scores; raises a RunError that names what is not available without."""
        network = self.need_network(what)
        assert not isinstance(self.decider, PooledDecider)
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
        """The outputs after the first `tasks` tasks were learned, if `changes_with_tasks`."""
        return self.need_pooled().outputs_after(tasks, readings)

    def offered(self) -> Iterator[Decider | PooledDecider]:
        """Every decision that the run allows."""
        if self.network is None:
            yield from self._offered_pooled()
            return
        for name in offered_decisions(self.network, self.corrections):
            yield make_decider(self.network, name, self.rule.alpha, self.corrections)

    def _offered_pooled(self) -> Iterator[PooledDecider]:
        statistics = self.need_pooled().without_adapters()
        yield statistics
        if self.adapters is not None and self.adapters.choice.best.rotations == self.rotations:
            yield statistics.with_adapters(self.adapters.baked, self.adapters.choice.best.weight)

    def parameters(self) -> ParameterCounts:
        """How many numbers the run needs at inference, without those of a trunk."""
        if isinstance(self.decider, PooledDecider):
            return self.decider.parameters()
        return count_parameters(self.need_network("a count of parameters"), corrected=bool(self.corrections))


def open_run(folder: Path, device: torch.device, decision: str = AUTO) -> Run:
    """Load a finished run, with the decision that it chose or with another one."""
    config, checkpoint = load_finished(folder)
    if config.trunk is not None:
        return replace(_open_with_trunk(config, checkpoint, decision), folder=folder)
    progress = checkpoint.progress
    if decision not in (AUTO, *decisions()):
        raise RunError(unknown_name("decision", decision, (AUTO, *decisions())))
    network = Network(config.preset.network)
    checkpoint.load_network(network, [len(labels) for labels in config.tasks])
    network.to(device).eval()
    name = (progress.decision or choose(progress.nats)) if decision == AUTO else decision
    history = progress.corrections
    decider = make_decider(network, name, config.preset.alpha, history[-1] if history else ())
    return Run(config, network, decider, progress.seconds, history, checkpoint.buffer(), folder=folder)


def _open_with_trunk(config: RunConfig, checkpoint: Checkpoint, decision: str) -> Run:
    adapters = None if config.quick else Adapters.of(checkpoint, config)
    allowed = [AUTO, POOLED, *([] if adapters is None else [POOLED_AND_LOGITS])]
    if decision not in allowed:
        raise RunError(
            f"decision {decision} is not available for this run: it decides by statistics of encoded vectors; "
            f"allowed: {', '.join(allowed)}"
        )
    decider = PooledState.of(checkpoint, config).decider(config.preset.alpha)
    if adapters is not None and (decision == POOLED_AND_LOGITS or (decision == AUTO and adapters.choice.weight)):
        decider = decider.with_adapters(adapters.baked, adapters.choice.best.weight)
    progress = checkpoint.progress
    return Run(config, None, decider, progress.seconds, adapters=adapters, adapter_seconds=progress.adapter_seconds)
