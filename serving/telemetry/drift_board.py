"""Publishes the results of a worker's drift tests: in the metrics, in the log, and to the other workers of the server.

Workers publish their state once per second in the folder that their metrics are in, so that each of them can report for
all. Starting a server empties that folder.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

from serving.bundle.atomic import replace_file
from serving.telemetry import log, metrics
from serving.telemetry.drift import ALL, Alarm, DriftMonitor, Watched, wilson
from serving.telemetry.logs import timestamp

PUBLISH_SECONDS = 1.0


class DriftBoard:
    """The tests of this worker, and the reports of all workers; used on the event loop."""

    def __init__(self, every: int, window: metrics.SlidingWindow) -> None:
        self.every = every
        self._window = window
        self._version = ""
        self._monitor: DriftMonitor | None = None
        self._scheduled = False

    def record(
        self, version: str, tasks: int, fields: dict[str, Any], brightness: float, request_id: str | None
    ) -> None:
        """Take note of an answer of the served model."""
        if self._monitor is None or self._version != version:
            # Scores of another model cannot be compared.
            self._version, self._monitor = version, DriftMonitor(tasks, self.every)
            for name in self._monitor.images:
                # From 0 on: Prometheus sees no increase of a series that begins with its first alarm.
                metrics.DRIFT_ALARMS.labels(name).inc(0)
        watched = Watched(fields["unknown_score"], brightness)
        alarm = self._monitor.add(fields["task"], watched, fields["best_guess"], request_id)
        if alarm is not None:
            self._report(alarm)

    def publish_soon(self) -> None:
        """Let the other workers know, after every answer: the share of unknown answers also counts those that no test
        sees."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(PUBLISH_SECONDS, self._publish)

    def _report(self, alarm: Alarm) -> None:
        metrics.DRIFT_ALARMS.labels(alarm.task).inc()
        metrics.DRIFT_SINCE.labels(alarm.task).set(alarm.since)
        what = "all tasks" if alarm.task == ALL else f"task {alarm.task}"
        log.warning(
            "the images of %s have changed: they are %s since %s (%d images, compared with %d before); for example "
            "requests %s",
            what,
            alarm.change,
            timestamp(alarm.since),
            alarm.images,
            alarm.before,
            ", ".join(str(example.request_id) for example in alarm.examples),
        )

    def _publish(self) -> None:
        self._scheduled = False
        if (monitor := self._monitor) is not None:
            for name in monitor.images:
                metrics.DRIFT_EVIDENCE.labels(name).set(monitor.evidence(name))
        if (folder := metrics.shared_folder()) is not None:
            try:
                replace_file(folder / f"{_PREFIX}{os.getpid()}.json", json.dumps(self._state()).encode(), durable=False)
            except OSError as error:
                # The metrics cannot be written either then.
                log.warning("the drift report cannot be written: %s", error)

    def _state(self) -> dict[str, Any]:
        monitor = self._monitor
        tests = (
            {} if monitor is None else {name: [count, monitor.evidence(name)] for name, count in monitor.images.items()}
        )
        alarms = [] if monitor is None else [_alarm_fields(alarm) for alarm in monitor.alarms]
        recent = [self._window.answers, self._window.unknown]
        return {"version": self._version, "tests": tests, "alarms": alarms, "recent": recent}

    def report(self, version: str, tasks: int) -> dict[str, Any]:
        """The state of all workers that serve this version, as the fields of a DriftReport; reads files."""
        states = [state for state in (*_others(), self._state()) if state["version"] in (version, "")]
        recent, unknown = (sum(state["recent"][place] for state in states) for place in (0, 1))
        low, high = wilson(unknown, recent)
        alarms = sorted((alarm for state in states for alarm in state["alarms"]), key=lambda alarm: -alarm["at"])
        tests = []
        for name in (ALL, *map(str, range(tasks))):
            found = [state["tests"].get(name, [0, 0.0]) for state in states]
            images, evidence = sum(count for count, _ in found), sum(share for _, share in found)
            tests.append({"task": None if name == ALL else int(name), "images": images, "evidence": evidence})
        share = unknown / recent if recent else None
        return {
            "version": version,
            "every": self.every,
            "unknown": {"images": recent, "unknown": unknown, "share": share, "low": low, "high": high},
            "tests": tests,
            "alarms": [{**alarm, **_times(alarm)} for alarm in alarms],
        }


_PREFIX = "openworld_drift_"


def _others() -> Iterator[dict[str, Any]]:
    """The states of the other workers that live."""
    if (folder := metrics.shared_folder()) is None:
        return
    for file in folder.glob(f"{_PREFIX}*.json"):
        try:
            pid = int(file.stem.removeprefix(_PREFIX))
            if pid != os.getpid() and metrics.alive(pid):
                yield json.loads(file.read_bytes())
        except (OSError, ValueError):
            # Another worker may just have ended.
            continue


def _alarm_fields(alarm: Alarm) -> dict[str, Any]:
    fields = alarm._asdict()
    fields["task"] = None if alarm.task == ALL else int(alarm.task)
    fields["examples"] = [example._asdict() for example in alarm.examples]
    return fields


def _times(alarm: dict[str, Any]) -> dict[str, Any]:
    examples = [{**example, "at": timestamp(example["at"])} for example in alarm["examples"]]
    return {"at": timestamp(alarm["at"]), "since": timestamp(alarm["since"]), "examples": examples}
