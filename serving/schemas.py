"""What travels over the wire. `SCHEMA` grows when an old client could no longer read or send it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import RequestError

SCHEMA = 1
UNKNOWN = "unknown"
"""The label of what was never taught. A class may bear the same name: `known` tells the two apart."""


def _says(description: str, example: Any, **rules: Any) -> Any:
    return Field(description=description, examples=[example], **rules)


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelName(_Wire):
    """Which model answered."""

    name: str = _says("preset and method", "digits-hat")
    version: str = _says("digest of the bundle: equal versions give equal answers", "ef3557a7ea7e")


class TaskAnswer(_Wire):
    """What one task says of the image."""

    task: int = _says("number of the task", 2)
    unknown_score: float = _says("-log10 of the task's p-value; higher is more unknown", 1.431)
    p_task: float = _says("probability that the image belongs to this task", 0.904)
    best_label: str = _says("the task's own best guess", "5")


class ClassAnswer(_Wire):
    """What is said of one class."""

    label: str = _says("what a person reads", "5")
    class_id: int = _says("number of the class over all tasks", 5)
    task: int = _says("task that taught the class", 2)
    probability: float = _says("p_within_task * p_task of this class", 0.822)


class Answer(_Wire):
    """What the image shows, or that it shows nothing that was taught."""

    label: str = _says(f'a class label, or "{UNKNOWN}"', UNKNOWN)
    known: bool = _says("false where the label says unknown; unknown_score is then above threshold", False)
    best_guess: str = _says("label of the best class, even where the image is unknown", "5")
    class_id: int = _says("class of the best guess", 5)
    task: int = _says("task of the best guess", 2)
    confidence: float = _says("p_within_task * p_task", 0.822)
    p_within_task: float = _says("probability of the best guess among the classes of its task", 0.91)
    p_task: float = _says("probability of the best guess's task", 0.904)
    p_value: float = _says("p-value of the task that the image fits best, or of the task asked for", 0.0371)
    unknown_score: float = _says("-log10 of p_value; higher is more unknown", 1.431)
    threshold: float = _says("-log10 of alpha; a higher unknown_score is called unknown", 1.301)
    alpha: float = _says("share of known images that may be called unknown", 0.05)
    tasks: tuple[TaskAnswer, ...] = Field(description="what every task says, in order")
    top: tuple[ClassAnswer, ...] = Field(description="the most probable classes, best first")
    model: ModelName


class ImageBody(_Wire):
    """The JSON form of a request."""

    image: str = _says(
        "base64 of the image file; a data: URL is taken too; nothing is ever fetched",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG7buVgAAAABJRU5ErkJggg==",
    )


class ImagesBody(_Wire):
    """The JSON form of a request for several images."""

    images: tuple[str, ...] = _says("each as `image` of a single request", ["iVBORw0KGgo...", "/9j/4AAQSkZJRg..."])


class ErrorDetail(_Wire):
    """What was wrong."""

    code: str = _says("short and stable, for programs", "empty_image")
    message: str = _says(
        "what was wrong, what was got and what is allowed, for people",
        "no image: got 0 bytes; allowed: 1 to 10485760 bytes",
    )
    got: str = _says("what came", "0 bytes")
    allowed: str = _says("what would have been taken", "1 to 10485760 bytes")


class ErrorAnswer(_Wire):
    """Why there is no answer."""

    error: ErrorDetail
    request_id: str | None = _says(
        "the x-request-id of the response, to find it in the log", "5f2c9a7b1e604d83", default=None
    )


def error_answer(error: RequestError, request_id: str | None = None) -> ErrorAnswer:
    """Say why there is no answer."""
    detail = ErrorDetail(code=error.code, message=str(error), got=error.got, allowed=error.allowed)
    return ErrorAnswer(error=detail, request_id=request_id)


class Answers(_Wire):
    """One entry an image, in the order of the request; a bad image spoils only its own."""

    answers: tuple[Answer | ErrorAnswer, ...] = Field(description="an answer, or why there is none")


class TaskDescription(_Wire):
    """One learned task; `labels[i]` belongs to class_id `first_class_id + i`."""

    task: int = _says("number of the task", 2)
    first_class_id: int = _says("class_id of its first label", 4)
    labels: tuple[str, ...] = _says("its classes, in order of class_id", ["4", "5"])


class ImageDescription(_Wire):
    """The pixels that the network sees; images of any size and mode are brought to it."""

    height: int = _says("pixels", 16)
    width: int = _says("pixels", 16)
    mode: Literal["L", "RGB"] = _says("L is greyscale", "L")


class ModelDescription(_Wire):
    """What is being served."""

    schema_: int = Field(alias="schema", description="version of what travels over the wire", examples=[SCHEMA])
    name: str = _says("preset and method", "digits-hat")
    version: str = _says("digest of the bundle: equal versions give equal answers", "ef3557a7ea7e")
    created: str = _says("when the bundle was written", "2024-01-01T00:00:00Z")
    method: str = _says("how it was learned", "hat")
    preset: str = _says("with which settings it was learned", "digits")
    image: ImageDescription
    tasks: tuple[TaskDescription, ...] = Field(description="what was taught, in order")
    score: str = _says("which unknown_score the rule uses", "mahalanobis")
    alpha: float = _says("share of known images that may be called unknown, unless a request says another", 0.05)
    threshold: float = _says("-log10 of alpha", 1.301)
    provider: str = _says("what the network runs on", "CPUExecutionProvider")
    max_batch: int = _says("how many waiting images are run together; 1 where that does not pay", 1)
    metrics: dict[str, Any] = _says(
        "measured before export, on images that were not learned from", {"cil_accuracy": 0.97}
    )
    versions: dict[str, str] = _says("of the packages that made the bundle", {"torch": "2.14.1"})
