"""Alternatives for int8: `python -m tests.benchmarks.export_choices RUN`.

Every choice is compared with fp32 on the run's validation images. None of them changes what the exporter writes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.checks.parity import verify_precision
from export.exporter import Exporter
from export.graph import body_int8 as quantized
from export.graph.body_float import FloatBody
from export.graph.evidence import Evidence, gather
from export.graph.session import GraphQuery
from models.activation_ranges import measured_layers
from models.baked import BakedLinear
from models.network import Network
from tests.benchmarks.conftest import table
from training.data.tasks import to_device, to_unit
from training.run import Run, open_run

HEAD = ("weights and ranges", "labels as in fp32", "known as in fp32", "largest AUROC change", "mean score difference")
Choice = Callable[[Run, Evidence], AbstractContextManager[object]]


def bits(number: int) -> Choice:
    """Weights with this many bits, including the sign."""
    return lambda *_: patch.object(quantized, "LARGEST_WEIGHT", 2 ** (number - 1) - 1)


def percentiles(share: float) -> Choice:
    """Ranges without this share of the smallest and largest activations, on validation images."""

    @contextmanager
    def change(run: Run, evidence: Evidence) -> Iterator[None]:
        network = run.network
        recorded = [network.activation_ranges(task).bounds for task in range(len(network.heads))]
        for task in range(len(recorded)):
            network.activation_ranges(task).bounds = bounds(
                network, task, evidence.pixels[evidence.tasks == task], share
            )
        yield
        for task, each in enumerate(recorded):
            network.activation_ranges(task).bounds = each

    return change


@torch.no_grad()
def bounds(network: Network, task: int, pixels: NDArray[np.uint8], share: float) -> Tensor:
    """[layers, 2]: the percentiles of the outputs of each layer of a task's baked body."""
    body, found = network.baked_body(task), []

    def note(_: nn.Module, __: object, output: Tensor) -> None:
        found.append(np.quantile(output.numpy(), (share, 1 - share)))

    for _, layer in measured_layers(body):
        layer.register_forward_hook(note)
    body(network.rotated(network.encode(to_unit(to_device(pixels, torch.device("cpu"))))))
    return torch.tensor(np.stack(found), dtype=torch.float32)


def rounded_linear(*_: object) -> AbstractContextManager[object]:
    """Linear layers with weights of 7 bits as well, on activations that stay floating point."""
    # The int8 body writes nothing but its linear layers in floating point.
    real = FloatBody._weights

    def rounded(self: FloatBody, path: str, layer: BakedLinear) -> list[str]:
        with torch.no_grad():
            steps = (layer.weight.abs().amax(dim=1, keepdim=True) / quantized.LARGEST_WEIGHT).clamp(min=1e-12)
            layer.weight.copy_(torch.round(layer.weight / steps) * steps)
        return real(self, path, layer)

    return patch.object(FloatBody, "_weights", rounded)


CHOICES: dict[str, Choice] = {
    "as written: 7 bits, recorded extremes": lambda *_: nullcontext(),
    "8 bits": bits(8),
    "6 bits": bits(6),
    "5 bits": bits(5),
    "ranges without 0.01 % at either end": percentiles(1e-4),
    "ranges without 0.1 % at either end": percentiles(1e-3),
    "linear weights in 7 bits too": rounded_linear,
}


def main(folder: Path) -> None:
    run = open_run(folder, torch.device("cpu"))
    evidence, rows = gather(run), []
    with tempfile.TemporaryDirectory() as place:
        exporter = Exporter(run, Path(place), evidence, cascade="off")
        (exact,) = exporter.write("fp32").run([GraphQuery(evidence.pixels)])
        for name, choice in CHOICES.items():
            with choice(run, evidence):
                (got,) = exporter.write("int8").run([GraphQuery(evidence.pixels)])
            with patch("export.checks.parity.AGREEING", {}), patch("export.checks.parity.AUROC_CHANGE", 2.0):
                found = verify_precision("int8", exact, got, run.rule, evidence)
            moved = np.abs(got["scores"] - exact["scores"]) / (1 + np.abs(exact["scores"]))
            shares = [f"{found[key]:.2%}" for key in ("label_agreement", "unknown_agreement")]
            rows.append((name, *shares, f"{found['largest_task_auroc_change']:.5f}", f"{moved.mean():.4f}"))
    print(f"{len(evidence)} validation images\n{table(HEAD, rows)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
