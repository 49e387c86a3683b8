"""Presets: the benchmarks that come with names, and what the paper prints of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from models.network import NetworkConfig
from serving.bundle import ImageSpec
from training.augment import Augmentation
from training.config import LOSSES, METHODS, FeatureLearning, HeadLearning, Preset


def _image(side: int, mode: Literal["L", "RGB"]) -> ImageSpec:
    return ImageSpec(height=side, width=side, mode=mode)


def _convnet(side: int, base: int, hidden: int, **more: float | bool) -> NetworkConfig:
    """For grey images."""
    shape = {"height": side, "width": side, "channels": 1, "mean": 0.0, "std": 0.5}
    return NetworkConfig(method="hat", backbone="convnet", base=base, hidden=hidden, **shape, **more)  # type: ignore[arg-type]


def _resnet(side: int, base: int, **more: float) -> NetworkConfig:
    shape = {"height": side, "width": side, "channels": 3, "mean": 0.5, "std": 0.25}
    return NetworkConfig(method="hat", backbone="resnet18", base=base, **shape, **more)  # type: ignore[arg-type]


def _paper_features(first: float, later: float, epochs: int = 700, batch_size: int = 128) -> FeatureLearning:
    """The paper's step 1: LARS from 0.1, up by about 0.1 in each of ten epochs, then down a cosine."""
    return FeatureLearning(
        epochs=epochs,
        batch_size=batch_size,
        optimizer="lars",
        lr=1.0,
        warmup_epochs=10,
        warmup_start=0.1,
        sparsity_first=first,
        sparsity_later=later,
    )


PAPER_HEAD = HeadLearning(epochs=100, batch_size=128, lr=0.1, optimizer="sgd", milestones=(0.6, 0.75, 0.9))
"""The paper's step 2: SGD without momentum, with a tenth of the learning rate after 60, 75 and 90 of 100 epochs."""

PAPER_LINKS = 32.0
"""The paper's "sparsity 32" of Sup: so many weights a unit, as the authors' own code has it, and no share."""


def _paper(name: str, dataset: str, side: int, base: int, size: int, first: float, later: float) -> Preset:
    """A benchmark of coloured images as the paper runs it: `size` classes a task, HAT's lambdas of its tasks."""
    return Preset(
        name=name,
        dataset=dataset,
        image=_image(side, "RGB"),
        network=_resnet(side, base, links=PAPER_LINKS),
        features=_paper_features(first, later),
        head=PAPER_HEAD,
        classes_per_task=size,
        buffer=200 if dataset == "cifar10" else 2000,
    )


def _on_two_cores(paper: Preset, images_per_class: int, first: float, later: float) -> Preset:
    """The same tasks for a machine without a GPU: images of 32x32, a small network, part of the images, few epochs.

    Strides in place of pooling and milder views: in the steps that there is time for, a ResNet learns nothing.
    """
    small = _convnet(32, base=32, hidden=512, hidden_norm=True, pooled=False)
    return replace(
        paper,
        name=f"{paper.name}-cpu",
        image=_image(32, "RGB"),
        network=replace(small, channels=3, mean=0.5, std=0.25),
        features=FeatureLearning(
            epochs=6,
            batch_size=32,
            optimizer="adam",
            lr=1e-3,
            warmup_epochs=1,
            sparsity_first=first,
            sparsity_later=later,
        ),
        head=HeadLearning(epochs=2, batch_size=64, lr=5e-3),
        augmentation=Augmentation(crop_area=(0.6, 1.0), jitter_share=0.5, hue=0.05, grey_share=0.0),
        images_per_class=images_per_class,
    )


CIFAR10_5T = _paper("cifar10-5t", "cifar10", 32, base=64, size=2, first=1.0, later=0.75)
CIFAR100_10T = _paper("cifar100-10t", "cifar100", 32, base=128, size=10, first=1.5, later=1.0)
CIFAR100_20T = _paper("cifar100-20t", "cifar100", 32, base=128, size=5, first=3.5, later=2.5)
TINY_IMAGENET_5T = _paper("tinyimagenet-5t", "tinyimagenet", 64, base=128, size=40, first=0.75, later=0.75)
TINY_IMAGENET_10T = _paper("tinyimagenet-10t", "tinyimagenet", 64, base=128, size=20, first=1.0, later=0.75)


DIGIT_VIEWS = Augmentation(crop_area=(0.6, 1.0), tilt_degrees=10.0, flip=False, saturation=0.0, hue=0.0)
"""A digit stays the digit it is: no mirror, no deep crop."""

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="digits",
            dataset="digits",
            image=_image(16, "L"),
            network=_convnet(16, base=32, hidden=128),
            features=FeatureLearning(epochs=20, batch_size=32, optimizer="adam", lr=3e-3, warmup_epochs=2),
            head=HeadLearning(epochs=20, batch_size=32, lr=1e-2),
            augmentation=DIGIT_VIEWS,
            held_out=("8", "9"),
            validation_share=0.2,
            buffer=160,
        ),
        Preset(
            name="mnist-5t-cpu",
            dataset="mnist",
            image=_image(28, "L"),
            network=_convnet(28, base=32, hidden=512, padded=False),
            features=FeatureLearning(epochs=3, batch_size=32, optimizer="adam", lr=1e-3, warmup_epochs=1),
            head=HeadLearning(epochs=1, batch_size=32, lr=5e-3),
            augmentation=DIGIT_VIEWS,
            images_per_class=6000,
        ),
        Preset(
            name="images",
            dataset="folder",
            image=_image(32, "RGB"),
            network=_resnet(32, base=24),
            features=FeatureLearning(
                epochs=30,
                batch_size=64,
                optimizer="adam",
                lr=1e-3,
                warmup_epochs=2,
                sparsity_first=1.0,
                sparsity_later=0.75,
            ),
            head=HeadLearning(epochs=8, batch_size=64, lr=5e-3),
        ),
        Preset(
            name="mnist-5t",
            dataset="mnist",
            image=_image(28, "L"),
            network=_convnet(28, base=64, hidden=800, padded=False, norm=False, dropout=0.2, links=PAPER_LINKS),
            features=_paper_features(0.25, 0.1, batch_size=256),
            head=PAPER_HEAD,
        ),
        CIFAR10_5T,
        CIFAR100_10T,
        CIFAR100_20T,
        TINY_IMAGENET_5T,
        TINY_IMAGENET_10T,
        _on_two_cores(CIFAR10_5T, images_per_class=2500, first=0.25, later=0.1),
        _on_two_cores(CIFAR100_10T, images_per_class=250, first=1.5, later=1.0),
        _on_two_cores(CIFAR100_20T, images_per_class=250, first=3.5, later=2.5),
        _on_two_cores(TINY_IMAGENET_5T, images_per_class=125, first=0.75, later=0.75),
        _on_two_cores(TINY_IMAGENET_10T, images_per_class=125, first=1.0, later=0.75),
    )
}

LEAST_SIZE = 8
"""The side of the smallest images that every backbone has a pixel left of."""

SUP_FEATURES: dict[str, dict[str, Any]] = {"mnist-5t": {"epochs": 1000, "batch_size": 32}}
"""Where the paper learns the features of Sup otherwise than those of HAT."""


def choose_preset(
    name: str, method: str, loss: str = "csi", size: int | None = None, width: int | None = None
) -> Preset:
    """The named preset for the named method, learned by the named loss; `size` and `width` are for own images."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(METHODS)}")
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}; allowed: {', '.join(LOSSES)}")
    preset = PRESETS[name]
    changes: dict[str, Any] = {"loss": loss, **(SUP_FEATURES.get(name, {}) if method == "sup" else {})}
    network = replace(preset.network, method=method)
    if loss == "ce":
        network = replace(network, rotations=1, projection=0)
    image = preset.image
    if size is not None:
        if size < LEAST_SIZE:
            raise ValueError(f"size is {size}; allowed: {LEAST_SIZE} or more pixels")
        image = _image(size, image.mode)
        network = replace(network, height=size, width=size)
    if width is not None:
        if width < 1:
            raise ValueError(f"width is {width}; allowed: 1 or more channels")
        network = replace(network, base=width)
    return replace(preset, image=image, network=network, features=replace(preset.features, **changes))
