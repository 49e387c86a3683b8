"""The paper's systems on one preset over several seeds, by every decision rule, as tables: `openworld study`.

Every run is an ordinary run directory under --out; a finished one is not learned again. Runs store images, because +c
needs some; their weights are bit for bit those of runs without. Beside the systems stand what needs no learning, and
the same systems with all classes learned at once, as one task: what continual learning could reach at best.
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

from serving.bundle.command_line import one_of
from training.fit import main as fit_main
from training.options import LOSSES, TP_RULES, CommandParser, report_errors, run_command

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
    "TP %": lambda m: None if m["tp_accuracy"] is None else 100 * m["tp_accuracy"],
    "task AUROC": lambda m: m["task_auroc"],
    "unknown AUROC": lambda m: m["unknown"] and m["unknown"]["auroc"],
    "known accepted %": lambda m: 100 * m["accepted_known"],
    "unknown rejected %": lambda m: m["unknown"] and 100 * m["unknown"]["rejected_unknown"],
    "stored images": lambda m: m["stored_images"],
    "seconds": lambda m: m["wall_seconds"],
}
WHOLE = "stored images"
"""The measure that is a whole number, the same for all seeds."""
BASELINE, JOINT = "no learning", "joint: all classes as one task"
"""The system of the baselines, and the prediction of a run that learned all classes at once."""
EVERY_CLASS = ("--classes-per-task", "1000000")
"""More classes than any data set has: one task of all of them."""


def table(results: Mapping[tuple[str, str], Sequence[Metrics]]) -> str:
    """A Markdown table: one row per system and decision rule; cells are mean and standard deviation over the seeds."""
    lines = ["| system | prediction | " + " | ".join(MEASURES) + " |", "|---|---|" + "---|" * len(MEASURES)]
    for (system, prediction), runs in results.items():
        cells = [
            f"{runs[0]['stored_images']}" if name == WHOLE else _cell([measured(run) for run in runs])
            for name, measured in MEASURES.items()
        ]
        lines.append(f"| {system} | {prediction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parameter_table(results: Mapping[tuple[str, str], Sequence[Metrics]]) -> str:
    """A Markdown table of the parameters that each system needs at inference, which are the same for all seeds."""
    lines = ["| system | parameters at inference | of each task | capacity used % |", "|---|---|---|---|"]
    firsts = {system: runs[0] for (system, name), runs in results.items() if system != BASELINE and name != JOINT}
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


def learn(
    folder: Path, preset: str, method: str, loss: str, seed: int, data: str | None, more: Sequence[str] = ()
) -> int:
    """Learn or resume one run, unless it is finished; the exit code of `openworld fit`. `more` are options of a new
    run."""
    from training.store.checkpoint import METRICS, started

    if (folder / METRICS).exists():
        return 0
    how = ["--quick"] if method == POOLED else ["--method", method, "--loss", loss]
    # A run with a trunk stores no images.
    how += [] if preset == PHOTOS else ["--buffer"]
    fresh = ["--preset", preset, *how, "--seed", str(seed), *more]
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
    sources = open_sources(run.config, data, run=folder)
    found = {}
    for name in rules:
        if name == SERVED:
            found[name] = dict(json.loads((folder / METRICS).read_text()))
        else:
            found[name] = measure(evaluate(run, sources, device, AlternativeRule.named(name)))
        found[name]["stored_images"] = run.config.buffer if name.endswith("+c") or name == "tpl" else 0
    return found


def joint_metrics(folder: Path) -> Metrics:
    """The metrics of a finished run with one task, where there is no other task to confuse it with."""
    from training.store.checkpoint import METRICS

    return dict(json.loads((folder / METRICS).read_text())) | {"tp_accuracy": None, "stored_images": 0}


def baseline_metrics(preset: str, method: str, seed: int, data: str | None, folder: Path) -> dict[str, Metrics]:
    """The metrics of everything that needs no learning, by name; nothing is written to `folder`."""
    from training.fit import make_parser
    from training.learn.plan import make_plan
    from training.measure.baselines import evaluate_baselines

    words = ["--preset", preset, "--seed", str(seed), "--out", str(folder / "baselines")]
    words += ["--quick"] if method == POOLED else []
    plan = make_plan(make_parser().parse([*words, *(["--data", data] if data else [])]))
    return {name: found | {"stored_images": 0} for name, found in evaluate_baselines(plan.config, plan.sources)}


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("openworld study", "Learn the paper's systems over several seeds and print tables of them.")
    parser.add_argument("--preset", default="digits", metavar="NAME", help="a preset of `openworld fit` (%(default)s)")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="default: hat sup; pooled, the default of the preset photos, has no adapters; with that preset, all "
        "methods have the served rule only",
    )
    parser.add_argument(
        "--losses", nargs="+", type=one_of(*LOSSES), default=list(LOSSES), metavar="NAME", help="default: csi ce"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="default: 0 1 2")
    parser.add_argument(
        "--predictions",
        nargs="+",
        type=one_of(*RULES),
        default=list(RULES),
        metavar="RULE",
        help=f"decision rules: {', '.join(RULES)}",
    )
    parser.add_argument("--data", metavar="FOLDER", help="one folder of images per class, or where a data set is")
    parser.add_argument(
        "--baselines", action="store_true", help="only what needs no learning, which takes seconds; nothing is written"
    )
    parser.add_argument(
        "--joint",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also learn all classes at once, as one task, with each system: the upper bound (default: yes)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study"), metavar="FOLDER", help="default: runs/study")
    chosen = parser.parse(arguments)
    return report_errors(lambda: _study(chosen))


def _study(chosen: argparse.Namespace) -> int:
    from training.config import NO_LOSS, system_title

    results: dict[tuple[str, str], list[Metrics]] = {}
    methods = chosen.methods or ([POOLED] if chosen.preset == PHOTOS else ["hat", "sup"])
    for seed in chosen.seeds:
        for name, result in baseline_metrics(chosen.preset, methods[0], seed, chosen.data, chosen.out).items():
            results.setdefault((BASELINE, name), []).append(result)
    if chosen.baselines:
        print(table(results))
        return 0
    for loss, method, seed in itertools.product(chosen.losses, methods, chosen.seeds):
        if method == POOLED and loss != chosen.losses[0]:
            continue  # statistics have no loss
        loss = NO_LOSS if method == POOLED else loss
        rules = [SERVED] if chosen.preset == PHOTOS else chosen.predictions
        system, name = system_title(method, loss), f"{chosen.preset}-{method}-{loss}"
        if code := learn(chosen.out / f"{name}-{seed}", chosen.preset, method, loss, seed, chosen.data):
            return code
        for prediction, result in evaluate_by(chosen.out / f"{name}-{seed}", rules, chosen.data).items():
            results.setdefault((system, prediction), []).append(result)
        # Statistics that are pooled over all tasks are those of one task.
        if chosen.joint and method != POOLED:
            joint = chosen.out / f"{name}-joint-{seed}"
            if code := learn(joint, chosen.preset, method, loss, seed, chosen.data, EVERY_CLASS):
                return code
            results.setdefault((system, JOINT), []).append(joint_metrics(joint))
    print(table(results), parameter_table(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
