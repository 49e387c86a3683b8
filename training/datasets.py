"""Where images come from. Every source ends as 8-bit pixels of the preset's size, with a label for each."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.bundle import ImageSpec
from serving.errors import RequestError
from serving.preprocess import Limits, decode, to_pixels

TEST_SHARE = 0.25
SPLIT_SEED = 0
"""What is held out for testing depends on neither seed nor method, so that runs can be compared."""
LEAST_TAUGHT, LEAST_TESTED = 2, 1
"""Images that each class needs: one to train and one to validate with, and one to test on."""

PHOTOS = Limits(size=1 << 30, pixels=175_000_000)
"""What is taught comes from no stranger: any camera's photograph will do, up to what Pillow itself takes for a bomb."""
TEST_FOLDERS = ("test", "val", "validation")
"""Which folder beside train/ is tested on: the first that is there."""
MANY = 1000
"""To read so many files takes long enough to be told."""
NOWHERE = "a link that leads nowhere, or no file at all"

log = logging.getLogger(__name__)


class DataError(Exception):
    """Images that cannot be learned from; the message says which and what would do."""


@dataclass(frozen=True)
class Images:
    """`pixels[i]`, uint8 [height, width, channels], shows `labels[i]`."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, labels: Iterable[str]) -> Images:
        """Those of some classes only."""
        return self.at(np.isin(self.labels, list(labels)).nonzero()[0])

    def at(self, index: NDArray[np.integer]) -> Images:
        return Images(self.pixels[index], self.labels[index])

    def split(self, share: float, seed: int) -> tuple[Images, Images]:
        """Most of each class, and `share` of each class: at least one image on either side."""
        generator = np.random.default_rng(seed)
        kept, taken = [], []
        for label in np.unique(self.labels):
            index = generator.permutation((self.labels == label).nonzero()[0])
            if len(index) < 2:
                raise DataError(f"class {str(label)!r} has {len(index)} image; at least 2 are needed to hold some out")
            count = min(max(1, round(share * len(index))), len(index) - 1)
            taken.append(index[:count])
            kept.append(index[count:])
        return self.at(np.sort(np.concatenate(kept))), self.at(np.sort(np.concatenate(taken)))


@dataclass(frozen=True)
class Source:
    """Training and test images, and their classes in the order in which tasks take them."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    validation: Images | None = None
    """Where the source itself holds them out; else a share of the training images is."""
    never_taught: tuple[str, ...] = ()
    """Classes that have test images only: unknown, whatever is learned."""


def kind_of(dataset: str, data: str | None) -> str:
    """What lies at `data`, for a preset of a data set: that data set, or anyone's class folders.

    A folder is a place for data sets if it is empty or holds one, be it another than the one that is wanted.
    """
    if data is None:
        return dataset
    if dataset not in NEEDS_PLACE:
        return "folder"
    is_place = any((Path(data) / name).exists() for name in OWN_NAMES) or not _subfolders(Path(data))
    return dataset if is_place else "folder"


def load_source(name: str, spec: ImageSpec, data: str | None) -> Source:
    """A named data set, or `folder` for class folders under `data`."""
    if name not in SOURCES:
        raise DataError(f"dataset is {name!r}; allowed: {', '.join(SOURCES)}")
    return SOURCES[name](spec, data)


def _digits(spec: ImageSpec, data: str | None) -> Source:
    """scikit-learn's 1,797 handwritten digits, which come with the package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = (bunch.images * (255 / 16)).round().astype(np.uint8)
    pixels = np.stack([to_pixels(Image.fromarray(image), spec) for image in grey])
    images = Images(pixels, bunch.target.astype(str))
    train, test = images.split(TEST_SHARE, SPLIT_SEED)
    return Source(train, test, tuple(map(str, range(10))))


class Published(NamedTuple):
    """A data set that torchvision knows: its class there, its folder as it is unpacked, and its labels."""

    name: str
    folder: str
    labels: tuple[str, ...] = ()
    """None: as the data set itself names them."""


PUBLISHED = {
    "mnist": Published("MNIST", "MNIST/raw", tuple(map(str, range(10)))),
    "fashion-mnist": Published("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": Published("CIFAR10", "cifar-10-batches-py"),
    "cifar100": Published("CIFAR100", "cifar-100-python"),
}


def _published(which: Published, spec: ImageSpec, data: str | None) -> Source:
    """`data` is the folder that holds or shall hold the data set's own."""
    from torchvision import datasets

    root = Path(data or "data")
    parts, labels = [], which.labels
    for train in (True, False):
        with _told_if_absent(which.name, root / which.folder):
            # Downloads only what is not whole there.
            part = getattr(datasets, which.name)(root, train=train, download=True)
        labels = labels or tuple(part.classes)
        pixels = np.stack([to_pixels(Image.fromarray(np.asarray(image)), spec) for image in part.data])
        parts.append(Images(pixels, np.array(labels)[np.asarray(part.targets)]))
    return Source(parts[0], parts[1], labels)


@contextmanager
def _told_if_absent(name: str, folder: Path) -> Iterator[None]:
    """A data set that can be neither read nor downloaded is a DataError, and leaves no empty folder behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise DataError(
            f"{name} is not whole in {folder} and could not be downloaded ({error}); unpack it there, give the folder "
            f"above it with --data, or run where there is a network"
        ) from error


TINY_IMAGENET = "tiny-imagenet-200"
TINY_IMAGENET_URL = f"http://cs231n.stanford.edu/{TINY_IMAGENET}.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
TINY_IMAGENET_LISTS = ("wnids.txt", "words.txt", "val/val_annotations.txt")
"""Where one of these is missing, it was not unpacked to its end."""


def _tiny_imagenet(spec: ImageSpec, data: str | None) -> Source:
    """Tiny-ImageNet as it is published; its validation images are tested on, since its test images have no labels.

    `data` is its folder, or the one that holds or shall hold it.
    """
    from torchvision.datasets.utils import download_and_extract_archive

    root = Path(data or "data")
    folder = root if (root / "wnids.txt").is_file() else root / TINY_IMAGENET
    if folder != root and not all((folder / name).is_file() for name in TINY_IMAGENET_LISTS):
        with _told_if_absent("Tiny-ImageNet", folder):
            download_and_extract_archive(TINY_IMAGENET_URL, str(root), md5=TINY_IMAGENET_MD5)
    names = _words(folder)
    train = [(file, name) for wnid, name in names.items() for file in _entries(folder / "train" / wnid / "images")]
    test = _annotated(folder / "val", names)
    return Source(_read_files(train, spec), _read_files(test, spec), tuple(names.values()))


def _words(folder: Path) -> dict[str, str]:
    """wnid -> the first of its words, in the order of wnids; one that two share is told apart by the wnid."""
    wnids = sorted(_lines(folder / "wnids.txt"))
    rows = (line.partition("\t") for line in _lines(folder / "words.txt"))
    words = {wnid: text.split(",")[0].strip() for wnid, _, text in rows}
    first = [words.get(wnid, wnid) for wnid in wnids]
    return {wnid: f"{word} {wnid}" if first.count(word) > 1 else word for wnid, word in zip(wnids, first, strict=True)}


def _annotated(folder: Path, names: Mapping[str, str]) -> list[tuple[Path, str]]:
    """The image files of val/ with their labels."""
    path = folder / "val_annotations.txt"
    files = []
    for number, line in _numbered_lines(path):
        file, wnid, *_ = (*line.split("\t"), "")
        if wnid not in names:
            raise DataError(f"{path}, line {number}: the class of {file} is {wnid!r}; allowed: those in wnids.txt")
        files.append((folder / "images" / file, names[wnid]))
    return files


def _lines(path: Path) -> list[str]:
    return [line for _, line in _numbered_lines(path)]


def _numbered_lines(path: Path) -> list[tuple[int, str]]:
    """Those that are not empty, counted from 1."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected {TINY_IMAGENET} as published") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _read_files(files: Sequence[tuple[Path, str]], spec: ImageSpec) -> Images:
    """Image files with their labels, into one array: there may be many."""
    pixels = np.empty((len(files), *spec.shape), np.uint8)
    for place, (file, _) in enumerate(files):
        try:
            pixels[place] = to_pixels(decode(file.read_bytes(), PHOTOS), spec)
        except (RequestError, OSError) as error:
            raise DataError(f"{file}: {error}") from error
    return Images(pixels, np.array([label for _, label in files]))


def _folder(spec: ImageSpec, data: str | None) -> Source:
    """Anyone's images: one folder a class, under train/ and test/ or all together to be split."""
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


def join(parts: Sequence[Images]) -> Images:
    """All of them, in order."""
    return Images(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def read_folder(root: Path, spec: ImageSpec) -> Images:
    """Every image of every class folder; what is not a readable image is named and skipped, such files are counted."""
    pixels: list[NDArray[np.uint8]] = []
    labels: list[str] = []
    skipped = 0
    _name_dangling_links(root)
    contents = {folder: _entries(folder) for folder in _subfolders(root)}
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
                pixels.append(to_pixels(decode(file.read_bytes(), PHOTOS), spec))
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


def _name_dangling_links(root: Path) -> None:
    """Beside class folders there may be other files, but a link that leads nowhere was to be a class."""
    for path in _entries(root):
        if path.is_symlink() and not path.exists():
            log.warning("skipped %s: %s", path, NOWHERE)


def _subfolders(root: Path) -> list[Path]:
    return [path for path in _entries(root) if path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, in order, without what is hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from error


SOURCES: dict[str, Callable[[ImageSpec, str | None], Source]] = {
    "digits": _digits,
    **{name: partial(_published, which) for name, which in PUBLISHED.items()},
    "tinyimagenet": _tiny_imagenet,
    "folder": _folder,
}

NEEDS_PLACE = (*PUBLISHED, "tinyimagenet")
"""The data sets that lie, or shall lie, in a folder."""
OWN_NAMES = (*(which.folder.split("/")[0] for which in PUBLISHED.values()), TINY_IMAGENET, "wnids.txt")
"""What tells that a folder holds data sets as they are published, rather than anyone's classes."""
