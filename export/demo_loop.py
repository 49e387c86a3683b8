"""The open-world loop in one command, on handwritten digits: `python -m export.demo_loop RUN --out FOLDER`.

RUN knows 0 to 7. It is served and gets 8s and 9s, which it calls unknown and keeps. They are grouped, labelled (here by
a script that has the true labels and uses the same HTTP API as the page in a browser), learned as the next task,
published, and loaded by the running server while clients continue to send requests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from export.demo.steps import add_options, show
from serving import demo
from training.options import CommandParser, run_command

if TYPE_CHECKING:
    from export.demo.result import LoopResult


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("python -m export.demo_loop", "Run the open-world loop on handwritten digits.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run of the digits 0 to 7")
    add_options(parser)
    chosen = parser.parse(arguments)

    def work() -> LoopResult:
        from export.demo.loop import DemoFolder, run_loop

        return run_loop(chosen.run, DemoFolder(chosen.out), chosen.port)

    return show(chosen, work, "demo-loop", "to label images yourself, see docs/howto/open-world.md")


if __name__ == "__main__":
    demo.end_in_order()
    sys.exit(run_command(main))
