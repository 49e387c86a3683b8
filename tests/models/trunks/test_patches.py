"""Filters that are learned from patches of images, and the graph that applies them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from models.trunks import patches as module
from models.trunks.patches import Patches, as_trunk, learn_patches, patch_options
from models.trunks.trunk import Trunk, TrunkError, TrunkRequest, open_trunk
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options
from training.data.encoder import Encoder


def stripes(count: int, size: int = 32) -> NDArray[np.uint8]:
    """Stripes of two directions on noise."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size]
    images = random.normal(128, 12, (count, size, size, 3))
    for number in range(count):
        along = rows if number % 2 else columns
        images[number] += 60 * np.sin(2 * np.pi * (along + random.integers(0, 8)) / 5)[:, :, None]
    return np.clip(images, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def learned() -> Patches:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SAMPLED", 4000)
        return learn_patches(stripes(40), seed=1, count=12)


def encode(trunk: Trunk, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = open_session(Graph(trunk.model, {}), session_options(1))
    return np.asarray(session.run(["encoded"], {"pixels": pixels})[0])


def by_hand(patches: Patches, image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The vector of one image, patch by patch."""
    side, filters = patches.side, patches.filters.astype(np.float64)
    places = len(image) - side + 1
    above, below = np.empty((2, len(filters), places, places))
    for row in range(places):
        for column in range(places):
            patch = image[row : row + side, column : column + side].astype(np.float64).transpose(2, 0, 1)
            patch = (patch - patch.mean()) / np.sqrt(patch.var() + module.CONTRAST)
            response = (filters * patch).sum(axis=(1, 2, 3)) - patches.offsets
            above[:, row, column] = np.maximum(response - module.THRESHOLD, 0)
            below[:, row, column] = np.maximum(-response - module.THRESHOLD, 0)
    half = -(-places // 2)
    parts = []
    for maps in (above, below):
        quarters = [
            maps[:, r, c].mean(axis=(1, 2))
            for r in (slice(half), slice(-half, None))
            for c in (slice(half), slice(-half, None))
        ]
        parts.append(np.stack(quarters, axis=1).reshape(-1))
    vector = np.sqrt(np.concatenate(parts))
    return np.asarray(vector / np.linalg.norm(vector))


def test_the_graph_computes_what_the_filters_mean(learned: Patches, tmp_path: Path) -> None:
    trunk, images = as_trunk(learned, 32), stripes(6)
    Encoder(trunk, provider="cpu", folder=tmp_path)
    assert trunk.spec.depths == (2 * 12 * 4,)
    found = encode(trunk, images)
    for number in (0, 5):
        np.testing.assert_allclose(found[number], by_hand(learned, images[number]), atol=1e-4)


def test_the_same_images_and_seed_give_the_same_filters(learned: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLED", 4000)
    again, other = (learn_patches(stripes(40), seed=seed, count=12) for seed in (1, 2))
    assert np.array_equal(again.filters, learned.filters)
    assert not np.array_equal(other.filters, learned.filters)


def test_brightness_and_contrast_are_removed(learned: Patches) -> None:
    trunk, images = as_trunk(learned, 32), stripes(4)
    dimmed = np.clip(0.5 * images.astype(np.float64) + 60, 0, 255).astype(np.uint8)
    same = (encode(trunk, images) * encode(trunk, dimmed)).sum(axis=1)
    assert same.min() > 0.98
    directions = encode(trunk, images)
    assert directions[0] @ directions[2] > directions[0] @ directions[1], "stripes of one direction are alike"


def test_weights_are_kept_and_read_again(learned: Patches, tmp_path: Path) -> None:
    trunk = as_trunk(learned, 40)
    assert trunk.weights is not None
    file = tmp_path / "trunk.safetensors"
    file.write_bytes(trunk.weights)
    again = open_trunk("patches", size=40, weights=file)
    assert (again.spec, again.digest) == (trunk.spec, trunk.digest)
    save_file({"filters": np.zeros((2, 3, 4, 5), np.float32), "offsets": np.zeros(2, np.float32)}, file)
    with pytest.raises(TrunkError, match=r"allowed: filters \[count, 3, side, side\] and offsets"):
        open_trunk("patches", weights=file)
    with pytest.raises(TrunkError, match="that file is missing: restore it from a copy"):
        open_trunk("patches")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"count": "0"}, "count of trunk patches is '0'; allowed: 1 to"),
        ({"side": "13"}, "side of trunk patches is '13'; allowed: 3 to 12"),
        ({"side": "six"}, "side of trunk patches is 'six'"),
        ({"sides": "6"}, "did you mean 'side'"),
    ],
)
def test_options_are_checked(options: dict[str, str], reason: str) -> None:
    with pytest.raises(TrunkError, match=reason):
        patch_options(TrunkRequest("patches", options=options))
