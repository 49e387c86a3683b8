"""What stops a server before it opens its port."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from serving import preflight
from serving.preflight import check_in_child
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
