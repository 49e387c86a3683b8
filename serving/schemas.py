"""What travels over the wire."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from serving.bundle import ImageSpec

UNKNOWN = "unknown"
"""The label of what was never taught. A class may bear the same name: `known` tells the two apart."""


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelName(_Wire):
    name: str
    version: str


class TaskAnswer(_Wire):
    """What one task says of the image."""

    task: int
    unknown_score: float = Field(description="-log10 of the task's p-value; higher is more unknown")
    p_task: float = Field(description="probability that the image belongs to this task")
    best_label: str = Field(description="the task's own best guess")


class ClassAnswer(_Wire):
    """What is said of one class."""

    label: str
    class_id: int
    task: int
    probability: float = Field(description="p_within_task * p_task of this class")


class Answer(_Wire):
    """What the image shows, or that it shows nothing that was taught."""

    label: str = Field(description=f'a class label, or "{UNKNOWN}"')
    known: bool = Field(description="false where the label says unknown; unknown_score is then above threshold")
    best_guess: str = Field(description="label of the best class, even where the image is unknown")
    class_id: int = Field(description="class of the best guess")
    task: int = Field(description="task of the best guess")
    confidence: float = Field(description="p_within_task * p_task")
    p_within_task: float = Field(description="probability of the best guess among the classes of its task")
    p_task: float = Field(description="probability of the best guess's task")
    p_value: float = Field(description="p-value of the task that the image fits best, or of the task asked for")
    unknown_score: float = Field(description="-log10 of p_value; higher is more unknown")
    threshold: float = Field(description="-log10 of alpha; a higher unknown_score is called unknown")
    alpha: float = Field(description="share of known images that may be called unknown")
    tasks: tuple[TaskAnswer, ...]
    top: tuple[ClassAnswer, ...] = Field(description="the most probable classes, best first")
    model: ModelName


class ImageBody(_Wire):
    """The JSON form of a request."""

    image: str = Field(description="base64 of the image file; a data: URL is taken too; nothing is ever fetched")


class ErrorDetail(_Wire):
    code: str = Field(description="short and stable, for programs")
    message: str = Field(description="what was wrong, what was got and what is allowed, for people")
    got: str
    allowed: str


class ErrorAnswer(_Wire):
    error: ErrorDetail


class TaskDescription(_Wire):
    task: int
    first_class_id: int
    labels: tuple[str, ...]


class ModelDescription(_Wire):
    """What is being served."""

    name: str
    version: str
    created: str
    method: str
    preset: str
    image: ImageSpec
    tasks: tuple[TaskDescription, ...]
    score: str = Field(description="which unknown_score the rule uses")
    alpha: float
    threshold: float
    provider: str = Field(description="what the network runs on")
    metrics: dict[str, Any]
    versions: dict[str, str]
