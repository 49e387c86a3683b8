"""One image of a batch: its bytes, or why there are none; from a file or a URL that fsspec knows."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from serving.bundle.pixels import LIMITS


class Entry(NamedTuple):
    """One image: its bytes, or why they could not be read."""

    name: str
    content: bytes | OSError


def is_url(source: str) -> bool:
    return "://" in source


def absolute(source: str) -> str:
    return source if is_url(source) else os.path.abspath(source)


def read_file(path: str) -> bytes:
    """The bytes of a file or URL, at most one more than allowed: that is enough to refuse it for its size."""
    if is_url(path):
        import fsspec

        with fsspec.open(path, "rb") as file:
            content: bytes = file.read(LIMITS.size + 1)
            return content
    with open(path, "rb") as local:
        about, most = os.fstat(local.fileno()), LIMITS.size
        # Room for the whole limit would take longer than to read most files.
        if stat.S_ISREG(about.st_mode) and about.st_size:
            most = min(most, about.st_size)
        return local.read(most + 1)


def read_entry(path: str, name: str) -> Entry:
    try:
        return Entry(name, read_file(path))
    except (OSError, ValueError, ImportError) as error:
        return Entry(name, error if isinstance(error, OSError) else OSError(str(error)))
