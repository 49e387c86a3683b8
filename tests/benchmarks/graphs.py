"""Bundles of a size that matters, with random weights: speed does not depend on what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from export.bake import bake
from export.graph import to_onnx
from export.verify import open_session, run_graph, synthetic_images
from export.write import write_directory
from models.network import Network, NetworkConfig
from serving.bundle import Calibration, Golden, ImageSpec, TaskInfo, seal
from serving.decision import Rule, TaskRule, scores_of_task
from tests.helpers import finish_with_random_statistics
from training.config import PRESETS

RESNET = NetworkConfig(method="hat", backbone="resnet18", height=32, width=32, channels=3, mean=0.5, std=0.25, base=64)


def resnet_bundle(folder: Path) -> Path:
    """ResNet-18 of width 64 on 32x32 colour images: five tasks of two classes."""
    return _bundle(folder, "resnet18", RESNET, tasks=5)


def digits_bundle(folder: Path) -> Path:
    """The network of the default preset: four tasks of two classes."""
    return _bundle(folder, "digits", PRESETS["digits"].network, tasks=4)


def _bundle(folder: Path, name: str, config: NetworkConfig, tasks: int) -> Path:
    image = ImageSpec(height=config.height, width=config.width, mode="L" if config.channels == 1 else "RGB")
    graph = to_onnx(bake(_half_open(config, tasks)), image, {"name": name})
    pixels = synthetic_images(image, 40)
    outputs = run_graph(open_session(graph), pixels)
    # Half of the images pass for validation images, so that answers of both kinds come up.
    rule = Rule(tasks=tuple(_task_rule(outputs, task) for task in range(tasks)))
    golden = Golden(pixels[:4], {key: values[:4] for key, values in outputs.items()})
    _, files = seal(
        rule,
        graph,
        golden,
        name=name,
        created="2024-01-01T00:00:00Z",
        method="hat",
        preset="benchmark",
        seed=0,
        image=image,
        tasks=tuple(_task_info(task) for task in range(tasks)),
        metrics={},
        versions={},
        verification={},
    )
    write_directory(folder, files)
    return folder


def _task_info(task: int) -> TaskInfo:
    labels = (f"{2 * task}", f"{2 * task + 1}")
    return TaskInfo(task=task, first_class_id=2 * task, labels=labels, calibration=Calibration(scale=1, shift=0))


def _half_open(config: NetworkConfig, tasks: int) -> Network:
    """Every task uses a random half of each layer's units."""
    torch.manual_seed(0)
    network = Network(config)
    for task in range(tasks):
        network.add_task(2)
        with torch.no_grad():
            for mask in network.unit_masks():
                opened = torch.randperm(mask.channels) < mask.channels // 2
                mask.logits[task].copy_(torch.where(opened, 1.0, -1.0))
        finish_with_random_statistics(network, task)
    return network


def _task_rule(outputs: dict[str, Any], task: int) -> TaskRule:
    own = slice(2 * task, 2 * task + 2)
    return TaskRule.fit(scores_of_task("mahalanobis", outputs["logits"][::2, own], outputs["distances"][::2, own]), 2)
