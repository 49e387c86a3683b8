"""Draws the panels of a Grafana dashboard as a page of HTML and SVG, from what Prometheus answered to their queries.

It draws what docs/grafana-dashboard.json uses: stat, gauge, table, row, time series (stacked, filled, with a
logarithmic or a second axis, with threshold lines) and heat map, with the units, legends, overrides and places of the
file.
"""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, MARGIN, GAP, ROW, HEADER = 1400, 16, 8, 30, 56
COLUMNS = 24
TITLE, LEGEND, AXIS = 30, 20, 54
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37872d", "#fade2a", "#ca95e5")
NAMED = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
BLUES = ("#22252b", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c")
INK, FAINT, PANEL, PAPER, LINES = "#ccccdc", "#9a9aab", "#181b1f", "#111217", "#2c3036"
FONT = 'Inter, "DejaVu Sans", sans-serif'
STYLE = f"""
body {{ margin: 0; background: {PAPER}; color: {INK}; font: 13px {FONT}; }}
.head {{ position: absolute; left: {MARGIN}px; right: {MARGIN}px; top: 0; height: {HEADER}px; }}
.head {{ display: flex; align-items: center; gap: 12px; }}
.head b {{ font-size: 18px; }} .head i {{ margin-left: auto; font-style: normal; color: {FAINT}; }}
.head span {{ border: 1px solid {LINES}; border-radius: 3px; padding: 5px 9px; background: {PANEL}; }}
.head span em {{ font-style: normal; color: {FAINT}; padding-right: 8px; }}
.panel {{ position: absolute; background: {PANEL}; border: 1px solid {LINES}; border-radius: 3px; }}
.panel {{ box-sizing: border-box; overflow: hidden; }}
.panel h2 {{ font: 600 13px {FONT}; margin: 0; padding: 7px 10px 0; height: {TITLE - 7}px; white-space: nowrap; }}
.row {{ position: absolute; font-weight: 600; font-size: 15px; line-height: {ROW}px; }}
.row::before {{ content: "\\25be"; padding: 0 8px 0 4px; color: {FAINT}; }}
.big {{ position: absolute; left: 10px; top: 42px; font-weight: 600; font-size: 31px; white-space: nowrap; }}
.empty {{ position: absolute; inset: {TITLE}px 0 0; display: grid; place-items: center; color: {FAINT}; }}
.legend {{ position: absolute; left: 12px; right: 8px; bottom: 6px; line-height: {LEGEND}px; font-size: 12px; }}
.legend span {{ margin-right: 14px; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin: 0 6px 2px 0; }}
table {{ border-collapse: collapse; width: 100%; }} th {{ color: {FAINT}; }}
td, th {{ white-space: nowrap; text-align: left; padding: 6px 10px; border-bottom: 1px solid {LINES}; }}
th {{ font-weight: 400; }}
svg {{ position: absolute; left: 0; }} text {{ fill: {FAINT}; font-size: 11px; }}
"""


@dataclass(frozen=True)
class Series:
    """One line of a panel: its labels, its name in the legend, and time -> value."""

    labels: dict[str, str]
    name: str
    points: dict[float, float]


@dataclass(frozen=True)
class Span:
    """The time that all panels show."""

    start: float
    end: float


def size_of(panel: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, top, width and height in pixels."""
    place, column = panel["gridPos"], (WIDTH - 2 * MARGIN + GAP) / COLUMNS
    return (
        MARGIN + place["x"] * column,
        HEADER + place["y"] * (ROW + GAP),
        place["w"] * column - GAP,
        place["h"] * (ROW + GAP) - GAP,
    )


def draw_page(dashboard: dict[str, Any], answers: dict[int, list[Series]], span: Span) -> str:
    """The page, with the answers to the queries of each panel by its id."""
    choices = [
        (choice["label"], choice["current"].get("text", "prometheus")) for choice in dashboard["templating"]["list"]
    ]
    chips = "".join(f"<span><em>{html.escape(name)}</em>{html.escape(value)}</span>" for name, value in choices)
    minutes = round((span.end - span.start) / 60)
    head = f'<div class="head"><b>{html.escape(dashboard["title"])}</b>{chips}<i>Last {minutes} minutes</i></div>'
    panels = "".join(draw_panel(panel, answers.get(panel["id"], []), span) for panel in dashboard["panels"])
    height = max(top + height for _, top, _, height in map(size_of, dashboard["panels"])) + MARGIN
    page = f'<div id="page" style="position: relative; width: {WIDTH}px; height: {height:.0f}px">{head}{panels}</div>'
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{page}"


def draw_panel(panel: dict[str, Any], series: list[Series], span: Span) -> str:
    left, top, width, height = size_of(panel)
    place = f'style="left: {left:.1f}px; top: {top:.1f}px; width: {width:.1f}px; height: {height:.1f}px"'
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f'<div class="row" {place}>{title}</div>'
    draw = {"stat": _stat, "gauge": _gauge, "table": _table, "heatmap": _heatmap, "timeseries": _lines}[panel["type"]]
    if panel["type"] != "timeseries":
        series = [each for each in series if each.points]
    filled = any(each.points for each in series)
    body = draw(panel, series, span, width, height) if filled else '<div class="empty">No data</div>'
    return f'<div class="panel" {place}><h2>{title}</h2>{body}</div>'


def shown(value: float, unit: str = "short") -> str:
    """A value as Grafana shows it in a unit."""
    if unit == "percentunit":
        return f"{_short(100 * value)}%"
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor:
                return f"{_short(value / factor)} {name}"
        return "0 s"
    if unit == "bytes":
        base = _power(abs(value), 1024)
        return f"{_short(value / base)} {('B', 'KiB', 'MiB', 'GiB')[round(math.log(base, 1024))]}"
    if unit in ("reqps", "ops"):
        return f"{_short(value)} {'req/s' if unit == 'reqps' else 'ops/s'}"
    base = _power(abs(value), 1000)
    return _short(value / base) + ("", " K", " Mil", " Bil")[round(math.log(base, 1000))]


def _power(value: float, base: int) -> float:
    """The largest power of the base that is not larger than the value: 1 or more, and at most the third."""
    return float(base ** next(power for power in (3, 2, 1, 0) if value >= base**power or power == 0))


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _ago(seconds: float) -> str:
    if seconds < 90:
        return "a minute ago"
    return f"{round(seconds / 60)} minutes ago"


def _unit(panel: dict[str, Any], name: str = "") -> str:
    return str(_option(panel, name, "unit") or panel["fieldConfig"]["defaults"].get("unit", "short"))


def _option(panel: dict[str, Any], name: str, option: str) -> Any:
    """What the panel overrides for a series of this name."""
    for override in panel["fieldConfig"]["overrides"]:
        if _matches(override["matcher"], name):
            for change in override["properties"]:
                if change["id"] == option:
                    return change["value"]
    return None


def _matches(matcher: dict[str, str], name: str) -> bool:
    if matcher["id"] == "byRegexp":
        return re.search(matcher["options"].strip("/"), name) is not None
    return matcher["options"] == name


def _colours(panel: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The colour of each series: that of an override, or the next one of the palette."""
    overridden = [_option(panel, name, "color") for name in names]
    return [given["fixedColor"] if given else PALETTE[number % len(PALETTE)] for number, given in enumerate(overridden)]


def _last(series: Series) -> float:
    return series.points[max(series.points)]


def _stat(panel: dict[str, Any], series: list[Series], span: Span, width: float, height: float) -> str:
    (one, *_), colour = series, PALETTE[0]
    ago = _unit(panel) == "dateTimeFromNow"
    value = _ago(span.end - _last(one) / 1000) if ago else shown(_last(one), _unit(panel))
    big = f'<div class="big" style="color: {colour}">{value}</div>'
    low, high = min(one.points.values()), max(one.points.values())
    if ago or len(one.points) < 2:
        return big
    top, room = height * 0.62, height * 0.36
    places = [
        (
            width * (moment - span.start) / (span.end - span.start),
            top + room - room * 0.85 * (value - low) / ((high - low) or 1),
        )
        for moment, value in sorted(one.points.items())
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    area = f"{places[0][0]:.1f},{height:.1f} {line} {places[-1][0]:.1f},{height:.1f}"
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" style="top: 0">'
        f'<polygon points="{area}" fill="{colour}" opacity="0.18"/>'
        f'<polyline points="{line}" fill="none" stroke="{colour}" opacity="0.7"/></svg>{big}'
    )


def _gauge(panel: dict[str, Any], series: list[Series], span: Span, width: float, height: float) -> str:
    defaults, value = panel["fieldConfig"]["defaults"], _last(series[0])
    low, high = defaults["min"], defaults["max"]
    steps = [(step["value"], NAMED[step["color"]]) for step in defaults["thresholds"]["steps"]]
    colour = [colour for least, colour in steps if least is None or value >= least][-1]
    x, y, radius = width / 2, height - 26, height - TITLE - 42

    def arc(first: float, last: float, colour: str, radius: float, thick: float) -> str:
        ends = [(x - radius * math.cos(math.pi * at), y - radius * math.sin(math.pi * at)) for at in (first, last)]
        (x0, y0), (x1, y1) = ends
        path = f"M{x0:.1f},{y0:.1f}A{radius:.1f},{radius:.1f} 0 0 1 {x1:.1f},{y1:.1f}"
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'

    bounds = [*(max(low, least if least is not None else low) for least, _ in steps), high]
    rim = "".join(
        arc((first - low) / (high - low), (last - low) / (high - low), each, radius + 10, 3)
        for first, last, (_, each) in zip(bounds, bounds[1:], steps, strict=False)
    )
    share = min(max((value - low) / (high - low), 0.0), 1.0)
    bar = arc(0, share, colour, radius, 13) if share > 0 else ""
    look = f"font-size: 22px; font-weight: 600; fill: {colour}"
    text = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" style="{look}">'
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" style="top: 0">{arc(0, 1, LINES, radius, 13)}{bar}{rim}'
        f"{text}{shown(value, _unit(panel))}</text></svg>"
    )


def _table(panel: dict[str, Any], series: list[Series], span: Span, width: float, height: float) -> str:
    names = sorted({name for each in series for name in each.labels})
    rows = [[*(each.labels.get(name, "") for name in names), shown(_last(each))] for each in series]
    lines = [[f"<th>{html.escape(name)}" for name in (*names, "Value")]]
    lines += [[f"<td>{html.escape(cell)}" for cell in row] for row in rows]
    return "<table>" + "".join("<tr>" + "".join(line) for line in lines) + "</table>"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two values."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Scale:
    """Values to heights within a chart."""

    low: float
    high: float
    top: float
    bottom: float
    unit: str
    log: bool = False

    def place(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        value = math.log10(max(value, self.low)) if self.log else value
        return self.bottom - (self.bottom - self.top) * min(max((value - low) / (high - low), 0.0), 1.0)

    def marks(self) -> list[float]:
        if not self.log:
            base = _power(self.high, 1024) if self.unit == "bytes" else 1.0
            return [base * mark for mark in ticks(self.low / base, self.high / base)]
        powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        return [10.0**power for power in powers if power % (len(powers) // 6 + 1) == 0]


def _scale(
    panel: dict[str, Any], series: Sequence[Series], unit: str, top: float, bottom: float, log: bool = False
) -> _Scale:
    values = [value for each in series for value in each.points.values() if value > 0 or not log] or [1.0]
    if log:
        largest = panel["fieldConfig"]["defaults"].get("max", max(values))
        powers = math.floor(math.log10(min(values))), math.ceil(math.log10(largest))
        return _Scale(10.0 ** powers[0], 10.0 ** max(powers[1], powers[0] + 1), top, bottom, unit, log=True)
    defaults = panel["fieldConfig"]["defaults"]
    low = defaults.get("min", min(0.0, *values))
    high = defaults.get("max", (max(values) - low) * 1.08 + low)
    return _Scale(low, high if high > low else low + 1, top, bottom, unit)


def _stacked(series: Sequence[Series]) -> list[Series]:
    """Each series on top of the ones before it."""
    below: dict[float, float] = {}
    stacked = []
    for each in series:
        below = below | {moment: below.get(moment, 0.0) + value for moment, value in each.points.items()}
        stacked.append(Series(each.labels, each.name, dict(below)))
    return stacked


def _lines(panel: dict[str, Any], series: list[Series], span: Span, width: float, height: float) -> str:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    opacity = custom.get("fillOpacity", 0) / 100
    log = custom.get("scaleDistribution", {}).get("type") == "log"
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    drawn = _stacked(series) if stacked else series
    on_right = [_option(panel, each.name, "custom.axisPlacement") == "right" for each in series]
    names = [each.name for each in series]
    colours = _colours(panel, names)
    legend, legend_height = _legend(names, colours, width)
    left, right = AXIS + 8.0, width - (AXIS + 10 if any(on_right) else 12)
    top, bottom = TITLE + 8.0, height - legend_height - 28
    scales = [
        _scale(
            panel,
            [each for each, side in zip(drawn, on_right, strict=True) if side == which],
            _unit(panel, next((each.name for each, side in zip(drawn, on_right, strict=True) if side == which), "")),
            top,
            bottom,
            log,
        )
        for which in (False, True)
    ]
    shapes = []
    for number, (each, side) in reversed(list(enumerate(zip(drawn, on_right, strict=True)))):
        colour, scale = colours[number], scales[side]
        places = [
            (_across(moment, span, left, right), scale.place(value)) for moment, value in sorted(each.points.items())
        ]
        if not places:
            continue
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        below = drawn[number - 1].points if stacked and number else {}
        base = [(_across(at, span, left, right), scale.place(below.get(at, 0.0))) for at in sorted(each.points)]
        floor = " ".join(f"{x:.1f},{y:.1f}" for x, y in reversed(base))
        if opacity:
            shapes.append(f'<polygon points="{line} {floor}" fill="{colour}" opacity="{opacity}"/>')
        style = _option(panel, each.name, "custom.lineStyle") or {}
        dashes = f' stroke-dasharray="{" ".join(map(str, style["dash"]))}"' if style.get("fill") == "dash" else ""
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>')
    shapes += _threshold_lines(panel, scales[0], left, right)
    axes = _axis(scales[0], left, right, left - 6, "end") + _moments(span, left, right, bottom)
    if any(on_right):
        axes += _axis(scales[1], left, right, right + 6, "start", lines=False)
    return f'<svg width="{width:.0f}" height="{height:.0f}" style="top: 0">{axes}{"".join(shapes)}</svg>{legend}'


def _threshold_lines(panel: dict[str, Any], scale: _Scale, left: float, right: float) -> list[str]:
    """A line for each threshold of a panel that shows them as lines."""
    defaults = panel["fieldConfig"]["defaults"]
    if defaults.get("custom", {}).get("thresholdsStyle", {}).get("mode") != "line":
        return []
    return [
        f'<line x1="{left}" x2="{right}" y1="{scale.place(step["value"]):.1f}" y2="{scale.place(step["value"]):.1f}" '
        f'class="threshold" stroke="{NAMED[step["color"]]}" stroke-width="1.5"/>'
        for step in defaults["thresholds"]["steps"]
        if step["value"] is not None
    ]


def _legend(names: Sequence[str], colours: Sequence[str], width: float) -> tuple[str, float]:
    """The list below a chart, and how high it is."""
    entries = "".join(
        f'<span><i style="background: {colour}"></i>{html.escape(name)}</span> '
        for name, colour in zip(names, colours, strict=True)
    )
    lines, used = 1, 0.0
    for name in names:
        wide = 38 + 7.2 * len(name)
        lines, used = (lines + 1, wide) if used + wide > width - 20 else (lines, used + wide)
    return f'<div class="legend">{entries}</div>', lines * LEGEND + 4


def _across(moment: float, span: Span, left: float, right: float) -> float:
    return left + (right - left) * (moment - span.start) / (span.end - span.start)


def _axis(scale: _Scale, left: float, right: float, text: float, anchor: str, *, lines: bool = True) -> str:
    parts = []
    for mark in scale.marks():
        y = scale.place(mark)
        if lines:
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINES}"/>')
        label = shown(mark, scale.unit)
        parts.append(f'<text x="{text:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{label}</text>')
    return "".join(parts)


def _moments(span: Span, left: float, right: float, bottom: float) -> str:
    """The labels of the time axis: full minutes, as many as fit."""
    step = next(
        step for step in (60, 120, 300, 600, 1800, 3600) if (right - left) * step / (span.end - span.start) > 52
    )
    first = math.ceil(span.start / step) * step
    return "".join(
        f'<text x="{_across(at, span, left, right):.1f}" y="{bottom + 18:.1f}" text-anchor="middle">'
        f"{time.strftime('%H:%M', time.localtime(at))}</text>"
        for at in range(int(first), int(span.end) + 1, step)
        if left + 8 < _across(at, span, left, right) < right - 8
    )


def _heatmap(panel: dict[str, Any], series: list[Series], span: Span, width: float, height: float) -> str:
    """Buckets of a histogram, which counts everything up to its bound, over time."""
    ordered = sorted(series, key=lambda each: float(each.labels["le"].replace("+Inf", "inf")))
    moments = sorted({moment for each in ordered for moment in each.points})
    left, right, top, bottom = AXIS + 8.0, width - 12, TITLE + 8.0, height - 32
    column, row = (right - left) / max(len(moments), 1), (bottom - top) / len(ordered)
    cells, largest = [], 1e-9
    for place, each in enumerate(ordered):
        below = ordered[place - 1].points if place else {}
        for moment in moments:
            count = max(0.0, each.points.get(moment, 0.0) - below.get(moment, 0.0))
            cells.append((moment, place, count))
            largest = max(largest, count)
    shapes = []
    for moment, place, count in cells:
        if count <= 0:
            continue
        colour = BLUES[1 + min(int(count / largest * (len(BLUES) - 1)), len(BLUES) - 2)]
        x, y = _across(moment, span, left, right) - column, bottom - (place + 1) * row
        size = f'width="{column - 0.6:.1f}" height="{row - 0.6:.1f}"'
        shapes.append(f'<rect x="{max(x, left):.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
    labels = "".join(
        f'<text x="{left - 6}" y="{bottom - (place + 0.5) * row + 4:.1f}" text-anchor="end">{each.labels["le"]}</text>'
        for place, each in enumerate(ordered)
    )
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" style="top: 0">{labels}{"".join(shapes)}'
        f"{_moments(span, left, right, bottom)}</svg>"
    )
