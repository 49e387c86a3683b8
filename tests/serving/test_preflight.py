"""What stops a server before it opens its port."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from serving import preflight
from serving.preflight import begin_check, check_in_child
from serving.settings import Settings


@pytest.mark.parametrize(("fatal", "said"), [(signal.SIGKILL, "too little memory"), (signal.SIGTERM, "SIGTERM")])
def test_a_test_that_is_killed_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fatal: signal.Signals, said: str
) -> None:
    def killed(settings: Settings, bundle: Path) -> int:
        os.kill(os.getpid(), fatal)
        return 0

    monkeypatch.setattr(preflight, "_check", killed)
    assert check_in_child(Settings(), Path("some/bundle")) == 128 + fatal
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"some/bundle: killed by {fatal.name} while it was tested")
    assert said in line


def test_what_was_begun_is_waited_for_and_not_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def counted(settings: Settings, bundle: Path) -> int:
        (tmp_path / str(os.getpid())).touch()
        return 2

    monkeypatch.setattr(preflight, "_check", counted)
    begin_check(Settings(), tmp_path)
    assert check_in_child(Settings(), tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 1
    # Its verdict is given once; whoever asks again has it tested again.
    assert check_in_child(Settings(), tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 2
