"""From a decision to what the caller reads; the server and the command line share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.bundle import Manifest
from serving.decision import Verdicts, threshold
from serving.errors import ParameterError
from serving.preprocess import decode, to_pixels
from serving.runtime import Model
from serving.schemas import (
    SCHEMA,
    UNKNOWN,
    Answer,
    CascadeDescription,
    ImageDescription,
    ModelDescription,
    TaskDescription,
)

DEFAULT_TOP = 3


@dataclass(frozen=True)
class Question:
    """What is asked of an image, checked against what the model can answer."""

    task: int | None
    alpha: float
    top: int

    @classmethod
    def ask(
        cls, model: Model, *, task: int | None = None, alpha: float | None = None, top: int | None = None
    ) -> Question:
        """Fill in what was not asked for, and refuse what cannot be answered."""
        tasks, classes = len(model.manifest.tasks), len(model.manifest.labels)
        if task is not None and not 0 <= task < tasks:
            raise ParameterError("no such task", got=f"task={task}", allowed=f"0 to {tasks - 1}")
        if alpha is not None and not 0 < alpha < 1:
            raise ParameterError("alpha is a share", got=f"alpha={alpha}", allowed="0 < alpha < 1")
        if top is not None and not 1 <= top <= classes:
            raise ParameterError("no such number of classes", got=f"top={top}", allowed=f"1 to {classes}")
        return cls(
            task=task,
            alpha=model.bundle.rule.alpha if alpha is None else alpha,
            top=min(DEFAULT_TOP, classes) if top is None else top,
        )


class Wording:
    """Puts decisions of one model into words: the fields of an `Answer`, as plain values."""

    def __init__(self, manifest: Manifest) -> None:
        # The manifest works these out anew each time it is asked.
        self._labels = manifest.labels
        self._tasks = [(task.task, task.first_class_id, task.labels) for task in manifest.tasks]
        self._task_of_class = [task.task for task in manifest.tasks for _ in task.labels]
        self._model = {"name": manifest.name, "version": manifest.version}

    def answer(self, verdicts: Verdicts, row: int, question: Question) -> dict[str, Any]:
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
            "threshold": threshold(question.alpha),
            "alpha": question.alpha,
            "tasks": self._task_answers(verdicts.task_unknown_score[row].tolist(), p_task, p_within_task),
            "top": self._class_answers(verdicts, row, question.top),
            "model": self._model,
        }

    def _task_answers(
        self, unknown_score: list[float], p_task: list[float], p_within_task: list[float]
    ) -> list[dict[str, Any]]:
        answers = []
        for task, first, labels in self._tasks:
            own = p_within_task[first : first + len(labels)]
            answers.append(
                {
                    "task": task,
                    "unknown_score": unknown_score[task],
                    "p_task": p_task[task],
                    "best_label": labels[own.index(max(own))],
                }
            )
        return answers

    def _class_answers(self, verdicts: Verdicts, row: int, count: int) -> list[dict[str, Any]]:
        probability = verdicts.probability[row]
        # Stable, so that a tie falls as in the decision's argmax and the first entry is always the best guess.
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


def answer_image(model: Model, content: bytes, question: Question) -> Answer:
    """Answer for one image file."""
    pixels = to_pixels(decode(content), model.manifest.image)
    verdicts = model.predict(pixels[np.newaxis], alpha=question.alpha, given_task=question.task)
    return Answer.model_validate(Wording(model.manifest).answer(verdicts, 0, question))


def describe(model: Model, *, max_batch: int = 1) -> ModelDescription:
    """Say what is being served."""
    manifest, rule = model.manifest, model.bundle.rule
    return ModelDescription(
        schema=SCHEMA,
        name=manifest.name,
        version=manifest.version,
        created=manifest.created,
        method=manifest.method,
        preset=manifest.preset,
        image=ImageDescription.model_validate(manifest.image.model_dump()),
        tasks=tuple(
            TaskDescription(task=task.task, first_class_id=task.first_class_id, labels=task.labels)
            for task in manifest.tasks
        ),
        score=rule.score,
        alpha=rule.alpha,
        threshold=threshold(rule.alpha),
        expected_acceptance=1 - rule.alpha,
        provider=model.provider,
        precision=model.precision,
        precisions=manifest.precisions,
        cascade=CascadeDescription.model_validate(manifest.cascade.model_dump()),
        max_batch=max_batch,
        metrics=manifest.metrics,
        versions=manifest.versions,
    )
