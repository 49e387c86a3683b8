"""A few test images to try a bundle with: `python -m training.samples RUN --out FOLDER`.

One of each class (of the first ten), learned or not, named by its label: the first that the bundle answers as it
should. They illustrate; what the bundle gets wrong is measured by training.evaluate.
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

from serving.layout import BundleError
from serving.runtime import Model
from training.checkpoint import RunError, read_config
from training.images import DataError, Images
from training.sources import Sources

MOST = 10


def write_samples(run: Path, bundle: Path, out: Path) -> None:
    """Write LABEL.png for each class, all of them or none."""
    config = read_config(run)
    source, _ = Sources(config).test_images()
    model = Model.load(bundle, provider="cpu")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for label in source.classes[:MOST]:
            images = source.test.of([label])
            _save(images, _first_answered_right(images, label, model), fresh / f"{label}.png")
        fresh.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _first_answered_right(images: Images, label: str, model: Model) -> int:
    """Where there is none, simply the first."""
    verdicts = model.predict(images.pixels)
    guesses = np.array(model.manifest.labels)[verdicts.class_id]
    right = verdicts.known & (guesses == label) if label in model.manifest.labels else ~verdicts.known
    return int(right.argmax())


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
