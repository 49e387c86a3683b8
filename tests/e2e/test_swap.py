"""Bundles are swapped in a running server: no request fails, and every answer is of the version that it names."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import psutil
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.layout import RULE
from serving.bundle.manifest import INPUT_NAME
from serving.bundle.model import BundleModel
from serving.bundle.shelf import Shelf
from serving.inference.answers import PredictionOptions, answer_image
from tests.conftest import ReportLine
from tests.helpers_serving import (
    COLOURS,
    GREY,
    PATIENCE,
    Server,
    eventually,
    golden_of,
    golden_pixels,
    http_get,
    image_bytes,
    metric,
    serving,
    tiny_graph,
    write_bundle,
)
from tests.load import Figures, Reply, http_request, send, workers

pytestmark = pytest.mark.long

TOKEN = "a-token-for-these-tests-alone"
SWAPS = 20
TABLE = (256, 8192)
"""A table of 8 MiB in each graph, so that memory that is not freed shows."""
IMAGES = [image_bytes(colour) for colour in (*COLOURS.values(), GREY)]


def turned_graph(turn: int) -> ModelProto:
    """The tiny graph with its colours assigned to other classes, and a large table that it reads."""
    model = tiny_graph()
    graph = model.graph
    for constant in graph.initializer:
        if constant.name == "prototypes":
            turned = np.roll(numpy_helper.to_array(constant), turn, axis=1)
            constant.CopyFrom(numpy_helper.from_array(turned, constant.name))
    (first,) = [node for node in graph.node if INPUT_NAME in node.input]
    numbers = first.output[0]
    first.output[0] = "bare"
    table = np.random.default_rng(turn).random(TABLE, dtype=np.float32)
    constants = {"table": table, "nothing": np.array(0, dtype=np.float32)}
    graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in constants.items())
    others = list(graph.node)[1:]
    del graph.node[1:]
    graph.node.extend(
        [
            helper.make_node("ReduceMax", ["bare"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["place"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "place"], ["found"]),
            helper.make_node("ReduceMax", ["found"], ["most"], keepdims=0),
            helper.make_node("Mul", ["most", "nothing"], ["weightless"]),
            helper.make_node("Add", ["bare", "weightless"], [numbers]),
            *others,
        ]
    )
    return model


def write_turned(folder: Path, turn: int) -> Path:
    """A complete bundle whose labels are shifted, so that it answers `green` where another answers `red`."""
    graph = turned_graph(turn)
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = golden_pixels()
    outputs = session.run(list(OUTPUT_NAMES), {INPUT_NAME: pixels})
    return write_bundle(
        folder, graph=graph, golden={INPUT_NAME: pixels, **dict(zip(OUTPUT_NAMES, outputs, strict=True))}
    )


class Known:
    """The bundles of these tests, and the expected answer of each for every image."""

    def __init__(self, folder: Path) -> None:
        self.folders: dict[str, Path] = {}
        self.wanted: dict[str, list[Any]] = {}
        for turn in range(3):
            written = write_turned(folder / str(turn), turn)
            model = BundleModel.load(written, provider="cpu")
            version = model.manifest.version
            self.folders[version] = written
            answers = [answer_image(model, image, PredictionOptions.for_model(model)) for image in IMAGES]
            self.wanted[version] = [labels(answer.model_dump()) for answer in answers]
        assert len({str(expected) for expected in self.wanted.values()}) == 3

    @property
    def versions(self) -> list[str]:
        return list(self.folders)


def labels(answer: dict[str, Any]) -> list[Any]:
    return [answer["label"], answer["best_guess"], *(entry["label"] for entry in answer["top"])]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def shelf(known: Known, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tmp_path_factory.mktemp("shelf")
    for version, bundle in known.folders.items():
        shutil.copytree(bundle, folder / version)
    return Shelf(folder)


@pytest.fixture(scope="module")
def server(shelf: Shelf, known: Known, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers that watch the shelf."""
    shelf.point_at(known.versions[0])
    settings = {"OPENWORLD_WORKERS": "2", "OPENWORLD_BUNDLES": str(shelf.folder), "OPENWORLD_ADMIN_TOKEN": TOKEN}
    with serving(tmp_path_factory.mktemp("home"), None, settings=settings) as running:
        eventually(lambda: len(status(running)["workers"]) == 2 and settled(running, known.versions[0]))
        yield running


def admin(server: Server, method: str, path: str) -> httpx.Response:
    return httpx.request(method, f"{server.url}{path}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE)


def status(server: Server) -> dict[str, Any]:
    return dict(admin(server, "GET", "/admin/status").json())


def settled(server: Server, version: str) -> bool:
    reported = status(server)
    return reported["version"] == version and all(worker["version"] == version for worker in reported["workers"])


class Load:
    """Clients that send requests continuously, each over one connection, during the block."""

    def __init__(self, server: Server, clients: int = 4) -> None:
        self.replies: list[Reply] = []
        self._ended = threading.Event()
        requests = [http_request(path, image) for image in IMAGES for path in ("/predict", "/predict?alpha=0.2&top=4")]

        def endless() -> Iterator[bytes]:
            while not self._ended.is_set():
                yield from requests

        def run() -> None:
            self.replies = send(server.port, endless(), clients=clients, after=lambda reply: 0.002)

        self._thread = threading.Thread(target=run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def assert_all_answered_by_what_they_name(replies: list[Reply], known: Known) -> Counter[str]:
    """Check that no request failed and no answer mixes two models; returns the number of answers per version."""
    counts: Counter[str] = Counter()
    for reply in replies:
        assert reply.status == 200, reply.body
        answer = reply.json()
        image, special = divmod(reply.number % (2 * len(IMAGES)), 2)
        version = answer["model"]["version"]
        wanted = known.wanted[version][image]
        got = labels(answer)
        # alpha may make it known and `top` may be longer; the best guess stays the same.
        assert got[1] == wanted[1], (version, image, got, wanted)
        assert got[: len(wanted)] == wanted or special
        counts[version] += 1
    return counts


def megabytes(server: Server) -> list[float]:
    return [one.memory_info().rss / 1e6 for one in workers(server, 2)]


def test_twenty_swaps_under_load(server: Server, shelf: Shelf, known: Known, report_line: ReportLine) -> None:
    seconds, held = [], [megabytes(server)]
    with Load(server) as load:
        for number in range(1, SWAPS + 1):
            version = known.versions[number % 3]
            shelf.point_at(version)
            answer = admin(server, "POST", "/admin/reload")
            assert answer.status_code == 200, answer.text
            reported = answer.json()
            seconds.append(answer.elapsed.total_seconds())
            assert [worker["version"] for worker in reported["workers"]] == [version, version]
            assert reported["version"] == version == http_get(f"{server.url}/model").json()["version"]
            held.append(megabytes(server))
    counts = assert_all_answered_by_what_they_name(load.replies, known)
    bundle = sum(file.stat().st_size for file in known.folders[known.versions[0]].iterdir()) / 1e6
    # The first swap adds the bundle for a rollback; from the second on, memory does not grow.
    first, before, after = held[0], held[2], held[-1]
    grown = max(late - early for late, early in zip(after, before, strict=True))
    figures = Figures.of(load.replies)
    report_line(
        f"{SWAPS} swaps of {bundle:.0f} MB under {figures.rate:.0f} requests/s: {sum(counts.values())} answers, none "
        f"failed, p99 {figures.p99:.0f} ms; a swap took {np.median(seconds):.2f} s, at most {max(seconds):.2f} s; "
        f"largest worker {max(first):.0f} MB, after 2 swaps {max(before):.0f} MB, after {SWAPS} {max(after):.0f} MB"
    )
    assert set(counts) == set(known.versions)
    # A bundle that is not freed after each swap would be seen 18 times.
    assert grown < 4 * bundle
    assert metric(server, "openworld_swaps_total", outcome="switched") == SWAPS
    assert metric(server, "openworld_model_info") == 1
    assert metric(server, "openworld_model_info", version=known.versions[SWAPS % 3]) == 1


@pytest.fixture(scope="module")
def bad(shelf: Shelf, known: Known) -> list[str]:
    """Names on the shelf: a bundle with a damaged file, and one with wrong golden outputs."""
    corrupt = shutil.copytree(known.folders[known.versions[0]], shelf.folder / "corrupt")
    (corrupt / RULE).write_bytes(b"{}")
    golden = golden_of(BundleModel.load(known.folders[known.versions[0]], provider="cpu"))
    wrong = {**golden, "logits": golden["logits"] + np.float32(1)}
    write_bundle(shelf.folder / "wrong", graph=turned_graph(0), golden=wrong)
    return ["corrupt", "wrong"]


def test_a_bad_bundle_is_refused_and_the_old_one_serves_on(
    server: Server, shelf: Shelf, known: Known, bad: list[str]
) -> None:
    served = status(server)["version"]
    refused = metric(server, "openworld_swaps_total", outcome="refused")
    with Load(server, clients=2) as load:
        for name, reason in zip(bad, ("rule.json: corrupt", "logits of the images in golden.npz"), strict=True):
            shelf.point_at(name)
            answer = admin(server, "POST", "/admin/reload")
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bundle_refused")
            assert reason in answer.json()["error"]["message"]
            assert settled(server, served)
            assert reason in status(server)["refused"]
    assert set(assert_all_answered_by_what_they_name(load.replies, known)) == {served}
    assert metric(server, "openworld_swaps_total", outcome="refused") >= refused + 2
    assert metric(server, "openworld_model_info", version=served) == 1
    assert "swap refused" in server.log.read_text()
    # No reload is requested this time: the workers watch the shelf.
    better = next(version for version in known.versions if version != served)
    shelf.point_at(better)
    eventually(lambda: settled(server, better))
    assert status(server)["refused"] is None


def test_one_call_rolls_back_and_one_more_forward(server: Server, shelf: Shelf, known: Known) -> None:
    shelf.point_at(known.versions[0])
    assert admin(server, "POST", "/admin/reload").json()["version"] == known.versions[0]
    shelf.point_at(known.versions[1])
    assert admin(server, "POST", "/admin/reload").json()["version"] == known.versions[1]
    with Load(server, clients=2) as load:
        for version, other in (known.versions[:2], known.versions[1::-1]):
            answer = admin(server, "POST", "/admin/rollback").json()
            assert (answer["version"], answer["previous"], answer["changed"]) == (version, other, True)
            assert [worker["version"] for worker in answer["workers"]] == [version, version]
            # Other servers that watch the shelf follow.
            assert (shelf.current(), shelf.previous()) == (shelf.folder / version, shelf.folder / other)
    assert_all_answered_by_what_they_name(load.replies, known)


def test_a_worker_that_was_killed_comes_back_with_what_its_sibling_serves(
    server: Server, shelf: Shelf, known: Known, bad: list[str]
) -> None:
    """Even if the shelf then points to another bundle, which was refused."""
    first, second, third = known.versions
    shelf.point_at(first)
    admin(server, "POST", "/admin/reload")
    victim, survivor = (worker["pid"] for worker in status(server)["workers"])
    os.kill(victim, signal.SIGKILL)
    # Until its sockets are closed, the kernel may give a new connection to the dying worker and then reset it.
    eventually(lambda: not psutil.pid_exists(victim))
    # Dead workers are not waited for. On a slow machine, a new one may be there before the second swap.
    for version in (second, third):
        shelf.point_at(version)
        answer = admin(server, "POST", "/admin/reload").json()
        pids = [worker["pid"] for worker in answer["workers"]]
        assert answer["version"] == version
        assert survivor in pids
        assert victim not in pids
    shelf.point_at(bad[0])
    assert admin(server, "POST", "/admin/reload").status_code == 422
    eventually(lambda: len(status(server)["workers"]) == 2 and settled(server, third))
    assert survivor in [worker["pid"] for worker in status(server)["workers"]]
    replies = send(server.port, [http_request("/predict", IMAGES[0])] * 20, clients=10)
    assert {reply.json()["model"]["version"] for reply in replies} == {third}
    assert metric(server, "openworld_model_info") == metric(server, "openworld_model_info", version=third) == 1
    # It did not take part in the swaps, and still rolls back together with the other worker.
    shelf.point_at(second)
    assert admin(server, "POST", "/admin/reload").json()["version"] == second
    shelf.point_at(third)
    assert admin(server, "POST", "/admin/reload").json()["version"] == third
    assert [worker["version"] for worker in admin(server, "POST", "/admin/rollback").json()["workers"]] == [second] * 2
    assert "Traceback" not in server.log.read_text()
