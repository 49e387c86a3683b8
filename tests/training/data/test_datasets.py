from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serving.bundle.pixels import LIMITS
from serving.bundle.sections import ImageSpec
from tests.helpers import TINY_PRESET
from training import fit
from training.config import Lesson, RunConfig
from training.data import class_folders
from training.data.class_folders import read_folder
from training.data.datasets import kind_of, load_source
from training.data.images import DataError, Images
from training.data.reader import PixelReader
from training.data.sources import Sources
from training.measure.evaluation import known_and_unknown

SPEC = ImageSpec(height=8, width=8, mode="RGB")
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def write_images(root: Path, counts: Mapping[str, int]) -> Path:
    """`counts[label]` images of a colour under root/label."""
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", (10, 8), COLOURS[label]).save(root / label / f"{number}.png")
    return root


def write_noise(root: Path, counts: Mapping[str, int], seed: int = 0, prefix: str = "") -> Path:
    """The same with images that all differ."""
    generator = np.random.default_rng(seed)
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{prefix}{number}.png")
    return root


def as_set(images: Images) -> set[bytes]:
    return {pixels.tobytes() for pixels in images.pixels}


def numbered(counts: Mapping[str, int]) -> Images:
    """Images of one pixel each, whose value is the index of the image."""
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
        images = read_folder(tmp_path, PixelReader(SPEC)).images
    assert images.labels.tolist() == ["blue", "red", "red"]
    assert images.pixels[:, 4, 4].tolist() == [list(COLOURS[label]) for label in images.labels]
    for path in broken:
        assert f"skipped {path}: " in caplog.text
    assert "2 files skipped, 3 images read" in caplog.text


BROKEN = {
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "only its first bytes": lambda content: content[:16],
    "zeros in the middle": lambda content: content[:40] + bytes(len(content) - 40),
    "noise after the header": lambda content: content[:30] + bytes((7 * n) % 256 for n in range(len(content) - 30)),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_damaged_file_of_any_kind_never_stops_the_reading(
    kind: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path, {"red": 2})
    content = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(content, kind)
    path = tmp_path / "red" / f"damaged.{kind.lower()}"
    path.write_bytes(BROKEN[how](content.getvalue()))
    images = read_folder(tmp_path, PixelReader(SPEC)).images
    # Some decoders accept damaged pixels; a file that no decoder can read is reported.
    assert len(images) == 3 or (len(images) == 2 and f"skipped {path}: " in caplog.text)
    if how in ("empty", "only its first bytes"):
        assert len(images) == 2


def test_files_that_are_no_images_are_named_whatever_they_are_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path, {"red": 1})
    for name, content in {"notes.txt": b"text", "movie.gif": b"GIF89a", "photo.png": b"%PDF-1.7"}.items():
        (tmp_path / "red" / name).write_bytes(content)
    (tmp_path / "red" / "more").mkdir()
    assert len(read_folder(tmp_path, PixelReader(SPEC)).images) == 1
    for name in ("notes.txt", "movie.gif", "photo.png"):
        assert f"skipped {tmp_path / 'red' / name}: " in caplog.text
    assert "3 files skipped, 1 images read" in caplog.text


def test_entries_that_are_not_read_as_images_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, {"red": 1})
    write_images(tmp_path / "nested", {"blue": 2})
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.png").write_bytes(b"no image")
    for link in (tmp_path / "gone", tmp_path / "red" / "gone.png"):
        link.symlink_to(tmp_path / "unplugged")
    assert read_folder(tmp_path, PixelReader(SPEC)).images.labels.tolist() == ["red"]
    messages = [record.getMessage() for record in caplog.records]
    for name in ("nested", "empty", "broken"):
        assert f"{tmp_path / name}: no readable image, so class {name!r} is left out" in messages
    assert f"skipped {tmp_path / 'nested' / 'blue'}: folders inside class folders are not read" in messages
    for name in ("gone", "red/gone.png"):
        assert f"skipped {tmp_path / name}: a broken link, or not a file" in messages
    assert not any(f"{tmp_path / 'red'}: " in each for each in messages)


def test_a_large_folder_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(class_folders, "MANY", 4)
    write_images(tmp_path, {"red": 2, "blue": 1})
    with caplog.at_level(logging.INFO):
        read_folder(tmp_path, PixelReader(SPEC))
        assert caplog.text == ""
        write_images(tmp_path, {"blue": 2})
        read_folder(tmp_path, PixelReader(SPEC))
    assert f"reading 4 files of 2 classes in {tmp_path} ..." in caplog.text


def test_a_class_that_joins_the_folder_later_moves_no_test_image(tmp_path: Path) -> None:
    write_images(tmp_path, {"green": 8, "red": 12})
    for label in ("green", "red"):
        for number, path in enumerate(sorted((tmp_path / label).iterdir())):
            Image.new("RGB", (8, 8), (number, number, number)).save(path)
    before = load_source("folder", SPEC, str(tmp_path)).test
    write_images(tmp_path, {"blue": 9})
    after = load_source("folder", SPEC, str(tmp_path)).test
    for label in ("green", "red"):
        assert after.of([label]).pixels.tolist() == before.of([label]).pixels.tolist()


def test_an_unreadable_folder_is_an_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, {"red": 2})

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=rf"{tmp_path}: cannot be read \(Permission denied\)"):
        load_source("folder", SPEC, str(tmp_path))


@pytest.mark.parametrize(
    ("dataset", "inside", "kind"),
    [
        ("digits", None, "digits"),
        ("digits", "cats", "folder"),
        ("folder", "cats", "folder"),
        ("mnist", None, "mnist"),
        ("mnist", "MNIST/raw", "mnist"),
        ("mnist", "", "mnist"),
        ("mnist", "cats", "folder"),
        ("mnist", "cifar-10-batches-py", "mnist"),
        ("cifar10", "tiny-imagenet-200", "cifar10"),
        ("digits", "MNIST", "folder"),
    ],
)
def test_the_kind_of_a_data_folder_is_detected(dataset: str, inside: str | None, kind: str, tmp_path: Path) -> None:
    """A folder for MNIST may be empty or contain other data sets; any other folder of folders contains classes."""
    if inside is not None:
        (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    assert kind_of(dataset, None if inside is None else str(tmp_path)) == kind


def test_hidden_files_and_folders_are_no_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, {"red": 1})
    (tmp_path / "red" / ".DS_Store").write_bytes(b"?")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.png").write_bytes(b"?")
    (tmp_path / "README.txt").write_text("not a class")
    assert read_folder(tmp_path, PixelReader(SPEC)).images.labels.tolist() == ["red"]
    assert caplog.text == ""


@pytest.mark.parametrize("label", [" cat", "x" * 150, "unknown"])
def test_a_folder_whose_name_no_class_may_have_is_refused_before_it_is_read(
    label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dog", label):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "damaged.png").write_bytes(b"")
    assert fit.main(["--data", str(tmp_path / "photos"), "--preset", "images", "--out", str(tmp_path / "run")]) == 2
    expected = f"error: class names: got {label!r}; allowed: 1 to 100 printable characters without spaces"
    assert expected in capsys.readouterr().err
    assert fit.main(["--tasks", f'"{label}"', "--out", str(tmp_path / "run")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_folders_whose_names_look_the_same_are_refused_before_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("caf\u00e9", "cafe\u0301", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "damaged.png").write_bytes(b"")
    assert fit.main(["--data", str(tmp_path / "photos"), "--preset", "images", "--out", str(tmp_path / "run")]) == 2
    expected = r"error: class names that look the same: got 'cafe\u0301' and 'caf\xe9'; allowed: different names"
    assert expected in capsys.readouterr().err
    assert fit.main(["--tasks", "red panda,red  panda", "--out", str(tmp_path / "run")]) == 2
    assert "got 'red panda' and 'red  panda'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


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


def test_val_is_tested_on_where_there_is_no_test(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "train", {"red": 3})
    write_images(tmp_path / "validation", {"red": 1})
    with caplog.at_level(logging.INFO):
        assert counted(load_source("folder", SPEC, str(tmp_path)).test) == {"red": 1}
        assert "there is no test/, so validation/ is used for testing" in caplog.text
        write_images(tmp_path / "val", {"red": 2})
        source = load_source("folder", SPEC, str(tmp_path))
    assert (counted(source.train), counted(source.test)) == ({"red": 3}, {"red": 2})
    assert f"{tmp_path}/validation is not used: a share of train/ is held out" in caplog.text


def test_classes_that_are_only_tested_are_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "train", {"red": 3})
    write_images(tmp_path / "test", {"red": 1, "green": 2, "blue": 1})
    with caplog.at_level(logging.INFO):
        source = load_source("folder", SPEC, str(tmp_path))
    assert (source.classes, source.never_taught) == (("red",), ("blue", "green"))
    assert "train/ has no blue, green, so these classes are tested as unknown" in caplog.text
    config = RunConfig(TINY_PRESET, 0, (Lesson((("red",),), "folder", str(tmp_path)),))
    sources = Sources(config)
    sources.keep(config.lessons[0], source)
    known, unknown = known_and_unknown(sources.test_images()[0], config)
    assert (counted(known), counted(unknown)) == ({"red": 1}, {"blue": 1, "green": 2})


def test_the_only_image_of_a_class_is_tested_on(tmp_path: Path) -> None:
    write_images(tmp_path, {"red": 4, "green": 1})
    source = load_source("folder", SPEC, str(tmp_path))
    assert (counted(source.train), counted(source.test)) == ({"red": 3}, {"red": 1, "green": 1})
    assert source.classes == ("green", "red")


def test_a_photograph_larger_than_the_server_takes_is_learned_from(tmp_path: Path) -> None:
    write_images(tmp_path, {"red": 1})
    # 51 megapixels of one byte each: too many pixels and too many bytes for a request.
    Image.new("L", (7200, 7100)).save(tmp_path / "red" / "photo.bmp")
    assert (tmp_path / "red" / "photo.bmp").stat().st_size > LIMITS.size
    assert len(read_folder(tmp_path, PixelReader(SPEC)).images) == 2


@pytest.mark.parametrize("inside", ["", "train"])
def test_a_folder_without_test_images_is_split(tmp_path: Path, inside: str) -> None:
    write_noise(tmp_path / inside, {"red": 120, "green": 80})
    source = load_source("folder", SPEC, str(tmp_path))
    for label, count in {"red": 120, "green": 80}.items():
        taught, tested = as_set(source.train.of([label])), as_set(source.test.of([label]))
        assert len(taught | tested) == len(taught) + len(tested) == count
        assert 0.15 < len(tested) / count < 0.35
    assert 0.2 < len(source.test) / 200 < 0.3
    assert source.classes == ("green", "red")


def test_an_image_stays_on_its_side_when_others_join_its_class(tmp_path: Path) -> None:
    write_noise(tmp_path, {"red": 40})
    before = load_source("folder", SPEC, str(tmp_path))
    for seed, prefix in enumerate(("a", "0", "z")):
        write_noise(tmp_path, {"red": 3}, seed=1 + seed, prefix=prefix)
        after = load_source("folder", SPEC, str(tmp_path))
        assert as_set(before.train) <= as_set(after.train)
        assert as_set(before.test) <= as_set(after.test)
    assert len(after.train) + len(after.test) == 49


def test_an_image_stays_on_its_side_when_another_is_gone_or_has_another_name(tmp_path: Path) -> None:
    write_noise(tmp_path, {"red": 40})
    before = load_source("folder", SPEC, str(tmp_path))
    (tmp_path / "red" / "0.png").unlink()
    (tmp_path / "red" / "1.png").rename(tmp_path / "red" / "x.png")
    after = load_source("folder", SPEC, str(tmp_path))
    assert as_set(after.train) <= as_set(before.train)
    assert as_set(after.test) <= as_set(before.test)


def test_copies_of_an_image_are_on_one_side(tmp_path: Path) -> None:
    write_noise(tmp_path, {"red": 20})
    write_noise(tmp_path, {"red": 20}, prefix="copy")
    source = load_source("folder", SPEC, str(tmp_path))
    assert len(source.train) + len(source.test) == 40
    assert not as_set(source.train) & as_set(source.test)


@pytest.mark.parametrize("seed", range(8))
def test_a_small_class_has_one_image_to_test_on_and_two_to_learn_from(seed: int, tmp_path: Path) -> None:
    counts = {"two": 2, "three": 3, "four": 4, "five": 5}
    source = load_source("folder", SPEC, str(write_noise(tmp_path, counts, seed)))
    taught, tested = counted(source.train), counted(source.test)
    assert {label: taught[label] + tested[label] for label in counts} == counts
    assert (taught["two"], taught["three"]) == (1, 2)
    assert min(taught["four"], taught["five"]) >= 2


def test_missing_data_is_an_error_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give their folder with --data FOLDER"):
        load_source("folder", SPEC, None)
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere: no such folder; give"):
        load_source("folder", SPEC, str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=f"no image in any class folder; expected .* in {tmp_path}/<class>/"):
        load_source("folder", SPEC, str(tmp_path))
    with pytest.raises(
        DataError, match=r"dataset is 'imagenet'; allowed: digits, mnist, fashion-mnist, cifar10, .*, folder"
    ):
        load_source("imagenet", SPEC, None)
