"""Augmented views for training: a whole batch at once, on its device, with separate random numbers for each image."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from models.config import ROTATIONS
from models.network import rotations
from training.config import Augmentation
from training.host.distributed import Share

PAIR = 2
"""Views of each image that step 1 compares, in four rotations each. Step 2 takes one."""
TRIES = 10
"""Boxes that are drawn for a crop; if none of them fits into the image, the whole image is taken."""

Draw = Callable[[], Tensor]
"""Returns new random numbers in [0, 1), one per image [n]."""
Change = Callable[[Tensor, Augmentation, Draw], Tensor]
"""Images [n, ...] -> the same, each changed with separate random numbers."""


def rotated_views(
    images: Tensor, local_classes: Tensor, classes: int, how: Augmentation, views: int, share: Share | None = None
) -> tuple[Tensor, Tensor]:
    """[n] images -> [4 * views * n]: `views` of each, mirrored or not, in four rotations, and each of these augmented;
    every rotation of a class is a separate class.

    If the images are a `share` of a joint batch, each is changed as it would be within the whole batch.
    """
    share = share or Share.whole(len(images))
    copies = images.repeat(views, 1, 1, 1)
    if how.flip:
        mirrored = _drawing_for(share, views, images.device)().view(-1, 1, 1, 1) < 0.5
        copies = torch.where(mirrored, copies.flip(3), copies)
    turn = torch.arange(ROTATIONS, device=images.device).repeat_interleave(len(copies))
    draw = _drawing_for(share, ROTATIONS * views, images.device)
    return augment(rotations(copies), how, draw), turn * classes + local_classes.repeat(ROTATIONS * views)


def _drawing_for(share: Share, copies: int, device: torch.device) -> Draw:
    """Random numbers for `copies` of the images of a share."""
    rows = None if share == Share.whole(share.total) else share.rows_of_copies(copies, device)
    return drawing(copies * share.total, device, rows)


def standard_view(images: Tensor, how: Augmentation, share: Share | None = None) -> Tensor:
    """[n] images -> [n]: each shifted by up to an eighth of its side and mirrored at random, for cross-entropy."""
    _, _, height, width = images.shape
    share = share or Share.whole(len(images))
    margin = max(height, width) // 8
    padded = functional.pad(images, [margin] * 4)
    moves = (torch.randint(2 * margin + 1, (share.total, 1), device=images.device)[share.rows] for _ in range(2))
    rows, columns = (
        move + torch.arange(side, device=images.device) for move, side in zip(moves, (height, width), strict=True)
    )
    if how.flip:
        mirrored = torch.rand(share.total, 1, device=images.device)[share.rows] < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    number = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def drawing(count: int, device: torch.device, rows: Tensor | None = None) -> Draw:
    """Random numbers for `count` images, of which only `rows` are kept."""
    if rows is None:
        return lambda: torch.rand(count, device=device)
    return lambda: torch.rand(count, device=device)[rows]


def augment(images: Tensor, how: Augmentation, draw: Draw | None = None) -> Tensor:
    """[n, channels, height, width] in [0, 1] -> the same shape and range: colours first, then the crop, as in CSI."""
    draw = draw or drawing(len(images), images.device)
    chosen = draw().view(-1, 1, 1, 1) < how.jitter_share
    images = torch.where(chosen, _jitter(images, how, draw), images)
    if images.shape[1] == 3 and how.grey_share > 0:
        grey = draw().view(-1, 1, 1, 1) < how.grey_share
        images = torch.where(grey, _luma(images).expand_as(images), images)
    return _crop(images, how, draw)


def _uniform(draw: Draw, low: float, high: float) -> Tensor:
    return draw() * (high - low) + low


def _crop(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """A random box of each image, stretched to the full size, in one resampling."""
    width, height = _box(how, draw)
    tilt = _uniform(draw, -how.tilt_degrees, how.tilt_degrees) * (math.pi / 180)
    cos, sin = torch.cos(tilt), torch.sin(tilt)
    shift_x = _uniform(draw, -1, 1) * (1 - width)
    shift_y = _uniform(draw, -1, 1) * (1 - height)
    rows = [width * cos, -height * sin, shift_x, width * sin, height * cos, shift_y]
    affine = torch.stack(rows, dim=1).view(len(images), 2, 3)
    if not len(images):
        return images  # an empty share has drawn its numbers, and torch cannot make an empty grid
    return _resampled(images, affine, how)


def _box(how: Augmentation, draw: Draw) -> tuple[Tensor, Tensor]:
    """Width and height of each image's box, as shares of the sides [n]: the first of TRIES that fits."""
    logarithms = math.log(how.crop_aspect[0]), math.log(how.crop_aspect[1])
    area = torch.stack([_uniform(draw, *how.crop_area) for _ in range(TRIES)])
    aspect = torch.stack([_uniform(draw, *logarithms) for _ in range(TRIES)]).exp()
    sides = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()])
    fits = (sides <= 1).all(dim=0)
    first = fits.float().argmax(dim=0)
    found = sides.gather(1, first.expand(2, 1, -1))[:, 0]
    width, height = torch.where(fits.any(dim=0), found, torch.ones_like(found))
    return width, height


MOVED, TILTED, SCALED, DARKENED = 1 / 16, 10.0, 0.1, 0.3
"""How strongly a slight change may move (share of the side), tilt (degrees), scale (logarithm) and darken an image."""


def slight_change(images: Tensor, how: Augmentation, strength: float = 1.0) -> Tensor:
    """Copies of images that still show the same: each a little moved, tilted, scaled and darkened at random, by up to
    `strength` times the constants above."""
    draw = drawing(len(images), images.device)
    tilt = strength * _uniform(draw, -TILTED, TILTED) * (math.pi / 180)
    size = torch.exp(strength * _uniform(draw, -SCALED, SCALED))
    cos, sin = torch.cos(tilt) * size, torch.sin(tilt) * size
    # Coordinates run from -1 to 1, so that a side has length 2.
    right, down = (strength * _uniform(draw, -2 * MOVED, 2 * MOVED) for _ in range(2))
    affine = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    return _resampled(images, affine, how) * (1 - strength * DARKENED * draw()).view(-1, 1, 1, 1)


def _resampled(images: Tensor, affine: Tensor, how: Augmentation) -> Tensor:
    """Each image under its own affine map [n, 2, 3]."""
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    padding = "zeros" if how.tilt_degrees else "reflection"
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=False)


def _factors(draw: Draw, spread: float) -> Tensor:
    return _uniform(draw, max(0.0, 1 - spread), 1 + spread).view(-1, 1, 1, 1)


def _luma(images: Tensor) -> Tensor:
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


def _jitter(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """Contrast, and hue, saturation and brightness, in an order that is drawn for the whole batch.

    The drawn number is of the CPU's generator, which is in the same state in all processes.
    """
    changes: list[Change] = [_change_contrast, _change_hsv if images.shape[1] == 3 else _change_brightness]
    for change in changes if torch.rand(()) < 0.5 else reversed(changes):
        images = change(images, how, draw)
    return images


def _change_contrast(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """Each channel further from its mean, or nearer to it."""
    middle = images.mean(dim=(2, 3), keepdim=True)
    return torch.lerp(middle, images, _factors(draw, how.contrast)).clamp(0, 1)


def _change_brightness(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """What `_change_hsv` does to an image without colours."""
    return (images * _factors(draw, how.brightness)).clamp(0, 1)


def _change_hsv(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """Hue, saturation and brightness, the value of HSV."""
    turn = _uniform(draw, -how.hue, how.hue).view(-1, 1, 1)
    saturation, value = (_factors(draw, spread)[:, 0] for spread in (how.saturation, how.brightness))
    return _in_hsv(images, turn, saturation, value)


def _in_hsv(images: Tensor, turn: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Each image's hue shifted by the share `turn` of the colour circle, its saturation and value times a factor; all
    [n, 1, 1]."""
    red, green, blue = images.unbind(dim=1)
    high, low = images.amax(dim=1), images.amin(dim=1)
    chroma = high - low
    safe = chroma.clamp(min=1e-8)
    hue = torch.where(
        high == red,
        (green - blue) / safe % 6,
        torch.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = (hue + 6 * turn) % 6
    saturated = (chroma / high.clamp(min=1e-8) * saturation).clamp(0, 1)
    high = (high * value).clamp(0, 1)
    channels = []
    for offset in (5.0, 3.0, 1.0):
        position = (hue + offset) % 6
        channels.append(high - high * saturated * torch.minimum(position, 4 - position).clamp(0, 1))
    return torch.stack(channels, dim=1)
