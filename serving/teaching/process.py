"""The process of a job, as a worker of a server starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from serving.settings import HOME
from serving.teaching.jobs import SHOWN_EVERY

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def start_process(job_id: int) -> subprocess.Popen[bytes]:
    """Start the process of a job, which may outlive this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "serving.teaching.work", str(job_id)],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        # Ctrl C is for the server. A session of its own would get an equal share of the processors on systems that
        # divide them among sessions, so that its lower priority would have no effect on requests.
        process_group=0,
    )


def exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process, if it ends soon."""
    try:
        return child.wait(SHOWN_EVERY)
    except subprocess.TimeoutExpired:
        return None


def _environment() -> dict[str, str]:
    """The variables of the server, but one thread: several wait for each other while requests have the processors."""
    path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path}
