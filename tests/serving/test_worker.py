"""What the processes of a server import: a start takes as long as that."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from serving.lean import BY_WORKERS
from tests.helpers_serving import ROOT


def loaded_by(code: str) -> set[str]:
    """Modules that a new process has after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("unused", BY_WORKERS, ids=lambda unused: unused[0])
def test_stand_ins_stand_in_for_what_is_there(unused: tuple[str, ...]) -> None:
    """Another version of BentoML may have moved it: then nothing would be left out, or a call would fail some day."""
    module = importlib.import_module(unused[0])
    assert all(callable(getattr(module, name)) for name in unused[1:])


def test_a_worker_loads_nothing_that_it_was_to_leave_out() -> None:
    loaded = loaded_by(
        "from serving.lean import BY_WORKERS, leave_out\n"
        "leave_out(BY_WORKERS)\n"
        "import uvicorn, _bentoml_impl.worker.service, _bentoml_impl.loader, serving.app, serving.service"
    )
    assert "serving.queue" in loaded
    insides = {"jinja2.environment", "httpx._client", "bentoml._internal.cloud.config", "watchfiles", "circus", "zmq"}
    assert not insides & loaded


def test_our_own_command_leaves_out_what_no_server_uses() -> None:
    loaded = loaded_by(
        "from serving.lean import BY_ALL, leave_out\n"
        "leave_out(BY_ALL)\n"
        "import _bentoml_impl.server.serving, serving.bento, serving.service"
    )
    assert "circus.arbiter" in loaded
    assert not {"jinja2.environment", "httpx._client", "bentoml._internal.cloud.config", "bentoml_cli"} & loaded


def test_the_command_that_starts_workers_does_not_load_what_they_answer_with() -> None:
    loaded = loaded_by("import serving.service")
    assert "serving.preflight" in loaded
    assert not {"serving.app", "serving.queue", "numpy", "PIL", "onnxruntime"} & loaded
