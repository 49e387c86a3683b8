"""Names from outside cannot control the terminal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from serving.bundle.terminal import EscapingFormatter, escaped
from serving.predict import main as predict

CLEAR = "\x1b[2J\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cat.png", "cat.png"),
        ("Käse 猫", "Käse 猫"),
        (f"{CLEAR}.png", r"\x1b[2J\x1b]0;owned\x07.png"),
        ("a\rb\x9b\u202e", r"a\rb\x9b\u202e"),
        ("two\nlines", "two\nlines"),
        ("not UTF-8 \udcff", r"not UTF-8 \udcff"),
    ],
)
def test_control_characters_are_written_as_escapes(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_log_lines_are_escaped() -> None:
    record = logging.LogRecord("any", logging.INFO, "", 0, "read %s", (CLEAR,), None)
    assert EscapingFormatter("%(message)s").format(record) == r"read \x1b[2J\x1b]0;owned\x07"


def test_a_file_name_reaches_the_terminal_escaped(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict([str(tmp_path / CLEAR)]) == 2
    assert predict([str(bundle), str(tmp_path / f"{CLEAR}.png")]) == 1
    printed = capsys.readouterr()
    assert r"\x1b[2J" in printed.err
    assert r"\u001b[2J" in printed.out
    assert "\x1b" not in printed.err + printed.out
