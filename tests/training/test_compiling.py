"""Step 1 compiled: its results and the number of compilations. Graphs are traced as for a GPU, but run eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from models.network import Network
from tests.helpers import FEATURES, adam, tiny_network, tiny_task, use_tiny_preset
from training import fit
from training.config import Augmentation
from training.host import device
from training.learn.features import learn_features

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.long

TASKS = 2


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    # Imported here because every test process collects all files, and this import takes seconds.
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile
    monkeypatch.setattr(device.torch, "compile", lambda see: compile_(see, backend=counter))
    yield counter
    torch.compiler.reset()


def learned(*, compiling: bool) -> tuple[Network, list[float]]:
    network = tiny_network("hat")
    losses = []
    for task in range(TASKS):
        network.add_task(2)
        how = replace(FEATURES, batch_size=5)
        # The last batch of an epoch is smaller than the others.
        data = tiny_task(1, seed=task, per_class=6)
        assert len(data.train) % how.batch_size
        optimizer = adam(network.trainable(task))
        losses += learn_features(
            network, task, data, how, Augmentation(), optimizer, range(how.epochs), compiling=compiling
        )
        network.finish(task)
    return network, losses


def test_compiled_learns_the_same(counter: CompileCounterWithBackend) -> None:
    plain, losses = learned(compiling=False)
    assert counter.frame_count == 0
    compiled, again = learned(compiling=True)
    assert again == losses
    ours = compiled.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    # Without a graph break; once for a full batch and once for any other size, at any sharpness of the gates.
    assert TASKS <= counter.frame_count <= 2 * TASKS


def test_a_failed_compilation_prints_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_compiler(*_: object) -> None:
        raise OSError("no working C++ compiler")

    use_tiny_preset(monkeypatch)
    compile_ = torch.compile
    monkeypatch.setattr(device.torch, "compile", lambda see: compile_(see, backend=no_compiler))
    assert fit.main(["--out", str(tmp_path / "run"), "--compile"]) == 2
    printed = capsys.readouterr().err
    assert "error: --compile does not work here: " in printed
    assert "no working C++ compiler; continue without it: --resume" in printed
    assert "step 1 compiled" in printed
    assert fit.main(["--out", str(tmp_path / "run"), "--resume"]) == 0
