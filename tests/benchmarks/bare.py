"""What every contestant does with an image: ours to decode, run, decide and word, and nothing around it."""

from __future__ import annotations

import os
from typing import Any

from serving.answer import Question, Wording
from serving.preprocess import decode, to_pixels
from serving.runtime import Model


class Answering:
    """An image file in, the fields of an answer out; BENCH_BUNDLE names the bundle."""

    def __init__(self) -> None:
        self._model = Model.load(os.environ["BENCH_BUNDLE"], provider="cpu", threads=1)
        self._wording = Wording(self._model.manifest)
        self._question = Question.ask(self._model)

    def answer(self, content: bytes) -> dict[str, Any]:
        pixels = to_pixels(decode(content), self._model.manifest.image)
        return self._wording.answer(self._model.predict(pixels[None]), 0, self._question)
