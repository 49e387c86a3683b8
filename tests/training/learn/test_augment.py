from __future__ import annotations

import colorsys
from dataclasses import replace

import pytest
import torch

from tests.helpers import random_images
from training.config import Augmentation
from training.learn import augment as module
from training.learn.augment import _in_hsv, augment, rotated_views, slight_change
from training.presets import PRESETS

NOTHING = Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), flip=False, jitter_share=0, grey_share=0)
CROP_ONLY = Augmentation(flip=False, jitter_share=0, grey_share=0)


def test_doing_nothing_changes_nothing() -> None:
    images = random_images(3, 3)
    torch.testing.assert_close(augment(images, NOTHING), images, atol=1e-5, rtol=0)


def test_two_views_are_two_copies_in_four_rotations() -> None:
    images = random_images(3, 3)
    views, classes = rotated_views(images, torch.tensor([1, 0, 1]), 2, NOTHING, 2)
    assert views.shape == (24, 3, 8, 8)
    # Rotation r of class c is class r * classes + c.
    assert classes.tolist() == [1, 0, 1] * 2 + [3, 2, 3] * 2 + [5, 4, 5] * 2 + [7, 6, 7] * 2
    for turn in range(4):
        wanted = torch.rot90(images, turn, (2, 3)).repeat(2, 1, 1, 1)
        torch.testing.assert_close(views[6 * turn : 6 * turn + 6], wanted, atol=1e-5, rtol=0)


MIRROR_ONLY = Augmentation(crop_area=(1, 1), crop_aspect=(1, 1), jitter_share=0, grey_share=0)


@pytest.mark.parametrize("views", [1, 2])
def test_each_view_is_mirrored_with_probability_half_and_all_its_rotations_with_it(views: int) -> None:
    torch.manual_seed(0)
    images = random_images(1, 1).expand(400, 1, 8, 8)
    seen, classes = rotated_views(images, torch.zeros(400, dtype=torch.long), 1, MIRROR_ONLY, views)
    assert len(seen) == len(classes) == 4 * views * 400
    turned = seen.view(4, views, 400, 1, 8, 8)
    mirrored = (turned[0] - images[0].flip(2)).abs().amax(dim=(2, 3, 4)) < 1e-5
    plain = (turned[0] - images[0]).abs().amax(dim=(2, 3, 4)) < 1e-5
    assert torch.equal(mirrored, ~plain)
    for view in mirrored:
        assert int(view.sum()) == pytest.approx(200, abs=40)
    if views == 2:
        # Independently: a quarter of the images is mirrored in both views.
        assert int((mirrored[0] & mirrored[1]).sum()) == pytest.approx(100, abs=35)
    for turn in range(4):
        torch.testing.assert_close(turned[turn], torch.rot90(turned[0], turn, (3, 4)), atol=1e-5, rtol=0)


def test_colours_are_changed_before_the_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contrast is that of the whole image: a crop that shows the black half only is changed by the white half."""
    torch.manual_seed(0)
    images = torch.zeros(300, 3, 8, 8)
    images[..., 4:] = 1
    # Little contrast moves both halves towards grey. After a crop of the black half there would be nothing to change.
    monkeypatch.setattr(module, "_factors", lambda draw, spread: draw().view(-1, 1, 1, 1) * 0 + 0.5)
    how = Augmentation(
        crop_area=(0.1, 0.2), jitter_share=1, grey_share=0, brightness=0, saturation=0, hue=0, flip=False
    )
    black = (augment(images, how).flatten(1).amax(dim=1) < 1e-4).float().mean()
    assert black == 0


def test_contrast_is_changed_in_each_channel_around_its_own_mean() -> None:
    torch.manual_seed(0)
    image = torch.full((200, 3, 8, 8), 0.5)
    image[:, 0, :4], image[:, 0, 4:] = 0.3, 0.5
    how = replace(NOTHING, jitter_share=1, brightness=0, saturation=0, hue=0)
    changed = augment(image, how)
    torch.testing.assert_close(changed[:, 1:], image[:, 1:], atol=1e-4, rtol=0)
    torch.testing.assert_close(changed[:, 0].mean(dim=(1, 2)), torch.full((200,), 0.4), atol=1e-3, rtol=0)
    spread = changed[:, 0, 4:].mean(dim=(1, 2)) - 0.4
    assert spread.min() == pytest.approx(0.06, abs=0.01)
    assert spread.max() == pytest.approx(0.14, abs=0.01)


def test_contrast_and_colour_are_changed_in_either_order_drawn_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []

    def record(name: str) -> module.Change:
        def change(images: torch.Tensor, how: Augmentation, draw: module.Draw) -> torch.Tensor:
            orders[-1].append(name)
            return images

        return change

    monkeypatch.setattr(module, "_change_contrast", record("contrast"))
    monkeypatch.setattr(module, "_change_hsv", record("hsv"))
    torch.manual_seed(0)
    for _ in range(30):
        orders.append([])
        augment(random_images(2, 3), Augmentation())
    assert {tuple(order) for order in orders} == {("contrast", "hsv"), ("hsv", "contrast")}


def test_the_papers_presets_augment_as_csi_does() -> None:
    csi = Augmentation(
        crop_area=(0.08, 1.0), crop_aspect=(3 / 4, 4 / 3), tilt_degrees=0, flip=True, jitter_share=0.8, brightness=0.4,
        contrast=0.4, saturation=0.4, hue=0.1 * 255 / 360, grey_share=0.2,
    )  # fmt: skip
    for name in ("mnist-5t", "cifar10-5t", "cifar100-10t", "cifar100-20t", "tinyimagenet-5t", "tinyimagenet-10t"):
        assert PRESETS[name].augmentation == csi


def test_a_corner_is_rotated_by_quarter_circles() -> None:
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 0, 1] = 1
    views, _ = rotated_views(image, torch.tensor([0]), 1, NOTHING, 2)
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


def test_boxes_that_do_not_fit_are_drawn_again_and_not_cut_off() -> None:
    """A box of nearly the whole area fits only if it is nearly square: no side is cut to the image's."""
    torch.manual_seed(0)
    how = Augmentation(crop_area=(0.7, 1.0))
    width, height = module._box(how, module.drawing(2000, torch.device("cpu")))
    assert ((width <= 1) & (height <= 1)).all()
    assert ((width == 1) & (height == 1)).float().mean() < 0.05
    assert ((width == 1) ^ (height == 1)).sum() == 0


def test_hue_saturation_and_value_agree_with_colorsys() -> None:
    torch.manual_seed(0)
    colours = torch.cat(
        [torch.rand(200, 3), torch.eye(3), 1 - torch.eye(3), torch.full((1, 3), 0.3), torch.zeros(1, 3)]
    )
    turns, *factors = torch.rand(len(colours)) - 0.5, torch.rand(len(colours)) + 0.5, torch.rand(len(colours)) + 0.5
    changes = (each.view(-1, 1, 1) for each in (turns, *factors))
    turned = _in_hsv(colours[:, :, None, None], *changes)[:, :, 0, 0]
    wanted = []
    rows = (each.tolist() for each in (colours, turns, *factors))
    for (red, green, blue), turn, more, brighter in zip(*rows, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        wanted.append(colorsys.hsv_to_rgb((hue + turn) % 1, min(1, saturation * more), min(1, value * brighter)))
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
        return rotated_views(images, classes, 2, Augmentation(), 2)[0]

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
