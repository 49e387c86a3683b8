from __future__ import annotations

import numpy as np
import pytest

from serving.bundle.embedding import Embedding, some_of_each
from serving.bundle.umap_places import UmapError, umap_places

RANDOM = np.random.default_rng(0)
SPREAD = np.array([5.0, 0.1, 3.0, 0.1])
FEATURES = RANDOM.normal(size=(200, 4)) * SPREAD + 7


def test_the_axes_are_those_of_the_largest_spread() -> None:
    fitted = Embedding.fit(FEATURES, np.zeros(200, int))
    assert np.abs(fitted.axes).argmax(axis=1).tolist() == [0, 2]
    assert fitted.places.std(axis=0) == pytest.approx([5.0, 3.0], rel=0.2)
    assert fitted.project(FEATURES) == pytest.approx(fitted.places)
    assert fitted.project(fitted.center[None]) == pytest.approx(np.zeros((1, 2)))


def test_it_is_the_same_each_time_and_from_a_file() -> None:
    fitted, again = (Embedding.fit(FEATURES, np.arange(200) % 3) for _ in range(2))
    assert np.array_equal(fitted.places, again.places)
    read = Embedding.from_arrays(fitted.to_arrays())
    assert np.array_equal(read.project(FEATURES), fitted.project(FEATURES))
    assert np.array_equal(read.project_all(FEATURES), fitted.coordinates)
    assert np.array_equal(fitted.coordinates[:, :2], fitted.places)
    some = read.of_classes({1: 5})
    assert some.class_ids.tolist() == [5] * 67
    assert some.to_arrays()["coordinates"].shape == (67, 4)


def test_a_bundle_of_before_has_a_map_with_two_directions() -> None:
    arrays = Embedding.fit(FEATURES, np.zeros(200, int)).to_arrays()
    before = Embedding.from_arrays({name: arrays[name] for name in ("center", "axes", "places", "class_ids")})
    assert np.array_equal(before.project(FEATURES), arrays["places"])
    assert before.project_all(FEATURES) is None
    assert set(before.to_arrays()) == {"center", "axes", "places", "class_ids"}


def test_what_does_not_fit_together_is_refused() -> None:
    arrays = Embedding.fit(FEATURES, np.zeros(200, int)).to_arrays()
    with pytest.raises(ValueError, match="do not belong together"):
        Embedding.from_arrays({**arrays, "axes": arrays["axes"][:, :2]})
    with pytest.raises(ValueError, match="do not belong together"):
        Embedding.from_arrays({**arrays, "coordinates": arrays["coordinates"][:, :2]})
    with pytest.raises(ValueError, match="needs 3 images; got 2"):
        Embedding.fit(FEATURES[:2], np.zeros(2, int))


def test_without_the_extra_umap_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.bundle.umap_places.installed", lambda: False)
    with pytest.raises(
        UmapError, match=r"needs the package umap-learn: got none; allowed: pip install -e '\.\[umap\]'"
    ):
        umap_places(FEATURES.astype(np.float32))


def test_some_of_each_class_are_chosen() -> None:
    chosen = some_of_each(np.array([0, 1, 0, 0, 2, 1]), 2)
    assert chosen.tolist() == [0, 1, 2, 4, 5]
    assert some_of_each(np.zeros(0, int)).tolist() == []
