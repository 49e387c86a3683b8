"""A few test images to try a bundle with: `python -m export.samples RUN --out FOLDER`.

One image of each class (of the first ten), learned or not, named by its label: the first one that the bundle answers
correctly. They are examples; `openworld evaluate` measures the errors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from training.options import CommandParser, report_errors, run_command

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from serving.bundle.model import BundleModel

MOST = 10


def write_samples(run: Path, bundle: Path, out: Path) -> None:
    """Write LABEL.png for each class, all of them or none; only a folder of PNG files is replaced."""
    from serving.bundle.directory import WriteError, fresh_directory, replace_directory
    from serving.bundle.model import BundleModel
    from training.data.images import picture
    from training.data.opening import open_sources
    from training.data.reread import reread
    from training.store.checkpoint import read_config

    if out.exists() and (not out.is_dir() or any(path.suffix != ".png" for path in out.iterdir())):
        raise WriteError(f"{out} exists and holds more than samples: choose another --out or remove it")
    config = read_config(run)
    source, _ = open_sources(config, run=run).test_images()
    model = BundleModel.load(bundle, provider="cpu")
    with fresh_directory(out.parent, out.name) as fresh:
        for label in source.classes[:MOST]:
            pixels, _ = reread(source.test.of([label]), config.preset.image)
            picture(pixels[_first_right(pixels, label, model)]).save(fresh / f"{label}.png")
        replace_directory(fresh, out)


def _first_right(pixels: NDArray[np.uint8], label: str, model: BundleModel) -> int:
    """The index of the first image with the right answer, or 0 if there is none."""
    import numpy as np

    verdicts = model.predict(pixels)
    guesses = np.array(model.manifest.labels)[verdicts.class_id]
    right = verdicts.known & (guesses == label) if label in model.manifest.labels else ~verdicts.known
    return int(right.argmax())


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("python -m export.samples", "Write a few test images to try a bundle with.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run of the digits")
    parser.add_argument("--bundle", type=Path, help="default: RUN/bundle")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write them to")
    chosen = parser.parse(arguments)

    from serving.bundle.directory import WriteError
    from serving.bundle.errors import BundleError

    bundle = chosen.bundle or chosen.run / "bundle"
    return report_errors(lambda: write_samples(chosen.run, bundle, chosen.out), BundleError, WriteError)


if __name__ == "__main__":
    sys.exit(run_command(main))
