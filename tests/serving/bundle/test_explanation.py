"""Explanations: an exact decomposition of what is linear, and heat maps that can be looked at."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from serving.bundle.explanation import Explanation, cell_vectors, explain, heat_map

DEPTHS = (3, 5)
RANDOM = np.random.default_rng(0)
MAPS = {0: RANDOM.normal(size=(3, 8, 9)), 1: RANDOM.normal(size=(5, 3, 4))}
"""Sides that are no multiples of each other."""
WEIGHTS, FORM = RANDOM.normal(size=(4, 8)), RANDOM.normal(size=(8, 8))


def encoded(maps: dict[int, NDArray[np.floating]]) -> NDArray[np.floating]:
    """As the graph computes it."""
    parts = [maps[part].mean(axis=(1, 2)) for part in sorted(maps)]
    return np.concatenate([part / np.linalg.norm(part) for part in parts]) / np.sqrt(len(DEPTHS))


def outputs(rows: NDArray[np.floating]) -> dict[str, NDArray[np.floating]]:
    squares = (rows @ FORM * rows).sum(axis=1, keepdims=True)
    return {"logits": rows @ WEIGHTS.T + 1.0, "distances": squares - rows @ WEIGHTS.T}


def test_the_vector_is_the_sum_of_its_cells() -> None:
    cells, shape = cell_vectors(MAPS, DEPTHS)
    assert shape == (3, 4)
    assert cells.sum(axis=0) == pytest.approx(encoded(MAPS))
    # The first part of the first cell: rows 0 to 2 and columns 0 to 2 of 8 x 9.
    first = MAPS[0][:, :3, :3].sum(axis=(1, 2)) / 72
    assert cells[0, :3] * np.linalg.norm(MAPS[0].mean(axis=(1, 2))) * np.sqrt(2) == pytest.approx(first)


def test_a_part_without_a_map_is_in_no_cell() -> None:
    cells, shape = cell_vectors({1: MAPS[1]}, DEPTHS)
    assert shape == (3, 4)
    assert not cells[:, :3].any()
    assert cells.sum(axis=0)[3:] == pytest.approx(encoded(MAPS)[3:])


def test_evidence_for_a_class_adds_up_because_logits_are_linear() -> None:
    cells, shape = cell_vectors(MAPS, DEPTHS)
    vector = encoded(MAPS)
    found = explain(vector, cells, shape, outputs, class_id=2, unknown=False)
    assert found.remainder == pytest.approx(0.0, abs=1e-5)
    assert found.exact
    logits = WEIGHTS @ vector
    shares = np.exp(np.delete(logits, 2))
    # Against the other classes, each by its probability among them.
    assert found.total == pytest.approx(logits[2] - np.delete(logits, 2) @ shares / shares.sum(), abs=1e-5)


def test_evidence_for_unknown_has_the_part_that_does_not_add_up() -> None:
    cells, shape = cell_vectors(MAPS, DEPTHS)
    vector = encoded(MAPS)
    found = explain(vector, cells, shape, outputs, class_id=1, unknown=True)
    assert found.total == pytest.approx(vector @ FORM @ vector - WEIGHTS[1] @ vector, abs=1e-5)
    assert abs(found.remainder) > 0.05 * abs(found.total)
    assert not found.exact
    assert found.grid.sum() + found.remainder == pytest.approx(found.total)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_map_is_exact_up_to_a_twentieth(sign: int) -> None:
    for remainder, exact in ((0.1, True), (0.11, False), (-0.1, True), (-0.11, False)):
        assert Explanation(np.zeros((1, 1)), sign * 2.0, remainder).exact == exact


def test_evidence_is_where_the_features_are() -> None:
    maps = {part: np.zeros_like(each) for part, each in MAPS.items()}
    maps[1][:, 2, 3] = WEIGHTS[0, 3:]
    maps[0][:, 7, 8] = WEIGHTS[0, :3]
    cells, shape = cell_vectors(maps, DEPTHS)
    found = explain(encoded(maps), cells, shape, outputs, class_id=0, unknown=False)
    assert found.grid.argmax() == 2 * 4 + 3
    assert np.abs(np.delete(found.grid.ravel(), 11)).max() == pytest.approx(0.0, abs=1e-6)


def test_a_heat_map_is_orange_for_and_blue_against() -> None:
    picture = Image.open(io.BytesIO(heat_map(np.array([[1.0, 0.0], [0.0, -1.0]]), (40, 20))))
    assert (picture.size, picture.mode) == ((40, 20), "RGBA")
    red, _, blue, opacity = picture.getpixel((2, 2))  # type: ignore[misc]
    assert red > blue
    assert opacity > 150
    red, _, blue, opacity = picture.getpixel((38, 18))  # type: ignore[misc]
    assert blue > red
    assert opacity > 150
    assert picture.getpixel((20, 10))[3] < 60  # type: ignore[index]
    Image.open(io.BytesIO(heat_map(np.zeros((2, 2)), (4, 4)))).load()
