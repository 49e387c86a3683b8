"""Atomic file replacement: a reader, or the state after a crash, has the old content or the new content."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HERE, _EXCHANGE, _SWAP = -100, 2, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux, and RENAME_SWAP of macOS."""


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


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False, and nothing is changed, where the system cannot do that.

    Python has no function for it. Linux has had renameat2 with this flag since 2014, documented in rename(2), and glibc
    since 2018; some file systems, such as NFS, do not support it. macOS has had renamex_np since 10.12, documented in
    rename(2) there; this way has not been tried on a Mac, only with a stand-in for the system's library.
    """
    swap = _swap_of(ctypes.CDLL(None, use_errno=True))
    if swap is None:
        return False
    if swap(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _swap_of(library: Any) -> Callable[[bytes, bytes], int] | None:
    """The system's function that exchanges two paths and returns 0, or sets errno; None if it has none."""
    text, flags = ctypes.c_char_p, ctypes.c_uint
    if (renameat2 := getattr(library, "renameat2", None)) is not None:
        renameat2.argtypes = (ctypes.c_int, text, ctypes.c_int, text, flags)
        return lambda one, other: int(renameat2(_HERE, one, _HERE, other, _EXCHANGE))
    if (renamex_np := getattr(library, "renamex_np", None)) is not None:
        renamex_np.argtypes = (text, text, flags)
        return lambda one, other: int(renamex_np(one, other, _SWAP))
    return None


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a file or folder, which ends with this process; False if another one keeps it for `patience`.

    Where the file system has no locks, nobody ever holds one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + patience
        while not (held := lock_now(descriptor)) and time.monotonic() < until:
            time.sleep(0.01)
        yield held
    finally:
        os.close(descriptor)


def lock_now(descriptor: int) -> bool:
    """Take the lock of an open file or folder; False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return True


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
