"""The command `openworld predict`, or `python -m serving.predict`: answers image files without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.bundle.errors import BundleError, ProviderError
from serving.bundle.model import Model
from serving.bundle.pixels import LIMITS
from serving.bundle.terminal import escaped
from serving.errors import RequestError, UnreadableFileError
from serving.host.command import ServingParser
from serving.http.schemas import error_answer
from serving.inference.answers import DEFAULT_TOP, PredictionOptions, answer_image
from serving.settings import Settings, SettingsError

BAD_IMAGE, BAD_BUNDLE = 1, 2


def main(arguments: Sequence[str] | None = None, program: str = "openworld predict") -> int:
    """Print one JSON line per image. Exit code 1: an image has an error; 2: the bundle or an option cannot be used."""
    options = _parser(program).parse_intermixed_args(arguments)
    try:
        settings = Settings.from_environment()
        model = Model.load(options.bundle, provider=settings.provider, precision=settings.precision)
        model.self_test()
        wanted = PredictionOptions.for_model(model, task=options.task, alpha=options.alpha, top=options.top)
    except (SettingsError, BundleError, ProviderError, RequestError) as error:
        print(escaped(error), file=sys.stderr)
        return BAD_BUNDLE
    answered = [_print_answer(model, path, wanted) for path in options.images]
    return 0 if all(answered) else BAD_IMAGE


def _print_answer(model: Model, path: Path, options: PredictionOptions) -> bool:
    try:
        fields = answer_image(model, _read(path), options).model_dump(mode="json")
        answered = True
    except RequestError as error:
        fields = error_answer(error).model_dump(mode="json", exclude_none=True)
        answered = False
    print(json.dumps({"file": str(path), **fields}), flush=True)
    return answered


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # One byte more than allowed is enough to refuse the file for its size.
            return file.read(LIMITS.size + 1)
    except OSError as error:
        raise UnreadableFileError("file cannot be read", got=str(error), allowed="a readable image file") from error


def _parser(program: str) -> ServingParser:
    description = "Classify image files and print one JSON line per file. Without images, only check the bundle."
    parser = ServingParser(program, description)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a bundle directory")
    parser.add_argument("images", type=Path, nargs="*", metavar="IMAGE", help="PNG, JPEG, WebP or BMP files")
    parser.add_argument("--task", type=int, help="predict only among the classes of this task")
    parser.add_argument("--alpha", type=float, help="share of known images called unknown; default: the bundle's own")
    parser.add_argument("--top", type=int, help=f"number of classes to list; default: {DEFAULT_TOP}")
    return parser


if __name__ == "__main__":
    sys.exit(main(program="python -m serving.predict"))
