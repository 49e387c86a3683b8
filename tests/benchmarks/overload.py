"""More clients than the queue of a server holds: its responses, its latency and its memory.

Rounds with fewer clients take turns with rounds of overload, because other work on the machine comes and goes. The best
of them is the peak: of clients that connect all at once, one worker may take nearly all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from serving.bundle.manifest import INPUT_NAME
from tests.helpers_serving import Server, image_bytes, tiny_graph, write_bundle
from tests.load import Figures, Reply, http_request, megabytes, repeat_for, send, workers

FEWER_CLIENTS, CLIENTS = (8, 16, 32), 64


@dataclass(frozen=True)
class Room:
    """Workers that run one image at a time, and the queue length of each."""

    workers: int
    queue: int

    @property
    def images(self) -> int:
        return self.workers * self.queue

    @property
    def settings(self) -> dict[str, str]:
        return {
            "OPENWORLD_WORKERS": str(self.workers),
            "OPENWORLD_THREADS": "1",
            "OPENWORLD_QUEUE": str(self.queue),
            "OPENWORLD_BATCH": "1",
        }


@dataclass(frozen=True)
class Overload:
    """The measurements of all rounds together."""

    room: Room
    replies: list[Reply]
    peak: float
    overloaded: Figures
    grown: float
    """Megabytes by which the largest worker grew after the first round."""
    same_workers: bool

    @property
    def kept(self) -> float:
        """Answers per second under overload, as a share of the peak."""
        return self.overloaded.rate / self.peak

    def places(self, percentile: float) -> float:
        """Answers to others between a request and its own answer, as a percentile of all accepted requests.

        Counted instead of timed, so that other load on the machine has no effect: an accepted request has at
        most a full queue before it.
        """
        accepted = [reply for reply in self.replies if reply.status == 200]
        ends = np.sort([reply.sent + reply.seconds for reply in accepted])
        sent = np.array([reply.sent for reply in accepted])
        own = sent + np.array([reply.seconds for reply in accepted])
        return float(np.percentile(np.searchsorted(ends, own) - np.searchsorted(ends, sent, side="right"), percentile))

    @property
    def full_queue(self) -> float:
        """Milliseconds that the last request in a full queue waits."""
        return 1000 * min(self.room.images, CLIENTS) / self.overloaded.rate

    def __str__(self) -> str:
        sent_away = sum(reply.status == 503 for reply in self.replies)
        return (
            f"{CLIENTS} clients, room for {self.room.images}: {len(self.replies) - sent_away} answered, "
            f"{sent_away} sent away; {self.overloaded.rate:.0f} answers/s, {self.kept:.2f} of {self.peak:.0f} "
            f"with fewer clients; p99 {self.overloaded.p99:.0f} ms, "
            f"{self.overloaded.p99 / self.full_queue:.2f} of a full queue, {self.places(99):.0f} places; "
            f"worker grew {self.grown:+.1f} MB"
        )


def overload(server: Server, room: Room, *, seconds: float, rounds: int, polite: bool = True) -> Overload:
    """`seconds` of overload in total; polite clients wait for the time in Retry-After."""
    request = http_request("/predict", image_bytes())
    before = workers(server, room.workers)
    send(server.port, [request] * 50, clients=room.workers)
    calm: dict[int, list[Figures]] = {clients: [] for clients in FEWER_CLIENTS}
    overloads, replies = [], []
    start = 0.0
    for number in range(rounds):
        for clients, figures in calm.items():
            found = send(server.port, repeat_for(0.5, request), clients=clients, after=retry_after)
            figures.append(Figures.of(found))
        storm = repeat_for(seconds / rounds, request)
        found = send(server.port, storm, clients=CLIENTS, after=retry_after if polite else None)
        overloads.append(Figures.of(found))
        replies += found
        if number == 0:
            start = megabytes(before)
    peak = max(Figures.median(figures).rate for figures in calm.values())
    grown = megabytes(before) - start
    same = workers(server, room.workers) == before
    return Overload(room, replies, peak, Figures.median(overloads), grown, same)


def retry_after(reply: Reply) -> float:
    return float(reply.header("retry-after") or 0)


def assert_orderly(seen: Overload) -> None:
    """Every request is answered, or refused with a Retry-After."""
    crowded = seen.room.images < CLIENTS
    assert {reply.status for reply in seen.replies} == ({200, 503} if crowded else {200})
    for reply in seen.replies:
        if reply.status == 503:
            assert retry_after(reply) >= 1
            assert reply.json()["error"]["code"] == "busy"
    assert seen.same_workers


def heavy_bundle(folder: Path, layers: int = 40) -> Path:
    """The colours, behind convolutions that change nothing and take some ten milliseconds."""
    return write_bundle(folder, graph=_heavy(tiny_graph(), layers))


def _heavy(model: ModelProto, layers: int, channels: int = 96) -> ModelProto:
    graph = model.graph
    generator = np.random.default_rng(0)
    shape = [(channels, 3 if layer == 0 else channels, 3, 3) for layer in range(layers)]
    weights = [generator.normal(0, (2 / np.prod(one[1:])) ** 0.5, one).astype(np.float32) for one in shape]
    graph.initializer.extend(numpy_helper.from_array(value, f"weight{n}") for n, value in enumerate(weights))
    graph.initializer.append(numpy_helper.from_array(np.array(0, dtype=np.float32), "nothing"))
    graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3]), "all"))
    nodes = [
        helper.make_node("Cast", [INPUT_NAME], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["layer0"], perm=[0, 3, 1, 2]),
    ]
    for n in range(layers):
        nodes.append(helper.make_node("Conv", [f"layer{n}", f"weight{n}"], [f"sum{n}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"sum{n}"], [f"layer{n + 1}"]))
    nodes += [
        helper.make_node("ReduceMean", [f"layer{layers}", "all"], ["one"], keepdims=0),
        helper.make_node("Mul", ["one", "nothing"], ["zero"]),
        helper.make_node("Unsqueeze", ["zero", "middle"], ["column"]),
    ]
    (place,) = (n for n, node in enumerate(graph.node) if "logits" in node.output)
    graph.node[place].output[0] = "light"
    after = list(graph.node)[place + 1 :]
    del graph.node[place + 1 :]
    graph.node.extend([*nodes, helper.make_node("Add", ["light", "column"], ["logits"]), *after])
    return model
