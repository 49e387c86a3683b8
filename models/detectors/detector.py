"""All unknown scores of one task, and the memory of its own images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from models.detectors import SCORES, Decision
from models.detectors.mahalanobis import Mahalanobis
from models.detectors.score import Features, Means, UnknownScore

UNEVEN = 2.0
"""Classes of a task are uneven if the largest has more than this many times the images of the smallest."""


def is_uneven(counts: Sequence[int]) -> bool:
    """Whether classes with these numbers of images need to be drawn equally often and standardised one by one."""
    return max(counts) > UNEVEN * min(counts)


class Memory(nn.Module):
    """Measurements of some images, stored by name: [n, columns] each."""

    def store(self, means: Means) -> None:
        for name, values in means.items():
            self.register_buffer(name, values)

    def means(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())


class UnknownDetector(nn.Module):
    """Fitted once, on the task's training images, when the task is learned; it stores numbers and no image.

    `own` are the measurements of the task's validation images. `left_out` are those of its training images, each by
    detectors that were fitted without it; it is empty if there are enough validation images.
    """

    remembered_classes: Tensor
    """The classes of the images in memory [n]."""
    class_images: Tensor
    """The number of training images of each class [classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.scores = nn.ModuleDict({name: SCORES[name](name, classes) for name in SCORES})
        self.own = Memory()
        self.left_out = Memory()
        self.register_buffer("remembered_classes", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("class_images", torch.zeros(classes, dtype=torch.int64))

    def fit(self, features: Features, local_classes: Tensor, logits: Tensor, unchanged: Tensor | None = None) -> None:
        """Fit every score: see UnknownScore.fit. `unchanged` [n] marks images that are no changed copies of others."""
        rows = slice(None) if unchanged is None else unchanged
        plain = Features(*(depth[:, rows] for depth in features))
        self.class_images = torch.bincount(local_classes[rows], minlength=self.classes)
        for score in self:
            if score.fits_copies:
                score.fit(features, local_classes, logits)
            else:
                score.fit(plain, local_classes[rows], logits[rows])

    def measure(self, features: Features) -> dict[str, Tensor]:
        """The measurements of all scores that have one, [rotations, n, columns] each."""
        return {score.name: score.measure(features) for score in self if score.name in score.needs}

    def remember(self, own: Means, left_out: Means | None = None, local_classes: Tensor | None = None) -> None:
        """Store the measurements of the validation images, and of training images by detectors fitted without them.
        `local_classes` [n] are those of all these images; uneven classes are standardised by them."""
        self.own.store(own)
        self.left_out.store(left_out or {})
        self.remembered_classes = self.remembered_classes[:0] if local_classes is None else local_classes

    def memory(self) -> dict[str, Tensor]:
        """The measurements of all stored images, by detectors that were not fitted to them."""
        more = self.left_out.means()
        return {name: torch.cat([own, more[name]]) if name in more else own for name, own in self.own.means().items()}

    @property
    def is_uneven(self) -> bool:
        """Whether some class had many more images to learn from than another."""
        return is_uneven(self.class_images.tolist())

    @property
    def images(self) -> int:
        """The number of images whose measurements are stored."""
        return sum(len(memory.means().get("logits", ())) for memory in (self.own, self.left_out))

    def missing(self, decision: Decision) -> list[str]:
        """The scores of a decision that this task was not learned with."""
        known = self.own.means().keys()
        return [name for name in decision.scores if name not in self.scores or not known >= set(self.score(name).needs)]

    def needs(self, decision: Decision) -> list[str]:
        """The measurements that a decision reads, logits first."""
        wanted = {need for name in decision.scores for need in self.score(name).needs}
        return ["logits", *(name for name in self.scores if name in wanted)]

    def score(self, name: str) -> UnknownScore:
        score = self.scores[name]
        assert isinstance(score, UnknownScore)
        return score

    @property
    def mahalanobis(self) -> Mahalanobis:
        """The score whose standardised features are stored with quarantined images."""
        score = self.scores["mahalanobis"]
        assert isinstance(score, Mahalanobis)
        return score

    def __iter__(self) -> Iterator[UnknownScore]:
        return map(self.score, self.scores)


def mean_over_rotations(measurements: Means) -> dict[str, Tensor]:
    """[rotations, n, columns] -> [n, columns] of each measurement."""
    return {name: values.mean(dim=0) for name, values in measurements.items()}
