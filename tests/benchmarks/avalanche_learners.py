"""Strategies of Avalanche on the networks of our presets for digits, for `tests.benchmarks.alternatives`.

Only that command's environment has Avalanche (`make compare`). Every strategy is used through its public API, with the
settings that are named here: those of its paper or of Avalanche's defaults.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.training.supervised import DER, ICaRL, JointTraining, LwF, Naive, StreamingLDA
from torch import Tensor, nn

from models.backbones.convnet import max_pooled
from tests.benchmarks.alternative_data import Digits, Setting

BATCH = 32


def tasks_of(train: Digits, tasks: Sequence[Sequence[int]]) -> list[Any]:
    """Avalanche's experiences of the tasks."""
    order = [each for task in tasks for each in task]
    benchmark = nc_benchmark(
        train, train, len(tasks), task_labels=False, shuffle=False, fixed_class_order=order,
        per_exp_classes={number: len(task) for number, task in enumerate(tasks)},
    )  # fmt: skip
    return list(benchmark.train_stream)


class Halved(nn.Module):
    """2x2 max-pooling as our network does it, so that time is lost to no side."""

    def forward(self, images: Tensor) -> Tensor:
        return max_pooled(images)


def features(setting: Setting) -> nn.Sequential:
    """The convolutional network of our preset, without masks: `setting.hidden` features of an image."""
    layers: list[nn.Module] = []
    for before, after, kernel in ((1, 32, 3), (32, 64, 3), (64, 128, 2)):
        padding = kernel // 2 if setting.padded else 0
        layers += [
            nn.Conv2d(before, after, kernel, padding=padding, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            Halved(),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 2 * 2, setting.hidden), nn.ReLU())


class AvalancheLearner:
    """One strategy: it learns the tasks in turn and returns one score per class."""

    name: str
    buffered = False
    """Whether it stores images, as many as the setting allows."""
    joint = False
    """Whether it learns all tasks at once, so that it is a bound and no competitor."""

    def __init__(self, optimizer: str, epochs: int, setting: Setting) -> None:
        self.optimizer, self.epochs, self.setting = optimizer, epochs, setting
        self.body, self.head = features(setting), nn.Linear(setting.hidden, setting.classes)
        self.network = nn.Sequential(self.body, self.head)
        self.strategy = self.make()

    def make(self) -> Any:
        raise NotImplementedError

    def common(self) -> dict[str, Any]:
        """Arguments of every strategy; no evaluation or log while it learns."""
        sizes = {"train_mb_size": BATCH, "eval_mb_size": 256, "train_epochs": self.epochs}
        return {**sizes, "evaluator": None}

    def step(self, network: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(network.parameters(), lr=1e-3)
        return torch.optim.SGD(network.parameters(), lr=0.03)

    @property
    def stored(self) -> int:
        return self.setting.buffer if self.buffered else 0

    def learn(self, task: Any) -> None:
        self.strategy.train(task)

    def scores(self, images: Tensor) -> Tensor:
        """[n, classes] of images [n, 1, side, side]."""
        self.strategy.model.eval()
        with torch.no_grad():
            found: Tensor = self.strategy.model(images)
        return found

    def bytes(self) -> int:
        """Bytes that answering needs: weights in 32 bits."""
        return sum(4 * each.numel() for each in (*self.network.parameters(), *self.network.buffers()))


class FineTuning(AvalancheLearner):
    name = "fine-tuning"

    def make(self) -> Any:
        return Naive(
            model=self.network, optimizer=self.step(self.network), criterion=nn.CrossEntropyLoss(), **self.common()
        )


class Distillation(AvalancheLearner):
    """Learning without Forgetting, with Avalanche's defaults of the plugin."""

    name = "LwF"

    def make(self) -> Any:
        return LwF(
            model=self.network, optimizer=self.step(self.network), criterion=nn.CrossEntropyLoss(),
            alpha=1.0, temperature=2.0, **self.common(),
        )  # fmt: skip


class Exemplars(AvalancheLearner):
    """iCaRL: the nearest mean of stored images in feature space."""

    name = "iCaRL"
    buffered = True

    def make(self) -> Any:
        return ICaRL(
            feature_extractor=self.body, classifier=self.head, optimizer=self.step(self.network),
            memory_size=self.stored, buffer_transform=None, fixed_memory=True, **self.common(),
        )  # fmt: skip


class DarkExperience(AvalancheLearner):
    """DER++ with the weights that its paper found best for MNIST and 200 images."""

    name = "DER++"
    buffered = True

    def make(self) -> Any:
        return DER(
            model=self.network, optimizer=self.step(self.network), mem_size=self.stored, batch_size_mem=BATCH,
            alpha=0.2, beta=1.0, **self.common(),
        )  # fmt: skip


class StreamingGaussians(AvalancheLearner):
    """Deep SLDA on the features of a network that is learned with the first task and frozen then."""

    name = "SLDA"

    def make(self) -> Any:
        return None

    def learn(self, task: Any) -> None:
        if self.strategy is None:
            Naive(
                model=self.network, optimizer=self.step(self.network), criterion=nn.CrossEntropyLoss(), **self.common()
            ).train(task)
            arguments = self.common() | {"train_epochs": 1, "train_mb_size": 256}
            self.strategy = StreamingLDA(
                slda_model=copy.deepcopy(self.body), criterion=nn.CrossEntropyLoss(), input_size=self.setting.hidden,
                num_classes=self.setting.classes, **arguments,
            )  # fmt: skip
        self.strategy.train(task)

    def scores(self, images: Tensor) -> Tensor:
        found: Tensor = self.strategy.predict(super().scores(images))
        return found

    def bytes(self) -> int:
        hidden = self.setting.hidden
        return super().bytes() + 4 * (hidden * hidden + self.setting.classes * hidden)


class Joint(AvalancheLearner):
    name = "joint training (bound)"
    joint = True

    def make(self) -> Any:
        return JointTraining(
            model=self.network, optimizer=self.step(self.network), criterion=nn.CrossEntropyLoss(), **self.common()
        )


LEARNERS = (FineTuning, Distillation, Exemplars, DarkExperience, StreamingGaussians, Joint)
OPTIMIZERS = ("adam", "sgd")
