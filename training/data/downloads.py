"""Published data sets, read as they are unpacked, and downloaded if they are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.data.class_folders import entries
from training.data.images import DataError, Images, Source
from training.data.originals import FileOriginal, array_originals
from training.data.reader import Reader


class TorchvisionDataset(NamedTuple):
    """A data set of torchvision: its class there, its folder as unpacked, and its labels."""

    name: str
    folder: str
    labels: tuple[str, ...] = ()
    """Empty: as the data set names them."""


PUBLISHED = {
    "mnist": TorchvisionDataset("MNIST", "MNIST/raw", tuple(map(str, range(10)))),
    "fashion-mnist": TorchvisionDataset("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": TorchvisionDataset("CIFAR10", "cifar-10-batches-py"),
    "cifar100": TorchvisionDataset("CIFAR100", "cifar-100-python"),
}


def published(which: TorchvisionDataset, reader: Reader, data: str | None) -> Source:
    """Load a data set; `data` is the folder that contains its folder, or into which it is downloaded."""
    from torchvision import datasets

    root = Path(data or "data")
    parts, labels = [], which.labels
    for train in (True, False):
        with _one_line_download_errors(which.name, root / which.folder):
            # Downloads only what is missing or incomplete.
            part = getattr(datasets, which.name)(root, train=train, download=True)
        labels = labels or tuple(part.classes)
        originals = array_originals(which.name, part.data)
        parts.append(reader.read(originals, np.array(labels)[np.asarray(part.targets)].tolist()).images)
    return Source(parts[0], parts[1], labels)


@contextmanager
def _one_line_download_errors(name: str, folder: Path) -> Iterator[None]:
    """Raise a DataError if a data set can be neither read nor downloaded, and leave no empty folder behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise DataError(
            f"{name} is missing or incomplete in {folder} and could not be downloaded ({error}); unpack it there, give "
            f"the folder above it with --data, or run with a network connection"
        ) from error


TINY_IMAGENET = "tiny-imagenet-200"
TINY_IMAGENET_URL = f"http://cs231n.stanford.edu/{TINY_IMAGENET}.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
TINY_IMAGENET_LISTS = ("wnids.txt", "words.txt", "val/val_annotations.txt")
"""If one of these is missing, unpacking was interrupted."""


def tiny_imagenet(reader: Reader, data: str | None) -> Source:
    """Tiny-ImageNet as published; its validation images are used for testing, since its test images have no labels.

    `data` is its folder, or the folder that contains it or into which it is downloaded.
    """
    from torchvision.datasets.utils import download_and_extract_archive

    root = Path(data or "data")
    folder = root if (root / "wnids.txt").is_file() else root / TINY_IMAGENET
    if folder != root and not all((folder / name).is_file() for name in TINY_IMAGENET_LISTS):
        with _one_line_download_errors("Tiny-ImageNet", folder):
            download_and_extract_archive(TINY_IMAGENET_URL, str(root), md5=TINY_IMAGENET_MD5)
    names = _words(folder)
    train = [(file, name) for wnid, name in names.items() for file in entries(folder / "train" / wnid / "images")]
    test = _annotated(folder / "val", names)
    return Source(_read_files(train, reader), _read_files(test, reader), tuple(names.values()))


def _words(folder: Path) -> dict[str, str]:
    """wnid -> the first of its words, in the order of wnids; a word that two classes share gets the wnid appended."""
    wnids = sorted(_lines(folder / "wnids.txt").values())
    rows = (line.partition("\t") for line in _lines(folder / "words.txt").values())
    words = {wnid: text.split(",")[0].strip() for wnid, _, text in rows}
    first = [words.get(wnid, wnid) for wnid in wnids]
    return {wnid: f"{word} {wnid}" if first.count(word) > 1 else word for wnid, word in zip(wnids, first, strict=True)}


def _annotated(folder: Path, names: Mapping[str, str]) -> list[tuple[Path, str]]:
    """The image files in val/ with their labels."""
    path = folder / "val_annotations.txt"
    files = []
    for number, line in _lines(path).items():
        file, wnid, *_ = (*line.split("\t"), "")
        if wnid not in names:
            raise DataError(f"{path}, line {number}: the class of {file} is {wnid!r}; allowed: those in wnids.txt")
        files.append((folder / "images" / file, names[wnid]))
    return files


def _lines(path: Path) -> dict[int, str]:
    """The lines that are not empty, by their numbers from 1."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected {TINY_IMAGENET} as published") from error
    return {number: line for number, line in enumerate(lines, start=1) if line.strip()}


def _read_files(files: Sequence[tuple[Path, str]], reader: Reader) -> Images:
    read = reader.read([FileOriginal(file) for file, _ in files], [label for _, label in files])
    for name, reason in read.unreadable:
        raise DataError(f"{name}: {reason}")
    return read.images


OWN_NAMES = (*(which.folder.split("/")[0] for which in PUBLISHED.values()), TINY_IMAGENET, "wnids.txt")
"""Names by which a folder of published data sets is recognised, as opposed to class folders."""
