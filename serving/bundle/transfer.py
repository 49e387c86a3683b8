"""Bundles at a URL that fsspec knows: a Hugging Face repository (hf://), an object store (s3://, gs://), a folder.

    URL/859549a0961c/     a bundle, complete as soon as it has a manifest, and never changed afterwards
    URL/1f0c3f9d77ab/
    URL/current           the version to pull, as text

Files are written before the manifest, and the manifest before `current`; every file is read back and compared with its
checksum before that. So a reader finds the old bundle or the new one, whatever happens to the writer, and a push that
was interrupted is continued by the same push. On the Hub, which has no transactions, each file is one commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from serving.bundle.directory import WriteError, check_target, fresh_directory, move_into_place
from serving.bundle.errors import BundleError
from serving.bundle.files import MOST_BYTES, MOST_MANIFEST
from serving.bundle.layout import CARD, MANIFEST
from serving.bundle.manifest import Manifest, describe_file, load_bundle, parse_manifest
from serving.bundle.sections import FileInfo

CURRENT = "current"
HUB, HUB_CARD = "hf", "README.md"
"""The protocol of the Hugging Face Hub, and the file that it shows as the card of a repository."""
PIECE = 1 << 20
_VERSION = re.compile(r"[0-9a-f]{12}")
_PASSWORD = re.compile(r"(://[^:/@\s]*):[^@/\s]*@")

Report = Callable[[str, int, int], None]
"""Called with the action and the file, the bytes done, and all bytes."""


class TransferError(Exception):
    """A bundle cannot be sent or fetched; the message has the reason."""


class Moved(NamedTuple):
    """A bundle that was sent or fetched: where it is now, and what it is."""

    place: str
    manifest: Manifest
    sent: int
    """Bytes that were transferred; less than all if some were there already."""


class _Count:
    """Reports how many bytes are done."""

    def __init__(self, total: int, report: Report | None) -> None:
        self.total, self.done, self._report = total, 0, report

    def add(self, what: str, size: int) -> None:
        self.done += size
        if self._report is not None:
            self._report(what, self.done, self.total)


class _Place:
    """A folder of a file system, local or remote."""

    def __init__(self, url: str) -> None:
        self.url = _PASSWORD.sub(r"\1:***@", url.rstrip("/"))
        try:
            from fsspec.core import url_to_fs

            self.system, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise TransferError(f"{self.url}: {_reason(error)}; allowed: a URL that fsspec knows") from error
        self._root = root.rstrip("/")
        protocols = self.system.protocol
        self.is_hub = HUB in ((protocols,) if isinstance(protocols, str) else protocols)

    def path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        try:
            with _no_bars() if self.is_hub else contextlib.nullcontext():
                yield
        except (TransferError, BundleError, WriteError):
            raise
        except Exception as error:
            # fsspec uses many libraries, each with its own exceptions.
            raise TransferError(f"{self.url}: cannot be used: {_reason(error)}") from error

    def read_small(self, *names: str) -> bytes | None:
        """The content of a file of limited size; None if it is not there."""
        try:
            self.system.invalidate_cache()  # somebody else may have written it
            with self.system.open(self.path(*names), "rb") as file:
                content = bytes(file.read(MOST_MANIFEST + 1))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        if len(content) > MOST_MANIFEST:
            raise TransferError(f"{self.url}/{'/'.join(names)}: too large; allowed: up to {MOST_MANIFEST} bytes")
        return content

    def write_small(self, content: bytes, *names: str) -> None:
        """Replace a file in one step: the file systems of fsspec show what a transaction wrote when it ends.

        Nothing is written if the file has this content: on the Hub it would be an empty commit.
        """
        if self.read_small(*names) == content:
            return
        with self._transaction(), self.system.open(self.path(*names), "wb") as file:
            file.write(content)

    def _transaction(self) -> contextlib.AbstractContextManager[object]:
        try:
            transaction: contextlib.AbstractContextManager[object] = self.system.transaction
            return transaction
        except NotImplementedError:
            # Such a file system, the Hub among them, writes a whole file in one step when it is closed.
            return contextlib.nullcontext()

    def send(self, source: Path, name: str, count: _Count, *inside: str) -> None:
        """Copy a file to here."""
        with source.open("rb") as file, self.system.open(self.path(*inside, name), "wb") as target:
            while piece := file.read(PIECE):
                target.write(piece)
                count.add(f"sending {name}", len(piece))

    def pieces(self, info: FileInfo, *names: str) -> Iterator[bytes]:
        """The content of a file, which ends when it is longer than it should be: it may have no end."""
        size = 0
        with self.system.open(self.path(*names), "rb") as file:
            while size <= info.size and (piece := file.read(PIECE)):
                size += len(piece)
                yield piece

    def holds(self, info: FileInfo, *names: str, count: _Count | None = None) -> bool:
        """Whether a file is there with this size and checksum. It is read whole, unless its size is wrong."""
        digest, size = hashlib.sha256(), 0
        try:
            self.system.invalidate_cache()
            if self.system.size(self.path(*names)) not in (info.size, None):
                return False
            for piece in self.pieces(info, *names):
                digest.update(piece)
                size += len(piece)
                if count is not None:
                    count.add(f"checking {names[-1]}", len(piece))
        except FileNotFoundError:
            return False
        return (size, digest.hexdigest()) == (info.size, info.sha256)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of the Hub's library, one per file, because the progress is reported here."""
    from huggingface_hub import utils as hub

    # They are documented, but the package marks none of its names as exported.
    shown = not hub.are_progress_bars_disabled()  # type: ignore[attr-defined]
    hub.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if shown:
            hub.enable_progress_bars()  # type: ignore[attr-defined]


def push(bundle: Path, url: str, report: Report | None = None) -> Moved:
    """Send a bundle to a URL, where it becomes the current one; raises a BundleError or a TransferError."""
    local = load_bundle(bundle)
    local.check()
    manifest, place = local.manifest, _Place(url)
    version, sent = manifest.version, 0
    # Every file is sent and read back.
    count = _Count(2 * sum(info.size for info in manifest.files.values()), report)
    with place.usable():
        place.system.makedirs(place.path(version), exist_ok=True)
        for name, info in manifest.files.items():
            if place.holds(info, version, name):
                count.add(f"{name} is there", 2 * info.size)
                continue
            place.send(bundle / name, name, count, version)
            sent += info.size
            if not place.holds(info, version, name, count=count):
                raise TransferError(f"{place.url}/{version}/{name}: not what was sent; push again")
        if not _has_version(place, version):
            place.write_small((bundle / MANIFEST).read_bytes(), version, MANIFEST)
            if not place.holds(describe_file(bundle / MANIFEST), version, MANIFEST):
                raise TransferError(f"{place.url}/{version}/{MANIFEST}: not what was sent; push again")
        if place.is_hub and CARD in manifest.files:
            place.write_small((bundle / CARD).read_bytes(), HUB_CARD)
        place.write_small(f"{version}\n".encode(), CURRENT)
    return Moved(f"{place.url}/{version}", manifest, sent)


def pull(url: str, folder: Path, version: str | None = None, report: Report | None = None) -> Moved:
    """Fetch a bundle from a URL to a folder, where it appears complete or not at all; the current one, or a version.

    The URL may also be that of a single bundle. Raises a BundleError, a TransferError or a WriteError.
    """
    check_target(folder)
    place = _Place(url)
    with place.usable(), fresh_directory(folder.parent, folder.name) as fresh:
        inside = _find(place, version)
        content = place.read_small(*inside, MANIFEST)
        if content is None:
            raise TransferError(f"{'/'.join((place.url, *inside))}: no {MANIFEST}: no bundle, or an incomplete push")
        manifest = parse_manifest(content, "/".join((place.url, *inside, MANIFEST)))
        (fresh / MANIFEST).write_bytes(content)
        if (wanted := version or (inside[0] if inside else None)) not in (None, manifest.version):
            raise TransferError(f"{place.url}: version {manifest.version}; wanted {wanted}")
        count = _Count(sum(info.size for info in manifest.files.values()), report)
        for name, info in manifest.files.items():
            _fetch(place, (*inside, name), fresh / name, info, count)
        load_bundle(fresh)
        move_into_place(fresh, folder)
    return Moved(str(folder), manifest, count.done)


def _find(place: _Place, version: str | None) -> tuple[str, ...]:
    """The folder of the bundle below the URL; empty if the URL is that of the bundle."""
    if version is not None and _VERSION.fullmatch(version) is None:
        raise TransferError(f"version: got {version!r}; allowed: 12 hexadecimal digits, such as 859549a0961c")
    pointer = place.read_small(CURRENT)
    if pointer is None and place.read_small(MANIFEST) is not None:
        return ()
    if version is not None:
        return (version,)  # also without `current`, which the first push writes last
    if pointer is None:
        raise TransferError(f"{place.url}: no bundle: neither {CURRENT} nor {MANIFEST} is there")
    found = pointer[:100].decode(errors="replace").strip()
    if _VERSION.fullmatch(found) is None:
        raise TransferError(f"{place.url}/{CURRENT}: got {found!r}; allowed: the version of a bundle")
    return (found,)


def _fetch(place: _Place, names: tuple[str, ...], target: Path, info: FileInfo, count: _Count) -> None:
    """Copy one file, and refuse it if it is not the one that the manifest describes."""
    shown = "/".join((place.url, *names))
    if not 0 <= info.size <= MOST_BYTES:
        raise TransferError(f"{shown}: {info.size} bytes; allowed: up to {MOST_BYTES}")
    digest, size = hashlib.sha256(), 0
    try:
        with target.open("wb") as file:
            for piece in place.pieces(info, *names):
                digest.update(piece)
                size += len(piece)
                file.write(piece)
                count.add(f"fetching {names[-1]}", len(piece))
    except FileNotFoundError:
        raise TransferError(f"{shown}: missing: the bundle is not complete") from None
    if (size, digest.hexdigest()) != (info.size, info.sha256):
        raise TransferError(
            f"{shown}: corrupt: sha256 {digest.hexdigest()[:12]} of {size} bytes; the manifest records "
            f"{info.sha256[:12]} of {info.size}"
        )


def _has_version(place: _Place, version: str) -> bool:
    """Whether the bundle there is complete already. Equal versions differ at most in who made them when."""
    content = place.read_small(version, MANIFEST)
    try:
        return content is not None and parse_manifest(content, place.url).version == version
    except BundleError:
        return False


def _reason(error: Exception) -> str:
    return _PASSWORD.sub(r"\1:***@", " ".join(str(error).split())) or type(error).__name__
