"""Stock BentoML, as its documentation shows it: an API method with an image argument."""

from __future__ import annotations

from typing import Any

import bentoml
from PIL.Image import Image

from tests.benchmarks.bare import Answering


@bentoml.service(name="stock", workers=1)
class Stock:
    def __init__(self) -> None:
        self.answering = Answering()

    @bentoml.api
    def predict(self, image: Image) -> dict[str, Any]:
        return self.answering.answer_image(image)
