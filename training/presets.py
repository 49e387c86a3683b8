"""Presets: named benchmarks, with the settings of the paper where it has them."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from models.backbones import BACKBONES
from models.config import NetworkConfig
from models.masks import MECHANISMS
from models.suggest import unknown_name
from serving.bundle.sections import ImageSpec
from training.config import Augmentation, FeatureLearning, HeadLearning, Preset
from training.options import LOSSES


def _image(side: int, mode: Literal["L", "RGB"]) -> ImageSpec:
    return ImageSpec(height=side, width=side, mode=mode)


def _grey(backbone: str, side: int, **more: Any) -> NetworkConfig:
    return NetworkConfig("hat", backbone, side, side, channels=1, mean=0.0, std=0.5, **more)


def _colour(backbone: str, side: int, **more: Any) -> NetworkConfig:
    return NetworkConfig("hat", backbone, side, side, channels=3, mean=0.5, std=0.25, **more)


def _adam_features(epochs: int, size: int, lr: float, warmup: int, **sparsity: float) -> FeatureLearning:
    """Step 1 for a machine without a GPU, in batches of `size`."""
    return FeatureLearning(epochs, size, optimizer="adam", lr=lr, warmup_epochs=warmup, **sparsity)  # type: ignore[arg-type]


def _paper_features(first: float, later: float, batch_size: int = 128) -> FeatureLearning:
    """The paper's step 1: LARS from 0.1, up by about 0.1 in each of ten epochs, then down a cosine."""
    learning = FeatureLearning(700, batch_size, optimizer="lars", lr=1.0, warmup_epochs=10, warmup_start=0.1)
    return replace(learning, sparsity_first=first, sparsity_later=later)


PAPER_HEAD = HeadLearning(epochs=100, batch_size=128, lr=0.1, optimizer="sgd", milestones=(0.6, 0.75, 0.9))
"""The paper's step 2: SGD without momentum, with a tenth of the learning rate after 60, 75 and 90 of 100 epochs."""

PAPER_LINKS = 32.0
"""The paper's "sparsity 32" of Sup: the number of weights per unit, as in the authors' code, and not a share."""


def _paper(name: str, dataset: str, side: int, base: int, size: int, first: float, later: float) -> Preset:
    """A benchmark of colour images as in the paper: `size` classes per task, HAT's lambdas of first and later tasks."""
    return Preset(
        name=name,
        dataset=dataset,
        image=_image(side, "RGB"),
        network=_colour("resnet18", side, base=base, links=PAPER_LINKS),
        features=_paper_features(first, later),
        head=PAPER_HEAD,
        classes_per_task=size,
        buffer=200 if dataset == "cifar10" else 2000,
    )


def _on_two_cores(paper: Preset, images_per_class: int, first: float, later: float) -> Preset:
    """The same tasks for a machine without a GPU: images of 32x32, a small network, part of the images, few epochs.

    It has strides instead of pooling, and milder augmentation: in so few steps a ResNet would learn nothing.
    """
    return replace(
        paper,
        name=f"{paper.name}-cpu",
        image=_image(32, "RGB"),
        network=_colour("convnet", 32, base=32, hidden=512, hidden_norm=True, pooled=False),
        features=_adam_features(6, 32, lr=1e-3, warmup=1, sparsity_first=first, sparsity_later=later),
        head=HeadLearning(epochs=4, batch_size=64, lr=5e-3),
        augmentation=Augmentation(crop_area=(0.6, 1.0), jitter_share=0.5, hue=0.05, grey_share=0.0),
        images_per_class=images_per_class,
    )


CIFAR10_5T = _paper("cifar10-5t", "cifar10", 32, base=64, size=2, first=1.0, later=0.75)
CIFAR100_10T = _paper("cifar100-10t", "cifar100", 32, base=128, size=10, first=1.5, later=1.0)
CIFAR100_20T = _paper("cifar100-20t", "cifar100", 32, base=128, size=5, first=3.5, later=2.5)
TINY_IMAGENET_5T = _paper("tinyimagenet-5t", "tinyimagenet", 64, base=128, size=40, first=0.75, later=0.75)
TINY_IMAGENET_10T = _paper("tinyimagenet-10t", "tinyimagenet", 64, base=128, size=20, first=1.0, later=0.75)

DIGIT_VIEWS = Augmentation(crop_area=(0.6, 1.0), tilt_degrees=10.0, flip=False, saturation=0.0, hue=0.0)
"""Views that keep a digit readable: no mirroring, no small crops."""

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="digits",
            dataset="digits",
            image=_image(16, "L"),
            network=_grey("convnet", 16, base=32, hidden=128),
            features=_adam_features(20, 32, lr=3e-3, warmup=2),
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
            network=_grey("convnet", 28, base=32, hidden=512, padded=False),
            features=_adam_features(3, 32, lr=1e-3, warmup=1),
            head=HeadLearning(epochs=2, batch_size=32, lr=5e-3),
            augmentation=DIGIT_VIEWS,
            images_per_class=6000,
        ),
        Preset(
            name="images",
            dataset="folder",
            image=_image(32, "RGB"),
            network=_colour("resnet18", 32, base=24),
            features=_adam_features(30, 64, lr=1e-3, warmup=2, sparsity_first=1.0, sparsity_later=0.75),
            head=HeadLearning(epochs=8, batch_size=64, lr=5e-3),
        ),
        Preset(
            name="mnist-5t",
            dataset="mnist",
            image=_image(28, "RGB"),
            network=replace(
                _grey("convnet", 28, base=64, hidden=800, padded=False, norm=False, links=PAPER_LINKS),
                channels=3,
                dropout=(0.2, 0.2, 0.5, 0.5),
            ),
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
"""The smallest side of images for which every backbone has a pixel left in its last layer."""

SUP_FEATURES: dict[str, dict[str, Any]] = {"mnist-5t": {"epochs": 1000, "batch_size": 32}}
"""Presets for which the paper learns the features of Sup with other settings than those of HAT."""

SUP_NETWORK: dict[str, dict[str, Any]] = {"mnist-5t": {"padded": True, "last_kernel": 3, "averaged": True}}
"""Presets for which the network of Sup differs from that of HAT."""


HIDDEN = 512
"""Units of the hidden layer of a backbone that needs one, in a preset whose own backbone has none."""


def choose_preset(
    name: str,
    method: str,
    loss: str = "csi",
    size: int | None = None,
    width: int | None = None,
    backbone: str | None = None,
) -> Preset:
    """The named preset for the named method, learned by the named loss; `size` and `width` are for own images."""
    named: dict[str, tuple[str, Collection[str]]] = {
        "preset": (name, PRESETS),
        "method": (method, MECHANISMS),
        "loss": (loss, LOSSES),
    }
    if backbone is not None:
        named["backbone"] = (backbone, BACKBONES)
    for what, (got, allowed) in named.items():
        if got not in allowed:
            raise ValueError(unknown_name(what, got, allowed))
    preset = PRESETS[name]
    changes: dict[str, Any] = {"loss": loss, **(SUP_FEATURES.get(name, {}) if method == "sup" else {})}
    network = replace(preset.network, method=method, **(SUP_NETWORK.get(name, {}) if method == "sup" else {}))
    if backbone is not None:
        network = replace(network, backbone=backbone, hidden=network.hidden or HIDDEN)
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
