"""Many clients at once: correct answers, and orderly refusals when there are too many."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from serving.bundle.model import BundleModel
from serving.inference.answers import PredictionOptions, answer_image
from serving.settings import Settings
from tests.benchmarks.overload import Room, assert_orderly, heavy_bundle, overload
from tests.conftest import ReportLine
from tests.helpers_serving import (
    COLOURS,
    GREY,
    Server,
    eventually,
    image_bytes,
    metric,
    saved,
    serving,
    write_bundle,
)
from tests.load import http_request, send, workers

pytestmark = pytest.mark.long

KEPT = 0.3
"""Least share of the peak's answers per second: a server that collapses under overload keeps far less. The exact share
is measured by tests/benchmarks/test_overload_minute.py."""
ATTEMPTS = 5
"""Attempts before a test fails, because other load may use the processors for a while."""
PLACES = 3.0
"""Upper limit of answers before that of a typical accepted request, in queue lengths; all clients would be 8."""
GROWTH = 32.0
"""Allowed memory growth in megabytes."""

ROOM = Room(workers=1, queue=8)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker with a short queue, and some milliseconds of work per image."""
    bundle = heavy_bundle(tmp_path_factory.mktemp("heavy") / "bundle")
    with serving(tmp_path_factory.mktemp("home"), bundle, settings=ROOM.settings) as server:
        yield server


def test_clients_that_honour_retry_after(busy: Server, report_line: ReportLine) -> None:
    for _ in range(ATTEMPTS):
        seen = overload(busy, ROOM, seconds=4, rounds=2)
        assert_orderly(seen)
        assert seen.grown <= GROWTH
        if seen.kept >= KEPT and seen.places(50) <= PLACES * ROOM.images:
            break
    report_line(f"overload, polite, {seen}")
    assert seen.kept >= KEPT
    assert seen.places(50) <= PLACES * ROOM.images


def test_clients_that_retry_at_once(busy: Server, report_line: ReportLine) -> None:
    """Immediate retries cost the server time and are refused, but no request is lost."""
    seen = overload(busy, ROOM, seconds=2, rounds=1, polite=False)
    report_line(f"overload, impolite, {seen}")
    assert_orderly(seen)


def test_a_client_that_hangs_up_costs_nothing_more(busy: Server) -> None:
    """Its images take most of a second; those that are not run when the client disconnects never run."""
    images = [("images", image_bytes())] * Settings().max_images
    request = httpx.Request("POST", f"{busy.url}/predict_many", files=images)
    body = request.read()
    for _ in range(4 * ATTEMPTS):
        before, gone = answers(busy), clients_gone(busy)
        with socket.create_connection(("127.0.0.1", busy.port)) as connection:
            connection.sendall(http_request("/predict_many", body, request.headers["content-type"]))
            eventually(lambda before=before: metric(busy, "openworld_queue_depth") or answers(busy) > before)
        eventually(lambda: metric(busy, "openworld_queue_depth") == 0)
        answered = answers(busy) - before
        # Under other load, all images may have been answered before the client could disconnect.
        if answered < Settings().max_images:
            break
    assert answered < Settings().max_images
    eventually(lambda: clients_gone(busy) > gone)


def answers(server: Server) -> float:
    return metric(server, "openworld_answers_total")


def clients_gone(server: Server) -> float:
    return metric(server, "openworld_rejected_total", reason="client_gone")


def test_every_answer_belongs_to_its_image(tmp_path: Path) -> None:
    """1,000 requests from 32 clients to two workers that run images together."""
    bundle = write_bundle(tmp_path / "bundle")
    images = mixed_images()
    model = BundleModel.load(bundle, provider="cpu")
    wanted = [
        answer_image(model, image, PredictionOptions.for_model(model)).model_dump(mode="json") for image in images
    ]
    requests = [http_request("/predict", images[number % len(images)]) for number in range(1000)]
    together = {"OPENWORLD_WORKERS": "2", "OPENWORLD_BATCH": "8"}
    with serving(tmp_path / "home", bundle, settings=together) as server:
        workers(server, 2)
        replies = send(server.port, requests, clients=32)
    assert sorted(reply.number for reply in replies) == list(range(1000))
    for reply in replies:
        assert reply.status == 200, reply.body
        assert_same(reply.json(), wanted[reply.number % len(images)])


def mixed_images() -> list[bytes]:
    """Known, unknown and borderline images, in all formats and several sizes."""
    noise = random.Random(0)
    images = [image_bytes(colour, kind=kind) for colour in COLOURS.values() for kind in ("PNG", "BMP")]
    images.append(image_bytes(GREY))
    for side in (3, 8, 40, 200):
        picture = Image.frombytes("RGB", (side, side), noise.randbytes(side * side * 3))
        images += [saved(picture, kind) for kind in ("PNG", "JPEG", "WEBP")]
    return images + [image_bytes((noise.randrange(256), noise.randrange(256), 0)) for _ in range(40)]


def assert_same(got: Any, wanted: Any) -> None:
    """Equal up to the last digit of numbers: another batch may sum in another order."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(got[key], value)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == (pytest.approx(wanted, rel=1e-5, abs=1e-9) if isinstance(wanted, float) else wanted)
