"""Your own images: one folder per class."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.data.images import LEAST_TAUGHT, LEAST_TESTED, TEST_SHARE, DataError, Images, Source
from training.data.originals import FileOriginal
from training.data.reader import Read, Reader

TEST_FOLDERS = ("test", "val", "validation")
"""Names of the folder of test images next to train/; the first that exists is used."""
MANY = 1000
"""From this number of files on, reading is announced, because it takes a while."""
NOWHERE = "a broken link, or not a file"

log = logging.getLogger(__name__)


def class_folders(reader: Reader, data: str | None) -> Source:
    """Images in train/ and test/, or in one folder that is split here."""
    if data is None:
        raise DataError("this preset learns from your own images: give their folder with --data FOLDER")
    root = Path(data)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; give the one with the class folders with --data FOLDER")
    taught = root / "train"
    if not taught.is_dir():
        return _split_classes(read_folder(root, reader))
    tested = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    if not tested:
        return _split_classes(read_folder(taught, reader))
    if tested[0].name != TEST_FOLDERS[0]:
        log.info("%s: there is no test/, so %s/ is used for testing", root, tested[0].name)
    for unused in tested[1:]:
        log.info("%s is not used: a share of train/ is held out for validation", unused)
    return _taught_and_tested(read_folder(taught, reader).images, read_folder(tested[0], reader).images, tested[0])


def _taught_and_tested(train: Images, test: Images, tested: Path) -> Source:
    """The classes are those of train/; classes that only the test folder has are unknown."""
    classes, others = set(train.labels.tolist()), set(test.labels.tolist())
    if untested := sorted(classes - others):
        raise DataError(f"{tested}: no image of {', '.join(untested)}; every class of train/ needs some")
    if never_taught := sorted(others - classes):
        log.info("%s: train/ has no %s, so these classes are tested as unknown", tested, ", ".join(never_taught))
    return Source(train, test, tuple(sorted(classes)), never_taught=tuple(never_taught))


def _split_classes(read: Read) -> Source:
    """Split each class on its own, so that classes added later do not move images of older ones to the other side."""
    images = read.images
    classes = tuple(np.unique(images.labels).tolist())
    is_tested = np.zeros(len(images), bool)
    for label in classes:
        index = (images.labels == label).nonzero()[0]
        is_tested[index] = _tested([read.digests[place] for place in index])
    train, test = (images.at(side.nonzero()[0]) for side in (~is_tested, is_tested))
    return Source(train, test, classes)


def _tested(digests: Sequence[bytes]) -> NDArray[np.bool_]:
    """Which images of a class are for testing: those whose hash is below TEST_SHARE, whatever other images there are.

    If that leaves too few on a side, those with the lowest hashes; a single image is for testing, where it may still
    serve as an unknown.
    """
    # Numbers in [0, 1) that depend on the content alone, so copies of an image stay together.
    hashes = np.array([int.from_bytes(digest[:6], "big") / (1 << 48) for digest in digests])
    most = max(len(hashes) - LEAST_TAUGHT, LEAST_TESTED)
    count = min(max(int((hashes < TEST_SHARE).sum()), LEAST_TESTED), most)
    chosen = np.zeros(len(hashes), bool)
    chosen[np.argsort(hashes, kind="stable")[:count]] = True
    return chosen


def read_folder(root: Path, reader: Reader) -> Read:
    """Every image of every class folder; a warning names each file that is skipped because it is no image."""
    files, labels = _list_folder(root)
    read = reader.read(files, labels)
    for name, reason in read.unreadable:
        log.warning("skipped %s: %s", name, reason)
    found = set(read.images.labels.tolist())
    for folder in subfolders(root):
        if folder.name not in found:
            log.warning("%s: no readable image, so class %r is left out", folder, folder.name)
    if not found:
        raise DataError(
            f"{root}: no image in any class folder; expected PNG, JPEG, WebP or BMP files in {root}/<class>/"
        )
    if read.unreadable:
        log.warning("%s: %d files skipped, %d images read", root, len(read.unreadable), len(read.images))
    return read


def _list_folder(root: Path) -> tuple[list[FileOriginal], list[str]]:
    """The files of every class folder, and the class of each."""
    for path in entries(root):
        # Other files next to class folders are ignored, but a broken link was probably meant as a class.
        if path.is_symlink() and not path.exists():
            log.warning("skipped %s: %s", path, NOWHERE)
    files, labels = [], []
    for folder in (folders := subfolders(root)):
        for file in entries(folder):
            if file.is_file():
                files.append(FileOriginal(file))
                labels.append(folder.name)
            else:
                reason = "folders inside class folders are not read" if file.is_dir() else NOWHERE
                log.warning("skipped %s: %s", file, reason)
    if len(files) >= MANY:
        log.info("reading %d files of %d classes in %s ...", len(files), len(folders), root)
    return files, labels


def subfolders(root: Path) -> list[Path]:
    return [path for path in entries(root) if path.is_dir()]


def entries(folder: Path) -> list[Path]:
    """The sorted contents of a folder, without hidden files."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from error
