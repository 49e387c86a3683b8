"""The two views of contrastive learning: every image of a batch is changed in its own way, on its device, at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.network import rotations
from training.together import Share

VIEWS = 8
"""Of each image: two, in four rotations."""

Draw = Callable[[], Tensor]
"""A random number in [0, 1) for each image [n], new ones each time."""


@dataclass(frozen=True)
class Augmentation:
    """How far a view may stray from its image. The defaults are the paper's (CSI's)."""

    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    tilt_degrees: float = 0.0
    flip: bool = True
    jitter_share: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey_share: float = 0.2

    def __post_init__(self) -> None:
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_area is {self.crop_area}; allowed: 0 < low <= high <= 1, such as (0.08, 1.0)")


def eight_views(
    images: Tensor, local_classes: Tensor, classes: int, how: Augmentation, share: Share | None = None
) -> tuple[Tensor, Tensor]:
    """[n] images -> [8 n]: two views, four rotations each, every rotation of a class a class of its own.

    Where the images are only a `share` of a joint batch, each is changed as it would be among all of them.
    """
    views = torch.cat([images, images.flip(3) if how.flip else images])
    turned = rotations(views)
    turn = torch.arange(4, device=images.device).repeat_interleave(len(views))
    share = share or Share.whole(len(images))
    rows = None if share == Share.whole(share.total) else share.rows_of_copies(VIEWS, images.device)
    draw = drawing(VIEWS * share.total, images.device, rows)
    return augment(turned, how, draw), turn * classes + local_classes.repeat(VIEWS)


def drawing(count: int, device: torch.device, rows: Tensor | None = None) -> Draw:
    """Random numbers for `count` images, of which only those of `rows` are kept."""
    if rows is None:
        return lambda: torch.rand(count, device=device)
    return lambda: torch.rand(count, device=device)[rows]


def augment(images: Tensor, how: Augmentation, draw: Draw | None = None) -> Tensor:
    """[n, channels, height, width] in [0, 1], the same out."""
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
    """A random box of each image, stretched over the whole, all in one resampling."""
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
        return images  # an empty share has drawn with the others, and torch makes no grid of nothing
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    padding = "zeros" if how.tilt_degrees else "reflection"
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=False)


def _factors(draw: Draw, spread: float) -> Tensor:
    return _uniform(draw, max(0.0, 1 - spread), 1 + spread).view(-1, 1, 1, 1)


def _luma(images: Tensor) -> Tensor:
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


def _jitter_light(images: Tensor, how: Augmentation, draw: Draw) -> Tensor:
    """Brightness and contrast, the two that a grey image has."""
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
    """Move each image's hue by `turn` of the colour circle, through HSV."""
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
