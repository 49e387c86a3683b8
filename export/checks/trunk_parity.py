"""The files of a bundle with a trunk, and their parity: what a server computes from pixels is what the run measured."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.checks.parity import ALLOWED, BATCHES, ParityError
from export.graph.evidence import Evidence
from models.trunks.trunk import INPUT, OUTPUT, Trunk
from serving.bundle.decision import Outputs, complete, decide
from serving.bundle.layout import POOLED, TRUNK, detector_name
from serving.bundle.manifest import Graph
from serving.bundle.pooled import PooledClassifier
from serving.bundle.pooled_model import PooledModel
from serving.bundle.session import open_session
from training.learn.pooled_decision import PooledDecider

BATCH = 16


def write_trunk(folder: Path, trunk: Trunk, model: PooledModel) -> None:
    """Write the files that replace the graphs of a network learned from scratch."""
    (folder / TRUNK).write_bytes(trunk.model)
    for name, part in _files_of(model).items():
        stored = io.BytesIO()
        arrays: dict[str, Any] = part.to_arrays()
        np.savez(stored, **arrays)
        (folder / name).write_bytes(stored.getvalue())


def _files_of(model: PooledModel) -> dict[str, PooledClassifier]:
    return {POOLED: model.classifier, **{detector_name(task): each for task, each in enumerate(model.detectors)}}


def _read(folder: Path, name: str) -> PooledClassifier:
    with np.load(folder / name, allow_pickle=False) as stored:
        return PooledClassifier.from_arrays(dict(stored))


def verify_trunk(
    folder: Path, decider: PooledDecider, pixels: NDArray[np.uint8], evidence: Evidence
) -> tuple[Outputs, dict[str, float]]:
    """The outputs of the written files for `pixels`, and what was compared; raises a ParityError.

    - batches: an image is encoded in the same way alone and in a batch of seven;
    - classifier and detectors: the files give the outputs of the run for the same vectors, to the bit;
    - photos: the images of the run, read and encoded as a server does it, give the run's vectors, and its answers.
    """
    session = open_session(Graph((folder / TRUNK).read_bytes(), {}))

    def encode(images: NDArray[np.uint8], size: int) -> NDArray[np.float32]:
        parts = [images[start : start + size] for start in range(0, len(images), size)]
        return np.concatenate([session.run([OUTPUT], {INPUT: part})[0] for part in parts])

    classifier, *detectors = (_read(folder, name) for name in _files_of(decider.model))
    encoded = {size: encode(pixels, size) for size in BATCHES}
    outputs = PooledModel(classifier, tuple(detectors)).outputs(encoded[max(BATCHES)])
    result = {"images": float(len(pixels)), "allowed": ALLOWED}
    result["batch_difference"] = _largest("batches", encoded[BATCHES[0]], encoded[BATCHES[-1]])
    expected = decider.outputs(encoded[max(BATCHES)])
    for name, values in expected.items():
        if not np.array_equal(values, outputs[name]):
            raise ParityError(f"{POOLED} and the detectors: {name} differ from those of the run for the same vectors")
    if evidence.encoded is not None and len(evidence):
        again = encode(evidence.pixels, BATCH)
        result["photos"] = float(len(evidence))
        result["photo_difference"] = _largest("photos", evidence.encoded, again)
        result["label_agreement"] = _agreement(decider, evidence.encoded, again)
    return complete(outputs, decider.rule), result


def _largest(what: str, expected: NDArray[np.float32], got: NDArray[np.float32]) -> float:
    """The largest difference relative to the length of a vector, which is 1."""
    worst = float(np.abs(expected - got).max())
    # Written so that NaN fails as well.
    if not worst <= ALLOWED:
        raise ParityError(f"{TRUNK}, {what}: a number of the encoded vector differs by {worst:.2g} > {ALLOWED:g}")
    return worst


def _agreement(decider: PooledDecider, expected: NDArray[np.float32], got: NDArray[np.float32]) -> float:
    wanted, found = (
        decide(complete(decider.outputs(each), decider.rule), decider.rule).class_id for each in (expected, got)
    )
    if (differing := wanted != found).any():
        raise ParityError(f"{TRUNK}: {int(differing.sum())} of {len(wanted)} photos get another label than in the run")
    return 1.0
