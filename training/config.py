"""Presets: everything that a run is made of, frozen and checked when it is written down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from models.network import NetworkConfig
from serving.bundle import ImageSpec
from training.augment import Augmentation

METHODS = ("hat", "sup")


@dataclass(frozen=True)
class FeatureLearning:
    """Step 1: the supervised contrastive loss on the body and its masks."""

    epochs: int
    batch_size: int
    optimizer: Literal["adam", "lars"]
    lr: float
    warmup_epochs: int
    temperature: float = 0.07
    max_sharpness: float = 700.0
    sparsity_first: float = 0.25
    sparsity_later: float = 0.1

    def __post_init__(self) -> None:
        _positive(self, "epochs", "batch_size", "lr", "temperature", "max_sharpness")


@dataclass(frozen=True)
class HeadLearning:
    """Step 2: a linear classifier of classes and rotations on the frozen features."""

    epochs: int
    batch_size: int
    lr: float

    def __post_init__(self) -> None:
        _positive(self, "epochs", "batch_size", "lr")


@dataclass(frozen=True)
class Preset:
    """One benchmark: its images, its tasks, its network and how it is learned."""

    name: str
    dataset: str
    image: ImageSpec
    network: NetworkConfig
    features: FeatureLearning
    head: HeadLearning
    augmentation: Augmentation = field(default_factory=Augmentation)
    classes_per_task: int = 2
    held_out: tuple[str, ...] = ()
    images_per_class: int | None = None
    validation_share: float = 0.1
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share is {self.validation_share}; allowed: between 0 and 1, such as 0.1")
        if self.image.shape != (self.network.height, self.network.width, self.network.channels):
            raise ValueError(f"images are {self.image.shape}, but the network was built for other ones")


Tasks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Lesson:
    """Tasks that were taught at one time, and where their images are."""

    tasks: Tasks
    dataset: str
    data: str | None = None
    """The folder, or the URL of the quarantine without its password."""
    images: str | None = None
    """Of a quarantine: where its image files are, if not beside it."""
    items: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of a quarantine: the images of each class by number, since people go on labelling while a run is learned."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for task in self.tasks for label in task)


@dataclass(frozen=True)
class RunConfig:
    """A preset with what the command line chose: what RUN/config.json holds."""

    preset: Preset
    seed: int
    lessons: tuple[Lesson, ...]

    def __post_init__(self) -> None:
        labels = self.labels
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"each class belongs to one task; given twice: {', '.join(twice)}")
        if not self.lessons or not all(lesson.tasks and all(lesson.tasks) for lesson in self.lessons):
            raise ValueError('every task needs at least one class, such as "cat,dog; ship,truck"')

    @property
    def tasks(self) -> Tasks:
        """The classes of every task, in the order in which they are learned."""
        return tuple(task for lesson in self.lessons for task in lesson.tasks)

    @property
    def labels(self) -> tuple[str, ...]:
        """class_id -> label."""
        return tuple(label for task in self.tasks for label in task)

    def lesson_of(self, task: int) -> Lesson:
        """The lesson that teaches a task."""
        return [lesson for lesson in self.lessons for _ in lesson.tasks][task]

    @property
    def method(self) -> str:
        return self.preset.network.method


def _positive(settings: object, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) <= 0:
            raise ValueError(f"{type(settings).__name__}.{name} is {value}; allowed: above 0")


def _image(side: int, mode: Literal["L", "RGB"]) -> ImageSpec:
    return ImageSpec(height=side, width=side, mode=mode)


def _convnet(side: int, base: int, hidden: int, **more: float | bool) -> NetworkConfig:
    shape = {"height": side, "width": side, "channels": 1, "mean": 0.0, "std": 0.5}
    return NetworkConfig(method="hat", backbone="convnet", base=base, hidden=hidden, **shape, **more)  # type: ignore[arg-type]


def _resnet(side: int, base: int) -> NetworkConfig:
    shape = {"height": side, "width": side, "channels": 3, "mean": 0.5, "std": 0.25}
    return NetworkConfig(method="hat", backbone="resnet18", base=base, **shape)  # type: ignore[arg-type]


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
        ),
        Preset(
            name="mnist-5t-cpu",
            dataset="mnist",
            image=_image(28, "L"),
            network=_convnet(28, base=64, hidden=800, padded=False),
            features=FeatureLearning(epochs=8, batch_size=64, optimizer="adam", lr=1e-3, warmup_epochs=1),
            head=HeadLearning(epochs=6, batch_size=64, lr=5e-3),
            augmentation=DIGIT_VIEWS,
            images_per_class=1500,
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
    )
}


def choose_preset(name: str, method: str) -> Preset:
    """The named preset for the named method."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(METHODS)}")
    preset = PRESETS[name]
    return replace(preset, network=replace(preset.network, method=method))
