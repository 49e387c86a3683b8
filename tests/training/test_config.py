from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from models.backbones import BACKBONES
from models.network import Network
from serving.bundle.sections import ImageSpec
from tests.helpers import TINY_PRESET
from training.config import FeatureLearning, HeadLearning, Lesson, RunConfig
from training.presets import PRESETS, SUP_NETWORK, choose_preset
from training.store.checkpoint import CONFIG, RunError, read_config, write_config

CONFIGURED = RunConfig(
    TINY_PRESET,
    seed=7,
    lessons=(
        Lesson((("zero", "one"), ("two",)), "folder", "some/where"),
        Lesson((("three",),), "quarantine", "sqlite:////q.db", "file://images", {"three": (3, 5)}),
    ),
)


@pytest.mark.parametrize("method", ["hat", "sup"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_serves_every_method(name: str, method: str) -> None:
    preset = choose_preset(name, method)
    assert preset.name == name
    own = SUP_NETWORK.get(name, {}) if method == "sup" else {}
    assert preset.network == replace(PRESETS[name].network, method=method, **own)


def test_an_unknown_preset_or_method_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=rf"preset is 'nothing'; allowed: {', '.join(PRESETS)}"):
        choose_preset("nothing", "hat")
    with pytest.raises(ValueError, match="method is 'ewc'; allowed: hat, sup"):
        choose_preset("digits", "ewc")
    with pytest.raises(
        ValueError, match=r"backbone is 'resnt18'; allowed: convnet, resnet18, adapter; did you mean 'resnet18'\?"
    ):
        choose_preset("digits", "hat", backbone="resnt18")


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", ["digits", "images"])
def test_a_preset_takes_every_backbone(name: str, backbone: str) -> None:
    network = Network(choose_preset(name, "hat", backbone=backbone, width=4).network)
    assert network.config.backbone == backbone
    assert network.connection.after.channels > 0


@pytest.mark.parametrize("name", ["epochs", "batch_size", "lr", "temperature", "max_sharpness"])
def test_settings_of_step_one_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=rf"FeatureLearning.{name} is 0; allowed: above 0"):
        replace(TINY_PRESET.features, **{name: 0})


def test_settings_of_step_two_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"HeadLearning.lr is -1; allowed: above 0"):
        HeadLearning(epochs=1, batch_size=1, lr=-1)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_both_sides_of_validation_need_images(share: float) -> None:
    with pytest.raises(ValueError, match=rf"validation_share is {share}; allowed: between 0 and 1"):
        replace(TINY_PRESET, validation_share=share)


def test_a_network_for_other_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images are \(9, 8, 1\), but the network is for images of another shape"):
        replace(TINY_PRESET, image=ImageSpec(height=9, width=8, mode="L"))


@pytest.mark.parametrize("part", [CONFIGURED, CONFIGURED.preset, CONFIGURED.preset.features, CONFIGURED.preset.network])
def test_configuration_is_frozen(part: object) -> None:
    name = next(iter(vars(part)))
    with pytest.raises(FrozenInstanceError):
        setattr(part, name, None)


@pytest.mark.parametrize(
    "config", [CONFIGURED, *(RunConfig(preset, 0, (Lesson((("a",),), preset.dataset),)) for preset in PRESETS.values())]
)
def test_a_written_config_is_read_back_the_same(config: RunConfig, tmp_path: Path) -> None:
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG]


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"{tmp_path}: not a run .*make one with `openworld fit`"):
        read_config(tmp_path)


def test_a_config_with_an_impossible_value_is_refused_by_name(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIGURED)
    content = json.loads((tmp_path / CONFIG).read_text())
    content["preset"]["features"]["epochs"] = 0
    (tmp_path / CONFIG).write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"config.json: (.|\n)*epochs is 0"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("]", "", "Invalid JSON: "),
        ('"method": "hat"', '"method": "pack"', r"preset\.network: Value error, method is 'pack'; allowed: hat, sup; "),
        ('"backbone": "', '"backbone": "my', r"preset\.network: Value error, backbone is 'my\w+'; allowed: convnet, "),
        ('"seed"', '"extra": 1, "seed"', "extra: Unexpected keyword argument; "),
        ('"method"', '"extra": 1, "method"', r"preset\.network\.extra: Unexpected keyword argument; "),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line_with_what_to_do(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    write_config(tmp_path, CONFIGURED)
    text = (tmp_path / CONFIG).read_text()
    (tmp_path / CONFIG).write_text(text.replace(old, new, 1))
    with pytest.raises(RunError, match=rf"^{tmp_path / CONFIG}: {message}.*learn again with `openworld fit") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert "http" not in str(caught.value)


def test_every_preset_uses_a_known_optimizer() -> None:
    assert {preset.features.optimizer for preset in PRESETS.values()} <= {"adam", "lars"}
    assert FeatureLearning(epochs=1, batch_size=1, optimizer="lars", lr=1.0, warmup_epochs=0).max_sharpness == 700
