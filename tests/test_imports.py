"""The server must start where nothing of training is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers_serving import ROOT

FORBIDDEN = ("torch", "torchvision", "onnx", "sklearn", "training", "models", "export")
FORBID = f"""
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN!r}:
            raise ImportError(f"forbidden: {{name}}")

sys.meta_path.insert(0, Forbid())
"""
UNLOADED = f"assert not set({FORBIDDEN!r}) & set(sys.modules), set({FORBIDDEN!r}) & set(sys.modules)"


@pytest.mark.parametrize(
    "module", ["serving.service", "serving.app", "serving.predict", "serving.preprocess", "serving.decision"]
)
@pytest.mark.parametrize("before", ["import sys", FORBID], ids=["installed", "absent"])
def test_serving_needs_nothing_of_training(module: str, before: str) -> None:
    code = f"{before}\nimport {module}\n{UNLOADED}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
