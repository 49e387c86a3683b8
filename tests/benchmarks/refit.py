"""Fit the detectors of a finished run again to its networks, and choose its decision again, in a copy of the run:
`python -m tests.benchmarks.refit RUN NEW`; with `--strength 0`, detectors are fitted without changed copies of images.

Learning a network does not depend on detectors and decisions. With the code that learned the run, the copy has the same
tensors; after a change of the detectors, it has those that learning again would give, in a fraction of the time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from models.detectors.detector import UnknownDetector
from tests.benchmarks.digit_settings import SETTINGS, setting_known
from training.data.sources import Sources
from training.data.tasks import task_data
from training.host.seeds import seed_everything
from training.learn.decisions import Nats, added, choose, cross_entropies
from training.learn.head import STRENGTHS, fit_calibration, fit_detectors
from training.measure.evaluation import evaluate, measure
from training.run import RunError, open_run
from training.show.console import print_summary
from training.store.checkpoint import CURRENT, FORMAT, METRICS, PREVIOUS, load, save, write_json

CPU = torch.device("cpu")


def refit(folder: Path, data: str | None = None, strengths: Sequence[float] = STRENGTHS) -> None:
    """Replace the detectors, the decision and the metrics of a run."""
    run, state = open_run(folder, CPU), load(folder)
    network, nats = run.need_network("refitting detectors"), Nats()
    sources, tasks = Sources(run.config, data), range(len(run.config.tasks))
    network.eval()
    fresh = [UnknownDetector(len(labels)) for labels in run.config.tasks]
    later = {"heads": list(network.heads), "detectors": fresh, "ranges": list(network.ranges)}
    for task in tasks:
        # Each task is fitted as if no later one had been learned.
        for name, modules in later.items():
            setattr(network, name, torch.nn.ModuleList(modules[: task + 1]))
        images = task_data(sources.of(run.config.lesson_of(task)), run.config, task, CPU)
        fit_calibration(network, task, images.validation)
        seed_everything(run.config.seed, task, "detectors")
        preset = run.config.preset
        fit_detectors(network, task, images, preset.augmentation, preset.alpha, strengths)
        nats = added(nats, cross_entropies(network, images.validation, preset.alpha))
        print(f"task {task}: {json.dumps({name: round(value, 1) for name, value in nats.items()})}", flush=True)
    decision = choose(nats) if len(tasks) > 1 else choose({})
    save(folder, network, None, replace(state.progress, nats=nats, decision=decision), state.buffer())
    result = measure(evaluate(open_run(folder, CPU), sources, CPU))
    write_json(folder / METRICS, result)
    print_summary(result)


def as_current_format(folder: Path) -> None:
    """Mark the checkpoint as one of this version: only its networks are used, which are the same in formats 4 to 6."""
    (folder / PREVIOUS).unlink(missing_ok=True)
    with safe_open(folder / CURRENT, framework="pt") as stored:
        metadata, names = stored.metadata() or {}, list(stored.keys())
        tensors = {name: stored.get_tensor(name) for name in names}
    if metadata.get("format") in ("4", "5"):
        save_file(tensors, folder / CURRENT, metadata=metadata | {"format": str(FORMAT)})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.refit", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--data", help="where the images are now, if they have moved")
    parser.add_argument("--strength", type=float, nargs="+", default=STRENGTHS, metavar="S", help="of the copies")
    parser.add_argument("--setting", choices=SETTINGS, default="default", help="of `tests.benchmarks.digit_settings`")
    chosen = parser.parse_args()
    shutil.copytree(chosen.run, chosen.new)
    as_current_format(chosen.new)
    try:
        with setting_known(chosen.setting):
            refit(chosen.new, chosen.data, chosen.strength)
    except RunError as error:
        shutil.rmtree(chosen.new)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
