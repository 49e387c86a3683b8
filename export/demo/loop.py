"""The open-world loop: serve, meet unknown images, group and label them, learn them, publish, and swap."""

import hashlib
import io
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from export.demo.result import NEW, LoopResult, loop_result
from export.demo.steps import announce, command, wait
from export.demo.traffic import Traffic, predict_all, served_versions
from serving import demo
from serving.bundle.model import BundleModel
from serving.bundle.shelf import Shelf
from training.config import RunConfig
from training.data.datasets import load_source
from training.data.images import Source, picture
from training.store.checkpoint import CONFIG, CURRENT, METRICS, RunError, read_config

KNOWN_SENT = 160
MAX_LOSS = 20
"""Points of CIL that a class may lose on the few validation images. The table at the end shows what was lost."""


class DemoFolder:
    """The files of the demonstration; deleted and created again each time."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.shelf = root, root / "run", root / "shelf"
        self.quarantine = f"sqlite:///{(root / 'quarantine.db').resolve()}"

    def prepare(self, run: Path) -> RunConfig:
        """Copy a finished run of 0 to 7; returns its configuration."""
        config = read_config(run)
        if known := [label for label in NEW if label in config.labels]:
            raise RunError(f"{run} already knows {', '.join(known)}; needed: a run of the digits without them")
        shutil.rmtree(self.root, ignore_errors=True)
        self.run.mkdir(parents=True)
        for name in (CONFIG, CURRENT, METRICS):
            shutil.copy(run / name, self.run / name)
        return config


class Labeller:
    """Stands in for the person who names the groups in a browser: uses the same HTTP API, and has the true labels."""

    def __init__(self, url: str, token: str, truth: dict[str, str]) -> None:
        self.url = url
        self.token = token
        self._http = httpx.Client(base_url=url, auth=("demo", token), timeout=30)
        self._truth = truth

    def kept(self) -> int:
        return sum(self._overview()["states"].values())

    def groups(self) -> list[tuple[int, Counter[str]]]:
        """Every group with the counts of the true labels of its images."""
        return [(group["id"], Counter(self._labels(group["id"]))) for group in self._overview()["groups"]]

    def name(self, group: int, label: str) -> None:
        self._http.post("/unknowns/label", json={"group": group, "label": label}).raise_for_status()

    def learned(self) -> int:
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


def run_loop(run: Path, folder: DemoFolder, port: int, labeller: type[Labeller] = Labeller) -> LoopResult:
    """The whole loop, from a run of 0 to 7 to a server that knows 0 to 9."""
    config = folder.prepare(run)
    source = load_source(config.preset.dataset, config.preset.image, None)
    command("publish", folder.run, folder.shelf)
    before = _current(folder)
    new = source.train.of(NEW)
    known = source.train.of(config.labels)
    known = known.at(np.sort(np.random.default_rng(0).permutation(len(known))[:KNOWN_SENT]))
    files = [_png(pixels) for pixels in (*new.pixels, *known.pixels)]
    truth = dict(zip(map(_digest, files), (*new.labels, *known.labels), strict=True))
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
        return _while_serving(folder, source, before, url, labeller(url, token, truth), files, len(new))
    finally:
        demo.stop(server)


def _while_serving(
    folder: DemoFolder, source: Source, before: BundleModel, url: str, person: Labeller, files: list[bytes], new: int
) -> LoopResult:
    """Everything that happens while the server runs; the first `new` files are of new classes."""
    answers = predict_all(url, files)
    unknown = [not answer.known for answer in answers]
    announce(f"{new} images of {' and '.join(NEW)} were sent: {sum(unknown[:new])} are unknown, and kept")
    wait(lambda: person.kept() >= sum(unknown), "the quarantine did not keep the unknown images")
    command("discover", "--quarantine", folder.quarantine, "--bundle", before.bundle.path)
    groups = person.groups()
    for number, labels in groups:
        label, count = labels.most_common(1)[0]
        announce(f"group {number}: {labels.total()} images, {count / labels.total():.0%} of them {label}")
        if label in NEW:
            person.name(number, label)
    announce("learning them as the next task, while clients continue to send requests")
    announce(f"some 1s look like 8s, and only 27 are there to judge by: a class may lose {MAX_LOSS} points, not 5")
    with Traffic(url, files[new:]) as traffic:
        place = ("--quarantine", folder.quarantine, "--publish", folder.shelf)
        command("learn-unknowns", folder.run, *place, "--max-loss", MAX_LOSS)
        after = _current(folder)
        version = after.manifest.version
        wait(lambda: served_versions(url) == {version}, f"the server did not load version {version}")
        wait(lambda: len(traffic.versions()) > 1, "no request was answered after the swap")
    result = loop_result(source, before, after, answers, new, groups, traffic, predict_all(url, files))
    result.checks["the labelled images are marked as learned"] = person.learned() >= len(NEW)
    return result


def _current(folder: DemoFolder) -> BundleModel:
    path = Shelf(folder.shelf).current()
    if path is None:
        raise RunError(f"{folder.shelf}: nothing was published")
    return BundleModel.load(path, provider="cpu")


def _png(pixels: NDArray[np.uint8]) -> bytes:
    stored = io.BytesIO()
    picture(pixels).save(stored, "PNG")
    return stored.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
