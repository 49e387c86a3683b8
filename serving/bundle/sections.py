"""The sections of a bundle's manifest."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSpec(Section):
    """The pixels that the graph reads: uint8, [batch, height, width, channels]."""

    height: int = Field(gt=0)
    width: int = Field(gt=0)
    mode: Literal["L", "RGB"]

    @property
    def channels(self) -> int:
        return 1 if self.mode == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels


class Calibration(Section):
    """A task's logits in the outputs are scale * logit + shift."""

    scale: float
    shift: float


class TaskInfo(Section):
    """One learned task; `labels[i]` belongs to class_id `first_class_id + i`."""

    task: int
    first_class_id: int
    labels: tuple[str, ...] = Field(min_length=1)
    calibration: Calibration | None = Field(description="null without a network of its own")
    own_images: int = Field(description="number of its own images that its p-values rest on")
    parts: tuple[str, ...] = Field(description="the files with this task's weights")
    unchanged: bool = Field(description="whether they are byte for byte those of the bundle before this one")


class TrunkInfo(Section):
    """The pre-trained network that encodes images; `sha256` is that of its weights before they became a graph."""

    name: str
    sha256: str
    size: int = Field(gt=0)
    depths: tuple[int, ...] = Field(min_length=1, description="widths of the parts of an encoded vector")

    @property
    def dim(self) -> int:
        """The length of an encoded vector."""
        return sum(self.depths)


class LessonInfo(Section):
    """What was taught at one time: new classes, which are a task, and further examples of classes known before."""

    task: int | None = Field(description="the task of its new classes; null without any")
    images: dict[str, int] = Field(min_length=1, description="examples by label, of new and of extended classes")
    extends: tuple[str, ...] = Field(description="the labels that were known before")
    taught_by: str
    taught_at: str


class ConsolidatedInfo(Section):
    """Classes that were taught and share an adapter since they were consolidated."""

    labels: tuple[str, ...] = Field(min_length=2)
    images: int = Field(gt=0, description="examples that the adapter was learned from and judged by")
    weight: float = Field(gt=0, le=1, description="share of the adapter among these classes")


class Origin(Section):
    """Where a run came from, without places on the machine that learned it."""

    data: tuple[str, ...] = Field(description="the kind of its images, such as folder or cifar10")
    commands: tuple[str, ...] = Field(description="what was run; RUN and FOLDER stand for places")
    export: tuple[str, ...] = Field(default=(), description="the options of `openworld export`, without places")


class Cascade(Section):
    """Whether all tasks process an image in every rotation, or only those that can still win."""

    candidates: int | None = Field(description="how many tasks at most process the other rotations; null: all of them")
    margin: float | None = Field(
        default=None, description="... and only if their score exceeds the best score by at most this; null: no limit"
    )
    seen: float | None = Field(default=None, description="the mean number of such tasks over validation images")
    agreement: float | None = Field(description="share of validation images with the answer of the full evaluation")
    images: int = Field(description="number of validation images that this was measured on")


class FileInfo(Section):
    sha256: str
    size: int
