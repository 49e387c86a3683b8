"""Learn the labelled images of a quarantine and publish the result: `openworld learn-unknowns RUN --publish SHELF`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from export.__main__ import add_gate_options
from training.fit import add_quarantine_options, add_training_options, print_next_step, run_training
from training.fit import make_parser as make_fit_parser
from training.options import CommandParser, run_command

if TYPE_CHECKING:
    from training.config import RunConfig
    from training.data.quarantined import Address
    from training.learn.plan import TrainingPlan


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser = CommandParser(
        "openworld learn-unknowns",
        "Teach a finished run the labelled images of a quarantine, and publish it. Nothing is learned twice.",
    )
    parser.add_argument("run", metavar="RUN", help="a finished run")
    parser.add_argument("--publish", type=Path, metavar="SHELF", help="export the run to this shelf afterwards")
    parser.add_argument("--resume", action="store_true", help="continue where learning stopped")
    parser.add_argument(
        "--consolidate",
        action="store_true",
        help="learn an adapter of the classes that the current bundle of SHELF was taught, and keep the better form",
    )
    add_gate_options(parser)
    add_quarantine_options(parser)
    add_training_options(parser)
    chosen = parser.parse(words)
    if chosen.consolidate:
        return consolidate_taught(chosen)
    run = ["--out", chosen.run, "--resume"] if chosen.resume else ["--add-unknowns", chosen.run]
    return learn_unknowns(make_fit_parser().parse_args(run, chosen), ["openworld", "learn-unknowns", *words])


def learn_unknowns(chosen: argparse.Namespace, command: list[str]) -> int:
    """Learn, publish if asked to, and mark the images as learned; the exit code."""
    from export.exporter import EXPORT_ERRORS

    def afterwards(plan: TrainingPlan) -> None:
        if chosen.publish is None:
            print_next_step(plan)
        else:
            publish(plan, chosen.publish, force=chosen.force, max_loss=chosen.max_loss)

    return run_training(chosen, command, afterwards, OSError, *EXPORT_ERRORS)


def consolidate_taught(chosen: argparse.Namespace) -> int:
    """Consolidate what was taught, and publish it if it is better; the exit code."""
    if chosen.resume or chosen.publish is None:
        got = "--resume" if chosen.resume else "no --publish"
        print(f"error: --consolidate with {got}; allowed: --consolidate --publish SHELF", file=sys.stderr)
        return 2

    from export.consolidation import MIN_IMAGES, consolidate
    from export.exporter import EXPORT_ERRORS
    from serving.bundle.shelf import Shelf
    from serving.bundle.terminal import escaped
    from serving.teaching.errors import TeachError
    from training.data.images import DataError
    from training.data.quarantined import LEAST_IMAGES, Address
    from training.run import RunError
    from training.show.console import Reporter

    reporter = Reporter()
    try:
        place = Address(chosen.quarantine, chosen.images) if chosen.quarantine else Address.from_environment()
        if place is None:
            raise RunError("no quarantine: give its URL with --quarantine, or in OPENWORLD_QUARANTINE_URL")
        minimum = MIN_IMAGES if chosen.min_images is None else chosen.min_images
        if minimum < LEAST_IMAGES:
            raise RunError(f"--min-images is {minimum}; allowed: {LEAST_IMAGES} or more")
        shelf = Shelf(chosen.publish)
        version = consolidate(Path(chosen.run), shelf, place, minimum, chosen.trunk_weights, reporter)
    except (OSError, RunError, DataError, TeachError, *EXPORT_ERRORS) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    finally:
        reporter.end()
    kept = "what was taught is kept as it is" if version is None else f"published version {version}"
    print(kept, file=sys.stderr)
    return 0


def publish(plan: TrainingPlan, folder: Path, *, force: bool, max_loss: float | None) -> str:
    """Export the run to a shelf and mark the images of its quarantine as learned; the published version.

    The version is that of the bundle that was written: another publisher may already have moved the link `current`.
    """
    from export.__main__ import summary
    from export.exporter import export
    from serving.bundle.shelf import Shelf
    from serving.bundle.terminal import one_line

    exported = export(
        plan.folder, folder, shelf=Shelf(folder), quarantine=plan.quarantine, force=force, max_loss=max_loss
    )
    print(one_line(summary(exported)))
    version = exported.manifest.version
    if plan.quarantine is not None:
        count = mark_learned(plan.config, plan.quarantine, version)
        print(f"{count} images of the quarantine are marked as learned in version {version}", file=sys.stderr)
    return version


def mark_learned(config: RunConfig, quarantine: Address, version: str) -> int:
    """Mark the images that the published version has learned; returns how many were not marked before."""
    from training.data.quarantined import QUARANTINE

    here = [lesson for lesson in config.lessons if lesson.dataset == QUARANTINE and lesson.data == quarantine.public]
    with quarantine.opened() as store:
        return sum(store.mark_learned(lesson.items, version) for lesson in here)


if __name__ == "__main__":
    sys.exit(run_command(main))
