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
import yaml

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


def drawn(panels: ModuleType, title: str, series: dict[str, float]) -> tuple[dict[str, Any], str]:
    """A panel of the dashboard, and its drawing with one constant series per name."""
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    (panel,) = [panel for panel in dashboard["panels"] if panel["title"] == title]
    lines = [panels.Series({}, name, {100.0: value, 190.0: value}) for name, value in series.items()]
    return panel, panels.draw_panel(panel, lines, panels.Span(100.0, 190.0))


def heights(points: str) -> set[float]:
    return {float(pair.split(",")[1]) for pair in points.split()}


def test_the_level_of_the_alarm_is_a_line_above_smaller_evidence(panels: ModuleType) -> None:
    panel, picture = drawn(panels, "Evidence for a change", {"0": 1e-6, "all": 1.0})
    (level,) = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"] if step["value"]]
    (group,) = yaml.safe_load((DOCS / "prometheus-rules.yaml").read_text())["groups"]
    (alarm,) = [rule["expr"] for rule in group["rules"] if "openworld_drift_evidence" in rule["expr"]]
    assert alarm.endswith(f"(openworld_drift_evidence) >= {level}")
    (line,) = re.findall(r'y1="([\d.]+)" y2="([\d.]+)" class="threshold"', picture)
    at_the_level, below = (heights(points) for points in re.findall(r'<polyline points="([^"]+)"', picture))
    assert at_the_level == {float(line[0])} == {float(line[1])}
    assert float(line[0]) < min(below)
    # Small evidence alone leaves the line within the chart.
    _, picture = drawn(panels, "Evidence for a change", {"0": 1e-6})
    (alone,) = re.findall(r'y1="([\d.]+)" y2="[\d.]+" class="threshold"', picture)
    assert float(alone) == pytest.approx(float(line[0]))


def test_known_and_unknown_answers_of_a_task_differ_in_colour_and_style(panels: ModuleType) -> None:
    names = [f"task {task}, known {known}" for known in ("false", "true") for task in range(7)]
    _, picture = drawn(panels, "Answers by task", dict.fromkeys(names, 1.0))
    legend = dict(map(reversed, re.findall(r'<i style="background: (#\w+)"></i>([^<]+)<', picture)))
    assert list(legend) == names
    first = [legend[name] for name in names if int(name.split()[1].strip(",")) < 5]
    colours = [tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in first]
    nearest = min(
        sum(abs(a - b) for a, b in zip(one, other, strict=True))
        for place, one in enumerate(colours)
        for other in colours[place + 1 :]
    )
    assert nearest > 80
    lines = re.findall(r'<polyline points="[^"]+" fill="none" stroke="(#\w+)" stroke-width="1.5"(.*?)/>', picture)
    assert [bool(dashes) for _, dashes in reversed(lines)] == ["false" in name for name in names]
    assert [colour for colour, _ in reversed(lines)] == list(legend.values())


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
