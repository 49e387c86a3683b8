"""A map on disk that only grows: 32-byte keys to values of one width, safe against kill -9 and other processes.

`values` holds the values one after another. `index` holds one record per value: the key, the checksum of the value and
the checksum of the record. A value is written before its record, so a process that is killed leaves at most a value
without a record, or a torn record; both are overwritten by the next writer. Checksums are compared whenever a value is
looked up, so damage of any other kind is found as well, and counts as missing.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

KEY = 32
"""Bytes of a key: a sha256 digest."""
INDEX, VALUES = "index", "values"
_RECORD = struct.Struct(f"<{KEY}sII")


class Records:
    """The map in one folder, which is created if it is missing. Keys and positions are held in memory."""

    def __init__(self, folder: Path, width: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.width = width
        self._index = _opened(folder / INDEX)
        self._values = _opened(folder / VALUES)
        self._rows: dict[bytes, tuple[int, int]] = {}
        self._read = 0
        self._refresh()
        # The time of last use, by which the least recently used map is found.
        os.utime(folder / INDEX)

    def close(self) -> None:
        self._index.close()
        self._values.close()

    def __len__(self) -> int:
        """How many values there are, damaged and replaced ones included."""
        return self._read

    def has(self, key: bytes) -> bool:
        """Whether there is an intact value for the key; may be called in other threads than the one that appends."""
        return self._intact(key) >= 0

    def find(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """The row of each key, or -1 for a key that is missing or whose value is damaged."""
        self._refresh()
        return np.fromiter((self._intact(key) for key in keys), np.int64, len(keys))

    def append(self, keys: Sequence[bytes], values: NDArray[Any]) -> NDArray[np.int64]:
        """Add one value per key, or replace a damaged one; returns their rows."""
        content = np.ascontiguousarray(values).view(np.uint8).reshape(len(keys), self.width)
        with self._locked():
            first = os.fstat(self._index.fileno()).st_size // _RECORD.size
            # The end of a torn record is cut off here, and a value without a record is overwritten.
            self._index.truncate(first * _RECORD.size)
            _write(self._values, content.tobytes(), first * self.width)
            records = b"".join(_record(key, zlib.crc32(value.data)) for key, value in zip(keys, content, strict=True))
            _write(self._index, records, first * _RECORD.size)
            self._refresh()
        return np.arange(first, first + len(keys))

    def rows(self, dtype: type[np.generic]) -> NDArray[Any]:
        """All values as one memory-mapped array [rows, width / size of a number], to be read only."""
        self._refresh()
        numbers = self.width // np.dtype(dtype).itemsize
        if not self._read:
            return np.empty((0, numbers), dtype)
        # The open file, because another one may have its name by now.
        return np.memmap(self._values, dtype, "r", shape=(self._read, numbers))

    def _intact(self, key: bytes) -> int:
        row, checksum = self._rows.get(key, (-1, 0))
        if row < 0:
            return -1
        value = os.pread(self._values.fileno(), self.width, row * self.width)
        return row if len(value) == self.width and zlib.crc32(value) == checksum else -1

    def _refresh(self) -> None:
        """Read the records that were added since, by this or another process; a later one replaces an earlier one."""
        start = self._read * _RECORD.size
        content = os.pread(self._index.fileno(), os.fstat(self._index.fileno()).st_size - start, start)
        for offset in range(0, len(content) - _RECORD.size + 1, _RECORD.size):
            record = content[offset : offset + _RECORD.size]
            key, checksum, _ = _RECORD.unpack(record)
            if _record(key, checksum) == record:
                self._rows[key] = self._read, checksum
            self._read += 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._index, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._index, fcntl.LOCK_UN)


def _record(key: bytes, checksum: int) -> bytes:
    return _RECORD.pack(key, checksum, zlib.crc32(key, checksum))


def _opened(path: Path) -> BinaryIO:
    """Open for reading and writing, and create it if it is missing; what is there is kept."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)


def _write(file: BinaryIO, content: bytes, offset: int) -> None:
    """Write all of it; one call may write less."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        rest, offset = rest[written:], offset + written
