"""The last step of `make demo`, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serving.demo import main, taken
from tests.helpers_serving import PATIENCE, ROOT, eventually, free_port, server_environment, write_bundle


@pytest.mark.long
def test_no_server_outlives_it(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "serving.demo", str(tmp_path), "--port", str(port)],
        cwd=ROOT,
        env=server_environment(tmp_path / "home", None),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        assert any("Ctrl-C" in line for line in demo.stdout)
        assert taken(port)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=PATIENCE) == 128 + signal.SIGTERM
    eventually(lambda: not taken(port))


def test_an_invalid_port_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "--port", "70000"])
    assert stopped.value.code == 2
    assert "got '70000'; allowed: 1 to 65535" in capsys.readouterr().err
