"""openworld for programs, and the start of the command `openworld`.

    from openworld import Model, Run, export, fit

    run = fit("runs/mine", data="photos", classes_per_task=2, quick=True)
    print(run.evaluate()["verdict"]["summary"])
    export(run, "runs/mine/bundle")
    print(Model.load("runs/mine/bundle").predict("photo.jpg").label)

Each name is imported when it is used first: `Model` and `Client` need what a server needs, the others PyTorch. The
packages of openworld have common names, so this module checks that no other package of the same name is found first.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.client import AsyncClient as AsyncClient
    from serving.client import Client as Client
    from serving.model import Model as Model
    from training.fit import fit as fit
    from training.run import Run as Run

PACKAGES = ("models", "training", "export", "serving")
_PLACES = {
    "fit": "training.fit",
    "Run": "training.run",
    "Model": "serving.model",
    "Client": "serving.client",
    "AsyncClient": "serving.client",
}
__all__ = ["AsyncClient", "Client", "Model", "Run", "ShadowedError", "export", "fit", "main"]


class ShadowedError(ImportError):
    """Another package has the name of one of ours and is found first; the message has both places."""


def check_packages() -> None:
    """Raise a ShadowedError unless the packages of openworld are those beside this file."""
    here = Path(__file__).resolve().parent
    for name in PACKAGES:
        found = _place(name)
        if found is not None and found != here / name:
            raise ShadowedError(
                f"the package {name} is {found}, not openworld's ({here / name}): install openworld into an "
                "environment of its own, or start it in another folder (docs/howto/install.md)"
            )


def _place(name: str) -> Path | None:
    """The folder, or file, of the package that an import would find."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_packages()
    return getattr(importlib.import_module(_PLACES[name]), name)


def export(run: Run | str | os.PathLike[str], out: str | os.PathLike[str], **options: Any) -> Path:
    """Write a run as a bundle, which appears complete or not at all; the folder of the bundle.

    The options are those of `export.exporter.export`, such as precisions=["int8"] and force=True.
    """
    check_packages()
    folder = run if isinstance(run, str | os.PathLike) else run.folder
    if folder is None:
        raise ValueError("run: was not opened from a folder; allowed: a Run of fit or Run.open, or its folder")
    from export.exporter import export as write_bundle

    return write_bundle(Path(folder), Path(out), **options).path


def main(arguments: list[str] | None = None) -> int:
    """The command `openworld`."""
    try:
        check_packages()
    except ShadowedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from export.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
