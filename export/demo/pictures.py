"""Pictures that a pre-trained trunk can tell apart: drawn shapes and textures, as JPEG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

WIDTH, HEIGHT = 120, 96


class Canvas:
    """Draws in units of WIDTH and HEIGHT on an image that may be several times as large."""

    def __init__(self, image: Image.Image, scale: int) -> None:
        self._draw, self._scale = ImageDraw.Draw(image), scale

    def ellipse(self, box: Sequence[float], **look: Any) -> None:
        self._draw.ellipse(self._scaled(box), **self._thick(look))

    def rectangle(self, box: Sequence[float], **look: Any) -> None:
        self._draw.rectangle(self._scaled(box), **self._thick(look))

    def polygon(self, points: Sequence[tuple[float, float]], **look: Any) -> None:
        self._draw.polygon(self._scaled([number for point in points for number in point]), **look)

    def line(self, points: Sequence[tuple[float, float]], **look: Any) -> None:
        self._draw.line(self._scaled([number for point in points for number in point]), **self._thick(look))

    def _scaled(self, numbers: Sequence[float]) -> list[float]:
        return [self._scale * number for number in numbers]

    def _thick(self, look: dict[str, Any]) -> dict[str, Any]:
        return look | ({"width": self._scale * look["width"]} if "width" in look else {})


Draw = Callable[[Canvas, np.random.Generator], None]


def _colour(random: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = random.integers(40, 256, 3).tolist()
    return red, green, blue


def _box(random: np.random.Generator) -> tuple[int, int, int, int]:
    side = int(random.integers(40, 76))
    left, top = int(random.integers(2, WIDTH - side - 2)), int(random.integers(2, HEIGHT - side - 2))
    return left, top, left + side, top + side


def _disc(draw: Canvas, random: np.random.Generator) -> None:
    draw.ellipse(_box(random), fill=_colour(random))


def _ring(draw: Canvas, random: np.random.Generator) -> None:
    draw.ellipse(_box(random), outline=_colour(random), width=6)


def _triangle(draw: Canvas, random: np.random.Generator) -> None:
    left, top, right, bottom = _box(random)
    draw.polygon([((left + right) // 2, top), (right, bottom), (left, bottom)], fill=_colour(random))


def _stripes(draw: Canvas, random: np.random.Generator) -> None:
    step, colour = int(random.integers(8, 14)), _colour(random)
    for x in range(0, WIDTH, step):
        draw.rectangle((x, 0, x + step // 2, HEIGHT), fill=colour)


def _checks(draw: Canvas, random: np.random.Generator) -> None:
    step, colour = int(random.integers(10, 16)), _colour(random)
    for x in range(0, WIDTH, step):
        for y in range(step * (x // step % 2), HEIGHT, 2 * step):
            draw.rectangle((x, y, x + step - 1, y + step - 1), fill=colour)


def _dots(draw: Canvas, random: np.random.Generator) -> None:
    step, colour = int(random.integers(12, 18)), _colour(random)
    for x in range(step // 2, WIDTH, step):
        for y in range(step // 2, HEIGHT, step):
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)


def _cross(draw: Canvas, random: np.random.Generator) -> None:
    left, top, right, bottom = _box(random)
    colour, width = _colour(random), int(random.integers(6, 12))
    draw.line([(left, top), (right, bottom)], fill=colour, width=width)
    draw.line([(left, bottom), (right, top)], fill=colour, width=width)


def _waves(draw: Canvas, random: np.random.Generator) -> None:
    step, colour, height = int(random.integers(12, 20)), _colour(random), int(random.integers(4, 9))
    for y in range(0, HEIGHT + step, step):
        points = [(x, y + height * np.sin(x / 7)) for x in range(0, WIDTH, 3)]
        draw.line(points, fill=colour, width=3)


PICTURES: Mapping[str, Draw] = {
    "disc": _disc,
    "ring": _ring,
    "stripes": _stripes,
    "checks": _checks,
    "triangle": _triangle,
    "dots": _dots,
    "cross": _cross,
    "waves": _waves,
}
_SEEDS = ("checks", "disc", "dots", "ring", "stripes", "triangle", "cross", "waves")
"""The place of a class is part of the seed of its pictures: new ones are added at the end."""


def photo(label: str, number: int, scale: int = 1) -> Image.Image:
    """One picture of a class: the shape on a blurred, noisy background, the same each time; `scale` times as large."""
    random = np.random.default_rng([_SEEDS.index(label), number])
    noise = random.integers(0, 90, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    image = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))
    if scale > 1:
        image = image.resize((scale * WIDTH, scale * HEIGHT), Image.Resampling.BICUBIC)
    PICTURES[label](Canvas(image, scale), random)
    return image.filter(ImageFilter.GaussianBlur(0.6 * scale))


def write_photos(folder: Path, **counts: int) -> Path:
    """A folder per class with so many JPEG files."""
    for label, count in counts.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            photo(label, number).save(folder / label / f"{number:03}.jpg", quality=90)
    return folder
