"""The files for operators agree with the code: manifests, dashboard, image, guide and settings reference."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from packaging.requirements import Requirement

from models.trunks import cache_settings
from serving.__main__ import GRACE
from serving.http.middleware import PROBES
from serving.settings import PREFIX, Settings, WorkerSettings, variable
from serving.telemetry.metrics import exposition
from tests.helpers_bento import PACKAGES, build_bento, entry_script
from tests.helpers_serving import (
    GRAPH,
    ROOT,
    http_get,
    http_post,
    image_bytes,
    serving,
    write_bundle,
)
from tests.load import workers

DOCS = ROOT / "docs"
GUIDE, SETTINGS = DOCS / "howto/deploy.md", DOCS / "reference/settings.md"
KUBERNETES = DOCS / "kubernetes"
VARIABLES = {variable(name) for name in Settings.model_fields}
OF_LEARNING = {cache_settings.FOLDER_VARIABLE, cache_settings.LIMIT_VARIABLE}


def manifest(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((KUBERNETES / name).read_text()))


@pytest.fixture
def pod() -> dict[str, Any]:
    return dict(manifest("deployment.yaml")["spec"]["template"]["spec"])


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


@pytest.fixture(scope="module")
def bento(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bento built from a copy of the project with a tiny bundle: what an image is made from."""
    return build_bento(tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("project"), write_bundle)


@pytest.fixture(scope="module")
def dockerfile(bento: Path) -> str:
    return (bento / "env/docker/Dockerfile").read_text()


# ---- Kubernetes


@pytest.mark.parametrize(
    "folder",
    [KUBERNETES, KUBERNETES / "dockerfile-image", KUBERNETES / "shared-bundle"],
    ids=lambda folder: folder.name,
)
def test_every_manifest_is_listed_and_every_listed_one_exists(folder: Path) -> None:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    listed = {*kustomization.get("resources", []), *(patch["path"] for patch in kustomization.get("patches", []))}
    held = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml", "prometheus-adapter.yaml"}
    assert listed == held
    for path in folder.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            assert document, path


def test_probes_ask_pages_that_exist(container: dict[str, Any]) -> None:
    (port,) = container["ports"]
    assert port["containerPort"] == 3000
    for name, path in {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}.items():
        assert container[name]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in PROBES
    annotations = manifest("deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in PROBES
    assert annotations["prometheus.io/port"] == "3000"


def test_the_manifests_belong_together() -> None:
    name, labels = "openworld", {"app": "openworld"}
    deployment = manifest("deployment.yaml")
    assert deployment["metadata"]["name"] == name
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert deployment["spec"]["template"]["metadata"]["labels"] == labels
    assert "replicas" not in deployment["spec"], "each apply would undo the autoscaler"
    assert manifest("service.yaml")["spec"]["selector"] == labels
    assert manifest("service.yaml")["spec"]["ports"][0]["targetPort"] == "http"
    assert manifest("disruption.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("network.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert manifest("autoscaler.yaml")["spec"]["scaleTargetRef"]["name"] == name
    assert manifest("shared-bundle/mount.yaml")["metadata"]["name"] == name


def test_a_replica_has_no_more_rights_than_it_needs(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    home = next(entry["value"] for entry in container["env"] if entry["name"] == "BENTOML_HOME")
    assert mounted == {home, "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert manifest("network.yaml")["spec"]["egress"] == []


def test_a_replica_has_time_to_finish(pod: dict[str, Any], container: dict[str, Any]) -> None:
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= pause + Settings().deadline + 10
    serve, option, seconds = container["args"]
    assert (serve, option) == ("serve", "--timeout-graceful-shutdown")
    assert int(seconds) == Settings().deadline + GRACE
    assert pod["terminationGracePeriodSeconds"] > pause + int(seconds)


def test_a_replica_has_a_key(container: dict[str, Any]) -> None:
    (key,) = [entry for entry in container["env"] if entry["name"] == "OPENWORLD_API_KEY"]
    assert not key["valueFrom"]["secretKeyRef"].get("optional", False), "it listens on all interfaces"
    assert 'OPENWORLD_API_KEY="$KEY"' in GUIDE.read_text()


def test_only_settings_that_exist_are_set(container: dict[str, Any]) -> None:
    (patched,) = manifest("shared-bundle/mount.yaml")["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container["name"]
    ours = {entry["name"] for entry in [*container["env"], *patched["env"]] if entry["name"].startswith(PREFIX)}
    assert ours <= VARIABLES


# ---- metrics


def series() -> set[str]:
    """Every name that a query may use."""
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    found = set()
    for name, kind in re.findall(r"^# TYPE (openworld_\w+) (\w+)$", exposition().decode(), re.MULTILINE):
        found |= {name.removesuffix("_total") + end for end in ends[kind]}
    return {name for name in found if not name.endswith("_created")}


def expressions() -> Iterator[str]:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for choice in dashboard["templating"]["list"]:
        if choice["type"] == "query":
            yield choice["query"]["query"]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    used = set(re.findall(r"openworld_\w+", " ".join(expressions())))
    assert used <= series()
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in used}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in series()} == shown, "not shown at all"


def test_the_dashboard_asks_by_labels_that_exist() -> None:
    # The scraper adds the last two, Prometheus's histograms the first.
    known = {"le", "namespace", "pod"}
    known |= {"endpoint", "status", "stage", "task", "label", "known", "reason", "outcome", "part", "cap"}
    known |= {"name", "version", "provider"}
    for expression in expressions():
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= known, expression
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("{") == expression.count("}"), expression


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


def test_the_autoscaler_and_the_alerts_use_metrics_that_exist() -> None:
    (queue,) = [metric for metric in manifest("autoscaler.yaml")["spec"]["metrics"] if metric["type"] == "Pods"]
    assert queue["pods"]["metric"]["name"] in series()
    (rule,) = manifest("prometheus-adapter.yaml")["rules"]["custom"]
    assert rule["seriesQuery"].startswith(queue["pods"]["metric"]["name"] + "{")
    assert "[2m]" in rule["metricsQuery"], "a minute may hold no scrape at all"
    assert set(re.findall(r"openworld_\w+", GUIDE.read_text())) <= series()


def test_alert_rules_use_metrics_that_exist() -> None:
    (group,) = yaml.safe_load((DOCS / "prometheus-rules.yaml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 5
    for rule in group["rules"]:
        assert set(re.findall(r"openworld_\w+", rule["expr"])) <= series(), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


# ---- the image


def test_the_image_is_small_unprivileged_and_without_training(dockerfile: str, pod: dict[str, Any]) -> None:
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["python:3.11-slim"]
    assert re.findall(r"^USER (\S+)", dockerfile, re.MULTILINE)[-1] == "bentoml"
    (user,) = re.findall(r"^ARG BENTO_USER_UID=(\d+)", dockerfile, re.MULTILINE)
    assert int(user) == pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"]
    assert "EXPOSE 3000" in dockerfile
    assert "torch" not in dockerfile
    for name, value in {
        "BENTOML_DO_NOT_TRACK": "True",
        "ORT_DISABLE_TELEMETRY": "1",
        "BENTOML_HOST": "0.0.0.0",
    }.items():
        assert f"ARG {name}={value}" in dockerfile
        assert f"ENV {name}=${name}" in dockerfile


def test_the_image_starts_as_the_manifest_starts_it(dockerfile: str, container: dict[str, Any]) -> None:
    (entry_point,) = re.findall(r'^ENTRYPOINT \[ "(\S+)" \]', dockerfile, re.MULTILINE)
    assert container["command"] == ["env", "-u", "BENTOML_CONTAINERIZED", entry_point]
    home = next(entry["value"] for entry in container["env"] if entry["name"] == "BENTOML_HOME")
    assert not entry_point.startswith(home), "the writable folder would hide the service"


def test_the_image_holds_what_was_tested(bento: Path) -> None:
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    installed = (bento / "env/python/requirements.txt").read_text().splitlines()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for machine in ("x86_64", "aarch64"):
        environment = {"sys_platform": "linux", "platform_machine": machine}
        pinned = {each.name: str(each.specifier) for each in applying(installed, environment)}
        names = {each.name for each in applying(needed, environment)}
        assert pinned == {name: f"=={tested[name]}" for name in names}
        assert ("onnxruntime-gpu" in names) == (machine == "x86_64")


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("linux", "x86_64", {"onnxruntime-gpu", "uvloop"}),
        ("linux", "aarch64", {"onnxruntime", "uvloop"}),
        ("darwin", "arm64", {"onnxruntime", "uvloop"}),
        ("win32", "AMD64", {"onnxruntime-gpu"}),
        ("win32", "ARM64", {"onnxruntime"}),
    ],
)
def test_every_system_gets_packages_that_exist_for_it(system: str, machine: str, expected: set[str]) -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {each.name for each in applying(needed, {"sys_platform": system, "platform_machine": machine})}
    assert names & {"onnxruntime-gpu", "onnxruntime", "uvloop"} == expected


def applying(requirements: Iterable[str], environment: dict[str, str]) -> list[Requirement]:
    """The requirements that are installed on a system, of lines with and without a marker."""
    every = [Requirement(line) for line in requirements if line.strip()]
    return [each for each in every if each.marker is None or each.marker.evaluate(environment)]


def test_the_image_holds_bundle_samples_and_serving_alone(bento: Path) -> None:
    source = bento / "src"
    held = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    files = [path for path in (ROOT / "serving").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    bundle = {
        f"runs/demo/bundle/{name}" for name in ("manifest.json", "rule.json", GRAPH, "golden.npz", "MODEL_CARD.md")
    }
    assert held - {"bentofile.yaml", "README.md"} == expected | bundle | {"runs/demo/samples/red.png"}


@pytest.mark.long
def test_the_entry_point_serves_page_samples_and_answers(
    bento: Path, container: dict[str, Any], tmp_path: Path
) -> None:
    """The script that the image runs, with the manifest's arguments and this machine's paths.

    With enough rights, the test runs it as the image's user, on a file system where only the home is writable.
    """
    with entered(bento, container["args"], tmp_path) as server:
        (worker,) = workers(server, 1)
        assert " ".join(container["args"][1:]) in " ".join(worker.cmdline())
        if may_confine():
            assert psutil.Process(server.process.pid).uids().real == USER
            assert "ro" in root_options(server.process.pid)
        assert "<title>openworld</title>" in http_get(server.url).text
        assert http_get(f"{server.url}/samples").json() == {"samples": ["red.png"]}
        assert http_post(f"{server.url}/predict", files={"image": image_bytes()}).json()["label"] == "red"
        assert http_get(f"{server.url}/docs.json").status_code == 200


USER = 1034


@functools.cache
def may_confine() -> bool:
    """Whether this process may create such a file system, in a mount namespace that ends with the server."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))):
        return False
    trial = ["unshare", "-m", "mount", "-o", "remount,ro,bind", "/"]
    return subprocess.run(trial, check=False, capture_output=True).returncode == 0


def confined(home: Path) -> list[str]:
    """A command prefix: run as another user, who can read everything that root can, and write only to `home`."""
    if not may_confine():
        return []
    os.chown(home, USER, USER)
    make = f'mount --bind {home} {home} && mount -o remount,ro,bind / && cd {home} && exec "$@"'
    right = "-all,+dac_read_search"
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    return ["unshare", "-m", "sh", "-c", f"'{make}'", "sh", *user, f"--inh-caps={right}", f"--ambient-caps={right}"]


def root_options(pid: int) -> list[str]:
    """The mount options of a process's root."""
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == "/":
            return fields[5].split(",")
    return []


def entered(bento: Path, arguments: list[str], home: Path) -> Any:
    """Like `serving`, through the entry point with these arguments."""
    script = entry_script(bento, arguments, home, prefix=confined(home))
    return serving(home, None, python=str(script), cwd=home)


# ---- the settings reference


def test_every_setting_is_described() -> None:
    described = set(re.findall(rf"`({PREFIX}[A-Z_]+)`", SETTINGS.read_text()))
    assert described == VARIABLES | OF_LEARNING
    mentioned = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", GUIDE.read_text()))
    assert mentioned <= VARIABLES, "a setting that does not exist"


def test_the_code_mentions_only_settings_that_are_described() -> None:
    internal = {variable(name) for name in WorkerSettings.model_fields}
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    mentioned = {name for path in sources for name in re.findall(rf"\b{PREFIX}[A-Z_]*[A-Z]\b", path.read_text())}
    assert mentioned <= VARIABLES | OF_LEARNING | internal


def test_described_defaults_are_the_defaults() -> None:
    rows = re.findall(rf"^\| `{PREFIX}([A-Z_]+)` \| `?([^|`]+)`? \|", SETTINGS.read_text(), re.MULTILINE)
    described = {name.lower(): default.strip() for name, default in rows}
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool) and field.default:
            assert float(described[name]) == field.default, name
    assert float(described["cache_gb"]) == cache_settings.DEFAULT_GB
