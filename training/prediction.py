"""How an evaluation reads a run when not by the rule that is served: the paper's TP definitions, +c, ODIN and TPL."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.network import Network
from serving.decision import Outputs, Rule
from training.buffer import Buffer
from training.calibration import Correction
from training.checkpoint import RunError
from training.classifier import EVALUATION_BATCH
from training.config import RunConfig
from training.images import DataError
from training.likelihood_ratio import LikelihoodRatio, RatioSays
from training.metrics import Decision, mean_of, task_auroc
from training.odin import EPSILONS, TEMPERATURES, Odin, odin_grid, odin_logits, odin_logits_then
from training.sources import Sources
from training.task_prediction import DEFINITIONS, ODIN, TaskPredictor, fit_exponents, log_detector, with_settings
from training.tasks import task_data, to_device, to_unit

MOST_VALIDATION = 1000
"""ODIN's numbers are chosen on at most so many images."""
TPL = "tpl"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What the command line asks for."""

    tp: str = "argmax"
    is_corrected: bool = False
    taus: tuple[float, ...] = ()
    nu: float | None = None
    with_odin: bool = False
    odin: Odin | None = None
    """None: chosen on validation images."""

    def __post_init__(self) -> None:
        if self.with_odin and (self.tp != "argmax" or self.taus or self.nu is not None):
            raise ValueError("--odin has scores of its own: leave out --tp, --tau and --nu")
        if self.tp != TPL:
            with_settings(self.tp, self.taus, self.nu)
        elif self.taus or self.nu is not None or self.is_corrected:
            raise ValueError("--tp tpl has scores of its own: leave out --tau, --nu and --corrected")
        if self.odin is not None:
            self.odin.check()

    @property
    def name(self) -> str:
        return ("odin" if self.with_odin else self.tp) + ("+c" if self.is_corrected else "")


class Reader(NamedTuple):
    """What a network is asked of images, how it is decided from that, and what was chosen for it."""

    says: Callable[[NDArray[np.uint8]], Outputs]
    """uint8 images [n, height, width, channels] -> arrays [n, classes]."""
    decide: Decision
    about: dict[str, Any]


@dataclass(frozen=True)
class Held:
    """Validation images [n, height, width, channels] of all tasks that are at hand, with their classes [n]."""

    pixels: NDArray[np.uint8]
    class_ids: NDArray[np.integer[Any]]

    def some(self, most: int) -> Held:
        """At most so many, the same each time."""
        chosen = np.sort(np.random.default_rng(0).permutation(len(self.class_ids))[:most])
        return Held(self.pixels[chosen], self.class_ids[chosen])


def validation_images(config: RunConfig, sources: Sources) -> Held:
    """The images that learning held back, of every task whose images are still there."""
    pixels, class_ids, problems = [], [], []
    first = 0
    for task, labels in enumerate(config.tasks):
        try:
            held = task_data(sources.of(config.lesson_of(task)), config, task, torch.device("cpu")).validation
            pixels.append(held.pixels.permute(0, 2, 3, 1).numpy())
            class_ids.append(held.local_classes.numpy() + first)
        except DataError as error:
            problems.append(f"no validation images of {', '.join(labels)}: {error}")
        first += len(labels)
    if not pixels:
        raise DataError("; ".join(problems))
    for problem in problems:
        log.warning("%s; thresholds and choices rest on the other tasks' images", problem)
    return Held(np.ascontiguousarray(np.concatenate(pixels)), np.concatenate(class_ids))


@torch.no_grad()
def learned_logits(network: Network, pixels: NDArray[np.uint8], device: torch.device) -> dict[str, NDArray[Any]]:
    """Every task's logits as they were learned, before any calibration: the paper's concatenated f."""
    network.eval()
    parts = to_device(pixels, device).split(EVALUATION_BATCH)
    tasks = range(len(network.heads))
    columns = [torch.cat([network.logits(to_unit(part), task) for part in parts]).cpu().numpy() for task in tasks]
    return {"logits": np.concatenate(columns, axis=1)}


@dataclass(frozen=True)
class ReaderMaker:
    """Makes readers of one finished run; `corrections[i]` are those after task i."""

    config: RunConfig
    network: Network
    rule: Rule
    corrections: tuple[tuple[Correction, ...], ...]
    buffer: Buffer | None
    sources: Sources
    device: torch.device

    def make(self, reading: Reading) -> Reader:
        """The reader that was asked for, with everything chosen that was left open."""
        if reading.is_corrected and not self.corrections:
            raise RunError("this run keeps no images to correct its tasks by: learn one with --buffer")
        if reading.with_odin:
            return self._odin(reading)
        return self._likelihood_ratio() if reading.tp == TPL else self._defined(reading)

    @cached_property
    def held(self) -> Held:
        """The run's validation images."""
        return validation_images(self.config, self.sources)

    def _defined(self, reading: Reading) -> Reader:
        definition = with_settings(reading.tp, reading.taus, reading.nu)
        if len(definition.taus) > 1 and len(definition.taus) != len(self.rule.tasks):
            raise ValueError(
                f"--tau has {len(definition.taus)} numbers; allowed: 1 or {len(self.rule.tasks)}, one a task"
            )
        predictor = TaskPredictor(definition, self.corrections if reading.is_corrected else ())
        held = self.held
        outputs = learned_logits(self.network, held.pixels, self.device)
        if reading.tp == "power" and not reading.taus:
            logits, task_of_class = predictor.logits(outputs, self.rule), self.rule.task_of_class
            taus = fit_exponents(log_detector(logits, task_of_class, definition), task_of_class[held.class_ids])
            predictor = TaskPredictor(with_settings("power", taus, reading.nu), predictor.corrections)
        chosen = predictor.definition
        about: dict[str, Any] = {"prediction": reading.name, "nu": chosen.nu}
        if chosen.taus:
            about["tau"] = [chosen.temperature] if chosen.detector == "softmax" else list(chosen.taus)
        return Reader(self._learned, predictor.remembering(outputs, self.rule), about)

    def _learned(self, pixels: NDArray[np.uint8]) -> Outputs:
        return learned_logits(self.network, pixels, self.device)

    def _likelihood_ratio(self) -> Reader:
        if self.buffer is None:
            raise RunError("this run keeps no images to tell other tasks by: learn one with --buffer")
        says = RatioSays(self.network, self.buffer, self.rule.task_of_class, self.device)
        decide = LikelihoodRatio.fit(self.network).remembering(says(self.held.pixels), self.rule)
        return Reader(says, decide, {"prediction": TPL})

    def _odin(self, reading: Reading) -> Reader:
        history = [[own.scale for own in then] for then in self.corrections] if reading.is_corrected else []
        scales = history[-1] if history else []
        odin = reading.odin or self._choose_odin(scales)

        def says(pixels: NDArray[np.uint8]) -> Outputs:
            if history:
                return odin_logits_then(self.network, pixels, odin, self.device, history)
            return odin_logits(self.network, pixels, odin, self.device)

        held = odin_logits(self.network, self.held.pixels, odin, self.device, scales)
        predictor = TaskPredictor(ODIN).remembering(held, self.rule)
        about = {"prediction": reading.name, "temperature": odin.temperature, "epsilon": odin.epsilon}
        return Reader(says, predictor, about)

    def _choose_odin(self, scales: list[float]) -> Odin:
        """The temperature and the step with the best CIL accuracy on validation images; the task AUROC breaks ties."""
        held = self.held.some(MOST_VALIDATION)
        tasks = self.rule.task_of_class[held.class_ids]
        decide = TaskPredictor(ODIN)
        measured: dict[Odin, tuple[float, float]] = {}
        for temperature in TEMPERATURES:
            grid = odin_grid(self.network, held.pixels, temperature, EPSILONS, self.device, scales)
            for epsilon, logits in zip(EPSILONS, grid, strict=True):
                verdicts = decide({"logits": logits}, self.rule)
                right = float((verdicts.class_id == held.class_ids).mean())
                told_apart = mean_of(task_auroc(verdicts.task_unknown_score, tasks)) or 0.0
                measured[Odin(temperature, epsilon)] = right, told_apart
        return max(measured, key=lambda odin: measured[odin])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of an evaluation that choose how a run is read."""
    group = parser.add_argument_group("instead of the rule that is served")
    group.add_argument(
        "--tp", choices=(*sorted(DEFINITIONS), TPL), help="a definition of task prediction of the paper, or TPL's"
    )
    group.add_argument("--corrected", action="store_true", help="with the scales and shifts fitted on the buffer (+c)")
    group.add_argument(
        "--tau", type=float, nargs="+", default=[], help="of softmax (default: 5) or power (one, or one a task)"
    )
    group.add_argument("--nu", type=float, help="temperature within a task (default: 0.1 for softmax, else 1)")
    group.add_argument(
        "--odin",
        type=float,
        nargs="*",
        metavar=("TEMPERATURE", "EPSILON"),
        help="ODIN's scores; without numbers they are chosen on validation images",
    )


def reading_of(chosen: argparse.Namespace) -> Reading | None:
    """What the options ask for; None: the rule that is served."""
    if chosen.tp is None and chosen.odin is None:
        if chosen.corrected or chosen.tau or chosen.nu is not None:
            raise ValueError("--corrected, --tau and --nu belong to --tp or --odin: the rule that is served has none")
        return None
    if chosen.odin and len(chosen.odin) != 2:
        raise ValueError(f"--odin takes a temperature and an epsilon, such as 10 0.001, or nothing; got {chosen.odin}")
    return Reading(
        tp=chosen.tp or "argmax",
        is_corrected=chosen.corrected,
        taus=tuple(chosen.tau),
        nu=chosen.nu,
        with_odin=chosen.odin is not None,
        odin=Odin(*chosen.odin) if chosen.odin else None,
    )
