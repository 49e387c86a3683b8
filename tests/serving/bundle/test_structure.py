"""The walk over the segments of a file: hostile structures are refused in milliseconds, photographs are unchanged."""

from __future__ import annotations

import io
import struct
import time
import warnings

import numpy as np
import pytest
from PIL import Image, ImageDraw

from serving.bundle.errors import ImageError
from serving.bundle.pixels import MOST_SCANNED, Limits, decode, open_image, to_pixels
from serving.bundle.sections import ImageSpec
from serving.bundle.structure import MOST_FILL, MOST_SEGMENTS, examine, exif_orientation, most_segments
from serving.bundle.webp_tables import UNREAD, table_bytes
from serving.inference.job import is_large
from serving.inference.queue import SMALL_BYTES
from serving.quarantine.api.pictures import thumbnail
from serving.quarantine.duplicates import summarize
from tests.helpers_hostile import (
    adam7,
    arithmetic,
    chunk,
    directory,
    filtered,
    jpeg_with,
    png_with,
    riff,
    segment,
    webp_with,
    with_empty_blocks,
    with_first_header,
    with_groups,
    with_long_transform,
    with_profiles,
    with_scans,
    worst_known,
)
from tests.helpers_memory import peak_memory
from tests.helpers_serving import png, saved

SPEC = ImageSpec(height=8, width=8, mode="RGB")
MOST_SECONDS = 0.5
"""Of processor time. Before there were limits, most of these files took 1 to 17 seconds; now all take less than 0.2."""


def test_no_known_file_takes_long() -> None:
    """For an answer, for the quarantine's fingerprint and for its thumbnail."""
    slowest, refused = {}, {}
    for name, content in worst_known():
        for read in (lambda content: to_pixels(open_image(content), SPEC), summarize, thumbnail):
            started = time.thread_time()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    read(content)
                except ImageError as error:
                    refused[name] = error.code
            slowest[name] = max(slowest.get(name, 0.0), time.thread_time() - started)
            if name in refused:
                # What the server refuses is never stored.
                break
    assert {name: seconds for name, seconds in slowest.items() if seconds > MOST_SECONDS} == {}
    assert set(refused.values()) == {"broken_image", "unsupported_image", "too_many_pixels"}
    assert not {"JPEG exif", "JPEG pictures", "PNG exif", "WebP exif"} & set(refused)


@pytest.mark.parametrize(
    "content",
    [
        jpeg_with(segment(0xE5) * (MOST_SEGMENTS + 1)),
        jpeg_with(segment(0xDD, b"\0\0") * (MOST_SEGMENTS + 1)),
        jpeg_with(b"\xff\xd0" * (MOST_SEGMENTS + 1)),
        png_with(chunk(b"teSt") * (MOST_SEGMENTS + 1)),
        png_with(chunk(b"IDAT") * (MOST_SEGMENTS + 1)),
        webp_with(riff(b"none") * (MOST_SEGMENTS + 1)),
    ],
    ids=["application", "interval", "restart", "ancillary", "data", "webp"],
)
def test_the_number_of_segments_is_limited(content: bytes) -> None:
    with pytest.raises(ImageError, match=f"too many .*: got more than {MOST_SEGMENTS}; allowed: up to {MOST_SEGMENTS}"):
        open_image(content)


def test_a_larger_file_may_have_more_segments() -> None:
    """An encoder that writes chunks of 2 kB is not refused."""
    assert most_segments(1000) == MOST_SEGMENTS
    assert most_segments(100 * 1024 * 1024) == 51_200
    text = chunk(b"tEXt", b"a\0" + bytes(4000))
    assert open_image(png_with(text * 2500)).size == (8, 8)


def test_fill_between_segments_is_limited() -> None:
    assert open_image(jpeg_with(b"\xff" * MOST_FILL)).size == (8, 8)
    for fill in (b"\xff" * (MOST_FILL + 1), b"\xff\x00" * 600, b"\xff" * 600 + segment(0xFE) + b"\xff" * 600):
        with pytest.raises(ImageError, match=f"between segments: got more than {MOST_FILL} bytes"):
            open_image(jpeg_with(fill))


def test_the_tables_of_a_jpeg_are_limited() -> None:
    with pytest.raises(ImageError, match="header too large"):
        open_image(jpeg_with(segment(0xDB, (b"\0" + bytes(range(1, 65))) * 1000) * 5))


def test_the_pixels_of_all_scans_together_are_limited() -> None:
    side = int((MOST_SCANNED / 30) ** 0.5)
    with pytest.raises(ImageError, match=f"up to {MOST_SCANNED} pixels in all scans"):
        open_image(with_scans(30, size=(side, side)), Limits(pixels=side * side))
    # The same number of scans of fewer pixels.
    assert open_image(with_scans(30, size=(100, 100))).size == (100, 100)


@pytest.mark.parametrize(
    ("depth", "colour", "interlaced", "side"),
    [(8, 2, 0, 7071), (8, 6, 0, 5000), (16, 6, 0, 3872), (16, 2, 1, 3535), (8, 0, 1, 7071), (8, 4, 0, 6123)],
)
def test_the_unpacked_pixels_of_a_png_are_limited(depth: int, colour: int, interlaced: int, side: int) -> None:
    """Pixels that unpack to more take over a second, whatever the size of the file."""

    def header(side: int) -> bytes:
        return png((b"IHDR", struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, interlaced)), (b"IDAT", b""))

    assert open_image(header(side)).size == (side, side)
    with pytest.raises(ImageError) as caught:
        open_image(header(side + 1))
    assert caught.value.code == "too_many_pixels"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_first_header(adam7(8, 8)), "second header: got IHDR at byte 33"),
        (png_with(chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 6, 0, 0, 1)), last=True), "second header"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt") + png_with(b"")[8:], "no header"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", png_with(b"")[16:29] + b"\0") + png_with(b"")[33:], "no header"),
    ],
)
def test_a_png_has_one_header_and_begins_with_it(content: bytes, message: str) -> None:
    """The limits are checked against the first one, and decoders use the last one."""
    with pytest.raises(ImageError, match=message):
        open_image(content)


@pytest.mark.parametrize("last", [False, True])
def test_transparent_colours_count_wherever_they_are(last: bool) -> None:
    content = png_with(chunk(b"tRNS", bytes(6)), (6200, 6200), last=last)
    with pytest.raises(ImageError, match="PNG with transparency of 6200 x 6200 pixels"):
        open_image(content)


def test_more_data_than_pixels_is_refused() -> None:
    assert decode(with_empty_blocks(1, 60_000)).size == (1, 1)
    started = time.thread_time()
    with pytest.raises(ImageError, match="more data than pixels: got PNG of 1 x 1 pixels of 24 bits in"):
        open_image(with_empty_blocks(1, 100_000))
    assert time.thread_time() - started < MOST_SECONDS


def test_the_pixels_and_bytes_of_a_lossy_webp_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Image.effect_noise((100, 100), 90)
    content = saved(noise, "WEBP", quality=90)
    animated = saved(noise, "WEBP", quality=90, save_all=True, append_images=[noise.rotate(90), noise.rotate(180)])
    packed = examine(content, "WEBP").packed
    assert 0.9 * len(content) < packed < len(content)
    assert packed < examine(animated, "WEBP").packed < 1.5 * len(content)
    monkeypatch.setattr("serving.bundle.pixels.MOST_LOSSY", 30_000 + packed)
    assert open_image(content).size == (100, 100)
    monkeypatch.setattr("serving.bundle.pixels.MOST_LOSSY", 30_000 + packed - 1)
    with pytest.raises(ImageError, match="WebP of 100 x 100 pixels in"):
        open_image(content)
    # A lossless one takes a quarter of the time.
    assert open_image(saved(noise, "WEBP", lossless=True)).size == (100, 100)


@pytest.mark.parametrize(
    "options",
    [{}, {"alpha": True}, {"frames": 1}, {"frames": 3}, {"alpha": True, "frames": 2}],
    ids=["pixels", "transparency", "frame", "frames without pixels before it", "transparency of a frame"],
)
def test_the_huffman_tables_of_a_webp_are_limited(options: dict[str, int]) -> None:
    """Each group takes 2.5 bytes of the file and at least 5 kB of memory, and 62,500 of them took 360 MB."""
    with pytest.raises(ImageError, match=r"takes \d+ MB with the tables of its codes; allowed: up to 256 MB") as caught:
        open_image(with_groups((1000, 1000), 62_500, **options))
    assert caught.value.code == "too_many_pixels"
    # What is within the limit is decoded alone, as a large image is, and the limit holds for what is decoded.
    content = with_groups((560, 560), 18_000, **options)
    image = open_image(content)
    assert is_large(image, len(content))
    peak = peak_memory(lambda: to_pixels(image, SPEC))
    assert 18_000 * 4000 < peak < 256e6
    limit = int(peak)
    with pytest.raises(ImageError, match="with the tables of its codes"):
        open_image(content, Limits(memory=limit))


def drawn_photo(size: tuple[int, int]) -> Image.Image:
    """Soft colours with shapes in front of them, and the noise of a camera."""
    noise = np.random.default_rng(0)
    photo = Image.fromarray(noise.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(photo)
    for _ in range(150):
        x, y, radius = (int(noise.integers(0, most)) for most in (*size, size[0] // 8))
        fill = tuple(noise.integers(0, 256, 3).tolist())
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
    grain = noise.normal(0, 2, (size[1], size[0], 3))
    return Image.fromarray((np.asarray(photo) + grain).clip(0, 255).astype(np.uint8))


def drawn_screen(size: tuple[int, int]) -> Image.Image:
    screen, noise = Image.new("RGB", size, "white"), np.random.default_rng(0)
    draw = ImageDraw.Draw(screen)
    for y in range(0, size[1], 14):
        text = "".join(map(chr, noise.integers(33, 127, size[0] // 8)))
        draw.text((8, y), text, fill=tuple(noise.integers(0, 160, 3).tolist()))
    return screen


@pytest.mark.parametrize("method", [0, 5])
def test_lossless_photos_and_screens_of_several_megapixels_are_accepted(method: int) -> None:
    """Libwebp writes at most 2,600 groups, however large an image is."""
    photo, screen = drawn_photo((1800, 1350)), drawn_screen((1600, 1000))
    clear = photo.copy()
    clear.putalpha(photo.getchannel("G"))
    for kind, picture in (("photo", photo), ("screen", screen), ("transparent", clear)):
        content = saved(picture, "WEBP", lossless=True, method=method, quality=20)
        structure = examine(content, "WEBP")
        assert len(structure.streams) == 1, kind
        started = time.thread_time()
        assert table_bytes(content, structure.streams, picture.size) < 45_000_000, kind
        assert time.thread_time() - started < MOST_SECONDS, kind
        assert open_image(content).size == picture.size
    lossy = saved(clear, "WEBP", quality=80, method=min(method, 4))
    assert len(examine(lossy, "WEBP").streams) == 1
    assert open_image(lossy).size == clear.size


def test_a_small_lossless_image_is_not_large() -> None:
    content = saved(drawn_photo((300, 200)), "WEBP", lossless=True)
    assert len(content) > 80_000
    assert not is_large(open_image(content), len(content))
    # A few kilobytes have few groups, whatever they contain.
    tiny = with_groups((500, 500), 1000, 4)
    assert table_bytes(tiny, examine(tiny, "WEBP").streams, (500, 500)) < UNREAD
    assert not is_large(open_image(tiny), len(tiny))


def test_transforms_that_take_long_to_read_are_not_read() -> None:
    """Then there may be as many groups behind them as there are blocks."""
    content = with_long_transform((4000, 4000))
    started = time.thread_time()
    with pytest.raises(ImageError, match="with the tables of its codes"):
        open_image(content)
    assert time.thread_time() - started < MOST_SECONDS
    # Of a small file, which the event loop may open, less is read.
    content = with_long_transform((400, 400))
    assert len(content) < SMALL_BYTES
    started = time.thread_time()
    assert open_image(content).size == (400, 400)
    assert time.thread_time() - started < MOST_SECONDS / 10


@pytest.mark.parametrize("marker", [0xC9, 0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF])
def test_arithmetic_coding_is_refused(marker: int) -> None:
    """One of 366 bytes took 1.5 s, and browsers show none."""
    with pytest.raises(ImageError, match=rf"arithmetic coding \(marker 0x{marker:x}") as caught:
        open_image(arithmetic(7070, marker))
    assert caught.value.code == "unsupported_image"


def test_decoding_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of a file with so many packed bytes that its header does not tell."""
    monkeypatch.setattr("serving.bundle.png_limits.MOST_SECONDS", 0.1)
    monkeypatch.setattr("serving.bundle.png_limits.MOST_UNPACKED", 75_000_000)
    content = with_empty_blocks(1500, 8_000_000)
    started = time.thread_time()
    with pytest.raises(ImageError, match=r"takes too long to decode: got more than 0\.1 s") as caught:
        decode(content)
    assert caught.value.code == "too_many_pixels"
    # All of it takes 0.6 s.
    assert time.thread_time() - started < 0.3
    # The time begins with the decoding, and ends with it.
    image = open_image(filtered(1000, 1000, colour=2))
    while time.thread_time() - started < 0.5:
        pass
    image.load()


def test_only_what_changes_the_pixels_reaches_the_decoder() -> None:
    metadata = (
        segment(0xE1, b"Exif\0\0" + directory(9)) + segment(0xE2, b"ICC_PROFILE\0\x01\x01") + segment(0xFE, b"hi")
    )
    assert examine(jpeg_with(metadata), "JPEG").content == jpeg_with(b"")
    assert examine(png_with(chunk(b"tEXt", b"a\0b") + chunk(b"iCCP", b"bad")), "PNG").content == png_with(b"")
    assert examine(png_with(b"") + b"appended" * 100, "PNG").content.rstrip(b"appended") == png_with(b"")
    assert decode(with_profiles(200)).info.get("icc_profile") is None


def test_colours_do_not_change() -> None:
    """Adobe's segment, palettes and transparent colours are kept."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))
    exif = noise.getexif()
    exif[0x010F] = "maker"
    files = [
        saved(noise.convert("CMYK"), "JPEG", exif=exif, comment=b"c"),
        saved(noise, "JPEG", exif=exif, keep_rgb=True),
        saved(noise, "JPEG", exif=exif, progressive=True, icc_profile=b"icc" * 1000),
        saved(noise.quantize(17), "PNG", exif=exif, transparency=3),
        saved(noise, "PNG", exif=exif, transparency=(1, 2, 3)),
        saved(noise.convert("RGBA"), "WEBP", exif=exif, lossless=True),
    ]
    for content in files:
        with Image.open(io.BytesIO(content)) as expected:
            ours = decode(content)
            assert ours.mode == expected.mode
            assert ours.info.get("transparency") == expected.info.get("transparency")
            assert ours.convert("RGBA").tobytes() == expected.convert("RGBA").tobytes()


def turned(orientation: int, *, order: str = "<", kind: int = 3) -> bytes:
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, 2)
    number = struct.pack(order + {3: "H", 4: "I"}[kind], orientation).ljust(4, b"\0")
    other = struct.pack(f"{order}HHII", 0x010F, 2, 4, 0)
    return head + other + struct.pack(f"{order}HHI", 0x0112, kind, 1) + number + bytes(4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_the_orientation_is_read_in_both_byte_orders(order: str, kind: int) -> None:
    assert exif_orientation(turned(6, order=order, kind=kind)) == 6


@pytest.mark.parametrize(
    "exif", [b"", b"II", b"XX*\0\x08\0\0\0", turned(6)[:20], b"II*\0\xff\xff\xff\xff", directory(0)]
)
def test_damaged_exif_has_no_orientation(exif: bytes) -> None:
    assert exif_orientation(exif) is None


def test_the_orientation_is_found_wherever_the_format_has_it() -> None:
    xmp = b'<x:xmpmeta><rdf tiff:Orientation="8"/>'
    files = {
        "JPEG EXIF": jpeg_with(segment(0xE1, b"Exif\0\0" + turned(6))),
        "JPEG XMP": jpeg_with(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp)),
        "PNG EXIF": png_with(chunk(b"eXIf", turned(6))),
        "PNG EXIF after the pixels": png_with(chunk(b"eXIf", turned(6)), last=True),
        "PNG XMP": png_with(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)),
        "WebP EXIF": webp_with(riff(b"EXIF", turned(6))),
        "WebP XMP": webp_with(riff(b"XMP ", xmp)),
    }
    for name, content in files.items():
        kind = {"J": "JPEG", "P": "PNG", "W": "WEBP"}[name[0]]
        assert examine(content, kind).orientation == (8 if "XMP" in name else 6), name
        assert open_image(content).size == (8, 8)


def test_exif_wins_over_xmp() -> None:
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"<tiff:Orientation>8")
    assert examine(jpeg_with(xmp + segment(0xE1, b"Exif\0\0" + turned(3))), "JPEG").orientation == 3
