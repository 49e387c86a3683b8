"""Image files whose structure makes a decoder work: many tiny segments, crafted metadata, many scans and frames.

`worst_known` has the files that once took seconds; `hostile` draws others at random from the same building blocks.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from PIL import Image

from serving.bundle.pixels import LIMITS
from serving.bundle.png_limits import MOST_UNPACKED
from tests.helpers_serving import png, saved

SIZE = 10 * 1024 * 1024 - 8 * 1024
"""Bytes of padding: enough for seconds in a decoder without limits."""
FULL_SIZE = LIMITS.size - 64 * 1024
"""The same for the campaigns: with the image around it, a file stays just below the default limit."""
FULL_SIDE = int(LIMITS.pixels**0.5)

SIDES = ((8, 8), (64, 64), (1000, 1000), (4000, 4000), (FULL_SIDE, FULL_SIDE), (16_384, 3050), (1, 16_384))


def segment(marker: int, body: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def chunk(name: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def riff(name: bytes, body: bytes = b"") -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def directory(entries: int, *, kind: int = 7, count: int = 4, tag: int = 1) -> bytes:
    """A TIFF directory whose entries all refer to the same data."""
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", entries)
    listed = (struct.pack("<HHII", (tag + number) % 65_536, kind, count, 0) for number in range(entries))
    return head + b"".join(listed) + bytes(4)


def fitted(unit: bytes, size: int) -> bytes:
    """The unit again and again, within so many bytes."""
    return unit * (size // len(unit))


# What may come between the first bytes of a file and its pixels, by name. Each takes the bytes that it may use.
Filling = Callable[[int], bytes]

JPEG_FILLINGS: dict[str, Filling] = {
    "fill": lambda size: b"\xff" * size,
    "junk": lambda size: b"\x17" * size,
    "escaped": lambda size: fitted(b"\xff\x00", size),
    "restarts": lambda size: fitted(b"\xff\xd0", size),
    "application": lambda size: fitted(segment(0xE5), size),
    "comments": lambda size: fitted(segment(0xFE), size),
    "intervals": lambda size: fitted(segment(0xDD, b"\0\0"), size),
    "tables": lambda size: fitted(segment(0xDB, (b"\0" + bytes(range(1, 65))) * 1000), size),
    "huffman": lambda size: fitted(segment(0xC4, b"\x0f" + bytes(16)), size),
    "components": lambda size: fitted(segment(0xDE, struct.pack(">BHHB", 8, 8, 8, 3) + bytes(65_000)), size),
    "photoshop": lambda size: fitted(segment(0xED, b"Photoshop 3.0\0" + (b"8BIM\x04\x04\0\0" + bytes(4)) * 5400), size),
    "profiles": lambda size: fitted(segment(0xE2, b"ICC_PROFILE\0\x01\xff" + bytes(65_000)), size),
    "exif": lambda size: fitted(segment(0xE1, b"Exif\0\0" + directory(5400)), size),
    "long exif": lambda size: (
        segment(0xE1, b"Exif\0\0" + directory(5400, count=60_000))
        + fitted(segment(0xE1, b"Exif\0\0" + bytes(65_000)), size - 65_536)
    ),
    "pictures": lambda size: segment(0xE2, b"MPF\0" + directory(5400, count=60_000)),
    "xmp": lambda size: fitted(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"tiff:Orientation>" * 3800), size),
    "thumbnail": lambda size: segment(0xE0, b"JFXX\0\x10" + saved(Image.new("RGB", (900, 900)), "JPEG")),
}

PNG_FILLINGS: dict[str, Filling] = {
    "empty chunks": lambda size: fitted(chunk(b"teSt"), size),
    "empty data": lambda size: fitted(chunk(b"IDAT"), size),
    "texts": lambda size: fitted(chunk(b"tEXt", b"a\0b"), size),
    "long text": lambda size: chunk(b"tEXt", b"a\0" + b"x" * size),
    "compressed texts": lambda size: fitted(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000), 9)), size),
    "profiles": lambda size: fitted(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000), 9)), size),
    "palettes": lambda size: fitted(chunk(b"PLTE", bytes(768)), size),
    "transparency": lambda size: fitted(chunk(b"tRNS", b"\0\1"), size),
    "exif": lambda size: chunk(b"eXIf", directory(65_000, count=max(1, size - 800_000)) + bytes(size - 800_000)),
    "raw exif": lambda size: chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  9\n" + b"45" * (size // 2)),
    "xmp": lambda size: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + fitted(b"tiff:Orientation>", size)),
    "frames": lambda size: (
        chunk(b"acTL", struct.pack(">II", 100_000, 0))
        + fitted(chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 1, 1, 0, 0, 1, 1, 0, 0)), size)
    ),
    "headers": lambda size: fitted(chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)), size),
}

WEBP_FILLINGS: dict[str, Filling] = {
    "empty chunks": lambda size: fitted(riff(b"none"), size),
    "frames": lambda size: fitted(riff(b"ANMF", bytes(16) + riff(b"VP8 ")), size),
    "exif": lambda size: riff(b"EXIF", directory(65_000, count=max(1, size - 800_000)) + bytes(size - 800_000)),
    "xmp": lambda size: riff(b"XMP ", fitted(b"tiff:Orientation>", size)),
    "profile": lambda size: riff(b"ICCP", bytes(size)),
    "alphas": lambda size: fitted(riff(b"ALPH", b"\0"), size),
}


def picture(size: tuple[int, int], mode: str, noisy: bool = False) -> Image.Image:
    """Flat, or as large in bytes as an image within the limits can be."""
    if noisy:
        numbers = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        return Image.fromarray(numbers).convert(mode)
    return Image.new(mode, size, 128)


@cache
def encoded(size: tuple[int, int], mode: str, kind: str, noisy: bool = False, **options: object) -> bytes:
    """The file of such a picture, which many hostile files have in common."""
    return saved(picture(size, mode, noisy), kind, **options)


def jpeg_with(filling: bytes, size: tuple[int, int] = (8, 8), **options: object) -> bytes:
    content = encoded(size, "RGB", "JPEG", **options)
    return content[:2] + filling + content[2:]


def png_with(filling: bytes, size: tuple[int, int] = (8, 8), mode: str = "RGB", *, last: bool = False) -> bytes:
    content = encoded(size, mode, "PNG", compress_level=1)
    place = len(content) - 12 if last else 33
    return content[:place] + filling + content[place:]


def webp_with(filling: bytes, size: tuple[int, int] = (8, 8), *, first: bool = False) -> bytes:
    """In the extended format, with the filling before or after the image."""
    image = encoded(size, "RGB", "WEBP", method=0, quality=1)[12:]
    flags = 0x08 | 0x04 | 0x20 | (0x02 if b"ANMF" in filling[:4] else 0)
    head = riff(b"VP8X", bytes((flags, 0, 0, 0)) + _three(size[0] - 1) + _three(size[1] - 1))
    if b"ANMF" in filling[:4]:
        head += riff(b"ANIM", bytes(6))
        image = riff(b"ANMF", bytes(6) + _three(size[0] - 1) + _three(size[1] - 1) + bytes(4) + image)
    body = b"WEBP" + head + (filling + image if first else image + filling)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _three(number: int) -> bytes:
    return number.to_bytes(3, "little")


def with_scans(more: int, *, size: tuple[int, int] = (1000, 1000), mode: str = "L", noisy: bool = False) -> bytes:
    """A progressive JPEG whose last scan comes again and again: 12 bytes each if it is flat, for all pixels."""
    content = encoded(size, mode, "JPEG", noisy, progressive=True, quality=10)
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * more + content[-2:]


def with_profiles(count: int) -> bytes:
    """A PNG with colour profiles of one megabyte each, compressed to a kilobyte."""
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1024 * 1024 - 10), 9))
    return png_with(profile * count, (4, 4), "L")


def run_lengths(side: int, *, bits: int = 8) -> bytes:
    """A BMP that is compressed: a pixel and the end of the line, for each line."""
    body = b"\x01\x00\x00\x00" * side + b"\0\1"
    return bmp(side, side, bits, body, compression={8: 1, 4: 2}[bits], colours=2**bits)


def bmp(width: int, height: int, bits: int, body: bytes, *, compression: int = 0, colours: int = 0) -> bytes:
    start = 14 + 40 + 4 * colours
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(body), 0, 0, colours, 0)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + bytes(4 * colours) + body


def adam7(width: int, height: int, *, depth: int = 16, colour: int = 6) -> bytes:
    """An interlaced PNG: seven passes over its pixels."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    packer, packed = zlib.compressobj(1), []
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            # Paeth's filter is the slowest.
            packed += [packer.compress(b"\x04" + bytes(columns * channels * depth // 8)) for _ in range(rows)]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 1)
    return png((b"IHDR", header), (b"IDAT", b"".join((*packed, packer.flush()))))


def filtered(width: int, height: int, *, depth: int = 8, colour: int = 6, noise: int = 3000) -> bytes:
    """A PNG with Paeth's filter in every row; so many kilobytes of its rows are random, the others are zero."""
    row = 1 + width * {0: 1, 2: 3, 4: 2, 6: 4}[colour] * depth // 8
    packer, random_rows = zlib.compressobj(1), min(height, 1000 * noise // row)
    numbers = random.Random(0)
    packed = [packer.compress(b"\x04" + numbers.randbytes(row - 1)) for _ in range(random_rows)]
    packed += [packer.compress(b"\x04" + bytes(row - 1)) for _ in range(height - random_rows)]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return png((b"IHDR", header), (b"IDAT", b"".join((*packed, packer.flush()))))


def empty_blocks(size: int) -> bytes:
    """Deflate blocks that consist of the tables for their codes and of nothing else: 14 bytes, and a microsecond."""
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> place & 1 for place in range(count))

    for _ in range(8):
        # Not the last block, tables of its own, 257 and 1 codes, 18 lengths of the codes for lengths: of these, 1 and
        # "many zeros" have one bit.
        for value, count in ((0, 1), (2, 2), (0, 5), (0, 5), (14, 4)):
            put(value, count)
        for place in range(18):
            put(place in (2, 17), 3)
        # 138 zeros and 118 zeros, a one for the end of the block, a one for the distances; then that end.
        for value, count in ((1, 1), (127, 7), (1, 1), (107, 7), (0, 1), (0, 1), (0, 1)):
            put(value, count)
    unit = np.packbits(bits, bitorder="little").tobytes()
    return fitted(unit, size)


def with_empty_blocks(side: int, size: int) -> bytes:
    """A black RGB image, with so many bytes of empty blocks before its pixels."""
    rows = bytes(1 + 3 * side) * side
    body = b"\x78\x01" + empty_blocks(size) + zlib.compress(rows, 1, -15) + struct.pack(">I", zlib.adler32(rows))
    return png((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", body))


def with_first_header(content: bytes) -> bytes:
    """A PNG file with another header before its own: of one bit per pixel."""
    return content[:8] + chunk(b"IHDR", content[16:24] + b"\1\0\0\0\0") + content[8:]


class _BitWriter:
    """Writes numbers, the lowest bit first."""

    def __init__(self) -> None:
        self._written = bytearray()
        self._open, self._count = 0, 0

    def put(self, *numbers: tuple[int, int]) -> None:
        """Numbers, each with its count of bits."""
        for number, count in numbers:
            self._open |= number << self._count
            self._count += count
            while self._count >= 8:
                self._written.append(self._open & 255)
                self._open, self._count = self._open >> 8, self._count - 8

    def content(self) -> bytes:
        return bytes(self._written) + bytes((self._open,)) + bytes(8)


def many_groups(size: tuple[int, int], groups: int, bits: int = 2) -> bytes:
    """A lossless WebP stream, without its head, with so many groups of Huffman tables: 20 bits and 5 kB each."""
    writer = _BitWriter()
    one_symbol, lengths_at_8 = (1, 4), [(0, 1)]
    # A code with 256 symbols of eight bits: of the codes for lengths, "8" is alone, or beside "many zeros".
    lengths_at_8 += [(8, 4), *((int(place == 11), 3) for place in range(12)), (1, 1), (3, 3), (254, 8)]
    blocks = -(-size[0] // 2**bits) * -(-size[1] // 2**bits)
    # No transform, no colour cache, but groups; their image has codes for the numbers of groups in red and green.
    writer.put((0, 1), (0, 1), (1, 1), (bits - 2, 3), (0, 1), *lengths_at_8, *lengths_at_8, *3 * [one_symbol])
    reversed_bits = [int(f"{number:08b}"[::-1], 2) for number in range(256)]
    for block in range(blocks):
        group = block % groups
        writer.put((reversed_bits[group & 255], 8), (reversed_bits[group >> 8], 8))
    writer.put(*groups * 5 * [one_symbol])
    return writer.content()


def with_groups(size: tuple[int, int], groups: int, bits: int = 2, *, alpha: bool = False, frames: int = 0) -> bytes:
    """A WebP file with many groups in its pixels or in its transparency, as an image or as a frame of an animation.

    Before the frame there may be some without pixels, which a decoder leaves out.
    """
    stream = many_groups(size, groups, bits)
    if alpha:
        lossy = encoded(size, "RGB", "WEBP", method=0, quality=1)[12:]
        image = riff(b"ALPH", b"\x01" + stream) + lossy
    else:
        image = _lossless(size, stream)
    place = _three(size[0] - 1) + _three(size[1] - 1)
    head = b""
    if frames:
        empty = riff(b"ANMF", bytes(6) + place + bytes(4))
        head = riff(b"ANIM", bytes(6)) + empty * (frames - 1)
        image = riff(b"ANMF", bytes(6) + place + bytes(4) + image)
    flags = 0x10 * alpha | 0x02 * bool(frames)
    extended = riff(b"VP8X", bytes((flags, 0, 0, 0)) + place) if flags else b""
    body = b"WEBP" + extended + head + image
    return b"RIFF" + struct.pack("<I", len(body)) + body


def with_long_transform(size: tuple[int, int]) -> bytes:
    """A lossless WebP file that begins with an image of one bit per block, and ends there."""
    writer = _BitWriter()
    writer.put((1, 1), (0, 2), (0, 3), (0, 1), (0b11, 2), (0, 1), (0, 1), (1, 8), *4 * [(1, 4)])
    image = _lossless(size, writer.content() + random.Random(0).randbytes(size[0] * size[1] // 128))
    return b"RIFF" + struct.pack("<I", len(image) + 4) + b"WEBP" + image


def _lossless(size: tuple[int, int], stream: bytes) -> bytes:
    return riff(b"VP8L", b"\x2f" + struct.pack("<I", (size[0] - 1) | (size[1] - 1) << 14) + stream)


def arithmetic(side: int, marker: int = 0xCA) -> bytes:
    """A JPEG file with arithmetic coding and 14 progressive scans, in which a few bytes stand for all pixels."""
    frame = segment(0xDB, bytes((0, *64 * (16,)))) + segment(
        marker, struct.pack(">BHHB3B", 8, side, side, 1, 1, 0x11, 0)
    )

    def scan(first: int, last: int, place: int, content: bytes = b"\x4b\xc6") -> bytes:
        return segment(0xDA, bytes((1, 1, 0, first, last, place))) + content

    parameters = segment(0xCC, b"\x10\x05")
    # One coefficient of every block, the last one, for an image of 7,070 pixels per side.
    first = parameters + scan(1, 63, 0x06, _LAST_COEFFICIENTS)
    refined = b"".join(parameters + scan(1, 63, place) for place in (0x65, 0x54, 0x43, 0x32, 0x21, 0x10))
    scans = segment(0xCC, b"\0\x10") + scan(0, 0, 0) + first + refined + 6 * scan(1, 63, 0x10)
    return b"\xff\xd8" + frame + scans + b"\xff\xd9"


_LAST_COEFFICIENTS = bytes.fromhex(
    "4bc600000000000168 74004eea00000000b56a5d80000000 0dfda10000000002b96f30929de6099a"
    "37e73a6eb7ba79e87dcd314d973832e8bea0"
)


def worst_known(length: int = SIZE) -> Iterator[tuple[str, bytes]]:
    """Files that took seconds before there were limits, each with so many bytes of filling."""
    for name, filling in JPEG_FILLINGS.items():
        yield f"JPEG {name}", jpeg_with(filling(length))
    for name, filling in PNG_FILLINGS.items():
        for last in (False, True):
            yield f"PNG {name}{' at the end' if last else ''}", png_with(filling(length), last=last)
    for name, filling in WEBP_FILLINGS.items():
        yield f"WebP {name}", webp_with(filling(length))
    yield "JPEG 1,000 scans", with_scans(1000)
    yield "BMP run lengths", run_lengths(4000)
    yield "PNG 1 x 16,000,000", png_with(b"", (1, 16_000_000), "RGBA")


def expensive() -> Iterator[tuple[str, bytes]]:
    """Files within the limits of the server, or just above them, that take as long as possible."""
    size, webp = (FULL_SIDE, FULL_SIDE), (4000, 4000)
    for more in (0, 3, 6, 10, 27, 53):
        for each in (size, (4000, 4000)):
            yield f"JPEG {more} more scans of {each[0]} x {each[1]}", with_scans(more, size=each)
        yield f"JPEG {more} more scans of noise", with_scans(more, size=(1500, 1500), mode="RGB", noisy=True)
    for options in ({}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 0, "progressive": True}):
        named = " ".join(options)
        yield f"JPEG {named}", encoded(size, "RGB", "JPEG", **options)
        yield f"JPEG CMYK {named}", encoded((4000, 4000), "CMYK", "JPEG", **options)
    for progressive in (False, True):
        noise = encoded((1500, 1500), "RGB", "JPEG", noisy=True, quality=100, progressive=progressive)
        yield f"JPEG noise{' progressive' * progressive}", noise
    yield "JPEG sideways", jpeg_with(segment(0xE1, b"Exif\0\0" + _turned(6)), size)
    yield "JPEG one long side", jpeg_with(b"", (16_384, 3050))
    for depth in (8, 16):
        for colour in (0, 2, 4, 6):
            kind = f"{depth} bits, colour type {colour}"
            # As large as the limit for such pixels allows.
            each = depth // 8 * {0: 1, 2: 3, 4: 2, 6: 4}[colour] + 2 * (colour >= 4)
            whole, half = (min(FULL_SIDE, int((MOST_UNPACKED / each / count) ** 0.5)) for count in (1, 2))
            yield f"PNG interlaced, {kind}, {half} x {half}", adam7(half, half, depth=depth, colour=colour)
            yield f"PNG filtered, {kind}, {whole} x {whole}", filtered(whole, whole, depth=depth, colour=colour)
    for mode, side in (("RGBA", 5000), ("LA", 6100), ("I;16", FULL_SIDE), ("1", FULL_SIDE), ("P", FULL_SIDE)):
        yield f"PNG {mode}", png_with(chunk(b"eXIf", _turned(5)), (side, side), mode)
    yield "PNG too large to unpack", filtered(*size, noise=0)
    yield "PNG transparent colour", png_with(chunk(b"tRNS", bytes(6)), (5400, 5400))
    yield "PNG transparent colour at the end", png_with(chunk(b"tRNS", bytes(6)), (5400, 5400), last=True)
    yield "PNG transparent colour at the end, 50 megapixels", png_with(chunk(b"tRNS", bytes(6)), size, last=True)
    yield "PNG interlaced RGBA of 16 bits, 50 megapixels", (interlaced := adam7(*size))
    yield "PNG interlaced RGBA of 16 bits behind another header", with_first_header(interlaced)
    yield "PNG empty blocks, 1 x 1", with_empty_blocks(1, FULL_SIZE)
    for side in (2400, 4000, FULL_SIDE):
        for size_of_blocks in (1_000_000, 4_000_000, FULL_SIZE - 1_000_000):
            yield (
                f"PNG {size_of_blocks} bytes of empty blocks, {side} x {side}",
                with_empty_blocks(side, size_of_blocks),
            )
    yield "PNG noise", filtered(FULL_SIDE, FULL_SIDE, colour=2, noise=31_000)
    yield "PNG data in pieces", png_with(fitted(chunk(b"IDAT"), 12 * 4000), size)
    yield "WebP", encoded(webp, "RGB", "WEBP", method=0)
    yield "WebP noise", encoded((1500, 1500), "RGB", "WEBP", noisy=True, method=0, quality=100)
    yield "WebP lossless noise", encoded((1500, 1500), "RGB", "WEBP", noisy=True, method=0, lossless=True)
    for side, quality in ((3300, 100), (3600, 100), (3600, 95), (3900, 85)):
        noise = encoded((side, side), "RGB", "WEBP", noisy=True, method=0, quality=quality)
        yield f"WebP noise, quality {quality}, {side} x {side}, {len(noise)} bytes", noise
    yield (
        "WebP lossless noise of 32 MB",
        encoded((3250, 3250), "RGB", "WEBP", noisy=True, method=0, lossless=True, quality=0),
    )
    yield "WebP lossless", encoded(webp, "RGBA", "WEBP", method=0, lossless=True)
    # As many as the limit for memory allows, and as many as there can be.
    yield "WebP with 15,625 groups of codes", with_groups((2000, 2000), 15_625, 4)
    yield "WebP with 62,500 groups of codes", with_groups((1000, 1000), 62_500)
    yield "WebP with 62,500 groups of codes for its transparency", with_groups((1000, 1000), 62_500, alpha=True)
    yield "WebP with 62,500 groups of codes in a frame", with_groups((1000, 1000), 62_500, frames=2)
    yield "WebP with a long transform", with_long_transform((4000, 4000))
    yield "JPEG arithmetic coding", arithmetic(FULL_SIDE - 1)
    yield "WebP frames", webp_with(fitted(riff(b"ANMF", bytes(16) + riff(b"VP8 ")), 34 * 4000), webp)
    yield "BMP", bmp(*size, 1, bytes((-(-size[0] // 32) * 4) * size[1]), colours=2)
    yield "BMP 4 bits", bmp(*size, 4, bytes((-(-size[0] // 8) * 4) * size[1]), colours=16)
    yield "BMP 16 bits", bmp(4000, 4000, 16, bytes(4000 * 4000 * 2))
    yield "BMP 24 bits", bmp(3340, 3340, 24, bytes(range(256)) * (3340 * 3340 * 3 // 256 + 1))


def _turned(orientation: int) -> bytes:
    return b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0) + bytes(4)


def hostile(noise: random.Random) -> tuple[str, bytes]:
    """One file at random: an image of some size with one or two fillings of some length."""
    size = noise.choice(SIDES)
    kind = noise.choice(("JPEG", "PNG", "WebP", "JPEG scans"))
    if kind == "JPEG scans":
        more = noise.randrange(60)
        return f"{size[0]} x {size[1]} JPEG {more} scans", with_scans(more, size=size, mode=noise.choice(("L", "RGB")))
    fillings = {"JPEG": JPEG_FILLINGS, "PNG": PNG_FILLINGS, "WebP": WEBP_FILLINGS}[kind]
    chosen = noise.sample(sorted(fillings), noise.choice((1, 1, 2)))
    lengths = (70_000, 1_000_000, FULL_SIZE // 2) if len(chosen) == 2 else (1_000_000, SIZE, FULL_SIZE)
    length = noise.choice(lengths)
    filling = b"".join(fillings[name](max(length, 900_000)) for name in chosen)
    if kind == "JPEG":
        content = jpeg_with(filling, size, progressive=noise.random() < 0.5)
    elif kind == "PNG":
        mode = noise.choice(("RGB", "RGBA", "L", "LA", "I;16"))
        content = png_with(filling, size, mode, last=noise.random() < 0.5)
    else:
        # Larger ones are refused for the memory that decoding would take.
        content = webp_with(filling, (min(size[0], 4000), min(size[1], 4000)), first=noise.random() < 0.5)
    if noise.random() < 0.3:
        content = _flipped(content, noise)
    return f"{size[0]} x {size[1]} {kind} {' and '.join(chosen)}", content


def _flipped(content: bytes, noise: random.Random) -> bytes:
    """A few bytes of the header changed."""
    changed = bytearray(content)
    for _ in range(noise.randrange(1, 8)):
        changed[noise.randrange(2, min(len(changed), 4000))] = noise.randrange(256)
    return bytes(changed)
