from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.predict import main
from tests.helpers_serving import GREY, ROOT, image_bytes


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_line_per_image_and_1_if_one_is_bad(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, foreign, bad = (tmp_path / name for name in ("good.png", "foreign.jpg", "bad.png"))
    good.write_bytes(image_bytes())
    foreign.write_bytes(image_bytes(GREY))
    bad.write_bytes(b"not an image")
    missing = tmp_path / "missing.png"
    assert main([str(bundle), *map(str, (good, bad, missing, foreign))]) == 1
    printed = lines(capsys)
    assert [line["file"] for line in printed] == [str(path) for path in (good, bad, missing, foreign)]
    assert [line.get("label") for line in printed] == ["red", None, None, "unknown"]
    assert [line.get("error", {}).get("code") for line in printed] == [
        None,
        "unsupported_image",
        "unreadable_file",
        None,
    ]


def test_options_are_passed_on(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(image_bytes())
    assert main([str(bundle), str(path), "--task", "1", "--alpha", "0.5", "--top", "4"]) == 0
    (answer,) = lines(capsys)
    assert (answer["task"], answer["alpha"], len(answer["top"])) == (1, 0.5, 4)


def test_without_images_the_bundle_is_checked(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [[], ["--task", "7"]])
def test_an_unusable_bundle_or_option_exits_with_2_and_a_one_line_error(
    bundle: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundle if options else tmp_path / "nothing"), "image.png", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_the_command_prints_nothing_but_answers(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(image_bytes())
    command = [sys.executable, "-m", "serving.predict", str(bundle), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["label"] == "red"
