"""The images of a run, encoded by its trunk if it has one."""

from __future__ import annotations

from pathlib import Path

from models.trunks.trunk import Trunk, reopen
from training.config import RunConfig
from training.data.quarantined import Address
from training.data.sources import Sources


def open_sources(
    config: RunConfig,
    data: str | None = None,
    quarantine: Address | None = None,
    *,
    trunk: Trunk | None = None,
    weights: Path | None = None,
    run: Path | None = None,
) -> Sources:
    """The sources of a run's images; raises a TrunkError if the run's trunk is missing or has other weights.

    `trunk` is the one that is open already; else `weights` is its file, if not the published one, and `run` the folder
    of the run, which has the weights of a trunk that was learned from its images.
    """
    if config.trunk is None:
        return Sources(config, data, quarantine)
    # Most runs need neither.
    from training.data.encoder import Encoder
    from training.show.console import Reporter

    opened = trunk or reopen(config.trunk, weights=weights, run=run)
    return Sources(config, data, quarantine, Encoder(opened, reporter=Reporter()))
