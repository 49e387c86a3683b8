"""The paper's systems on one preset over several seeds, read in every way, as tables: `python -m training.study`.

Every run is an ordinary run directory under --out; one that is finished is read, not learned again. Runs keep images,
because +c needs some; what they learn is bit for bit what they would learn without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.checkpoint import METRICS, RunError, started
from training.config import LOSSES, METHODS, system_title
from training.device import choose_device, prepare
from training.evaluate import examine, measure, open_run
from training.fit import main as fit_main
from training.images import DataError
from training.prediction import TPL, Reading
from training.presets import PRESETS
from training.sources import Sources
from training.task_prediction import DEFINITIONS

Metrics = dict[str, Any]

SERVED = "served"
READINGS: dict[str, Reading | None] = {
    SERVED: None,
    **{
        reading.name: reading
        for is_corrected in (False, True)
        for reading in (
            *(Reading(tp, is_corrected) for tp in DEFINITIONS),
            Reading(is_corrected=is_corrected, with_odin=True),
        )
    },
    TPL: Reading(TPL),
}
"""The rule that is served, every definition of TP and ODIN with and without +c, and TPL."""

MEASURES: dict[str, Callable[[Metrics], float | None]] = {
    "TIL %": lambda m: 100 * m["til_accuracy"],
    "CIL %": lambda m: 100 * m["cil_accuracy"],
    "TP %": lambda m: 100 * m["tp_accuracy"],
    "task AUROC": lambda m: m["task_auroc"],
    "unknown AUROC": lambda m: m["unknown"] and m["unknown"]["auroc"],
    "known accepted %": lambda m: m["unknown"] and 100 * m["unknown"]["accepted_known"],
    "unknown rejected %": lambda m: m["unknown"] and 100 * m["unknown"]["rejected_unknown"],
}


def table(results: Mapping[tuple[str, str], Sequence[Metrics]]) -> str:
    """A Markdown table: a row for each system and prediction, mean and standard deviation over its seeds in a cell."""
    lines = ["| system | prediction | " + " | ".join(MEASURES) + " |", "|---|---|" + "---|" * len(MEASURES)]
    for (system, prediction), runs in results.items():
        cells = [_cell([measured(run) for run in runs]) for measured in MEASURES.values()]
        lines.append(f"| {system} | {prediction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parameter_table(results: Mapping[tuple[str, str], Sequence[Metrics]]) -> str:
    """A Markdown table of what each system needs to answer, of its first run; all seeds have as many."""
    lines = ["| system | parameters at inference | of each task | capacity used % |", "|---|---|---|---|"]
    firsts = {system: runs[0] for (system, _), runs in results.items()}
    for system, run in firsts.items():
        count, used = run["parameters"], "-" if run["capacity_used"] is None else f"{100 * run['capacity_used']:.1f}"
        own = sorted(set(count["per_task"]))
        lines.append(f"| {system} | {count['inference']:,} | {' to '.join(f'{n:,}' for n in own)} | {used} |")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    digits = 3 if max(numbers) <= 1 else 1
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.{digits}f} ± {spread:.{digits}f}"


def learn(folder: Path, preset: str, method: str, loss: str, seed: int, data: str | None) -> bool:
    """Learn or resume one run, unless it is finished; whether it is now."""
    if (folder / METRICS).exists():
        return True
    fresh = ["--preset", preset, "--method", method, "--loss", loss, "--seed", str(seed), "--buffer"]
    arguments = ["--resume"] if started(folder) else fresh
    arguments += ["--data", data] if data else []
    # Standard output is for the tables.
    with contextlib.redirect_stdout(sys.stderr):
        return fit_main([*arguments, "--out", str(folder)]) == 0


def read(folder: Path, readings: Sequence[str], data: str | None) -> dict[str, Metrics]:
    """The metrics of a finished run by each reading."""
    device = choose_device()
    run = open_run(folder, device)
    sources = Sources(run.config, data)
    return {
        name: dict(json.loads((folder / METRICS).read_text()))
        if name == SERVED
        else measure(examine(run, sources, device, READINGS[name]))
        for name in readings
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.study", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--predictions", nargs="+", choices=READINGS, default=list(READINGS))
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    prepare(choose_device())
    results: dict[tuple[str, str], list[Metrics]] = {}
    for loss in chosen.losses:
        for method in chosen.methods:
            for seed in chosen.seeds:
                folder = chosen.out / f"{chosen.preset}-{method}-{loss}-{seed}"
                if not learn(folder, chosen.preset, method, loss, seed, chosen.data):
                    return 1
                try:
                    found = read(folder, chosen.predictions, chosen.data)
                except (RunError, DataError) as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 2
                for name, result in found.items():
                    results.setdefault((system_title(method, loss), name), []).append(result)
    print(table(results))
    print()
    print(parameter_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
