"""The socket that a worker listens on, in place of the one that it inherits."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from serving.listen import listen_alone
from tests.helpers_serving import ROOT

WORKER = """
import socket, sys
from serving.listen import listen_alone
listen_alone(int(sys.argv[1]))
own = socket.socket(fileno=int(sys.argv[1]))
own.listen()
print("ready", flush=True)
while True:
    own.accept()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not spread connections")


@pytest.fixture
def supervisor() -> socket.socket:
    """As circus makes one."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.set_inheritable(True)
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


def attempt(address: tuple[str, int]) -> int:
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(address)


def worker(supervisor: socket.socket) -> subprocess.Popen[bytes]:
    fd = supervisor.fileno()
    started = subprocess.Popen([sys.executable, "-c", WORKER, str(fd)], pass_fds=[fd], cwd=ROOT, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.readline() == b"ready\n"
    return started


def test_nobody_waits_where_no_worker_listens(supervisor: socket.socket) -> None:
    """After the last one is gone; and its successor can be reached as it was."""
    address = supervisor.getsockname()
    for _ in range(2):
        started = worker(supervisor)
        assert attempt(address) == 0
        started.kill()
        started.wait()
        assert attempt(address) == errno.ECONNREFUSED
    supervisor.close()


def test_two_workers_listen_at_once_and_one_survives(supervisor: socket.socket) -> None:
    first, second = worker(supervisor), worker(supervisor)
    first.kill()
    first.wait()
    assert [attempt(supervisor.getsockname()) for _ in range(20)] == [0] * 20
    second.kill()
    second.wait()
    supervisor.close()


def test_another_server_cannot_take_the_port(supervisor: socket.socket) -> None:
    started = worker(supervisor)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(supervisor.getsockname())
    started.kill()
    started.wait()
    supervisor.close()


def test_a_port_that_cannot_be_had_is_shared(
    supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbidden)
    address, descriptor = supervisor.getsockname(), supervisor.fileno()
    listen_alone(descriptor)
    assert "shares the socket" in caplog.text
    assert attempt(address) == 0
    supervisor.close()


def test_another_kind_of_socket_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    before = os.fstat(ours.fileno()).st_ino
    listen_alone(ours.fileno())
    assert os.fstat(ours.fileno()).st_ino == before
    ours.close()
    theirs.close()
