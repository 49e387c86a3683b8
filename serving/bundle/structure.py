"""A bounded walk over the segments or chunks of an image file, before a decoder reads it.

Pillow parses everything around the pixels in Python: a file of a few megabytes that consists of tiny segments, fill
bytes or crafted metadata would occupy a thread for many seconds. So the number of segments is limited here, and what
does not change the pixels (EXIF, XMP, colour profiles, comments, thumbnails, further pictures) is left out of what
Pillow gets. The orientation is the only part of it that is used, and it is read here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from serving.bundle.errors import ImageError

MOST_SEGMENTS, BYTES_PER_SEGMENT = 4096, 2048
"""A file may have this many segments, or one per this many bytes if that is more: encoders write chunks of 8 kB."""
MOST_FILL = 1024
"""Bytes between the segments of a JPEG file, which decoders skip one by one."""
MOST_TABLES = 256 * 1024
"""Bytes of a JPEG file's header without the application data; 3 kB are usual."""
MOST_SCANS = 64
"""Scans of a JPEG file. A progressive one has about ten; each further scan takes a few bytes of the file, and may make
the decoder process all pixels again."""
MOST_FRAMES = 4096
"""Frames of a WebP animation: the decoder lists all of them before it decodes the first."""
MOST_ENTRIES = 1024
"""Entries of an EXIF directory; dozens are usual."""


@dataclass(frozen=True)
class LosslessStream:
    """Where a WebP file has pixels or transparency that are packed without loss, in bytes of the file."""

    start: int
    """Where its bits begin."""
    end: int
    size: tuple[int, int] | None
    """Width and height; None: those of the whole image, at most."""


@dataclass(frozen=True)
class Structure:
    """The outcome of the walk."""

    content: bytes
    """The file without the parts that do not change the pixels."""
    orientation: int | None = None
    """EXIF's: 1 is upright."""
    scans: int = 1
    """How often the decoder processes all pixels: the scans of a progressive JPEG file, each times its components."""
    packed: int = 0
    """Bytes that the pixels of a PNG file are packed into, or those of the first picture of a lossy WebP file."""
    transparent: bool = False
    """Whether a PNG file has a chunk with transparent colours, wherever it is."""
    streams: tuple[LosslessStream, ...] = ()
    """What may be decoded of a WebP file that is packed without loss."""


def examine(content: bytes, kind: str) -> Structure:
    """Walk over a file of this format; raises an ImageError if its structure exceeds a limit or makes no sense."""
    return _WALKS[kind](content)


def most_segments(size: int) -> int:
    """The number of segments that a file of this size may have."""
    return max(MOST_SEGMENTS, size // BYTES_PER_SEGMENT)


# JPEG

_SOI, _EOI, _SOS, _APP0, _APP1, _APP14, _COM = 0xD8, 0xD9, 0xDA, 0xE0, 0xE1, 0xEE, 0xFE
_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))
"""Markers without a length, which mean nothing before the first scan."""
_TABLES = frozenset((*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDB, 0xE0)))
_ARITHMETIC = frozenset(range(0xC9, 0xD0))
"""Frames with arithmetic coding, and its parameters: a scan of two bytes makes the decoder work through all pixels."""
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""A marker that begins a segment: not an escaped 0xff, a restart marker or a fill byte."""
_NO_FILL = re.compile(rb"\xff([\x01-\xfe])")


def _jpeg(content: bytes) -> Structure:
    kept, metadata = [b"\xff\xd8"], _Metadata()
    place, fill, tables = 2, 0, 0
    for _ in range(most_segments(len(content))):
        # A bounded search: a long run of fill bytes is refused without looking for its end.
        found = _NO_FILL.search(content, place, place + MOST_FILL + 2 - fill)
        if found is None:
            if place + MOST_FILL + 2 - fill >= len(content):
                raise _broken("no scan", got=f"{len(content)} bytes of JPEG")
            raise _broken("too much between segments", got=f"more than {MOST_FILL} bytes", allowed="none")
        fill += found.start() - place
        marker, start = content[found.end() - 1], found.end()
        if marker in _ALONE:
            place = start
            continue
        if marker in _ARITHMETIC:
            got = f"arithmetic coding (marker 0x{marker:02x} at byte {found.start()})"
            allowed = "JPEG with Huffman coding, which all cameras and browsers use"
            raise ImageError("unsupported_image", "JPEG is not read here", got=got, allowed=allowed)
        end = start + int.from_bytes(content[start : start + 2])
        if marker == _SOS:
            rest = content[found.start() :]
            return Structure(b"".join((*kept, rest)), metadata.orientation(), _scans(rest))
        if end < start + 2 or end > len(content):
            raise _broken("incomplete segment", got=f"marker 0x{marker:02x} at byte {found.start()}")
        if marker in _TABLES or (marker in (_APP0, _APP14) and content.startswith((b"JFIF", b"Adobe"), start + 2)):
            tables += end - start
            kept.append(content[found.start() : end])
        elif marker == _APP1:
            metadata.take(content[start + 2 : end])
        elif not (_APP0 <= marker < _APP0 + 16 or marker == _COM):
            raise _broken("unexpected marker", got=f"0x{marker:02x} at byte {found.start()}")
        if tables > MOST_TABLES:
            raise _broken("header too large", got=f"more than {MOST_TABLES} bytes of tables")
        place = end
    raise _too_many("segments", most_segments(len(content)))


def _scans(content: bytes) -> int:
    """The number of scans of one component up to the end marker: what is appended, such as a video, is not decoded."""
    if content.count(b"\xff\xda") == 1:
        return 1
    scans, components, place = 0, 0, 0
    for _ in range(MOST_SEGMENTS):
        found = _MARKER.search(content, place)
        if found is None or content[found.start() + 1] == _EOI:
            return components
        if content[found.start() + 1] == _SOS:
            scans += 1
            # After the length; at most 4 are allowed.
            components += min(4, int.from_bytes(content[found.end() + 2 : found.end() + 3]))
        if scans > MOST_SCANS:
            break
        # The length of the segment follows its marker.
        place = found.end() + int.from_bytes(content[found.end() : found.end() + 2])
    allowed = f"up to {MOST_SCANS} scans in {MOST_SEGMENTS} segments"
    raise ImageError("broken_image", "too many scans", got=f"at least {scans}", allowed=allowed)


# PNG

_PNG_HEAD = 8
_PNG_HEADER = b"\0\0\0\x0dIHDR"
_PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_PNG_XMP = b"XML:com.adobe.xmp\0\0\0"
"""The keyword of an uncompressed text, before its language and its translated keyword."""


def _png(content: bytes) -> Structure:
    # Decoders take the last header, and our limits are checked against the first.
    if not content.startswith(_PNG_HEADER, _PNG_HEAD):
        raise _broken("no header", got=f"{content[_PNG_HEAD : _PNG_HEAD + 8]!r} at byte {_PNG_HEAD}")
    metadata, packed, transparent = _Metadata(), 0, False
    kept, place, dropped = [content[:_PNG_HEAD]], _PNG_HEAD, False
    for _ in range(most_segments(len(content))):
        if place + 8 > len(content):
            # Pillow reports what is missing, if anything is.
            kept_content = b"".join(kept) if dropped else content
            return Structure(kept_content, metadata.orientation(), packed=packed, transparent=transparent)
        name = content[place + 4 : place + 8]
        # Length, name, content and checksum.
        end = place + 12 + int.from_bytes(content[place : place + 4])
        if name == b"IHDR" and place != _PNG_HEAD:
            raise _broken("second header", got=f"IHDR at byte {place}")
        if name in _PIXEL_CHUNKS:
            kept.append(content[place:end])
            packed += (end - place) * (name == b"IDAT")
            transparent |= name == b"tRNS"
        elif name[0] & 32:
            dropped = True
            if name == b"eXIf":
                metadata.take(_EXIF + content[place + 8 : end - 4].removeprefix(_EXIF))
            elif name == b"iTXt" and content.startswith(_PNG_XMP, place + 8):
                metadata.take(_XMP + content[place + 8 + len(_PNG_XMP) : end - 4])
        else:
            raise _broken("unexpected chunk", got=f"{name!r} at byte {place}")
        if name == b"IEND":
            end = len(content)
        place = end
    raise _too_many("chunks", most_segments(len(content)))


# WebP

_WEBP_HEAD, _CHUNK_HEAD, _FRAME_HEAD = 12, 8, 16
_LOSSLESS_HEAD = 5
"""Bytes of a mark, of width and height with 14 bits each, and of four further bits."""
_PIXELS = (b"VP8 ", b"VP8L", b"ALPH")


def _webp(content: bytes) -> Structure:
    metadata, frames, packed, animated = _Metadata(), 0, 0, False
    streams: list[LosslessStream] = []
    left = iter(range(most_segments(len(content))))
    for name, start, end in _chunks(content, _WEBP_HEAD, len(content), left):
        if name == b"ANMF":
            frames += 1
            if frames > MOST_FRAMES:
                raise _too_many("frames", MOST_FRAMES)
            if not animated:
                # Decoders leave out frames without pixels: the first one that has some is the image.
                inside = list(_chunks(content, start + _FRAME_HEAD, end, left))
                animated = any(each[0] in _PIXELS for each in inside)
                packed += (end - start) * animated
                streams += _streams(content, inside)
        elif name in _PIXELS:
            packed += (end - start) * (name != b"VP8L")
            streams += _streams(content, [(name, start, end)])
        elif name == b"EXIF":
            metadata.take(_EXIF + content[start:end].removeprefix(_EXIF))
        elif name == b"XMP ":
            metadata.take(_XMP + content[start:end])
    return Structure(content, metadata.orientation(), packed=packed, streams=tuple(streams))


def _chunks(content: bytes, start: int, end: int, left: Iterator[int]) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of the chunks in a part of a file, of which so many are left to read."""
    while start + _CHUNK_HEAD <= end:
        if next(left, None) is None:
            raise _too_many("chunks", most_segments(len(content)))
        size = int.from_bytes(content[start + 4 : start + _CHUNK_HEAD], "little")
        yield content[start : start + 4], start + _CHUNK_HEAD, min(start + _CHUNK_HEAD + size, end)
        # Chunks have an even length.
        start += _CHUNK_HEAD + size + size % 2


def _streams(content: bytes, chunks: Sequence[tuple[bytes, int, int]]) -> Iterator[LosslessStream]:
    for name, start, end in chunks:
        if name == b"VP8L":
            size = int.from_bytes(content[start + 1 : start + _LOSSLESS_HEAD], "little")
            yield LosslessStream(start + _LOSSLESS_HEAD, end, ((size & 0x3FFF) + 1, (size >> 14 & 0x3FFF) + 1))
        elif name == b"ALPH" and content[start : start + 1] and content[start] & 3 == 1:
            # The other method does not pack at all.
            yield LosslessStream(start + 1, end, None)


def _bmp(content: bytes) -> Structure:
    """A BMP file has no segments, and no orientation."""
    return Structure(content)


_WALKS: dict[str, Callable[[bytes], Structure]] = {"JPEG": _jpeg, "PNG": _png, "WEBP": _webp, "BMP": _bmp}

# Metadata

_ORIENTATION_TAG = 0x0112
_NUMBERS = {1: "B", 3: "H", 4: "I"}
"""EXIF's types of whole numbers, which fit into an entry: 8, 16 and 32 bits."""
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


class _Metadata:
    """The first EXIF and the first XMP block of a file."""

    def __init__(self) -> None:
        self._exif: bytes | None = None
        self._xmp: bytes | None = None

    def take(self, block: bytes) -> None:
        if self._exif is None and block.startswith(_EXIF):
            self._exif = block[len(_EXIF) :]
        elif self._xmp is None and block.startswith(_XMP):
            self._xmp = block[len(_XMP) :]

    def orientation(self) -> int | None:
        """The orientation that EXIF gives, or else XMP; None where neither gives a number."""
        if self._exif is not None and (orientation := exif_orientation(self._exif)) is not None:
            return orientation
        found = _XMP_ORIENTATION.search(self._xmp) if self._xmp is not None else None
        return int(found[1]) if found else None


def exif_orientation(exif: bytes) -> int | None:
    """The orientation in the first directory of an EXIF block (a TIFF file); None if there is none or it is damaged."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, start)
        for entry in range(min(entries, MOST_ENTRIES)):
            tag, kind, count = struct.unpack_from(f"{order}HHI", exif, start + 2 + 12 * entry)
            if tag == _ORIENTATION_TAG and kind in _NUMBERS and count == 1:
                (orientation,) = struct.unpack_from(order + _NUMBERS[kind], exif, start + 10 + 12 * entry)
                return int(orientation)
    except struct.error:
        # A photograph with a damaged EXIF block is still usable.
        pass
    return None


def _broken(problem: str, *, got: str, allowed: str = "a complete, undamaged file") -> ImageError:
    return ImageError("broken_image", problem, got=got, allowed=allowed)


def _too_many(what: str, most: int) -> ImageError:
    return _broken(f"too many {what}", got=f"more than {most}", allowed=f"up to {most}")
