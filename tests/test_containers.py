"""Dockerfile, compose file and Helm chart: linted and rendered by the real tools, and in agreement with the rest."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from serving.__main__ import GRACE, _parser
from serving.http.middleware import PROBES
from serving.settings import PREFIX, Settings, variable
from tests.helpers_serving import COLOURS, ROOT, http_get, http_post, image_bytes, serving, write_bundle

DOCS, COMPOSE, CHART = ROOT / "docs", ROOT / "docs/compose", ROOT / "docs/helm/openworld"
DOCKERFILE = ROOT / "Dockerfile"
TOOLS = Path(sys.executable).parent
VARIABLES = {variable(name) for name in Settings.model_fields}
INSTRUCTION = re.compile(r"^([A-Z]+) (.*)$", re.MULTILINE)
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel({folder!r}))"


def tool(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    found = TOOLS / name
    if not found.exists():
        pytest.skip(f"no {name}; pip install -e '.[dev]'")
    return subprocess.run([found, *words], cwd=ROOT, capture_output=True, text=True, check=False)


# ---- the Dockerfile


@pytest.fixture(scope="module")
def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage."""
    found: list[list[tuple[str, str]]] = []
    lines = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    for name, words in INSTRUCTION.findall(lines.replace("\\\n", " ")):
        if name == "FROM":
            found.append([])
        found[-1].append((name, words))
    return found


def test_the_linter_finds_nothing() -> None:
    done = tool("hadolint", DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_two_stages_and_no_rights(stages: list[list[tuple[str, str]]]) -> None:
    build, last = stages
    bases = [words.split()[0] for stage in stages for name, words in stage if name == "FROM"]
    assert all(re.fullmatch(r"python:3\.11-slim-\w+", base) for base in bases)
    (user,) = [words for name, words in last if name == "USER"]
    pod = yaml.safe_load((DOCS / "kubernetes/deployment.yaml").read_text())["spec"]["template"]["spec"]
    assert user == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    (check,) = [words for name, words in last if name == "HEALTHCHECK"]
    assert re.search(r"127\.0\.0\.1:3000(/\w+)", check)[1] in PROBES  # type: ignore[index]
    # Of the first stage, only the installed packages are in the image.
    copied = [words.split()[0] for name, words in last if name == "COPY"]
    assert copied == ["--from=build", "${BUNDLE}", "docs/sbom-image.cdx.json"]
    settings = dict(word.split("=", 1) for name, words in last if name == "ENV" for word in shlex.split(words))
    assert {name for name in settings if name.startswith(PREFIX)} <= VARIABLES
    assert settings["BENTOML_HOST"] == "0.0.0.0"
    (entry,) = [json.loads(words) for name, words in last if name == "ENTRYPOINT"]
    (arguments,) = [json.loads(words) for name, words in last if name == "CMD"]
    assert entry == ["python", "-m", "serving"]
    assert _parser("serve").parse_args(arguments).port == 3000
    assert any(name == "RUN" and "--constraint constraints.txt" in words for name, words in build)


@pytest.fixture(scope="module")
def wheel(stages: list[list[tuple[str, str]]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build as far as it goes without an engine: the wheel of the files that are copied."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = [words.split()[:-1] for name, words in stages[0] if name == "COPY"]
    listed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert listed[0] == "*"
    context = folder / "src"
    context.mkdir()
    for each in (source for copied in sources for source in copied):
        assert f"!{each}" in listed, "Docker would not see it"
        if (ROOT / each).is_dir():
            shutil.copytree(ROOT / each, context / each, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / each, context)
    command = [sys.executable, "-c", BUILD.format(folder=str(folder))]
    built = subprocess.run(command, cwd=context, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.splitlines()[-1]


def test_what_the_first_stage_copies_is_installed_without_training(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name.split("/")[0] for name in names if "dist-info" not in name}
    assert packages == {"serving", "openworld.py"}
    assert "serving/__main__.py" in names
    assert any(name.startswith("serving/http/page/static/") for name in names)


def test_everything_that_the_first_layer_installs_is_pinned(stages: list[list[tuple[str, str]]]) -> None:
    """The packages of its extras, and what these need in turn, on the system of the image."""
    (words,) = [words for name, words in stages[0] if name == "RUN" and "--constraint" in words]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', words)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines) if pin}
    system = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11"}

    def here(listed: Iterable[str], extra: str = "") -> list[Requirement]:
        every = map(Requirement, listed)
        return [each for each in every if each.marker is None or each.marker.evaluate(system | {"extra": extra})]

    waiting = here(project["dependencies"])
    for extra in extras.split(","):
        waiting += here(project["optional-dependencies"][extra])
    checked: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) in checked:
                continue
            checked.add((name, extra))
            assert name in pins, f"{wanted} is not pinned"
            assert wanted.specifier.contains(pins[name].partition(";")[0].strip(), prereleases=True), wanted
            waiting += here(requires(name) or [], extra)
    assert {("huggingface-hub", ""), ("psycopg", "binary"), ("psycopg-binary", "")} <= checked


@pytest.mark.long
def test_what_is_installed_serves_from_another_folder(
    wheel: Path, stages: list[list[tuple[str, str]]], tmp_path: Path
) -> None:
    """The last stage without an engine: its variables and its command, on the packages of this environment."""
    installed, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    with (installed / "serving/http/page/static/index.html").open("a") as page:
        page.write("<!-- the installed copy -->")
    given = dict(word.split("=", 1) for name, words in stages[-1] if name == "ENV" for word in shlex.split(words))
    bundle = write_bundle(tmp_path / "bundle")
    kept = {name: value for name, value in given.items() if name.startswith((PREFIX, "ORT_", "PYTHON"))}
    settings = {**kept, "OPENWORLD_BUNDLE": str(bundle), "PYTHONPATH": str(installed)}
    with serving(tmp_path / "home", bundle, settings=settings, cwd=elsewhere) as server:
        assert http_get(f"{server.url}/readyz").status_code == 200
        assert http_get(server.url).text.endswith("<!-- the installed copy -->")
        assert http_post(f"{server.url}/predict", content=image_bytes(COLOURS["red"])).json()["label"] == "red"
    assert [*elsewhere.iterdir()] == []


# ---- the compose file


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"])


def test_every_file_that_is_mounted_exists_and_every_volume_is_named(services: dict[str, Any]) -> None:
    named = set(yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"])
    used = set()
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).is_file(), source
                assert mount.endswith(":ro")
            else:
                used.add(source)
    assert used == named
    assert (COMPOSE / services["server"]["build"]["context"] / "Dockerfile").is_file()


def test_images_have_an_exact_tag_and_ports_are_for_this_machine(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", service["image"]), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_secrets_come_from_the_environment(services: dict[str, Any]) -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert required == {"OPENWORLD_API_KEY", "OPENWORLD_ADMIN_TOKEN", "POSTGRES_PASSWORD", "GRAFANA_PASSWORD"}
    example = dict(
        line.split("=", 1) for line in (COMPOSE / "example.env").read_text().splitlines() if not line.startswith("#")
    )
    assert set(re.findall(r"\$\{(\w+)", text)) == set(example)
    # What the example has is long enough to start with, and says that it must be replaced.
    assert all(example[name].startswith("replace-this") and len(example[name]) >= 16 for name in required)
    given = services["server"]["environment"]
    assert set(given) <= VARIABLES
    filled = {name: re.sub(r"\$\{(\w+)[^}]*\}", lambda found: example[found[1]], given[name]) for name in given}
    # They are values that a server starts with.
    Settings(**{name.removeprefix(PREFIX).lower(): value for name, value in filled.items()})
    ignored = subprocess.run(["git", "check-ignore", "-q", COMPOSE / ".env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_the_server_of_the_compose_file_is_confined(services: dict[str, Any]) -> None:
    server = services["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    written = {mount.split(":")[0] for mount in server["tmpfs"]} | {mount.split(":")[1] for mount in server["volumes"]}
    assert written == {"/tmp", "/var/lib/bentoml", "/var/lib/openworld"}
    assert server["environment"]["OPENWORLD_QUARANTINE_IMAGES"].startswith("/var/lib/openworld/")
    assert int(server["stop_grace_period"].removesuffix("s")) >= Settings().deadline + 10


def test_prometheus_and_grafana_find_what_they_show(services: dict[str, Any]) -> None:
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    (job,) = scraped["scrape_configs"]
    (target,) = job["static_configs"]
    assert target["targets"] == ["server:3000"]
    assert set(target["labels"]) == {"namespace", "pod"}
    mounts = {mount.split(":")[1] for mount in services["prometheus"]["volumes"]}
    assert {*scraped["rule_files"], "/etc/prometheus/prometheus.yml"} <= mounts
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((COMPOSE / "grafana/dashboards.yaml").read_text())["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert home in {mount.split(":")[1] for mount in services["grafana"]["volumes"]}


# ---- the chart


def rendered(*words: str) -> dict[str, dict[str, Any]]:
    """Kind -> manifest."""
    done = tool("helm", "template", "openworld", CHART, *words)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


def without_labels(content: Any) -> Any:
    """A manifest without labels and selectors, by which chart and plain manifests differ."""
    if isinstance(content, dict):
        left_out = ("labels", "matchLabels", "selector")
        return {name: without_labels(value) for name, value in content.items() if name not in left_out}
    return [without_labels(each) for each in content] if isinstance(content, list) else content


def test_the_chart_passes_the_linter() -> None:
    done = tool("helm", "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_renders_the_plain_manifests() -> None:
    chart = rendered()
    files = ("deployment", "service", "autoscaler", "disruption", "network")
    plain = {
        each["kind"]: each
        for each in (yaml.safe_load((DOCS / f"kubernetes/{name}.yaml").read_text()) for name in files)
    }
    (container,) = chart["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container.pop("imagePullPolicy") == "IfNotPresent"
    image = yaml.safe_load((DOCS / "kubernetes/kustomization.yaml").read_text())["images"][0]
    assert container["image"] == f"{image['newName']}:{image['newTag']}"
    container["image"] = image["name"]
    assert without_labels(chart) == without_labels(plain)
    selector = chart["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= chart["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    for kind, place in (("Service", "selector"), ("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        found = chart[kind]["spec"][place]
        assert found.get("matchLabels", found) == selector


def test_the_commands_of_the_guide_start_both_kinds_of_image() -> None:
    """Those of a bento start its entrypoint; an image of the Dockerfile, which has none, starts its own command."""
    text = (DOCS / "howto/deploy.md").read_text()
    commands = re.findall(r"^# an image of `(.+)`:\nhelm upgrade --install ((?:.*\\\n)*.+)", text, re.MULTILINE)
    kinds = {}
    for built_by, words in commands:
        name, chart, *values = shlex.split(words.replace("\\\n", " "))
        assert (name, ROOT / chart) == ("openworld", CHART)
        (container,) = rendered(*values)["Deployment"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "registry.example.com/openworld:1"
        kinds[built_by] = container.get("command", [])[-1:]
    assert kinds == {"bentoml containerize": ["/home/bentoml/bento/env/docker/entrypoint.sh"], "docker build": []}


@pytest.mark.parametrize(("kind", "other"), [("bento", "dockerfile"), ("dockerfile", "bento")])
def test_the_notes_of_the_chart_name_the_kind_of_image(kind: str, other: str, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "chart")
    # `helm template` leaves the notes out, so a manifest shows them.
    notes = (chart / "templates/NOTES.txt").read_text()
    template = '{{ define "notes" }}' + notes + '{{ end }}kind: Notes\ntext: {{ include "notes" . | toJson }}\n'
    (chart / "templates/notes.yaml").write_text(template)
    done = tool("helm", "template", "openworld", chart, "--set", f"image.kind={kind}", "-s", "templates/notes.yaml")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)["text"]
    assert f'image.kind is "{kind}"' in shown
    assert f"--set image.kind={other}" in shown


def test_the_component_for_an_image_of_the_dockerfile_removes_the_start_of_a_bento() -> None:
    """In a patch, null removes a field; the plain manifest starts a bento."""

    def started(path: str) -> dict[str, Any]:
        deployment = yaml.safe_load((DOCS / "kubernetes" / path).read_text())
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert (deployment["metadata"]["name"], container["name"]) == ("openworld", "openworld")
        return dict(container)

    assert {"command", "args"} <= set(started("deployment.yaml"))
    assert started("dockerfile-image/start.yaml") == {"name": "openworld", "command": None, "args": None}


@pytest.mark.parametrize("components", [[], ["dockerfile-image"], ["dockerfile-image", "shared-bundle"]])
def test_kustomize_renders_the_start_of_the_chosen_image(components: list[str], tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    folder = shutil.copytree(DOCS / "kubernetes", tmp_path / "kubernetes")
    chosen = yaml.safe_load((folder / "kustomization.yaml").read_text())
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({**chosen, "components": components}))
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (deployment,) = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    bento = not components
    assert ("command" in container, "args" in container) == (bento, bento)
    assert "readinessProbe" in container
    assert any(entry["name"] == "OPENWORLD_BUNDLES" for entry in container["env"]) == ("shared-bundle" in components)


EVERYTHING = (
    *("--set", "bundles.claim=shelf", "--set", "deadline=60", "--set", "image.kind=dockerfile"),
    *("--set-string", "settings.OPENWORLD_ALPHA=0.01", "--set", "podAnnotations.team=vision"),
    *("--set", "quarantine.secret=database"),
    *("--set", "nodeSelector.zone=a", "--set", "networkPolicy.egress[0].ports[0].port=5432"),
)


@pytest.mark.parametrize("words", [(), EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_accepts_what_the_chart_renders(words: tuple[str, ...]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in rendered(*words).values():
        validator.validate(manifest, validator.latest_version(), strict=True)


def test_values_reach_the_pods() -> None:
    chart = rendered(*EVERYTHING)
    pod = chart["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert settings["OPENWORLD_ALPHA"] == "0.01"
    assert settings["OPENWORLD_BUNDLES"] == "/bundles"
    (address,) = [entry for entry in container["env"] if entry["name"] == "OPENWORLD_QUARANTINE_URL"]
    assert address["valueFrom"] == {"secretKeyRef": {"name": "database", "key": "quarantine-url"}}
    assert settings["OPENWORLD_DEADLINE"] == "60"
    assert {name for name in settings if name.startswith(PREFIX)} <= VARIABLES
    assert pod["terminationGracePeriodSeconds"] == 75
    # The image of the Dockerfile knows how to start, and takes the time to stop from the deadline.
    assert "command" not in container
    (volume,) = [each for each in pod["volumes"] if each["name"] == "bundles"]
    assert volume["persistentVolumeClaim"]["claimName"] == "shelf"
    assert chart["NetworkPolicy"]["spec"]["egress"] == [{"ports": [{"port": 5432}]}]
    bento = rendered("--set", "deadline=60")["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert bento["args"][-1] == str(60 + GRACE)
    assert "NetworkPolicy" not in rendered("--set", "networkPolicy.enabled=false")


@pytest.mark.parametrize(
    "wrong", ["replicas=3", "image.kind=other", "deadline=0", "settings.ALPHA=1", "quarantine.url=sqlite://"]
)
def test_values_that_mean_nothing_are_refused(wrong: str) -> None:
    assert tool("helm", "template", "openworld", CHART, "--set", wrong).returncode != 0


def test_the_chart_has_the_version_of_the_project() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version is not None
    assert chart["version"] == chart["appVersion"] == version[1]
