"""A small bundle with a trunk, and drawn photos for it: made in a second, without any weights."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from serving.bundle.decision import OUTPUT_NAMES, Rule, complete
from serving.bundle.layout import POOLED, STATISTICS, TRUNK, detector_name
from serving.bundle.lessons import Teachable, archive
from serving.bundle.manifest import Golden, Graph, Manifest, seal, sha256
from serving.bundle.model import ENCODED, INPUT_NAME
from serving.bundle.pixels import open_image, to_pixels
from serving.bundle.pooled import ChoiceMemory, Statistics, learn_task, projection_for
from serving.bundle.pooled.factors import ClassFactors
from serving.bundle.pooled_model import PooledModel
from serving.bundle.run_verdict import not_measured
from serving.bundle.sections import Cascade, FileInfo, ImageSpec, TaskInfo, TrunkInfo
from serving.bundle.session import open_session

SIDE, DIM = 16, 64
TASKS: tuple[tuple[str, ...], ...] = (("ant", "bee", "cat", "dog"), ("ape", "bat", "cow", "doe"))
STRANGERS = ("elk", "fox", "gnu", "hen")
ALL = (*TASKS[0], *TASKS[1], *STRANGERS)
OTHERS = ("yak", "bird", "fish")
_NAMES = (*ALL, *OTHERS)
RUN_IMAGES = 24


def picture(label: str, number: int) -> bytes:
    """A PNG file of a class: its own pattern, with noise; the same each time."""
    return drawn(_NAMES.index(label), number)


def drawn(kind: int, number: int) -> bytes:
    """The same of a kind that is a number, of which there are any number."""
    pattern = np.random.default_rng([7, kind]).uniform(0, 255, (4, 4, 3)).repeat(8, 0).repeat(8, 1)
    random = np.random.default_rng([11, kind, number])
    noisy = pattern + random.normal(0, 70, (8, 8, 3)).repeat(4, 0).repeat(4, 1) + random.normal(0, 40, pattern.shape)
    stored = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stored, "PNG")
    return stored.getvalue()


def pictures(label: str, count: int, first: int = 0) -> list[bytes]:
    return [picture(label, number) for number in range(first, first + count)]


def trunk_graph() -> bytes:
    """uint8 pixels to vectors of length 1: a fixed random layer."""
    weights = np.random.default_rng(5).standard_normal((SIDE * SIDE * 3, DIM)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", [INPUT_NAME], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["floats"], ["flat"]),
        helper.make_node("Sub", ["flat", "middle"], ["centred"]),
        helper.make_node("MatMul", ["centred", "weights"], ["mixed"]),
        helper.make_node("Relu", ["mixed"], ["positive"]),
        helper.make_node("LpNormalization", ["positive"], [ENCODED], axis=1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "trunk",
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.UINT8, ["batch", SIDE, SIDE, 3])],
        [helper.make_tensor_value_info(ENCODED, TensorProto.FLOAT, ["batch", DIM])],
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.array([127.0], np.float32), "middle"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


SPEC = ImageSpec(height=SIDE, width=SIDE, mode="RGB")


def encode(contents: list[bytes]) -> NDArray[np.float32]:
    session = open_session(Graph(trunk_graph(), {}))
    pixels = np.stack([to_pixels(open_image(content), SPEC) for content in contents])
    encoded: NDArray[np.float32] = session.run([ENCODED], {INPUT_NAME: pixels})[0]
    return encoded


def write_bundle(folder: Path, tasks: tuple[tuple[str, ...], ...] = TASKS, images: int = RUN_IMAGES) -> Path:
    """A bundle as `openworld export` writes it of a run with a trunk."""
    folder.mkdir(parents=True)
    projection = projection_for(DIM)
    statistics, memory, factors = Statistics(projection), ChoiceMemory(), ClassFactors(projection)
    detectors, rules, earlier, first = [], [], [], 0
    for labels in tasks:
        rows = encode([content for label in labels for content in pictures(label, images)])
        ids = np.repeat(np.arange(first, first + len(labels)), images)
        learned = learn_task(statistics, memory, rows, ids, first, earlier)
        statistics, memory, factors = learned.statistics, learned.memory, factors.with_classes(rows, ids)
        detectors.append(learned.detector)
        rules.append(learned.rule)
        earlier.append(learned.task)
        first += len(labels)
    rule = Rule(score="pooled", alpha=0.05, tasks=tuple(rules), joint=True, expectation=True)
    model = PooledModel(learned.classifier, tuple(detectors))
    pixels = np.random.default_rng(3).integers(0, 256, (4, SIDE, SIDE, 3), dtype=np.uint8)
    (encoded,) = open_session(Graph(trunk_graph(), {})).run([ENCODED], {INPUT_NAME: pixels})
    outputs = complete(model.outputs(encoded), rule)
    files = {
        TRUNK: trunk_graph(),
        POOLED: archive(model.classifier.to_arrays()),
        STATISTICS: archive(Teachable(factors, memory, learned.classifier.settings).to_arrays()),
        **{detector_name(task): archive(each.to_arrays()) for task, each in enumerate(detectors)},
    }
    described = {name: FileInfo(sha256=sha256(content), size=len(content)) for name, content in files.items()}
    manifest, small = seal(
        rule,
        Golden(pixels, {"fp32": {name: outputs[name].astype(np.float32) for name in OUTPUT_NAMES}}),
        described,
        name="photos-pooled",
        created="2024-01-01T00:00:00+00:00",
        method="pooled",
        preset="photos",
        seed=0,
        image=SPEC,
        trunk=TrunkInfo(name="tiny", sha256=hashlib.sha256(trunk_graph()).hexdigest(), size=SIDE, depths=(DIM,)),
        tasks=_task_infos(tasks, rule),
        before=None,
        cascade=Cascade(candidates=None, agreement=None, images=0),
        verdict=not_measured("a test"),
        metrics={},
        versions={},
        verification={"fp32": {"images": 4.0}},
    )
    assert isinstance(manifest, Manifest)
    for name, content in {**files, **small}.items():
        (folder / name).write_bytes(content)
    return folder


def _task_infos(tasks: tuple[tuple[str, ...], ...], rule: Rule) -> tuple[TaskInfo, ...]:
    return tuple(
        TaskInfo(
            task=number,
            first_class_id=rule.columns[number].start,
            labels=labels,
            calibration=None,
            own_images=rule.tasks[number].images,
            parts=(detector_name(number),),
            unchanged=False,
        )
        for number, labels in enumerate(tasks)
    )


def one_image(method: int = zipfile.ZIP_STORED, name: str = "yak/1.png") -> bytes:
    """An archive with a folder and an image in it."""
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", method) as archive:
        archive.writestr(name, picture("yak", 1))
    return stored.getvalue()


def damaged(method: int) -> bytes:
    """... of which the compressed bytes are changed, after the nine that LZMA begins with."""
    content, start = bytearray(one_image(method)), 30 + len("yak/1.png") + 9
    content[start : start + 16] = bytes(byte ^ 0xFF for byte in content[start : start + 16])
    return bytes(content)


def shifted() -> bytes:
    """... whose directory is said to be a thousand bytes further on."""
    content = bytearray(one_image())
    end = content.rindex(b"PK\x05\x06")
    struct.pack_into("<I", content, end + 16, struct.unpack_from("<I", content, end + 16)[0] + 1000)
    return bytes(content)


HOSTILE_ARCHIVES = {
    "a name that is no text": (one_image(name="y\u00e9k/1.png").replace(b"\xc3\xa9", b"\xff\xff"), "can't decode byte"),
    "bzip2": (damaged(zipfile.ZIP_BZIP2), "allowed: stored or deflated"),
    "LZMA": (damaged(zipfile.ZIP_LZMA), "allowed: stored or deflated"),
    "a directory elsewhere": (shifted(), "negative seek value"),
}
"""Archives that zipfile does not call bad, each with a part of the message."""
