"""A classifier in closed form from statistics that are pooled over all tasks; numpy only.

`Statistics` add up exactly, `PooledSettings` are chosen by training, and `PooledClassifier` is what a bundle stores.
"""

from serving.bundle.pooled.classifier import PooledClassifier
from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import PooledSettings, Standardised
from serving.bundle.pooled.statistics import Statistics, StatisticsError

__all__ = ["PooledClassifier", "PooledSettings", "Projection", "Standardised", "Statistics", "StatisticsError"]
