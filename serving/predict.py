"""Answers on the command line: python -m serving.predict BUNDLE IMAGE... ; without images the bundle is checked."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.answer import Question, answer_image
from serving.errors import RequestError, UnreadableFileError
from serving.layout import BundleError
from serving.preprocess import LIMITS
from serving.runtime import Model, ProviderError
from serving.schemas import error_answer

BAD_IMAGE, BAD_BUNDLE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line per image; 1 if an image got no answer, 2 if there is nothing to answer with."""
    options = _parser().parse_args(arguments)
    try:
        model = Model.load(options.bundle)
        model.self_test()
        question = Question.ask(model, task=options.task, alpha=options.alpha, top=options.top)
    except (BundleError, ProviderError, RequestError) as error:
        print(error, file=sys.stderr)
        return BAD_BUNDLE
    answered = [_print_answer(model, path, question) for path in options.images]
    return 0 if all(answered) else BAD_IMAGE


def _print_answer(model: Model, path: Path, question: Question) -> bool:
    try:
        said = answer_image(model, _read(path), question).model_dump(mode="json")
        answered = True
    except RequestError as error:
        said = error_answer(error).model_dump(mode="json", exclude_none=True)
        answered = False
    print(json.dumps({"file": str(path), **said}), flush=True)
    return answered


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # One byte more than allowed is enough for the size to be refused.
            return file.read(LIMITS.size + 1)
    except OSError as error:
        raise UnreadableFileError("file cannot be read", got=str(error), allowed="a readable image file") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.predict", description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("images", type=Path, nargs="*", metavar="IMAGE")
    parser.add_argument("--task", type=int, help="answer within this task")
    parser.add_argument("--alpha", type=float, help="share of known images that may be called unknown")
    parser.add_argument("--top", type=int, help="how many classes to list")
    return parser


if __name__ == "__main__":
    sys.exit(main())
