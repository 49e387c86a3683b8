"""Requests and responses of the API. `SCHEMA` grows when an old client could no longer read or send them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serving.bundle.run_verdict import RunVerdict, TaughtVerdict
from serving.errors import RequestError

SCHEMA = 1
UNKNOWN = "unknown"
"""The label of images of no learned class. A class may have the same name: `known` distinguishes the two."""


def field(description: str, example: Any, **rules: Any) -> Any:
    """A field with what the API document shows of it."""
    return Field(description=description, examples=[example], **rules)


def _ascii_number(given: Any) -> Any:
    """Refuse what only looks like a number in a query string or path: spaces, underscores, digits of other scripts."""
    if isinstance(given, str) and _NUMBER.fullmatch(given) is None:
        raise ValueError("a number with the digits 0 to 9")
    return given


_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
Whole = Annotated[int, BeforeValidator(_ascii_number)]
Number = Annotated[float, BeforeValidator(_ascii_number)]
"""Numbers in query strings and paths."""


class ApiModel(BaseModel):
    """A JSON object of the API; fields that are not listed are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelName(ApiModel):
    """Which model answered."""

    name: str = field("preset and method", "digits-hat")
    version: str = field("digest of the bundle: equal versions give equal answers", "ef3557a7ea7e")


class TaskAnswer(ApiModel):
    """The outputs of one task for the image."""

    task: int = field("number of the task", 2)
    unknown_score: float = field("-log10 of the task's p-value, extrapolated; higher is more unknown", 1.431)
    p_task: float = field("probability that the image belongs to this task, if it is of a known class", 0.904)
    best_label: str = field("the task's own best guess", "5")


class ClassAnswer(ApiModel):
    """One of the most probable classes."""

    label: str = field("name of the class", "5")
    class_id: int = field("number of the class over all tasks", 5)
    task: int = field("task of the class", 2)
    probability: float = field("p_within_task * p_task of this class, if the image is of a known class", 0.822)


Explain = Literal["false", "true", "png"]
"""Whether an answer is explained: not at all, as numbers, or also as an image."""


class ExplanationAnswer(ApiModel):
    """Where in the image the evidence lies."""

    evidence_for: str = field(f'the label of the answer, or "{UNKNOWN}"', "cup")
    grid: tuple[tuple[float, ...], ...] = field(
        "rows of cells over the part of the image that the model sees, its square centre: positive numbers speak for "
        "the answer, negative ones against it",
        [[0.02, 0.31], [-0.05, 0.12]],
    )
    total: float = field("the evidence in the whole image, compared with an image without any features", 0.41)
    remainder: float = field(
        "total minus the sum of the grid: 0 where the decision is linear in the features; a distance is not", 0.01
    )
    png: str | None = field("base64 of a transparent PNG to lay over the square centre; with explain=png", None)


class Answer(ApiModel):
    """The class of an image, or that it belongs to no learned class."""

    label: str = field(f'a class label, or "{UNKNOWN}"', UNKNOWN)
    known: bool = field("whether p_value is at least alpha; false if the label is unknown", False)
    best_guess: str = field("label of the best class, even if the image is unknown", "5")
    class_id: int = field("class of the best guess", 5)
    task: int = field("task of the best guess", 2)
    confidence: float = field(
        "p_within_task * p_task: the probability of best_guess if the image is of a known class. It may be high for an "
        "unknown image; whether the image is of a known class follows from `known` and p_value only",
        0.822,
    )
    p_within_task: float = field("probability of the best guess among the classes of its task", 0.91)
    p_task: float = field("probability of the best guess's task", 0.904)
    p_value: float = field(
        "p-value of the task that fits the image best, or of the requested task: about the share of known images that "
        "look at least as unusual; for a network, those of this task count most",
        0.0371,
    )
    unknown_score: float = field("-log10 of p_value, extrapolated below the least; higher is more unknown", 1.431)
    threshold: float = field("-log10 of alpha; the image is unknown exactly if its unknown_score is higher", 1.301)
    alpha: float = field("share of known images that may be called unknown", 0.05)
    tasks: tuple[TaskAnswer, ...] = Field(description="outputs of every task, in order")
    top: tuple[ClassAnswer, ...] = Field(description="the most probable classes, best first")
    warning: str | None = field(
        "what does not work in this model, so that its answers cannot be relied on; null if nothing was found",
        None,
        default=None,
    )
    explanation: ExplanationAnswer | None = Field(
        # The field is there only if it is asked for.
        exclude_if=lambda value: value is None,
        default=None,
        description="where in the image the evidence lies; only if it was asked for",
    )
    model: ModelName


class ImageBody(ApiModel):
    """A request for one image, as JSON."""

    image: str = field(
        "base64 of the image file, or a data: URL; nothing is ever fetched",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG7buVgAAAABJRU5ErkJggg==",
    )


class ImagesBody(ApiModel):
    """A request for several images, as JSON."""

    images: tuple[str, ...] = field("each as `image` of a single request", ["iVBORw0KGgo...", "/9j/4AAQSkZJRg..."])


class ErrorDetail(ApiModel):
    """What was wrong with a request."""

    code: str = field("short and stable, for programs", "empty_image")
    message: str = field(
        "what was wrong, what was received and what is allowed, for people",
        "no image: got 0 bytes; allowed: 1 to 33554432 bytes",
    )
    got: str = field("what was received", "0 bytes")
    allowed: str = field("what would be accepted", "1 to 33554432 bytes")


class ErrorAnswer(ApiModel):
    """Why a request was not answered."""

    error: ErrorDetail
    request_id: str | None = field(
        "the x-request-id of the response, to find it in the log", "5f2c9a7b1e604d83", default=None
    )


def error_answer(error: RequestError, request_id: str | None = None) -> ErrorAnswer:
    """The response body for an error."""
    detail = ErrorDetail(code=error.code, message=str(error), got=error.got, allowed=error.allowed)
    return ErrorAnswer(error=detail, request_id=request_id)


class Answers(ApiModel):
    """One entry per image, in the order of the request; an invalid image yields an error in its own place."""

    answers: tuple[Answer | ErrorAnswer, ...] = Field(description="an answer, or the error of that image")


class TaskDescription(ApiModel):
    """One learned task; `labels[i]` has class_id `first_class_id + i`."""

    task: int = field("number of the task", 2)
    first_class_id: int = field("class_id of its first label", 4)
    labels: tuple[str, ...] = field("its classes, in order of class_id", ["4", "5"])
    own_images: int = field("number of its own images that its p-values rest on", 270)


class ImageDescription(ApiModel):
    """The network's input size; images of any size and mode are converted to it."""

    height: int = field("pixels", 16)
    width: int = field("pixels", 16)
    mode: Literal["L", "RGB"] = field("L is greyscale", "L")


class CascadeDescription(ApiModel):
    """Whether every task runs on all rotations of an image, or only the tasks that can still win."""

    candidates: int | None = field("how many tasks at most run on the other rotations; null: all of them", 2)
    margin: float | None = field("a task runs on them only if its score is this close to the best; null: always", 4.0)
    seen: float | None = field("how many tasks run on the other rotations, mean over validation images", 1.2)
    agreement: float | None = field("share of validation images with the same answer as without the cascade", 0.9995)
    images: int = field("number of validation images that were measured", 2000)


class ModelDescription(ApiModel):
    """The model that is served."""

    schema_: int = Field(alias="schema", description="version of the API", examples=[SCHEMA])
    name: str = field("preset and method", "digits-hat")
    version: str = field("digest of the bundle: equal versions give equal answers", "ef3557a7ea7e")
    created: str = field("when the bundle was written", "2024-01-01T00:00:00Z")
    method: str = field("training method", "hat")
    preset: str = field("training preset", "digits")
    image: ImageDescription
    tasks: tuple[TaskDescription, ...] = Field(description="the learned tasks, in order")
    score: str = field("the unknown score that the decision rule uses", "mahalanobis")
    alpha: float = field("share of known images that may be called unknown, unless a request asks for another", 0.05)
    threshold: float = field("-log10 of alpha", 1.301)
    expected_acceptance: float = field(
        "1 - alpha: about this share of known images is accepted; at least, if p-values rest on validation images", 0.95
    )
    rejects_unknown: bool = field(
        "false if a task has fewer than 1 / alpha own images: then no image is called unknown", True
    )
    provider: str = field("execution provider of onnxruntime", "CPUExecutionProvider")
    precision: str = field("precision of the network's arithmetic", "int8")
    precisions: tuple[str, ...] = field("precisions in the bundle", ["fp32", "int8"])
    cascade: CascadeDescription
    verdict: RunVerdict = Field(description="how good the model is: measured before export, in words")
    taught: tuple[TaughtVerdict, ...] = Field(
        default=(), description="how far each class that was taught, or taught more of, since can be relied on"
    )
    max_batch: int = field("largest batch of waiting images; 1 if batches are not faster", 1)
    explains: bool = field("whether explain=true is possible: the trunk averages feature maps", False)
    metrics: dict[str, Any] = field("measured before export on images that were not trained on", {"cil_accuracy": 0.97})
    versions: dict[str, str] = field("versions of the packages that wrote the bundle", {"torch": "2.14.1"})


class UnknownShare(ApiModel):
    """How many of the last answers were unknown, over all workers."""

    images: int = field("answers in the sliding windows", 1000)
    unknown: int = field("how many of them were unknown", 61)
    share: float | None = field("unknown / images; null without answers", 0.061)
    low: float = field("lower end of its 95 % confidence interval", 0.0478)
    high: float = field("upper end of its 95 % confidence interval", 0.0776)


class DriftTest(ApiModel):
    """A test for a change, summed over all workers."""

    task: int | None = field("the task; null: over all tasks", 2)
    images: int = field("images since the start, the last swap or the last alarm", 48210)
    evidence: float = field("evidence for a change; 1 raises an alarm", 0.0003)


class DriftExample(ApiModel):
    """An image that differs most from those before the change."""

    request_id: str | None = field("the x-request-id of its request, to find it in the log", "5f2c9a7b1e604d83")
    label: str = field("its best guess", "5")
    unknown_score: float = field("higher is more unknown", 2.31)
    brightness: float = field("mean of its pixels, 0 to 255", 61.5)
    at: str = field("when it was answered", "2024-01-01T00:00:00.000Z")


class DriftAlarm(ApiModel):
    """A change that was noticed."""

    task: int | None = field("the task whose images have changed; null: those of all tasks together", 2)
    change: str = field("what they have become: less familiar, more familiar, brighter or darker", "darker")
    at: str = field("when it was noticed", "2024-01-01T00:05:00.000Z")
    since: str = field("when it began, estimated", "2024-01-01T00:00:00.000Z")
    images: int = field("images from then on until it was noticed", 84)
    before: int = field("images that they were compared with", 48210)
    examples: tuple[DriftExample, ...] = Field(description="images that differ most")


class DriftReport(ApiModel):
    """Whether the images that are answered are still like those before."""

    version: str = field("digest of the bundle that is served", "ef3557a7ea7e")
    every: int = field("mean number of images between false alarms, at least", 10_000_000)
    unknown: UnknownShare
    tests: tuple[DriftTest, ...] = Field(description="over all tasks first, then each task")
    alarms: tuple[DriftAlarm, ...] = Field(description="changes that the living workers noticed, last first")


class WorkerStatus(ApiModel):
    """One worker process."""

    pid: int = field("process id, on the server's machine", 4711)
    version: str = field("version that it serves; empty while it starts", "ef3557a7ea7e")
    previous: str | None = field("version that it keeps in memory for a rollback", "859549a0961c")
    error: str | None = field("why it refused the last bundle, if it did", None)


class ServerStatus(ApiModel):
    """What the workers serve, and how the last swap went."""

    version: str = field("version that all workers serve or are switching to", "ef3557a7ea7e")
    previous: str | None = field("version that a rollback returns to, unless a shelf has another order", "859549a0961c")
    refused: str | None = field("why the last swap was refused, if it was", None)
    workers: tuple[WorkerStatus, ...] = Field(description="those that live, by process id")


class SwapAnswer(ServerStatus):
    """All workers serve this version now."""

    changed: bool = field("false if they served the same version before", True)
