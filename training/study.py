"""The paper's systems on one preset over several seeds, by every decision rule, as tables: `openworld study`.

Every run is an ordinary run directory under --out; a finished one is not learned again. Runs store images, because +c
needs some; their weights are bit for bit those of runs without.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.fit import main as fit_main
from training.options import LOSSES, TP_RULES, CommandParser, one_of, report_errors, run_command

Metrics = dict[str, Any]

SERVED = "served"
POOLED, PHOTOS = "pooled", "photos"
"""The method of statistics only, and the preset that has it."""
PLAIN = (*(rule for rule in TP_RULES if rule != "tpl"), "odin")
RULES = (SERVED, *PLAIN, *(f"{rule}+c" for rule in PLAIN), "tpl")
"""The served rule, every definition of TP and ODIN with and without +c, and TPL."""

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
    """A Markdown table: one row per system and decision rule; cells are mean and standard deviation over the seeds."""
    lines = ["| system | prediction | " + " | ".join(MEASURES) + " |", "|---|---|" + "---|" * len(MEASURES)]
    for (system, prediction), runs in results.items():
        cells = [_cell([measured(run) for run in runs]) for measured in MEASURES.values()]
        lines.append(f"| {system} | {prediction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parameter_table(results: Mapping[tuple[str, str], Sequence[Metrics]]) -> str:
    """A Markdown table of the parameters that each system needs at inference, which are the same for all seeds."""
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


def learn(folder: Path, preset: str, method: str, loss: str, seed: int, data: str | None) -> int:
    """Learn or resume one run, unless it is finished; the exit code of `openworld fit`."""
    from training.store.checkpoint import METRICS, started

    if (folder / METRICS).exists():
        return 0
    how = ["--quick"] if method == POOLED else ["--method", method, "--loss", loss, "--buffer"]
    fresh = ["--preset", preset, *how, "--seed", str(seed)]
    arguments = ["--resume"] if started(folder) else fresh
    arguments += ["--data", data] if data else []
    # Standard output is for the tables.
    with contextlib.redirect_stdout(sys.stderr):
        return fit_main([*arguments, "--out", str(folder)])


def evaluate_by(folder: Path, rules: Sequence[str], data: str | None) -> dict[str, Metrics]:
    """The metrics of a finished run by each decision rule."""
    from training.data.opening import open_sources
    from training.host.device import choose_device, prepare
    from training.measure.alternative_rules import AlternativeRule
    from training.measure.evaluation import evaluate, measure
    from training.run import open_run
    from training.store.checkpoint import METRICS

    device = prepare(choose_device())
    run = open_run(folder, device)
    sources = open_sources(run.config, data)
    return {
        name: dict(json.loads((folder / METRICS).read_text()))
        if name == SERVED
        else measure(evaluate(run, sources, device, AlternativeRule.named(name)))
        for name in rules
    }


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("openworld study", "Learn the paper's systems over several seeds and print tables of them.")
    parser.add_argument("--preset", default="digits", metavar="NAME", help="a preset of `openworld fit` (%(default)s)")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="default: hat sup; pooled, the default of the preset photos, has the served rule only",
    )
    parser.add_argument("--losses", nargs="+", type=one_of(*LOSSES), default=list(LOSSES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--predictions",
        nargs="+",
        type=one_of(*RULES),
        default=list(RULES),
        metavar="RULE",
        help=f"decision rules: {', '.join(RULES)}",
    )
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), metavar="FOLDER")
    chosen = parser.parse(arguments)
    return report_errors(lambda: _study(chosen))


def _study(chosen: argparse.Namespace) -> int:
    from training.config import NO_LOSS, system_title

    results: dict[tuple[str, str], list[Metrics]] = {}
    methods = chosen.methods or ([POOLED] if chosen.preset == PHOTOS else ["hat", "sup"])
    for loss, method, seed in itertools.product(chosen.losses, methods, chosen.seeds):
        if method == POOLED and loss != chosen.losses[0]:
            continue  # statistics have no loss
        loss = NO_LOSS if method == POOLED else loss
        rules = [SERVED] if method == POOLED else chosen.predictions
        folder = chosen.out / f"{chosen.preset}-{method}-{loss}-{seed}"
        if code := learn(folder, chosen.preset, method, loss, seed, chosen.data):
            return code
        for name, result in evaluate_by(folder, rules, chosen.data).items():
            results.setdefault((system_title(method, loss), name), []).append(result)
    print(table(results), parameter_table(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
