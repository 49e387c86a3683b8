"""Plots of a run. A plot is a function that draws into given axes; figures are saved to a file or as SVG.

On the report page, INK and LINE become CSS variables, so that plots follow its light or dark colours.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from training.measure.bounds import BoundCheck
from training.measure.capacity import Capacity
from training.measure.diagnosis import Diagnosis
from training.store.checkpoint import RunError
from training.store.history import Epoch

Floats = NDArray[np.floating[Any]]
Draw = Callable[[Axes], None]
Content = ParamSpec("Content")

INK, LINE, WP, TP, KNOWN, UNKNOWN = "#123454", "#a0a1a2", "#2a9d8f", "#e07a3f", "#3b82c4", "#d1495b"
PAGE = {INK: "var(--ink)", LINE: "var(--line)"}
LARGEST_WITH_NUMBERS = 16
LEAST_NATS, MOST_NATS = 1e-6, 1e3
"""The range of losses and bounds that is drawn."""
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "grid.color": LINE,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": INK,
    "text.parse_math": False,  # a class may be named $
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
}


@contextmanager
def _figure(draws: Sequence[Draw], width: float, height: float, columns: int = 0) -> Iterator[Figure]:
    """The plots side by side, or in the given number of columns."""
    columns = columns or len(draws)
    rows = -(-len(draws) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        for axes, draw in zip(figure.subplots(rows, columns, squeeze=False).flat, draws, strict=True):
            draw(axes)
        yield figure


def save_picture(path: Path, draws: Sequence[Draw], columns: int = 0) -> None:
    """Write the file that --out names, in the format of its suffix, on white."""
    with _figure(draws, width=5.2, height=4.4, columns=columns) as figure:
        try:
            figure.savefig(path, dpi=150, facecolor="white")
        except OSError as error:
            raise RunError(f"--out {path}: cannot be written ({error.strerror})") from error


def check_suffix(path: Path | None) -> None:
    """Raise a ValueError if there is a path and no plot can be written in its format."""
    kinds = sorted(f".{kind}" for kind in Figure().canvas.get_supported_filetypes())
    if path is not None and path.suffix.lower() not in kinds:
        raise ValueError(f"--out: {str(path)!r} ends in {path.suffix!r}; allowed: {', '.join(kinds)}")


def svg(name: str, draw: Draw, height: float = 3.3) -> str:
    """An <svg> element in the colours of the page around it; `name` keeps its ids unique."""
    with _figure([draw], width=4.6, height=height) as figure, mpl.rc_context({"svg.hashsalt": name}):
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    picture = text.getvalue()
    for colour, variable in PAGE.items():
        picture = picture.replace(colour, variable)
    return picture[picture.index("<svg") :]


def drawing(plot: Callable[Concatenate[Axes, Content], None]) -> Callable[Content, Draw]:
    """A decorator: called with everything but its axes, the function returns the plot."""
    return lambda *content, **named: lambda axes: plot(axes, *content, **named)


def task_colours(count: int) -> list[Any]:
    if count <= 10:
        return list(mpl.colormaps["tab10"].colors[:count])  # type: ignore[attr-defined]
    return list(mpl.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


@drawing
def losses_per_task(axes: Axes, diagnosis: Diagnosis) -> None:
    """The loss of each task in nats, split into WP and TP, with the accuracy that each of them costs."""
    tested = [(task, each) for task, each in enumerate(diagnosis.tasks) if each is not None]
    places = [task for task, _ in tested]
    wp, tp = (np.array([getattr(each, name) for _, each in tested]) for name in ("nats_wp", "nats_tp"))
    axes.bar(places, wp, color=WP, label="WP: class within its task")
    bars = axes.bar(places, tp, bottom=wp, color=TP, label="TP: which task")
    for name, colour, height in (("lost_to_wp", WP, 2), ("lost_to_tp", TP, 11)):
        shares = [f"{100 * getattr(each, name):.1f} %" for _, each in tested]
        axes.bar_label(bars, shares, padding=height, fontsize=7.5, color=colour)
    axes.set(xlabel="task", ylabel="loss of CIL, nats")
    axes.set_title("What limits each task (numbers: accuracy lost to it)", pad=20)
    axes.set_xticks(range(len(diagnosis.tasks)))
    axes.margins(y=0.2)
    _legend_above(axes)


@drawing
def confusion(axes: Axes, matrix: NDArray[np.integer], names: Sequence[str], title: str) -> None:
    """Rows are true, columns are predicted; shares of a row."""
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap=_transparent_to(KNOWN), vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="true", title=title)
    if len(names) <= LARGEST_WITH_NUMBERS:
        axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        for row, column in np.argwhere(matrix):
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=7)


@drawing
def theorems(axes: Axes, checks: Sequence[BoundCheck]) -> None:
    """The loss that each theorem bounds, and its bound: median and middle 80 % of the images."""
    for row, check in enumerate(checks):
        for values, colour, shift in ((check.measured, KNOWN, -0.16), (check.bound, TP, 0.16)):
            low, median, high = np.clip(np.quantile(values, (0.1, 0.5, 0.9)), LEAST_NATS, MOST_NATS)
            axes.plot([low, high], [row + shift] * 2, color=colour, linewidth=4, alpha=0.5, solid_capstyle="round")
            axes.plot(median, row + shift, "o", color=colour, markersize=5)
        axes.plot([check.guess] * 2, [row - 0.35, row + 0.35], color=INK, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(checks)), [f"{check.theorem}\n{check.statement}" for check in checks], fontsize=7)
    axes.set(xscale="log", xlim=(LEAST_NATS / 2, MOST_NATS * 2), xlabel="nats, cut off at both ends")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.invert_yaxis()
    axes.set_title("The theorems (dot: median, line: 80 % of the images)", pad=20, loc="right")
    dots = [Line2D([], [], color=c, marker="o", label=name) for c, name in ((KNOWN, "measured"), (TP, "bound"))]
    _legend_above(axes, [*dots, Line2D([], [], color=INK, linestyle=":", label="a guess")])


def _transparent_to(colour: str) -> LinearSegmentedColormap:
    """From transparent to a colour on which numbers can be read."""
    rgb = mpl.colors.to_rgb(colour)
    return LinearSegmentedColormap.from_list("share", [(*rgb, 0.0), (*rgb, 0.65)])


@drawing
def first_use(axes: Axes, capacity: Capacity) -> None:
    """For each layer, the share that each task was the first to use, and the share that is free."""
    layers = [*capacity.layers, capacity.whole]
    names = [layer.name for layer in layers]
    left = np.zeros(len(layers))
    tasks = len(capacity.whole.used)
    for task, colour in enumerate(task_colours(tasks)):
        widths = np.array([layer.first_used[task] for layer in layers])
        label = f"task {task}" if tasks <= 10 or task in (0, tasks - 1) else None
        axes.barh(names, widths, left=left, color=colour, label=label)
        left += widths
    axes.barh(names, 1 - left, left=left, color=LINE, alpha=0.25, label="free")
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel=f"share of {capacity.of}, by the task that used it first")
    axes.set_title("How full the network is", pad=20 if tasks <= 5 else 32)
    axes.tick_params(axis="y", labelsize=7)
    _legend_above(axes)


@drawing
def usage(axes: Axes, capacity: Capacity) -> None:
    """For each layer, the share that each task uses."""
    layers = [*capacity.layers, capacity.whole]
    shares = np.array([layer.used for layer in layers])
    tasks = shares.shape[1]
    axes.imshow(shares, cmap=_transparent_to(KNOWN), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(layers)), [layer.name for layer in layers], fontsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="task", title=f"% of each layer's {capacity.of} that each task uses")
    if tasks <= 20:
        axes.set_xticks(range(tasks))
        for (row, column), share in np.ndenumerate(shares):
            size = 7 if tasks <= 10 else 5
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=size)


def _legend_above(axes: Axes, handles: Sequence[Line2D] | None = None) -> None:
    axes.legend(
        handles=handles, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 0.98), columnspacing=0.8, handlelength=1
    )


@drawing
def curves(axes: Axes, epochs: Sequence[Epoch], phase: str) -> None:
    """The loss of every epoch of a phase, one line per task."""
    lines: dict[int, list[Epoch]] = defaultdict(list)
    for epoch in epochs:
        if epoch.phase == phase:
            lines[epoch.task].append(epoch)
    for (task, line), colour in zip(sorted(lines.items()), task_colours(len(lines)), strict=True):
        axes.plot([e.epoch for e in line], [e.loss for e in line], color=colour, label=f"task {task}", marker=".")
    axes.set(xlabel="epoch", ylabel="mean loss", title=f"Learning: {phase}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True)
    axes.legend(ncols=2)


@drawing
def scores(axes: Axes, known: Floats, unknown: Floats, threshold: float) -> None:
    """Histograms of the unknown scores of known and unknown images; the last bar holds everything beyond the axis."""
    end = max(float(np.quantile(np.concatenate([known, unknown]), 0.98)), 2 * threshold)
    edges = np.linspace(0, end, 36).tolist()
    for values, colour, name in ((known, KNOWN, "known"), (unknown, UNKNOWN, "unknown")):
        if len(values):
            label = f"{name}, {len(values)} images"
            weights = np.full(len(values), 1 / len(values))
            axes.hist(np.clip(values, 0, end), edges, weights=weights, color=colour, alpha=0.55, label=label)
    axes.axvline(threshold, color=INK, linestyle="--", linewidth=1, label="above: unknown")
    axes.set(xlabel="unknown score, -log10 of the p-value", ylabel="share of images")
    axes.set_title("Scores of known and unknown images", pad=20)
    _legend_above(axes)


@drawing
def roc(axes: Axes, lines: Mapping[str, tuple[Floats, Floats]], bold: str | None) -> None:
    """ROC curves by name: the true-positive rate over the false-positive rate."""
    thin = [name for name in lines if name != bold]
    for name, colour in zip(thin, task_colours(len(thin)), strict=True):
        axes.plot(*lines[name], color=colour, linewidth=1, label=name)
    if bold is not None:
        axes.plot(*lines[bold], color=UNKNOWN, linewidth=2.5, label=bold)
    axes.plot([0, 1], [0, 1], color=LINE, linestyle=":", linewidth=1)
    axes.set(xlabel="share of in-distribution images rejected", ylabel="share of foreign images rejected")
    axes.set_title("ROC")
    axes.legend(loc="lower right")


@drawing
def over_time(axes: Axes, accuracies: Sequence[Mapping[str, float | None]]) -> None:
    """Accuracy over all tasks learned by then, after each task."""
    # Later lines are dotted, so that the ones below them stay visible.
    for name, colour, style in (("til", WP, "o-"), ("cil", KNOWN, "o-"), ("tp", TP, ".:")):
        values = [each[f"{name}_accuracy"] for each in accuracies]
        shown = [np.nan if value is None else 100 * value for value in values]
        axes.plot(range(len(shown)), shown, style, color=colour, markersize=5, label=name.upper())
    # No accuracy is above 100 %, and a range of at least ten points keeps small losses small.
    axes.set(xlabel="after task", ylabel="accuracy, %", title="After each task")
    axes.set_ylim(bottom=min(90.0, axes.get_ylim()[0]), top=100.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True)
    axes.legend()


@drawing
def reliability(axes: Axes, confidence: Floats, right: NDArray[np.bool_], bins: int = 10) -> None:
    """Accuracy of the answers by confidence; on the diagonal they are equal."""
    place = np.clip((confidence * bins).astype(int), 0, bins - 1)
    used, counts = np.unique(place, return_counts=True)
    accuracy = [right[place == number].mean() for number in used]
    bars = axes.bar((used + 0.5) / bins, accuracy, width=0.9 / bins, color=KNOWN, alpha=0.7)
    axes.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
    axes.bar_label(bars, counts, fontsize=7)
    axes.set(xlim=(0, 1), ylim=(0, 1.08), xlabel="confidence", ylabel="share of right answers")
    axes.set_title("Confidence, if known, against accuracy (CIL; numbers: images)")
