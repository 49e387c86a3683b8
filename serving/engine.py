"""All that stands behind a worker's answers: its model, its queue, and who else hears of what it sees."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from prometheus_client import Gauge

from serving.bento import home
from serving.follow import Follower
from serving.group import VARIABLE as GROUP_VARIABLE
from serving.group import Group
from serving.machine import available_cpus, plan
from serving.memory import keep_large_blocks_apart
from serving.meter import Meter
from serving.metrics import LIMIT, MODEL, forget_dead_workers
from serving.predictions import Predictions
from serving.preflight import first_bundle, found_group
from serving.preprocess import Limits
from serving.quarantine import keeper_of
from serving.queue import InferenceQueue
from serving.runtime import Model
from serving.served import Served
from serving.settings import Settings
from serving.swap import Swaps

KEEPER_PATIENCE = 5.0
"""Seconds at the end of a server for what it has still to write."""


class Engine:
    """One for each worker; loads and tests its model before it is there."""

    def __init__(self, settings: Settings, meter: Meter) -> None:
        self.settings, self.meter = settings, meter
        self.share = plan(settings, available_cpus())
        keep_large_blocks_apart()
        self.follower: Follower | None = None
        self.swaps: Swaps | None = None
        if settings.swappable:
            group = _group(settings)
            self.follower = Follower(group, self.load, self.switch)
            self.swaps = Swaps(group, shelf=settings.bundles, bundle=settings.bundle)
        self.keeper = keeper_of(settings)
        self.queue = InferenceQueue(
            self.load(settings.bundle) if self.follower is None else self.follower.served,
            meter,
            limit=settings.queue,
            # One more than can run at a time, so that a huge image does not hold up the small ones behind it.
            threads=self.share.threads + 1,
            limits=Limits(settings.max_bytes, settings.max_pixels),
            keeper=self.keeper,
        )
        self.predictions = Predictions(self.queue, meter, settings)

    def load(self, path: Path) -> Served:
        """A bundle that gave its golden answers here."""
        model = Model.load(
            path,
            provider=self.settings.provider,
            precision=self.settings.precision,
            threads=self.share.threads,
            alpha=self.settings.alpha,
        )
        model.self_test()
        return Served.of(model, self.settings.batch)

    def start(self) -> None:
        """Report to the metrics, and follow what others decide."""
        forget_dead_workers()
        self.meter.watch(lambda: self.queue.depth)
        LIMIT.set(self.settings.queue)
        _gauge(self.queue.served).set(1)
        if self.follower is not None and self.swaps is not None:
            self.follower.start(beside=self.swaps.watch)
        # What lives as long as the server is not worth scanning; long pauses are a request's p99.
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)
        gc.enable()

    def switch(self, served: Served) -> None:
        """Answer with another model from the next request on; called in a thread of its own."""
        before, self.queue.served = self.queue.served, served
        forget_dead_workers()
        _gauge(before).set(0)
        _gauge(served).set(1)

    def close(self) -> None:
        """All accepted requests have been answered by now."""
        if self.swaps is not None:
            self.swaps.close()
        if self.follower is not None:
            self.follower.close()
        self.queue.close()
        if self.keeper is not None:
            self.keeper.close(KEEPER_PATIENCE)
        self.meter.write()


def _group(settings: Settings) -> Group:
    if folder := os.environ.get(GROUP_VARIABLE):
        return Group(Path(folder))
    # A worker that nobody deployed is a group of its own.
    return found_group(settings, first_bundle(settings), home())


def _gauge(served: Served) -> Gauge:
    manifest = served.model.manifest
    return MODEL.labels(manifest.name, manifest.version, served.model.provider)
