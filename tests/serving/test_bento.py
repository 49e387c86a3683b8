"""The bento that is shipped: what is in it, and that it serves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers_serving import (
    GRAPH,
    ROOT,
    http_get,
    http_post,
    image_bytes,
    server_environment,
    serving,
    write_bundle,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BentoML home with the bento built from a copy of the project and a tiny bundle."""
    home, project = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "bentofile.yaml", project)
    for room in ("serving", "training", "models", "export"):
        shutil.copytree(ROOT / room, project / room)
    write_bundle(project / "runs/demo/bundle")
    (project / "runs/demo/checkpoint.pt").write_bytes(b"not for serving")
    (project / ".gitignore").write_text("runs/\n")
    build = [sys.executable, "-m", "bentoml", "build", "--version", "1", str(project)]
    subprocess.run(build, cwd=project, env=server_environment(home, None), check=True, capture_output=True)
    shutil.rmtree(project)
    return home


def test_a_bento_holds_the_bundle_and_serving_alone(home: Path) -> None:
    source = home / "bentos/openworld/1/src"
    held = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    files = [path for path in (ROOT / "serving").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    bundle = {f"runs/demo/bundle/{name}" for name in ("manifest.json", "rule.json", GRAPH, "golden.npz")}
    assert held - {"bentofile.yaml", "README.md"} == expected | bundle
    requirements = (home / "bentos/openworld/1/env/python/requirements.txt").read_text()
    assert "onnxruntime-gpu" in requirements
    assert "torch" not in requirements


def test_a_bento_serves_the_bundle_that_it_holds(home: Path, tmp_path: Path) -> None:
    with serving(home, None, target="openworld:1", cwd=tmp_path) as server:
        content = image_bytes()
        response = http_post(f"{server.url}/predict", content=content, headers={"content-type": "image/png"})
        assert response.json()["label"] == "red"
        assert http_get(f"{server.url}/docs.json").status_code == 200
