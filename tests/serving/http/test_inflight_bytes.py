"""The byte budget of a worker gives memory back when the last large body is gone."""

from __future__ import annotations

import pytest

from serving.errors import BusyError
from serving.host.memory import LARGE
from serving.http.inflight_bytes import InflightBytes


def test_memory_is_returned_after_the_last_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    budget = InflightBytes(10 * LARGE)
    monkeypatch.setattr("serving.http.inflight_bytes.return_memory", lambda: returned.append(budget.bytes))
    with budget.request() as small:
        small(LARGE - 1)
    assert returned == []
    with budget.request() as first:
        first(LARGE)
        with budget.request() as second:
            second(LARGE)
        assert returned == []
    assert returned == [0]


def test_the_budget_is_shared_until_a_block_ends() -> None:
    budget = InflightBytes(100)
    with budget.request() as first, budget.request() as second:
        first(80)
        with pytest.raises(BusyError, match="got 30 more beside 80; allowed: 100 bytes at a time"):
            second(30)
    with budget.request() as alone:
        alone(500)
    assert budget.bytes == 0
