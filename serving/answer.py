"""From a decision to what the caller reads; the server and the command line share it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.bundle import Manifest
from serving.decision import Verdicts, threshold
from serving.errors import ParameterError, RequestError
from serving.preprocess import decode, to_pixels
from serving.runtime import Model
from serving.schemas import (
    UNKNOWN,
    Answer,
    ClassAnswer,
    ErrorAnswer,
    ErrorDetail,
    ModelDescription,
    ModelName,
    TaskAnswer,
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


def answer_image(model: Model, content: bytes, question: Question) -> Answer:
    """Answer for one image file."""
    pixels = to_pixels(decode(content), model.manifest.image)
    verdicts = model.predict(pixels[np.newaxis], alpha=question.alpha, given_task=question.task)
    return answer(verdicts, 0, model.manifest, question)


def answer(verdicts: Verdicts, row: int, manifest: Manifest, question: Question) -> Answer:
    """Put one row of a decision into words."""
    labels = manifest.labels
    class_id, task = int(verdicts.class_id[row]), int(verdicts.task[row])
    p_within_task, p_task = float(verdicts.p_within_task[row, class_id]), float(verdicts.p_task[row, task])
    known = bool(verdicts.known[row])
    return Answer(
        label=labels[class_id] if known else UNKNOWN,
        known=known,
        best_guess=labels[class_id],
        class_id=class_id,
        task=task,
        confidence=p_within_task * p_task,
        p_within_task=p_within_task,
        p_task=p_task,
        p_value=float(verdicts.p_value[row]),
        unknown_score=float(verdicts.unknown_score[row]),
        threshold=threshold(question.alpha),
        alpha=question.alpha,
        tasks=_tasks(verdicts, row, manifest),
        top=_top(verdicts, row, manifest, question.top),
        model=ModelName(name=manifest.name, version=manifest.version),
    )


def error_answer(error: RequestError) -> ErrorAnswer:
    return ErrorAnswer(error=ErrorDetail(code=error.code, message=str(error), got=error.got, allowed=error.allowed))


def describe(model: Model) -> ModelDescription:
    """Say what is being served."""
    manifest, rule = model.manifest, model.bundle.rule
    return ModelDescription(
        name=manifest.name,
        version=manifest.version,
        created=manifest.created,
        method=manifest.method,
        preset=manifest.preset,
        image=manifest.image,
        tasks=tuple(
            TaskDescription(task=task.task, first_class_id=task.first_class_id, labels=task.labels)
            for task in manifest.tasks
        ),
        score=rule.score,
        alpha=rule.alpha,
        threshold=threshold(rule.alpha),
        provider=model.provider,
        metrics=manifest.metrics,
        versions=manifest.versions,
    )


def _tasks(verdicts: Verdicts, row: int, manifest: Manifest) -> tuple[TaskAnswer, ...]:
    answers = []
    for task in manifest.tasks:
        own = slice(task.first_class_id, task.first_class_id + len(task.labels))
        answers.append(
            TaskAnswer(
                task=task.task,
                unknown_score=float(verdicts.task_unknown_score[row, task.task]),
                p_task=float(verdicts.p_task[row, task.task]),
                best_label=task.labels[int(verdicts.p_within_task[row, own].argmax())],
            )
        )
    return tuple(answers)


def _top(verdicts: Verdicts, row: int, manifest: Manifest, count: int) -> tuple[ClassAnswer, ...]:
    labels, firsts = manifest.labels, manifest.first_class_ids
    probability = verdicts.probability[row]
    # Stable, so that a tie falls as in the decision's argmax and the first entry is always the best guess.
    order = np.argsort(-probability, kind="stable")[:count]
    return tuple(
        ClassAnswer(
            label=labels[class_id],
            class_id=int(class_id),
            task=int(np.searchsorted(firsts, class_id, side="right")) - 1,
            probability=float(probability[class_id]),
        )
        for class_id in order
    )
