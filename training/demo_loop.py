"""The open-world loop in one command, on handwritten digits: `python -m training.demo_loop RUN --out FOLDER`.

RUN knows 0 to 7. It is served and meets 8s and 9s, which it calls unknown and keeps. They are grouped, named (here by
a script that knows the truth and asks the same HTTP pages as a person's browser), learned as the next task, published,
and taken by the running server while clients go on asking.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

from serving import address, demo
from serving.client import Client, Retries, ServiceError
from serving.decision import NETWORK_NAMES
from serving.runtime import Model
from serving.schemas import Answer
from serving.shelf import Shelf
from training.checkpoint import CONFIG, CURRENT, RunError, read_config
from training.config import RunConfig
from training.datasets import load_source
from training.images import Images, Source

NEW = ("8", "9")
PATIENCE = 60.0
CLIENTS, PAUSE = 4, 0.1
"""Who ask without end while the bundle is swapped, and the seconds between two questions of one of them."""
KNOWN_SENT = 160

console = Console()


@dataclass(frozen=True)
class Folder:
    """Where the story takes place; made anew each time it is told."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def shelf(self) -> Path:
        return self.root / "shelf"

    @property
    def quarantine(self) -> str:
        return f"sqlite:///{(self.root / 'quarantine.db').resolve()}"

    def prepare(self, taught: Path) -> RunConfig:
        """Start from a copy of a finished run of 0 to 7."""
        config = read_config(taught)
        if known := [label for label in NEW if label in config.labels]:
            raise RunError(f"{taught} knows {', '.join(known)} already; needed: a run of the digits without them")
        shutil.rmtree(self.root, ignore_errors=True)
        self.run.mkdir(parents=True)
        for name in (CONFIG, CURRENT, "metrics.json"):
            shutil.copy(taught / name, self.run / name)
        return config


@dataclass
class Traffic:
    """Clients that ask for as long as the block lasts, each image of a list in turn, and what they were answered."""

    url: str
    images: Sequence[bytes]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.seconds = time.monotonic() - self._started

    @property
    def rate(self) -> float:
        return len(self.answers) / self.seconds

    def versions(self) -> list[str]:
        return sorted({answer.model.version for _, answer in self.answers})

    def _ask(self, place: int) -> None:
        # Without a second attempt: a request that fails shall be seen.
        with Client(self.url, retries=Retries(attempts=1)) as client:
            while not self._stop.wait(PAUSE):
                place = (place + CLIENTS) % len(self.images)
                try:
                    self.answers.append((place, client.predict(self.images[place])))
                except ServiceError as error:
                    self.failures.append(str(error))


class Person:
    """Stands in for whoever names the groups in a browser: asks the same pages, and knows what was sent."""

    def __init__(self, url: str, token: str, truth: dict[str, str]) -> None:
        self.url = url
        self.token = token
        self._http = httpx.Client(base_url=url, auth=("demo", token), timeout=30)
        self._truth = truth

    def kept(self) -> int:
        return sum(self._overview()["states"].values())

    def groups(self) -> list[tuple[int, Counter[str]]]:
        """Every group with the true labels of its images."""
        return [(group["id"], Counter(self._labels(group["id"]))) for group in self._overview()["groups"]]

    def name(self, group: int, label: str) -> None:
        self._http.post("/unknowns/label", json={"group": group, "label": label}).raise_for_status()

    def learned(self) -> int:
        """How many images the quarantine says are learned."""
        return int(self._overview()["states"].get("learned", 0))

    def _labels(self, group: int) -> Iterable[str]:
        after: int | None = 0
        while after is not None:
            page = self._get("/unknowns/items", group=group, after=after)
            for item in page["items"]:
                content = self._http.get(f"/unknowns/items/{item['id']}/image").raise_for_status().content
                yield self._truth[_digest(content)]
            after = page["next"]

    def _overview(self) -> dict[str, Any]:
        return self._get("/unknowns/groups", items=0)

    def _get(self, path: str, **parameters: int) -> dict[str, Any]:
        return dict(self._http.get(path, params=parameters).raise_for_status().json())


@dataclass(frozen=True)
class Outcome:
    """What the story came to; each promise with whether it was kept."""

    rows: list[tuple[str, ...]]
    promises: dict[str, bool]

    def show(self) -> None:
        table = Table(title="The open-world loop")
        for column in ("", "before", "after"):
            table.add_column(column, justify="left" if not column else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for promise, kept in self.promises.items():
            console.print(f"{'yes' if kept else '[bold red]NO[/] '}  {promise}", highlight=False)


def tell(taught: Path, folder: Folder, port: int, who: type[Person] = Person) -> Outcome:
    """The whole story; `who` names the groups."""
    config = folder.prepare(taught)
    source = load_source(config.preset.dataset, config.preset.image, None)
    _command("export", folder.run, "--publish", folder.shelf)
    before = _current(folder)
    strangers = source.train.of(NEW)
    familiar = _some(source.train.of(config.labels), KNOWN_SENT)
    files = [_png(pixels) for pixels in (*strangers.pixels, *familiar.pixels)]
    truth = dict(zip(map(_digest, files), (*strangers.labels, *familiar.labels), strict=True))
    token, url = secrets.token_urlsafe(24), f"http://127.0.0.1:{port}"
    settings = {
        "OPENWORLD_BUNDLES": str(folder.shelf.resolve()),
        "OPENWORLD_QUARANTINE_URL": folder.quarantine,
        "OPENWORLD_ADMIN_TOKEN": token,
        "OPENWORLD_ACCESS_LOG": "off",
    }
    server = demo.start(folder.root / "bentoml", port, settings)
    try:
        if not demo.wait_until_ready(server, port):
            raise RunError("the server did not become ready; its messages are above")
        return _live(folder, source, before, url, who(url, token, truth), files, len(strangers))
    finally:
        demo.stop(server)


def _live(
    folder: Folder, source: Source, before: Model, url: str, person: Person, files: list[bytes], strangers: int
) -> Outcome:
    """What happens while the server runs."""
    said = _ask_all(url, files)
    unknown = [not answer.known for answer in said]
    _say(f"{strangers} images of {' and '.join(NEW)} were sent: {sum(unknown[:strangers])} are unknown, and kept")
    _wait(lambda: person.kept() >= sum(unknown), "the quarantine did not keep what was unknown")
    _command("training.discover", "--quarantine", folder.quarantine, "--bundle", before.bundle.path)
    groups = person.groups()
    for number, labels in groups:
        label, count = labels.most_common(1)[0]
        _say(f"group {number}: {labels.total()} images, {count / labels.total():.0%} of them {label}")
        if label in NEW:
            person.name(number, label)
    _say("learning them as the next task, while clients go on asking")
    with Traffic(url, files[strangers:]) as traffic:
        _command(
            "training.fit", "--add-unknowns", folder.run, "--quarantine", folder.quarantine, "--publish", folder.shelf
        )
        after = _current(folder)
        version = after.manifest.version
        _wait(lambda: _served(url) == {version}, f"the server did not take version {version}")
        _wait(lambda: len(traffic.versions()) > 1, "nobody asked after the swap")
    outcome = _outcome(source, before, after, said, strangers, groups, traffic, _ask_all(url, files))
    outcome.promises["what was named is marked as learned"] = person.learned() >= len(NEW)
    return outcome


def _outcome(
    source: Source,
    before: Model,
    after: Model,
    said: list[Answer],
    strangers: int,
    groups: list[tuple[int, Counter[str]]],
    traffic: Traffic,
    says: list[Answer],
) -> Outcome:
    old, new = _measured(before, source.test), _measured(after, source.test)
    rejected = [np.mean([not answer.known for answer in answers[:strangers]]) for answers in (said, says)]
    purity = [labels.most_common(1)[0][1] / labels.total() for _, labels in groups]
    classes = [before.manifest.labels, after.manifest.labels]
    same = _same_scores(said, says)
    rows: list[tuple[str, ...]] = [
        ("version", before.manifest.version, after.manifest.version),
        ("classes", *(f"{labels[0]} to {labels[-1]}" for labels in classes)),
        ("8s and 9s sent that are unknown", *(f"{share:.1%}" for share in rejected)),
        ("test images of 0 to 9 answered right", f"{old.right:.1%}", f"{new.right:.1%}"),
        ("test images of 0 to 7 answered right", f"{old.right_known:.1%}", f"{new.right_known:.1%}"),
        ("test images of 0 to 7 accepted", f"{old.accepted_known:.1%}", f"{new.accepted_known:.1%}"),
        ("test images of 8 and 9 accepted", f"{old.accepted_new:.1%}", f"{new.accepted_new:.1%}"),
        ("groups found, and their purity", f"{len(groups)}: {', '.join(f'{share:.0%}' for share in purity)}", ""),
        ("requests during learning and swap", "", f"{len(traffic.answers)} at {traffic.rate:.0f}/s"),
        ("of which failed", "", str(len(traffic.failures))),
    ]
    promises: dict[str, bool] = {
        "at least 85 % of the 8s and 9s were unknown": bool(rejected[0] >= 0.85),
        "two groups of at least 90 % purity": len(groups) == len(NEW) and min(purity) >= 0.9,
        "at least 93 % of 0 to 9 are right now": new.right >= 0.93,
        "the old tasks' logits and distances are the same to the bit": _same_outputs(before, after, source.test),
        "the old tasks' scores in every answer are the same": same,
        "no request failed, at 20 a second or more": not traffic.failures and traffic.rate >= 20,
        "every answer named one of the two versions": set(traffic.versions()) == set(rows[0][1:]),
    }
    return Outcome(rows, promises)


@dataclass(frozen=True)
class Measured:
    """Shares of the test images; an answer is right if it names the class, whether or not it is accepted."""

    right: float
    right_known: float
    accepted_known: float
    accepted_new: float


def _measured(model: Model, test: Images) -> Measured:
    verdicts = model.predict(test.pixels)
    right = np.array(model.manifest.labels)[verdicts.class_id] == test.labels
    new = np.isin(test.labels, NEW)
    return Measured(
        float(right.mean()),
        float(right[~new].mean()),
        float(verdicts.known[~new].mean()),
        float(verdicts.known[new].mean()),
    )


def _same_outputs(before: Model, after: Model, test: Images) -> bool:
    said, says = before.run(test.pixels), after.run(test.pixels)
    classes = len(before.manifest.labels)
    return all(np.array_equal(said[name], says[name][:, :classes]) for name in NETWORK_NAMES)


def _same_scores(said: list[Answer], says: list[Answer]) -> bool:
    """Whether each task gives each image the score that it gave before."""
    pairs = zip(said, says, strict=True)
    return all(
        old.unknown_score == new.unknown_score
        for earlier, later in pairs
        for old, new in zip(earlier.tasks, later.tasks, strict=False)
    )


def _ask_all(url: str, files: Sequence[bytes]) -> list[Answer]:
    with Client(url) as client:
        return [client.predict(content) for content in files]


def _served(url: str) -> set[str]:
    with Client(url) as client:
        return {client.model().version for _ in range(4)}


def _current(folder: Folder) -> Model:
    path = Shelf(folder.shelf).current()
    if path is None:
        raise RunError(f"{folder.shelf}: nothing was published")
    return Model.load(path, provider="cpu")


def _command(module: str, *arguments: object) -> None:
    """Run one of our commands as a person would, and show what it says."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    _say(f"$ python -m {' '.join([module, *map(str, arguments)])}")
    if code := subprocess.run(command, check=False).returncode:
        raise RunError(f"python -m {module} ended with {code}")


def _wait(met: Any, otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not met():
        if time.monotonic() > deadline:
            raise RunError(f"{otherwise} within {PATIENCE:g} seconds")
        time.sleep(0.1)


def _some(images: Images, count: int) -> Images:
    return images.at(np.sort(np.random.default_rng(0).permutation(len(images))[:count]))


def _png(pixels: NDArray[np.uint8]) -> bytes:
    stored = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stored, "PNG")
    return stored.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _say(text: str) -> None:
    console.print(f"[bold]{text}[/]", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.demo_loop", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run of the digits 0 to 7")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where it happens; made anew")
    parser.add_argument("--port", type=address.port, default=3000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here, too")
    chosen = parser.parse_args(arguments)
    if demo.taken(chosen.port):
        print(f"error: port {chosen.port} is taken; choose another one: make demo-loop PORT=3001", file=sys.stderr)
        return 2
    started = time.monotonic()
    try:
        outcome = tell(chosen.run, Folder(chosen.out), chosen.port)
    except (RunError, ServiceError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outcome.show()
    _say(f"{time.monotonic() - started:.0f} s; label what it keeps yourself: docs/open-world.md")
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": outcome.rows, "promises": outcome.promises}, indent=2))
    return 0 if all(outcome.promises.values()) else 1


if __name__ == "__main__":
    demo.end_in_order()
    sys.exit(main())
