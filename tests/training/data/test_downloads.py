"""Published data sets, from tiny archives in their own formats."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
import urllib.error
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, utils

from serving.bundle.sections import ImageSpec
from training.data import downloads as published
from training.data.datasets import kind_of, load_source
from training.data.images import DataError

SMALL = ImageSpec(height=32, width=32, mode="RGB")
GREY = ImageSpec(height=28, width=28, mode="L")
NO_NETWORK = "no route to host"


def no_network(*_: Any, **__: Any) -> NoReturn:
    raise urllib.error.URLError(NO_NETWORK)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may download anything."""
    monkeypatch.setattr(utils.urllib.request, "urlopen", no_network)


# ---- MNIST


def write_idx(path: Path, values: np.ndarray) -> None:
    """An array of bytes as MNIST stores it."""
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    with gzip.open(path.with_suffix(".gz"), "wb") as archive:
        archive.write(header + values.tobytes())
    path.write_bytes(header + values.tobytes())


def write_mnist(root: Path) -> Path:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, labels in (("train", [3, 0, 3]), ("t10k", [9])):
        pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
        write_idx(raw / f"{part}-images-idx3-ubyte", pixels)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.array(labels, np.uint8))
    return raw


def test_mnist_is_read_from_its_own_files(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    source = load_source("mnist", GREY, str(tmp_path))
    assert source.train.labels.tolist() == ["3", "0", "3"]
    assert source.train.pixels[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert source.test.labels.tolist() == ["9"]
    assert source.classes == tuple("0123456789")


def test_a_truncated_mnist_is_reported(tmp_path: Path) -> None:
    file = write_mnist(tmp_path) / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"MNIST is missing or incomplete in {tmp_path}/MNIST/raw"):
        load_source("mnist", GREY, str(tmp_path))


# ---- CIFAR


def put_pickle(path: Path, content: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def rows(numbers: list[int]) -> np.ndarray:
    """Images as CIFAR stores them: all red, then all green, then all blue."""
    return np.array([[number] * 1024 + [number + 100] * 1024 + [number + 200] * 1024 for number in numbers], np.uint8)


def write_cifar10(root: Path, patch: pytest.MonkeyPatch) -> None:
    folder = root / CIFAR10.base_folder
    train = [[name, put_pickle(folder / name, {"data": rows([place]), "labels": [place]})]
             for place, name in enumerate(("data_batch_1", "data_batch_2"))]  # fmt: skip
    test = [["test_batch", put_pickle(folder / "test_batch", {"data": rows([9, 8]), "labels": [1, 0]})]]
    names = put_pickle(folder / "batches.meta", {"label_names": ["airplane", "automobile"]})
    patch.setattr(CIFAR10, "train_list", train)
    patch.setattr(CIFAR10, "test_list", test)
    patch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": names})


def test_cifar10_is_read_from_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    source = load_source("cifar10", SMALL, str(tmp_path))
    assert source.classes == ("airplane", "automobile")
    assert source.train.labels.tolist() == ["airplane", "automobile"]
    assert source.test.labels.tolist() == ["automobile", "airplane"]
    assert source.train.pixels[1, 5, 5].tolist() == [1, 101, 201]
    assert source.test.pixels.shape == (2, 32, 32, 3)
    assert kind_of("cifar10", str(tmp_path)) == "cifar10"


def test_a_damaged_cifar10_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    with (tmp_path / CIFAR10.base_folder / "data_batch_2").open("ab") as file:
        file.write(b"?")
    with pytest.raises(DataError, match=rf"CIFAR10 is missing or incomplete in {tmp_path}/cifar-10-batches-py"):
        load_source("cifar10", SMALL, str(tmp_path))


def test_cifar100_is_read_by_its_fine_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / CIFAR100.base_folder
    content = {"data": rows([4, 5]), "fine_labels": [1, 0], "coarse_labels": [7, 7]}
    for name in ("train", "test"):
        patched = [[name, put_pickle(folder / name, content)]]
        monkeypatch.setattr(CIFAR100, f"{name}_list", patched)
    names = put_pickle(folder / "meta", {"fine_label_names": ["apple", "bee"], "coarse_label_names": ["x"]})
    monkeypatch.setattr(CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": names})
    source = load_source("cifar100", SMALL, str(tmp_path))
    assert source.classes == ("apple", "bee")
    assert source.train.labels.tolist() == source.test.labels.tolist() == ["bee", "apple"]


@pytest.mark.parametrize(
    ("name", "title", "folder"),
    [
        ("mnist", "MNIST", "MNIST/raw"),
        ("cifar10", "CIFAR10", "cifar-10-batches-py"),
        ("cifar100", "CIFAR100", "cifar-100-python"),
        ("tinyimagenet", "Tiny-ImageNet", "tiny-imagenet-200"),
    ],
)
def test_without_a_network_the_message_names_the_files_and_their_folder(
    name: str, title: str, folder: str, tmp_path: Path
) -> None:
    spec = GREY if name == "mnist" else SMALL
    place = f"{title} is missing or incomplete in {tmp_path}/{folder}"
    message = place + r" and could not be downloaded \((.|\n)*\); unpack it there"
    with pytest.raises(DataError, match=message):
        load_source(name, spec, str(tmp_path))
    assert not list(tmp_path.iterdir()), "an empty folder looks like a data set that is there"


@pytest.mark.parametrize("name", ["mnist", "cifar10", "tinyimagenet"])
def test_what_is_there_in_part_is_downloaded_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = {"mnist": "MNIST/raw", "cifar10": "cifar-10-batches-py", "tinyimagenet": "tiny-imagenet-200/train"}[name]
    (tmp_path / folder).mkdir(parents=True)
    asked: list[str] = []

    def urlopen(request: Any, *_: Any, **__: Any) -> NoReturn:
        asked.append(request.full_url)
        no_network()

    monkeypatch.setattr(utils.urllib.request, "urlopen", urlopen)
    for _ in range(2):
        asked.clear()
        with pytest.raises(DataError, match="could not be downloaded"):
            load_source(name, GREY if name == "mnist" else SMALL, str(tmp_path))
        assert asked
    assert (tmp_path / folder).is_dir(), "it was there before"


# ---- Tiny-ImageNet

WNIDS = {"n02": "goldfish, Carassius auratus", "n01": "crane", "n03": "crane, derrick"}
SHADES = {"n01": 10, "n02": 100, "n03": 200}


def write_tiny_imagenet(folder: Path) -> Path:
    """Two training images and one validation image per class; wnids.txt is not sorted."""
    for wnid, shade in SHADES.items():
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for number in range(2):
            picture = Image.new("RGB", (64, 64), (shade, shade, shade))
            picture.save(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("boxes are not read\n")
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for number, wnid in enumerate(("n03", "n01", "n02")):
        Image.new("L", (64, 64), SHADES[wnid]).save(folder / "val" / "images" / f"val_{number}.JPEG")
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    words = "".join(f"{wnid}\t{text}\n" for wnid, text in WNIDS.items())
    (folder / "words.txt").write_text(words + "n99\tnobody\n")
    return folder


@pytest.mark.parametrize("inside", [True, False])
def test_tiny_imagenet_is_read_as_published(inside: bool, tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / published.TINY_IMAGENET)
    place = str(tmp_path if inside else folder)
    assert kind_of("tinyimagenet", place) == "tinyimagenet"
    source = load_source("tinyimagenet", ImageSpec(height=64, width=64, mode="RGB"), place)
    # In the order of wnids; the two classes called crane get different labels.
    assert source.classes == ("crane n01", "goldfish", "crane n03")
    assert source.train.labels.tolist() == ["crane n01"] * 2 + ["goldfish"] * 2 + ["crane n03"] * 2
    assert source.test.labels.tolist() == ["crane n03", "crane n01", "goldfish"]
    assert source.test.pixels[:, 0, 0, 1].tolist() == pytest.approx([200, 10, 100], abs=2)
    assert source.train.pixels.shape == (6, 64, 64, 3)


def test_tiny_imagenet_may_be_made_smaller(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / published.TINY_IMAGENET)
    assert load_source("tinyimagenet", SMALL, str(tmp_path)).train.pixels.shape == (6, 32, 32, 3)


def test_a_tiny_imagenet_with_a_missing_file_names_it(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / published.TINY_IMAGENET)
    (folder / "train" / "n02" / "images" / "n02_1.JPEG").write_bytes(b"\xff\xd8\xff?")
    with pytest.raises(DataError, match=r"n02_1\.JPEG: incomplete segment"):
        load_source("tinyimagenet", SMALL, str(tmp_path))
    (folder / "val" / "val_annotations.txt").unlink()
    with pytest.raises(
        DataError, match=r"val_annotations\.txt: cannot be read .*expected tiny-imagenet-200 as published"
    ):
        load_source("tinyimagenet", SMALL, str(folder))


@pytest.mark.parametrize(("line", "got"), [("val_9.JPEG\tn77\t0\t0\t63\t63", "n77"), ("val_9.JPEG", "")])
def test_a_class_that_tiny_imagenet_does_not_list_is_named_with_its_line(line: str, got: str, tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / published.TINY_IMAGENET)
    with (folder / "val" / "val_annotations.txt").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(
        DataError, match=rf"val_annotations\.txt, line 5: the class of val_9\.JPEG is '{got}'; allowed: .*wnids\.txt"
    ):
        load_source("tinyimagenet", SMALL, str(tmp_path))
