"""UMAP for the map of the quarantine, in one process for all workers of a server."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.bundle.atomic import replace_file
from serving.bundle.umap_places import BUSY, MISSING, PLACES, UmapError, installed
from serving.telemetry.metrics import shared_folder

Numbers = NDArray[np.float32]


class UmapProcess:
    """Starts the process, and finds what it or that of another worker has made; may be used in several threads."""

    def __init__(self) -> None:
        # Workers share the folder of their metrics. Starting a server empties it.
        shared = shared_folder()
        self._folder = shared / "umap" if shared else Path(tempfile.mkdtemp(prefix="openworld-umap-"))
        self._child: subprocess.Popen[bytes] | None = None
        self._made: tuple[str, Numbers] | None = None

    def places(self, points: Numbers) -> Numbers | None:
        """The places [n, 2] of these points [n, k], or None while they are computed; raises a UmapError."""
        if not installed():
            raise UmapError(MISSING)
        key = hashlib.sha256(points.tobytes()).hexdigest()[:32]
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        target = self._folder / f"{key}{PLACES}"
        with contextlib.suppress(FileNotFoundError):
            self._made = key, np.load(target, allow_pickle=False)
            return self._made[1]
        if self._child is None or self._ended(self._child):
            self._start(points, target)
        return None

    def _ended(self, child: subprocess.Popen[bytes]) -> bool:
        """Whether the process has ended; raises a UmapError if it failed, and the next request tries again."""
        if child.poll() is None:
            return False
        self._child = None
        output = child.communicate()[1].decode(errors="replace").strip().splitlines()
        if child.returncode not in (0, BUSY):
            raise UmapError(f"UMAP failed: got {output[-1] if output else child.returncode}; allowed: pca")
        return True

    def _start(self, points: Numbers, target: Path) -> None:
        self._folder.mkdir(exist_ok=True)
        given = io.BytesIO()
        np.save(given, points, allow_pickle=False)
        source = self._folder / f"{os.getpid()}.points.npy"
        replace_file(source, given.getvalue(), durable=False)
        command = [sys.executable, "-m", "serving.bundle.umap_places", str(source), str(target)]
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
