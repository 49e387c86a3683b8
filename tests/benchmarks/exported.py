"""Runs and bundles to measure the exporter by: networks with random weights, since speed depends on none of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from export.checks.quality import Quality
from export.exporter import Exporter
from export.graph.evidence import Evidence
from export.graph.session import GraphQuery
from models.config import NetworkConfig
from models.detectors import mixture as mixtures
from models.masks import supermask as weight_mask
from models.network import Network
from serving.bundle.manifest import Manifest
from serving.bundle.run_verdict import not_measured
from serving.bundle.sections import Cascade, ImageSpec, Origin
from tests.helpers import FEATURES, HEAD, draw_statistics, finish_with_random_statistics, unit_masks
from training.config import Lesson, Preset, RunConfig
from training.learn.decisions import make_decider
from training.run import Run

CLASSES = 2
ENOUGH_IMAGES = 12
"""Instead of some hundred for each component of a class: the shapes are those of the whole, and are fitted faster."""
NO_IMAGES = np.empty((0, 32, 32, 3), np.uint8)
NO_QUALITY = Quality({}, not_measured("random weights"))
NO_ORIGIN = Origin(data=(), commands=())


def resnet(method: str, width: int = 64) -> NetworkConfig:
    """ResNet-18 on 32x32 colour images."""
    return NetworkConfig(
        method=method, backbone="resnet18", height=32, width=32, channels=3, mean=0.5, std=0.25, base=width
    )


def half_open(config: NetworkConfig, tasks: int) -> Network:
    """Every task uses a random half of each layer's units (HAT), or the configured share of the weights (Sup)."""
    torch.manual_seed(0)
    network = Network(config)
    for task in range(tasks):
        network.add_task(CLASSES)
        with torch.no_grad():
            for mask in unit_masks(network):
                opened = torch.randperm(mask.channels) < mask.channels // 2
                mask.logits[task].copy_(torch.where(opened, 1.0, -1.0))
        if task == 0:
            # As many components as a class of many images has.
            with patch.object(mixtures, "ENOUGH_IMAGES", ENOUGH_IMAGES):
                finish_with_random_statistics(network, task, copies=12)
        else:
            # Fitting and sorting take longer than all that is measured, and the values matter to none of it.
            with patch.object(weight_mask, "top_share", about_top_share):
                draw_statistics(network, task)
            network.detectors[task] = copy.deepcopy(network.detectors[0])
            network.ranges[task] = copy.deepcopy(network.ranges[0])
    return network


def about_top_share(scores: Tensor, keep: int) -> Tensor:
    """About the requested number of new scores, which are uniform."""
    sizes = scores.detach().abs()
    return sizes >= sizes.max() * (1 - keep / sizes.numel())


def random_run(config: NetworkConfig, tasks: int, name: str = "benchmark", decision: str = "features") -> Run:
    """A run as if such a network had been learned; every task remembers noise."""
    image = ImageSpec(height=config.height, width=config.width, mode="L" if config.channels == 1 else "RGB")
    labels = tuple(tuple(f"class {CLASSES * task + place}" for place in range(CLASSES)) for task in range(tasks))
    preset = Preset(name=name, dataset="none", image=image, network=config, features=FEATURES, head=HEAD)
    network = half_open(config, tasks)
    decider = make_decider(network, decision, preset.alpha)
    return Run(RunConfig(preset, 0, (Lesson(labels, "none"),)), network, decider, 0.0)


def write_bundle(
    folder: Path, run: Run, precisions: Sequence[str] = ("fp32",), candidates: int | None = None
) -> Manifest:
    """Export without comparing the graph with the network, because untrained networks do not agree."""
    folder.mkdir(parents=True)
    exporter = Exporter(run, folder, Evidence(NO_IMAGES, np.empty(0, int), np.empty(0, int), ()), cascade="off")
    exporter.cascade = Cascade(candidates=candidates, agreement=None, images=0)
    for precision in precisions:
        (golden,) = exporter.write(precision).run([GraphQuery(exporter.golden.pixels)])
        exporter.keep(precision, golden)
    return exporter.seal(NO_QUALITY, None, NO_ORIGIN)
