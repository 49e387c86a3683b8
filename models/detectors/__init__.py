"""Unknown scores, which measure how unlike a task's images an image is, and decisions, which are sums of them.

One sign throughout: a higher score means more unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.registry import Registry

SCORES = Registry(
    "score",
    {
        "max_logit": "models.detectors.logit_scores:MaxLogit",
        "max_softmax": "models.detectors.logit_scores:MaxSoftmax",
        "energy": "models.detectors.logit_scores:Energy",
        "mahalanobis": "models.detectors.mahalanobis:Mahalanobis",
        "shallow": "models.detectors.mixture:ShallowMixture",
        "deep": "models.detectors.mixture:DeepMixture",
        "relative": "models.detectors.mahalanobis:Relative",
        "vim": "models.detectors.vim:Vim",
    },
)
"""Name -> a subclass of models.detectors.score.UnknownScore. Scores are fitted in this order, and some of them draw
random numbers: new ones belong at the end."""


@dataclass(frozen=True)
class Decision:
    """The scores whose sum decides, and how they are made comparable."""

    scores: tuple[str, ...]
    standardised: bool = True
    """If not, scores of the uncalibrated logits are compared as they are: the paper's argmax."""
    corrected: bool = False
    """Whether the logits are corrected on a buffer: the paper's +c."""


def decisions() -> dict[str, Decision]:
    """All decisions by name: some sums, every score alone, and the paper's."""
    return {
        "features": Decision(("shallow", "deep")),
        "fused": Decision(("shallow", "deep", "energy")),
        "relative+energy": Decision(("relative", "energy")),
        **{name: Decision((name,)) for name in SCORES},
        # Softmax of log-sum-exps, times softmax within each task, is the softmax of all concatenated logits.
        "paper": Decision(("energy",), standardised=False),
        "paper+c": Decision(("energy",), standardised=False, corrected=True),
    }
