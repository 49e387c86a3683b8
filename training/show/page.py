"""A run on one self-contained page: RUN/report.html."""

import base64
import io
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import roc_curve

from serving.bundle.atomic import replace_file
from serving.bundle.decision import Verdicts
from serving.bundle.own_scores import threshold
from serving.bundle.run_verdict import PARTS
from serving.bundle.sections import ImageSpec
from training.data.images import Images, picture
from training.data.reread import reread
from training.measure.comparison import decision_rows
from training.measure.diagnosis import confusion_matrix, diagnose
from training.measure.evaluation import Evaluation
from training.show import plots
from training.show.adapters import gain_rows, verdict_on
from training.show.embedding_map import embedding_map
from training.show.evidence import EvidencePictures, ExplainedPhoto
from training.store.checkpoint import CONFIG
from training.store.history import PHASES, History

PAGE = "report.html"
MOST_MISTAKES = 12
LARGEST_SIDE = 96
SMALL_SIDE, WEBP_QUALITY = 64, 60
"""Of the pictures on the map."""
THUMBNAIL = ImageSpec(height=LARGEST_SIDE, width=LARGEST_SIDE, mode="RGB")
"""The size in which photos are shown, of which a run holds only encoded vectors."""


def write_page(folder: Path, evaluation: Evaluation, result: dict[str, Any], map_method: str = "pca") -> Path:
    """Write RUN/report.html from an evaluation and its metrics, with a map by pca or umap; returns the file."""
    history = History(folder)
    epochs, run, served = history.epochs, evaluation.run, evaluation.is_served
    found = diagnose(evaluation)
    capacity = found.capacity
    tall = 1.6 + 0.19 * (len(capacity.layers) if capacity else 0)
    page = _template().render(
        title=run.title + ("" if served else f", decided by {result['prediction']}"),
        result=result,
        parts=PARTS,
        config=run.config,
        diagnosis=found,
        # Only the served rule has the measurements that all decisions need.
        decisions=list(decision_rows(run, evaluation.measurements, evaluation.class_ids)) if served else [],
        pictures=dict(_pictures(evaluation, result)),
        first_use=_svg("first_use", plots.first_use(capacity), tall) if capacity else "",
        usage=_svg("usage", plots.usage(capacity), tall) if capacity else "",
        losses=_svg("losses", plots.losses_per_task(found)),
        theorems=_svg("theorems", plots.theorems(found.bounds)),
        curves=[_svg(phase, plots.curves(epochs, phase)) for phase in PHASES if phase in {e.phase for e in epochs}],
        adapters_verdict=verdict_on(gain) if (gain := result["adapters"]) else "",
        adapter_rows=list(gain_rows(gain)) if gain else [],
        map=embedding_map(evaluation, _small_url, map_method),
        map_method=map_method,
        mistakes=list(_mistakes(evaluation)),
        commands=[shlex.join(words) for words in history.commands],
        configuration=(folder / CONFIG).read_text(encoding="utf-8"),
        metrics=json.dumps(result, indent=2),
    )
    replace_file(folder / PAGE, page.encode())
    return folder / PAGE


def _template() -> Any:
    loader = PackageLoader("training.show", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters["share"] = lambda share: "-" if share is None else f"{share:.3f}"
    environment.filters["percent"] = lambda share: "-" if share is None else f"{100 * share:.1f}"
    return environment.get_template("page.html")


def _svg(name: str, draw: plots.Draw, height: float = 3.3) -> Markup:
    return Markup(plots.svg(name, draw, height))


def _pictures(evaluation: Evaluation, result: dict[str, Any]) -> Iterator[tuple[str, Markup]]:
    verdicts, rule, labels = evaluation.verdicts, evaluation.run.rule, evaluation.run.config.labels
    between_classes = confusion_matrix(evaluation.class_ids, verdicts.class_id, len(labels))
    # The unknown score of the served rule is -log10 of the p-value already.
    known, unknown = (
        each.unknown_score if evaluation.is_served else np.asarray(-np.log10(each.p_value))
        for each in (verdicts, evaluation.unknown_verdicts)
    )
    lines = dict(_roc_lines(evaluation))
    bold = next(iter(lines)) if len(evaluation.unknown) else None
    draws = {
        "over_time": plots.over_time(result["after_each_task"]),
        "confusion": plots.confusion(between_classes, labels, "Classes: images of each true class"),
        "scores": plots.scores(known, unknown, threshold(rule.alpha)),
        "reliability": plots.reliability(verdicts.probability.max(axis=1), verdicts.class_id == evaluation.class_ids),
    }
    if lines:
        draws["roc"] = plots.roc(lines, bold)
    for name, draw in draws.items():
        yield name, _svg(name, draw, height=4.4 if name == "confusion" else 3.3)


def _roc_lines(evaluation: Evaluation) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Known against unknown images, if there are any, then each task against the others; foreign is positive."""
    verdicts = evaluation.verdicts
    if len(evaluation.unknown):
        scores = np.concatenate([verdicts.unknown_score, evaluation.unknown_verdicts.unknown_score])
        foreign = np.repeat([0, 1], [len(evaluation.known), len(evaluation.unknown)])
        yield "all tasks against unknown", roc_curve(foreign, scores)[:2]
    for task in range(verdicts.task_unknown_score.shape[1]):
        foreign = evaluation.tasks != task
        if foreign.any() and not foreign.all():
            yield f"task {task} against the others", roc_curve(foreign, verdicts.task_unknown_score[:, task])[:2]


def _mistakes(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    known, unknown, labels = evaluation.verdicts, evaluation.unknown_verdicts, np.array(evaluation.run.config.labels)
    confidence = known.probability.max(axis=1)
    # The evidence is for the served decision.
    maps = EvidencePictures.of(evaluation.run) if evaluation.is_served else None
    answers = [f"{label}, {share:.2f}" for label, share in zip(labels[known.class_id], confidence, strict=True)]
    wrong = known.class_id != evaluation.class_ids
    why = _why(maps, evaluation.known, known)
    yield _kind("wrong class, with its confidence", evaluation.known, answers, wrong, -confidence, why)
    answers = [f"unknown, p {p:.3f}" for p in known.p_value]
    title = "known but called unknown, with its p-value"
    yield _kind(title, evaluation.known, answers, ~known.known, known.p_value, why)
    answers = [f"{label}, p {p:.2f}" for label, p in zip(labels[unknown.class_id], unknown.p_value, strict=True)]
    title = "never learned but accepted as a class, with its p-value"
    why = _why(maps, evaluation.unknown, unknown)
    yield _kind(title, evaluation.unknown, answers, unknown.known, -unknown.p_value, why)


def _why(maps: EvidencePictures | None, images: Images, verdicts: Verdicts) -> Callable[[int], ExplainedPhoto | None]:
    """Makes a picture of the evidence for an image's answer."""

    def picture_of(place: int) -> ExplainedPhoto | None:
        if maps is None:
            return None
        one, class_id = images.at(np.array([place])), int(verdicts.class_id[place])
        return maps.over(one, class_id, LARGEST_SIDE, unknown=not bool(verdicts.known[place]))

    return picture_of


def _kind(
    title: str,
    images: Images,
    answers: Sequence[str],
    chosen: NDArray[np.bool_],
    order: NDArray[np.floating[Any]],
    why: Callable[[int], ExplainedPhoto | None],
) -> dict[str, Any]:
    """Mistakes of one kind: how many there are, and the most confident ones, with the image as a data URL."""
    places = chosen.nonzero()[0]
    first = places[order[places].argsort(kind="stable")][:MOST_MISTAKES]
    shown = [
        {
            "picture": _data_url(images.at(np.array([place]))),
            "true": str(images.labels[place]),
            "answer": answers[place],
            "evidence": None if (found := why(int(place))) is None else _png_url(found.picture),
            "exact": found is None or found.exact,
        }
        for place in first
    ]
    return {"title": title, "count": len(places), "shown": shown}


def _data_url(image: Images) -> str:
    """A single image; a grey square if its file is gone."""
    return _png_url(_shown(image, LARGEST_SIDE))


def _small_url(image: Images) -> str:
    """The same in one or two kilobytes, for pages with many of them."""
    small = _shown(image, SMALL_SIDE)
    content = io.BytesIO()
    # Few pixels are smaller and sharp without loss.
    small.save(content, "WEBP", lossless=max(small.size) < SMALL_SIDE, quality=WEBP_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()


def _shown(image: Images, side: int) -> Image.Image:
    pixels, _ = reread(image, THUMBNAIL)
    small = picture(pixels[0] if len(pixels) else np.full(THUMBNAIL.shape, 128, np.uint8))
    small.thumbnail((side, side))
    return small


def _png_url(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
