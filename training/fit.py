"""Learn tasks one after another: `openworld fit`, or `python -m training.fit`."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.backbones import BACKBONES
from models.masks import MECHANISMS
from models.trunks import DEFAULT_TRUNK, TRUNKS
from serving.bundle.command_line import one_of
from serving.bundle.terminal import escaped, log_to_terminal, one_line
from training.options import (
    DEFAULT_RUN,
    LOSSES,
    CommandParser,
    OptionGroup,
    add_trunk_weights_option,
    named_value,
    run_command,
)

if TYPE_CHECKING:
    from training.learn.plan import TrainingPlan
    from training.run import Run


def make_parser() -> CommandParser:
    parser = CommandParser("openworld fit", "Learn tasks one after another, without forgetting the earlier ones.")
    parser.add_argument("--out", type=Path, metavar="RUN", help=f"default: {DEFAULT_RUN}")
    parser.add_argument("--seed", type=int, help="default: 0")
    _add_data_options(parser.add_argument_group("images and tasks"))
    _add_network_options(parser.add_argument_group("network and method"))
    add_training_options(parser)
    later = parser.add_argument_group("continue a run")
    later.add_argument("--resume", action="store_true", help="continue the run in --out where it stopped")
    later.add_argument("--add-task", metavar='"bus,tram"', help="teach the finished run in --out new classes")
    later.add_argument(
        "--add-unknowns", type=Path, metavar="RUN", help="teach a finished run the labelled images of a quarantine"
    )
    add_quarantine_options(parser.add_argument_group("with --add-unknowns, and to resume it"))
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--consolidate", nargs=0, action=_OfLearnUnknowns, help=argparse.SUPPRESS)
    return parser


class _OfLearnUnknowns(argparse.Action):
    """An option that only `openworld learn-unknowns` has: the error names that command, and learns nothing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        command = "openworld learn-unknowns RUN --consolidate --publish SHELF"
        parser.error(f"no such option: got {self.option_strings[0]}; did you mean: {command}")


def _add_data_options(group: OptionGroup) -> None:
    group.add_argument(
        "--preset",
        metavar="NAME",
        help="digits (default); photos (default with --data: your own photographs, with a pre-trained trunk); images "
        "(your own, learned from scratch); or a benchmark: mnist-5t, cifar10-5t, cifar100-10t, cifar100-20t, "
        "tinyimagenet-5t, tinyimagenet-10t, each also with -cpu for a machine without GPU",
    )
    group.add_argument("--data", metavar="FOLDER", help="one folder of images per class, or where a data set is")
    group.add_argument(
        "--tasks", metavar='"cat,dog; ship,truck"', help='the classes of each task; "a, b" in quotes is one class'
    )
    group.add_argument("--classes-per-task", type=int, metavar="N", help="split the classes in order instead")
    group.add_argument("--size", type=int, metavar="N", help="side of the images in pixels; default: the preset's")
    group.add_argument(
        "--buffer",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
        help="store N training images for the correction +c; default: none; without N: the preset's number",
    )


def _add_network_options(group: OptionGroup) -> None:
    group.add_argument(
        "--trunk",
        metavar="NAME",
        help=f"the pre-trained network for photographs: {', '.join(TRUNKS)}; default: {DEFAULT_TRUNK}; or none, to "
        "learn from scratch",
    )
    group.add_argument(
        "--trunk-option",
        action="append",
        type=named_value,
        metavar="NAME=VALUE",
        help="for onnx:FILE: mean, std, output, layout, pool; for patches: count, side (docs/howto/own-images.md)",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        default=None,
        help="statistics of a trunk's vectors in closed form, without learning adapters on them",
    )
    group.add_argument(
        "--method", metavar="NAME", help=f"how tasks are kept apart: {', '.join(MECHANISMS)}; default: hat"
    )
    group.add_argument(
        "--backbone", metavar="NAME", help=f"the network's layers: {', '.join(BACKBONES)}; default: the preset's"
    )
    group.add_argument(
        "--loss",
        type=one_of(*LOSSES),
        metavar="NAME",
        help="csi (default): contrastive features, then a head; ce: cross-entropy",
    )
    group.add_argument("--width", type=int, metavar="N", help="first channels of the network; default: the preset's")
    group.add_argument("--epochs", type=int, metavar="N", help="epochs of feature learning; default: the preset's")
    group.add_argument("--batch-size", type=int, metavar="N", help="images per training step; default: the preset's")


def add_training_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--log",
        action="append",
        type=one_of("mlflow", "tensorboard", "wandb"),
        metavar="NAME",
        default=[],
        help="also write losses and metrics for tensorboard, mlflow or wandb, in RUN",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile step 1 with torch.compile, which takes minutes per task"
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="encode the images with the trunk on the Ray cluster of RAY_ADDRESS, or on a local one",
    )
    add_trunk_weights_option(parser)


def add_quarantine_options(parser: OptionGroup) -> None:
    parser.add_argument("--quarantine", metavar="URL", help="default: OPENWORLD_QUARANTINE_URL")
    parser.add_argument("--images", metavar="PLACE", help="where its image files are, if not next to the database")
    parser.add_argument("--min-images", type=int, metavar="N", help="images that a class needs; default: 20")


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    chosen = make_parser().parse(words)
    if chosen.publish is not None:
        return _refuse_publish(chosen)
    return run_training(chosen, ["openworld", "fit", *words], print_next_step)


def add_task(arguments: list[str] | None = None) -> int:
    """`openworld add-task RUN CLASSES`: the same as `openworld fit --out RUN --add-task CLASSES`."""
    parser = CommandParser("openworld add-task", "Teach a finished run new classes, without any old image.")
    parser.add_argument("run", metavar="RUN", help="a finished run")
    parser.add_argument("classes", metavar='"cow,pig"', help='the new classes; "cow,pig; hen" are two tasks')
    parser.add_argument("--data", metavar="FOLDER", help="their images; default: where those of the run came from")
    add_training_options(parser)
    chosen = parser.parse(arguments)
    words = ["--out", chosen.run, "--add-task", chosen.classes, *(["--data", chosen.data] if chosen.data else [])]
    words += [word for name in chosen.log for word in ("--log", name)]
    words += ["--trunk-weights", str(chosen.trunk_weights)] if chosen.trunk_weights else []
    words += ["--ray"] if chosen.ray else []
    return main([*words, *(["--compile"] if chosen.compile else [])])


def fit(out: str | os.PathLike[str], *, quiet: bool = False, **options: Any) -> Run:
    """Learn a run for a program, and open it: `fit("runs/mine", data="photos", classes_per_task=2, quick=True)`.

    The options are those of `openworld fit`, with underscores. `tasks` and `add_task` may be lists of lists of labels,
    `trunk_option` a mapping, `log` a list. Raises a RunError, a DataError, a TrunkError or a ValueError.
    """
    from training.learn.fitting import fit_plan
    from training.learn.plan import make_plan
    from training.run import Run
    from training.show.console import Reporter

    words = ["--out", os.fspath(out), *(word for name, value in options.items() for word in _as_words(name, value))]
    parser = make_parser()
    parser.raises = True
    chosen = parser.parse(words)
    reporter = Reporter()
    reporter.console.quiet = quiet
    try:
        plan = make_plan(chosen, reporter)
        fit_plan(plan, reporter, ["openworld", "fit", *words], chosen.log, compiling=chosen.compile)
    finally:
        reporter.end()
    return Run.open(plan.folder)


def _as_words(name: str, value: Any) -> Iterator[str]:
    """An option of a function as words of a command line; none for None and False."""
    option = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return
    if value is True:
        yield option
        return
    if name in ("tasks", "add_task") and not isinstance(value, str):
        value = "; ".join(", ".join(f'"{label}"' for label in _doubled_quotes(task)) for task in value)
    elif isinstance(value, Mapping):
        value = [f"{key}={each}" for key, each in value.items()]
    for each in [value] if isinstance(value, str) or not isinstance(value, Sequence) else value:
        yield from (option, str(each))


def _doubled_quotes(labels: Sequence[str]) -> Iterator[str]:
    return (str(label).replace('"', '""') for label in labels)


def run_training(
    chosen: argparse.Namespace, command: list[str], afterwards: Callable[[TrainingPlan], None], *also: type[Exception]
) -> int:
    """Learn in all processes that torchrun started, then call `afterwards` in the main one; the exit code.

    `command` goes into the history of the run; `also` are the user errors of `afterwards`.
    """
    from models.trunks.trunk import TrunkError
    from training.data.images import DataError
    from training.host.distributed import is_main, main_process_first, process_group
    from training.learn.fitting import fit_plan
    from training.learn.plan import how_to_continue, make_plan
    from training.run import RunError
    from training.show.console import CLOCK_TIME, Reporter

    reporter, plan = Reporter(), None
    log_to_terminal(clock=None if reporter.console.is_terminal else CLOCK_TIME)
    user_errors: tuple[type[Exception], ...] = (RunError, DataError, TrunkError, ValueError, *also)
    try:
        with process_group():
            if not is_main():
                reporter.console.quiet = True
                logging.getLogger().setLevel(logging.ERROR)
            plan = main_process_first(lambda: make_plan(chosen, reporter))
            fit_plan(plan, reporter, command, chosen.log, compiling=chosen.compile)
            reporter.end()
            if is_main():
                afterwards(plan)
    except user_errors as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped; {one_line(how_to_continue(plan, chosen))}", file=sys.stderr)
        return 130
    finally:
        reporter.end()
    return 0


def print_next_step(plan: TrainingPlan) -> None:
    folder = str(plan.folder)
    if plan.quarantine is None:
        command = ["openworld", "export", folder, "--out", str(plan.folder / "bundle")]
    else:
        command = ["openworld", "learn-unknowns", folder, "--quarantine", plan.quarantine.public, "--publish", "SHELF"]
    print(one_line(f"run: {folder}    next: {shlex.join(command)}"), file=sys.stderr)


def _refuse_publish(chosen: argparse.Namespace) -> int:
    from training.store.history import without_secrets

    run = chosen.add_unknowns or chosen.out or DEFAULT_RUN
    words = ["openworld", "learn-unknowns", str(run), "--publish", str(chosen.publish)]
    for name in ("quarantine", "images", "min_images"):
        if (value := getattr(chosen, name)) is not None:
            words += [f"--{name.replace('_', '-')}", without_secrets(str(value))]
    words += ["--resume"] if chosen.resume else []
    message = f"error: training does not publish; learn and publish with: {shlex.join(words)}"
    print(one_line(message), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(run_command(main))
