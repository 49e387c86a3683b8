"""A run on one page that needs nothing else, RUN/report.html: `python -m training.report_page RUN`."""

from __future__ import annotations

import base64
import io
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import roc_curve

from serving.decision import Verdicts, threshold
from training import plots
from training.checkpoint import CONFIG, RunError, replace_file
from training.compare_scores import decision_rows
from training.diagnosis import confusion_matrix, diagnose
from training.evaluate import Tested, add_unknown_option, examine_chosen, measure, run_parser
from training.history import PHASES, History
from training.images import DataError, Images

PAGE = "report.html"
MOST_MISTAKES = 12
LARGEST_SIDE = 96


@dataclass(frozen=True)
class Mistake:
    """A test image, as a data URL, with what it shows and what was said of it."""

    picture: str
    true: str
    said: str


@dataclass(frozen=True)
class Mistakes:
    """Mistakes of one kind, the surest first, and how many there are."""

    title: str
    count: int
    shown: tuple[Mistake, ...]


def write_page(folder: Path, tested: Tested, result: dict[str, Any]) -> Path:
    """Write RUN/report.html from what the run says of its test images and its metrics; the file."""
    history = History(folder)
    found = diagnose(tested)
    tall = 1.6 + 0.19 * len(found.capacity.layers)
    page = _template().render(
        title=tested.run.title + ("" if _is_served(tested) else f", read by {result['prediction']}"),
        result=result,
        config=tested.run.config,
        diagnosis=found,
        decisions=list(decision_rows(tested.run, tested.said, tested.class_ids)) if _is_served(tested) else [],
        pictures=dict(_pictures(tested, result)),
        room=Markup(plots.svg("room", plots.room(found.capacity), tall)),
        use=Markup(plots.svg("use", plots.use(found.capacity), tall)),
        held_back=Markup(plots.svg("held_back", plots.held_back(found))),
        theorems=Markup(plots.svg("theorems", plots.theorems(found.claims))),
        curves=[
            Markup(plots.svg(phase, plots.curves(history.epochs, phase)))
            for phase in PHASES
            if any(epoch.phase == phase for epoch in history.epochs)
        ],
        mistakes=list(_mistakes(tested)),
        commands=[shlex.join(words) for words in history.commands],
        configuration=(folder / CONFIG).read_text(encoding="utf-8"),
        metrics=json.dumps(result, indent=2),
    )
    replace_file(folder / PAGE, page.encode())
    return folder / PAGE


def _template() -> Any:
    loader = PackageLoader("training", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters["share"] = lambda share: "-" if share is None else f"{share:.3f}"
    environment.filters["percent"] = lambda share: "-" if share is None else f"{100 * share:.1f}"
    return environment.get_template("report_page.html")


def _pictures(tested: Tested, result: dict[str, Any]) -> Iterator[tuple[str, Markup]]:
    verdicts, rule, labels = tested.verdicts, tested.run.rule, tested.run.config.labels
    between_classes = confusion_matrix(tested.class_ids, verdicts.class_id, len(labels))
    known, unknown = (_surprise(tested, each) for each in (verdicts, tested.unknown_verdicts))
    lines = dict(_roc_lines(tested))
    bold = next(iter(lines)) if len(tested.unknown) else None
    draws = {
        "over_time": plots.over_time(result["after_each_task"]),
        "confusion": plots.confusion(between_classes, labels, "Classes: images of each true class"),
        "scores": plots.scores(known, unknown, threshold(rule.alpha)),
        "reliability": plots.reliability(verdicts.probability.max(axis=1), verdicts.class_id == tested.class_ids),
    }
    if lines:
        draws["roc"] = plots.roc(lines, bold)
    for name, draw in draws.items():
        yield name, Markup(plots.svg(name, draw, height=4.4 if name == "confusion" else 3.3))


def _is_served(tested: Tested) -> bool:
    """Whether the rule that is served decides, and not another reading."""
    return bool(tested.said)


def _surprise(tested: Tested, verdicts: Verdicts) -> plots.Floats:
    """-log10 of the p-values, which only the rule that is served has for its score."""
    return verdicts.unknown_score if _is_served(tested) else np.asarray(-np.log10(verdicts.p_value))


def _roc_lines(tested: Tested) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Known against unknown if there are unknown images, then each task against the others; foreign is positive."""
    verdicts = tested.verdicts
    if len(tested.unknown):
        scores = np.concatenate([verdicts.unknown_score, tested.unknown_verdicts.unknown_score])
        foreign = np.repeat([0, 1], [len(tested.known), len(tested.unknown)])
        yield "all tasks against unknown", roc_curve(foreign, scores)[:2]
    for task in range(verdicts.task_unknown_score.shape[1]):
        foreign = tested.tasks != task
        if foreign.any() and not foreign.all():
            yield f"task {task} against the others", roc_curve(foreign, verdicts.task_unknown_score[:, task])[:2]


def _mistakes(tested: Tested) -> Iterator[Mistakes]:
    known, unknown, labels = tested.verdicts, tested.unknown_verdicts, np.array(tested.run.config.labels)
    confidence = known.probability.max(axis=1)
    said = [f"{label}, {sure:.2f}" for label, sure in zip(labels[known.class_id], confidence, strict=True)]
    wrong = known.class_id != tested.class_ids
    yield _kind("taken for another class, with its confidence", tested.known, said, wrong, -confidence)
    said = [f"unknown, p {p:.3f}" for p in known.p_value]
    yield _kind("known but called unknown, with its p-value", tested.known, said, ~known.known, known.p_value)
    said = [f"{label}, p {p:.2f}" for label, p in zip(labels[unknown.class_id], unknown.p_value, strict=True)]
    title = "never learned but taken for a class, with its p-value"
    yield _kind(title, tested.unknown, said, unknown.known, -unknown.p_value)


def _kind(
    title: str, images: Images, said: Sequence[str], chosen: NDArray[np.bool_], order: NDArray[np.floating[Any]]
) -> Mistakes:
    places = chosen.nonzero()[0]
    first = places[order[places].argsort(kind="stable")][:MOST_MISTAKES]
    shown = tuple(Mistake(_data_url(images.pixels[place]), str(images.labels[place]), said[place]) for place in first)
    return Mistakes(title, len(places), shown)


def _data_url(pixels: NDArray[np.uint8]) -> str:
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("training.report_page", __doc__)
    add_unknown_option(parser)
    chosen = parser.parse_args(arguments)
    try:
        tested = examine_chosen(chosen)
        print(write_page(chosen.run, tested, measure(tested)))
    except (RunError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
