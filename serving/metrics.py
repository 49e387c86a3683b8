"""What Prometheus may ask. Every worker counts for itself; `/metrics` of any one of them gives the sum.

Labels come from closed sets (our pages, our error codes, the model's classes), so that no request can add series.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import REGISTRY, Collector

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Set by BentoML for its workers; it must be known before prometheus_client is imported."""

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SHARES = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

MODEL_INFO = "openworld_model_info"

REQUESTS = Counter("openworld_requests", "Requests by page and status", ["endpoint", "status"])
LATENCY = Histogram("openworld_request_seconds", "From a request's head to its answer", ["endpoint"], buckets=SECONDS)
STAGES = Histogram("openworld_stage_seconds", "Seconds that an image spends in a stage", ["stage"], buckets=SECONDS)
ANSWERS = Counter("openworld_answers", "Answers by task and class of the best guess", ["task", "label", "known"])
P_VALUES = Histogram("openworld_p_value", "p-values of the answers; those below alpha are unknown", buckets=SHARES)
BATCHES = Histogram("openworld_batch_size", "Images in one run of the graph", buckets=SIZES)
REJECTED = Counter("openworld_rejected", "Images and requests without an answer, by error code", ["reason"])
DEPTH = Gauge("openworld_queue_depth", "Images taken in and not yet answered", multiprocess_mode="livesum")
LIMIT = Gauge("openworld_queue_limit", "How many that may be, over all workers", multiprocess_mode="livesum")
RECENT = Gauge("openworld_recent_answers", "Answers in the workers' sliding windows", multiprocess_mode="livesum")
RECENT_UNKNOWN = Gauge("openworld_recent_unknown", "How many of them are unknown", multiprocess_mode="livesum")
SWAPS = Counter("openworld_swaps", "Bundles offered to all workers while they served, by outcome", ["outcome"])
MODEL = Gauge(MODEL_INFO, "What is served, and on what", ["name", "version", "provider"], multiprocess_mode="livemax")
KEPT = Counter("openworld_quarantine_kept", "Images written to the quarantine")
COPIES = Counter("openworld_quarantine_copies", "Images that were there already, and were counted only")
DROPPED = Counter("openworld_quarantine_dropped", "Images that were to be kept and are lost, by reason", ["reason"])
FAILURES = Counter("openworld_quarantine_failures", "Attempts to write that failed, by what failed", ["part"])
EVICTED = Counter("openworld_quarantine_evicted", "Images deleted because of a cap, by cap", ["cap"])
HELD_ITEMS = Gauge("openworld_quarantine_items", "Images in the quarantine", multiprocess_mode="livemostrecent")
HELD_BYTES = Gauge("openworld_quarantine_bytes", "What they take", multiprocess_mode="livemostrecent")


class _Everything(Collector):
    """All metrics of all workers, and what can only be worked out from their sums."""

    def __init__(self, workers: Collector) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        total: dict[str, float] = {}
        for family in self._workers.collect():
            total[family.name] = sum(sample.value for sample in family.samples)
            if family.name == MODEL_INFO:
                # A series cannot be taken back from the workers' files; what is no longer served is 0 there.
                family.samples = [sample for sample in family.samples if sample.value]
            yield family
        ratio = GaugeMetricFamily("openworld_unknown_ratio", "Share of unknown in the workers' sliding windows")
        if answers := total.get("openworld_recent_answers"):
            ratio.add_metric([], total["openworld_recent_unknown"] / answers)
        yield ratio


def exposition() -> bytes:
    """The page that Prometheus reads."""
    # Where a dead worker is not replaced, nobody else takes back its share.
    forget_dead_workers()
    registry = CollectorRegistry()
    workers = MultiProcessCollector(None) if FOLDER_VARIABLE in os.environ else REGISTRY
    registry.register(_Everything(workers))
    return generate_latest(registry)


def forget_dead_workers() -> None:
    """A worker that was killed could not take back its share of the gauges."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        for pid in _pids(Path(folder).glob("gauge_live*.db")):
            # Another worker may be about the same.
            with contextlib.suppress(FileNotFoundError):
                if not _alive(pid):
                    mark_process_dead(pid, folder)


def _pids(files: Iterable[Path]) -> Iterator[int]:
    for file in files:
        with contextlib.suppress(ValueError):
            yield int(file.stem.rpartition("_")[2])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
