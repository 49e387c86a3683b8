"""Our service against minimal servers with the same answers: one run, same graph, same image, 1 and 16 clients.

Contestants take turns in short rounds, and medians over the rounds are compared, because other work on the machine
comes and goes. Every round starts them anew, because a process keeps the luck of where its weights came to lie: of two
that run the same graph alone, one may be a tenth slower for as long as it lives. Nothing is asserted about time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from serving.bundle.model import BundleModel
from tests.benchmarks.conftest import Report, table
from tests.benchmarks.contestants import CONTESTANTS, FASTAPI, OURS, Contestant, cpu_seconds
from tests.benchmarks.graphs import digits_bundle, photos_bundle, resnet_bundle
from tests.helpers_serving import Server, metric, saved
from tests.load import Figures, repeat_for, send

CLIENTS = (1, 16)
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
WARM_UP = 48
"""Requests to each contestant before it is measured."""


@pytest.mark.parametrize(
    ("make", "seconds"),
    [(resnet_bundle, 8), (photos_bundle, 5), (digits_bundle, 3)],
    ids=["resnet18", "photos", "digits"],
)
def test_requests_per_second(make: Callable[[Path], Path], seconds: float, report: Report, tmp_path: Path) -> None:
    bundle = make(tmp_path / "bundle")
    image = picture(bundle)
    figures: dict[tuple[str, int], list[Figures]] = defaultdict(list)
    absent = [contestant.name for contestant in CONTESTANTS if not contestant.installed]
    for number in range(ROUNDS):
        with started(tmp_path / str(number), bundle) as running:
            assert_same_answers(running, image)
            for clients in CLIENTS:
                # In both orders: a rested processor is faster for the first contestant.
                for contestant, server in running[:: -1 if number % 2 else 1]:
                    requests = repeat_for(seconds, contestant.request(image))
                    figures[contestant.name, clients].append(Figures.of(send(server.port, requests, clients=clients)))
    medians = {key: Figures.median(rounds) for key, rounds in figures.items()}
    rows = []
    for (name, clients), found in medians.items():
        base = medians.get((FASTAPI, clients), found)
        label = f"{bundle_name(bundle)}, {clients} clients, {name}"
        report.add(f"{label}, requests", found.rate, "1/s", base.rate)
        report.add(f"{label}, p99", found.p99, "ms", base.p99)
        rows.append(
            (
                name,
                str(clients),
                f"{found.rate:.0f}",
                f"{found.p50:.2f}",
                f"{found.p99:.2f}",
                f"{found.rate / base.rate:.2f}",
                f"{found.p99 / base.p99:.2f}",
            )
        )
    head = ("server", "clients", "requests/s", "p50 ms", "p99 ms", "requests/s against FastAPI", "p99 against FastAPI")
    print(f"\n\n{bundle_name(bundle)}{f' (not installed: {absent})' if absent else ''}\n\n{table(head, rows)}")


def test_server_time_above_the_graph(report: Report, tmp_path: Path) -> None:
    """Digits, 1 client: the cost of a request beyond one run of the graph, in wall time and processor time."""
    bundle = digits_bundle(tmp_path / "bundle")
    image = picture(bundle)
    model = BundleModel.load(bundle, provider="cpu", threads=1)
    above: dict[str, list[tuple[float, float]]] = defaultdict(list)
    graphs, paced, own = [], [], []
    with started(tmp_path, bundle) as running:
        assert_same_answers(running, image)
        for _ in range(ROUNDS):
            graph = graph_alone(model)
            graphs.append(graph)
            for contestant, server in running:
                before, clock = cpu_seconds(server), own_clock(contestant, server)
                replies = send(server.port, repeat_for(2.0, contestant.request(image)), clients=1)
                cpu = 1000 * (cpu_seconds(server) - before) / len(replies)
                above[contestant.name].append((Figures.of(replies).p50 - graph.median, cpu - graph.cpu))
                if contestant.name == OURS:
                    own.append(1000 * (own_clock(contestant, server) - clock) / len(replies))
                    # The server sleeps between two requests, so its caches are colder.
                    idle = max(0.0, 1000 / Figures.of(replies).rate - own[-1])
                    paced.append(graph_alone(model, pause=idle / 1000))
    rows = []
    medians = {name: np.median(np.array(rounds), axis=0) for name, rounds in above.items()}
    for name, (latency, cpu) in medians.items():
        base = medians.get(FASTAPI, medians[OURS])
        report.add(f"digits, 1 client, {name}, latency above the graph", float(latency), "ms", float(base[0]))
        report.add(f"digits, 1 client, {name}, processor time above the graph", float(cpu), "ms", float(base[1]))
        rows.append((name, f"{latency:.2f}", f"{cpu:.2f}"))
    # The server's clock gives a sum over requests, so means are compared with means.
    loop = float(np.median([found.median for found in graphs]))
    graph, pace = (float(np.median([found.mean for found in rounds])) for rounds in (graphs, paced))
    clocked = float(np.median(own))
    report.add("digits, graph alone in a loop", graph, "ms")
    report.add("digits, graph alone at the pace of requests", pace, "ms")
    report.add(f"digits, 1 client, {OURS}, by the server's own clock", clocked, "ms", pace)
    head = ("server", "median latency above the graph, ms", "processor time above the graph, ms")
    print(f"\n\ndigits, 1 client, graph alone {loop:.2f} ms in a loop\n\n{table(head, rows)}")
    print(
        f"\n{OURS} by its own clock, from a request's head to its answer: {clocked:.2f} ms on average; "
        f"{clocked - pace:.2f} ms above the graph at the pace of requests ({pace:.2f} ms), "
        f"{clocked - graph:.2f} ms above the graph in a loop"
    )


@contextlib.contextmanager
def started(folder: Path, bundle: Path) -> Iterator[list[tuple[Contestant, Server]]]:
    """Every contestant that is installed."""
    with contextlib.ExitStack() as stack:
        yield [
            (contestant, stack.enter_context(contestant.start(folder / contestant.name, bundle)))
            for contestant in CONTESTANTS
            if contestant.installed
        ]


def own_clock(contestant: Contestant, server: Server) -> float:
    """Seconds that our server reports for predictions so far; the others report no time."""
    if contestant.name != OURS:
        return 0.0
    return metric(server, "openworld_request_seconds_sum", endpoint="/predict")


def picture(bundle: Path) -> bytes:
    """A PNG of the size that the graph takes."""
    image = BundleModel.load(bundle, provider="cpu", threads=1).bundle.golden.pixels[-1]
    return saved(Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image))


def bundle_name(bundle: Path) -> str:
    return BundleModel.load(bundle, provider="cpu", threads=1).manifest.name


def assert_same_answers(running: list[tuple[Contestant, Server]], image: bytes) -> None:
    """All contestants do the same work; this also warms them up."""
    answers = []
    for contestant, server in running:
        replies = send(server.port, [contestant.request(image)] * WARM_UP, clients=16)
        assert {reply.status for reply in replies} == {200}, replies[0].body
        answers.append(replies[0].json())
    first = answers[0]
    for other in answers[1:]:
        assert other["label"] == first["label"]
        assert other["unknown_score"] == pytest.approx(first["unknown_score"], rel=1e-5)
        assert other.keys() == first.keys()


class GraphAlone(NamedTuple):
    """Milliseconds of one run of the graph on one image."""

    median: float
    mean: float
    cpu: float


def graph_alone(model: BundleModel, pause: float = 0.0) -> GraphAlone:
    """Run the graph for a second, each time `pause` seconds after the last."""
    pixels = model.bundle.golden.pixels[:1]
    taken = []
    until = time.perf_counter() + 1.0
    cpu = time.process_time()
    while time.perf_counter() < until:
        if pause:
            time.sleep(pause)
        started = time.perf_counter()
        model.run(pixels)
        taken.append(time.perf_counter() - started)
    cpu = time.process_time() - cpu
    return GraphAlone(1000 * float(np.median(taken)), 1000 * float(np.mean(taken)), 1000 * cpu / len(taken))
