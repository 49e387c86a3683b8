from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serving.bundle import ImageSpec
from training.datasets import DataError, Images, load_source, read_folder

SPEC = ImageSpec(height=8, width=8, mode="RGB")
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def write_images(root: Path, counts: Mapping[str, int]) -> Path:
    """`counts[label]` images of a colour under root/label."""
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", (10, 8), COLOURS[label]).save(root / label / f"{number}.png")
    return root


def numbered(counts: Mapping[str, int]) -> Images:
    """Images of one pixel each, whose value is their number."""
    labels = np.repeat(list(counts), list(counts.values()))
    return Images(np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1), labels)


def counted(images: Images) -> dict[str, int]:
    return dict(zip(*(part.tolist() for part in np.unique(images.labels, return_counts=True)), strict=True))


def test_split_takes_its_share_of_every_class() -> None:
    kept, taken = numbered({"a": 10, "b": 30}).split(0.2, seed=0)
    assert counted(kept) == {"a": 8, "b": 24}
    assert counted(taken) == {"a": 2, "b": 6}


def test_split_gives_every_image_to_one_side_with_its_label() -> None:
    images = numbered({"a": 7, "b": 5})
    kept, taken = images.split(0.3, seed=3)
    numbers = np.concatenate([kept.pixels, taken.pixels]).ravel()
    assert sorted(numbers.tolist()) == list(range(12))
    assert np.concatenate([kept.labels, taken.labels]).tolist() == images.labels[numbers].tolist()


def test_split_depends_on_its_seed_alone() -> None:
    images = numbered({"a": 50})
    first, again, other = (images.split(0.5, seed)[1].pixels.ravel().tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("share", [0.001, 0.999])
@pytest.mark.parametrize("count", [2, 3])
def test_split_leaves_neither_side_empty(share: float, count: int) -> None:
    kept, taken = numbered({"a": count}).split(share, seed=0)
    assert len(kept) >= 1
    assert len(taken) >= 1
    assert len(kept) + len(taken) == count


def test_split_refuses_a_class_with_one_image() -> None:
    with pytest.raises(DataError, match=r"class 'b' has 1 image; at least 2 are needed"):
        numbered({"a": 5, "b": 1}).split(0.5, seed=0)


def test_of_keeps_some_classes() -> None:
    assert counted(numbered({"a": 2, "b": 3, "c": 1}).of(["c", "a"])) == {"a": 2, "c": 1}


def test_digits_come_with_the_package() -> None:
    source = load_source("digits", ImageSpec(height=8, width=8, mode="L"), None)
    assert source.classes == tuple("0123456789")
    assert len(source.train) + len(source.test) == 1797
    assert source.train.pixels.shape[1:] == (8, 8, 1)
    assert source.train.pixels.max() == 255


def test_a_corrupt_file_is_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, {"red": 2, "blue": 1})
    whole = (tmp_path / "red" / "0.png").read_bytes()
    broken = {tmp_path / "red" / "broken.png": b"no image", tmp_path / "blue" / "cut.png": whole[: len(whole) // 2]}
    for path, content in broken.items():
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        images = read_folder(tmp_path, SPEC)
    assert images.labels.tolist() == ["blue", "red", "red"]
    assert images.pixels[:, 4, 4].tolist() == [list(COLOURS[label]) for label in images.labels]
    for path in broken:
        assert f"skipped {path}: " in caplog.text
    assert "2 files skipped, 3 images read" in caplog.text


def test_hidden_files_and_folders_are_no_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, {"red": 1})
    (tmp_path / "red" / ".DS_Store").write_bytes(b"?")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.png").write_bytes(b"?")
    (tmp_path / "README.txt").write_text("not a class")
    assert read_folder(tmp_path, SPEC).labels.tolist() == ["red"]
    assert caplog.text == ""


def test_a_folder_with_train_and_test_is_taken_as_it_is(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"red": 3, "green": 2})
    write_images(tmp_path / "test", {"red": 1, "green": 4})
    source = load_source("folder", SPEC, str(tmp_path))
    assert counted(source.train) == {"red": 3, "green": 2}
    assert counted(source.test) == {"red": 1, "green": 4}
    assert source.classes == ("green", "red")


def test_a_class_without_test_images_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"red": 2, "green": 2, "blue": 2})
    write_images(tmp_path / "test", {"red": 1})
    with pytest.raises(DataError, match=f"{tmp_path}/test: no image of blue, green; every class of train/ needs some"):
        load_source("folder", SPEC, str(tmp_path))


@pytest.mark.parametrize("inside", ["", "train"])
def test_a_folder_without_test_images_is_split(tmp_path: Path, inside: str) -> None:
    write_images(tmp_path / inside, {"red": 8, "green": 4})
    source = load_source("folder", SPEC, str(tmp_path))
    assert counted(source.train) == {"red": 6, "green": 3}
    assert counted(source.test) == {"red": 2, "green": 1}
    assert source.classes == ("green", "red")


def test_missing_data_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give it with --data FOLDER"):
        load_source("folder", SPEC, None)
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere: no such folder; give"):
        load_source("folder", SPEC, str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=f"no image in any class folder; expected .* in {tmp_path}/<class>/"):
        load_source("folder", SPEC, str(tmp_path))
    with pytest.raises(DataError, match="dataset is 'imagenet'; allowed: digits, mnist, folder"):
        load_source("imagenet", SPEC, None)
