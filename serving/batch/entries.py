"""One image of a batch: its bytes, or why there are none; from a file or a URL that fsspec knows."""

from __future__ import annotations

import os
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
        return local.read(LIMITS.size + 1)


def read_entry(path: str, name: str) -> Entry:
    try:
        return Entry(name, read_file(path))
    except (OSError, ValueError, ImportError) as error:
        return Entry(name, error if isinstance(error, OSError) else OSError(str(error)))
