"""A classifier in closed form from statistics that are pooled over all tasks; numpy only.

`Statistics` add up exactly, `learn_task` adds a task and chooses `PooledSettings` on folds of its images, and
`PooledClassifier` and one `Detector` per task are what a bundle stores. Nothing here needs torch: a server can learn a
task as training does.
"""

from serving.bundle.pooled.classifier import PooledClassifier
from serving.bundle.pooled.detector import Detector
from serving.bundle.pooled.learning import EarlierTask, LearnedTask, learn_task, projection_for
from serving.bundle.pooled.memory import ChoiceMemory
from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import PooledSettings, Standardised
from serving.bundle.pooled.statistics import Statistics, StatisticsError

__all__ = [
    "ChoiceMemory",
    "Detector",
    "EarlierTask",
    "LearnedTask",
    "PooledClassifier",
    "PooledSettings",
    "Projection",
    "Standardised",
    "Statistics",
    "StatisticsError",
    "learn_task",
    "projection_for",
]
