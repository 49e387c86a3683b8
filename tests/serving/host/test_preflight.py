"""Checks that stop a server before it opens its port."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from serving.host import preflight
from serving.host.preflight import bentoml_home, check_in_child


@pytest.mark.parametrize(("fatal", "reason"), [(signal.SIGKILL, "too little memory"), (signal.SIGTERM, "SIGTERM")])
def test_a_check_that_is_killed_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fatal: signal.Signals, reason: str
) -> None:
    def killed(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, -fatal)

    monkeypatch.setattr(preflight.subprocess, "run", killed)
    assert check_in_child(Path("some/bundle")) == 128 + fatal
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"some/bundle: killed by {fatal.name} while it was tested")
    assert reason in line


def test_the_home_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENTOML_HOME", "/somewhere")
    assert bentoml_home() == Path("/somewhere")
    monkeypatch.delenv("BENTOML_HOME")
    assert bentoml_home() == Path.home() / "bentoml"
