from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from serving.settings import HOME, BentoMLSettings, Settings, SettingsError, WorkerSettings

KEY, TOKEN = "0123456789abcdef", "a-token-of-its-own"


def read(variables: dict[str, str]) -> Settings:
    with patch.dict(os.environ, variables):
        return Settings.from_environment()


def test_without_variables_the_defaults_hold() -> None:
    assert read({}) == Settings()
    assert Settings().bundle == HOME / "runs/demo/bundle"
    assert read({"OPENWORLD_QUEUE": ""}).queue == Settings().queue


def test_every_setting_is_read(tmp_path: Path) -> None:
    found = read(
        {
            "OPENWORLD_BUNDLE": str(tmp_path / "a/../b"),
            "OPENWORLD_PROVIDER": "cpu",
            "OPENWORLD_PRECISION": "int8",
            "OPENWORLD_ALPHA": "0.2",
            "OPENWORLD_WORKERS": "3",
            "OPENWORLD_THREADS": "2",
            "OPENWORLD_BATCH": "8",
            "OPENWORLD_QUEUE": "9",
            "OPENWORLD_DEADLINE": "1.5",
            "OPENWORLD_MAX_BYTES": "10",
            "OPENWORLD_MAX_PIXELS": "11",
            "OPENWORLD_MAX_SIDE": "7",
            "OPENWORLD_MAX_IMAGES": "12",
            "OPENWORLD_MAX_BODY": "13",
            "OPENWORLD_API_KEY": KEY,
            "OPENWORLD_LOG": "text",
            "OPENWORLD_ACCESS_LOG": "off",
            "OPENWORLD_TRACING": "on",
            "OPENWORLD_WINDOW": "14",
            "OPENWORLD_SAMPLES": str(tmp_path / "s"),
            "OPENWORLD_ADMIN_TOKEN": TOKEN,
        }
    )
    assert found == Settings(
        bundle=tmp_path / "b",
        provider="cpu",
        precision="int8",
        alpha=0.2,
        workers=3,
        threads=2,
        batch=8,
        queue=9,
        deadline=1.5,
        max_bytes=10,
        max_pixels=11,
        max_side=7,
        max_images=12,
        max_body=13,
        api_key=KEY,
        log="text",
        access_log=False,
        tracing=True,
        window=14,
        samples=tmp_path / "s",
        admin_token=TOKEN,
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PROVIDER", "tpu", "auto, cuda, cpu"),
        ("WORKERS", "0", "a whole number from 1 to 256"),
        ("QUEUE", "many", "a whole number from 1"),
        ("DEADLINE", "0", "seconds, more than 0"),
        ("DEADLINE", "inf", "seconds, more than 0"),
        ("DEADLINE", "nan", "seconds, more than 0"),
        ("MAX_BYTES", "-1", "a whole number from 1"),
        ("ALPHA", "0", "a number between 0 and 1, such as 0.05"),
        ("ALPHA", "1", "a number between 0 and 1, such as 0.05"),
        ("ALPHA", "nan", "a number between 0 and 1, such as 0.05"),
        ("LOG", "xml", "json, text"),
        ("ACCESS_LOG", "yes", "on, off"),
        ("ACCESS_LOG", "true", "on, off"),
        ("QUARANTINE_DURABLE", "yes", "on, off"),
        ("PRECISION", "int4", "auto, fp32, int8, fp16"),
        ("BATCH", "1025", "a whole number from 1 to 1024"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read({f"OPENWORLD_{name}": value})
    assert str(refused.value) == f"OPENWORLD_{name} is {value!r}; allowed: {allowed}"


@pytest.mark.parametrize("name", ["API_KEY", "ADMIN_TOKEN"])
def test_a_key_may_come_from_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    file = {f"OPENWORLD_{name}_FILE": str(tmp_path / "key")}
    assert getattr(read(file), name.lower()) == KEY
    with pytest.raises(SettingsError, match="both set"):
        read({**file, f"OPENWORLD_{name}": KEY})
    with pytest.raises(SettingsError, match=rf"OPENWORLD_{name}_FILE is .*No such file"):
        read({f"OPENWORLD_{name}_FILE": str(tmp_path / "none")})


def test_bundles_come_from_one_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("shelf")
    # The link is not resolved now, because it may change later.
    shelf = read({"OPENWORLD_BUNDLES": str(tmp_path / "link")})
    assert shelf.bundles == tmp_path / "link"
    with pytest.raises(SettingsError, match="OPENWORLD_BUNDLE and OPENWORLD_BUNDLES are both set"):
        read({"OPENWORLD_BUNDLES": str(tmp_path), "OPENWORLD_BUNDLE": str(tmp_path)})


def test_settings_that_code_constructs_do_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENWORLD_QUEUE", "5")
    assert Settings.from_environment().queue == 5
    assert Settings().queue == 128
    assert Settings(window=3).queue == 128


def test_samples_are_beside_the_bundle_or_on_the_shelf(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/bundle").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here/bundle")
    assert Settings(bundle=tmp_path / "link").samples_folder == tmp_path / "here/samples"
    assert Settings(bundles=tmp_path / "shelf").samples_folder == tmp_path / "shelf/samples"
    assert Settings(bundles=tmp_path / "shelf", samples=tmp_path / "mine").samples_folder == tmp_path / "mine"
    assert Settings().samples_folder == HOME / "runs/demo/samples"


def test_a_worker_finds_the_folder_of_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.from_environment().group is None
    monkeypatch.setenv("OPENWORLD_GROUP", str(tmp_path))
    assert WorkerSettings.from_environment().group == tmp_path


def test_variables_of_bentoml_are_read_by_the_same_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "HOST", "PORT"):
        monkeypatch.setenv(f"BENTOML_{name}", "")
    found = BentoMLSettings.from_environment()
    assert (found.home, found.host, found.port) == (Path.home() / "bentoml", None, "3000")
    for name, value in {"HOME": "/somewhere", "HOST": "10.0.0.7", "PORT": "3001"}.items():
        monkeypatch.setenv(f"BENTOML_{name}", value)
    found = BentoMLSettings.from_environment()
    assert (found.home, found.host, found.port) == (Path("/somewhere"), "10.0.0.7", "3001")


def test_bundles_can_be_swapped_where_somebody_can_ask_for_it() -> None:
    assert not Settings().swappable
    assert Settings(bundles=Path("shelf")).swappable
    assert Settings(admin_token=TOKEN).swappable


@pytest.mark.parametrize("name", ["API_KEY", "ADMIN_TOKEN"])
@pytest.mark.parametrize("key", ["secret", "0123456789 abcdef", "0123456789abcdéf"])
def test_a_key_is_never_shown(name: str, key: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read({f"OPENWORLD_{name}": key})
    assert key not in str(refused.value)
    assert KEY not in repr(Settings(api_key=KEY, admin_token=KEY))
