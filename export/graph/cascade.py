"""Adaptive evaluation: all tasks see an image upright, and only those that can still win see it rotated.

These are the k tasks with the best scores, without those that are worse than the best by more than a margin: most
images leave no doubt. With T tasks, at most T + 3 k views are computed instead of 4 T. This module computes the
cascade's outputs without a graph, to choose k and the margin and to verify the graph.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from export.graph.evidence import Evidence
from export.graph.notes import counted, note
from models.config import ROTATIONS
from models.detectors.detector import mean_over_rotations
from models.network import Network
from serving.bundle.decision import NETWORK_NAMES, Outputs, Verdicts, complete, judge
from serving.bundle.sections import Cascade
from training.data.tasks import to_device
from training.learn.decisions import Decider
from training.learn.measurements import rotated_measurements

AGREEMENT = 0.999
"""The share of images whose answer must stay the same."""
WORTH_IT = 0.75
"""The largest share of all views that may remain to be computed; a cascade that saves less is not worth it."""
MARGINS = (None, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Differences of scores, which are logarithms of likelihood ratios; None: no margin."""
ENOUGH_IMAGES = 1000
"""With fewer images, even full agreement does not show that much."""


class CascadeError(Exception):
    """A requested cascade is not possible; the message has the reason."""


@dataclass(frozen=True)
class RotatedOutputs:
    """Every task's measurements of a batch in each rotation, name -> [rotations, n, columns], and what follows."""

    decider: Decider
    tasks: list[dict[str, Tensor]]

    @cached_property
    def full(self) -> Outputs:
        """The network's outputs over all rotations."""
        return self._mean(slice(None))

    @cached_property
    def upright(self) -> Outputs:
        """The network's outputs for upright images."""
        return self._mean(slice(0, 1))

    @cached_property
    def upright_scores(self) -> NDArray[Any]:
        """The tasks' scores of upright images, [images, tasks]."""
        return complete(self.upright, self.decider.rule)["scores"]

    @cached_property
    def verdicts(self) -> Verdicts:
        """The decisions of the full evaluation."""
        return judge(self.full, self.decider.rule)

    def _mean(self, rotations: slice) -> Outputs:
        chosen = [{name: values[rotations] for name, values in task.items()} for task in self.tasks]
        return self.decider.outputs([mean_over_rotations(measured) for measured in chosen])


def rotated_outputs(network: Network, decider: Decider, pixels: NDArray[np.uint8]) -> RotatedOutputs:
    """Measure uint8 images [n, height, width, channels] with every task, in each rotation."""
    images = to_device(pixels, next(network.parameters()).device)
    tasks = counted(range(len(network.heads)), f"tasks that have seen {len(pixels)} images in all rotations")
    return RotatedOutputs(decider, [rotated_measurements(network, task, images) for task in tasks])


def seen_again(outputs: RotatedOutputs, candidates: int, margin: float | None) -> NDArray[np.bool_]:
    """Which tasks see which images rotated, bool [images, tasks]."""
    scores = outputs.upright_scores
    ascending = np.sort(scores, axis=1)
    last = ascending[:, candidates - 1 : candidates]
    if margin is not None:
        last = np.minimum(last, ascending[:, :1] + margin)
    return np.asarray(scores <= last)


def cascaded(outputs: RotatedOutputs, candidates: int | None, margin: float | None = None) -> Outputs:
    """The network's outputs if only the best tasks of each upright image see it rotated."""
    if candidates is None:
        return outputs.full
    again = seen_again(outputs, candidates, margin)[:, outputs.decider.rule.task_of_class]
    return {name: np.where(again, outputs.full[name], outputs.upright[name]) for name in NETWORK_NAMES}


def agreement(outputs: RotatedOutputs, candidates: int, margin: float | None = None) -> float:
    """The share of images with the same class and the same "known" as in the full evaluation."""
    full, fast = outputs.verdicts, judge(cascaded(outputs, candidates, margin), outputs.decider.rule)
    return float(((full.class_id == fast.class_id) & (full.known == fast.known)).mean())


def choose_cascade(network: Network, decider: Decider, evidence: Evidence, wanted: str) -> Cascade:
    """The number of tasks that see an image rotated; `wanted` is on, off, or auto (on if shown to change nothing)."""
    tasks, off = len(decider.scorers), Cascade(candidates=None, agreement=None, images=0)
    reason = _impossible(network, tasks, evidence)
    if wanted == "on" and reason:
        raise CascadeError(f"--cascade on: {reason}")
    if wanted == "off" or reason or (wanted == "auto" and not _enough(tasks, evidence)):
        return off
    outputs = rotated_outputs(network, decider, evidence.pixels)
    measured = [_smallest(outputs, margin) for margin in MARGINS]
    good = [found for found in measured if (found.agreement or 0) >= AGREEMENT]
    if good:
        best = min(good, key=lambda found: found.seen or 0)
        if wanted == "on" or views(tasks, best.seen or 0) <= WORTH_IT * views(tasks, tasks):
            return best
        # It would change nothing but save little, which `seen` shows.
        return best.model_copy(update={"candidates": None, "margin": None})
    highest = max(found.agreement or 0 for found in measured)
    if wanted == "on":
        raise CascadeError(
            f"--cascade on: at most {highest:.2%} of {len(evidence)} validation images are answered as by "
            f"the full evaluation; needed {AGREEMENT:.1%}"
        )
    return Cascade(candidates=None, agreement=highest, images=len(evidence))


def views(tasks: int, seen: float) -> float:
    """The number of views per image, if this many tasks see it in all rotations and the others upright."""
    return tasks + (ROTATIONS - 1) * seen


def _impossible(network: Network, tasks: int, evidence: Evidence) -> str:
    """Why there can be no cascade, or an empty string."""
    if network.config.rotations == 1:
        return "this network sees no rotated images, so there are none to skip"
    if tasks == 1:
        return "there is only one task, so there is none to skip"
    if not len(evidence):
        return "no validation image is available to show that it changes nothing; name their folder with --data"
    return ""


def _enough(tasks: int, evidence: Evidence) -> bool:
    """Whether there are enough images of every task to show that a cascade changes nothing."""
    if len(evidence) < ENOUGH_IMAGES:
        return False
    unseen = sorted(set(range(tasks)) - set(evidence.tasks.tolist()))
    if unseen:
        tasks_without = ", ".join(map(str, unseen))
        note(f"no cascade: no validation image of task {tasks_without} is available to show that it changes nothing")
    return not unseen


def _smallest(outputs: RotatedOutputs, margin: float | None) -> Cascade:
    """The fewest candidates with the required agreement, or else all tasks but one."""
    for candidates in range(1, len(outputs.tasks)):
        again = seen_again(outputs, candidates, margin)
        seen, agreed = float(again.sum(axis=1).mean()), agreement(outputs, candidates, margin)
        found = Cascade(candidates=candidates, margin=margin, seen=seen, agreement=agreed, images=len(again))
        if agreed >= AGREEMENT:
            break
    return found
