from __future__ import annotations

from pathlib import Path

import pytest

from serving.settings import HOME, Settings, SettingsError

KEY = "0123456789abcdef"


def test_without_variables_the_defaults_hold() -> None:
    assert Settings.from_environment({}) == Settings()
    assert Settings().bundle == HOME / "runs/demo/bundle"
    assert Settings.from_environment({"OPENWORLD_QUEUE": ""}).queue == Settings().queue


def test_every_setting_is_read(tmp_path: Path) -> None:
    read = Settings.from_environment(
        {
            "OPENWORLD_BUNDLE": str(tmp_path / "a/../b"),
            "OPENWORLD_PROVIDER": "cpu",
            "OPENWORLD_WORKERS": "3",
            "OPENWORLD_THREADS": "2",
            "OPENWORLD_BATCH": "8",
            "OPENWORLD_QUEUE": "9",
            "OPENWORLD_DEADLINE": "1.5",
            "OPENWORLD_MAX_BYTES": "10",
            "OPENWORLD_MAX_PIXELS": "11",
            "OPENWORLD_MAX_IMAGES": "12",
            "OPENWORLD_MAX_BODY": "13",
            "OPENWORLD_API_KEY": KEY,
            "OPENWORLD_LOG": "text",
            "OPENWORLD_ACCESS_LOG": "off",
            "OPENWORLD_TRACING": "on",
            "OPENWORLD_WINDOW": "14",
        }
    )
    assert read == Settings(tmp_path / "b", "cpu", 3, 2, 8, 9, 1.5, 10, 11, 12, 13, KEY, "text", False, True, 14)


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
        ("LOG", "xml", "json, text"),
        ("ACCESS_LOG", "yes", "on, off"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment({f"OPENWORLD_{name}": value})
    assert str(refused.value) == f"OPENWORLD_{name} is {value!r}; allowed: {allowed}"


def test_a_key_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert Settings.from_environment({"OPENWORLD_API_KEY_FILE": str(tmp_path / "key")}).api_key == KEY
    with pytest.raises(SettingsError, match="both set"):
        Settings.from_environment({"OPENWORLD_API_KEY_FILE": str(tmp_path / "key"), "OPENWORLD_API_KEY": KEY})
    with pytest.raises(SettingsError, match=r"OPENWORLD_API_KEY_FILE is .*No such file"):
        Settings.from_environment({"OPENWORLD_API_KEY_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize("key", ["secret", "0123456789 abcdef", "0123456789abcdéf"])
def test_a_key_is_never_shown(key: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment({"OPENWORLD_API_KEY": key})
    assert key not in str(refused.value)
    assert KEY not in repr(Settings(api_key=KEY))
