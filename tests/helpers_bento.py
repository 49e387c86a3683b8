"""The bento, and a script that starts it as its image does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers_serving import ROOT, image_bytes, server_environment

PACKAGES = ("models", "training", "export", "serving")


def build_bento(home: Path, project: Path, write_bundle: Callable[[Path], object]) -> Path:
    """Build the bento from a copy of the project with this bundle, and remove the copy; returns the bento's folder."""
    shutil.copy(ROOT / "bentofile.yaml", project)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, project / package, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "runs/demo").mkdir(parents=True)
    write_bundle(project / "runs/demo/bundle")
    (project / "runs/demo/checkpoint.safetensors").write_bytes(b"not for serving")
    (project / "runs/demo/samples").mkdir()
    (project / "runs/demo/samples/red.png").write_bytes(image_bytes())
    (project / ".gitignore").write_text("runs/\n")
    build = [sys.executable, "-m", "bentoml", "build", "--version", "1", str(project)]
    subprocess.run(build, cwd=project, env=server_environment(home, None), check=True, capture_output=True)
    shutil.rmtree(project)
    return home / "bentos/openworld/1"


def entry_script(
    bento: Path,
    arguments: Sequence[str],
    home: Path,
    *,
    python: Path = Path(sys.executable),
    prefix: Sequence[str] = (),
    variables: str = "",
) -> Path:
    """A script in `home` that is called as `python -m serving --host H --port P`, and runs the bento's entry point.

    The entry point gets the options after its arguments. `prefix` is a command that runs it.
    """
    script = home / "python"
    script.write_text(
        "#!/bin/sh\nshift 2\n"
        f'export BENTO_PATH="{bento}" PATH="{python.parent}:$PATH" TMPDIR="{home}" {variables}\n'
        f'exec {" ".join(prefix)} env -u BENTOML_CONTAINERIZED bash "{bento}/env/docker/entrypoint.sh" '
        f'{" ".join(arguments)} "$@"\n'
    )
    script.chmod(0o755)
    return script
