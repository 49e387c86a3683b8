"""Atomic file replacement: a reader, or the state after a crash, has the old content or the new content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which is renamed to `path` when the block ends without an error.

    `durable` flushes the file to disk before it is renamed; the rename itself is durable after `sync(path.parent)`.
    `shared` gives every writer its own temporary path. Without it a killed writer's leftover is overwritten next time.
    """
    suffix = f"{os.getpid()}.{os.urandom(4).hex()}.part" if shared else "part"
    temporary = path.with_name(f"{path.name}.{suffix}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        # On a full disk a partial file would be in the way.
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file's content. Without `durable` it may be lost with the power, but is never half written."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
