"""The one file that a run is resumed and exported from: safetensors, so that loading it runs no code.

It is replaced atomically and the previous one is kept: a run that is killed at any point leaves a readable checkpoint.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.network import Network
from serving.bundle.atomic import replace_file, replacing, sync
from serving.bundle.manifest import first_error
from training.config import RunConfig
from training.learn.buffer import Buffer
from training.learn.correction import Correction

CURRENT, PREVIOUS, CONFIG = "checkpoint.safetensors", "checkpoint.previous.safetensors", "config.json"
METRICS = "metrics.json"
NETWORK, OPTIMIZER, BUFFER, POOLED = "network.", "optimizer.", "buffer.", "pooled."
FORMAT = 6
"""The version of the checkpoint's format. Version 1 carried no number."""
_LEARN_AGAIN = "learn again with `openworld fit --out` and another folder"


class RunError(Exception):
    """A run directory that cannot be used; the message has the reason and what to do."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come. `phase` is the next phase of `task`, `epoch` the number of its epochs that are done."""

    task: int = 0
    phase: str = "features"
    epoch: int = 0
    seconds: float = 0.0
    nats: dict[str, float] = field(default_factory=dict)
    """Decision -> its cross-entropy on the validation images of every task, measured when the task was the newest."""
    decision: str | None = None
    """The choice made by it after the first lesson. Later lessons keep it, so that no earlier answer changes."""
    images: str = ""
    """Digest of the images of a task that is half learned: it can be resumed only with the same images."""
    corrections: tuple[tuple[Correction, ...], ...] = ()
    """In a run with a buffer: every task's correction, as fitted after each task."""
    adapter_seconds: float = 0.0
    """The part of `seconds` that the adapters of a run with a trunk took."""


_PROGRESS = TypeAdapter(Progress)
_CONFIG = TypeAdapter(RunConfig)


def write_config(folder: Path, config: RunConfig) -> None:
    replace_file(folder / CONFIG, _CONFIG.dump_json(config, indent=2) + b"\n")


def read_config(folder: Path) -> RunConfig:
    try:
        return _CONFIG.validate_json((folder / CONFIG).read_bytes())
    except OSError as error:
        raise RunError(f"{folder}: not a run ({error.strerror}: {CONFIG}); make one with `openworld fit`") from None
    except ValidationError as error:
        raise RunError(
            f"{folder / CONFIG}: {first_error(error)}; restore the file from a copy, register the method or backbone "
            f"that it names (docs/recipes.md), or {_LEARN_AGAIN}"
        ) from None


def save(
    folder: Path,
    network: Network | None,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
    buffer: Buffer | None = None,
    pooled: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Write the checkpoint; the previous one is kept next to it. `pooled` are the arrays of pooled statistics."""
    tensors = {} if network is None else {NETWORK + name: value for name, value in network.state_dict().items()}
    tensors |= {
        POOLED + name: torch.from_numpy(np.require(value, requirements=["C", "W"]))
        for name, value in (pooled or {}).items()
    }
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"{OPTIMIZER}{number}.{name}"] = torch.as_tensor(value)
    if buffer is not None:
        tensors |= {f"{BUFFER}pixels": buffer.pixels, f"{BUFFER}class_ids": buffer.class_ids}
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    metadata = {"format": str(FORMAT), "progress": _PROGRESS.dump_json(progress).decode()}
    with replacing(folder / CURRENT, durable=False) as temporary:
        save_file(contiguous, temporary, metadata=metadata)
        sync(temporary)
        if (folder / CURRENT).exists():
            os.replace(folder / CURRENT, folder / PREVIOUS)
    sync(folder)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    path: Path
    progress: Progress
    tensors: dict[str, Tensor]

    def load_network(self, network: Network, classes: list[int]) -> None:
        """Add the tasks learned so far to a fresh network and load their weights; `classes` are those of all tasks."""
        progress = self.progress
        # The learner adds a task that has not begun, from that task's own seed.
        begun = progress.phase == "head" or progress.epoch > 0
        if progress.task + begun > len(classes):
            raise self.misfit(f"{progress.task + begun} tasks; {CONFIG} has {len(classes)}")
        for task in range(progress.task + begun):
            network.add_task(classes[task])
            if task < progress.task + (progress.phase == "head"):
                # Its features are learned and protected.
                network.finish(task)
        prefix = len(NETWORK)
        state = {name[prefix:]: value for name, value in self.tensors.items() if name.startswith(NETWORK)}
        try:
            network.load_learned(state)
        except RuntimeError as error:
            # The first line is a title; each other line is one difference, which may list many names.
            raise self.misfit(shorten("".join(str(error).splitlines()[1:2]) or str(error), 200)) from None

    def buffer(self) -> Buffer | None:
        pixels, class_ids = (self.tensors.get(BUFFER + name) for name in ("pixels", "class_ids"))
        if pixels is None and class_ids is None:
            return None
        if pixels is None or class_ids is None or len(pixels) != len(class_ids):
            raise self.misfit(f"{BUFFER}pixels and {BUFFER}class_ids do not belong together")
        return Buffer(pixels, class_ids)

    def pooled(self) -> dict[str, NDArray[Any]]:
        """The arrays of pooled statistics; none before the first task, or in a run without a trunk."""
        return {
            name.removeprefix(POOLED): value.numpy() for name, value in self.tensors.items() if name.startswith(POOLED)
        }

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in self.tensors.items():
            if name.startswith(OPTIMIZER):
                number, key = name.removeprefix(OPTIMIZER).split(".", 1)
                state.setdefault(int(number), {})[key] = value
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        expected = next(iter(state.values()), {}).keys()
        for place, values in state.items():
            shapes = [parameters[place].shape] if place < len(parameters) else []
            if values.keys() != expected or any(v.ndim and v.shape not in shapes for v in values.values()):
                raise self.misfit(f"the tensors {OPTIMIZER}{place} are not those of a parameter")
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def misfit(self, problem: str) -> RunError:
        """The error for content that does not fit the configuration of the run."""
        has_older = self.path.name == CURRENT and self.path.with_name(PREVIOUS).exists()
        older = f"move it away to continue from {PREVIOUS}, " if has_older else ""
        return RunError(
            f"{self.path}: does not fit {CONFIG}: {problem.rstrip('. ')}; restore the file from a copy, {older}"
            f"or {_LEARN_AGAIN}"
        )


def started(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from, current or previous."""
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
                metadata = stored.metadata() or {}
                if "progress" not in metadata:
                    raise ValueError("not a checkpoint of a run")
                _check_format(path, metadata.get("format", "1"))
                progress = _PROGRESS.validate_json(metadata["progress"])
                return Checkpoint(path, progress, {key: stored.get_tensor(key) for key in stored.keys()})  # noqa: SIM118
        except (SafetensorError, ValueError, OSError) as error:
            problems.append(f"{path}: {error}")
    if not problems:
        raise RunError(f"{folder}: no checkpoint yet; nothing was learned there")
    raise RunError(f"{'; '.join(problems)}; restore the file from a copy, or {_LEARN_AGAIN}")


def load_finished(folder: Path) -> tuple[RunConfig, Checkpoint]:
    """A run that has learned all its tasks; raises a RunError if it has not."""
    config, checkpoint = read_config(folder), load(folder)
    if (learned := checkpoint.progress.task) < len(config.tasks):
        raise RunError(
            f"{folder}: {learned} of {len(config.tasks)} tasks are learned; "
            f"finish it with `openworld fit --out {folder} --resume`"
        )
    return config, checkpoint


def _check_format(path: Path, version: str) -> None:
    if version != str(FORMAT):
        is_newer = version.isdecimal() and int(version) > FORMAT
        age, remedy = ("a newer", "update it") if is_newer else ("an older", _LEARN_AGAIN)
        formats = f"format {version}; this one reads {FORMAT}"
        raise RunError(f"{path}: written by {age} version of openworld ({formats}): {remedy}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write a file of a run, such as a full disk, into a RunError with the command that resumes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"{path}: could not be written ({reason}). What was learned up to the last checkpoint is kept: free some "
            f"space, then resume with `openworld fit --out {path.parent} --resume`"
        ) from error


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file atomically: a reader sees the old one or the new one."""
    replace_file(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
