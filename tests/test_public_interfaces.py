"""Dependencies are used by their public interfaces only, so that an upgrade does not break us."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers_serving import ROOT

PRIVATE = re.compile(
    r"_bentoml_|bentoml\._internal|HttpToolsProtocol|_SERVICE_WORKER|sys\.modules\[|\._buckets|\._upper_bounds|__self__"
    r"|argparse\._"
)
OF_PROMETHEUS = re.compile(r"prometheus_client\.(?!core\b|multiprocess\b|registry\b)\w|MmapedDict|gauge_live\w*[_*]")
"""Modules that its documentation does not name, and the names of its files."""


@pytest.mark.parametrize(
    ("package", "private"),
    [
        *((package, PRIVATE) for package in ("serving", "training", "export", "models")),
        ("serving", OF_PROMETHEUS),
        ("tests", OF_PROMETHEUS),
    ],
)
def test_no_private_interface_is_used(package: str, private: re.Pattern[str]) -> None:
    files = sorted(path for path in (ROOT / package).rglob("*.py") if path != Path(__file__))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert found == []
