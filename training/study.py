"""The paper's systems on one preset over several seeds, by every decision rule, as tables: `openworld study`.

Every run is an ordinary run directory under --out; a finished one is not learned again. Runs store images, because +c
needs some; their weights are bit for bit those of runs without. The tables also have baselines without learning, and
the same systems with all classes learned at once, as one task, which is the upper bound of continual learning.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.bundle.command_line import one_of
from training.fit import main as fit_main
from training.options import LOSSES, TP_RULES, CommandParser, add_trunk_weights_option, report_errors, run_command

Metrics = dict[str, Any]

SERVED = "served"
POOLED, PHOTOS, DIGITS = "pooled", "photos", "digits"
"""The method of statistics only, the preset that has it, and the preset without a trunk."""
NO_TRUNK = "none"
PASSED = ("trunk", "size", "tasks", "classes_per_task")
"""Options of a new run that are passed to `openworld fit`."""
OF_TASKS = ("tasks", "classes_per_task")
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


@dataclass(frozen=True)
class Studied:
    """The settings that all runs of a study share."""

    preset: str
    data: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    """Further options of a new run."""
    trunk_weights: Path | None = None

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> Studied:
        given = {name: getattr(chosen, name) for name in PASSED if getattr(chosen, name) is not None}
        preset = chosen.preset or (PHOTOS if _of_photos(chosen) else DIGITS)
        options = tuple((f"--{name.replace('_', '-')}", str(value)) for name, value in given.items())
        return cls(preset, chosen.data, options, chosen.trunk_weights)

    @property
    def has_trunk(self) -> bool:
        return dict(self.options).get("--trunk", NO_TRUNK) != NO_TRUNK or self.preset == PHOTOS

    @property
    def name(self) -> str:
        """A name that differs between runs with other options, which may be in the same folder."""
        texts = [hashlib.sha256(text.encode()).hexdigest()[:8] if name == "--tasks" else text
                 for name, text in self.options]  # fmt: skip
        return "-".join([self.preset, *(re.sub(r"[^\w.]+", "-", text) for text in texts)])

    def words(self, *, joint: bool = False) -> list[str]:
        """The options of a new run; `joint`: with all its classes as one task."""
        kept = [pair for pair in self.options if not (joint and pair[0].strip("-").replace("-", "_") in OF_TASKS)]
        tasks = ["--tasks", one_task(named)] if joint and (named := dict(self.options).get("--tasks")) else []
        tasks = list(EVERY_CLASS) if joint and not tasks else tasks
        return ["--preset", self.preset, *(word for pair in kept for word in pair), *tasks]

    @property
    def places(self) -> list[str]:
        """The options that a resumed run takes as well."""
        data = ["--data", self.data] if self.data else []
        return [*data, *(["--trunk-weights", str(self.trunk_weights)] if self.trunk_weights else [])]


def _of_photos(chosen: argparse.Namespace) -> bool:
    """Whether a study without --preset is one of photographs: by --trunk, or by the images as in `openworld fit`."""
    if chosen.trunk is not None:
        return bool(chosen.trunk != NO_TRUNK)
    from training.learn.photos import shows_photos

    return chosen.data is not None and shows_photos(Path(chosen.data))


def one_task(tasks: str) -> str:
    """The classes of `--tasks` as a single task."""
    from training.data.tasks import parse_tasks

    return ", ".join('"' + label.replace('"', '""') + '"' for task in parse_tasks(tasks) for label in task)


def learn(folder: Path, studied: Studied, method: str, loss: str, seed: int, *, joint: bool = False) -> int:
    """Learn or resume one run, unless it is finished; the exit code of `openworld fit`. `joint`: as one task."""
    from training.store.checkpoint import METRICS, started

    if (folder / METRICS).exists():
        return 0
    how = ["--quick"] if method == POOLED else ["--method", method, "--loss", loss]
    # A run with a trunk stores no images.
    how += [] if studied.has_trunk else ["--buffer"]
    fresh = [*studied.words(joint=joint), *how, "--seed", str(seed)]
    arguments = [*(["--resume"] if started(folder) else fresh), *studied.places]
    # Standard output is for the tables.
    with contextlib.redirect_stdout(sys.stderr):
        return fit_main([*arguments, "--out", str(folder)])


def evaluate_by(
    folder: Path, rules: Sequence[str], data: str | None, trunk_weights: Path | None = None
) -> dict[str, Metrics]:
    """The metrics of a finished run by each decision rule."""
    from training.data.opening import open_sources
    from training.host.device import choose_device, prepare
    from training.measure.alternative_rules import AlternativeRule
    from training.measure.evaluation import evaluate, measure
    from training.run import open_run
    from training.store.checkpoint import METRICS

    device = prepare(choose_device())
    run = open_run(folder, device)
    sources = open_sources(run.config, data, weights=trunk_weights, run=folder)
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


def baseline_metrics(studied: Studied, seed: int, folder: Path) -> dict[str, Metrics]:
    """The metrics of everything that needs no learning, by name; nothing is written to `folder`."""
    from training.fit import make_parser
    from training.learn.plan import make_plan
    from training.measure.baselines import evaluate_baselines
    from training.show.console import Reporter

    words = [*studied.words(), *studied.places, "--seed", str(seed), "--out", str(folder / "baselines")]
    # Adapters would only be forecast.
    words += ["--quick"] if studied.has_trunk else []
    reporter = Reporter()
    try:
        plan = make_plan(make_parser().parse(words), reporter)
    finally:
        reporter.end()
    return {name: found | {"stored_images": 0} for name, found in evaluate_baselines(plan.config, plan.sources)}


def make_parser() -> CommandParser:
    parser = CommandParser("openworld study", "Learn the paper's systems over several seeds and print tables of them.")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help=f"a preset of `openworld fit`; default: {DIGITS}; with --trunk, or photographs in --data: {PHOTOS}",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="default: hat sup; pooled, the default with a trunk, has no adapters; with a trunk, all methods have the "
        "served rule only",
    )
    parser.add_argument("--quick", action="store_true", help="with a trunk: the method pooled alone")
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
    add_trunk_weights_option(parser)
    passed = parser.add_argument_group("passed to `openworld fit`")
    passed.add_argument("--trunk", metavar="NAME", help="a pre-trained network, as in `openworld fit --trunk`")
    passed.add_argument("--size", type=int, metavar="N", help="side of the images in pixels")
    passed.add_argument("--tasks", metavar='"cat,dog; ship,truck"', help="the classes of each task")
    passed.add_argument("--classes-per-task", type=int, metavar="N", help="split the classes in order instead")
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
    return parser


def main(arguments: list[str] | None = None) -> int:
    chosen = make_parser().parse(arguments)
    return report_errors(lambda: _study(chosen))


def _methods(chosen: argparse.Namespace, studied: Studied) -> list[str]:
    if chosen.quick and chosen.methods not in (None, [POOLED]):
        raise ValueError(f"--quick has no adapters: got --methods {' '.join(chosen.methods)}; allowed: {POOLED}")
    return chosen.methods or ([POOLED] if chosen.quick or studied.has_trunk else ["hat", "sup"])


def _study(chosen: argparse.Namespace) -> int:
    from training.config import NO_LOSS, system_title

    results: dict[tuple[str, str], list[Metrics]] = {}
    studied = Studied.of(chosen)
    methods = _methods(chosen, studied)
    for seed in chosen.seeds:
        for name, result in baseline_metrics(studied, seed, chosen.out).items():
            results.setdefault((BASELINE, name), []).append(result)
    if chosen.baselines:
        print(table(results))
        return 0
    for loss, method, seed in itertools.product(chosen.losses, methods, chosen.seeds):
        if method == POOLED and loss != chosen.losses[0]:
            continue  # statistics have no loss
        loss = NO_LOSS if method == POOLED else loss
        rules = [SERVED] if studied.has_trunk else chosen.predictions
        system, name = system_title(method, loss), f"{studied.name}-{method}-{loss}"
        folder = chosen.out / f"{name}-{seed}"
        if code := learn(folder, studied, method, loss, seed):
            return code
        for prediction, result in evaluate_by(folder, rules, studied.data, studied.trunk_weights).items():
            results.setdefault((system, prediction), []).append(result)
        # Statistics that are pooled over all tasks are those of one task.
        if chosen.joint and method != POOLED:
            one = chosen.out / f"{name}-joint-{seed}"
            if code := learn(one, studied, method, loss, seed, joint=True):
                return code
            results.setdefault((system, JOINT), []).append(joint_metrics(one))
    print(table(results), parameter_table(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
