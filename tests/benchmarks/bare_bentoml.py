"""Stock BentoML, as its documentation shows it: an API method with an argument for a file, as a path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import bentoml
from bentoml.validators import ContentType

from tests.benchmarks.bare import Answering


@bentoml.service(name="stock", workers=1)
class Stock:
    def __init__(self) -> None:
        self.answering = Answering()

    @bentoml.api
    def predict(self, image: Annotated[Path, ContentType("image/*")]) -> dict[str, Any]:
        return self.answering.answer(image.read_bytes())
