"""A change of the images, as a server with two workers reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serving.client import Client
from tests.helpers_serving import PATIENCE, Server, eventually, http_get, metric, saved, serving

pytestmark = pytest.mark.long

IMAGES = 240
EVERY = 100_000
"""So rare are false alarms that at most one of 400 runs of this test has one before the change."""


def reddish(random: np.random.Generator, spread: int) -> bytes:
    """An image of the class red, by `spread` away from the pure colour."""
    return saved(Image.new("RGB", (8, 8), (255, int(random.integers(spread)), int(random.integers(spread)))))


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"OPENWORLD_WORKERS": "2", "OPENWORLD_DRIFT_EVERY": str(EVERY)}
    with serving(tmp_path_factory.mktemp("home"), bundle, settings=settings) as running:
        eventually(lambda: metric(running, "openworld_queue_limit") == 256)
        yield running


def send(client: Client, spread: int, name: str) -> None:
    """Over the one connection of a client, and so to one worker."""
    random = np.random.default_rng(spread)
    for start in range(0, IMAGES, 60):
        images = [reddish(random, spread) for _ in range(60)]
        answers = client.predict_many(images, request_id=f"{name}-{start}")
        assert all(getattr(answer, "best_guess", None) == "red" for answer in answers)


def report(server: Server) -> dict[str, Any]:
    return dict(http_get(f"{server.url}/drift").json())


def everywhere(server: Server, client: Client, check: Callable[[dict[str, Any]], Any]) -> None:
    """Wait until the report of either worker fulfils the check; a new connection leads to any of them.

    The client asks as well: its connection would be closed after five idle seconds, and the next one might lead to the
    other worker, which has nothing to compare later images with.
    """

    def asked() -> bool:
        client.drift()
        return bool(check(report(server)))

    eventually(lambda: all(asked() for _ in range(6)))


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=PATIENCE) as client:
        yield client


def test_a_change_reaches_report_metrics_client_and_log(server: Server, client: Client) -> None:
    send(client, 40, "before")
    # Each worker reports for both, once they have published their state.
    everywhere(server, client, lambda found: found["tests"][0]["images"] == IMAGES)
    before = report(server)
    client.drift()
    assert before["alarms"] == []
    assert [test["task"] for test in before["tests"]] == [None, 0, 1]
    assert before["unknown"]["images"] == IMAGES
    assert before["unknown"]["low"] <= before["unknown"]["share"] <= before["unknown"]["high"]
    # The series are there before the first alarm, or the alert rule would not see it as an increase.
    exposed = http_get(f"{server.url}/metrics").text.splitlines()
    assert {f'openworld_drift_alarms_total{{task="{task}"}} 0.0' for task in ("all", 0, 1)} <= {*exposed}

    client.drift()
    send(client, 90, "after")
    everywhere(server, client, lambda found: found["alarms"])
    alarm = eventually(lambda: report(server)["alarms"])[0]
    assert alarm["task"] in (0, None)
    assert alarm["change"] in ("less familiar", "brighter")
    assert alarm["since"] <= alarm["at"]
    assert any(example["request_id"].startswith("after") for example in alarm["examples"])
    assert eventually(lambda: client.drift().alarms)[0].before == alarm["before"]
    assert client.drift().every == EVERY
    assert metric(server, "openworld_drift_alarms_total") >= 1
    assert metric(server, "openworld_drift_since_seconds") > 1.6e9
    assert metric(server, "openworld_unknown_ratio_low") <= metric(server, "openworld_unknown_ratio")
    assert metric(server, "openworld_unknown_ratio") <= metric(server, "openworld_unknown_ratio_high")
    eventually(lambda: f"have changed: they are {alarm['change']} since" in server.log.read_text())


def test_answers_within_a_given_task_are_not_watched(server: Server, client: Client) -> None:
    everywhere(server, client, lambda found: found["unknown"]["images"] == 2 * IMAGES)
    before = report(server)["tests"]
    client.predict_many([reddish(np.random.default_rng(0), 5)] * 20, task=1)
    everywhere(server, client, lambda found: found["unknown"]["images"] == 2 * IMAGES + 20)
    assert report(server)["tests"] == before
