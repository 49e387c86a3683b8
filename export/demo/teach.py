"""Teaching a server: photos of two unseen classes arrive, are grouped, named, learned and answered, without a pause."""

import io
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from export.demo.pictures import photo, write_photos
from export.demo.steps import announce, command, wait
from export.demo.traffic import Traffic, predict_all
from serving import demo
from serving.client import Client
from serving.http.schemas import Answer
from serving.model import Model
from serving.teaching.client import Teaching
from training.run import RunError

KNOWN = ("disc", "stripes", "checks", "triangle", "cross", "waves")
NEW = ("ring", "dots")
RUN_IMAGES, NEW_IMAGES, TEST_IMAGES = 40, 50, 30
LEARNED_RIGHT, MOST_LOST, MOST_SECONDS, LEAST_RATE = 0.8, 0.015, 10.0, 30.0
"""The promises: right answers for the taught classes, the loss of the others, seconds from the click to the answer,
and requests per second meanwhile."""

SOON_ENOUGH = f"from the click to the answer it takes less than {MOST_SECONDS:g} seconds"
ENOUGH_REQUESTS = f"at least {LEAST_RATE:g} requests per second were answered"
"""The promises that depend on the load of the processors."""


@dataclass
class TeachResult:
    """The table, and whether each promise was kept."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)

    def print(self) -> None:
        console = Console(highlight=False)
        table = Table("photos that were not shown before", "before", "after")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for promise, kept in self.checks.items():
            console.print(f"{'kept  ' if kept else 'BROKEN'}  {promise}")


def run_teach(folder: Path, port: int) -> TeachResult:
    """Everything, from drawing the photos to the table."""
    shutil.rmtree(folder, ignore_errors=True)
    photos = write_photos(folder / "photos", **dict.fromkeys(KNOWN, RUN_IMAGES))
    tasks = f"{','.join(KNOWN[:3])}; {','.join(KNOWN[3:])}"
    command("fit", "--data", photos, "--tasks", tasks, "--quick", "--out", folder / "run")
    command("publish", folder / "run", folder / "shelf")
    token, url = secrets.token_urlsafe(24), f"http://127.0.0.1:{port}"
    settings = {
        "OPENWORLD_BUNDLES": str((folder / "shelf").resolve()),
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{(folder / 'quarantine.db').resolve()}",
        "OPENWORLD_ADMIN_TOKEN": token,
        "OPENWORLD_ACCESS_LOG": "off",
    }
    server = demo.start(folder / "bentoml", port, settings)
    try:
        if not demo.wait_until_ready(server, port):
            raise RunError("the server did not become ready; its messages are above")
        with Client(url) as client:
            return _while_serving(url, client.teaching(token, "demo"), folder / "shelf")
    finally:
        demo.stop(server)


def _while_serving(url: str, teaching: Teaching, shelf: Path) -> TeachResult:
    test = {label: _photos(label, TEST_IMAGES, first=1000) for label in (*KNOWN, *NEW)}
    # Answered without the server, which would store the unknown photos and learn from them.
    model = Model.load(shelf, threads=1)
    before = {label: [model.predict(content) for content in files] for label, files in test.items()}
    arrived = {content: label for label in NEW for content in _photos(label, NEW_IMAGES, first=0)}
    steady = [content for label in KNOWN for content in _photos(label, 8, first=2000)]
    with Traffic(url, steady) as traffic:
        unknown = sum(not answer.known for answer in predict_all(url, list(arrived)))
        announce(f"{len(arrived)} photos of {' and '.join(NEW)} were sent: {unknown} are unknown, and kept")
        wait(lambda: teaching.status().unknown >= unknown, "the quarantine did not keep the unknown photos")
        groups = _named_groups(teaching, arrived)
        clicked = time.monotonic()
        job = teaching.wait(teaching.learn())
        if job.state != "done" or job.learned is None:
            raise RunError(f"learning ended {job.state}: {job.error}")
        until_learned = time.monotonic() - clicked
        accepted = teaching.accept(job.id)
        seconds = time.monotonic() - clicked
        steps = {**job.learned.seconds, "switching all workers": seconds - until_learned}
        # The rest: a process starts and loads the model, and its result is polled a few times per second.
        steps = {"starting": max(0.0, seconds - sum(steps.values())), **steps}
        announce(f"learned {', '.join(groups)} and served as {accepted.version} by {accepted.workers} workers")
        after = {label: predict_all(url, files) for label, files in test.items()}
        wait(lambda: accepted.version in traffic.versions(), "no request was answered after the swap")
    return compare(before, after, groups, steps, traffic)


def _named_groups(teaching: Teaching, truth: dict[bytes, str]) -> dict[str, int]:
    """Group the unknown photos, and name each group as a person would who sees its first photos; images by name."""
    job = teaching.wait(teaching.group())
    if job.state != "done":
        raise RunError(f"grouping ended {job.state}: {job.error}")
    named: Counter[str] = Counter()
    for group in teaching.groups().groups:
        seen = Counter(truth.get(teaching.image(item.id), "?") for item in group.items)
        label, count = seen.most_common(1)[0]
        share = count / len(group.items)
        announce(f"group {group.id}: {group.size} photos, {share:.0%} of the first {len(group.items)} are {label}")
        if label in NEW and share >= 0.8:
            named[label] += len(teaching.label_group(group.id, label).items)
    return dict(named)


def compare(
    before: dict[str, list[Answer]],
    after: dict[str, list[Answer]],
    groups: dict[str, int],
    steps: dict[str, float],
    traffic: Traffic,
) -> TeachResult:
    """The answers to the photos before and after, by label, and whether each promise was kept.

    `groups` are the photos that were named, by label, and `steps` the seconds of each step of the lesson.
    """
    result, seconds = TeachResult(), sum(steps.values())
    for title, labels in (("of the six learned classes", KNOWN), *((f"of {label}", (label,)) for label in NEW)):
        result.rows.append((title, _shares(before, labels), _shares(after, labels)))
    result.rows.append(("seconds from the click to the answer", "", f"{seconds:.1f}"))
    result.rows += [(f"  {step}", "", f"{taken:.1f}") for step, taken in steps.items()]
    result.rows.append(("requests per second meanwhile, failed", "", f"{traffic.rate:.0f}, {len(traffic.failures)}"))
    loss = _right(before, KNOWN) - _right(after, KNOWN)
    result.checks = {
        "both classes were unknown before": all(_known(before, (label,)) <= 1 - LEARNED_RIGHT for label in NEW),
        "both classes were found as groups": set(groups) == set(NEW),
        f"at least {LEARNED_RIGHT:.0%} of them are right": all(_right(after, (each,)) >= LEARNED_RIGHT for each in NEW),
        f"the other classes lose at most {100 * MOST_LOST:.1f} points": loss <= MOST_LOST,
        SOON_ENOUGH: seconds < MOST_SECONDS,
        ENOUGH_REQUESTS: traffic.rate >= LEAST_RATE,
        "no request failed": not traffic.failures,
    }
    return result


def _shares(answers: dict[str, list[Answer]], labels: Sequence[str]) -> str:
    return f"{_right(answers, labels):.0%} right, {_known(answers, labels):.0%} known"


def _known(answers: dict[str, list[Answer]], labels: Sequence[str]) -> float:
    return _share([each.known for label in labels for each in answers[label]])


def _right(answers: dict[str, list[Answer]], labels: Sequence[str]) -> float:
    """The share that is answered with its label; "unknown" is not right."""
    return _share([each.label == label for label in labels for each in answers[label]])


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _photos(label: str, count: int, first: int) -> list[bytes]:
    found = []
    for number in range(first, first + count):
        stored = io.BytesIO()
        photo(label, number).save(stored, "JPEG", quality=90)
        found.append(stored.getvalue())
    return found
