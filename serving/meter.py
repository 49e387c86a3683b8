"""Counts what a worker does, and writes it down a few times a second.

Writing to the metrics that the workers share costs several microseconds a number, more than the rest of a small
request's bookkeeping together. So a request only leaves its numbers here, after its answer is on the way.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Histogram

from serving import metrics

PERIOD = 0.25
"""Seconds between two writes."""


class Meter:
    """All methods are called on the event loop."""

    def __init__(self, *, window: int) -> None:
        self._depth: Callable[[], int] = lambda: 0
        self._counts: Counter[PrometheusCounter] = Counter()
        self._values: dict[Histogram, list[float]] = {}
        self._unknown: deque[bool] = deque(maxlen=window)
        self._timer: asyncio.TimerHandle | None = None
        self._request_children: dict[tuple[str, int], tuple[PrometheusCounter, Histogram]] = {}
        self._answer_children: dict[tuple[int, str, bool], PrometheusCounter] = {}
        self._decode, self._queue, self._inference = (
            metrics.STAGES.labels(stage) for stage in ("decode", "queue", "inference")
        )

    def watch(self, depth: Callable[[], int]) -> None:
        """Ask for the queue's depth at every write."""
        self._depth = depth

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """A request was answered."""
        key = (endpoint, status)
        children = self._request_children.get(key)
        if children is None:
            children = metrics.REQUESTS.labels(endpoint, status), metrics.LATENCY.labels(endpoint)
            self._request_children[key] = children
        self._counts[children[0]] += 1
        self._observe(children[1], seconds)
        self._write_soon()

    def stages(self, decode: float, queue: float, inference: float) -> None:
        """An image went all the way."""
        self._observe(self._decode, decode)
        self._observe(self._queue, queue)
        self._observe(self._inference, inference)

    def answer(self, task: int, label: str, known: bool, p_value: float) -> None:
        """An image was answered; `label` is the best guess."""
        key = (task, label, known)
        child = self._answer_children.get(key)
        if child is None:
            child = self._answer_children[key] = metrics.ANSWERS.labels(task, label, str(known).lower())
        self._counts[child] += 1
        self._observe(metrics.P_VALUES, p_value)
        self._unknown.append(not known)

    def batch(self, size: int) -> None:
        self._observe(metrics.BATCHES, size)

    def rejected(self, reason: str) -> None:
        """An image or a request got no answer; `reason` is an error's code."""
        self._counts[metrics.REJECTED.labels(reason)] += 1
        self._write_soon()

    def write(self) -> None:
        """Hand over what was counted since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = self._counts, Counter()
        values, self._values = self._values, {}
        for counter, amount in counts.items():
            counter.inc(amount)
        for histogram, observed in values.items():
            _observe_all(histogram, observed)
        metrics.DEPTH.set(self._depth())
        metrics.RECENT.set(len(self._unknown))
        metrics.RECENT_UNKNOWN.set(sum(self._unknown))

    def _observe(self, histogram: Histogram, value: float) -> None:
        observed = self._values.get(histogram)
        if observed is None:
            observed = self._values[histogram] = []
        observed.append(value)

    def _write_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self.write)


def _observe_all(histogram: Histogram, values: list[float]) -> None:
    """As `observe` for each value, with one write for each bucket instead of two for each value."""
    bounds, buckets = histogram._upper_bounds, histogram._buckets
    histogram._sum.inc(sum(values))
    for bucket, count in Counter(bisect_left(bounds, value) for value in values).items():
        buckets[bucket].inc(count)
