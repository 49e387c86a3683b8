"""A tiny bundle, images for it, and a server to put it into."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Rule, TaskRule
from serving.bundle.layout import MANIFEST, graph_name
from serving.bundle.manifest import INPUT_NAME, Golden, Manifest, fingerprint, seal, sha256
from serving.bundle.model import BundleModel
from serving.bundle.run_verdict import PartVerdict, RunVerdict, summarise
from serving.bundle.sections import Calibration, Cascade, FileInfo, ImageSpec, TaskInfo

if TYPE_CHECKING:
    from onnx import ModelProto

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
SPEC = ImageSpec(height=8, width=8, mode="RGB")
PATIENCE = 120.0
"""Seconds before a test gives up waiting: far more than anything takes, because other work may fill the processors."""
PORTS = 2048
"""Ports of each test process."""
http_get, http_post = partial(httpx.get, timeout=PATIENCE), partial(httpx.post, timeout=PATIENCE)
"""Each over a new connection."""
LABELS = (("red", "green"), ("blue", "yellow"))
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
GRAPH = graph_name("fp32")
WORKS, FAILS = (
    summarise(
        PartVerdict(grade="good", numbers="WP 100.0 % of 99 test images, guessing 50.0 %"),
        PartVerdict(grade=grade, numbers=f"TP {share} % of 99 test images, guessing 50.0 %", advice=advice),
        PartVerdict(grade="weak", numbers="AUROC 0.700, guessing 0.5", advice="More images help."),
    )
    for grade, share, advice in (("good", 100.0, ""), ("not working", 51.5, "Longer training helps."))
)
"""Verdicts on a run that works, and on one that does not predict the task."""
GREY = (128, 128, 128)
"""A colour far from every class, and therefore unknown."""


def tiny_graph(spec: ImageSpec = SPEC) -> ModelProto:
    """Logits are -8 times the squared distance of the mean colour to four prototypes; distances are its log."""
    prototypes = np.array([COLOURS[label] for task in LABELS for label in task], dtype=np.float32)[None] / 255
    # These import onnx and PyTorch, which takes seconds; most processes that tests start write no graph.
    from onnx import TensorProto, helper

    from export.graph.assemble import write_decision
    from export.graph.writer import GraphWriter

    writer = GraphWriter(Path(), "fp32")
    constants: dict[str, Any] = {
        "size": [1, 2],
        "colour": [2],
        "middle": [1],
        "white": 255.0,
        "prototypes": prototypes,
        "steepness": -8.0,
        "tiny": 1e-12,
    }
    for name, value in constants.items():
        writer.constant(name, value)
    writer.add("Cast", "numbers", [INPUT_NAME], output="numbers", to=TensorProto.FLOAT)
    writer.add("ReduceMean", "mean", ["numbers", "size"], output="mean", keepdims=0)
    writer.add("Div", "share", ["mean", "white"], output=FEATURES)
    writer.add("Unsqueeze", "row", [FEATURES, "middle"], output="row")
    writer.add("Sub", "difference", ["row", "prototypes"], output="difference")
    writer.add("Mul", "square", ["difference", "difference"], output="square")
    writer.add("ReduceSum", "apart", ["square", "colour"], output="apart", keepdims=0)
    writer.add("Mul", "logits", ["apart", "steepness"], output="logits")
    writer.add("Max", "separate", ["apart", "tiny"], output="separate")
    writer.add("Log", "distances", ["separate"], output="distances")
    write_decision(writer, tiny_rule())
    widths = dict.fromkeys(OUTPUT_NAMES, 4) | {"scores": 2, "p_task": 2, FEATURES: 3}
    return writer.model(
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.UINT8, ["batch", *spec.shape])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in widths.items()],
    )


def tiny_rule() -> Rule:
    """99 validation images per task, at squared distances 0.001, 0.002 ... from their prototype."""
    scores = np.log(np.arange(1, 100) / 1000)
    return Rule(alpha=0.05, tasks=tuple(TaskRule.fit(scores, classes=len(labels)) for labels in LABELS))


def golden_pixels(spec: ImageSpec = SPEC) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (3, *spec.shape), dtype=np.uint8)


def write_bundle(
    folder: Path,
    *,
    graph: ModelProto | None = None,
    golden: Mapping[str, NDArray[Any]] | None = None,
    precisions: Sequence[str] = ("fp32",),
    verdict: RunVerdict | None = None,
) -> Path:
    """Write a complete, valid bundle, except for the given parts; all precisions contain the same graph."""
    folder.mkdir(parents=True, exist_ok=True)
    graph_bytes = (graph or tiny_graph()).SerializeToString()
    if golden is None:
        pixels = golden_pixels()
        import onnxruntime

        session = onnxruntime.InferenceSession(tiny_graph().SerializeToString(), providers=["CPUExecutionProvider"])
        computed = session.run(list(OUTPUT_NAMES), {INPUT_NAME: pixels})
        golden = {INPUT_NAME: pixels, **dict(zip(OUTPUT_NAMES, computed, strict=True))}
    outputs = {name: values for name, values in golden.items() if name != INPUT_NAME}
    graphs = [graph_name(precision) for precision in precisions]
    _, files = seal(
        tiny_rule(),
        Golden(golden[INPUT_NAME], dict.fromkeys(precisions, outputs)),
        dict.fromkeys(graphs, FileInfo(sha256=sha256(graph_bytes), size=len(graph_bytes))),
        name="tiny",
        created="2024-01-01T00:00:00Z",
        method="colours",
        preset="tiny",
        seed=0,
        image=SPEC,
        tasks=tuple(
            TaskInfo(
                task=task,
                first_class_id=2 * task,
                labels=labels,
                calibration=Calibration(scale=1, shift=0),
                own_images=tiny_rule().tasks[task].images,
                parts=(),
                unchanged=False,
            )
            for task, labels in enumerate(LABELS)
        ),
        before=None,
        cascade=Cascade(candidates=None, agreement=None, images=0),
        verdict=verdict or WORKS,
        metrics={"accuracy": 1.0},
        versions={"numpy": np.__version__},
        verification={precision: {"max_logit_difference": 0.0} for precision in precisions},
    )
    for name, content in {**files, **dict.fromkeys(graphs, graph_bytes)}.items():
        (folder / name).write_bytes(content)
    return folder


def golden_of(model: BundleModel) -> dict[str, NDArray[Any]]:
    """The contents of a model's golden file, for tests that damage it."""
    return {INPUT_NAME: model.bundle.golden.pixels, **model.bundle.golden.outputs["fp32"]}


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Change a manifest and, if it is still valid, its version, so that only the change is wrong."""
    path = folder / MANIFEST
    content = {**json.loads(path.read_text()), **changes}
    with contextlib.suppress(ValidationError):
        content["version"] = fingerprint(Manifest.model_validate(content))
    path.write_text(json.dumps(content))


def reseal(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree, so that only the content is wrong."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    edit_manifest(folder, files={**files, name: {"sha256": sha256(content), "size": len(content)}})


def image_bytes(
    colour: Any = (255, 0, 0), *, size: tuple[int, int] = (8, 8), mode: str = "RGB", kind: str = "PNG", **options: Any
) -> bytes:
    return saved(Image.new(mode, size, colour), kind, **options)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **options)
    return stored.getvalue()


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG from chunks (name and body), each with a valid checksum."""
    sealed = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (*chunks, (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and contains almost no data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)))


def bad_palettes() -> list[bytes]:
    """PNGs of 4 x 4 indices: into no palette, and into one with more transparency than colours."""
    header = (b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 3, 0, 0, 0))
    data = (b"IDAT", zlib.compress(bytes(4 * 5)))
    return [png(header, data), png(header, (b"PLTE", bytes(3 * 256)), (b"tRNS", bytes(300)), data)]


def server_environment(home: Path, bundle: Path | None, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server with one worker, unless `settings` (OPENWORLD_WORKERS ...) override it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BENTOML_", "OPENWORLD_"))}
    chosen = {"OPENWORLD_WORKERS": "1"} | ({} if bundle is None else {"OPENWORLD_BUNDLE": str(bundle)})
    return {**kept, **chosen, **(settings or {}), "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}


SOURCE = "serving.service:OpenWorld"


def serve_command(
    port: int, python: str = sys.executable, target: str | None = None, host: str | None = "127.0.0.1"
) -> list[str]:
    """Our own command; BentoML's, if a target is given."""
    command = ["serving"] if target is None else ["bentoml", "serve", target]
    return [python, "-m", *command, *(("--host", host) if host else ()), "--port", str(port)]


def refused(
    command: Sequence[str], home: Path, bundle: Path | None, settings: Mapping[str, str] | None = None
) -> list[str]:
    """The lines on standard error of a server that must not start."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=server_environment(home, bundle, settings),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr.splitlines()


_ports = itertools.count(random.SystemRandom().randrange(PORTS))


def free_port() -> int:
    """A port that nothing listens on, and that the kernel gives to no connection meanwhile.

    It is below the ports of outgoing connections, and each test process has a range of its own, so that it is still
    free when a server that takes seconds to start listens there.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for number in itertools.islice(_ports, PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = 16_384 + PORTS * process + number % PORTS
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


@dataclass(frozen=True)
class Server:
    url: str
    port: int
    log: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(
    home: Path,
    bundle: Path | None,
    *,
    target: str | None = None,
    cwd: Path = ROOT,
    python: str = sys.executable,
    settings: Mapping[str, str] | None = None,
    host: str | None = "127.0.0.1",
) -> Iterator[Server]:
    """A real server in a separate process, from ready to stopped."""
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    log = home / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            serve_command(port, python, target, host),
            cwd=cwd,
            env=server_environment(home, bundle, settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://127.0.0.1:{port}", port, log, process)
    try:
        wait_until_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(server: Server, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/readyz", timeout=patience).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"server not ready, exit code {server.process.poll()}:\n{server.log.read_text()}")


def eventually(check: Callable[[], T], patience: float = PATIENCE) -> T:
    """Wait for a true result of `check` and return it; fails after a timeout."""
    deadline = time.monotonic() + patience
    while not (found := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience} seconds; last: {found!r}")
        time.sleep(0.02)
    return found


def all_written(server: Server, least: int) -> bool:
    """Whether at least `least` images were offered to the quarantine, and none of them still waits to be written."""
    offered, *ended = (
        metric(server, f"openworld_quarantine_{name}_total") for name in ("offered", "kept", "copies", "dropped")
    )
    return least <= offered == sum(ended)


def metric(server: Server, name: str, /, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    total = 0.0
    for line in http_get(f"{server.url}/metrics").text.splitlines():
        if line.partition("{")[0].partition(" ")[0] == name and all(label in line for label in wanted):
            total += float(line.rpartition(" ")[2])
    return total
