"""Build a release, if the tree is ready: wheels and sources of openworld and its client, bento, checksums.

    python .ci/release.py --out DIST [--dry-run]

The version is that of pyproject.toml. A release needs a clean tree, a dated section in CHANGELOG.md and the same
version in CITATION.cff; a dry run lists what is missing and builds all the same. Nothing is uploaded and no tag is set:
the last line has the command for that. Exit code 0: everything was built; 1: something is missing; 2: a step failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
BUNDLE = Path("runs/demo/bundle/manifest.json")


class ReleaseError(Exception):
    """A step that failed; the message has its output."""


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def notes(of: str) -> tuple[str, str]:
    """The date of a version in the changelog, or "unreleased", and its text; both empty if it has no section."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(of)}\](?: - (\S+))?\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    return (found[1] or "", found[2].strip()) if found else ("", "")


def missing(of: str) -> list[str]:
    """What keeps the tree from being released."""
    found = []
    date, text = notes(of)
    if not text:
        found.append(f"CHANGELOG.md has no section [{of}]")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md: the date of [{of}] is {date or 'missing'!r}; allowed: YYYY-MM-DD")
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != of:
        found.append(f"CITATION.cff: version is {cited[1] if cited else 'missing'}; allowed: {of}")
    if changed := _run(["git", "status", "--porcelain"]).splitlines():
        found.append(f"the tree has {len(changed)} changes that are not committed, such as {changed[0][3:]}")
    if f"v{of}" in _run(["git", "tag"]).split():
        found.append(f"the tag v{of} exists")
    if not (ROOT / BUNDLE).exists():
        found.append(f"{BUNDLE} does not exist, and the bento contains it: run `make demo` once")
    return found


def build(out: Path, of: str) -> list[Path]:
    """Everything that is published, and the file of checksums."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ReleaseError(f"--out {out} is not empty; allowed: a new or an empty folder")
    for project in (ROOT, ROOT / "client"):
        _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(project)])
    if (ROOT / BUNDLE).exists():
        with tempfile.TemporaryDirectory() as home:
            environment = {"BENTOML_HOME": home, "BENTOML_DO_NOT_TRACK": "True"}
            bentoml = [sys.executable, "-m", "bentoml"]
            _run([*bentoml, "build", "--version", of], environment)
            _run([*bentoml, "export", f"openworld:{of}", str(out.resolve() / f"openworld-{of}.bento")], environment)
    shutil.copy(ROOT / "docs/sbom.cdx.json", out / f"openworld-{of}.cdx.json")
    _, text = notes(of)
    (out / f"openworld-{of}.md").write_text(f"{text}\n")
    built = sorted(path for path in out.iterdir() if path.is_file())
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in built)
    (out / SUMS).write_text("".join(sums))
    return [*built, out / SUMS]


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:4])} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a new or an empty folder")
    parser.add_argument("--dry-run", action="store_true", help="build even if the tree is not ready")
    chosen = parser.parse_args(arguments)
    of = version()
    try:
        problems = missing(of)
        for problem in problems:
            print(f"not ready: {problem}")
        if problems and not chosen.dry_run:
            return 1
        for path in build(chosen.out, of):
            print(f"{path.stat().st_size:>12,} bytes  {path.name}")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    print(f"check with `cd {chosen.out} && sha256sum --check {SUMS}`")
    print(
        "a dry run: nothing to publish" if chosen.dry_run else f"publish with `git tag v{of} && git push origin v{of}`"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
