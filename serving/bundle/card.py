"""The model card of a bundle: what it was learned from, how good it is, its limits, and how to make it again.

It is a function of what the version of a bundle covers, so the same content gives the same card: no time, no names of
people, no places on a machine. The header is the one that the Hugging Face Hub reads.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from serving.bundle.manifest import Manifest

MOST_LABELS = 40
"""Labels of a task that are listed."""
FEW_IMAGES = 100
"""With fewer test images than this, the card warns that figures are coarse."""
TAGS = ("image-classification", "continual-learning", "out-of-distribution-detection", "onnx", "openworld")


class Measure(NamedTuple):
    """A number of the metrics: where it is, its name, its type for the Hub, and whether it is a share."""

    path: tuple[str, ...]
    title: str
    kind: str
    share: bool = True


MEASURES = (
    Measure(("cil_accuracy",), "accuracy among all classes (CIL)", "accuracy"),
    Measure(("til_accuracy",), "accuracy with the task given (TIL)", "accuracy"),
    Measure(("tp_accuracy",), "accuracy of the task (TP)", "accuracy"),
    Measure(("ece",), "expected calibration error", "ece"),
    Measure(("forgetting_within_tasks",), "forgetting within tasks", "forgetting"),
    Measure(("lost_to_newer_classes",), "lost to newer classes", "forgetting"),
    Measure(("unknown", "auroc"), "AUROC, known against unknown", "roc_auc", share=False),
    Measure(("unknown", "accepted_known"), "known images accepted", "accuracy"),
    Measure(("unknown", "rejected_unknown"), "unknown images rejected", "recall"),
)
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def model_card(manifest: Manifest) -> str:
    """The text of `MODEL_CARD.md`: Markdown with a YAML header."""
    sections = {
        f"# {_plain(manifest.name)}": _introduction(manifest),
        "## Data": _data(manifest),
        "## Classes": _classes(manifest),
        "## Verdict": _verdict(manifest),
        "## Metrics": _metrics(manifest),
        "## Limits": _limits(manifest),
        "## How to reproduce it": _reproduction(manifest),
        "## How to use it": _use(),
    }
    text = "\n\n".join("\n".join((title, "", *lines)) for title, lines in sections.items())
    return f"{_header(manifest)}\n{text}\n"


def _header(manifest: Manifest) -> str:
    """YAML whose scalars are JSON strings and numbers, which YAML reads as they are."""
    lines = ["---", "library_name: openworld", "pipeline_tag: image-classification", "tags:"]
    lines += [f"- {tag}" for tag in TAGS]
    if measured := list(_measured(manifest)):
        lines += ["model-index:", f"- name: {_quoted(manifest.name)}", "  results:"]
        lines += ["  - task:", "      type: image-classification", "    dataset:"]
        lines += [f"      name: {_quoted(_dataset(manifest))}", f"      type: {_quoted(_dataset(manifest))}"]
        lines += ["    metrics:"]
        for measure, value in measured:
            lines += [f"    - type: {measure.kind}", f"      name: {_quoted(measure.title)}"]
            lines += [f"      value: {json.dumps(value)}"]
    return "\n".join([*lines, "---", ""])


def _introduction(manifest: Manifest) -> Iterator[str]:
    behind = f" on vectors of `{manifest.trunk.name}`" if manifest.trunk else ""
    yield (
        f"An image classifier made with openworld: {len(manifest.labels)} classes in {len(manifest.tasks)} tasks, "
        f'method `{manifest.method}`{behind}. It answers with a class, or with "unknown".'
    )
    if manifest.lessons:
        yield ""
        yield (
            f"It was taught {len(manifest.lessons)} lessons after the run. Verdict and metrics below were measured on "
            "the run, before these lessons."
        )


def _data(manifest: Manifest) -> Iterator[str]:
    memory = manifest.metrics.get("memory") or {}
    image = manifest.image
    rows = {
        "source": ", ".join(manifest.origin.data) if manifest.origin else _dataset(manifest),
        "training images": memory.get("training_images"),
        "test images": manifest.metrics.get("test_images"),
        "test images of unknown classes": manifest.metrics.get("unknown_images"),
        "stored training images": memory.get("buffer_images"),
        "pixels that the model reads": f"{image.width} x {image.height}, {image.mode}",
    }
    yield from _table(("", ""), [(name, _plain(value)) for name, value in rows.items() if value is not None])


def _classes(manifest: Manifest) -> Iterator[str]:
    taught = {lesson.task for lesson in manifest.lessons}
    rows = []
    for task in manifest.tasks:
        labels = ", ".join(map(_plain, task.labels[:MOST_LABELS]))
        more = len(task.labels) - MOST_LABELS
        source = "taught" if task.task in taught else "run"
        rows.append((str(task.task), source, labels + (f" and {more} more" if more > 0 else ""), str(task.own_images)))
    yield from _table(("task", "from", "classes", "images behind its p-values"), rows)
    extended = [label for lesson in manifest.lessons for label in lesson.extends]
    if extended:
        yield ""
        yield f"Lessons added examples to: {', '.join(map(_plain, dict.fromkeys(extended)))}."
    if manifest.taught:
        yield ""
        yield "Examples that were taught, each left out of the statistics in turn:"
        yield ""
        judged = [(each.label, each.grade, f"{each.right} of {each.examples}") for each in manifest.taught]
        yield from _table(("class", "verdict", "right"), [(_plain(label), *rest) for label, *rest in judged])


def _verdict(manifest: Manifest) -> Iterator[str]:
    rows = [(title, part.grade, _plain(part.numbers)) for title, part in manifest.verdict.parts.items()]
    yield from _table(("part of an answer", "verdict", "judged by"), rows)
    if manifest.verdict.note:
        yield ""
        yield _plain(manifest.verdict.note)


def _metrics(manifest: Manifest) -> Iterator[str]:
    rows = [
        (measure.title, f"{100 * value:.1f} %" if measure.share else f"{value:.3f}")
        for measure, value in _measured(manifest)
    ]
    if not rows:
        yield "Not measured."
        return
    yield from _table(("on the test images", "value"), rows)
    yield ""
    yield f"Known and unknown are decided at alpha = {manifest.alpha:g}, which a request may change."


def _limits(manifest: Manifest) -> Iterator[str]:
    yield "- It knows the classes above and no others. What it should answer to anything else is `unknown`."
    yield (
        "- The p-value rests on images like those it learned from. If cameras, light or objects change, the share of "
        "rejected images changes too."
    )
    yield "- `confidence` is the probability of the best guess if the class is known; it may be high on noise."
    for title, part in manifest.verdict.parts.items():
        if part.grade != "good":
            yield f"- {title}: {part.grade} ({_plain(part.numbers)}). {_plain(part.advice)}".rstrip()
    images = manifest.metrics.get("test_images")
    if isinstance(images, int) and images < FEW_IMAGES:
        yield f"- Only {images} test images: the figures are coarse."
    for name, meaning in (("untested_tasks", "have no test images"), ("uneven_tasks", "have uneven classes")):
        if found := manifest.metrics.get(name):
            yield f"- Tasks that {meaning}: {', '.join(_plain(each) for each in found)}."
    if manifest.trunk:
        yield f"- It inherits what `{manifest.trunk.name}` was trained on, with its biases and its licence."


def _reproduction(manifest: Manifest) -> Iterator[str]:
    origin = manifest.origin
    if origin and origin.commands:
        yield "```text"
        yield from origin.commands
        coarse = [name for name in manifest.precisions if name != "fp32"]
        # Bundles that were written before their options were recorded have them in part.
        options = origin.export or (["--precision", *coarse] if coarse else [])
        yield shlex.join(["openworld", "export", "RUN", "--out", "BUNDLE", *options])
        yield "```"
    else:
        yield "The commands of the run were not recorded."
    yield ""
    rows = [("seed", str(manifest.seed)), ("preset", _plain(manifest.preset)), ("decision", _plain(manifest.decision))]
    if manifest.trunk:
        rows += [("trunk", _plain(manifest.trunk.name)), ("sha256 of its weights", f"`{manifest.trunk.sha256}`")]
    rows += [(name, _plain(version)) for name, version in manifest.versions.items()]
    yield from _table(("", ""), rows)
    if manifest.lessons:
        yield ""
    for number, lesson in enumerate(manifest.lessons):
        examples = ", ".join(f"{count} of {_plain(label)}" for label, count in lesson.images.items())
        yield f"- Lesson {number}: {examples} (their encoded vectors are in the bundle)"


def _use() -> Iterator[str]:
    yield "```text"
    yield "openworld verify BUNDLE"
    yield "openworld predict BUNDLE photo.jpg"
    yield "openworld serve BUNDLE --port 3000"
    yield "```"


def _measured(manifest: Manifest) -> Iterator[tuple[Measure, float]]:
    for measure in MEASURES:
        value: Any = manifest.metrics
        for key in measure.path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield measure, round(float(value), 6)


def _dataset(manifest: Manifest) -> str:
    return manifest.origin.data[0] if manifest.origin and manifest.origin.data else manifest.preset


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    for cells in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def _plain(value: object) -> str:
    """Text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", str(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
