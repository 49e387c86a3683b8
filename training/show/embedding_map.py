"""The test images of a run on a flat map, as SVG without scripts: the image under the pointer is shown.

With a trunk the map is of encoded vectors, else of the distances from every class. The axes are their main directions,
or UMAP finds the places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from serving.bundle.embedding import Embedding, some_of_each
from serving.bundle.umap_places import umap_places
from training.data.images import Images
from training.measure.evaluation import Evaluation

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#9933ff")
"""Six colours of Okabe and Ito, and a violet that is far from them under any deficiency of colour vision; also on the
page /unknowns."""
SHAPES = ("M-4,-4h8v8h-8z", "M0,-5L5,4H-5z", "M0,-6L5,0L0,6L-5,0z", "M-5,-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z")
"""Paths of unknown classes; learned classes are grey dots."""
WIDTH, HEIGHT, EDGE = 900, 560, 30
LETTER = 7.5
"""The width of a letter of a name."""
PER_CLASS, MOST_UNKNOWN, MOST_PICTURES = 12, 400, 1400
MOST_CHARACTERS = 4_000_000
"""Of all pictures together, so that the page stays small enough to be sent around."""


def style(at: int) -> tuple[str, str]:
    """The shape and the colour of the unknown class in this place of all."""
    return SHAPES[at // len(COLOURS) % len(SHAPES)], COLOURS[at % len(COLOURS)]


class Point(NamedTuple):
    """One image on the map."""

    x: float
    y: float
    label: str
    unknown: bool
    image: Images


def embedding_map(evaluation: Evaluation, picture: Callable[[Images], str], method: str = "pca") -> Markup:
    """The map; `picture` makes a small image as a data URL. Empty with too few images.

    The method is pca or umap; raises a UmapError without that extra.
    """
    points = list(_points(evaluation, method))
    if len(points) < 3:
        return Markup("")
    unknown = sorted({point.label for point in points if point.unknown})
    marks = [_mark(point, unknown) for point in points]
    # Above all marks and names: what lies beneath a picture is not drawn over it.
    targets = [_target(points[place], shown) for place, shown in _pictures(points, picture)]
    return Markup(
        f'<div class="map-box"><svg class="map" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="map of the test images">{"".join(marks)}{"".join(_names(points))}{"".join(targets)}</svg></div>'
        f"{_legend(unknown)}"
    )


def _points(evaluation: Evaluation, method: str) -> Iterator[Point]:
    known, unknown = evaluation.known, evaluation.unknown
    chosen = some_of_each(evaluation.class_ids, PER_CLASS)
    others = np.arange(min(len(unknown), MOST_UNKNOWN))
    if evaluation.run.config.trunk is not None:
        features = [known.pixels[chosen], unknown.pixels[others]]
    else:
        outputs = (evaluation.outputs, evaluation.unknown_outputs)
        if "distances" not in evaluation.outputs:
            # Another rule than the served one was measured, which has none.
            return
        features = [each["distances"][some] for each, some in zip(outputs, (chosen, others), strict=True)]
    flat = [np.asarray(each, np.float64).reshape(len(each), math.prod(each.shape[1:])) for each in features]
    if len(chosen) < 3:
        return
    fitted = Embedding.fit(flat[0], evaluation.class_ids[chosen])
    parts = [fitted.project_all(each) if method == "umap" else fitted.project(each) for each in flat if len(each)]
    all_places = np.concatenate([each for each in parts if each is not None])
    if method == "umap":
        all_places = umap_places(all_places)
    across, down = (_scaled(all_places[:, axis], size) for axis, size in ((0, WIDTH), (1, HEIGHT)))
    sources = [*((known, place, False) for place in chosen), *((unknown, place, True) for place in others)]
    for x, y, (images, place, is_unknown) in zip(across, down, sources, strict=True):
        yield Point(x, HEIGHT - y, str(images.labels[place]), is_unknown, images.at(np.array([place])))


def _scaled(values: NDArray[np.floating], size: int) -> list[float]:
    """From the 1st to the 99th percentile over the page; a few points beyond are put on its edge."""
    low, high = np.percentile(values, [1, 99])
    share = np.clip((values - low) / max(float(high - low), 1e-9), -0.03, 1.03)
    return [round(float(EDGE + each * (size - 2 * EDGE)), 1) for each in share]


def _pictures(points: Sequence[Point], picture: Callable[[Images], str]) -> Iterator[tuple[int, str]]:
    """Points with their pictures: those of unknown images first, the others drawn at random, until the page is full."""
    order = np.random.default_rng(0).permutation(len(points))
    left = MOST_CHARACTERS
    for place in sorted(order.tolist(), key=lambda place: not points[place].unknown)[:MOST_PICTURES]:
        shown = picture(points[place].image)
        left -= len(shown)
        if left < 0:
            return
        yield place, shown


def _mark(point: Point, unknown: Sequence[str]) -> str:
    shape = '<circle r="2.5" class="known"/>'
    if point.unknown:
        path, colour = style(unknown.index(point.label))
        shape = f'<path d="{path}" fill="{colour}"/>'
    return f'<g class="dot" transform="translate({point.x},{point.y})">{_title(point)}{shape}</g>'


def _target(point: Point, picture: str) -> str:
    """What shows the picture of a point while it is under the pointer."""
    # Towards the middle, so that no picture is cut off.
    left, top = (-104 if point.x > WIDTH / 2 else 8), (-104 if point.y > HEIGHT / 2 else 8)
    image = f'<image href="{picture}" x="{left}" y="{top}" width="96" height="96"/>'
    place = f'transform="translate({point.x},{point.y})"'
    return f'<g class="pictured" {place}>{_title(point)}<circle r="5"/>{image}</g>'


def _title(point: Point) -> str:
    return f"<title>{escape(point.label)}{', never learned' if point.unknown else ''}</title>"


def _names(points: Sequence[Point]) -> Iterator[str]:
    """Every learned class at the mean of its images, unless another name is in the way."""
    taken: list[tuple[float, float, float]] = []
    for label in dict.fromkeys(point.label for point in points if not point.unknown):
        own = [(point.x, point.y) for point in points if point.label == label and not point.unknown]
        x, y = (float(np.mean(values)) for values in zip(*own, strict=True))
        half = LETTER / 2 * len(label) + 3
        x = min(max(x, half), WIDTH - half)
        if all(abs(x - left) > half + other or abs(y - top) > 14 for left, top, other in taken):
            taken.append((x, y, half))
            yield f'<text x="{x:.0f}" y="{y:.0f}">{escape(label)}</text>'


def _legend(unknown: Sequence[str]) -> str:
    entries = ['<li><svg viewBox="-6 -6 12 12"><circle r="2.5" class="known"/></svg>learned classes</li>']
    for at, label in enumerate(unknown):
        path, colour = style(at)
        swatch = f'<svg viewBox="-6 -6 12 12"><path d="{path}" fill="{colour}"/></svg>'
        entries.append(f"<li>{swatch}{escape(label)}</li>")
    return f'<ul class="map-legend">{"".join(entries)}</ul>'
