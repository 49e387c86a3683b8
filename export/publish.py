"""Export a run to a shelf, from which servers take it: `openworld publish RUN SHELF`."""

import sys
from pathlib import Path

from export.__main__ import add_export_options, export_chosen
from training.options import CommandParser, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(
        "openworld publish", "Export a run to a shelf that servers watch, unless it forgot anything that is served now."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory written by `openworld fit`")
    parser.add_argument("publish", type=Path, metavar="SHELF", help="the folder of bundles that servers watch")
    add_export_options(parser)
    return export_chosen(parser.parse(arguments))


if __name__ == "__main__":
    sys.exit(run_command(main))
