"""Bundles of a size that matters to a server, with random weights: speed does not depend on what was learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from export.verify import synthetic_images
from models.network import NetworkConfig
from tests.benchmarks.exported import random_run, resnet, write_bundle
from training.classifier import task_said, turned_away
from training.decisions import make_decider
from training.evaluate import Run
from training.presets import PRESETS
from training.tasks import to_device


def resnet_bundle(folder: Path) -> Path:
    """ResNet-18 of width 64 on 32x32 colour images: five tasks of two classes."""
    return _bundle(folder, "resnet18", resnet("hat"), tasks=5)


def digits_bundle(folder: Path) -> Path:
    """The network of the default preset: four tasks of two classes."""
    return _bundle(folder, "digits", PRESETS["digits"].network, tasks=4)


def _bundle(folder: Path, name: str, config: NetworkConfig, tasks: int) -> Path:
    write_bundle(folder, _remembering(random_run(config, tasks, name)))
    return folder


def _remembering(run: Run) -> Run:
    """Half of the images pass for validation images, so that answers of both kinds come up."""
    pixels = to_device(synthetic_images(run.config.preset.image, 40)[::2], torch.device("cpu"))
    for task in range(len(run.network.heads)):
        said, turned = (task_said(run.network, task, images) for images in (pixels, turned_away(pixels)))
        run.network.detector(task).remember(said, turned)
    return replace(run, decider=make_decider(run.network, run.decider.name, run.rule.alpha))
