"""The embedded default, learned and exported once for all tests that need it."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from export.__main__ import main as export
from export.samples import main as samples
from serving.bundle.decision import Verdicts, judge
from tests.helpers_serving import ROOT
from training.data.datasets import load_source
from training.measure.evaluation import known_and_unknown
from training.run import Run, open_run

CPU = torch.device("cpu")


def run(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder or ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


@dataclass(frozen=True)
class Line:
    """A finished run of the default, its bundle, and its whole test split."""

    folder: Path
    bundle: Path
    run: Run
    pixels: np.ndarray
    known: int

    def offline(self) -> Verdicts:
        """The decisions of evaluation, with torch and the masked network."""
        return judge(self.run.outputs(self.pixels, CPU), self.run.rule)


def learn_default(folder: Path) -> Line:
    """Learn and export as a user does, unless it was done before."""
    if not (folder / "samples").exists():
        # After a failure, every process that needs it tries again and reports the error.
        shutil.rmtree(folder, ignore_errors=True)
        run("training.fit", "--out", str(folder))
        # In this process, which has imported torch.
        assert export([str(folder), "--out", str(folder / "bundle")]) == 0
        assert samples([str(folder), "--out", str(folder / "samples")]) == 0
    finished = open_run(folder, CPU)
    preset = finished.config.preset
    known, unknown = known_and_unknown(load_source(preset.dataset, preset.image, None), finished.config)
    return Line(folder, folder / "bundle", finished, np.concatenate([known.pixels, unknown.pixels]), len(known))


def png(pixels: np.ndarray) -> bytes:
    stored = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(stored, "PNG")
    return stored.getvalue()
