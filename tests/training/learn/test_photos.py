"""When a trunk is used, which options belong to it, and the preset that it makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.trunks.trunk import TrunkSpec
from tests.helpers_photos import write_photos
from training.config import Lesson, RunConfig
from training.fit import make_parser
from training.learn.photos import benchmark_of, chosen_trunk, photos_preset, shows_photos, with_learning

SPEC = TrunkSpec("small", "0" * 64, 64, (24, 40))
LESSONS = (Lesson((("a", "b"),), "folder"),)


def write_grey(folder: Path, side: int = 64) -> Path:
    """Grey images, stored in colour as many programs do."""
    (folder / "a").mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(3):
        grey = Image.fromarray(random.integers(0, 256, (side, side), dtype=np.uint8))
        grey.convert("RGB").save(folder / "a" / f"{number}.png")
    return folder


def write_colour(folder: Path, side: int) -> Path:
    (folder / "a").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a" / "0.png")
    return folder


def test_colour_images_that_are_not_tiny_are_photographs(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", disc=2, dots=2)
    assert shows_photos(photos)
    (tmp_path / "split").mkdir()
    photos.rename(tmp_path / "split" / "train")
    assert shows_photos(tmp_path / "split")
    assert not shows_photos(write_grey(tmp_path / "grey"))
    assert not shows_photos(write_colour(tmp_path / "tiny", 16))
    assert shows_photos(write_colour(tmp_path / "small", 32))


def test_files_that_are_no_images_decide_nothing(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", disc=1)
    for number in range(3):
        (photos / "disc" / f"notes{number}.txt").write_text("no image")
    assert shows_photos(photos)
    assert not shows_photos(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert not shows_photos(tmp_path / "empty")


def chosen(*words: str) -> object:
    return chosen_trunk(make_parser().parse_args(list(words)))


def test_drawings_and_data_sets_learn_from_scratch(tmp_path: Path) -> None:
    grey, photos = str(write_grey(tmp_path / "grey")), str(write_photos(tmp_path / "photos", disc=1))
    for words in (
        [],
        ["--data", grey],
        ["--data", photos, "--trunk", "none"],
        ["--data", photos, "--preset", "images"],
    ):
        assert chosen(*words) is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--quick"], "--quick means nothing without a trunk"),
        (["--trunk", "none", "--quick"], "--quick means nothing without a trunk: leave it out"),
        (
            ["--trunk", "none", "--preset", "photos"],
            "--preset photos needs a trunk; allowed with --trunk none",
        ),
        (
            ["--trunk", "patches", "--preset", "mnist-5t-cpu"],
            "learns from some of the images only, .*; allowed: --preset mnist-5t",
        ),
        (["--preset", "photos", "--backbone", "resnet18"], "--backbone means nothing with a trunk"),
        (["--preset", "photos", "--buffer"], "--buffer means nothing with a trunk"),
        (
            ["--preset", "photos", "--quick", "--epochs", "3", "--loss", "ce"],
            "--loss, --epochs means nothing with --quick",
        ),
        (["--trunk", "patches", "--preset", "digitz"], "preset is 'digitz'; allowed: photos, .*did you mean 'digits'?"),
        (["--trunk", "none", "--trunk-option", "mean=0"], "--trunk-option means nothing without a trunk"),
        (["--preset", "digits", "--trunk-weights", "x.pth"], "--trunk-weights means nothing without a trunk"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chosen(*words)


def test_the_preset_fits_its_trunk_or_the_run_is_refused() -> None:
    preset = photos_preset(SPEC, "sup", width=32)
    config = RunConfig(preset, 0, LESSONS, trunk=SPEC, quick=True)
    assert (config.method, config.loss, config.system) == ("pooled", "none", "pooled")
    with_adapters = replace(config, quick=False)
    assert (with_adapters.method, with_adapters.loss, with_adapters.system) == ("sup", "csi", "sup")
    assert (preset.image.shape, preset.network.channels, preset.network.base) == ((64, 64, 3), 64, 32)
    with pytest.raises(ValueError, match=r"trunk small encodes images \(32, 32, 3\) to vectors \(1, 1, 64\)"):
        replace(config, trunk=replace(SPEC, size=32))
    with pytest.raises(ValueError, match=r"needs a trunk that encodes images: give --trunk"):
        replace(config, trunk=None)
    with pytest.raises(ValueError, match="a run with a trunk stores no images: leave out --buffer"):
        replace(config, buffer=10)


def test_a_benchmark_keeps_its_data_set_and_tasks() -> None:
    preset = photos_preset(SPEC, benchmark=benchmark_of("digits"))
    assert (preset.name, preset.dataset, preset.held_out) == ("digits", "digits", ("8", "9"))
    assert preset.image.shape == (64, 64, 3)
    assert benchmark_of(None) is benchmark_of("photos") is None


def test_epochs_and_batch_size_replace_those_of_a_preset() -> None:
    preset = photos_preset(SPEC)
    changed = with_learning(preset, 3, 7)
    assert (changed.features.epochs, changed.features.batch_size) == (3, 7)
    assert with_learning(preset, None, None) is preset
    with pytest.raises(ValueError, match="epochs is 0; allowed: above 0"):
        with_learning(preset, 0, None)
