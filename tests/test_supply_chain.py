"""What a server is made of is known: its bill of materials, its licences, and a check for known vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs/sbom.cdx.json").read_text()))


@pytest.mark.skipif(not SERVING.exists(), reason="`make test` installs .venv-serving")
def test_the_bill_of_materials_is_what_a_server_installs(bill: dict[str, Any]) -> None:
    found = subprocess.run([SERVING, "-c", LISTED], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    installed = {(name, version) for name, version in json.loads(found.stdout)}
    tools = {"openworld", "pip", "setuptools"}
    listed = {(each["name"], each["version"]) for each in bill["components"]}
    assert listed == {(name, version) for name, version in installed if name not in tools}, "run `make sbom`"


def test_every_package_of_the_bill_has_a_licence_and_is_listed(bill: dict[str, Any]) -> None:
    page = (ROOT / "docs/reference/licences.md").read_text()
    for each in bill["components"]:
        assert each["licenses"], each["name"]
        assert f"| {each['name']} | {each['version']} | " in page
    assert "not stated" not in page


def test_every_package_of_an_extra_that_a_server_uses_has_a_licence() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs/reference/licences.md").read_text().splitlines()]
    terms = {row[0].strip("`"): row[1:] for row in rows if len(row) == 3 and row[0].startswith("`")}
    of_others = {"train", "photos", "timm", "tensorboard", "mlflow", "wandb", "dev", "bench", "collector"}
    assert set(terms) == set(extras) - of_others
    for extra, (packages, licence) in terms.items():
        for requirement in extras[extra]:
            name = requirement.partition("[")[0]
            assert name in packages.split(", ")
            declared = metadata(name)
            stated = str(declared.get("License-Expression") or declared.get("License"))
            assert stated.replace(" ", "-") in (licence, licence.removesuffix("-3-Clause"))


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
    assert "prints nothing for a while" in done.stdout
