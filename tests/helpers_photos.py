"""A small set of pictures that a pre-trained trunk can tell apart."""

from __future__ import annotations

import shutil
from pathlib import Path

from export.demo.pictures import HEIGHT, PICTURES, WIDTH, photo, write_photos

__all__ = ["HEIGHT", "PICTURES", "WIDTH", "grown_run", "photo", "write_photos"]


def grown_run(run: Path, photos: Path, place: Path) -> Path:
    """The run with one more task, from a folder that has no photo of the others."""
    from training import fit

    grown = Path(shutil.copytree(run, place / "run"))
    shutil.copytree(photos / "dots", place / "new" / "dots")
    assert fit.add_task([str(grown), "dots", "--data", str(place / "new")]) == 0
    return grown
