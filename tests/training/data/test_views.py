"""Views of a photo depend on the photo and the seed, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.trunks.trunk import open_trunk
from serving.bundle.pixels import to_pixels
from serving.bundle.sections import ImageSpec
from tests.helpers_photos import photo
from training.config import Augmentation
from training.data.encoder import Encoder
from training.data.images import DataError
from training.data.originals import FileOriginal
from training.data.views import augmented_view, in_rotations, turned_view

SPEC = ImageSpec(height=64, width=64, mode="RGB")
HOW = Augmentation()


def test_turned_views_are_the_photo_as_a_server_sees_it_in_quarter_turns() -> None:
    upright = to_pixels(photo("disc", 0), SPEC)
    turned = turned_view(4).pixels(photo("disc", 0), SPEC)
    assert len(turned) == turned_view(4).vectors == 3
    for quarters, view in enumerate(turned, start=1):
        assert np.array_equal(view, np.rot90(upright, quarters))


def test_an_augmented_view_is_the_same_each_time_and_another_for_another_photo_number_or_seed() -> None:
    view = augmented_view(0, 0, 4, HOW)
    first = view.pixels(photo("disc", 0), SPEC)
    assert first.shape == (4, 64, 64, 3)
    assert np.array_equal(augmented_view(0, 0, 4, HOW).pixels(photo("disc", 0), SPEC), first)
    others = [view.pixels(photo("disc", 1), SPEC)]
    others += [augmented_view(number, seed, 4, HOW).pixels(photo("disc", 0), SPEC) for number, seed in ((1, 0), (0, 1))]
    assert all(not np.array_equal(other, first) for other in others)
    assert len({view.name, augmented_view(1, 0, 4, HOW).name, augmented_view(0, 1, 4, HOW).name}) == 3


def test_each_rotation_is_changed_anew_and_turned() -> None:
    """Without any change but the rotation, the views are the photo in its four rotations."""
    still = Augmentation(crop_area=(1.0, 1.0), crop_aspect=(1.0, 1.0), flip=False, jitter_share=0.0, grey_share=0.0)
    views = augmented_view(0, 0, 4, still).pixels(photo("triangle", 0), SPEC).astype(int)
    for quarters in range(4):
        assert np.array_equal(views[quarters], np.rot90(views[0], quarters))
    assert np.abs(views[0] - to_pixels(photo("triangle", 0), SPEC)).mean() < 6
    changed = augmented_view(0, 0, 4, Augmentation(flip=False)).pixels(photo("triangle", 0), SPEC)
    assert not np.array_equal(changed[1], np.rot90(changed[0]))


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    return Encoder(open_trunk("efficientnet-lite0", size=64), folder=tmp_path / "cache")


def test_views_are_encoded_once_and_read_from_the_cache(encoder: Encoder, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        photo("dots", number).save(file)
    images = encoder.read([FileOriginal(file) for file in files], ["dots"] * 3).images
    vectors = in_rotations(images, 4, encoder.views, "turned")
    assert vectors.shape == (3, 4, encoder.spec.dim)
    assert np.array_equal(vectors[:, 0], images.pixels)
    by_hand = encoder.encode(np.rot90(to_pixels(photo("dots", 1), SPEC), 3)[None])
    np.testing.assert_allclose(vectors[1, 3], by_hand[0], atol=1e-6)
    again = Encoder(encoder.trunk, folder=tmp_path / "cache")
    assert again.missing([FileOriginal(file) for file in files], turned_view(4)) == 0
    files[2].unlink()
    with pytest.raises(DataError, match=r"2.png cannot be read again .*1 of 3 images"):
        encoder.views(images, augmented_view(0, 0, 4, HOW))
