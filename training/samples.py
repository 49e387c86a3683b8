"""Two images to try a bundle with: `python -m training.samples RUN --out FOLDER`.

One test image of a class that was learned and one of a class that was not, each the first that the bundle answers as
it should. They illustrate; what the bundle gets wrong is measured by training.evaluate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from serving.bundle import BundleError
from serving.decision import Verdicts
from serving.runtime import Model
from training.checkpoint import RunError, read_config
from training.datasets import DataError, Images, load_source
from training.evaluate import known_and_unknown


def write_samples(run: Path, bundle: Path, out: Path) -> None:
    """Write known.png and unknown.png, whole or not at all."""
    config = read_config(run)
    source = load_source(config.preset.dataset, config.preset.image, config.data)
    known, unknown = known_and_unknown(source, config)
    model = Model.load(bundle, provider="cpu")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _save(known, _first_right(known, model.predict(known.pixels), model.manifest.labels), fresh / "known.png")
        if len(unknown):
            _save(unknown, _first(~model.predict(unknown.pixels).known), fresh / "unknown.png")
        fresh.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _first_right(images: Images, verdicts: Verdicts, labels: tuple[str, ...]) -> int:
    guesses = np.array(labels)[verdicts.class_id]
    return _first(verdicts.known & (guesses == images.labels))


def _first(wanted: np.ndarray) -> int:
    """The first True, or simply the first image where there is none."""
    return int(wanted.argmax())


def _save(images: Images, number: int, path: Path) -> None:
    pixels = images.pixels[number]
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.samples", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--bundle", type=Path, help="default: RUN/bundle")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    try:
        write_samples(chosen.run, chosen.bundle or chosen.run / "bundle", chosen.out)
    except (RunError, DataError, BundleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
