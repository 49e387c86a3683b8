"""A worker whose supervisor is gone ends; any other process is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil

from serving.host.supervisor import end_with
from tests.helpers_serving import PATIENCE, ROOT

WORKER = """
import os, signal, sys, time
from serving.host.supervisor import end_with
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(0)))
end_with(os.getppid(), interval=0.01)
print(os.getpid(), flush=True)
time.sleep(600)
"""
LATE = """
import os, signal, sys, time
from serving.host.supervisor import end_with
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(0)))
supervisor = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == supervisor:
    time.sleep(0.01)
end_with(supervisor, interval=0.01)
time.sleep(600)
"""
SUPERVISOR = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_worker_is_asked_to_end_when_its_supervisor_was_killed() -> None:
    command = [sys.executable, "-c", SUPERVISOR, WORKER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        worker = psutil.Process(int(supervisor.stdout.readline()))
        assert worker.ppid() == supervisor.pid
        os.kill(supervisor.pid, signal.SIGKILL)
        # SIGTERM and not SIGKILL: a server answers what it has accepted.
        assert supervisor.stdout.readline() == "asked to end\n"
        psutil.wait_procs([worker], timeout=PATIENCE)
        assert not worker.is_running()


def test_a_worker_that_starts_after_its_supervisor_was_killed_ends() -> None:
    """It was forked before, and took longer to start."""
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, LATE], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        worker = psutil.Process(int(supervisor.stdout.readline()))
        # Nobody has taken note of its end yet.
        os.kill(supervisor.pid, signal.SIGKILL)
        assert supervisor.stdout.readline() == "asked to end\n"
        psutil.wait_procs([worker], timeout=PATIENCE)
        assert not worker.is_running()


def test_a_process_of_another_parent_is_left_alone() -> None:
    """Such as a program that inherited the variable, or that makes the service itself."""
    before = threading.active_count()
    end_with(os.getpid())
    assert threading.active_count() == before
