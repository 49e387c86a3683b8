"""One preset over several seeds and methods, as a table of means and spreads: `python -m training.study`.

Every run is an ordinary run directory under --out; one that is finished is read, not learned again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.checkpoint import started
from training.config import METHODS, PRESETS
from training.fit import main as fit_main

Metrics = dict[str, Any]

MEASURES: dict[str, Callable[[Metrics], float | None]] = {
    "TIL %": lambda m: 100 * m["til_accuracy"],
    "CIL %": lambda m: 100 * m["cil_accuracy"],
    "TP %": lambda m: 100 * m["tp_accuracy"],
    "task AUROC": lambda m: m["task_auroc"],
    "unknown AUROC": lambda m: m["unknown"] and m["unknown"]["auroc"],
    "known accepted %": lambda m: m["unknown"] and 100 * m["unknown"]["accepted_known"],
    "unknown rejected %": lambda m: m["unknown"] and 100 * m["unknown"]["rejected_unknown"],
}


def table(results: dict[str, list[Metrics]]) -> str:
    """A Markdown table: a row for each method, mean and standard deviation over its seeds in each cell."""
    lines = [
        "| method | seeds | " + " | ".join(MEASURES) + " |",
        "|---|---|" + "---|" * len(MEASURES),
    ]
    for method, runs in results.items():
        seeds = ", ".join(str(run["seed"]) for run in runs)
        cells = [_cell([measure(run) for run in runs]) for measure in MEASURES.values()]
        lines.append(f"| {method.upper()}+CSI | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    digits = 3 if max(numbers) <= 1 else 1
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.{digits}f} ± {spread:.{digits}f}"


def learn(folder: Path, preset: str, method: str, seed: int, data: str | None) -> Metrics | None:
    """The metrics of one run, which is learned, resumed or just read."""
    if not (folder / "metrics.json").exists():
        fresh = ["--preset", preset, "--method", method, "--seed", str(seed)]
        arguments = ["--resume"] if started(folder) else fresh
        arguments += ["--data", data] if data else []
        if fit_main([*arguments, "--out", str(folder)]):
            return None
    return dict(json.loads((folder / "metrics.json").read_text()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.study", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    results: dict[str, list[Metrics]] = {}
    for method in chosen.methods:
        for seed in chosen.seeds:
            folder = chosen.out / f"{chosen.preset}-{method}-{seed}"
            result = learn(folder, chosen.preset, method, seed, chosen.data)
            if result is None:
                return 1
            results.setdefault(method, []).append(result)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
