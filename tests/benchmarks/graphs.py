"""Bundles of realistic size with random weights: speed does not depend on the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from export.__main__ import main as export
from export.checks.parity import synthetic_images
from models.config import NetworkConfig
from tests.benchmarks.exported import random_run, resnet, write_bundle
from tests.helpers_photos import write_photos
from training.data.tasks import to_device
from training.fit import main as fit
from training.learn.decisions import make_decider
from training.learn.measurements import task_measurements
from training.presets import PRESETS
from training.run import Run


def resnet_bundle(folder: Path) -> Path:
    """ResNet-18 of width 64 on 32x32 colour images: five tasks of two classes."""
    return _bundle(folder, "resnet18", resnet("hat"), tasks=5)


def digits_bundle(folder: Path) -> Path:
    """The network of the default preset: four tasks of two classes."""
    return _bundle(folder, "digits", PRESETS["digits"].network, tasks=4)


def photos_bundle(folder: Path) -> Path:
    """EfficientNet-Lite0 at 224 x 224 with its real weights, and statistics of drawn photos of four classes."""
    counts = dict.fromkeys(("disc", "stripes", "checks", "triangle"), 24)
    photos, run = write_photos(folder.parent / "photos", **counts), folder.parent / "run"
    assert fit(["--data", str(photos), "--classes-per-task", "2", "--quick", "--out", str(run)]) == 0
    assert export([str(run), "--out", str(folder)]) == 0
    return folder


def _bundle(folder: Path, name: str, config: NetworkConfig, tasks: int) -> Path:
    write_bundle(folder, _remembering(random_run(config, tasks, name)))
    return folder


def _remembering(run: Run) -> Run:
    """Half of the images serve as validation images, so that both known and unknown answers occur."""
    pixels = to_device(synthetic_images(run.config.preset.image, 40)[::2], torch.device("cpu"))
    for task in range(len(run.network.heads)):
        run.network.detector(task).remember(task_measurements(run.network, task, pixels))
    return replace(run, decider=make_decider(run.network, run.decider.name, run.rule.alpha))
