"""From a decision to the answer that a caller reads; shared by the server and the command line."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Verdicts
from serving.bundle.errors import ImageError
from serving.bundle.explanation import heat_map
from serving.bundle.manifest import Manifest
from serving.bundle.model import BundleModel
from serving.bundle.own_scores import threshold
from serving.bundle.pixels import open_image, to_pixels
from serving.errors import ParameterError, refused_image
from serving.http.schemas import SCHEMA, UNKNOWN, Answer, Explain, ModelDescription

DEFAULT_TOP = 3


@dataclass(frozen=True)
class PredictionOptions:
    """Options of a prediction, checked against the model."""

    task: int | None
    alpha: float
    top: int
    explain: Explain = "false"
    store: bool = True
    """Whether the quarantine may keep the image."""

    @classmethod
    def for_model(
        cls,
        model: BundleModel,
        *,
        task: int | None = None,
        alpha: float | None = None,
        top: int | None = None,
        explain: Explain | None = None,
        store: bool = True,
    ) -> PredictionOptions:
        """Fill in the defaults; a ParameterError if a value does not suit the model."""
        tasks, classes = len(model.manifest.tasks), len(model.manifest.labels)
        if task is not None and not 0 <= task < tasks:
            raise ParameterError("no such task", got=f"task={task}", allowed=f"0 to {tasks - 1}")
        if alpha is not None and not 0 < alpha < 1:
            raise ParameterError("alpha is a share", got=f"alpha={alpha}", allowed="0 < alpha < 1")
        if top is not None and not 1 <= top <= classes:
            raise ParameterError("no such number of classes", got=f"top={top}", allowed=f"1 to {classes}")
        if explain not in (None, "false") and not model.explains:
            trunk = model.manifest.trunk
            reason = "it has no trunk" if trunk is None else f"its bundle has no feature maps of trunk {trunk.name}"
            allowed = "false, or a bundle whose trunk averages feature maps"
            problem = f"this model cannot explain its answers: {reason}"
            raise ParameterError(problem, got=f"explain={explain}", allowed=allowed)
        return cls(
            explain=explain or "false",
            task=task,
            alpha=model.bundle.rule.alpha if alpha is None else alpha,
            top=min(DEFAULT_TOP, classes) if top is None else top,
            store=store,
        )


def explained(model: BundleModel, pixels: NDArray[np.uint8], fields: dict[str, Any], how: Explain) -> dict[str, Any]:
    """The explanation of an answer with these fields, for one image [1, height, width, channels]."""
    unknown, class_id = not fields["known"], fields["class_id"]
    found = model.explain(pixels, class_id=class_id, unknown=unknown)
    image = model.manifest.image
    png = base64.b64encode(heat_map(found.grid, (image.width, image.height))).decode() if how == "png" else None
    return {
        "evidence_for": UNKNOWN if unknown else fields["label"],
        "grid": found.grid.tolist(),
        "total": found.total,
        "remainder": found.remainder,
        "png": png,
    }


class AnswerFormatter:
    """Turns decisions of one model into the fields of an `Answer`, as plain values."""

    def __init__(self, manifest: Manifest) -> None:
        # The manifest computes these on every access.
        self._labels = manifest.labels
        self._tasks = [(task.task, task.first_class_id, task.labels) for task in manifest.tasks]
        self._task_of_class = [task.task for task in manifest.tasks for _ in task.labels]
        self._warning = manifest.verdict.warning
        self._model = {"name": manifest.name, "version": manifest.version}

    def fields(self, verdicts: Verdicts, row: int, options: PredictionOptions) -> dict[str, Any]:
        """The fields of the answer for one row of a decision."""
        class_id, known = int(verdicts.class_id[row]), bool(verdicts.known[row])
        task = self._task_of_class[class_id]
        p_within_task, p_task = verdicts.p_within_task[row].tolist(), verdicts.p_task[row].tolist()
        return {
            "label": self._labels[class_id] if known else UNKNOWN,
            "known": known,
            "best_guess": self._labels[class_id],
            "class_id": class_id,
            "task": task,
            "confidence": float(verdicts.probability[row, class_id]),
            "p_within_task": p_within_task[class_id],
            "p_task": p_task[task],
            "p_value": float(verdicts.p_value[row]),
            "unknown_score": float(verdicts.unknown_score[row]),
            "threshold": threshold(options.alpha),
            "alpha": options.alpha,
            "tasks": self._task_answers(verdicts.task_unknown_score[row].tolist(), p_task, p_within_task),
            "top": self._class_answers(verdicts, row, options.top),
            "warning": self._warning,
            "model": self._model,
        }

    def _task_answers(
        self, unknown_score: list[float], p_task: list[float], p_within_task: list[float]
    ) -> list[dict[str, Any]]:
        answers = []
        for task, first, labels in self._tasks:
            own = p_within_task[first : first + len(labels)]
            best = labels[own.index(max(own))]
            answers.append(
                {"task": task, "unknown_score": unknown_score[task], "p_task": p_task[task], "best_label": best}
            )
        return answers

    def _class_answers(self, verdicts: Verdicts, row: int, count: int) -> list[dict[str, Any]]:
        probability = verdicts.probability[row]
        # Stable, so that ties resolve as in the decision's argmax and the first entry is always the best guess.
        order = np.argsort(-probability, kind="stable")[:count]
        return [
            {
                "label": self._labels[class_id],
                "class_id": class_id,
                "task": self._task_of_class[class_id],
                "probability": value,
            }
            for class_id, value in zip(order.tolist(), probability[order].tolist(), strict=True)
        ]


def answer_image(model: BundleModel, content: bytes, options: PredictionOptions) -> Answer:
    """The answer for one image file."""
    try:
        pixels = to_pixels(open_image(content), model.manifest.image)
        verdicts = model.predict(pixels[np.newaxis], alpha=options.alpha, given_task=options.task)
    except ImageError as error:
        raise refused_image(error) from error
    fields = AnswerFormatter(model.manifest).fields(verdicts, 0, options)
    if options.explain != "false":
        fields["explanation"] = explained(model, pixels[np.newaxis], fields, options.explain)
    return Answer.model_validate(fields)


def describe(model: BundleModel, *, max_batch: int = 1) -> ModelDescription:
    """The description of a model, for /model."""
    manifest, rule = model.manifest, model.bundle.rule
    described = {
        **manifest.model_dump(),
        "schema": SCHEMA,
        "score": rule.score,
        "alpha": rule.alpha,
        "threshold": threshold(rule.alpha),
        "expected_acceptance": 1 - rule.alpha,
        "rejects_unknown": not rule.blind_tasks(),
        "provider": model.provider,
        "precision": model.precision,
        "max_batch": max_batch,
        "explains": model.explains,
    }
    # Further fields of the manifest, such as checksums, are of no use to clients.
    return ModelDescription.model_validate(described, extra="ignore")
