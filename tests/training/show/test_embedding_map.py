"""The map of the report: how many images it shows, and what lies above what."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from training.data.images import Images
from training.show.embedding_map import embedding_map

RANDOM = np.random.default_rng(0)
KNOWN, UNKNOWN = 90, 10
ADDRESS = "data:," + "x" * 94


def images(label: str, count: int) -> Images:
    return Images(RANDOM.integers(0, 256, (count, 4, 4, 1), dtype=np.uint8), np.array([label] * count))


@pytest.fixture
def evaluation() -> Any:
    """Nine classes of ten images, and ten images that were never learned."""
    return SimpleNamespace(
        known=images("learned", KNOWN),
        unknown=images("strange", UNKNOWN),
        class_ids=np.arange(KNOWN) % 9,
        run=SimpleNamespace(config=SimpleNamespace(trunk="a trunk")),
    )


def pictured(page: str) -> list[str]:
    """The titles of the points that show their image."""
    return re.findall(f'<g class="pictured"[^>]*><title>([^<]*)</title>.*?href="{ADDRESS}"', page)


def test_every_image_is_shown(evaluation: Any) -> None:
    page = embedding_map(evaluation, lambda image: ADDRESS)
    assert page.count('<g class="dot"') == len(pictured(page)) == KNOWN + UNKNOWN
    # Above all marks and names, so that nothing is drawn over it.
    assert max(page.rindex('<g class="dot"'), page.rindex("<text")) < page.index('<g class="pictured"')


@pytest.mark.parametrize(("limit", "most"), [("MOST_PICTURES", 30), ("MOST_CHARACTERS", 3050)])
def test_the_page_stays_small(evaluation: Any, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    """Images that were never learned are shown first."""
    monkeypatch.setattr(f"training.show.embedding_map.{limit}", most)
    page = embedding_map(evaluation, lambda image: ADDRESS)
    assert page.count('<g class="dot"') == KNOWN + UNKNOWN
    assert sorted(pictured(page)) == ["learned"] * 20 + ["strange, never learned"] * UNKNOWN
