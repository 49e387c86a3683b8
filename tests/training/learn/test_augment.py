from __future__ import annotations

import colorsys

import pytest
import torch

from tests.helpers import random_images
from training.config import Augmentation
from training.learn.augment import _turn_hue, augment, eight_views, slight_change

NOTHING = Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), flip=False, jitter_share=0, grey_share=0)
CROP_ONLY = Augmentation(flip=False, jitter_share=0, grey_share=0)


def test_doing_nothing_changes_nothing() -> None:
    images = random_images(3, 3)
    torch.testing.assert_close(augment(images, NOTHING), images, atol=1e-5, rtol=0)


def test_eight_views_are_two_copies_in_four_rotations() -> None:
    images = random_images(3, 3)
    views, classes = eight_views(images, torch.tensor([1, 0, 1]), 2, NOTHING)
    assert views.shape == (24, 3, 8, 8)
    # Rotation r of class c is class r * classes + c.
    assert classes.tolist() == [1, 0, 1] * 2 + [3, 2, 3] * 2 + [5, 4, 5] * 2 + [7, 6, 7] * 2
    for turn in range(4):
        wanted = torch.rot90(images, turn, (2, 3)).repeat(2, 1, 1, 1)
        torch.testing.assert_close(views[6 * turn : 6 * turn + 6], wanted, atol=1e-5, rtol=0)


def test_the_second_copy_is_mirrored_where_images_may_be() -> None:
    images = random_images(2, 1)
    mirroring = Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), jitter_share=0, grey_share=0)
    views, _ = eight_views(images, torch.tensor([0, 1]), 2, mirroring)
    torch.testing.assert_close(views[:2], images, atol=1e-5, rtol=0)
    torch.testing.assert_close(views[2:4], images.flip(3), atol=1e-5, rtol=0)


def test_a_corner_is_rotated_by_quarter_circles() -> None:
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 0, 1] = 1
    views, _ = eight_views(image, torch.tensor([0]), 1, NOTHING)
    corners = [tuple((view[0] > 0.5).nonzero()[0].tolist()) for view in views[::2]]
    # Counter-clockwise: top left of centre, left below centre, bottom right of centre, right above centre.
    assert corners == [(0, 1), (2, 0), (3, 2), (1, 3)]


@pytest.mark.parametrize(
    "how",
    [
        CROP_ONLY,
        Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), jitter_share=1, grey_share=0),
        Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), jitter_share=0, tilt_degrees=20),
    ],
    ids=["crop", "colour", "tilt"],
)
def test_equal_images_are_changed_each_in_its_own_way(how: Augmentation) -> None:
    torch.manual_seed(0)
    first, second = augment(random_images(1, 3).repeat(2, 1, 1, 1), how)
    assert (first - second).abs().max() > 0.01


def test_a_crop_shows_a_part_of_the_image_and_not_the_whole() -> None:
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 8).expand(200, 1, 8, 8)
    cropped = augment(ramp, CROP_ONLY)
    widths = cropped[:, 0, 0, -1] - cropped[:, 0, 0, 0]
    assert (cropped.diff(dim=3) >= -1e-5).all()
    assert widths.min() < 0.4
    assert widths.max() > 0.8


@pytest.mark.parametrize(("share", "grey"), [(0.0, 0), (0.5, 100), (1.0, 200)])
def test_the_asked_share_of_images_turns_grey(share: float, grey: int) -> None:
    torch.manual_seed(0)
    how = Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), jitter_share=0, grey_share=share)
    images = augment(random_images(200, 3), how)
    is_grey = (images.amax(dim=1) - images.amin(dim=1)).amax(dim=(1, 2)) < 1e-5
    assert int(is_grey.sum()) == pytest.approx(grey, abs=20)


def test_the_asked_share_of_images_is_jittered() -> None:
    torch.manual_seed(0)
    images = random_images(200, 3)
    how = Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), jitter_share=0.8, grey_share=0)
    changed = (augment(images, how) - images).abs().amax(dim=(1, 2, 3)) > 1e-3
    assert int(changed.sum()) == pytest.approx(160, abs=20)


def test_turning_the_hue_agrees_with_colorsys() -> None:
    torch.manual_seed(0)
    colours = torch.cat(
        [torch.rand(200, 3), torch.eye(3), 1 - torch.eye(3), torch.full((1, 3), 0.3), torch.zeros(1, 3)]
    )
    turns = torch.rand(len(colours)) - 0.5
    turned = _turn_hue(colours[:, :, None, None], turns.view(-1, 1, 1))[:, :, 0, 0]
    wanted = []
    for (red, green, blue), turn in zip(colours.tolist(), turns.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        wanted.append(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value))
    torch.testing.assert_close(turned, torch.tensor(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("tilt", [0.0, 15.0])
def test_views_stay_between_black_and_white(channels: int, tilt: float) -> None:
    torch.manual_seed(0)
    images = torch.cat([random_images(50, channels), torch.zeros(5, channels, 8, 8), torch.ones(5, channels, 8, 8)])
    views = augment(images, Augmentation(tilt_degrees=tilt, brightness=0.9, contrast=0.9, saturation=0.9, hue=0.5))
    assert views.shape == images.shape
    assert views.min() >= -1e-6
    assert views.max() <= 1 + 1e-6


def test_the_same_seed_gives_the_same_views() -> None:
    images, classes = random_images(4, 3), torch.tensor([0, 1, 0, 1])

    def views(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return eight_views(images, classes, 2, Augmentation())[0]

    assert torch.equal(views(1), views(1))
    assert not torch.equal(views(1), views(2))


@pytest.mark.parametrize("area", [(0.0, 1.0), (0.9, 0.5), (0.5, 1.1)])
def test_an_impossible_crop_is_refused(area: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"crop_area is .*; allowed: 0 < low <= high <= 1"):
        Augmentation(crop_area=area)


def test_a_slight_change_leaves_a_spot_near_its_place_and_never_brightens_it() -> None:
    torch.manual_seed(0)
    images = torch.zeros(200, 1, 32, 32)
    images[:, :, 10:13, 20:23] = 1
    changed = slight_change(images, Augmentation(tilt_degrees=10))
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    mass = changed.sum(dim=(1, 2, 3))
    row, column = ((changed[:, 0] * place).sum(dim=(1, 2)) / mass for place in (rows, columns))
    # Moved by up to 2 of 32 pixels; 10 degrees and a tenth of the size are 2 more, as far from the centre as this.
    assert float((row - 11).abs().max()) < 4
    assert float((column - 21).abs().max()) < 4
    assert float(row.std()) > 0.8
    assert float(column.std()) > 0.8
    assert 0.69 < float(changed.amax()) <= 1
    assert float(changed.amax(dim=(1, 2, 3)).min()) < 0.8
