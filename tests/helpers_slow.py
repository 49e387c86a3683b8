"""Image files that are small in bytes and pixels, and would take very long to decode."""

from __future__ import annotations

import struct
import zlib

from PIL import Image

from tests.helpers_serving import png, saved


def with_scans(more: int, *, side: int = 1000) -> bytes:
    """A progressive JPEG whose last scan comes again and again: 12 bytes each, for all pixels."""
    content = saved(Image.new("L", (side, side), 128), "JPEG", progressive=True, quality=10)
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * more + content[-2:]


def with_profiles(count: int) -> bytes:
    """A PNG with colour profiles of one megabyte each, compressed to a kilobyte."""
    header = (b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
    profile = (b"iCCP", b"a\0\0" + zlib.compress(bytes(1024 * 1024 - 10), 9))
    return png(header, *[profile] * count, (b"IDAT", zlib.compress(bytes(4 * 5))))


def run_lengths(side: int, *, bits: int = 8) -> bytes:
    """A BMP that is compressed: a pixel and the end of the line, for each line."""
    body = b"\x01\x00\x00\x00" * side + b"\0\1"
    colours = bytes(4 * 2**bits)
    start = 14 + 40 + len(colours)
    compression = {8: 1, 4: 2}[bits]
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, bits, compression, len(body), 0, 0, 2**bits, 0)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + colours + body
