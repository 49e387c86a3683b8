"""The picture of the dashboard: every panel of its file is drawn at its place, with its unit and its legend."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.helpers_serving import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def panels() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("dashboard_panels", DOCS / "dashboard_panels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def answers(panels: ModuleType, panel: dict[str, Any]) -> list[Any]:
    """Two series per query, with the buckets of a histogram where the panel wants them."""
    labels = [{"le": bound, "status": bound, "name": "tiny"} for bound in ("0.5", "+Inf")]
    return [
        panels.Series(each, each["status"], {100.0 + 10 * at: 0.1 * (at + 1) for at in range(10)})
        for _ in panel.get("targets", [])
        for each in labels
    ]


def test_every_panel_is_drawn_within_the_page_and_beside_the_others(panels: ModuleType) -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    found = {panel["id"]: answers(panels, panel) for panel in dashboard["panels"]}
    page = panels.draw_page(dashboard, found, panels.Span(100.0, 190.0))
    for panel in dashboard["panels"]:
        assert page.count(f">{panel['title']}<") == 1, panel["title"]
    assert "No data" not in page
    boxes = [panels.size_of(panel) for panel in dashboard["panels"]]
    assert all(left >= 0 and left + width <= panels.WIDTH for left, _, width, _ in boxes)
    for place, (left, top, width, height) in enumerate(boxes):
        for other_left, other_top, other_width, other_height in boxes[place + 1 :]:
            beside = left + width <= other_left or other_left + other_width <= left
            assert beside or top + height <= other_top or other_top + other_height <= top
    # No coordinate is a number that an SVG cannot have.
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"\+Inf", "", page))


def test_a_panel_without_answers_says_so(panels: ModuleType) -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    page = panels.draw_page(dashboard, {}, panels.Span(0.0, 60.0))
    assert page.count("No data") == sum(panel["type"] != "row" for panel in dashboard["panels"])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.0, "s", "2 s"),
        (0.0, "s", "0 s"),
        (0.173, "percentunit", "17.3%"),
        (1536.0, "bytes", "1.5 KiB"),
        (12_345.0, "short", "12.3 K"),
        (1e-6, "short", "1e-6"),
        (3.666, "reqps", "3.67 req/s"),
    ],
)
def test_values_have_units(panels: ModuleType, value: float, unit: str, text: str) -> None:
    assert panels.shown(value, unit) == text
