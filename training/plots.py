"""Pictures of a run, each drawn into axes that it is given; a figure is saved for paper or for a page.

On a page a picture takes the page's colours, light or dark: two colours stand for its ink and its lines.
"""

from __future__ import annotations

import argparse
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from training.bounds import Claim
from training.capacity import Capacity
from training.diagnosis import Diagnosis
from training.history import Epoch

Floats = NDArray[np.floating[Any]]
Draw = Callable[[Axes], None]

INK, LINE, WP, TP, KNOWN, UNKNOWN = "#123454", "#a0a1a2", "#2a9d8f", "#e07a3f", "#3b82c4", "#d1495b"
PAGE = {INK: "var(--ink)", LINE: "var(--line)"}
LARGEST_WITH_NUMBERS = 16
LEAST_NATS, MOST_NATS = 1e-6, 1e3
"""What is drawn of losses and of bounds on them."""
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
    "text.parse_math": False,  # a class may be called $
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
}


@contextmanager
def _figure(draws: Sequence[Draw], width: float, height: float, columns: int = 0) -> Iterator[Figure]:
    """The pictures side by side, or in so many columns."""
    columns = columns or len(draws)
    rows = -(-len(draws) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        for axes, draw in zip(figure.subplots(rows, columns, squeeze=False).flat, draws, strict=True):
            draw(axes)
        yield figure


def save_picture(path: Path, draws: Sequence[Draw], columns: int = 0) -> None:
    """A file of the kind that its name says, on white."""
    with _figure(draws, width=5.2, height=4.4, columns=columns) as figure:
        figure.savefig(path, dpi=150, facecolor="white")


def picture(text: str) -> Path:
    """A file name on a command line that says what kind of picture is wanted."""
    path = Path(text)
    if path.suffix.lower() not in (kinds := sorted(f".{kind}" for kind in Figure().canvas.get_supported_filetypes())):
        raise argparse.ArgumentTypeError(f"{text!r} ends in {path.suffix!r}; allowed: {', '.join(kinds)}")
    return path


def svg(name: str, draw: Draw, height: float = 3.3) -> str:
    """An <svg> element in the colours of the page that holds it; `name` keeps its ids apart from others'."""
    with _figure([draw], width=4.6, height=height) as figure, mpl.rc_context({"svg.hashsalt": name}):
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    picture = text.getvalue()
    for colour, variable in PAGE.items():
        picture = picture.replace(colour, variable)
    return picture[picture.index("<svg") :]


def task_colours(count: int) -> list[Any]:
    if count <= 10:
        return list(mpl.colormaps["tab10"].colors[:count])  # type: ignore[attr-defined]
    return list(mpl.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def held_back(diagnosis: Diagnosis) -> Draw:
    """Each task's loss in nats, of WP and of TP, with the accuracy that each of them costs."""

    def draw(axes: Axes) -> None:
        tested = [(task, each) for task, each in enumerate(diagnosis.tasks) if each is not None]
        places = [task for task, _ in tested]
        wp, tp = (np.array([getattr(each, name) for _, each in tested]) for name in ("nats_wp", "nats_tp"))
        axes.bar(places, wp, color=WP, label="WP: class within its task")
        axes.bar(places, tp, bottom=wp, color=TP, label="TP: which task")
        for task, each in tested:
            top = (task, each.nats_wp + each.nats_tp)
            for share, colour, height in ((each.lost_to_wp, WP, 2), (each.lost_to_tp, TP, 11)):
                axes.annotate(
                    f"{100 * share:.1f} %",
                    top,
                    (0, height),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7.5,
                    color=colour,
                )
        axes.set(xlabel="task", ylabel="loss of CIL, nats")
        axes.set_title("What holds each task back (numbers: accuracy lost to it)", pad=20)
        axes.set_xticks(range(len(diagnosis.tasks)))
        axes.margins(y=0.2)
        _legend_above(axes)

    return draw


def confusion(matrix: NDArray[np.integer], names: Sequence[str], title: str) -> Draw:
    """Rows are true, columns are said; shares of a row."""

    def draw(axes: Axes) -> None:
        shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        axes.imshow(shares, cmap=_see_through(KNOWN), vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="said", ylabel="true", title=title)
        if len(names) <= LARGEST_WITH_NUMBERS:
            axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0)
            axes.set_yticks(range(len(names)), names)
            for row, column in np.argwhere(matrix):
                axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=7)

    return draw


def theorems(claims: Sequence[Claim]) -> Draw:
    """What images lose by each theorem's measure, and what it allows: the middle 80 % of them, and the median."""

    def draw(axes: Axes) -> None:
        for row, claim in enumerate(claims):
            for values, colour, shift in ((claim.measured, KNOWN, -0.16), (claim.bound, TP, 0.16)):
                low, median, high = np.clip(np.quantile(values, (0.1, 0.5, 0.9)), LEAST_NATS, MOST_NATS)
                axes.plot([low, high], [row + shift] * 2, color=colour, linewidth=4, alpha=0.5, solid_capstyle="round")
                axes.plot(median, row + shift, "o", color=colour, markersize=5)
            axes.plot([claim.guess] * 2, [row - 0.35, row + 0.35], color=INK, linestyle=":", linewidth=1)
        axes.set_yticks(range(len(claims)), [f"{claim.theorem}\n{claim.says}" for claim in claims], fontsize=7)
        axes.set(xscale="log", xlim=(LEAST_NATS / 2, MOST_NATS * 2), xlabel="nats, cut off at both ends")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.invert_yaxis()
        axes.set_title("The theorems (dot: median, line: 80 % of the images)", pad=20, loc="right")
        handles = [
            Line2D([], [], color=KNOWN, marker="o", label="measured"),
            Line2D([], [], color=TP, marker="o", label="bound"),
            Line2D([], [], color=INK, linestyle=":", label="a guess"),
        ]
        _legend_above(axes, handles)

    return draw


def _see_through(colour: str) -> LinearSegmentedColormap:
    """From nothing, which has the colour of the page, to a colour that numbers can be read on."""
    rgb = mpl.colors.to_rgb(colour)
    return LinearSegmentedColormap.from_list("share", [(*rgb, 0.0), (*rgb, 0.65)])


def room(capacity: Capacity) -> Draw:
    """Each layer from the bottom up: what each task was the first to use, and what is free."""

    def draw(axes: Axes) -> None:
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

    return draw


def use(capacity: Capacity) -> Draw:
    """Each layer from the bottom up: how much of it each task uses, whoever else does."""

    def draw(axes: Axes) -> None:
        layers = [*capacity.layers, capacity.whole]
        shares = np.array([layer.used for layer in layers])
        tasks = shares.shape[1]
        axes.imshow(shares, cmap=_see_through(KNOWN), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_yticks(range(len(layers)), [layer.name for layer in layers], fontsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="task", title=f"% of each layer's {capacity.of} that each task uses")
        if tasks <= 20:
            axes.set_xticks(range(tasks))
            for (row, column), share in np.ndenumerate(shares):
                size = 7 if tasks <= 10 else 5
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=size)

    return draw


def _legend_above(axes: Axes, handles: Sequence[Line2D] | None = None) -> None:
    """Where no bar is."""
    axes.legend(
        handles=handles, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 0.98), columnspacing=0.8, handlelength=1
    )


def curves(epochs: Sequence[Epoch], phase: str) -> Draw:
    """The loss of every epoch of a phase, a line for each task."""

    def draw(axes: Axes) -> None:
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

    return draw


def scores(known: Floats, unknown: Floats, threshold: float) -> Draw:
    """How unknown known and unknown images look; what lies beyond the axis is in the last bar."""

    def draw(axes: Axes) -> None:
        end = max(float(np.quantile(np.concatenate([known, unknown]), 0.98)), 2 * threshold)
        edges = np.linspace(0, end, 36).tolist()
        for values, colour, name in ((known, KNOWN, "known"), (unknown, UNKNOWN, "unknown")):
            if len(values):
                label = f"{name}, {len(values)} images"
                weights = np.full(len(values), 1 / len(values))
                axes.hist(np.clip(values, 0, end), edges, weights=weights, color=colour, alpha=0.55, label=label)
        axes.axvline(threshold, color=INK, linestyle="--", linewidth=1, label="above: called unknown")
        axes.set(xlabel="unknown score, -log10 of the p-value", ylabel="share of images")
        axes.set_title("Scores of known and unknown images", pad=20)
        _legend_above(axes)

    return draw


def roc(lines: Mapping[str, tuple[Floats, Floats]], bold: str | None) -> Draw:
    """Each line's share of positives found over the share of negatives taken for positive."""

    def draw(axes: Axes) -> None:
        thin = [name for name in lines if name != bold]
        for name, colour in zip(thin, task_colours(len(thin)), strict=True):
            axes.plot(*lines[name], color=colour, linewidth=1, label=name)
        if bold is not None:
            axes.plot(*lines[bold], color=UNKNOWN, linewidth=2.5, label=bold)
        axes.plot([0, 1], [0, 1], color=LINE, linestyle=":", linewidth=1)
        axes.set(xlabel="share of in-distribution images rejected", ylabel="share of foreign images rejected")
        axes.set_title("ROC")
        axes.legend(loc="lower right")

    return draw


def over_time(accuracies: Sequence[Mapping[str, float | None]]) -> Draw:
    """Accuracy over all tasks learned by then, after each task."""

    def draw(axes: Axes) -> None:
        # The last ones are drawn so that those they cover are still seen.
        for name, colour, style in (("til", WP, "o-"), ("cil", KNOWN, "o-"), ("tp", TP, ".:")):
            values = [each[f"{name}_accuracy"] for each in accuracies]
            shown = [np.nan if value is None else 100 * value for value in values]
            axes.plot(range(len(shown)), shown, style, color=colour, markersize=5, label=name.upper())
        axes.set(xlabel="after task", ylabel="accuracy, %", title="After each task")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True)
        axes.legend()

    return draw


def reliability(confidence: Floats, right: NDArray[np.bool_], bins: int = 10) -> Draw:
    """How often an answer of a given confidence is right; on the diagonal confidence is honest."""

    def draw(axes: Axes) -> None:
        place = np.clip((confidence * bins).astype(int), 0, bins - 1)
        used = np.unique(place)
        accuracy = [right[place == number].mean() for number in used]
        axes.bar((used + 0.5) / bins, accuracy, width=0.9 / bins, color=KNOWN, alpha=0.7)
        axes.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
        for number, height in zip(used, accuracy, strict=True):
            count = int((place == number).sum())
            axes.annotate(str(count), ((number + 0.5) / bins, height), ha="center", va="bottom", fontsize=7)
        axes.set(xlim=(0, 1), ylim=(0, 1.08), xlabel="confidence", ylabel="share of right answers")
        axes.set_title("Confidence against accuracy (CIL; numbers: images)")

    return draw
