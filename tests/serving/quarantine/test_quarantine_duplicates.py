"""Which images count as duplicates, measured on scikit-learn's digits and its two photographs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.datasets import load_sample_images

from serving.bundle.errors import ImageError
from serving.bundle.sections import ImageSpec
from serving.quarantine.duplicates import (
    MOST_DIFFERENCE,
    MOST_DIFFERENCE_ANYWHERE,
    Fingerprints,
    _numbers,
    _shape,
    summarize,
)
from tests.helpers_serving import saved
from training.data.datasets import load_source

SPEC = ImageSpec(height=16, width=16, mode="L")


@pytest.fixture(scope="module")
def digits() -> dict[str, list[Image.Image]]:
    source = load_source("digits", SPEC, None)
    return {
        label: [
            Image.fromarray(pixels[:, :, 0])
            for part in (source.train, source.test)
            for pixels in part.of([label]).pixels
        ]
        for label in source.classes
    }


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    """Crops of 192 pixels that contain more than plain sky."""
    squares = [
        Image.fromarray(image[top : top + 192, left : left + 192])
        for image in load_sample_images().images
        for top in range(0, image.shape[0] - 191, 192)
        for left in range(0, image.shape[1] - 191, 192)
    ]
    return [square for square in squares if np.asarray(square.convert("L")).std() > 20]


def variants(image: Image.Image) -> dict[str, bytes]:
    """The same image after re-encoding, resizing and similar changes."""
    width, height = image.size
    twice = (2 * width, 2 * height)
    return {
        **{f"JPEG {quality}": saved(image, "JPEG", quality=quality) for quality in (70, 80, 95)},
        "WebP": saved(image, "WEBP", quality=80),
        "BMP": saved(image, "BMP"),
        "nearest": saved(image.resize(twice, Image.Resampling.NEAREST)),
        "bilinear": saved(image.resize(twice, Image.Resampling.BILINEAR)),
        "bicubic": saved(image.resize(twice, Image.Resampling.BICUBIC)),
        "resized and JPEG": saved(image.resize(twice, Image.Resampling.BICUBIC), "JPEG", quality=80),
        "darker": saved(ImageEnhance.Brightness(image).enhance(0.95)),
        "brighter": saved(ImageEnhance.Brightness(image).enhance(1.05)),
    }


def fingerprint(image: Image.Image) -> bytes:
    return summarize(saved(image)).fingerprint


def same(one: bytes, other: bytes) -> bool:
    known = Fingerprints()
    known.add(1, one)
    return known.same_as(other) == [1]


def test_no_two_handwritten_digits_are_taken_for_one(digits: dict[str, list[Image.Image]]) -> None:
    """All 1,797 digits are distinct, and the eights and nines with a margin."""
    known = Fingerprints()
    for image in (image for images in digits.values() for image in images):
        print_ = fingerprint(image)
        assert known.same_as(print_) == []
        known.add(len(known), print_)
    assert len(known) == 1797
    shapes = np.stack([_shape(_numbers(fingerprint(image))) for label in "89" for image in digits[label]])
    distances = 1 - shapes @ shapes.T + 9 * np.eye(len(shapes))
    assert distances.min() > 7 * MOST_DIFFERENCE


def test_a_digit_is_known_again(digits: dict[str, list[Image.Image]]) -> None:
    for image in [*digits["8"][::4], *digits["9"][::4]]:
        original = fingerprint(image)
        for name, content in variants(image).items():
            assert same(original, summarize(content).fingerprint), name


def test_a_photograph_is_known_again(photographs: list[Image.Image]) -> None:
    assert len(photographs) >= 8
    for image in photographs:
        original = fingerprint(image)
        half = saved(image.resize((96, 96), Image.Resampling.BICUBIC))
        for name, content in {**variants(image), "half": half}.items():
            assert same(original, summarize(content).fingerprint), name


def test_different_photographs_are_distinguished(photographs: list[Image.Image]) -> None:
    known = Fingerprints()
    for number, image in enumerate(photographs):
        print_ = fingerprint(image)
        assert known.same_as(print_) == []
        known.add(number, print_)


def test_a_small_thing_that_came_into_view_is_a_difference(photographs: list[Image.Image]) -> None:
    for image in photographs:
        changed = image.copy()
        dark = np.asarray(image.convert("L"))[80:104, 80:104].mean() < 128
        ImageDraw.Draw(changed).rectangle((80, 80, 103, 103), fill="white" if dark else "black")
        assert not same(fingerprint(image), fingerprint(changed))


def test_colour_brightness_and_shape_count() -> None:
    pattern = np.kron(np.random.default_rng(0).integers(60, 180, (6, 6)), np.ones((8, 8))).astype(np.uint8)
    grey = Image.fromarray(pattern)
    tinted = Image.merge("RGB", (grey.point(lambda level: min(255, level + 40)), grey, grey))
    assert not same(fingerprint(grey), fingerprint(tinted))
    assert same(fingerprint(grey), fingerprint(grey.point(lambda level: level + 10)))
    assert not same(fingerprint(grey), fingerprint(grey.point(lambda level: level + 60)))
    assert not same(fingerprint(grey), fingerprint(grey.point(lambda level: level // 2)))
    assert not same(fingerprint(grey), fingerprint(grey.resize((96, 48))))


def test_without_structure_only_brightness_and_colour_are_left() -> None:
    def flat(*colour: int) -> bytes:
        return fingerprint(Image.new("RGB", (32, 32), colour))

    assert same(flat(128, 128, 128), flat(129, 129, 129))
    assert not same(flat(128, 128, 128), flat(140, 140, 140))
    assert not same(flat(128, 128, 128), flat(128, 100, 160))


def test_all_sorts_of_files_are_looked_at() -> None:
    """Of any mode and orientation; the size is that of the file."""
    deep = Image.fromarray(np.full((5, 9), 40_000, dtype=np.uint16))
    look = summarize(saved(deep))
    assert (look.width, look.height, look.media_type) == (9, 5, "image/png")
    assert len(look.fingerprint) == 2 * 97
    assert _numbers(look.fingerprint)[-1] == pytest.approx(math.log2(9 / 5), abs=1e-3)
    assert summarize(saved(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "WEBP")).media_type == "image/webp"
    with pytest.raises(ImageError, match="not a supported image"):
        summarize(b"no image")


def test_a_large_photograph_is_read_at_a_fraction_of_its_size(photographs: list[Image.Image]) -> None:
    large = photographs[0].resize((1536, 1536), Image.Resampling.BICUBIC)
    look = summarize(saved(large, "JPEG", quality=90))
    assert (look.width, look.height) == (1536, 1536)
    assert same(look.fingerprint, fingerprint(large))


def test_what_is_forgotten_is_not_found(digits: dict[str, list[Image.Image]]) -> None:
    known = Fingerprints()
    prints = [fingerprint(image) for image in digits["8"]]
    for number, print_ in enumerate(prints):
        known.add(number, print_)
    known.forget(3)
    known.forget(3)
    known.forget(len(prints) - 1)
    found = [known.same_as(print_) for print_ in prints]
    assert found == [[] if number in (3, len(prints) - 1) else [number] for number in range(len(prints))]
    assert len(known) == len(prints) - 2


def test_the_limits_are_where_they_were_measured(digits: dict[str, list[Image.Image]]) -> None:
    """The documented figures: how much a copy of a digit changes, and the least difference of two digits."""
    most, most_anywhere = 0.0, 0.0
    for image in [*digits["8"][::4], *digits["9"][::4]]:
        original = _shape(_numbers(fingerprint(image)))
        for content in variants(image).values():
            difference = original - _shape(_numbers(summarize(content).fingerprint))
            most = max(most, float(np.square(difference).sum() / 2))
            most_anywhere = max(most_anywhere, float(8 * np.abs(difference).max()))
    assert most < MOST_DIFFERENCE / 2
    assert most_anywhere < MOST_DIFFERENCE_ANYWHERE / 1.5
    shapes = np.stack([_shape(_numbers(fingerprint(image))) for images in digits.values() for image in images])
    assert (1 - shapes @ shapes.T + 9 * np.eye(len(shapes))).min() > 3 * MOST_DIFFERENCE
