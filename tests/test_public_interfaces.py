"""Dependencies are used by their public interfaces only, so that an upgrade does not break us."""

from __future__ import annotations

import re

import pytest

from tests.helpers_serving import ROOT

PRIVATE = re.compile(
    r"_bentoml_|bentoml\._internal|HttpToolsProtocol|_SERVICE_WORKER|sys\.modules\[|\._buckets|\._upper_bounds|__self__"
    r"|argparse\._"
)


@pytest.mark.parametrize("package", ["serving", "training", "export", "models"])
def test_no_private_interface_is_used(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []
