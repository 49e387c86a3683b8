"""Learn the tasks of a quick run: statistics of encoded vectors, one checkpoint per task, no gradient step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from training.config import POOLED, RunConfig
from training.data.images import Images, Source, join
from training.data.sources import Sources
from training.host.distributed import is_main
from training.learn.pooled_state import PooledState
from training.show.console import Reporter
from training.store.checkpoint import CURRENT, Progress, load, save, writing
