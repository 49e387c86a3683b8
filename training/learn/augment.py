"""Augmented views for training: a whole batch at once, on its device, with random numbers of their own per image."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from models.network import rotations
from training.config import Augmentation
from training.host.distributed import Share

VIEWS = 8
"""Views per image: two, in four rotations each."""

Draw = Callable[[], Tensor]
"""Returns new random numbers in [0, 1), one per image [n]."""


def eight_views(
    images: Tensor, local_classes: Tensor, classes: int, how: Augmentation, share: Share | None = None
) -> tuple[Tensor, Tensor]:
    """[n] images -> [8 n]: two views in four rotations each; every rotation of a class is a class of its own.

    If the images are a `share` of a joint batch, each is changed as it would be within the whole batch.
    """
    views = torch.cat([images, images.flip(3) if how.flip else images])
    rotated = rotations(views)
    turn = torch.arange(4, device=images.device).repeat_interleave(len(views))
    share = share or Share.whole(len(images))
    rows = None if share == Share.whole(share.total) else share.rows_of_copies(VIEWS, images.device)
    draw = drawing(VIEWS * share.total, images.device, rows)
    return augment(rotated, how, draw), turn * classes + local_classes.repeat(VIEWS)


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
    """[n, channels, height, width] in [0, 1] -> the same shape and range."""
    draw = draw or drawing(len(images), images.device)
    images = _crop(images, how, draw)
    jittered = _jitter_colour(images, how, draw) if images.shape[1] == 3 else _jitter_light(images, how, draw)
    chosen = draw().view(-1, 1, 1, 1) < how.jitter_share
    images = torch.where(chosen, jittered, images)
    if images.shape[1] == 3 and how.grey_share > 0:
        grey = draw().view(-1, 1, 1, 1) < how.grey_share
        images = torch.where(grey, _luma(images).expand_as(images), images)
    return images


def _uniform(draw: Draw, low: float, high: float) -> Tensor:
    return draw() * (high - low) + low


def _crop(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """A random box of each image, stretched to the full size, in one resampling."""
    count = len(images)
    area = _uniform(draw, *how.crop_area)
    aspect = torch.exp(_uniform(draw, math.log(how.crop_aspect[0]), math.log(how.crop_aspect[1])))
    width = (area * aspect).sqrt().clamp(max=1)
    height = (area / aspect).sqrt().clamp(max=1)
    tilt = _uniform(draw, -how.tilt_degrees, how.tilt_degrees) * (math.pi / 180)
    cos, sin = torch.cos(tilt), torch.sin(tilt)
    shift_x = _uniform(draw, -1, 1) * (1 - width)
    shift_y = _uniform(draw, -1, 1) * (1 - height)
    rows = [width * cos, -height * sin, shift_x, width * sin, height * cos, shift_y]
    affine = torch.stack(rows, dim=1).view(count, 2, 3)
    if not count:
        return images  # an empty share has drawn its numbers, and torch cannot make an empty grid
    return _resampled(images, affine, how)


MOVED, TILTED, SCALED, DARKENED = 1 / 16, 10.0, 0.1, 0.3
"""How strongly a slight change may move (share of the side), tilt (degrees), scale (logarithm) and darken an image."""


def slight_change(images: Tensor, how: Augmentation) -> Tensor:
    """Copies of images that still show the same: each a little moved, tilted, scaled and darkened at random."""
    draw = drawing(len(images), images.device)
    tilt = _uniform(draw, -TILTED, TILTED) * (math.pi / 180)
    size = torch.exp(_uniform(draw, -SCALED, SCALED))
    cos, sin = torch.cos(tilt) * size, torch.sin(tilt) * size
    # Coordinates run from -1 to 1, so that a side has length 2.
    right, down = (_uniform(draw, -2 * MOVED, 2 * MOVED) for _ in range(2))
    affine = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    return _resampled(images, affine, how) * _uniform(draw, 1 - DARKENED, 1).view(-1, 1, 1, 1)


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


def _jitter_light(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """Brightness and contrast, which apply to grey images too."""
    images = (images * _factors(draw, how.brightness)).clamp(0, 1)
    middle = images.mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(middle, images, _factors(draw, how.contrast)).clamp(0, 1)


def _jitter_colour(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """Brightness, contrast, saturation and hue."""
    images = (images * _factors(draw, how.brightness)).clamp(0, 1)
    middle = _luma(images).mean(dim=(2, 3), keepdim=True)
    images = torch.lerp(middle, images, _factors(draw, how.contrast)).clamp(0, 1)
    images = torch.lerp(_luma(images), images, _factors(draw, how.saturation)).clamp(0, 1)
    return _turn_hue(images, _uniform(draw, -how.hue, how.hue).view(-1, 1, 1))


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Shift each image's hue by the share `turn` of the colour circle, through HSV."""
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
    channels = []
    for offset in (5.0, 3.0, 1.0):
        position = (hue + offset) % 6
        channels.append(high - chroma * torch.minimum(position, 4 - position).clamp(0, 1))
    return torch.stack(channels, dim=1)
