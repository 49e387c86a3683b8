"""Two processes of tests/training/host/test_distributed.py, started by torchrun's own launcher: `in_two.py FOLDER`.

They are forked from this process, so that the imports, which take longer than all that they do, are done once.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from models.network import Network
from tests.helpers import FEATURES, adam, learn_task, random_images, tiny_network, tiny_task, use_tiny_preset
from training import fit
from training.config import Augmentation
from training.data.tasks import TaskData
from training.host.distributed import main_process_first, process_group, rank
from training.learn import features as representation
from training.learn import plan
from training.learn.features import learn_features
from training.learn.head import fit_calibration, fit_detectors
from training.store.checkpoint import RunError

METHODS = ("hat", "sup")
CASES = (
    ("hat", "convnet", "csi"),
    ("hat", "resnet18", "csi"),
    ("sup", "convnet", "csi"),
    ("hat", "convnet", "ce"),
)
"""Methods, backbones and losses; all with norms."""
UNEVEN = 11
"""With 12 images per task in the tiny preset, the last batch is one image, and one of two processes gets none."""


def learn_by_cross_entropy(network: Network, data: TaskData) -> None:
    """A whole task, as training.fit learns it with --loss ce."""
    task = network.add_task(data.classes)
    how = replace(FEATURES, loss="ce")
    list(learn_features(network, task, data, how, Augmentation(), adam(network.trainable(task)), range(how.epochs)))
    network.finish(task)
    network.eval()
    fit_calibration(network, task, data.validation)
    fit_detectors(network, task, data, Augmentation())


def learned(method: str, backbone: str, kind: str) -> dict[str, Any]:
    """Two tasks on odd batches: every loss and gradient, the network, and how task 0 answers before and after."""
    gradients: list[Tensor] = []
    losses: list[Tensor] = []
    real_add, real_loss = representation.sum_gradients, representation._loss

    def add(parameters: list[nn.Parameter]) -> None:
        real_add(parameters)
        gradients.extend(p.grad.clone() for p in parameters if p.grad is not None)

    def loss(*arguments: Any) -> Tensor:
        losses.append(real_loss(*arguments))
        return losses[-1]

    network = tiny_network(method, backbone, **({} if kind == "csi" else {"rotations": 1, "projection": 0}))
    learn = learn_task if kind == "csi" else learn_by_cross_entropy
    channels = network.config.channels
    images = random_images(4, channels, seed=9)
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(representation, "sum_gradients", add)
        patch.setattr(representation, "_loss", loss)
        for task in range(2):
            torch.manual_seed(task)
            learn(network, tiny_task(channels, seed=task))
            with torch.no_grad():
                answers.append(list(network.eval().measure(images, 0).values()))
    return {
        "losses": [value.detach() for value in losses],
        "gradients": gradients,
        "network": network.state_dict(),
        "answers": answers,
    }


def whole_run(folder: Path, method: str, *more: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch, optimizer="lars", batch_size=UNEVEN)
        return fit.main(["--out", str(folder), *(more or ("--method", method))])


def in_turn(folder: Path) -> dict[str, Any]:
    """How a process waits for slow work of the first process, and how it ends if the first cannot plan its run."""
    fetched = folder / "fetched"

    def fetch() -> bool:
        was_there = fetched.exists()
        if rank() == 0:
            time.sleep(0.3)
            fetched.touch()
        return was_there

    planned: list[int] = []

    def refuse(*_: Any) -> None:
        planned.append(rank())
        raise RunError("no images")

    was_there = main_process_first(fetch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "make_plan", refuse)
        code = fit.main([])
    return {"found it there": was_there, "code": code, "planned": planned}


def in_each(folder: Path) -> int:
    with process_group():
        torch.save({case: learned(*case) for case in CASES}, folder / f"learned-{rank()}.pt")
        torch.save(in_turn(folder), folder / f"turn-{rank()}.pt")
        # The second process gets its own folders, in which no file may appear.
        for method in METHODS:
            if code := whole_run(folder / f"{method}-{rank()}", method):
                return code
        return whole_run(folder / "begun", "hat", "--resume")


def main(folder: Path) -> int:
    import torch._dynamo  # noqa: F401 - which every optimiser imports at its first step

    # As `torchrun --standalone --nproc-per-node 2` does.
    launch = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    launch.monitor_interval, launch.max_restarts = 0.1, 0
    sys.stdin.readline()  # until there is a run to resume
    return max(elastic_launch(launch, in_each)(folder).values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
