"""Serves a bundle with its sample images and prints what to try next: `python -m serving.demo RUN`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from serving.bundle.manifest import load_bundle
from serving.host import address

START_TIMEOUT, STOP_TIMEOUT = 60.0, 30.0


def main(arguments: list[str] | None = None) -> int:
    description = "Serve a bundle and print example requests."
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="a directory with bundle/ and samples/")
    parser.add_argument("--port", type=address.port, default=3000, help="the TCP port to listen on; default: 3000")
    chosen = parser.parse_args(arguments)
    if taken(chosen.port):
        print(f"error: port {chosen.port} is taken; choose another one: make demo PORT=3001", file=sys.stderr)
        return 2
    server = start(chosen.run / "bentoml", chosen.port, {"OPENWORLD_BUNDLE": str((chosen.run / "bundle").resolve())})
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
    """Whether a server accepts connections on this port of the local machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(home: Path, port: int, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a server in its own process, with BentoML's files in `home` unless BENTOML_HOME is set."""
    # An empty variable counts as not set, as in serving/settings.py.
    place = Path(os.environ.get("BENTOML_HOME") or home).resolve()
    place.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "BENTOML_HOME": str(place), **settings}
    command = [sys.executable, "-m", "serving", "--port", str(port)]
    # In its own session, Ctrl-C does not reach the server: this process then asks it to finish its requests.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server can answer; False if it ends before, or takes longer than START_TIMEOUT."""
    from serving.client import Client

    deadline = time.monotonic() + START_TIMEOUT
    with Client(f"http://127.0.0.1:{port}", timeout=5.0) as client:
        while server.poll() is None and time.monotonic() < deadline:
            if client.ready():
                return True
            time.sleep(0.1)
    return False


def _next_steps(run: Path, port: int) -> str:
    url = f"http://127.0.0.1:{port}"
    lines = ["", f"Ready: open {url} in a browser, or try it from another terminal:", ""]
    learned = load_bundle(run / "bundle").manifest.labels
    samples = sorted((run / "samples").glob("*.png"))
    for meaning, known in (("a learned class", True), ("a class that was never learned", False)):
        for sample in [path for path in samples if (path.stem in learned) == known][:1]:
            lines += [f"  # {meaning}", f"  curl -s -F image=@{sample.resolve()} {url}/predict"]
    return "\n".join([*lines, "", "Ctrl-C stops the server.", ""])


def stop(server: subprocess.Popen[bytes]) -> None:
    """Let the server finish the accepted requests; kill it if that takes longer than STOP_TIMEOUT."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def end_in_order() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that the server is stopped and does not outlive this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
