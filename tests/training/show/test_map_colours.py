"""The colours of the maps on /unknowns and in the report, as people with deficiencies of colour vision see them."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers_serving import ROOT
from training.show.embedding_map import COLOURS, SHAPES, style

MARKS = (ROOT / "serving/http/page/static/map-marks.js").read_text()
BACKGROUNDS = ("#ffffff", "#1b1d25")
"""Of the light and the dark page."""
LEAST_DISTANCE, LEAST_CONTRAST = 15, 2.2
SEEN_BY = {
    "everybody else": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""From linear red, green and blue to what is seen (Machado, Oliveira and Fernandes, 2009, severity 1)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def listed(name: str) -> tuple[str, ...]:
    """A list of texts in the page's script."""
    (found,) = re.findall(rf"const {name} = \[(.*?)\];", MARKS)
    return tuple(re.findall(r'"([^"]+)"', found))


def linear(colour: str) -> NDArray[np.float64]:
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIELAB of linear red, green and blue, in which distances are about as large as they look."""
    share = TO_XYZ @ np.clip(light, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def luminance(colour: str) -> float:
    return float(TO_XYZ[1] @ linear(colour))


def test_page_and_report_have_the_same_colours() -> None:
    assert listed("COLOURS") == COLOURS


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_every_pair_of_colours_is_far_apart(eyes: str) -> None:
    seen = {colour: lab(np.array(SEEN_BY[eyes]) @ linear(colour)) for colour in COLOURS}
    for one, other in itertools.combinations(COLOURS, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= LEAST_DISTANCE, (one, other)


def test_every_colour_is_seen_on_the_light_and_the_dark_page() -> None:
    for colour, background in itertools.product(COLOURS, BACKGROUNDS):
        light, dark = sorted((luminance(colour), luminance(background)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= LEAST_CONTRAST, (colour, background)


def test_where_a_colour_comes_again_it_has_another_shape() -> None:
    count = len(COLOURS) * len(SHAPES)
    assert len({style(at) for at in range(count)}) == count
    for shapes in (listed("SHAPES"), SHAPES):
        assert len(set(shapes)) == len(shapes) >= 4
