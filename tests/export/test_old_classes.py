"""Publishing a task that takes images of earlier classes away is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.__main__ import main
from export.graph.evidence import Evidence
from export.graph.session import GraphQuery, open_written
from models.network import Network
from serving.bundle.decision import decide
from serving.bundle.manifest import load_bundle
from serving.bundle.old_classes import MAX_LOSS, ClassLoss, compare_classes
from serving.bundle.shelf import Shelf
from tests.export.networks import NO_EVIDENCE, learned, pixels_for, put_run, run_of, with_another_task

LABELS = ("cat", "dog", "cow", "pig")


def test_losses_are_counted_per_class_with_what_they_are_taken_for() -> None:
    class_ids = np.array([0] * 10 + [1] * 4 + [3] * 5)
    earlier = np.array([0] * 9 + [1] + [1] * 4 + [2] * 5)
    later = np.array([0] * 5 + [3] * 4 + [1] + [1] * 3 + [3] + [3] * 5)
    found = compare_classes(LABELS, 3, class_ids, earlier, later)
    cat, dog = found.measured
    assert cat == ClassLoss("cat", 10, 9, 5, (("pig", 4), ("dog", 1)))
    assert dog == ClassLoss("dog", 4, 4, 3, (("pig", 1),))
    assert found.missing == ("cow",), "a new class is not compared"
    assert str(cat) == "'cat' 90 % -> 50 % of 10 images, taken for 'pig' (4), 'dog' (1)"
    # One image may always be lost, even if it is a quarter of the class.
    assert found.worse(MAX_LOSS) == [cat]
    assert found.worse(41) == []
    assert "on 14 validation images: 92.9 % -> 57.1 %; not checked: 'cow'" in str(found)


@pytest.mark.parametrize(("images", "lost", "most", "refused"), [
    (100, 5, 5, False),
    (100, 6, 5, False),
        (100, 12, 5, True),
    (27, 3, 5, False),
    (27, 9, 5, True),
    (10, 1, 5, False),
    (10, 2, 5, True),
    (10, 2, 20, False),
    (3, 1, 0, False),
])  # fmt: skip
def test_more_than_the_points_and_more_than_one_image(images: int, lost: int, most: float, refused: bool) -> None:
    assert ClassLoss("cat", images, images, images - lost, ()).exceeds(most) == refused


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")


def published(network: Network, shelf: Shelf, evidence: Evidence, patch: pytest.MonkeyPatch, *options: str) -> int:
    folder = put_run(patch, shelf.folder.parent / "run", run_of(network), evidence)
    return main([str(folder), "--publish", str(shelf.folder), *options])


def answers(shelf: Shelf, pixels: np.ndarray) -> np.ndarray:
    """Class ids of the current bundle for some images."""
    place = shelf.current()
    assert place is not None
    (outputs,) = open_written(place, "fp32").run([GraphQuery(pixels)])
    return decide(outputs, load_bundle(place).rule).class_id


def test_a_task_that_takes_an_earlier_classs_images_is_refused_by_name(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", (2, 3))
    assert published(network, shelf, NO_EVIDENCE, monkeypatch) == 0
    first = shelf.current()
    pixels = pixels_for(network, 60, seed=3)
    # The classes of the images are those that the earlier bundle answers, so that it is always right.
    class_ids = answers(shelf, pixels)
    evidence = Evidence(pixels, run_of(network).rule.task_of_class[class_ids], class_ids, ())
    grown = with_another_task(network)
    capsys.readouterr()
    assert published(grown, shelf, evidence, monkeypatch) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: fp32: earlier classes lose more than 5 points of CIL: 'class ")
    assert "100 % -> " in error
    assert "taken for 'class 5'" in error or "taken for 'class 6'" in error
    assert error.endswith("Allowed: another --max-loss, or --force")
    assert shelf.current() == first
    # Both ways to allow it; the loss is named all the same.
    assert published(grown, shelf, evidence, monkeypatch, "--max-loss", "100") == 0
    assert shelf.current() != first
    assert "; 'class 1' 100 % -> " in capsys.readouterr().err
    shelf.point_at(first.name if first else "")
    assert published(grown, shelf, evidence, monkeypatch, "--force") == 0


def test_without_images_a_line_reports_that_nothing_was_checked(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", (2, 3))
    assert published(network, shelf, NO_EVIDENCE, monkeypatch) == 0
    capsys.readouterr()
    assert published(with_another_task(network), shelf, NO_EVIDENCE, monkeypatch) == 0
    assert "note: fp32: CIL of the earlier classes was not checked: no validation image" in capsys.readouterr().err


@pytest.mark.parametrize("points", ["-1", "101", "nan", "many"])
def test_points_out_of_range_are_refused(points: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--publish", "shelf", "--max-loss", points])
    assert f"got '{points}'; allowed: a number from 0 to 100" in capsys.readouterr().err
