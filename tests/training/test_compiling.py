"""Step 1 compiled: what it learns, and how often it is compiled. Graphs are traced as for a GPU, but run eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models.network import Network
from tests.helpers import FEATURES, adam, tiny_network, tiny_task
from training import device
from training.augment import Augmentation
from training.representation import learn_features

TASKS = 2


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile
    monkeypatch.setattr(device.torch, "compile", lambda see: compile_(see, backend=counter))
    yield counter
    torch.compiler.reset()


def learned(method: str, loss: str, *, compiling: bool) -> tuple[Network, list[float]]:
    torch.manual_seed(0)
    without_contrast = {"rotations": 1, "projection": 0} if loss == "ce" else {}
    network = tiny_network(method, **without_contrast)
    losses = []
    for task in range(TASKS):
        network.add_task(2)
        how = replace(FEATURES, loss=loss, epochs=2, batch_size=5)
        # The last batch of an epoch is smaller than the others.
        data = tiny_task(1, seed=task, per_class=6)
        assert len(data.train) % how.batch_size
        optimizer = adam(network.trainable(task))
        losses += learn_features(
            network, task, data, how, Augmentation(), optimizer, range(how.epochs), compiling=compiling
        )
        network.finish(task)
    return network, losses


@pytest.mark.parametrize(("method", "loss"), [("hat", "csi"), ("sup", "ce")])
def test_compiled_learns_the_same(method: str, loss: str, counter: CompileCounterWithBackend) -> None:
    plain, losses = learned(method, loss, compiling=False)
    assert counter.frame_count == 0
    compiled, again = learned(method, loss, compiling=True)
    assert again == losses
    ours = compiled.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    # Whole, without a break; once for a full batch and once for any other, however sharp the gates are.
    assert 1 * TASKS <= counter.frame_count <= 2 * TASKS
