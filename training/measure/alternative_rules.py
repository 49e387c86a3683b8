"""Decision rules other than the served one, to compare with: the paper's definitions of TP, +c, ODIN and TPL."""

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
from serving.bundle.decision import Outputs
from training.config import RunConfig
from training.data.images import DataError
from training.data.sources import Sources
from training.data.tasks import task_data, to_device, to_unit
from training.learn.measurements import EVALUATION_BATCH
from training.measure.metrics import DecisionFunction, mean_of, task_auroc
from training.measure.odin import EPSILONS, TEMPERATURES, Odin, odin_grid, odin_logits, odin_logits_then
from training.measure.task_prediction import ODIN, TaskPredictor, fit_exponents, log_detector, with_settings
from training.measure.tpl import LikelihoodRatio, LikelihoodRatioOutputs
from training.run import Run, RunError

MOST_VALIDATION = 1000
"""The maximum number of images that ODIN's settings are chosen on."""
TPL = "tpl"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlternativeRule:
    """The settings of a rule, as the command line gives them."""

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

    @classmethod
    def named(cls, name: str) -> AlternativeRule:
        """The rule with this `name` and default settings, such as "softmax+c"."""
        tp, _, corrected = name.partition("+")
        if tp == "odin":
            return cls(is_corrected=bool(corrected), with_odin=True)
        return cls(tp, bool(corrected))

    @property
    def name(self) -> str:
        return ("odin" if self.with_odin else self.tp) + ("+c" if self.is_corrected else "")


class FittedRule(NamedTuple):
    """A rule that is ready to decide."""

    outputs: Callable[[NDArray[np.uint8]], Outputs]
    """uint8 images [n, height, width, channels] -> the network's outputs that the rule needs, arrays [n, classes]."""
    decide: DecisionFunction
    settings: dict[str, Any]
    """Its name and the numbers that were chosen for it, for RUN/metrics.json."""


class ValidationImages(NamedTuple):
    """The available validation images [n, height, width, channels] of all tasks, with their classes [n]."""

    pixels: NDArray[np.uint8]
    class_ids: NDArray[np.integer[Any]]


def validation_images(config: RunConfig, sources: Sources) -> ValidationImages:
    """The images that were held back from learning, of every task whose images are still there."""
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
        log.warning("%s; thresholds and settings are chosen on the images of the other tasks", problem)
    return ValidationImages(np.ascontiguousarray(np.concatenate(pixels)), np.concatenate(class_ids))


@torch.no_grad()
def learned_logits(network: Network, pixels: NDArray[np.uint8], device: torch.device) -> dict[str, NDArray[Any]]:
    """The uncalibrated logits of every task side by side: the paper's concatenated f."""
    network.eval()
    parts = to_device(pixels, device).split(EVALUATION_BATCH)
    tasks = range(len(network.heads))
    columns = [torch.cat([network.logits(to_unit(part), task) for part in parts]).cpu().numpy() for task in tasks]
    return {"logits": np.concatenate(columns, axis=1)}


@dataclass(frozen=True)
class RuleFitter:
    """Fits rules to one finished run."""

    run: Run
    sources: Sources
    device: torch.device

    def fit(self, rule: AlternativeRule) -> FittedRule:
        """Choose every setting that was left open, on validation images."""
        self.run.need_network(f"decision rule {rule.name}")
        if rule.is_corrected and not self.run.correction_history:
            raise RunError("this run stores no images for the correction +c: learn one with --buffer")
        if rule.with_odin:
            return self._odin(rule)
        return self._tpl() if rule.tp == TPL else self._defined(rule)

    @property
    def _network(self) -> Network:
        return self.run.need_network("this decision rule")

    @cached_property
    def validation(self) -> ValidationImages:
        return validation_images(self.run.config, self.sources)

    def _logits(self, pixels: NDArray[np.uint8]) -> Outputs:
        return learned_logits(self._network, pixels, self.device)

    def _defined(self, rule: AlternativeRule) -> FittedRule:
        """One of the paper's definitions of TP."""
        served = self.run.rule
        definition = with_settings(rule.tp, rule.taus, rule.nu)
        if len(definition.taus) > 1 and len(definition.taus) != len(served.tasks):
            raise ValueError(
                f"--tau has {len(definition.taus)} numbers; allowed: 1 or {len(served.tasks)}, one per task"
            )
        predictor = TaskPredictor(definition, self.run.correction_history if rule.is_corrected else ())
        outputs = self._logits(self.validation.pixels)
        if rule.tp == "power" and not rule.taus:
            logits, task_of_class = predictor.logits(outputs, served), served.task_of_class
            tasks = task_of_class[self.validation.class_ids]
            taus = fit_exponents(log_detector(logits, task_of_class, definition), tasks)
            predictor = TaskPredictor(with_settings("power", taus, rule.nu), predictor.corrections)
        fitted = predictor.definition
        settings: dict[str, Any] = {"prediction": rule.name, "nu": fitted.nu}
        if fitted.taus:
            settings["tau"] = [fitted.temperature] if fitted.detector == "softmax" else list(fitted.taus)
        return FittedRule(self._logits, predictor.with_memory(outputs, served), settings)

    def _tpl(self) -> FittedRule:
        run = self.run
        if run.buffer is None:
            raise RunError("this run stores no images of other tasks, which TPL needs: learn one with --buffer")
        outputs = LikelihoodRatioOutputs(self._network, run.buffer, run.rule.task_of_class, self.device)
        decide = LikelihoodRatio.fit(self._network).with_memory(outputs(self.validation.pixels), run.rule)
        return FittedRule(outputs, decide, {"prediction": TPL})

    def _odin(self, rule: AlternativeRule) -> FittedRule:
        run, network = self.run, self._network
        history = [[own.scale for own in then] for then in run.correction_history] if rule.is_corrected else []
        scales = history[-1] if history else []
        odin = rule.odin or self._choose_odin(scales)

        def outputs(pixels: NDArray[np.uint8]) -> Outputs:
            if history:
                return odin_logits_then(network, pixels, odin, self.device, history)
            return odin_logits(network, pixels, odin, self.device)

        on_validation = odin_logits(network, self.validation.pixels, odin, self.device, scales)
        predictor = TaskPredictor(ODIN).with_memory(on_validation, run.rule)
        settings = {"prediction": rule.name, "temperature": odin.temperature, "epsilon": odin.epsilon}
        return FittedRule(outputs, predictor, settings)

    def _choose_odin(self, scales: list[float]) -> Odin:
        """The temperature and the step with the best CIL accuracy on validation images; the task AUROC breaks ties."""
        rule, images = self.run.rule, self.validation
        chosen = np.sort(np.random.default_rng(0).permutation(len(images.class_ids))[:MOST_VALIDATION])
        pixels, class_ids = images.pixels[chosen], images.class_ids[chosen]
        tasks = rule.task_of_class[class_ids]
        decide = TaskPredictor(ODIN)
        measured: dict[Odin, tuple[float, float]] = {}
        for temperature in TEMPERATURES:
            grid = odin_grid(self._network, pixels, temperature, EPSILONS, self.device, scales)
            for epsilon, logits in zip(EPSILONS, grid, strict=True):
                verdicts = decide({"logits": logits}, rule)
                accuracy = float((verdicts.class_id == class_ids).mean())
                auroc = mean_of(task_auroc(verdicts.task_unknown_score, tasks)) or 0.0
                measured[Odin(temperature, epsilon)] = accuracy, auroc
        return max(measured, key=lambda odin: measured[odin])


def chosen_rule(chosen: argparse.Namespace) -> AlternativeRule | None:
    """The rule that the options of `training.options.add_rule_options` ask for; None: the served one."""
    if chosen.tp is None and chosen.odin is None:
        if chosen.corrected or chosen.tau or chosen.nu is not None:
            raise ValueError("--corrected, --tau and --nu belong to --tp or --odin: the served rule has none of them")
        return None
    if chosen.odin and len(chosen.odin) != 2:
        raise ValueError(f"--odin takes a temperature and an epsilon, such as 10 0.001, or nothing; got {chosen.odin}")
    return AlternativeRule(
        tp=chosen.tp or "argmax",
        is_corrected=chosen.corrected,
        taus=tuple(chosen.tau),
        nu=chosen.nu,
        with_odin=chosen.odin is not None,
        odin=Odin(*chosen.odin) if chosen.odin else None,
    )
