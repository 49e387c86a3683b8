"""Serve a bundle with its samples and say what to do next: `python -m serving.demo RUN`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from serving import address
from serving.bundle import load_bundle

PATIENCE = 60.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="holds bundle/ and samples/")
    parser.add_argument("--port", type=address.port, default=3000)
    chosen = parser.parse_args(arguments)
    if taken(chosen.port):
        print(f"error: port {chosen.port} is taken; choose another one: make demo PORT=3001", file=sys.stderr)
        return 2
    settings = {"OPENWORLD_BUNDLE": str((chosen.run / "bundle").resolve())}
    server = start(chosen.run / "bentoml", chosen.port, settings)
    try:
        if not wait_until_ready(server, chosen.port):
            print("error: the server did not become ready; its messages are above", file=sys.stderr)
            return 1
        print(_next_steps(chosen.run, chosen.port), flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        stop(server)


def taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(home: Path, port: int, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A server in a process of its own, with BentoML's files in `home`."""
    environment = {
        "BENTOML_HOME": str(home.resolve()),
        "BENTOML_DO_NOT_TRACK": "True",
        **os.environ,
        **settings,
    }
    Path(environment["BENTOML_HOME"]).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "serving", "--port", str(port)]
    # In a session of its own: Ctrl-C reaches this process alone, which then asks the server to finish its requests.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """Whether it answers, before it ends or patience does."""
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _next_steps(run: Path, port: int) -> str:
    url = f"http://127.0.0.1:{port}"
    curl = "  curl -s -F image=@{} {}/predict"
    lines = ["", f"Ready: open {url} in a browser, or try it from another terminal:", ""]
    learned = load_bundle(run / "bundle").manifest.labels
    samples = sorted((run / "samples").glob("*.png"))
    for meaning, known in (("a class it has learned", True), ("a class it has never seen", False)):
        for sample in [path for path in samples if (path.stem in learned) == known][:1]:
            lines += [f"  # {meaning}", curl.format(sample.resolve(), url)]
    return "\n".join([*lines, "", "Ctrl-C stops the server.", ""])


def stop(server: subprocess.Popen[bytes]) -> None:
    """Let it finish what it accepted, then make sure that it is gone."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def end_in_order() -> None:
    """Let whoever ends this process otherwise than by Ctrl-C end its server, too, which would outlive it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda told, _: sys.exit(128 + told))


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
