"""Networks, tasks and runs that are small enough to train in a moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from models.config import NetworkConfig
from models.detectors.score import Features
from models.masks.hat import UnitMask
from models.masks.task_norm import TaskNorm
from models.network import Network
from serving.bundle.sections import ImageSpec
from training import fit
from training.config import Augmentation, FeatureLearning, HeadLearning, Preset
from training.data.datasets import SOURCES
from training.data.images import Images, Source
from training.data.reader import PixelReader, Reader
from training.data.tasks import Batchable, TaskData
from training.learn import fitting, folds, learner
from training.learn.features import learn_features
from training.learn.head import fit_calibration, fit_detectors, fit_head
from training.learn.measurements import task_measurements
from training.presets import PRESETS
from training.store.checkpoint import CURRENT

SIDE = 8
FEATURES = FeatureLearning(epochs=2, batch_size=3, optimizer="adam", lr=0.05, warmup_epochs=0)
HEAD = HeadLearning(epochs=2, batch_size=6, lr=0.05)
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def tiny_config(method: str = "hat", backbone: str = "convnet", **changes: Any) -> NetworkConfig:
    """A network for 8x8 images: grey ones for the convnet, coloured ones for the residual network."""
    channels, hidden = (1, 12) if backbone == "convnet" else (3, 0)
    config = NetworkConfig(
        method=method,
        backbone=backbone,
        height=SIDE,
        width=SIDE,
        channels=channels,
        mean=0.5,
        std=0.25,
        base=4,
        hidden=hidden,
        projection=8,
    )
    return replace(config, **changes)


def tiny_network(method: str = "hat", backbone: str = "convnet", *, seed: int = 0, **changes: Any) -> Network:
    torch.manual_seed(seed)
    return Network(tiny_config(method, backbone, **changes))


def random_pixels(count: int, channels: int, seed: int = 0) -> Tensor:
    """uint8 [count, channels, 8, 8]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, SIDE, SIDE), dtype=torch.uint8, generator=generator)


def random_images(count: int, channels: int, seed: int = 0) -> Tensor:
    """Floats in [0, 1]."""
    return random_pixels(count, channels, seed) / 255


def tiny_task(channels: int, seed: int = 0, classes: int = 2, per_class: int = 3) -> TaskData:
    """Noise images, which a network can memorise."""
    local_classes = torch.arange(classes).repeat(per_class)
    train = Batchable(random_pixels(len(local_classes), channels, seed), local_classes)
    validation = Batchable(random_pixels(len(local_classes), channels, seed + 1000), local_classes)
    return TaskData(tuple(f"class {seed}.{number}" for number in range(classes)), train, validation)


def random_photos(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Greyscale images as evaluations take them, [count, 8, 8, 1]."""
    return (random_images(count, 1, seed).permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=FEATURES.lr)


def learn_task_features(
    network: Network, task: int, data: TaskData, make_optimizer: MakeOptimizer = adam
) -> torch.optim.Optimizer:
    """Run step 1 as training.fit does, without finishing the task; returns the optimiser."""
    optimizer = make_optimizer(network.trainable(task))
    list(learn_features(network, task, data, FEATURES, Augmentation(), optimizer, range(2)))
    return optimizer


def learn_task_head(network: Network, task: int, data: TaskData) -> None:
    """Run step 2 and finish the task."""
    optimizer = adam(list(network.head(task).parameters()))
    list(fit_head(network, task, data, HEAD, Augmentation(), optimizer, range(2)))
    fit_calibration(network, task, data.validation)
    fit_detectors(network, task, data, Augmentation())


def learn_task(network: Network, data: TaskData, make_optimizer: MakeOptimizer = adam) -> int:
    """Train a whole task as training.fit does; returns its number."""
    task = network.add_task(data.classes)
    learn_task_features(network, task, data, make_optimizer)
    network.finish(task)
    learn_task_head(network, task, data)
    return task


def unit_masks(network: Network) -> list[UnitMask]:
    """The gates of a HAT network, in the order of its layers; none of a network of another mechanism."""
    return [mask for mask in network.masks if isinstance(mask, UnitMask)]


def open_gates(network: Network, task: int, share: float) -> None:
    """Random gates for the task: about `share` of every mask's units open, and never none."""
    with torch.no_grad():
        for mask in unit_masks(network):
            opened = torch.rand(mask.channels) < share
            opened[torch.randint(mask.channels, ())] = True
            mask.logits[task].copy_(torch.where(opened, 1.0, -1.0))


def finish_with_random_statistics(network: Network, task: int, copies: int = 4) -> None:
    """Simulate a learned task: norms, head, calibration and detectors with non-default values."""
    draw_statistics(network, task)
    config = network.config
    see(network, task, torch.rand(8, config.channels, config.height, config.width), copies)


def draw_statistics(network: Network, task: int) -> None:
    """The same without the detectors, which need images."""
    with torch.no_grad():
        for norm in (layer.of(task) for layer in network.task_layers() if isinstance(layer, TaskNorm)):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(torch.randn(norm.num_features) * 0.3)
            norm.running_var.copy_(torch.rand(norm.num_features) + 0.5)
            if norm.affine:
                norm.weight.copy_(torch.randn(norm.num_features))
                norm.bias.copy_(torch.randn(norm.num_features))
        network.finish(task)
        head = network.head(task)
        for values in (head.weight, head.bias, head.scale, head.shift):
            values.copy_(torch.randn(values.shape))
        network.eval()


def network_of_two_tasks() -> Network:
    """A network trained on noise, ready for inference."""
    network = tiny_network("hat")
    for number in range(2):
        learn_task(network, tiny_task(1, seed=number))
    return network.eval()


@torch.no_grad()
def see(network: Network, task: int, images: Tensor, copies: int = 1) -> None:
    """Activation ranges, detectors and memory of images that are dealt out to the task's classes.

    Detectors are fitted to every second image, or to so many copies of each with features that differ a little.
    """
    network.activation_ranges(task).record(network.baked_body(task), [network.rotated(network.encode(images))])
    features = network.live_features(images[:: 2 if copies == 1 else 1], task)
    if copies > 1:
        repeated = [values.repeat(1, copies, 1) for values in features]
        features = Features(*(values * (0.5 + torch.rand_like(values)) for values in repeated))
    detector, count = network.detector(task), features.deep.shape[1]
    detector.fit(features, torch.arange(count) % detector.classes, torch.ones(count, 1))
    pixels = (images[1::2] * 255).round().byte()
    detector.remember(task_measurements(network, task, pixels))


LABELS = ("zero", "one", "two", "three")
HELD_OUT = "four"
SPEC = ImageSpec(height=SIDE, width=SIDE, mode="L")


def tiny_source(reader: Reader | None = None, data: str | None = None) -> Source:
    """Ten training and five test images per class: a bright square at a class-specific place, and noise."""
    spec = reader.spec if isinstance(reader, PixelReader) else SPEC
    generator = np.random.default_rng(0)

    def images(per_class: int) -> Images:
        labels = np.repeat([*LABELS, HELD_OUT], per_class)
        pixels = generator.integers(0, 60, (len(labels), *spec.shape), dtype=np.uint8)
        for place, label in enumerate((*LABELS, HELD_OUT)):
            row, column = divmod(place, 2)
            pixels[labels == label, 3 * row : 3 * row + 2, 4 * column : 4 * column + 3] += 180
        return Images(pixels, labels)

    return Source(images(10), images(5), (*LABELS, HELD_OUT))


TINY_PRESET = Preset(
    name="digits",
    dataset="tiny",
    image=SPEC,
    network=tiny_config(),
    features=replace(FEATURES, batch_size=6, lr=0.01),
    head=HEAD,
    augmentation=Augmentation(crop_area=(0.6, 1.0), flip=False),
    held_out=(HELD_OUT,),
    validation_share=0.4,
)
TINY_SAVES = 12
"""Checkpoints of a run of TINY_PRESET: two tasks, each with 2 epochs, its features, 2 epochs, its head."""


def use_tiny_preset(patch: pytest.MonkeyPatch, **feature_changes: Any) -> None:
    """Replace the preset `digits` by TINY_PRESET."""
    preset = replace(TINY_PRESET, features=replace(TINY_PRESET.features, **feature_changes))
    patch.setitem(PRESETS, "digits", preset)
    patch.setitem(SOURCES, "tiny", tiny_source)
    # Each fold fits all detectors again.
    patch.setattr(folds, "FOLDS", 2)
    # Drawing the report takes longer than learning; test_report_page.py draws it.
    patch.setattr(fitting, "write_page", lambda *_: None)


def tiny_run(folder: Path, method: str) -> Path:
    """A finished run of TINY_PRESET."""
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert fit.main(["--method", method, "--out", str(folder)]) == 0
    return folder


class KilledRun(KeyboardInterrupt):
    """The exception that Ctrl-C would raise."""


def kill_at_save(patch: pytest.MonkeyPatch, number: int, *, written: bool) -> None:
    """Interrupt training.fit at its `number`-th checkpoint (1 is the first), after or before it is written."""
    real, count = learner.save, 0

    def save(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count < number or written:
            real(*arguments)
        if count == number:
            raise KilledRun

    patch.setattr(learner, "save", save)


def call_at_save(patch: pytest.MonkeyPatch, number: int, call: Callable[[], None]) -> None:
    """Do something right before training.fit writes its `number`-th checkpoint (1 is the first)."""
    real, count = learner.save, 0

    def save(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            call()
        real(*arguments)

    patch.setattr(learner, "save", save)


def raise_at_call(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Make one call of a function fail, as if the process had died there; all other calls work."""
    real, count = getattr(owner, name), 0

    def fail(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise OSError(f"{name} died")
        return real(*arguments, **named)

    patch.setattr(owner, name, fail)


def run_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / CURRENT)


def assert_same_tensors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names, and bit for bit the same values."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    differing = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not differing, differing


def as_float(values: Any) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
