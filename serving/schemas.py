"""What travels over the wire. `SCHEMA` grows when an old client could no longer read or send it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import RequestError

SCHEMA = 1
UNKNOWN = "unknown"
"""The label of what was never taught. A class may bear the same name: `known` tells the two apart."""


def says(description: str, example: Any, **rules: Any) -> Any:
    """A field, as the description of the API shows it."""
    return Field(description=description, examples=[example], **rules)


class Wire(BaseModel):
    """What comes or goes as JSON; nothing that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelName(Wire):
    """Which model answered."""

    name: str = says("preset and method", "digits-hat")
    version: str = says("digest of the bundle: equal versions give equal answers", "ef3557a7ea7e")


class TaskAnswer(Wire):
    """What one task says of the image."""

    task: int = says("number of the task", 2)
    unknown_score: float = says("-log10 of the task's p-value; higher is more unknown", 1.431)
    p_task: float = says("probability that the image belongs to this task", 0.904)
    best_label: str = says("the task's own best guess", "5")


class ClassAnswer(Wire):
    """What is said of one class."""

    label: str = says("what a person reads", "5")
    class_id: int = says("number of the class over all tasks", 5)
    task: int = says("task that taught the class", 2)
    probability: float = says("p_within_task * p_task of this class", 0.822)


class Answer(Wire):
    """What the image shows, or that it shows nothing that was taught."""

    label: str = says(f'a class label, or "{UNKNOWN}"', UNKNOWN)
    known: bool = says("false where the label says unknown; unknown_score is then above threshold", False)
    best_guess: str = says("label of the best class, even where the image is unknown", "5")
    class_id: int = says("class of the best guess", 5)
    task: int = says("task of the best guess", 2)
    confidence: float = says("p_within_task * p_task", 0.822)
    p_within_task: float = says("probability of the best guess among the classes of its task", 0.91)
    p_task: float = says("probability of the best guess's task", 0.904)
    p_value: float = says("p-value of the task that the image fits best, or of the task asked for", 0.0371)
    unknown_score: float = says("-log10 of p_value; higher is more unknown", 1.431)
    threshold: float = says("-log10 of alpha; a higher unknown_score is called unknown", 1.301)
    alpha: float = says("share of known images that may be called unknown", 0.05)
    tasks: tuple[TaskAnswer, ...] = Field(description="what every task says, in order")
    top: tuple[ClassAnswer, ...] = Field(description="the most probable classes, best first")
    model: ModelName


class ImageBody(Wire):
    """The JSON form of a request."""

    image: str = says(
        "base64 of the image file; a data: URL is taken too; nothing is ever fetched",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG7buVgAAAABJRU5ErkJggg==",
    )


class ImagesBody(Wire):
    """The JSON form of a request for several images."""

    images: tuple[str, ...] = says("each as `image` of a single request", ["iVBORw0KGgo...", "/9j/4AAQSkZJRg..."])


class ErrorDetail(Wire):
    """What was wrong."""

    code: str = says("short and stable, for programs", "empty_image")
    message: str = says(
        "what was wrong, what was got and what is allowed, for people",
        "no image: got 0 bytes; allowed: 1 to 10485760 bytes",
    )
    got: str = says("what came", "0 bytes")
    allowed: str = says("what would have been taken", "1 to 10485760 bytes")


class ErrorAnswer(Wire):
    """Why there is no answer."""

    error: ErrorDetail
    request_id: str | None = says(
        "the x-request-id of the response, to find it in the log", "5f2c9a7b1e604d83", default=None
    )


def error_answer(error: RequestError, request_id: str | None = None) -> ErrorAnswer:
    """Say why there is no answer."""
    detail = ErrorDetail(code=error.code, message=str(error), got=error.got, allowed=error.allowed)
    return ErrorAnswer(error=detail, request_id=request_id)


class Answers(Wire):
    """One entry an image, in the order of the request; a bad image spoils only its own."""

    answers: tuple[Answer | ErrorAnswer, ...] = Field(description="an answer, or why there is none")


class TaskDescription(Wire):
    """One learned task; `labels[i]` belongs to class_id `first_class_id + i`."""

    task: int = says("number of the task", 2)
    first_class_id: int = says("class_id of its first label", 4)
    labels: tuple[str, ...] = says("its classes, in order of class_id", ["4", "5"])


class ImageDescription(Wire):
    """The pixels that the network sees; images of any size and mode are brought to it."""

    height: int = says("pixels", 16)
    width: int = says("pixels", 16)
    mode: Literal["L", "RGB"] = says("L is greyscale", "L")


class CascadeDescription(Wire):
    """Whether all tasks see an image in every rotation, or only those that can still win."""

    candidates: int | None = says("how many tasks at most see the other rotations; null: all of them", 2)
    margin: float | None = says("and only if its score is this close to the best one; null: however far", 4.0)
    seen: float | None = says("how many tasks see the other rotations, mean of validation images", 1.2)
    agreement: float | None = says("share of validation images answered as if all tasks had seen all rotations", 0.9995)
    images: int = says("how many validation images that was measured on", 2000)


class ModelDescription(Wire):
    """What is being served."""

    schema_: int = Field(alias="schema", description="version of what travels over the wire", examples=[SCHEMA])
    name: str = says("preset and method", "digits-hat")
    version: str = says("digest of the bundle: equal versions give equal answers", "ef3557a7ea7e")
    created: str = says("when the bundle was written", "2024-01-01T00:00:00Z")
    method: str = says("how it was learned", "hat")
    preset: str = says("with which settings it was learned", "digits")
    image: ImageDescription
    tasks: tuple[TaskDescription, ...] = Field(description="what was taught, in order")
    score: str = says("which unknown_score the rule uses", "mahalanobis")
    alpha: float = says("share of known images that may be called unknown, unless a request says another", 0.05)
    threshold: float = says("-log10 of alpha", 1.301)
    expected_acceptance: float = says(
        "1 - alpha: at least this share of known images is accepted, on average over the validation images drawn", 0.95
    )
    provider: str = says("what the network runs on", "CPUExecutionProvider")
    precision: str = says("the numbers that it runs in", "int8")
    precisions: tuple[str, ...] = says("those that the bundle has", ["fp32", "int8"])
    cascade: CascadeDescription
    max_batch: int = says("how many waiting images are run together; 1 where that does not pay", 1)
    metrics: dict[str, Any] = says(
        "measured before export, on images that were not learned from", {"cil_accuracy": 0.97}
    )
    versions: dict[str, str] = says("of the packages that made the bundle", {"torch": "2.14.1"})


class WorkerStatus(Wire):
    """One process that answers."""

    pid: int = says("process id, on the server's machine", 4711)
    version: str = says("what it serves; empty while it starts", "ef3557a7ea7e")
    previous: str | None = says("what it has in memory to go back to", "859549a0961c")
    error: str | None = says("why it refused the last bundle, if it did", None)


class ServerStatus(Wire):
    """What the workers serve, and how the last swap went."""

    version: str = says("what all workers are to serve", "ef3557a7ea7e")
    previous: str | None = says("what a rollback would bring back, unless a shelf says otherwise", "859549a0961c")
    refused: str | None = says("why the last swap was refused, if it was", None)
    workers: tuple[WorkerStatus, ...] = Field(description="those that live, by process id")


class SwapAnswer(ServerStatus):
    """All workers serve this version now."""

    changed: bool = says("false if that is what they served before", True)
