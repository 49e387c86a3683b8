"""The files of a bundle with a trunk, and their parity: what a server computes from pixels is what the run measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.checks.adapter_parity import verify_adapters
from export.checks.parity import ALLOWED, BATCHES, ParityError
from export.graph.evidence import Evidence
from export.graph.notes import note
from models.trunks.maps import maps_beside
from models.trunks.trunk import Trunk
from serving.bundle.arrays import MOST_UNPACKED, read_arrays
from serving.bundle.decision import Outputs, complete, decide
from serving.bundle.layout import MAPS, POOLED, STATISTICS, TRUNK, detector_name
from serving.bundle.lessons import archive
from serving.bundle.manifest import Graph
from serving.bundle.model import encode_rotations
from serving.bundle.pooled import Detector, PooledClassifier
from serving.bundle.pooled_model import PooledModel, adapters_of, weight_arrays
from serving.bundle.session import open_session
from training.learn.pooled_decision import PooledDecider
from training.run import Run

BATCH = 16
WHY_NOT = "it was begun by an earlier version, or has too many photos"


def write_trunk(folder: Path, trunk: Trunk, decider: PooledDecider, *, teaching: bool = True) -> None:
    """Write the files that replace the graphs of a network learned from scratch, and those to learn classes from."""
    (folder / TRUNK).write_bytes(trunk.model)
    if (maps := maps_beside(trunk.model, TRUNK)) is not None:
        (folder / MAPS).write_bytes(maps)
    else:
        note(
            f"no part of a vector of {trunk.spec.public_name} is an average of feature maps: answers are not explained"
        )
    for name, arrays in _files_of(decider.model).items():
        (folder / name).write_bytes(archive(arrays))
    if not teaching:
        note("without the parts of its classes, no server can learn from this bundle")
    elif decider.teachable is None:
        note(f"this run has not kept the parts of its classes ({WHY_NOT}): no server can learn from its bundle")
    elif decider.teachable.factors.size > MOST_UNPACKED:
        size = f"{decider.teachable.factors.size / 1e6:.0f} MB"
        note(f"the parts of all classes take {size}, more than a server reads: it cannot learn from this bundle")
    else:
        (folder / STATISTICS).write_bytes(archive(decider.teachable.to_arrays()))


def _files_of(model: PooledModel) -> dict[str, dict[str, Any]]:
    """The arrays of each file: the classifier of all tasks, and of each task its detector and its adapter."""
    files = {POOLED: {**model.classifier.to_arrays(), **weight_arrays(model)}}
    for task, detector in enumerate(model.detectors):
        adapter = model.adapters[task].to_arrays() if model.adapters else {}
        files[detector_name(task)] = {**detector.to_arrays(), **adapter}
    return files


def _read(folder: Path, tasks: int) -> PooledModel:
    def arrays(name: str) -> dict[str, NDArray[Any]]:
        return read_arrays((folder / name).read_bytes())

    pooled, *each = arrays(POOLED), *(arrays(detector_name(task)) for task in range(tasks))
    detectors = tuple(map(Detector.from_arrays, each))
    return PooledModel(PooledClassifier.from_arrays(pooled), detectors, *adapters_of(pooled, each))


def verify_trunk(
    folder: Path, run: Run, pixels: NDArray[np.uint8], evidence: Evidence
) -> tuple[Outputs, dict[str, float]]:
    """The outputs of the written files for `pixels`, and what was compared; raises a ParityError.

    - batches: an image is encoded in the same way alone and in a batch of seven;
    - classifier, detectors and adapters: the files give the outputs of the run for the same vectors, to the bit;
    - adapters: they give the logits of the masked network, but for weights that are stored in 16 bits;
    - photos: the images of the run, read and encoded as a server does it, give the run's vectors, and its answers.
    """
    session = open_session(Graph((folder / TRUNK).read_bytes(), {}))
    decider = run.need_pooled()
    model = _read(folder, len(decider.detectors))

    def encode(images: NDArray[np.uint8], size: int) -> NDArray[np.float32]:
        parts = [images[start : start + size] for start in range(0, len(images), size)]
        return np.concatenate([encode_rotations(session, part, model.rotations) for part in parts])

    encoded = {size: encode(pixels, size) for size in BATCHES}
    outputs = model.outputs(encoded[max(BATCHES)])
    result = {"images": float(len(pixels)), "allowed": ALLOWED}
    result["batch_difference"] = _largest("batches", encoded[BATCHES[0]], encoded[BATCHES[-1]])
    expected = decider.outputs(encoded[max(BATCHES)])
    for name, values in expected.items():
        if not np.array_equal(values, outputs[name]):
            raise ParityError(f"{POOLED} and the files of tasks: {name} differ from the run's for the same vectors")
    result |= verify_adapters(run, model, encoded[max(BATCHES)], BATCHES)
    if evidence.encoded is not None and len(evidence):
        again = encode(evidence.pixels, BATCH)
        result["photos"] = float(len(evidence))
        result["photo_difference"] = _largest("photos", evidence.encoded, again)
        result["label_agreement"] = _agreement(decider, evidence.encoded, again)
        result |= verify_adapters(run, model, evidence.encoded, BATCHES)
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
