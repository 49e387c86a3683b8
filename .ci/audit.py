"""Check the pinned versions against a database of known vulnerabilities, without a network.

    python .ci/audit.py DATABASE [CONSTRAINTS]

DATABASE is a copy of OSV's database for the ecosystem PyPI: the zip file that osv.dev offers for download, or a folder
of its JSON files. Exit code 0: no known vulnerability; 1: the table lists some; 2: the check could not be made.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ECOSYSTEM = "PyPI"


class AuditError(Exception):
    """A file that cannot be used; the message states what was given and what is allowed."""


class Finding(NamedTuple):
    package: str
    version: str
    identifier: str
    fixed_in: str
    summary: str


def pinned_versions(path: Path) -> dict[str, str]:
    """Canonical name -> version of every line NAME==VERSION."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise AuditError(
            f"constraints: got {path} ({error.strerror}); allowed: a file of lines NAME==VERSION"
        ) from None
    pairs = [line.split(";")[0].split("==") for line in lines if "==" in line and not line.startswith("#")]
    if not pairs:
        raise AuditError(f"constraints: {path} pins no version; allowed: lines NAME==VERSION")
    return {canonicalize_name(name.strip()): version.strip() for name, version in pairs}


def records(database: Path) -> Iterator[dict[str, Any]]:
    """Every entry of the database."""
    found = 0
    for name, content in _files(database):
        try:
            record = json.loads(content)
        except ValueError:
            raise AuditError(f"database: {name} is not JSON; allowed: entries in OSV's format") from None
        if not isinstance(record, dict) or "id" not in record:
            raise AuditError(f"database: {name} is no entry in OSV's format, which has a field id")
        found += 1
        yield record
    if not found:
        raise AuditError(f"database: {database} has no entry; allowed: a zip file or folder of OSV's JSON files")


def _files(database: Path) -> Iterator[tuple[str, bytes]]:
    if database.is_dir():
        for path in sorted(database.glob("*.json")):
            yield path.name, path.read_bytes()
        return
    try:
        with zipfile.ZipFile(database) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".json"):
                    yield name, archive.read(name)
    except (OSError, zipfile.BadZipFile) as error:
        raise AuditError(f"database: got {database} ({error}); allowed: a zip file or a folder") from None


def findings(entries: Iterator[dict[str, Any]], pinned: dict[str, str]) -> list[Finding]:
    """The entries that concern a pinned version. An entry that was withdrawn concerns none."""
    found = []
    for entry in entries:
        if entry.get("withdrawn"):
            continue
        for affected in entry.get("affected", ()):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") == ECOSYSTEM and name in pinned and concerns(affected, pinned[name]):
                summary = entry.get("summary") or entry.get("details", "").partition("\n")[0]
                found.append(Finding(name, pinned[name], entry["id"], _fixed_in(affected), summary[:80]))
    return sorted(set(found))


def concerns(affected: dict[str, Any], version: str) -> bool:
    """Whether a version is listed, or lies in a range from an `introduced` to the next `fixed` or `last_affected`."""
    if version in affected.get("versions", ()):
        return True
    return any(_within(each.get("events", ()), version) for each in affected.get("ranges", ()) if _ordered(each))


def _ordered(each: dict[str, Any]) -> bool:
    return each.get("type") in ("ECOSYSTEM", "SEMVER")


def _within(events: Any, text: str) -> bool:
    version, inside = Version(text), False
    for kind, value in sorted((pair for event in events for pair in event.items()), key=_moment):
        at = _moment((kind, value))[0]
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _moment(event: tuple[str, str]) -> tuple[Version, bool]:
    kind, value = event
    try:
        return Version("0" if value == "0" else value), kind == "introduced"
    except InvalidVersion:
        raise AuditError(f"database: {kind} is {value!r}; allowed: a version number") from None


def _fixed_in(affected: dict[str, Any]) -> str:
    fixed = [
        event["fixed"]
        for each in affected.get("ranges", ())
        if _ordered(each)
        for event in each["events"]
        if "fixed" in event
    ]
    return ", ".join(fixed) or "no version"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: python .ci/audit.py DATABASE [CONSTRAINTS]", file=sys.stderr)
        return 2
    constraints = Path(arguments[1]) if len(arguments) == 2 else Path(__file__).parents[1] / "constraints.txt"
    try:
        pinned = pinned_versions(constraints)
        found = findings(records(Path(arguments[0])), pinned)
    except (AuditError, InvalidVersion) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    for each in found:
        print(f"{each.package} {each.version}: {each.identifier}, fixed in {each.fixed_in}: {each.summary}")
    print(f"{len(pinned)} pinned versions, {len(found)} known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
