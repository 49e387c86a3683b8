"""Places on a flat map by UMAP: points that are near in many dimensions stay near, and groups come apart.

The package umap-learn is the extra `umap`. It compiles itself when it is first used, which takes most of a minute of
processor time, so a server runs this module as a separate process:
`python -m serving.bundle.umap_places POINTS PLACES` reads points [n, k] from one file of numpy and writes their places
[n, 2] to the other, which appears when it is complete. Only one such process works in a folder at a time.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.bundle.atomic import locked, replace_file

NEIGHBOURS, EPOCHS = 15, 200
"""Points that each one is kept near to, and how often each pair is moved."""
MISSING = "UMAP needs the package umap-learn: got none; allowed: pip install -e '.[umap]' in a checkout, or pca"
PLACES = ".places.npy"
"""The end of the names of files with places; only the last one is kept."""
FAILED, BUSY = 2, 3
"""Exit codes of the process: an error, which it prints, and that another one is at work."""


class UmapError(Exception):
    """UMAP cannot be used; the message has the reason."""


def installed() -> bool:
    """Whether the extra is installed; does not import it."""
    return importlib.util.find_spec("umap") is not None


def umap_places(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """The places [n, 2] of points [n, k], the same each time; raises a UmapError without the extra.

    Begins with the first two coordinates, so that the map has the orientation of the plain one.
    """
    if not installed():
        raise UmapError(MISSING)
    if len(points) < 4:
        return np.ascontiguousarray(points[:, :2])
    with warnings.catch_warnings():
        # That a fixed seed allows one thread only, and the like.
        warnings.simplefilter("ignore")
        import umap

        start = points[:, :2] * (10 / max(float(np.abs(points[:, :2]).max()), 1e-9))
        # Equal points would never separate.
        start = start + np.random.default_rng(0).normal(0, 1e-4, start.shape)
        fitted = umap.UMAP(
            n_neighbors=min(NEIGHBOURS, len(points) - 1),
            n_epochs=EPOCHS,
            init=start.astype(np.float32),
            random_state=0,
            n_jobs=1,
        )
        return np.asarray(fitted.fit_transform(points), np.float32)


def main() -> int:
    source, target = map(Path, sys.argv[1:])
    # The answers of the server come first.
    os.nice(5)
    try:
        with locked(target.parent) as alone:
            if not alone:
                return BUSY
            made = io.BytesIO()
            np.save(made, umap_places(np.load(source, allow_pickle=False)), allow_pickle=False)
            for earlier in target.parent.glob(f"*{PLACES}"):
                earlier.unlink(missing_ok=True)
            replace_file(target, made.getvalue(), durable=False)
    except UmapError as error:
        print(error, file=sys.stderr)
        return FAILED
    finally:
        source.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
