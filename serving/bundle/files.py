"""Reading and copying of files that someone else may have put into a bundle: their type and size are checked before."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

MOST_BYTES, MOST_METADATA, MOST_MANIFEST = 16 * 1024**3, 256 * 1024**2, 8 * 1024**2
"""Bytes of any file of a bundle, of its rule or golden file, where megabytes are usual, and of its manifest, where
kilobytes are usual and every byte may take a hundred once it is parsed."""


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file, or of a link to one, of at most `most` bytes; raises an OSError otherwise.

    A pipe would block the reader, and a device may have no end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        size = _checked_size(os.fstat(descriptor), path, most)
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EIO, "the file changed while it was read", str(path))
    return content


def copy_regular(source: str, target: str) -> str:
    """Copy a regular file, as `copy_function` of `shutil.copytree`; raises an OSError for anything else."""
    _checked_size(os.stat(source), Path(source), MOST_BYTES)
    return str(shutil.copyfile(source, target))


def _checked_size(found: os.stat_result, path: Path, most: int) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if found.st_size > most:
        raise OSError(errno.EFBIG, f"{found.st_size} bytes; allowed: up to {most}", str(path))
    return found.st_size
