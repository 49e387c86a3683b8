"""What a server reports arrives at real collectors: metrics at Prometheus, traces at an OpenTelemetry collector.

The first needs Debian's package prometheus, which `.ci/run` installs; the second needs the extra `collector`, which
`.ci/run` installs too, if there is a wheel of rotel for the system. Each is skipped where they are missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers_serving import COLOURS, GREY, ROOT, eventually, free_port, http_get, http_post, image_bytes, serving

pytestmark = pytest.mark.long

DOCS = ROOT / "docs"
TRACE = "0af7651916cd43dd8448eb211c80319c"
NOT_EXPECTED = {"Last change began", "Swaps by outcome", "Lost, failed and evicted"}
"""Panels that stay empty as long as nothing of the kind happens."""


@contextlib.contextmanager
def running(command: list[str | Path], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def answers(url: str) -> bool:
    try:
        return http_get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_prometheus_accepts_the_rules_and_the_configuration_of_the_compose_file() -> None:
    for words in (
        ["rules", DOCS / "prometheus-rules.yaml"],
        ["config", "--syntax-only", DOCS / "compose/prometheus.yaml"],
    ):
        done = subprocess.run(["promtool", "check", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def drift_rules_tests() -> dict[str, Any]:
    """What promtool checks: minutes of the two series that the drift alerts watch, and the alerts that must fire."""
    alarms = 'openworld_drift_alarms_total{task="%s", pod="a"}'
    evidence = 'openworld_drift_evidence{task="1", namespace="n", pod="%s"}'

    def fires(alert: str, minute: int, *labels: dict[str, str]) -> dict[str, Any]:
        wanted = [{"exp_labels": {"severity": "warning", **each}} for each in labels]
        return {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": wanted}

    changed, together = "OpenworldImagesChanged", "OpenworldImagesChangedOverWorkers"
    return {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    # An alarm in minute 10; another task is quiet.
                    {"series": alarms % 0, "values": "0x9 1x120"},
                    {"series": alarms % "all", "values": "0x130"},
                    # Enough evidence from minute 5 to minute 8.
                    {"series": evidence % "a", "values": "0.5x4 1.2x3 0x120"},
                    {"series": evidence % "b", "values": "0.9x130"},
                ],
                "alert_rule_test": [
                    fires(changed, 9),
                    fires(changed, 12, {"task": "0"}),
                    # An hour later it is over.
                    fires(changed, 80),
                    fires(together, 3),
                    fires(together, 6, {"task": "1", "namespace": "n", "pod": "a"}),
                    fires(together, 10),
                ],
            }
        ],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_the_drift_alerts_fire_after_an_alarm_and_end(tmp_path: Path) -> None:
    rules = yaml.safe_load((DOCS / "prometheus-rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            # Their wording is not what is tested.
            rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(drift_rules_tests()))
    command = ["promtool", "test", "rules", "tests.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus")
def test_every_panel_of_the_dashboard_has_data_in_a_real_prometheus(bundle: Path, tmp_path: Path) -> None:
    settings = {"OPENWORLD_QUARANTINE_URL": f"sqlite:///{tmp_path}/quarantine.db"}
    with serving(tmp_path / "home", bundle, settings=settings) as server:
        configuration = yaml.safe_load((DOCS / "compose/prometheus.yaml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration["rule_files"] = [str(DOCS / "prometheus-rules.yaml")]
        configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        url = f"127.0.0.1:{free_port()}"
        command: list[str | Path] = ["prometheus", "--config.file=prometheus.yaml", f"--web.listen-address={url}"]

        def answers_of(expression: str) -> list[Any]:
            for sent in (*COLOURS.values(), GREY):
                http_post(f"{server.url}/predict", content=image_bytes(sent))
            http_post(f"{server.url}/predict", content=b"junk")
            found = http_get(f"http://{url}/api/v1/query", params={"query": expression}).json()
            assert found["status"] == "success", (expression, found)
            return list(found["data"]["result"])

        with running(command, tmp_path / "prometheus.log"):
            eventually(lambda: answers(f"http://{url}/-/ready"))
            for title, expression in panels():
                if title in NOT_EXPECTED:
                    answers_of(expression)
                else:
                    assert eventually(lambda asked=expression: answers_of(asked)), title  # type: ignore[misc]
            groups = http_get(f"http://{url}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(yaml.safe_load((DOCS / "prometheus-rules.yaml").read_text())["groups"][0]["rules"])
    assert {rule["health"] for rule in rules} == {"ok"}


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression, with the variables of the dashboard at their defaults."""
    for panel in json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], re.sub(r"\$__rate_interval", "1m", re.sub(r"\$(namespace|pod)", ".*", target["expr"]))


@pytest.mark.skipif(importlib.util.find_spec("rotel") is None, reason="no rotel")
def test_traces_arrive_at_an_opentelemetry_collector(bundle: Path, tmp_path: Path) -> None:
    """With the configuration that the guide shows."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    (guide,) = re.findall(r"```yaml\n(services:.*?)```", (DOCS / "howto/deploy.md").read_text(), re.DOTALL)
    grpc, http = free_port(), free_port()
    configuration = tmp_path / "bentoml.yaml"
    shown = guide.replace("collector:4318", f"127.0.0.1:{http}").replace("sample_rate: 0.1", "sample_rate: 1.0")
    configuration.write_text(shown)
    assert shown != guide
    found = importlib.util.find_spec("rotel")
    assert found is not None
    assert found.origin is not None
    agent = Path(found.origin).with_name("rotel-agent")
    command = [agent, "start", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"]
    received = tmp_path / "collector.log"
    settings = {"OPENWORLD_TRACING": "on", "BENTOML_CONFIG": str(configuration)}
    with running(command, received), serving(tmp_path / "home", bundle, settings=settings) as server:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answer = http_post(f"{server.url}/predict", content=image_bytes(GREY), headers=headers)
        assert answer.headers["x-trace-id"] == TRACE
        spans = eventually(lambda: spans_of(TRACE, received.read_text()))
    (request,) = [span for span in spans if "SPAN_KIND_SERVER" in span]
    assert re.search(r"Name +: POST /predict\n", request)
    assert re.search(r"Parent ID +: b7ad6b7169203331\n", request), "it continues the trace of the caller"
    assert re.search(r"http.status_code: Int\(200\)", request)


def spans_of(trace: str, log: str) -> list[str]:
    """The spans of a trace, once the one of the request itself is among them."""
    found = [span for span in re.split(r"Span #\d+", log) if re.search(rf"Trace ID +: {trace}", span)]
    return found if any("SPAN_KIND_SERVER" in span for span in found) else []
