"""The byte budget of a worker."""

from __future__ import annotations

import pytest

from serving.errors import BusyError
from serving.http.inflight_bytes import InflightBytes


def test_the_budget_is_shared_until_a_block_ends() -> None:
    budget = InflightBytes(100)
    with budget.request() as first, budget.request() as second:
        first(80)
        with pytest.raises(BusyError, match="got 30 more, while 80 are in use; allowed: 100 bytes at a time"):
            second(30)
    with budget.request() as alone:
        alone(500)
    assert budget.bytes == 0
