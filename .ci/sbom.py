"""Write the software bill of materials of a server and the list of its licences.

    python .ci/sbom.py PYTHON

PYTHON is the interpreter of an environment in which only a server is installed (`make sbom` uses .venv-serving). The
bill is docs/sbom.cdx.json in CycloneDX's format, made by CycloneDX's own tool, without the addresses that packages name
in their metadata. The list is docs/reference/licences.md. A test compares both with what is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BILL, LICENCES = ROOT / "docs/sbom.cdx.json", ROOT / "docs/reference/licences.md"
NOT_SHIPPED = {"openworld", "pip", "setuptools"}
"""Our own package, and what creates an environment."""
CHECKED = {"protobuf": "BSD-3-Clause", "simple-di": "Apache-2.0"}
"""Licences that the tool does not find in the metadata; read in the packages' licence files."""
HEAD = """# Licences

The licences of everything that a server runs, and of what a bundle may contain. `make sbom` writes this list and the
bill of materials ([sbom.cdx.json](../sbom.cdx.json), in CycloneDX's format) from the metadata of the installed
packages. Every bento contains the bill.

## Weights in bundles

| weights | in | licence |
|---|---|---|
| EfficientNet-Lite0, Lite1, Lite2 (ImageNet) | `trunk.onnx` of a bundle that was learned with this trunk | Apache-2.0 |

Weights from torchvision, timm or a file of your own have the licence of their publisher. A network learned from scratch
is yours. No data set is part of the project: the digits that the default learns come with scikit-learn (BSD-3-Clause).

## Packages that a server only has if they are asked for

The bill and the list below are of a server as it is installed without extras. These extras add packages to a server or
to a command beside it; what those packages need themselves, and everything that only learning needs (extras `train`,
`photos`, `timm` and those of trackers), is not listed.

| extra | package | licence |
|---|---|---|
| `postgres` | psycopg, psycopg-binary | LGPL-3.0-only |
| `client` | httpx | BSD-3-Clause |
| `huggingface` | huggingface_hub | Apache-2.0 |
| `batch` | pyarrow | Apache-2.0 |
| `ray` | ray, pyarrow | Apache-2.0 |
| `umap` | umap-learn | BSD-3-Clause |

## Packages

| package | version | licence |
|---|---|---|
"""


def bill_of(python: str) -> dict[str, Any]:
    """The bill of an environment, reproducible, with the parts that are shipped."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bill.json"
        tool = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", python, "--output-reproducible"]
        subprocess.run([*tool, "--pyproject", str(ROOT / "pyproject.toml"), "-o", str(out)], check=True)
        bill: dict[str, Any] = json.loads(out.read_text())
    bill["components"] = [each for each in bill["components"] if each["name"].lower() not in NOT_SHIPPED]
    kept = {each["bom-ref"] for each in bill["components"]} | {"root-component"}
    bill["dependencies"] = [
        {**each, "dependsOn": sorted(kept.intersection(each.get("dependsOn", ())))}
        for each in bill["dependencies"]
        if each["ref"] in kept
    ]
    for each in bill["components"]:
        each.pop("externalReferences", None)
        each.pop("properties", None)
        if not each.get("licenses") and each["name"] in CHECKED:
            each["licenses"] = [{"license": {"id": CHECKED[each["name"]]}}]
    bill["metadata"]["component"].pop("externalReferences", None)
    bill["metadata"].pop("tools", None)
    return bill


def licence(component: dict[str, Any]) -> str:
    """The licence that a component declares, as an SPDX expression where it has one."""
    names = []
    for each in component.get("licenses", ()):
        entry = each.get("license", {})
        names.append(each.get("expression") or entry.get("id") or entry.get("name", ""))
    plain = [name for name in names if not name.startswith("License ::")]
    shown = plain or [name.rpartition(" :: ")[2] for name in names]
    return ", ".join(dict.fromkeys(re.sub(r"\s+", " ", name)[:60] for name in shown if name)) or "not stated"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python .ci/sbom.py PYTHON", file=sys.stderr)
        return 2
    bill = bill_of(arguments[0])
    BILL.write_text(json.dumps(bill, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    rows = [(each["name"], each["version"], licence(each)) for each in bill["components"]]
    table = "".join(
        f"| {name} | {version} | {terms} |\n" for name, version, terms in sorted(rows, key=lambda row: row[0].lower())
    )
    LICENCES.write_text(HEAD + table)
    missing = [name for name, _, terms in rows if terms == "not stated"]
    print(f"{len(rows)} packages; licence not stated: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
