"""The metrics of a server. Every worker counts for itself; `/metrics` of any worker returns the sum over all of them.

Labels come from closed sets (routes, error codes, the model's classes), so that no request can add a series.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import REGISTRY, Collector

from serving.telemetry.drift import wilson

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by prometheus_client when it is imported. BentoML sets it for its workers."""

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SHARES = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

MODEL_INFO, WORKER_NAME = "openworld_model_info", "openworld_worker"

REQUESTS = Counter("openworld_requests", "Requests by endpoint and status", ["endpoint", "status"])
LATENCY = Histogram(
    "openworld_request_seconds",
    "Seconds from a request's head to the end of its response",
    ["endpoint"],
    buckets=SECONDS,
)
STAGES = Histogram("openworld_stage_seconds", "Seconds that an image spends in a stage", ["stage"], buckets=SECONDS)
DECODING, QUEUEING, INFERENCE = (STAGES.labels(stage) for stage in ("decode", "queue", "inference"))
ANSWERS = Counter("openworld_answers", "Answers by task and class of the best guess", ["task", "label", "known"])
P_VALUES = Histogram("openworld_p_value", "p-values of the answers; below alpha means unknown", buckets=SHARES)
BATCHES = Histogram("openworld_batch_size", "Images in one run of the graph", buckets=SIZES)
REJECTED = Counter("openworld_rejected", "Refused images and requests by error code", ["reason"])
DEPTH = Gauge("openworld_queue_depth", "Images accepted and not yet answered", multiprocess_mode="livesum")
LIMIT = Gauge("openworld_queue_limit", "Largest queue depth, summed over the workers", multiprocess_mode="livesum")
RECENT = Gauge("openworld_recent_answers", "Answers in the workers' sliding windows", multiprocess_mode="livesum")
RECENT_UNKNOWN = Gauge(
    "openworld_recent_unknown", "Unknown answers in the workers' sliding windows", multiprocess_mode="livesum"
)
DRIFT_EVIDENCE = Gauge(
    "openworld_drift_evidence",
    "Evidence that the images of a task, or of all, have changed; a worker raises an alarm at 1",
    ["task"],
    multiprocess_mode="livesum",
)
DRIFT_ALARMS = Counter(
    "openworld_drift_alarms", "Changes of the images that were noticed, by task or for all", ["task"]
)
DRIFT_SINCE = Gauge(
    "openworld_drift_since_seconds",
    "When the last change that was noticed began, in seconds since 1970",
    ["task"],
    multiprocess_mode="livemostrecent",
)
SWAPS = Counter("openworld_swaps", "Bundles offered to all workers while they served, by outcome", ["outcome"])
WORKER = Gauge(WORKER_NAME, "1 for each worker, by its process id", multiprocess_mode="liveall")
"""Not shown: it names the processes that have written metrics, so that those of killed workers can be found."""
MODEL = Gauge(
    MODEL_INFO,
    "The served model and its execution provider",
    ["name", "version", "provider"],
    multiprocess_mode="livemax",
)
OFFERED = Counter(
    "openworld_quarantine_offered",
    "Images to be stored; those that are neither kept, copies nor dropped wait, or were lost with a killed worker",
)
KEPT = Counter("openworld_quarantine_kept", "Images written to the quarantine")
COPIES = Counter("openworld_quarantine_copies", "Images that were stored before and were only counted")
DROPPED = Counter(
    "openworld_quarantine_dropped", "Images that should have been stored and were lost, by reason", ["reason"]
)
FAILURES = Counter("openworld_quarantine_failures", "Failed attempts to write, by the part that failed", ["part"])
EVICTED = Counter("openworld_quarantine_evicted", "Images deleted because of a cap, by cap", ["cap"])
HELD_ITEMS = Gauge("openworld_quarantine_items", "Images in the quarantine", multiprocess_mode="livemostrecent")
HELD_BYTES = Gauge(
    "openworld_quarantine_bytes", "Bytes of the images in the quarantine", multiprocess_mode="livemostrecent"
)


class SlidingWindow:
    """How many of the last answers of this worker were unknown."""

    def __init__(self, size: int) -> None:
        self._unknown: deque[bool] = deque(maxlen=size)
        self._count = 0

    @property
    def answers(self) -> int:
        return len(self._unknown)

    @property
    def unknown(self) -> int:
        return self._count

    def add(self, unknown: bool) -> None:
        answers, before = len(self._unknown), self._count
        if answers == self._unknown.maxlen:
            self._count -= self._unknown[0]
        self._unknown.append(unknown)
        self._count += unknown
        # Writing a gauge costs more than comparing it.
        if len(self._unknown) != answers:
            RECENT.set(len(self._unknown))
        if self._count != before or not answers:
            RECENT_UNKNOWN.set(self._count)


class _AllWorkers(Collector):
    """The metrics of all workers, and the ratio that can only be computed from their sums."""

    def __init__(self, workers: Collector) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        total: dict[str, float] = {}
        for family in _without_killed(self._workers):
            if family.name == WORKER_NAME:
                continue
            total[family.name] = sum(sample.value for sample in family.samples)
            if family.name == MODEL_INFO:
                # A series cannot be removed from the workers' files; models that are no longer served have the value 0.
                family.samples = [sample for sample in family.samples if sample.value]
            yield family
        share = "Share of unknown answers in the workers' sliding windows"
        ratio = GaugeMetricFamily("openworld_unknown_ratio", share)
        low, high = (
            GaugeMetricFamily(f"openworld_unknown_ratio_{end}", f"{share}: {end} end of its 95 % confidence interval")
            for end in ("low", "high")
        )
        if answers := total.get("openworld_recent_answers"):
            unknown = total["openworld_recent_unknown"]
            ratio.add_metric([], unknown / answers)
            for family, end in zip((low, high), wilson(int(unknown), int(answers)), strict=True):
                family.add_metric([], end)
        yield from (ratio, low, high)


def shared_folder() -> Path | None:
    """The folder that BentoML names for the metrics of all workers, which other files that they share are put into."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def exposition() -> bytes:
    """The metrics in the text format of Prometheus."""
    registry = CollectorRegistry()
    workers = MultiProcessCollector(None) if shared_folder() else REGISTRY
    registry.register(_AllWorkers(workers))
    return generate_latest(registry)


def forget_dead_workers() -> None:
    """Remove the gauges of killed workers, which could not do so themselves."""
    if shared_folder():
        for pid in _killed(MultiProcessCollector(None).collect()):
            mark_process_dead(pid)


def _without_killed(workers: Collector) -> list[Metric]:
    """The metrics of the living workers. If a killed worker is not replaced, no other one removes its gauges."""
    families = list(workers.collect())
    if not (killed := _killed(families)):
        return families
    for pid in killed:
        mark_process_dead(pid)
    return list(workers.collect())


def _killed(families: Iterable[Metric]) -> list[int]:
    """The processes that have written metrics and do not live any more."""
    found = [sample for family in families if family.name == WORKER_NAME for sample in family.samples]
    pids = [int(sample.labels["pid"]) for sample in found if "pid" in sample.labels]
    return [pid for pid in pids if not alive(pid)]


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        # It may be the process of another user.
        return isinstance(error, PermissionError)
    return True
