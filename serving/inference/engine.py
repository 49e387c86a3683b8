"""Everything behind a worker's answers: its model, its queue, its part in swaps, and the quarantine."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from serving.bundle.model import BundleModel
from serving.bundle.pixels import Limits, load_decoders
from serving.host.cpus import available_cpus, plan_cpus
from serving.host.memory import MemoryWatch, limit_free_memory
from serving.host.preflight import create_group, first_bundle
from serving.inference.loaded import LoadedModel
from serving.inference.queue import InferenceQueue
from serving.quarantine import keeper_of
from serving.settings import BentoMLSettings, Settings, WorkerSettings
from serving.swap.agreement import WorkerGroup
from serving.swap.follower import Follower
from serving.swap.leader import SwapLeader
from serving.telemetry import metrics

if TYPE_CHECKING:
    from serving.teaching.auto import Autonomy
    from serving.teaching.teacher import Teacher

KEEPER_TIMEOUT = 5.0
"""Seconds at shutdown for the quarantine's keeper to write what it has accepted."""

_TEACHING = ("serving.teaching.api.views", "serving.teaching.class_changes", "serving.teaching.exchange")
"""What the routes under /teach import when they are called; these import the rest."""


class Engine:
    """One per worker; its model is loaded and tested when the constructor returns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plan = plan_cpus(settings, available_cpus())
        limit_free_memory()
        self._memory = MemoryWatch()
        self._follower: Follower | None = None
        self.swaps: SwapLeader | None = None
        if settings.swappable:
            group = _group(settings)
            self._follower = Follower(group, self.load, self.switch)
            self.swaps = SwapLeader(group, shelf=settings.bundles, bundle=settings.bundle)
        self.keeper = keeper_of(settings)
        self.teacher = _teacher(self)
        self._autonomy: Autonomy | None = None
        self.queue = InferenceQueue(
            self.load(settings.bundle) if self._follower is None else self._follower.served,
            limit=settings.queue,
            # One more than can run at a time, so that a huge image does not hold up the small ones behind it.
            threads=self._plan.threads + 1,
            limits=Limits(settings.max_bytes, settings.max_pixels, settings.max_side),
            window=settings.window,
            drift_every=settings.drift_every,
            keeper=self.keeper,
        )

    @property
    def loaded(self) -> LoadedModel:
        """The model for new requests."""
        return self.queue.loaded

    def load(self, path: Path, like: LoadedModel | None = None) -> LoadedModel:
        """Load a bundle and check that it reproduces its golden answers here. It shares the session of another one if
        they have the same trunk."""
        model = BundleModel.load(
            path,
            provider=self.settings.provider,
            precision=self.settings.precision,
            threads=self._plan.threads,
            alpha=self.settings.alpha,
            like=None if like is None else like.model,
        )
        model.self_test()
        return LoadedModel.prepare(model, self.settings.batch, like)

    def start(self) -> None:
        """Set the gauges of this worker, and follow swaps."""
        metrics.forget_dead_workers()
        metrics.WORKER.set(1)
        metrics.LIMIT.set(self.settings.queue)
        _gauge(self.loaded).set(1)
        if self._follower is not None and self.swaps is not None:
            self._follower.start(each_step=self.swaps.watch)
        if self.teacher is not None and self.settings.teach == "auto":
            from serving.teaching.auto import Autonomy

            self._autonomy = Autonomy(self.teacher, self.settings)
        import_for_requests(teaching=self.teacher is not None)
        # Objects that live as long as the server need no scanning; long pauses would raise the p99 latency.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)
        self._memory.start()

    def switch(self, loaded: LoadedModel) -> None:
        """Use another model for new requests; called in a thread of its own."""
        before, self.queue.loaded = self.queue.loaded, loaded
        metrics.forget_dead_workers()
        _gauge(before).set(0)
        _gauge(loaded).set(1)

    def close(self) -> None:
        """Stop the threads; all accepted requests have been answered by now."""
        self._memory.close()
        if self._autonomy is not None:
            self._autonomy.close()
        if self.swaps is not None:
            self.swaps.close()
        if self._follower is not None:
            self._follower.close()
        self.queue.close()
        if self.keeper is not None:
            self.keeper.close(KEEPER_TIMEOUT)


def import_for_requests(*, teaching: bool) -> None:
    """Import now what requests would import later: a worker should not grow with its first ones."""
    load_decoders()
    if teaching:
        for name in _TEACHING:
            importlib.import_module(name)


def _teacher(engine: Engine) -> Teacher | None:
    """The teacher, if the server has a quarantine and an admin token; otherwise None."""
    settings = engine.settings
    if engine.keeper is None or engine.swaps is None or settings.admin_token is None or settings.teach == "off":
        return None
    from serving.teaching.teacher import Teacher

    return Teacher(settings, engine.keeper.store, engine.swaps)


def _group(settings: Settings) -> WorkerGroup:
    if folder := WorkerSettings.from_environment().group:
        return WorkerGroup(folder)
    # A worker that was not deployed by a server is a group of one.
    return create_group(settings, first_bundle(settings), BentoMLSettings.from_environment().home)


def _gauge(loaded: LoadedModel) -> Gauge:
    manifest = loaded.model.manifest
    return metrics.MODEL.labels(manifest.name, manifest.version, loaded.model.provider)
