"""Metrics and logs of a server with two workers, over real HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.telemetry.metrics import exposition
from tests.helpers_serving import (
    COLOURS,
    GREY,
    ROOT,
    Server,
    eventually,
    http_get,
    http_post,
    image_bytes,
    metric,
    serving,
)

pytestmark = pytest.mark.long

KNOWN, UNKNOWN = 12, 4


@pytest.fixture(scope="module")
def pair(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers that have answered some requests, each over a connection of its own."""
    settings = {"OPENWORLD_WORKERS": "2", "OPENWORLD_QUEUE": "5", "OPENWORLD_TRACING": "on"}
    with serving(tmp_path_factory.mktemp("home"), bundle, settings=settings) as running:
        # A connection may reach either worker, so both must be ready first.
        eventually(lambda: metric(running, "openworld_queue_limit") == 10)
        for number in range(KNOWN):
            colour = list(COLOURS.values())[number % 4]
            assert http_post(f"{running.url}/predict", content=image_bytes(colour)).status_code == 200
        grey = [("images", image_bytes(GREY))] * UNKNOWN
        assert http_post(f"{running.url}/predict_many", files=[*grey, ("images", b"junk")]).status_code == 200
        http_post(f"{running.url}/predict_many?task=9", content=b"")
        for path in ("/a", "/b", "/c?d=e"):
            http_get(f"{running.url}{path}", headers={"x-request-id": "stranger"})
        yield running


def settled(server: Server, expected: float, name: str, /, **labels: str) -> bool:
    """Either worker returns the sum over both, once both have written their values."""
    eventually(lambda: metric(server, name, **labels) == expected)
    return all(metric(server, name, **labels) == expected for _ in range(4))


def test_answers_are_counted_over_all_workers(pair: Server) -> None:
    assert settled(pair, KNOWN + UNKNOWN, "openworld_answers_total")
    assert settled(pair, KNOWN, "openworld_answers_total", known="true")
    assert settled(pair, KNOWN / 4, "openworld_answers_total", known="true", task="1", label="yellow")
    assert settled(pair, KNOWN + UNKNOWN, "openworld_p_value_count")
    assert settled(pair, UNKNOWN, "openworld_p_value_bucket", le="0.05")


def test_the_sliding_window_is_one_over_all_workers(pair: Server) -> None:
    assert settled(pair, UNKNOWN / (KNOWN + UNKNOWN), "openworld_unknown_ratio")
    assert settled(pair, KNOWN + UNKNOWN, "openworld_recent_answers")


def test_every_stage_is_timed(pair: Server) -> None:
    for stage in ("decode", "queue", "inference"):
        assert settled(pair, KNOWN + UNKNOWN, "openworld_stage_seconds_count", stage=stage)
        assert 0 < metric(pair, "openworld_stage_seconds_sum", stage=stage) < 10
    assert settled(pair, KNOWN + UNKNOWN, "openworld_batch_size_sum")
    assert settled(pair, KNOWN, "openworld_request_seconds_count", endpoint="/predict")


def test_refusals_are_counted_by_reason(pair: Server) -> None:
    assert settled(pair, 1, "openworld_rejected_total", reason="unsupported_image")
    assert settled(pair, 1, "openworld_rejected_total", reason="bad_parameter")


def test_unknown_paths_add_no_series(pair: Server) -> None:
    assert settled(pair, 3, "openworld_requests_total", endpoint="other", status="404")
    text = http_get(f"{pair.url}/metrics").text
    assert 'endpoint="/a"' not in text


def test_the_served_bundle_is_in_the_metrics(pair: Server) -> None:
    served = http_get(f"{pair.url}/model").json()
    labels = {"name": served["name"], "version": served["version"], "provider": served["provider"]}
    assert settled(pair, 1, "openworld_model_info", **labels)
    assert settled(pair, 0, "openworld_queue_depth")


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


def test_every_request_is_a_line_of_json(pair: Server) -> None:
    def requests() -> list[dict[str, Any]]:
        return [line for line in lines(pair) if line["logger"] == "openworld.request"]

    def of_strangers() -> list[dict[str, Any]]:
        return [line for line in requests() if line["request_id"] == "stranger"]

    def answered() -> list[dict[str, Any]]:
        return [line for line in requests() if line["path"] == "/predict" and line["status"] == 200]

    # A line is written after its response, by either worker.
    eventually(lambda: len(of_strangers()) == 3 and len(answered()) >= KNOWN)
    strangers = of_strangers()
    assert {(line["path"], line["status"], line["error"]) for line in strangers} == {
        (path, 404, "not_found") for path in ("/a", "/b", "/c")
    }
    assert len(answered()) == KNOWN
    assert all(line["milliseconds"] > 0 and "error" not in line for line in answered())


def test_predictions_are_traced_if_asked_for(pair: Server, client: httpx.Client) -> None:
    """The response names the trace, which a caller may have begun."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    begun = {"x-request-id": "mine", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    traced = http_post(f"{pair.url}/predict", content=b"junk", headers=begun)
    assert traced.headers["x-trace-id"] == trace
    assert (traced.status_code, traced.json()["request_id"]) == (415, "mine")
    assert "x-trace-id" not in client.post("/predict", content=b"junk", headers=begun).headers


def test_a_worker_logs_json(pair: Server) -> None:
    for part in ("on CPUExecutionProvider", "batches are"):

        def messages(part: str = part) -> list[str]:
            logged = [line["message"] for line in lines(pair) if line["logger"] == "bentoml.openworld"]
            return [message for message in logged if part in message]

        eventually(lambda: len(messages()) == 2)


def test_a_dead_worker_is_not_counted(tmp_path: Path) -> None:
    """Even if no new worker replaces it and cleans up its files."""
    worker = """
import os, signal, sys
from serving.telemetry import metrics
metrics.WORKER.set(1)
metrics.DEPTH.set(float(sys.argv[1]))
metrics.SWAPS.labels("published").inc()
print(metrics.exposition().decode())
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def killed(depth: int) -> str:
        command = [sys.executable, "-c", worker, str(depth)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout

    assert "openworld_queue_depth 7.0" in killed(7)
    second = killed(2)
    assert "openworld_queue_depth 2.0" in second
    assert 'openworld_swaps_total{outcome="published"} 2.0' in second, "what a killed worker has counted stays"
    assert "openworld_worker" not in second


def test_without_workers_the_page_still_works() -> None:
    assert b"openworld_unknown_ratio" in exposition()
