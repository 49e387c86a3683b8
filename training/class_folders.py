"""Anyone's images: one folder a class."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.bundle import ImageSpec
from serving.errors import RequestError
from serving.preprocess import Limits, decode, to_pixels
from training.images import LEAST_TAUGHT, LEAST_TESTED, TEST_SHARE, DataError, Images, Source

PHOTOS = Limits(size=1 << 30, pixels=175_000_000)
"""What is taught comes from no stranger: any camera's photograph will do, up to what Pillow itself takes for a bomb."""
TEST_FOLDERS = ("test", "val", "validation")
"""Which folder beside train/ is tested on: the first that is there."""
MANY = 1000
"""To read so many files takes long enough to be told."""
NOWHERE = "a link that leads nowhere, or no file at all"

log = logging.getLogger(__name__)


def class_folders(spec: ImageSpec, data: str | None) -> Source:
    """Under train/ and test/, or all together to be split."""
    if data is None:
        raise DataError("this preset learns from a folder: give it with --data FOLDER")
    root = Path(data)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; give the one with the class folders with --data FOLDER")
    taught = root / "train"
    if not taught.is_dir():
        return _split_classes(read_folder(root, spec))
    tested = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    if not tested:
        return _split_classes(read_folder(taught, spec))
    if tested[0].name != TEST_FOLDERS[0]:
        log.info("%s: there is no test/, so %s/ is tested on", root, tested[0].name)
    for unused in tested[1:]:
        log.info("%s is not used: a share of train/ is held out to validate with", unused)
    return _taught_and_tested(read_folder(taught, spec), read_folder(tested[0], spec), tested[0])


def _taught_and_tested(train: Images, test: Images, tested: Path) -> Source:
    """Classes are those of train/; what only the folder of test images has is unknown."""
    classes, others = set(train.labels.tolist()), set(test.labels.tolist())
    if untested := sorted(classes - others):
        raise DataError(f"{tested}: no image of {', '.join(untested)}; every class of train/ needs some")
    if never_taught := sorted(others - classes):
        log.info("%s: train/ has no %s, so these are tested on as unknown", tested, ", ".join(never_taught))
    return Source(train, test, tuple(sorted(classes)), never_taught=tuple(never_taught))


def _split_classes(images: Images) -> Source:
    """Each class on its own: what joins the folder later must not move an old class's images to the other side."""
    classes = tuple(np.unique(images.labels).tolist())
    is_tested = np.zeros(len(images), bool)
    for label in classes:
        index = (images.labels == label).nonzero()[0]
        is_tested[index] = _tested(images.pixels[index])
    train, test = (images.at(side.nonzero()[0]) for side in (~is_tested, is_tested))
    return Source(train, test, classes)


def _tested(pixels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which images of a class are tested on: those that drew less than TEST_SHARE, whatever others there are.

    Only where that would leave too few on a side, as many of the lowest as leave enough; a single image is tested on,
    where it may still be an unknown.
    """
    lots = np.array([_lot(image) for image in pixels])
    most = max(len(lots) - LEAST_TAUGHT, LEAST_TESTED)
    count = min(max(int((lots < TEST_SHARE).sum()), LEAST_TESTED), most)
    chosen = np.zeros(len(lots), bool)
    chosen[np.argsort(lots, kind="stable")[:count]] = True
    return chosen


def _lot(pixels: NDArray[np.uint8]) -> float:
    """What an image draws, in [0, 1): the same each time, and copies of it draw the same."""
    return int.from_bytes(hashlib.sha256(pixels.tobytes()).digest()[:6], "big") / (1 << 48)


def read_folder(root: Path, spec: ImageSpec) -> Images:
    """Every image of every class folder; what is not a readable image is named and skipped, such files are counted."""
    pixels: list[NDArray[np.uint8]] = []
    labels: list[str] = []
    skipped = 0
    _name_dangling_links(root)
    contents = {folder: entries(folder) for folder in subfolders(root)}
    if (total := sum(map(len, contents.values()))) >= MANY:
        log.info("reading %d files of %d classes in %s ...", total, len(contents), root)
    for folder, files in contents.items():
        before = len(labels)
        for file in files:
            if not file.is_file():
                reason = "images in folders within class folders are not read" if file.is_dir() else NOWHERE
                log.warning("skipped %s: %s", file, reason)
                continue
            try:
                pixels.append(read_image(file, spec))
            except (RequestError, OSError) as error:
                skipped += 1
                log.warning("skipped %s: %s", file, error)
                continue
            labels.append(folder.name)
        if len(labels) == before:
            log.warning("%s: no readable image, so there is no class %r", folder, folder.name)
    if not labels:
        raise DataError(
            f"{root}: no image in any class folder; expected PNG, JPEG, WebP or BMP files in {root}/<class>/"
        )
    if skipped:
        log.warning("%s: %d files skipped, %d images read", root, skipped, len(labels))
    return Images(np.stack(pixels), np.array(labels))


def read_image(file: Path, spec: ImageSpec) -> NDArray[np.uint8]:
    """Raises RequestError or OSError where there is none."""
    return to_pixels(decode(file.read_bytes(), PHOTOS), spec)


def _name_dangling_links(root: Path) -> None:
    """Beside class folders there may be other files, but a link that leads nowhere was to be a class."""
    for path in entries(root):
        if path.is_symlink() and not path.exists():
            log.warning("skipped %s: %s", path, NOWHERE)


def subfolders(root: Path) -> list[Path]:
    return [path for path in entries(root) if path.is_dir()]


def entries(folder: Path) -> list[Path]:
    """What is in a folder, in order, without what is hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from error
