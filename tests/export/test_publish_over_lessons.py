"""Publishing a run over what a server was taught since: nothing that was taught is lost without a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.checks.remembering import PublishError, check_remembers
from export.graph.evidence import Evidence
from serving.bundle.manifest import Bundle, load_bundle
from serving.model import Model
from tests.helpers_teaching import SIDE, TASKS, encode, pictures, write_bundle

MORE = (*TASKS, ("gnu", "hen"))
"""The run with another task."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shelf")
    write_bundle(place / "run")
    write_bundle(place / "more", MORE)
    model = Model.load(place / "run", threads=1)
    model.teach({"dog": pictures("hen", 10)}, who="ada")
    model.save(place / "extended")
    model.teach({"elk": pictures("elk", 12)}, who="bob")
    model.save(place / "taught")
    return place


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    labels = [label for labels in MORE for label in labels]
    ids = np.repeat(np.arange(len(labels)), 3)
    vectors = encode([content for label in labels for content in pictures(label, 3, first=300)])
    tasks = np.array([number for number, labels in enumerate(MORE) for _ in labels])[ids]
    return Evidence(np.zeros((len(ids), SIDE, SIDE, 3), np.uint8), tasks, ids, (), 0, vectors, "training")


def bundle(shelf: Path, name: str) -> Bundle:
    return load_bundle(shelf / name)


@pytest.mark.parametrize("run", ["run", "more"])
def test_more_examples_of_a_known_class_are_not_lost_silently(shelf: Path, evidence: Evidence, run: str) -> None:
    """Such a lesson changes no task, so the tasks of the run alone look as if nothing was missing."""
    before, after = bundle(shelf, "extended"), bundle(shelf, run)
    with pytest.raises(PublishError) as refused:
        check_remembers(before, after, evidence)
    message = str(refused.value)
    at = before.manifest.lessons[0].taught_at
    assert f"version {before.manifest.version} was taught by a server" in message
    assert f"'dog' (10 more images), by ada on {at}" in message
    assert "to serve a version without these lessons again (Versions on the page /teach), to publish" in message
    assert "--consolidate" not in message, "there is no adapter of a class of the run alone"


def test_taught_classes_are_named_with_two_ways_on(shelf: Path, evidence: Evidence) -> None:
    with pytest.raises(PublishError) as refused:
        check_remembers(bundle(shelf, "taught"), bundle(shelf, "more"), evidence)
    message = str(refused.value)
    assert "'dog' (10 more images), by ada" in message
    assert "'elk' (new, 12 images), by bob" in message
    assert "openworld learn-unknowns RUN --consolidate --publish SHELF" in message
    assert "learn there what waits then" in message


def test_the_next_lesson_and_the_version_before_are_no_loss(shelf: Path, evidence: Evidence) -> None:
    check_remembers(bundle(shelf, "extended"), bundle(shelf, "taught"), evidence)
    # What the message advises: the shelf went back to the run, and the run with another task follows it.
    check_remembers(bundle(shelf, "run"), bundle(shelf, "more"), evidence)
