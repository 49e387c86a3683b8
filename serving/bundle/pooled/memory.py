"""Stored measurements by which settings are chosen again after later tasks: sums over left-out images, no vectors.

The images of earlier tasks are no longer available when a task is learned. Measurements were taken while each image was
left out of the statistics, and are stored as one sum per candidate. The candidate with the best sum over all tasks is
chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.classifier_choice import GRID
from serving.bundle.pooled.unknown_choice import MEASURED

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class ChoiceMemory:
    """Measurements on the left-out images of all tasks so far."""

    cross_entropies: Sums = field(default_factory=lambda: np.zeros(GRID))
    """For every candidate of the classifier: nats, summed over images."""
    separations: Sums = field(default_factory=lambda: np.zeros(MEASURED))
    """For every candidate of the unknown score: how well it separates groups of classes that were left out."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file."""
        return {"cross_entropies": self.cross_entropies, "separations": self.separations}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> ChoiceMemory:
        """The memory of `to_arrays`; raises a KeyError or a ValueError if it is not complete."""
        for name, empty in cls().to_arrays().items():
            if arrays[name].shape != empty.shape:
                raise ValueError(f"memory: {name} has shape {arrays[name].shape}; allowed: {empty.shape}")
        return cls(arrays["cross_entropies"], arrays["separations"])
