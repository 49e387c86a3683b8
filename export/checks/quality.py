"""How good the exported run is: its metrics and its verdict, which go into the manifest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from export.graph.notes import note
from models.trunks.trunk import Trunk
from serving.bundle.run_verdict import PartVerdict, RunVerdict, not_measured, summarise
from training.data.images import DataError
from training.data.opening import open_sources
from training.data.quarantined import Address
from training.run import Run, RunError
from training.store.checkpoint import METRICS

VERDICT = "verdict"


class VerdictError(Exception):
    """A run that does not work, and is exported only by force."""


@dataclass(frozen=True)
class Quality:
    """The metrics of a run by the decision that is exported, and the verdict on it."""

    metrics: dict[str, Any]
    verdict: RunVerdict

    def check(self, folder: Path, *, force: bool) -> None:
        """Raise a VerdictError if a part of the run does not work, unless that is forced."""
        if (warning := self.verdict.warning) is None:
            return
        if not force:
            raise VerdictError(f"{folder}: {warning} Allowed: --force; every answer will have this warning")
        note(f"forced: {warning}")


def quality_of(
    folder: Path, run: Run, data: str | None, quarantine: Address | None, trunk: Trunk | None = None
) -> Quality:
    """The quality that RUN/metrics.json records. A run that is exported by another decision than it was measured with
    is measured again, on the test images that are available."""
    metrics = _recorded(folder)
    verdict = _verdict(folder, metrics)
    measured_by = metrics.get("decision")
    if measured_by != run.decider.name:
        note(f"measuring the run again: it was measured with decision {measured_by}, not {run.decider.name}")
        # Most exports need nothing of this.
        from training.measure.evaluation import evaluate, measure

        try:
            sources = open_sources(run.config, data, quarantine, trunk=trunk)
            metrics = measure(evaluate(run, sources, torch.device("cpu")))
        except DataError as error:
            reason = f"the run was measured with decision {measured_by} only, and no test image is available ({error})"
            return Quality({}, _by_another_decision(verdict, reason))
        verdict = _verdict(folder, metrics)
    return Quality(metrics, verdict)


def _verdict(folder: Path, metrics: dict[str, Any]) -> RunVerdict:
    """The verdict, which is taken out of the metrics."""
    try:
        return RunVerdict.model_validate(metrics.pop(VERDICT, None))
    except ValidationError:
        raise RunError(
            f"{folder / METRICS}: no verdict on the run; measure it again with `openworld fit --out {folder} --resume`"
        ) from None


def _by_another_decision(recorded: RunVerdict, reason: str) -> RunVerdict:
    """Nothing is known of the new decision, but a part that did not work with the measured one is not taken to work."""
    if recorded.warning is None:
        return not_measured(reason)

    def part(before: PartVerdict) -> PartVerdict:
        if before.grade == "not working":
            return before.model_copy(update={"numbers": f"{before.numbers}; {reason}"})
        return PartVerdict(grade="not measured", numbers=reason)

    return summarise(part(recorded.wp), part(recorded.tp), part(recorded.unknown), recorded.note)


def _recorded(folder: Path) -> dict[str, Any]:
    path = folder / METRICS
    try:
        return dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise RunError(
            f"{folder}: no {METRICS} ({error.strerror}); finish it with `openworld fit --out {folder} --resume`"
        ) from None
    except (ValueError, TypeError) as error:
        raise RunError(f"{path}: not a JSON object: {error}") from None
