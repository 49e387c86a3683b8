"""How workers hold memory."""

from __future__ import annotations

import pytest

from serving.host.memory import request_large_pages
from tests.helpers_serving import Server
from tests.load import workers


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0:glibc.malloc.check=1", "glibc.malloc.hugetlb=0:glibc.malloc.check=1"),
    ],
)
def test_large_pages_are_asked_for_unless_somebody_has_chosen(before: str | None, after: str) -> None:
    environment = {"OTHER": "1"} if before is None else {"OTHER": "1", "GLIBC_TUNABLES": before}
    request_large_pages(environment)
    assert environment == {"OTHER": "1", "GLIBC_TUNABLES": after}


def test_workers_request_large_pages(server: Server) -> None:
    (worker,) = workers(server, 1)
    assert worker.environ()["GLIBC_TUNABLES"].endswith("glibc.malloc.hugetlb=1")
