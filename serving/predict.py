"""The command `openworld predict`, or `python -m serving.predict`: answers image files without a server.

With `--out` it answers any number of images, of a folder or of Parquet files, into one file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.bundle.command_line import ServingParser, one_of
from serving.bundle.errors import BundleError, ProviderError
from serving.bundle.model import BundleModel
from serving.bundle.pixels import LIMITS
from serving.bundle.terminal import escaped
from serving.errors import RequestError, UnreadableFileError
from serving.http.schemas import error_answer
from serving.inference.answers import DEFAULT_TOP, PredictionOptions, answer_image
from serving.settings import Settings, SettingsError

BAD_IMAGE, BAD_BUNDLE = 1, 2
STOPPED = 130


def main(arguments: Sequence[str] | None = None, program: str = "openworld predict") -> int:
    """Print one JSON line per image, or write the file of `--out`.

    Exit code 1: an image has an error; 2: the bundle, an option or the output file cannot be used.
    """
    parser = _parser(program)
    options = parser.parse(arguments)
    _check_options(parser, options)
    if options.out is not None:
        return _batch(options)
    try:
        settings = Settings.from_environment()
        model = BundleModel.load(options.paths[0], provider=settings.provider, precision=settings.precision)
        model.self_test()
        wanted = PredictionOptions.for_model(
            model, task=options.task, alpha=options.alpha, top=options.top, explain=options.explain
        )
    except (SettingsError, BundleError, ProviderError, RequestError) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return BAD_BUNDLE
    answered = [_print_answer(model, Path(path), wanted) for path in options.paths[1:]]
    return 0 if all(answered) else BAD_IMAGE


def _batch(options: argparse.Namespace) -> int:
    try:
        from serving.batch.errors import BatchError
        from serving.batch.run import BatchRequest, run_batch
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        print("error: --out needs the package pyarrow: pip install -e '.[batch]' in a checkout", file=sys.stderr)
        return BAD_BUNDLE
    *bundle, source = options.paths
    try:
        settings = Settings.from_environment()
        request = BatchRequest(
            bundle=Path(bundle[0]) if bundle else settings.bundle,
            source=source,
            out=options.out,
            column=options.column,
            keep=tuple(dict.fromkeys(options.keep)),
            task=options.task,
            alpha=options.alpha,
            top=options.top,
            workers=options.workers,
            ray=options.ray,
            overwrite=options.overwrite,
        )
        errors = run_batch(request, settings)
    except (BatchError, SettingsError, BundleError, ProviderError, RequestError) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return BAD_BUNDLE
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return STOPPED
    return BAD_IMAGE if errors else 0


def _print_answer(model: BundleModel, path: Path, options: PredictionOptions) -> bool:
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


_DESCRIPTION = """\
Classify image files and print one JSON line per file. Without images, only check the bundle.

With --out, classify any number of images into one file, with progress and time left on standard error:

  openworld predict BUNDLE FOLDER_OR_PARQUET --out answers.parquet

Without BUNDLE, OPENWORLD_BUNDLE names it. A killed run is continued by the same command. An image that cannot be
answered is a row with an error."""


def _parser(program: str) -> ServingParser:
    parser = ServingParser(program, _DESCRIPTION)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="BUNDLE IMAGE",
        help="a bundle directory, and PNG, JPEG, WebP or BMP files; with --out, a folder or a Parquet file instead",
    )
    parser.add_argument("--task", type=int, help="predict only among the classes of this task")
    parser.add_argument("--alpha", type=float, help="share of known images called unknown; default: the bundle's own")
    parser.add_argument(
        "--top", type=int, help=f"number of classes to list; default: {DEFAULT_TOP}, and with --out none"
    )
    parser.add_argument(
        "--explain",
        type=one_of("true", "png"),
        metavar="HOW",
        help="add where in an image the evidence lies: true (numbers) or png (also an image in base64); not with --out",
    )
    group = parser.add_argument_group("many images")
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="write a .parquet, .csv or .jsonl file with the answers"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the file, and begin an unfinished run again")
    group.add_argument(
        "--column", default="image", metavar="NAME", help="the column of a Parquet file with the images; default: image"
    )
    group.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME",
        help="copy this column of a Parquet file; repeatable",
    )
    group.add_argument("--workers", type=_count, help="processes that answer images; default: one per processor")
    group.add_argument("--ray", action="store_true", help="answer on the Ray cluster of RAY_ADDRESS, or on a local one")
    return parser


def _check_options(parser: ServingParser, options: argparse.Namespace) -> None:
    if options.out is not None:
        if options.explain:
            parser.error("--explain is for single images: got --out")
        if len(options.paths) > 2:
            parser.error(f"--out takes a bundle and one folder or Parquet file: got {len(options.paths)} paths")
    elif options.overwrite or options.keep or options.workers or options.ray or options.column != "image":
        parser.error("--overwrite, --column, --keep, --workers and --ray are for --out: got no --out")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a whole number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(program="python -m serving.predict"))
