"""A trunk in a coarser precision than fp32, and how far its answers agree with those of fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from export.checks.parity import verify_precision
from export.graph.evidence import Evidence
from export.graph.notes import note
from export.graph.trunk_int8 import quantize
from models.trunks.trunk import INPUT, OUTPUT, Trunk
from serving.bundle.decision import Outputs, complete
from serving.bundle.directory import WriteError
from serving.bundle.layout import TRUNK, trunk_name
from serving.bundle.manifest import Bundle, Graph, describe_file
from serving.bundle.session import open_session
from training.learn.pooled_decision import PooledDecider

BATCH = 16
EVERY = 3
"""Every third photo is used to choose the ranges of int8, and the others to judge the result."""


@dataclass(frozen=True)
class CoarseTrunk:
    """A trunk that was written in another precision."""

    precision: str
    model: bytes
    judged: NDArray[np.bool_]
    """Which photos of the evidence had no part in writing it."""

    def outputs(self, decider: PooledDecider, pixels: NDArray[np.uint8]) -> Outputs:
        """The inputs of the decision rule for images [n, size, size, 3]."""
        session = open_session(Graph(self.model, {}))
        parts = [pixels[start : start + BATCH] for start in range(0, len(pixels), BATCH)]
        encoded = np.concatenate([session.run([OUTPUT], {INPUT: part})[0] for part in parts])
        return complete(decider.outputs(encoded), decider.rule)

    def verify(self, decider: PooledDecider, evidence: Evidence) -> dict[str, float]:
        """How far the answers agree with those of fp32; raises a ParityError if that is not enough."""
        some = evidence.at(self.judged)
        assert some.encoded is not None
        exact = complete(decider.outputs(some.encoded), decider.rule)
        return verify_precision(self.precision, exact, self.outputs(decider, some.pixels), decider.rule, some)


def write_coarse_trunk(
    folder: Path, precision: str, trunk: Trunk, evidence: Evidence, before: Bundle | None
) -> CoarseTrunk:
    """Write the trunk in int8, with ranges from some photos of the evidence.

    If the bundle that is replaced has the same trunk in int8, that is taken: what was learned earlier must get the same
    answers as before.
    """
    path = folder / trunk_name(precision)
    judged = np.ones(len(evidence), bool)
    if (model := _earlier(folder, precision, before)) is None:
        measuring = np.arange(len(evidence)) % EVERY == 0
        judged = ~measuring
        if not judged.any():
            raise WriteError(f"{precision}: {len(evidence)} photos are available to measure ranges; needed: at least 2")
        model = quantize(onnx.load_from_string(trunk.model), evidence.pixels[measuring])
        note(f"{precision}: ranges of the trunk were measured on {int(measuring.sum())} photos")
    path.write_bytes(model)
    return CoarseTrunk(precision, model, judged)


def _earlier(folder: Path, precision: str, before: Bundle | None) -> bytes | None:
    if before is None or precision not in before.manifest.precisions:
        return None
    if before.manifest.files.get(TRUNK) != describe_file(folder / TRUNK):
        return None
    return before.graph(precision).model
