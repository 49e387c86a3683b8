"""A graph that was written, ready to be asked: whole, or one task at a time where it is too large for that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto

from export.graph import AGAIN, UPRIGHT_DISTANCES
from export.part import load_nodes, open_part
from serving.bundle import INPUT_NAME, Graph
from serving.decision import FEATURES, NETWORK_NAMES, OUTPUT_NAMES, Outputs
from serving.layout import graph_name, parts_of
from serving.runtime import CPU, open_session, session_options

AT_ONCE = 64
LARGE = 250_000_000
"""Weights from which on a graph is opened task by task: onnxruntime holds several copies of them while it loads."""

Answers = dict[str, NDArray[Any]]


class Question(NamedTuple):
    """Images, and how many of them at a time."""

    pixels: NDArray[np.uint8]
    size: int = AT_ONCE
    everyone: bool = False
    """Of a cascade: what all tasks say when each sees all images turned, whoever would be chosen to."""


class Opened(Protocol):
    """A graph that answers; all questions at once, since opening what answers may be what takes long."""

    def ask(self, questions: Sequence[Question]) -> list[Answers]:
        """All outputs for each question."""
        ...


class Whole:
    """A graph in one session; where every task is to see all images turned, the tasks are asked one by one."""

    def __init__(self, folder: Path, precision: str) -> None:
        self._folder = folder
        self._precision = precision
        self._session = whole_session(folder, precision)

    def ask(self, questions: Sequence[Question]) -> list[Answers]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Answers:
        if question.everyone:
            return TaskByTask(self._folder, self._precision).ask([question])[0]
        return run_graph(self._session, question.pixels, question.size)


class TaskByTask:
    """Every task's own part of a graph in a session of its own, one after the other, then the graph's end.

    In a cascade, a task's part says what it says of upright images and what it says when it sees them all turned; the
    part of the graph that chooses who sees what again then says which of the two counts.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        self._folder = folder
        self._model = load_nodes(folder, precision)
        made = {node.name: node for node in self._model.graph.node}
        # Logits, distances and features of each task; in a cascade, also logits and distances of upright images alone.
        names = [list(made[f"{name}/join/Concat"].input) for name in (*NETWORK_NAMES, FEATURES)]
        self._cascaded = AGAIN in made
        if self._cascaded:
            names += [[f"task{task}/upright/logits/Add" for task in range(len(names[0]))]]
            names += [list(made[UPRIGHT_DISTANCES].input)]
        self._tasks = list(zip(*names, strict=True))

    def ask(self, questions: Sequence[Question]) -> list[Answers]:
        said = [self._task(names, questions) for names in self._tasks]
        return [
            self._together(parts, chosen=self._cascaded and not question.everyone)
            for question, *parts in zip(questions, *said, strict=True)
        ]

    def _task(self, names: Sequence[str], questions: Sequence[Question]) -> list[list[NDArray[Any]]]:
        """What a task says of every question, in the order of the names."""
        inputs: dict[str, int] = {INPUT_NAME: TensorProto.UINT8}
        if self._cascaded:
            inputs[AGAIN] = TensorProto.BOOL
        session = open_part(self._folder, self._model, inputs, names)
        answers = []
        for pixels, size, _ in questions:
            everyone = np.ones((len(pixels), len(self._tasks)), dtype=bool)
            given = {INPUT_NAME: pixels, AGAIN: everyone}
            answers.append(_batches(session, names, {name: given[name] for name in inputs}, size))
        return [list(answer.values()) for answer in answers]

    def _together(self, parts: Sequence[list[NDArray[Any]]], *, chosen: bool) -> Answers:
        """What the rest of the graph makes of what every task says; where `chosen`, of what it is to see again."""
        said = [dict(zip(names, part, strict=True)) for names, part in zip(self._tasks, parts, strict=True)]
        if chosen:
            upright = {names[4]: part[4] for names, part in zip(self._tasks, parts, strict=True)}
            (again,) = self._part([AGAIN], upright).values()
            for task, (names, part) in enumerate(zip(self._tasks, parts, strict=True)):
                sees = again[:, task : task + 1]
                said[task] |= {names[place]: np.where(sees, part[place], part[place + 3]) for place in (0, 1)}
        given = {name: said[task][name] for task, names in enumerate(self._tasks) for name in names[:3]}
        return self._part([*OUTPUT_NAMES, FEATURES], given)

    def _part(self, outputs: Sequence[str], given: Mapping[str, NDArray[Any]]) -> Answers:
        session = open_part(self._folder, self._model, dict.fromkeys(given, TensorProto.FLOAT), outputs)
        return _batches(session, outputs, given, AT_ONCE)


def open_written(folder: Path, precision: str, *, large: bool | None = None) -> Opened:
    """A graph as it can be opened in bounded memory; `large` insists."""
    if is_large(load_nodes(folder, precision)) if large is None else large:
        return TaskByTask(folder, precision)
    return Whole(folder, precision)


def is_large(model: onnx.ModelProto) -> bool:
    """Whether a graph is better opened task by task."""
    sizes = (math.prod(constant.dims) * (8 if constant.name.endswith("/packed") else 1)
             for constant in model.graph.initializer)  # fmt: skip
    # In a cascade, layers stand twice: for upright images, and in a branch for turned ones.
    copies = 2 if any(node.name == AGAIN for node in model.graph.node) else 1
    return bool(copies * sum(sizes) >= LARGE)


def whole_session(folder: Path, precision: str) -> ort.InferenceSession:
    """A whole graph on the CPU, set up as in a server."""
    names = parts_of((path.name for path in folder.iterdir()), precision)
    graph = Graph((folder / graph_name(precision)).read_bytes(), {name: (folder / name).read_bytes() for name in names})
    return open_session(graph, session_options(0), [CPU])


def run_graph(session: ort.InferenceSession, pixels: NDArray[np.uint8], size: int = AT_ONCE) -> Answers:
    """All outputs of a whole graph, so many images at a time."""
    return _batches(session, [*OUTPUT_NAMES, FEATURES], {INPUT_NAME: pixels}, size)


def _batches(session: ort.InferenceSession, names: Sequence[str], given: Outputs, size: int) -> Answers:
    count = len(next(iter(given.values())))
    parts = [
        session.run(list(names), {name: values[start : start + size] for name, values in given.items()})
        for start in range(0, count, size)
    ]
    return {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
