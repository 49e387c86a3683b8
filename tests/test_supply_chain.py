"""What a server is made of is known: its bill of materials, its licences, and a check for known vulnerabilities."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.helpers_serving import ROOT

SERVING = ROOT / ".venv-serving/bin/python"
LISTED = """
import json
from importlib.metadata import distributions
print(json.dumps(sorted({(each.name, each.version) for each in distributions()})))
"""
ENTRY = {
    "id": "PYSEC-1",
    "summary": "A parser reads too far.",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Some.Package"},
            "ranges": [
                {
                    "type": "ECOSYSTEM",
                    "events": [{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "2.0"}, {"fixed": "2.0.10"}],
                }
            ],
            "versions": ["3.0rc1"],
        }
    ],
}


BILLS = ("sbom.cdx.json", "sbom-image.cdx.json")
BESIDE = {"postgres", "client", "huggingface", "batch", "ray", "umap"}
"""The extras that a server, or a command beside it, uses."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def components(name: str) -> list[dict[str, Any]]:
    return list(json.loads((ROOT / "docs" / name).read_text())["components"])


def extras() -> dict[str, list[str]]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of all packages that are needed, as they are installed here."""
    found: set[tuple[str, str]] = set()
    waiting = [(text, "") for text in requirements]
    while waiting:
        text, of = waiting.pop()
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": of}):
            continue
        for extra in ("", *wanted.extras):
            if (key := (normal(wanted.name), extra)) not in found:
                found.add(key)
                waiting += [(each, extra) for each in distribution(wanted.name).requires or ()]
    return {name for name, _ in found}


@pytest.mark.skipif(not SERVING.exists(), reason="`make test` installs .venv-serving")
def test_the_bill_of_materials_is_what_a_server_installs() -> None:
    found = subprocess.run([SERVING, "-c", LISTED], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    installed = {(name, version) for name, version in json.loads(found.stdout)}
    tools = {"openworld", "pip", "setuptools"}
    listed = {(each["name"], each["version"]) for each in components(BILLS[0])}
    assert listed == {(name, version) for name, version in installed if name not in tools}, "run `make sbom`"


@pytest.mark.parametrize("bill", BILLS)
def test_every_package_of_a_bill_has_a_licence_and_is_listed(bill: str) -> None:
    page = (ROOT / "docs/reference/licences.md").read_text()
    for each in components(bill):
        assert each["licenses"], each["name"]
        assert f"| {each['name']} | {each['version']} | " in page
    assert "not stated" not in page


def test_the_bill_of_the_image_has_all_that_its_extras_need() -> None:
    build = (ROOT / "Dockerfile").read_text()
    (installed,) = re.findall(r'"\.\[([a-z,]+)\]"', build)
    needed = closure(text for extra in installed.split(",") for text in extras()[extra])
    server, image = ({(normal(each["name"]), each["version"]) for each in components(name)} for name in BILLS)
    assert {name for name, _ in image} == {name for name, _ in server} | needed, "run `make sbom`"
    assert server <= image
    # Docker gets only what .dockerignore allows.
    assert "COPY docs/sbom-image.cdx.json /usr/share/doc/openworld/sbom.cdx.json\n" in build
    assert "!docs/sbom-image.cdx.json\n" in (ROOT / ".dockerignore").read_text()


def test_every_package_that_an_extra_needs_is_listed_with_its_version_and_licence() -> None:
    of_others = {"train", "photos", "timm", "tensorboard", "mlflow", "wandb", "dev", "bench", "collector"}
    assert set(extras()) == BESIDE | of_others
    text = (ROOT / "docs/reference/licences.md").read_text()
    of_extras = text.partition("## Packages that extras add")[2]
    listed = {}
    for line in of_extras.splitlines():
        if (row := line.strip("| ").split(" | "))[1:2] not in ([], ["version"]):
            listed[normal(row[0])] = (row[1], row[2], set(re.findall(r"`(\w+)`", row[3])))
    server = {normal(each["name"]) for each in components(BILLS[0])}
    needed = {extra: closure(extras()[extra]) - server for extra in BESIDE}
    assert set(listed) == set().union(*needed.values()), "run `make sbom`"
    for name, (version, licence, by) in listed.items():
        assert by == {extra for extra in BESIDE if name in needed[extra]}
        assert version == distribution(name).version
        assert licence
    assert listed["psycopg-binary"][1] == "LGPL-3.0-only"


def audit(database: Path, pins: str, folder: Path) -> subprocess.CompletedProcess[str]:
    constraints = folder / "constraints.txt"
    constraints.write_text(pins)
    command = [sys.executable, str(ROOT / ".ci/audit.py"), str(database), str(constraints)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [
        ("1.1", True),
        ("1.2", False),
        ("1.10", False),
        ("2.0", True),
        ("2.0.9", True),
        ("2.0.10", False),
        ("3.0rc1", True),
    ],
)
def test_a_pinned_version_with_a_known_vulnerability_fails_the_audit(
    version: str, is_affected: bool, tmp_path: Path
) -> None:
    (tmp_path / "database").mkdir()
    (tmp_path / "database/PYSEC-1.json").write_text(json.dumps(ENTRY))
    result = audit(tmp_path / "database", f"other==1.0\nsome_package=={version}\n", tmp_path)
    assert result.returncode == int(is_affected), result.stderr
    assert ("PYSEC-1" in result.stdout) == is_affected


def test_withdrawn_entries_and_other_ecosystems_do_not_count(tmp_path: Path) -> None:
    other = json.loads(json.dumps(ENTRY).replace("PyPI", "npm"))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("a.json", json.dumps({**ENTRY, "withdrawn": "2026-01-01T00:00:00Z"}))
        archive.writestr("b.json", json.dumps(other))
    assert audit(tmp_path / "all.zip", "some-package==1.0\n", tmp_path).returncode == 0


@pytest.mark.parametrize("content", [b"no zip file", b""])
def test_a_database_that_cannot_be_read_is_no_clean_bill(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "all.zip").write_bytes(content)
    result = audit(tmp_path / "all.zip", "some-package==1.0\n", tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("audit: database: got ")


@pytest.mark.parametrize(("system", "said"), [("Linux", True), ("Darwin", False)])
def test_only_linux_is_told_of_cuda_libraries(system: str, said: bool, tmp_path: Path) -> None:
    """PyTorch for macOS has none. pip is silent while it unpacks, so that is said before."""
    command = ["make", "--dry-run", f"SYSTEM={system}", f"VENV={tmp_path}/new", f"{tmp_path}/new/train"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("CUDA libraries" in done.stdout, "several GB" in done.stdout) == (said, said)
    assert ("PyTorch for the CPU alone" in done.stdout) == said
    assert "prints nothing for a while" in done.stdout
