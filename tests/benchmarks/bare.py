"""The work that every contestant does per image: our decoding, graph, decision and answer, and nothing else."""

from __future__ import annotations

import os
from typing import Any

from serving.bundle.model import BundleModel
from serving.bundle.pixels import decode, to_pixels
from serving.inference.answers import AnswerFormatter, PredictionOptions


class Answering:
    """An image in, the fields of an answer out; BENCH_BUNDLE names the bundle."""

    def __init__(self) -> None:
        self._model = BundleModel.load(os.environ["BENCH_BUNDLE"], provider="cpu", threads=1)
        self._formatter = AnswerFormatter(self._model.manifest)
        self._options = PredictionOptions.for_model(self._model)

    def answer(self, content: bytes) -> dict[str, Any]:
        """The answer for an image file."""
        pixels = to_pixels(decode(content), self._model.manifest.image)
        return self._formatter.fields(self._model.predict(pixels[None]), 0, self._options)
