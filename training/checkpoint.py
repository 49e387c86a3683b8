"""The one file a run is resumed and exported from: safetensors, so that loading it runs no code.

It is replaced atomically and the one before it is kept: a run that is killed at any point leaves a readable one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.network import Network
from training.buffer import Buffer
from training.calibration import Correction
from training.config import RunConfig

CURRENT, PREVIOUS, CONFIG = "checkpoint.safetensors", "checkpoint.previous.safetensors", "config.json"
METRICS = "metrics.json"
NETWORK, OPTIMIZER, BUFFER = "network.", "optimizer.", "buffer."


class RunError(Exception):
    """A run directory that cannot be used; the message says why and what would do."""


@dataclass(frozen=True)
class Progress:
    """How far a run is. `phase` is what comes next for `task`, `epoch` how much of it is done."""

    task: int = 0
    phase: str = "features"
    epoch: int = 0
    seconds: float = 0.0
    nats: dict[str, float] = field(default_factory=dict)
    """Decision -> its cross-entropy on validation images, each when its task was the newest."""
    decision: str | None = None
    """What was chosen by that when the first lesson was learned; later lessons leave it, and so all earlier answers."""
    images: str = ""
    """Digest of the images of a task that is begun: it goes on with these and no others."""
    corrections: tuple[tuple[Correction, ...], ...] = ()
    """Of a run with a buffer: every task's correction, as fitted after each task."""

    def finished_features(self) -> int:
        """How many tasks have their features learned and protected."""
        return self.task + (self.phase == "head")


_PROGRESS = TypeAdapter(Progress)
_CONFIG = TypeAdapter(RunConfig)


def write_config(folder: Path, config: RunConfig) -> None:
    replace_file(folder / CONFIG, _CONFIG.dump_json(config, indent=2) + b"\n")


def read_config(folder: Path) -> RunConfig:
    try:
        return _CONFIG.validate_json((folder / CONFIG).read_bytes())
    except OSError as error:
        raise RunError(
            f"{folder}: not a run ({error.strerror}: {CONFIG}); make one with `python -m training.fit`"
        ) from None
    except ValueError as error:
        raise RunError(f"{folder / CONFIG}: {error}") from error


def save(
    folder: Path,
    network: Network,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
    buffer: Buffer | None = None,
) -> None:
    """Write the checkpoint; the one before it stays beside it until the next."""
    tensors = {NETWORK + name: value for name, value in network.state_dict().items()}
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"{OPTIMIZER}{number}.{name}"] = torch.as_tensor(value)
    if buffer is not None:
        tensors |= {f"{BUFFER}pixels": buffer.pixels, f"{BUFFER}class_ids": buffer.class_ids}
    temporary = folder / f".{CURRENT}.new"
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(contiguous, temporary, metadata={"progress": _PROGRESS.dump_json(progress).decode()})
    _sync(temporary)
    if (folder / CURRENT).exists():
        os.replace(folder / CURRENT, folder / PREVIOUS)
    os.replace(temporary, folder / CURRENT)
    _sync(folder)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it lies on disk."""

    progress: Progress
    tensors: dict[str, Tensor]

    def load_network(self, network: Network, classes: list[int]) -> None:
        """Give a fresh network the tasks learned so far (classes of each task, whole run) and their weights."""
        progress = self.progress
        # A task that has not begun gets its room from the learner, from the seed that room has.
        begun = progress.phase == "head" or progress.epoch > 0
        for task in range(progress.task + begun):
            network.add_task(classes[task])
            if task < progress.finished_features():
                network.finish(task)
        own = {name.removeprefix(NETWORK): value for name, value in self.tensors.items() if name.startswith(NETWORK)}
        for name, value in own.items():
            # How large these are is known only once a task is learned.
            if name.startswith(("detectors.", "ranges.")):
                owner, _, buffer = name.rpartition(".")
                setattr(network.get_submodule(owner), buffer, torch.empty_like(value))
        network.load_state_dict(own)

    def buffer(self) -> Buffer | None:
        """The kept images, in a run that keeps some."""
        if f"{BUFFER}pixels" not in self.tensors:
            return None
        return Buffer(self.tensors[f"{BUFFER}pixels"], self.tensors[f"{BUFFER}class_ids"])

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in self.tensors.items():
            if name.startswith(OPTIMIZER):
                number, key = name.removeprefix(OPTIMIZER).split(".", 1)
                state.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def started(folder: Path) -> bool:
    """Whether there is a checkpoint to go on from, be it only the one before the last."""
    return (folder / CURRENT).exists() or (folder / PREVIOUS).exists()


def load(folder: Path) -> Checkpoint:
    """The newest readable checkpoint of a run."""
    problems = []
    for name in (CURRENT, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            with safe_open(path, framework="pt") as stored:
                progress = _PROGRESS.validate_json((stored.metadata() or {}).get("progress", ""))
                return Checkpoint(progress, {key: stored.get_tensor(key) for key in stored.keys()})  # noqa: SIM118
        except (SafetensorError, ValueError, OSError) as error:
            problems.append(f"{path}: {error}")
    raise RunError("; ".join(problems) or f"{folder}: no checkpoint yet; nothing was learned there")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file of a run that cannot be written, be it that the disk is full, is a RunError that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"{path}: could not be written ({reason}). What was learned up to the last checkpoint is kept: free some "
            f"space, then go on with `python -m training.fit --out {path.parent} --resume`"
        ) from error


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file at once, so that a reader sees the old one or the new one."""
    replace_file(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once and for good: a reader, or a crash, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    _sync(temporary)
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
