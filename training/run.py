"""Open a finished run: `open_run(folder, device)` returns a `Run`, or raises a `RunError` that says what to do.

This module imports what a trained network needs and nothing of how it was trained: no data source, no command.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.detectors import decisions
from models.network import Network
from serving.bundle.decision import Rule
from training.config import RunConfig, system_title
from training.learn.buffer import Buffer
from training.learn.correction import Correction
from training.learn.decisions import AUTO, Decider, choose, make_decider
from training.learn.measurements import all_measurements
from training.show.suggest import unknown_name
from training.store.checkpoint import RunError, load_finished

__all__ = ["Run", "RunError", "open_run"]


@dataclass(frozen=True)
class Run:
    """A run whose tasks are all learned."""

    config: RunConfig
    network: Network
    decider: Decider
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

    def outputs(self, pixels: NDArray[np.uint8], device: torch.device) -> dict[str, NDArray[Any]]:
        """The inputs of the decision rule for uint8 images [n, height, width, channels], the columns of all tasks
        side by side."""
        return self.decider.outputs(all_measurements(self.network, pixels, device))


def open_run(folder: Path, device: torch.device, decision: str = AUTO) -> Run:
    """Load a finished run, with the decision that it chose or with another one."""
    config, checkpoint = load_finished(folder)
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
