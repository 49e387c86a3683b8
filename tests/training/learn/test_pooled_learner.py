"""Learning the tasks of a run with a trunk, from made-up vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.trunks.trunk import TrunkSpec
from serving.bundle.pooled import PooledSettings, learning
from tests.helpers_photos import write_photos
from training import fit
from training.config import Lesson, RunConfig
from training.data.images import Images, Source
from training.data.sources import Sources
from training.learn.photos import photos_preset
from training.learn.pooled_learner import PooledLearner
from training.learn.pooled_state import PooledState
from training.show.console import Reporter
from training.store.checkpoint import load_finished
from training.store.tracking import Tracking

SPEC = TrunkSpec("small", "0" * 64, 64, (16, 48))
CLASSES = "abcdefg"
TASKS = (("a", "b", "c"), ("d", "e"), ("f", "g"))
TEMPERATURE = 0.1


def vectors_of(labels: NDArray[np.str_], seed: int) -> NDArray[np.float32]:
    """Unit vectors around one direction per class."""
    centers = np.random.default_rng(0).normal(size=(len(CLASSES), SPEC.dim))
    rows = centers[[CLASSES.index(label) for label in labels]]
    rows = rows + np.random.default_rng(seed).normal(size=rows.shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def learned(tasks: tuple[tuple[str, ...], ...], folder: Path) -> tuple[RunConfig, PooledState]:
    """The state of a quick run after all of these tasks."""
    lesson = Lesson(tasks, "folder")
    config = RunConfig(photos_preset(SPEC), 0, (lesson,), trunk=SPEC, quick=True)
    labels = np.repeat(list(CLASSES), 12)
    images = Images(vectors_of(labels, 1), labels, np.arange(len(labels)))
    sources = Sources(config)
    sources.keep(lesson, Source(images, images, tuple(CLASSES)))
    folder.mkdir()
    learner = PooledLearner(folder, config, torch.device("cpu"), Reporter(), Tracking(folder, config, ()))
    learner.learn(sources)
    return config, learner.state


@pytest.mark.parametrize("expanded", [False, True])
def test_the_classifier_after_the_last_task_does_not_depend_on_their_order(
    expanded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are chosen by sums that depend on the order a little, so here they are given."""
    settings = PooledSettings(expanded=expanded, temperature=TEMPERATURE)
    monkeypatch.setattr(learning, "chosen_classifier", lambda nats: settings)
    images = vectors_of(np.repeat(list(CLASSES), 5), 2)
    logits, scatters, of_first_task = [], [], []
    for number, order in enumerate((TASKS, TASKS[::-1], (TASKS[1], TASKS[2], TASKS[0]))):
        config, state = learned(order, tmp_path / str(number))
        columns = [config.labels.index(label) for label in CLASSES]
        logits.append(state.classifiers[-1].logits(images)[:, columns])
        scatters.append(state.statistics.gram)
        place = order.index(TASKS[0])
        of_first_task.append(state.detectors[place].distances(images))
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-6 * np.abs(logits[0]).max())
    for gram in scatters[1:]:
        np.testing.assert_allclose(gram, scatters[0], atol=1e-9)
    # A detector stays as it was when its task was learned, so it depends on which tasks came before.
    assert np.abs(of_first_task[1] - of_first_task[0]).max() > 0.01


@pytest.mark.parametrize(("photos", "rows"), [(10, 3), (5, 2)])
def test_many_photos_per_class_in_the_first_task_get_the_wider_expansion(
    photos: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ROWS": 2, "MANY_ROWS": 3, "MANY_PHOTOS": 6}.items():
        monkeypatch.setattr(learning, name, value)
    folder = write_photos(tmp_path / "photos", disc=photos, stripes=photos, checks=15 - photos, ring=15 - photos)
    words = ["--tasks", "disc,stripes; checks,ring", "--quick", "--size", "64", "--out", str(tmp_path / "run")]
    assert fit.main(["--data", str(folder), *words]) == 0
    config, checkpoint = load_finished(tmp_path / "run")
    state = PooledState.of(checkpoint, config)
    found = [state.statistics.projection.rows, *(each.projection.rows for each in state.classifiers)]
    # A classifier needs no expansion unless its ridge regression uses it.
    assert found[0] == rows
    assert set(found) <= {rows, 0}
