"""The configuration of a run: frozen dataclasses that check their own values."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import ConfigDict

from models.config import NetworkConfig
from models.trunks.trunk import TrunkSpec
from serving.bundle.labels import check_labels
from serving.bundle.sections import ImageSpec

VECTOR = (1, 1)
"""Height and width of the vectors that a trunk encodes images to; they have a channel per number."""
POOLED = "pooled"
"""The method of a run without a learned network, and its decision: statistics that are pooled over all tasks."""
POOLED_AND_LOGITS = "pooled+logits"
"""The decision by pooled statistics that adapters sharpen within each task."""
NO_LOSS = "none"
"""The loss of a run whose statistics are computed in closed form."""


@dataclass(frozen=True)
class Augmentation:
    """How strongly a view may differ from its image. The defaults are those of the paper (CSI)."""

    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    tilt_degrees: float = 0.0
    flip: bool = True
    jitter_share: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1 * 255 / 360
    """The share of the colour circle by which the hue may turn either way. CSI's 0.1 is in units of 255 / 360."""
    grey_share: float = 0.2

    def __post_init__(self) -> None:
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_area is {self.crop_area}; allowed: 0 < low <= high <= 1, such as (0.08, 1.0)")


@dataclass(frozen=True)
class FeatureLearning:
    """Step 1: the body and its masks by CSI's contrastive loss, or body and head together by cross-entropy."""

    epochs: int
    batch_size: int
    optimizer: Literal["adam", "lars"]
    lr: float
    warmup_epochs: int
    temperature: float = 0.07
    max_sharpness: float = 700.0
    sparsity_first: float = 0.25
    sparsity_later: float = 0.1
    loss: Literal["csi", "ce"] = "csi"
    warmup_start: float = 0.0
    """The share of `lr` at which the warm-up starts."""

    def __post_init__(self) -> None:
        _positive(self, "epochs", "batch_size", "lr", "temperature", "max_sharpness")


@dataclass(frozen=True)
class HeadLearning:
    """Step 2: a linear classifier of classes and rotations on the frozen features; not used with cross-entropy."""

    epochs: int
    batch_size: int
    lr: float
    optimizer: Literal["adam", "sgd"] = "adam"
    milestones: tuple[float, ...] = ()
    """After these shares of the epochs the learning rate falls tenfold; if empty, it follows a cosine."""

    def __post_init__(self) -> None:
        _positive(self, "epochs", "batch_size", "lr")


@dataclass(frozen=True)
class Preset:
    """One benchmark: its images, tasks, network and training settings."""

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
    buffer: int = 200
    """The number of images that --buffer stores by default."""

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share is {self.validation_share}; allowed: between 0 and 1, such as 0.1")
        inputs = self.network.height, self.network.width, self.network.channels
        if inputs[:2] != VECTOR and self.image.shape != inputs:
            raise ValueError(f"images are {self.image.shape}, but the network is for images of another shape")
        seen, vectors = self.network.rotations, self.network.projection
        if (self.features.loss == "csi") != (seen > 1) or (self.features.loss == "csi") != (vectors > 0):
            raise ValueError(
                f"loss is {self.features.loss!r} with {seen} rotations and a projection to {vectors} dimensions; "
                "allowed: 'csi' with 4 rotations and a projection, 'ce' with 1 and none"
            )


Tasks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Lesson:
    """Tasks that were given to a run in one command, and the source of their images."""

    tasks: Tasks
    dataset: str
    data: str | None = None
    """The folder, or the URL of the quarantine without its password."""
    images: str | None = None
    """For a quarantine: where its image files are, if not next to the database."""
    items: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For a quarantine: the ids of the images of each class, since labelling continues while a run is learned."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for task in self.tasks for label in task)


@dataclass(frozen=True)
class RunConfig:
    """A preset with the choices of the command line: the content of RUN/config.json."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    """Unknown fields are errors, in the parts of the configuration as well."""

    preset: Preset
    seed: int
    lessons: tuple[Lesson, ...]
    buffer: int = 0
    """The number of training images that are stored for the correction +c; 0: none."""
    trunk: TrunkSpec | None = None
    """The pre-trained network whose encoded vectors are learned from; None: the network learns from pixels."""
    quick: bool = False
    """Statistics of encoded vectors only: no adapters are learned."""

    def __post_init__(self) -> None:
        self._check_trunk()
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; allowed: 0 or more")
        if self.buffer < 0:
            raise ValueError(f"buffer is {self.buffer}; allowed: 0 or more images")
        labels = self.labels
        if 0 < self.buffer < len(labels):
            raise ValueError(f"buffer is {self.buffer}; allowed: 0, or one or more per class ({len(labels)})")
        check_labels(labels)
        if not self.lessons or not all(lesson.tasks and all(lesson.tasks) for lesson in self.lessons):
            raise ValueError('every task needs at least one class, such as "cat,dog; ship,truck"')

    def _check_trunk(self) -> None:
        network, image = self.preset.network, self.preset.image
        reads = network.height, network.width, network.channels
        if self.trunk is None:
            if self.quick or reads != image.shape:
                raise ValueError(
                    "a network for vectors, or no network, needs a trunk that encodes images: give --trunk"
                )
            return
        side, dim = self.trunk.size, self.trunk.dim
        if image.shape != (side, side, 3) or reads != (*VECTOR, dim):
            raise ValueError(
                f"trunk {self.trunk.name} encodes images {(side, side, 3)} to vectors {(*VECTOR, dim)}; got images "
                f"{image.shape} and a network for {reads}"
            )
        if self.buffer:
            raise ValueError("a run with a trunk stores no images: leave out --buffer")

    @property
    def tasks(self) -> Tasks:
        """The classes of every task, in the order in which they are learned."""
        return tuple(task for lesson in self.lessons for task in lesson.tasks)

    @property
    def labels(self) -> tuple[str, ...]:
        """class_id -> label."""
        return tuple(label for task in self.tasks for label in task)

    def lesson_of(self, task: int) -> Lesson:
        return [lesson for lesson in self.lessons for _ in lesson.tasks][task]

    @property
    def method(self) -> str:
        return POOLED if self.quick else self.preset.network.method

    @property
    def loss(self) -> str:
        return NO_LOSS if self.quick else self.preset.features.loss

    @property
    def system(self) -> str:
        """The method for file names: hat, hat-ce and so on."""
        return self.method if self.loss in ("csi", NO_LOSS) else f"{self.method}-{self.loss}"


def system_title(method: str, loss: str) -> str:
    """The method as in the paper: HAT+CSI, or HAT with cross-entropy."""
    name = {"hat": "HAT", "sup": "Sup", POOLED: "pooled statistics"}.get(method, method)
    return f"{name}+CSI" if loss == "csi" else name


def _positive(settings: object, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) <= 0:
            raise ValueError(f"{type(settings).__name__}.{name} is {value}; allowed: above 0")
