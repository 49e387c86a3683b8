"""Turn a run into a bundle: `openworld export RUN --out BUNDLE`, or --publish SHELF for servers to take it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from serving.bundle.command_line import one_of
from serving.bundle.terminal import escaped, one_line
from training.options import AUTO, CommandParser, add_trunk_weights_option, run_command

if TYPE_CHECKING:
    from export.exporter import Exported

CASCADES = ("auto", "on", "off")


def add_export_options(parser: CommandParser) -> None:
    parser.add_list(
        "--precision",
        precision,
        nargs="+",
        metavar="NAME",
        help="graphs to write besides fp32: int8, fp16; default: those of the bundle that the shelf serves now",
    )
    parser.add_argument(
        "--cascade",
        type=one_of(*CASCADES),
        default=AUTO,
        metavar="WHEN",
        help="evaluate only promising tasks in all rotations: on, off, or auto (default: if it changes no answers)",
    )
    parser.add_argument(
        "--decision", default=AUTO, metavar="NAME", help="another unknown score than the one that the run chose"
    )
    parser.add_argument("--data", metavar="FOLDER", help="where the images are now, if they were moved since")
    add_trunk_weights_option(parser)
    parser.add_argument(
        "--no-teaching",
        action="store_true",
        help="with a trunk: a smaller bundle, from which no server can learn classes",
    )
    add_gate_options(parser)


def add_gate_options(parser: CommandParser) -> None:
    """Options that allow an export that would be refused."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="export a run that does not work (its answers then carry a warning) or that harms earlier classes",
    )
    parser.add_argument(
        "--max-loss",
        type=points,
        metavar="POINTS",
        help="on a shelf: how many points of CIL an earlier class may lose to new ones; default: 5",
    )


def points(text: str) -> float:
    """Percentage points."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number from 0 to 100, such as 5")
    return value


def precision(text: str) -> str:
    """The name of a number format; whether it can be exported is checked later, against the table of precisions."""
    if not re.fullmatch(r"[a-z]+\d+", text) or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: the name of a precision, such as int8")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("openworld export", "Turn a run into a bundle, and verify that both give the same answers.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory written by `openworld fit`")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="BUNDLE", help="the bundle directory to write")
    where.add_argument("--publish", type=Path, metavar="SHELF", help="the folder of bundles that servers watch")
    add_export_options(parser)
    return export_chosen(parser.parse(arguments))


def export_chosen(chosen: argparse.Namespace) -> int:
    """Export to `chosen.out`, or to the shelf `chosen.publish`, and print what was written; the exit code."""
    import torch

    from export.exporter import EXPORT_ERRORS, export
    from serving.bundle.shelf import Shelf
    from training.host.device import prepare
    from training.run import RunError

    prepare(torch.device("cpu"))
    try:
        exported = export(
            chosen.run,
            chosen.publish or chosen.out,
            precisions=chosen.precision,
            cascade=chosen.cascade,
            data=chosen.data,
            decision=chosen.decision,
            trunk_weights=chosen.trunk_weights,
            shelf=Shelf(chosen.publish) if chosen.publish else None,
            force=chosen.force,
            max_loss=chosen.max_loss,
            teaching=not chosen.no_teaching,
        )
    except (RunError, *EXPORT_ERRORS) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            escaped(f"error: {error.filename or chosen.publish or chosen.out}: {error.strerror or error}"),
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("\nstopped; nothing was written", file=sys.stderr)
        return 130
    print(one_line(summary(exported)))
    return 0


def summary(exported: Exported) -> str:
    manifest = exported.manifest
    checked = manifest.verification["fp32"]
    worst = max(value for name, value in checked.items() if "difference" in name and "absolute" not in name)
    size = sum(info.size for info in manifest.files.values())
    turned = manifest.cascade.candidates
    if manifest.trunk:
        how = f"behind {manifest.trunk.name}, photos are encoded as in the run within {worst:.1g}"
    else:
        seen = "all" if turned is None else f"at most {turned}"
        how = f"{seen} tasks see all rotations, graph equals network within {worst:.1g}"
    return (
        f"{exported.path}: {manifest.name} version {manifest.version}, {len(manifest.tasks)} tasks "
        f"({sum(task.unchanged for task in manifest.tasks)} unchanged), {len(manifest.labels)} classes, "
        f"{', '.join(manifest.precisions)}, {size / 1e6:.2f} MB, decision {manifest.decision}, {how}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
