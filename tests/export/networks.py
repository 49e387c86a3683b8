"""Networks with random weights as if they had been learned, their graphs, and runs around them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export import exporter
from export.graph.assemble import GraphPlan, write_graph
from export.graph.baked_task import BakedTask, bake_task
from export.graph.evidence import Evidence
from models.detectors import mixture as mixtures
from models.detectors.detector import mean_over_rotations
from models.detectors.score import Features
from models.detectors.task_scorer import TaskScorer
from models.masks.task_norm import TaskNorm
from models.network import Network
from serving.bundle.run_verdict import PartVerdict, summarise
from serving.bundle.sections import ImageSpec
from tests.helpers import (
    TINY_PRESET,
    draw_statistics,
    open_gates,
    see,
    tiny_network,
)
from training.config import Lesson, RunConfig
from training.learn.correction import Correction
from training.learn.decisions import Decider, make_decider
from training.run import Run

SIZES = {"convnet": (2, 3, 1), "resnet18": (3, 1)}
"""Number of classes per task; they differ."""
SHARES = (0.6, 0.8, 1.0)
STEADY = "mahalanobis"
"""A score that is robust to rounding, even if random features all point in the same direction."""


@cache
def learned(method: str = "hat", backbone: str = "convnet", sizes: tuple[int, ...] = ()) -> Network:
    """Tasks with these numbers of classes, each with its own share of live channels. Cached: do not change it.

    Classes of the convnet are mixtures of several Gaussians, those of the residual network are one.
    """
    network = tiny_network(method, backbone, base=8)
    with pytest.MonkeyPatch.context() as patch:
        if backbone == "convnet":
            patch.setattr(mixtures, "ENOUGH_IMAGES", 27)
        for number, classes in enumerate(sizes or SIZES[backbone]):
            learn_at_random(network, classes, SHARES[number % len(SHARES)])
    return network


def learn_at_random(network: Network, classes: int, share: float = 0.8, count: int = 320) -> None:
    task = network.add_task(classes)
    open_gates(network, task, share)
    finish_at_random(network, task, count)


def finish_at_random(network: Network, task: int, count: int = 320) -> None:
    """Simulate a task learned from `count` images of `pixels_for`."""
    draw_statistics(network, task)
    with torch.no_grad():
        images = torch.from_numpy(pixels_for(network, count, seed=7)).permute(0, 3, 1, 2) / 255
        settle_norms(network, task, images)
        see(network, task, images)


def settle_norms(network: Network, task: int, images: Tensor) -> None:
    """Set the statistics of a task's norms to those of the images: otherwise random shifts hide the image."""

    def settle(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(layer, TaskNorm)
        norm = layer.of(task)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(inputs[0].mean(dim=(0, 2, 3)))
        norm.running_var.copy_(inputs[0].var(dim=(0, 2, 3)).clamp(min=0.1))

    layers = [layer for layer in network.task_layers() if isinstance(layer, TaskNorm)]
    hooks = [layer.register_forward_pre_hook(settle) for layer in layers]
    network.features(images, task)
    for hook in hooks:
        hook.remove()


def with_another_task(network: Network, classes: int = 2) -> Network:
    grown = copy.deepcopy(network)
    learn_at_random(grown, classes)
    return grown


def pixels_for(network: Network, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Noise between a minimum and a maximum value that differ per image."""
    config, generator = network.config, np.random.default_rng(seed)
    noise = generator.integers(0, 256, (count, config.height, config.width, config.channels))
    dark, bright = np.sort(generator.uniform(0, 1, (2, count, 1, 1, 1)), axis=0)
    return np.ascontiguousarray((255 * dark + noise * (bright - dark)).astype(np.uint8))


@cache
def decider_for(network: Network, decision: str = STEADY) -> Decider:
    """Tasks remember random images, so most random images are known, and the best task varies."""
    corrections = [Correction(0.5 + task, 0.3 * task) for task in range(len(network.heads))]
    return make_decider(network, decision, 0.05, corrections)


@torch.no_grad()
def baked_outputs(network: Network, scorers: Sequence[TaskScorer], pixels: NDArray[np.uint8]) -> list[Tensor]:
    """The outputs of the baked sub-networks: logits and distances, each [n, classes of all tasks]."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    rotated = network.rotated(network.encode(images))
    outputs = [_outputs(bake_task(network, scorers, task), rotated) for task in range(len(network.heads))]
    return [torch.cat(columns, dim=1) for columns in zip(*outputs, strict=True)]


def _outputs(task: BakedTask, rotated: Tensor) -> tuple[Tensor, Tensor]:
    maps = task.body[: task.tap.stage + 1](rotated)
    deep = task.body[task.tap.stage + 1 :](maps)
    features = Features(*(flat.view(len(task.head.weight), -1, flat.shape[1]) for flat in (task.tap.read(maps), deep)))
    measured = {"logits": task.head.each_rotation(features.deep), **task.detector.measure(features)}
    means = mean_over_rotations(measured)
    return task.scorer.logits(means), task.scorer.distances(means)


def image_spec(network: Network) -> ImageSpec:
    config = network.config
    return ImageSpec(height=config.height, width=config.width, mode="L" if config.channels == 1 else "RGB")


def written(
    folder: Path,
    network: Network,
    precision: str = "fp32",
    candidates: int | None = None,
    decision: str = STEADY,
    margin: float | None = None,
) -> Path:
    """A folder with the graph of a network in it."""
    config, decider = network.config, decider_for(network, decision)
    plan = GraphPlan(
        image=image_spec(network),
        mean=config.mean,
        std=config.std,
        rule=decider.rule,
        precision=precision,
        candidates=candidates,
        metadata={"name": "tiny"},
        margin=margin,
    )
    write_graph(folder, partial(bake_task, network, decider.scorers), plan)
    return folder


def run_of(network: Network, decider: Decider | None = None) -> Run:
    """A run with exactly this network."""
    labels = iter(f"class {number}" for number in range(1000))
    tasks = tuple(tuple(next(labels) for _ in range(int(head.classes))) for head in network.heads)  # type: ignore[arg-type]
    preset = replace(TINY_PRESET, network=network.config, image=image_spec(network))
    return Run(RunConfig(preset, 0, (Lesson(tasks, "tiny"),)), network, decider or decider_for(network), 0.0)


def evidence_for(network: Network, count: int = 40, seed: int = 1) -> Evidence:
    """Random images, distributed over the tasks."""
    tasks = np.arange(count) % len(network.heads)
    first = np.cumsum([0, *(int(head.classes) for head in network.heads)])  # type: ignore[arg-type]
    return Evidence(pixels_for(network, count, seed), tasks, first[tasks], ())


GOOD = summarise(*(PartVerdict(grade="good", numbers=f"{name} 100 %") for name in ("WP", "TP", "AUROC")))
"""A verdict as of a run that works."""
NO_EVIDENCE = Evidence(np.empty((0, 8, 8, 1), np.uint8), np.empty(0, int), np.empty(0, int), ("task 0: no images",))


def put_run(patch: pytest.MonkeyPatch, folder: Path, run: Run, evidence: Evidence = NO_EVIDENCE) -> Path:
    """A folder that the exporter opens as this run, with this evidence."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = {"cil_accuracy": 0.5, "decision": run.decider.name, "verdict": GOOD.model_dump()}
    (folder / "metrics.json").write_text(json.dumps(measured))

    def open_run(*_: Any) -> Run:
        return run

    patch.setattr(exporter, "open_run", open_run)
    patch.setattr(exporter, "gather", lambda *_: evidence)
    return folder
