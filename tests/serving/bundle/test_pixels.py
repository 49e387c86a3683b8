from __future__ import annotations

import io
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from serving.bundle.errors import ImageError
from serving.bundle.pixels import Limits, decode, open_image, plain, to_pixels
from serving.bundle.sections import ImageSpec
from tests.helpers_memory import peak_memory
from tests.helpers_serving import bad_palettes, image_bytes, png_header, saved

RGB = ImageSpec(height=4, width=4, mode="RGB")
GREY = ImageSpec(height=4, width=4, mode="L")
QUADRANTS = np.array([[0, 80], [160, 240]], dtype=np.uint8).repeat(2, 0).repeat(2, 1)


@contextmanager
def refuses(*codes: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(ImageError, match=match) as caught:
        yield
    assert caught.value.code in codes


def first_pixel(image: Image.Image, spec: ImageSpec = RGB) -> tuple[int, ...]:
    return tuple(map(int, to_pixels(image, spec)[0, 0]))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("spec", [RGB, GREY], ids=["RGB", "L"])
def test_an_image_of_the_right_size_is_not_resampled(kind: str, spec: ImageSpec) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, spec.shape, dtype=np.uint8)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    content = saved(Image.fromarray(pixels.squeeze()), kind, **options)
    got = to_pixels(decode(content), spec)
    assert got.dtype == np.uint8
    if kind == "WEBP" and spec is GREY:
        # WebP knows no greyscale: the way back through RGB rounds.
        np.testing.assert_allclose(got.astype(int), pixels.astype(int), atol=1)
    else:
        assert np.array_equal(got, pixels)


@pytest.mark.parametrize(
    ("mode", "colour", "rgb"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 90, (90, 90, 90)),
        ("LA", (90, 255), (90, 90, 90)),
        ("LA", (90, 0), (255, 255, 255)),
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 127), (128, 128, 128)),
        ("I;16", 0, (0, 0, 0)),
        ("I;16", 257 * 90, (90, 90, 90)),
        ("I;16", 65535, (255, 255, 255)),
    ],
)
def test_png_modes(mode: str, colour: Any, rgb: tuple[int, ...]) -> None:
    image = decode(image_bytes(colour, mode=mode, size=(4, 4)))
    assert image.mode == mode
    assert first_pixel(image) == rgb
    assert to_pixels(image, GREY).shape == (4, 4, 1)


@pytest.mark.parametrize(
    ("mode", "colour", "rgb"),
    [
        ("I", 257 * 90, (90, 90, 90)),
        ("I", -5, (0, 0, 0)),
        ("I", 1_000_000, (255, 255, 255)),
        ("F", 0.5, (128, 128, 128)),
        ("F", -1.0, (0, 0, 0)),
        ("F", 7.0, (255, 255, 255)),
        ("F", float("nan"), (0, 0, 0)),
        ("HSV", (0, 0, 90), (90, 90, 90)),
    ],
)
def test_modes_that_only_training_can_meet(mode: str, colour: Any, rgb: tuple[int, ...]) -> None:
    assert first_pixel(Image.new(mode, (4, 4), colour)) == rgb


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert first_pixel(decode(saved(image))) == (10, 20, 30)
    assert first_pixel(decode(saved(image, transparency=1))) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "colour"), [("L", 90), ("RGB", (10, 20, 30)), ("1", 0)])
def test_a_colour_that_stands_for_transparency(mode: str, colour: Any) -> None:
    content = image_bytes(colour, mode=mode, size=(4, 4), transparency=colour)
    assert first_pixel(decode(content)) == (255, 255, 255)


def test_cmyk_jpeg() -> None:
    image = decode(image_bytes((0, 255, 255, 0), mode="CMYK", size=(4, 4), kind="JPEG", quality=100))
    assert image.mode == "CMYK"
    np.testing.assert_allclose(first_pixel(image), (255, 0, 0), atol=4)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_bmp_modes(mode: str) -> None:
    image = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    assert first_pixel(decode(saved(image, "BMP"))) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int) -> None:
    """Each orientation records how an upright image was turned before it was stored."""
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = Image.fromarray(QUADRANTS)
    if orientation in turns:
        stored = stored.transpose(turns[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    got = to_pixels(decode(saved(stored, "PNG", exif=exif)), GREY)
    assert np.array_equal(got[:, :, 0], QUADRANTS)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_strips_make_the_same_image(monkeypatch: pytest.MonkeyPatch, orientation: int, rows: int) -> None:
    noise = np.random.default_rng(orientation).integers(0, 256, (11, 6, 4), dtype=np.uint8)
    deep = noise.view(np.uint16)[:, :, 0].copy()
    exif = Image.Exif()
    exif[0x0112] = orientation
    colour = Image.fromarray(noise)
    palette = colour.convert("RGB").quantize(5)
    files = [saved(image, exif=exif) for image in (colour, colour.convert("LA"), palette, Image.fromarray(deep))]
    files += [saved(palette, exif=exif, transparency=2), saved(colour.convert("CMYK"), "JPEG", exif=exif)]
    for content in files:
        for mode in ("RGB", "L"):
            whole = plain(decode(content), mode)
            with monkeypatch.context() as patched:
                patched.setattr("serving.bundle.pixels.STRIP", 6 * rows)
                in_strips = plain(decode(content), mode)
            assert (in_strips.mode, in_strips.size) == (mode, whole.size)
            assert in_strips.tobytes() == whole.tobytes()


LARGE_SIDE = 1500


@pytest.mark.parametrize(
    ("make", "bytes_a_pixel"),
    [
        (lambda: saved(Image.new("RGBA", (LARGE_SIDE, LARGE_SIDE), (1, 2, 3, 4)), exif=turned()), 4),
        (lambda: saved(Image.new("RGB", (LARGE_SIDE, LARGE_SIDE)), "BMP"), 4),
        (lambda: saved(Image.new("I;16", (LARGE_SIDE, LARGE_SIDE))), 4),
        (lambda: saved(Image.new("P", (LARGE_SIDE, LARGE_SIDE)), transparency=0), 4),
        (lambda: saved(Image.new("CMYK", (LARGE_SIDE, LARGE_SIDE)), "JPEG"), 1),
        (lambda: saved(Image.new("RGB", (LARGE_SIDE, LARGE_SIDE)), "JPEG", exif=turned()), 1),
        (lambda: saved(Image.new("RGB", (LARGE_SIDE, LARGE_SIDE)), "JPEG", progressive=True), 4),
        (lambda: saved(Image.new("RGB", (LARGE_SIDE, LARGE_SIDE)), "JPEG", progressive=True, subsampling=1), 5),
        (lambda: saved(Image.new("RGB", (LARGE_SIDE, LARGE_SIDE)), "JPEG", progressive=True, subsampling=0), 7),
        (lambda: saved(Image.new("L", (LARGE_SIDE, LARGE_SIDE)), "JPEG", progressive=True), 3),
        (lambda: saved(Image.new("CMYK", (LARGE_SIDE, LARGE_SIDE)), "JPEG", progressive=True), 9),
        (lambda: saved(Image.new("RGBA", (LARGE_SIDE, LARGE_SIDE), (1, 2, 3, 4)), "WEBP"), 16),
    ],
    ids=[
        *("RGBA, turned", "BMP", "16 bit", "palette", "CMYK", "JPEG, turned"),
        *("progressive", "progressive 4:2:2", "progressive 4:4:4", "progressive grey", "progressive CMYK", "WebP"),
    ],
)
def test_decoding_takes_no_more_memory_than_is_allowed(make: Callable[[], bytes], bytes_a_pixel: int) -> None:
    """docs/howto/deploy.md states how much memory operators should plan for."""
    content = make()
    needed = bytes_a_pixel * LARGE_SIDE**2
    peak = peak_memory(lambda: to_pixels(open_image(content), RGB))
    # Beside it a few strips.
    assert peak <= needed + 12e6
    if bytes_a_pixel > 1:
        # This is what is compared with the limit, too.
        assert open_image(content, Limits(memory=needed)).size == (LARGE_SIDE, LARGE_SIDE)
        with refuses("too_many_pixels", match=rf"takes \d+ MB; allowed: up to \d+ MB, or {LARGE_SIDE**2 - 1} pixels"):
            open_image(content, Limits(memory=needed - 1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("P", "PNG")]
)
def test_a_large_photo_is_reduced_first(
    mode: str, kind: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes nearly the same pixels as when all of it is converted and resized at once."""
    generator = np.random.default_rng(orientation)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    photo = coarse.resize((611, 455), Image.Resampling.BICUBIC).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(photo, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    spec = ImageSpec(height=40, width=48, mode="RGB")
    whole = to_pixels(open_image(content), spec)
    monkeypatch.setattr("serving.bundle.pixels.LARGE", 1000)
    image = open_image(content)
    reduced = to_pixels(image, spec)
    assert image.size == ((153, 114) if kind == "JPEG" else (611, 455))
    difference = np.abs(reduced.astype(int) - whole.astype(int))
    assert difference.mean() < 1.5
    assert difference.max() <= 25


def test_what_is_reduced_has_twice_the_pixels_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.bundle.pixels.LARGE", 1000)
    for kind in ("PNG", "JPEG"):
        content = saved(Image.new("RGB", (900, 330)), kind)
        long, short = plain(open_image(content), "RGB", (40, 40)).size
        assert 80 <= long < 160
        assert abs(short - long * 330 / 900) <= 1
        width, height = plain(open_image(content), "RGB", (40, 40), cropped=True).size
        assert 80 <= width == height < 160
    assert plain(open_image(content), "RGB", (400, 400)).size == (900, 330)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize("content", bad_palettes(), ids=["no palette", "too much transparency"])
def test_a_palette_that_cannot_be_used_is_a_broken_image(content: bytes) -> None:
    """Pillow only detects this error in a conversion."""
    with refuses("broken_image", match="PNG of 4 x 4 pixels"):
        to_pixels(decode(content), RGB)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_ignored() -> None:
    content = saved(Image.fromarray(QUADRANTS), "PNG", exif=b"Exif\0\0MM\0*junk")
    assert np.array_equal(to_pixels(decode(content), GREY)[:, :, 0], QUADRANTS)


def test_the_middle_is_cropped_to_the_aspect_ratio() -> None:
    wide = np.zeros((8, 24), np.uint8)
    # Slightly wider than the crop: resampling reads half a pixel beyond its edge.
    wide[:, 7:17] = 200
    assert (to_pixels(Image.fromarray(wide), GREY) == 200).all()


def test_the_same_image_gives_the_same_pixels() -> None:
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (37, 53, 3), dtype=np.uint8))
    assert np.array_equal(to_pixels(image, RGB), to_pixels(image.copy(), RGB))
    assert image.size == (53, 37)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    with Image.open(io.BytesIO(content)) as opened:
        assert getattr(opened, "n_frames", 1) == 2
    assert first_pixel(decode(content)) == (255, 0, 0)


def test_of_a_multi_picture_photograph_the_first_counts() -> None:
    content = saved(
        Image.new("RGB", (8, 8), "white"), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8), "black")]
    )
    np.testing.assert_allclose(first_pixel(decode(content)), (255, 255, 255), atol=2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_truncated_file_is_refused(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    content = saved(noise, kind)
    for length in (len(content) // 2, 20):
        with refuses("broken_image", match=f"{length} bytes of {kind}"):
            decode(content[:length])


def test_an_empty_file_is_refused() -> None:
    with refuses("empty_image", match="0 bytes"):
        decode(b"")


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PPM", "ICO", "PDF"])
def test_other_formats_are_refused_by_their_content(kind: str) -> None:
    with refuses("unsupported_image", match="allowed: PNG, JPEG, WEBP, BMP"):
        decode(image_bytes(size=(16, 16), kind=kind))


@pytest.mark.parametrize(
    "content", [b"\0", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"RIFF\0\0\0\0WAVE"]
)
def test_what_is_no_image_is_refused(content: bytes) -> None:
    with refuses("unsupported_image"):
        decode(content)


def test_too_many_bytes_are_refused() -> None:
    with refuses("too_many_bytes", match="33554433 bytes; allowed: up to 33554432"):
        decode(b"\x89PNG" + b"\0" * (32 * 1024 * 1024 - 3))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(8001, 6250), (12_000, 12_000), (2**31 - 1, 2**31 - 1), (50_000_001, 1)])
def test_too_many_pixels_are_refused_from_the_header(size: tuple[int, int]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refuses("too_many_pixels", match="allowed: up to 50000000 pixels"):
        decode(png_header(*size))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


@pytest.mark.parametrize("size", [(16_385, 1), (1, 16_385), (2, 8_000_000)])
def test_a_side_that_is_too_long_is_refused_from_the_header(size: tuple[int, int]) -> None:
    with refuses("too_many_pixels", match=f"{size[0]} x {size[1]} pixels; allowed: up to 16384 pixels per side"):
        decode(png_header(*size))
    assert open_image(png_header(16_384, 1)).size == (16_384, 1)
    assert open_image(png_header(*size), Limits(side=8_000_000)).size == size


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_webp_that_announces_a_huge_canvas_takes_no_memory() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    content = bytearray(saved(Image.new("RGB", (4, 4)), "WEBP", lossless=True, exif=exif))
    assert content[12:16] == b"VP8X"
    content[24:30] = (9_999).to_bytes(3, "little") * 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refuses("too_many_pixels", "broken_image"):
        decode(bytes(content))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_as_many_pixels_as_allowed_are_read() -> None:
    limits = Limits(pixels=16)
    assert decode(image_bytes(size=(4, 4)), limits).size == (4, 4)
    with refuses("too_many_pixels", match=r"5 x 4 pixels; allowed: up to 16 pixels"):
        decode(image_bytes(size=(5, 4)), limits)


@pytest.mark.parametrize("size", [(0, 0), (0, 5)])
def test_no_pixels_are_refused(size: tuple[int, int]) -> None:
    with refuses("broken_image"):
        decode(png_header(*size))


def test_limits_check_themselves() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Limits(size=0)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_files_are_refused_or_read_but_never_anything_else(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP"]))
    content = bytearray(saved(Image.fromarray(QUADRANTS), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = to_pixels(decode(bytes(content)), RGB)
    except ImageError:
        return
    assert pixels.shape == RGB.shape
