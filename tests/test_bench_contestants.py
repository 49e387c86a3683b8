"""The service benchmark compares servers that do the same work per image."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.bundle.errors import ImageError
from tests.benchmarks.bare import Answering
from tests.benchmarks.bare_bentoml import Stock
from tests.helpers_serving import image_bytes, write_bundle


def test_stock_bentoml_decodes_images_as_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUNDLE", str(write_bundle(tmp_path / "bundle")))
    stock, answering = Stock(), Answering()
    file = tmp_path / "image.png"
    file.write_bytes(image_bytes((0, 0, 255)))
    assert stock.predict(image=file) == answering.answer(file.read_bytes())
    # Pillow alone would open it.
    file.write_bytes(image_bytes(kind="GIF"))
    with pytest.raises(ImageError, match="not a supported image"):
        stock.predict(image=file)
