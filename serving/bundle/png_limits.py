"""How long a PNG file may take to decode, by its header and by the bytes that its pixels are packed into."""

from __future__ import annotations

import io
import struct
import time

from serving.bundle.errors import ImageError
from serving.bundle.structure import Structure

MOST_UNPACKED = 150_000_000
"""Bytes of a PNG file's pixels once they are unpacked, at most a second of processor time: 50 million pixels of RGB
with 8 bits. Those of an interlaced file count twice. Transparency counts as two bytes per pixel more, because pixels
have to be laid over the background."""
MOST_SECONDS = 0.7
"""Processor time for a file whose cost is not known before it is unpacked; large photographs take up to half of it."""

_SLOWEST = 12
"""A packed byte may take as long as this many unpacked ones: a block of 14 bytes may have tables and no content."""
_SPARE = 64 * 1024
"""Packed bytes beyond twice the unpacked ones: no encoder needs as many."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Numbers per pixel by PNG's colour type: grey, RGB, palette, grey with alpha, RGBA."""


class _Cost:
    """The cost of decoding by the header of the file; Pillow refuses a header that makes no sense."""

    def __init__(self, structure: Structure) -> None:
        self.width, self.height, depth, colour, interlaced = struct.unpack_from(">IIBBxxB", structure.content, 16)
        self.interlaced, self.clear = bool(interlaced), colour >= 4 or structure.transparent
        self.bits = depth * _CHANNELS.get(colour, 4)
        self.each = (self.bits + 16 * self.clear) * (1 + self.interlaced)
        """Bits per pixel that count in the limit."""
        self.charged = self.width * self.height * self.each // 8
        """Bytes that count in the limit."""
        # One byte per row and pass selects the filter of the row.
        self.unpacked = self.height * (self.width * self.bits // 8 + 2) * (1 + self.interlaced)


def png_file(structure: Structure) -> io.BytesIO:
    """The file to decode; if its packed bytes are enough to take long, the time is limited."""
    unclear = _Cost(structure).charged + _SLOWEST * structure.packed > MOST_UNPACKED
    return TimedFile(structure.content, MOST_SECONDS) if unclear else io.BytesIO(structure.content)


def check_unpacked(structure: Structure) -> None:
    """Refuse a PNG file whose pixels take too long to unpack; Pillow has accepted its header."""
    cost = _Cost(structure)
    kind = f"{'interlaced ' * cost.interlaced}PNG{' with transparency' * cost.clear}"
    got = f"{kind} of {cost.width} x {cost.height} pixels of {cost.bits} bits"
    if cost.charged > MOST_UNPACKED:
        allowed = f"up to {8 * MOST_UNPACKED // cost.each} of these pixels"
        raise ImageError("too_many_pixels", "image too large to decode", got=got, allowed=allowed)
    if structure.packed > (most := 2 * cost.unpacked + _SPARE):
        got = f"{got} in {structure.packed} bytes"
        raise ImageError("broken_image", "more data than pixels", got=got, allowed=f"up to {most} bytes")


class TimedFile(io.BytesIO):
    """A file that can only be read for a number of seconds of the reading thread's processor time after each `seek`.

    Pillow seeks to the pixels and reads 64 kB at a time, so a file that takes too long is given up between two reads.
    """

    def __init__(self, content: bytes, seconds: float) -> None:
        super().__init__(content)
        self._seconds = seconds
        self._started = time.thread_time()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._started = time.thread_time()
        return super().seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() - self._started > self._seconds:
            got, allowed = f"more than {self._seconds:g} s of processor time", "fewer pixels, or a JPEG or WebP file"
            raise ImageError("too_many_pixels", "image takes too long to decode", got=got, allowed=allowed)
        return super().read(size)
