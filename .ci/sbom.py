"""Write the software bills of materials of a server and of the container image, and the list of their licences.

    python .ci/sbom.py PYTHON DEVELOPMENT

PYTHON is the interpreter of an environment in which only a server is installed (`make sbom` uses .venv-serving), and
DEVELOPMENT that of one with everything (.venv), from which the packages of extras are read. The bills are
docs/sbom.cdx.json and docs/sbom-image.cdx.json in CycloneDX's format, made by CycloneDX's own tool, without the
addresses that packages name in their metadata. The list is docs/reference/licences.md. Tests compare all three with
what is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BILL, IMAGE_BILL = ROOT / "docs/sbom.cdx.json", ROOT / "docs/sbom-image.cdx.json"
LICENCES = ROOT / "docs/reference/licences.md"
IN_IMAGE = ("postgres", "huggingface")
"""The extras that the Dockerfile installs."""
BESIDE = (*IN_IMAGE, "client", "batch", "ray", "umap")
"""All extras that add packages to a server or to a command beside it; the others are for learning and for tests."""
NOT_SHIPPED = {"openworld", "pip", "setuptools"}
"""Our own package, and what creates an environment."""
CHECKED = {
    "protobuf": "BSD-3-Clause",
    "ray": "Apache-2.0",
    "simple-di": "Apache-2.0",
    "umap-learn": "BSD-3-Clause",
}
"""Licences that the tool does not find in the metadata; read in the packages' licence files."""
HEAD = """# Licences

The licences of everything that a server runs, and of what a bundle may contain. `make sbom` writes this list and the
bills of materials in CycloneDX's format from the metadata of the installed packages: [sbom.cdx.json](../sbom.cdx.json)
for a server without extras, which every bento contains, and [sbom-image.cdx.json](../sbom-image.cdx.json) for the image
of the Dockerfile, which has the extras `postgres` and `huggingface` and contains its bill as
`/usr/share/doc/openworld/sbom.cdx.json`. The Debian packages of the base image are not in it.

## Weights in bundles

| weights | in | licence |
|---|---|---|
| EfficientNet-Lite0, Lite1, Lite2 (ImageNet) | `trunk.onnx` of a bundle that was learned with this trunk | Apache-2.0 |

Weights from torchvision, timm or a file of your own have the licence of their publisher. A network learned from scratch
is yours. No data set is part of the project: the digits that the default learns come with scikit-learn (BSD-3-Clause).

## Packages of a server

| package | version | licence |
|---|---|---|
"""
OF_EXTRAS = """
## Packages that extras add

These extras add packages to a server or to a command beside it, listed here with everything that those packages need
in turn. What only learning needs (extras `train`, `photos`, `timm` and those of trackers) is not listed.

| package | version | licence | extras |
|---|---|---|---|
"""
CLOSURE = """
import json, re, sys
from importlib.metadata import distribution
from packaging.requirements import Requirement

def add(text, extras, found):
    \"\"\"Add a requirement and all that it needs in turn, if it applies here.\"\"\"
    wanted = Requirement(text)
    if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
        return
    key = (re.sub(r"[-_.]+", "-", wanted.name).lower(), *sorted(wanted.extras))
    if key not in found:
        found.add(key)
        for each in distribution(wanted.name).requires or ():
            add(each, wanted.extras, found)

closures = {}
for extra, requirements in json.loads(sys.argv[1]).items():
    found = set()
    for text in requirements:
        add(text, (), found)
    closures[extra] = sorted({key[0] for key in found})
print(json.dumps(closures))
"""
"""Prints the names of all packages that lists of requirements need, by list."""


def normal(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def described(python: str) -> dict[str, Any]:
    """The bill of an environment as CycloneDX's tool writes it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bill.json"
        tool = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", python, "--output-reproducible"]
        subprocess.run([*tool, "--pyproject", str(ROOT / "pyproject.toml"), "-o", str(out)], check=True)
        bill: dict[str, Any] = json.loads(out.read_text())
    return bill


def shipped(bill: dict[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """A bill with the parts that are shipped: all, or only some."""
    bill = {**bill, "metadata": {**bill["metadata"], "component": {**bill["metadata"]["component"]}}}
    bill["components"] = [
        {key: value for key, value in each.items() if key not in ("externalReferences", "properties")}
        for each in bill["components"]
        if each["name"].lower() not in NOT_SHIPPED and (names is None or normal(each["name"]) in names)
    ]
    kept = {each["bom-ref"] for each in bill["components"]} | {"root-component"}
    bill["dependencies"] = [
        {**each, "dependsOn": sorted(kept.intersection(each.get("dependsOn", ())))}
        for each in bill["dependencies"]
        if each["ref"] in kept
    ]
    for each in bill["components"]:
        if each["name"] in CHECKED:
            each["licenses"] = [{"license": {"id": CHECKED[each["name"]]}}]
    bill["metadata"]["component"].pop("externalReferences", None)
    bill["metadata"].pop("tools", None)
    return bill


def closures(python: str) -> dict[str, set[str]]:
    """The names of all packages that each extra needs, by extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = json.dumps({extra: extras[extra] for extra in BESIDE})
    done = subprocess.run([python, "-c", CLOSURE, wanted], capture_output=True, text=True, check=True)
    return {extra: set(names) for extra, names in json.loads(done.stdout).items()}


def licence(component: dict[str, Any]) -> str:
    """The licence that a component declares, as an SPDX expression where it has one."""
    names = []
    for each in component.get("licenses", ()):
        entry = each.get("license", {})
        names.append(each.get("expression") or entry.get("id") or entry.get("name", ""))
    plain = [name for name in names if not name.startswith("License ::")]
    shown = plain or [name.rpartition(" :: ")[2] for name in names]
    return ", ".join(dict.fromkeys(re.sub(r"\s+", " ", name)[:60] for name in shown if name)) or "not stated"


def row_of(component: dict[str, Any], *more: str) -> str:
    return "| " + " | ".join((component["name"], component["version"], licence(component), *more)) + " |\n"


def by_name(bill: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(bill["components"], key=lambda each: each["name"].lower())


def write(path: Path, bill: dict[str, Any]) -> None:
    path.write_text(json.dumps(bill, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python .ci/sbom.py PYTHON DEVELOPMENT", file=sys.stderr)
        return 2
    server, everything, needed = shipped(described(arguments[0])), described(arguments[1]), closures(arguments[1])
    of_server = {normal(each["name"]) for each in server["components"]}
    image = shipped(everything, of_server.union(*(needed[extra] for extra in IN_IMAGE)))
    beside = shipped(everything, set().union(*needed.values()) - of_server)
    write(BILL, server)
    write(IMAGE_BILL, image)
    extras = [
        row_of(each, ", ".join(f"`{extra}`" for extra in BESIDE if normal(each["name"]) in needed[extra]))
        for each in by_name(beside)
    ]
    LICENCES.write_text(HEAD + "".join(map(row_of, by_name(server))) + OF_EXTRAS + "".join(extras))
    listed = [*server["components"], *image["components"], *beside["components"]]
    missing = sorted({each["name"] for each in listed if licence(each) == "not stated"})
    counts = f"{len(of_server)} packages of a server, {len(image['components'])} of the image, {len(extras)} of extras"
    print(f"{counts}; licence not stated: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
