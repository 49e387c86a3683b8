"""Arrays from an .npz archive that someone else may have written: sizes are checked before anything is unpacked."""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

MOST_ARRAYS, MOST_UNPACKED = 1024, 512 * 1024 * 1024
"""The number of arrays in an archive, and their bytes together once they are unpacked."""
_KINDS = "biuf"
"""Booleans and numbers."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How numpy writes archives; other methods of compression may take far more memory."""
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    EOFError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
)
"""Exceptions of zipfile and numpy for damaged or hostile archives, in addition to ValueError."""


def read_arrays(content: bytes | IO[bytes], only: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an archive by name, or only some; raises a ValueError if it is damaged or larger than allowed."""
    try:
        with zipfile.ZipFile(io.BytesIO(content) if isinstance(content, bytes) else content) as archive:
            members = archive.infolist()
            if len(members) > MOST_ARRAYS:
                raise ValueError(f"{len(members)} arrays; allowed: up to {MOST_ARRAYS}")
            if (unpacked := sum(member.file_size for member in members)) > MOST_UNPACKED:
                raise ValueError(f"{unpacked} bytes when unpacked; allowed: up to {MOST_UNPACKED}")
            if other := [member.filename for member in members if member.compress_type not in _METHODS]:
                raise ValueError(f"{other[0]!r} is compressed in another way; allowed: stored or deflated")
            # A member that holds more than it announces is not read beyond that.
            named = {member.filename.removesuffix(".npy"): member for member in members}
            return {name: _read_array(archive, each) for name, each in named.items() if only is None or name in only}
    except _UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        shape, dtype = _header(file)
        # numpy would allocate what the header announces, before it reads any number.
        if math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} announces {shape} numbers in {member.file_size} bytes")
        if dtype.kind not in _KINDS:
            raise ValueError(f"{member.filename} has {dtype}; allowed: numbers")
    with archive.open(member) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of format {version}; allowed: {', '.join(map(str, readers))}")
    shape, _, dtype = readers[version](file)
    return shape, dtype
