"""Teaching a running server in one command, on drawn photos: `python -m export.demo_teach --out FOLDER`.

A bundle of six classes is served. Photos of two unseen classes arrive and are unknown. They are grouped, named (here by
a script that knows what was drawn and uses the same HTTP API as the page in a browser) and learned by the server itself
while clients continue to send requests.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from export.demo.steps import add_options, show
from serving import demo
from training.options import CommandParser, run_command

if TYPE_CHECKING:
    from export.demo.teach import TeachResult


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("python -m export.demo_teach", "Teach a running server two classes.")
    add_options(parser)
    chosen = parser.parse(arguments)

    def work() -> TeachResult:
        from export.demo.teach import run_teach

        return run_teach(chosen.out, chosen.port)

    return show(chosen, work, "demo-teach", "to teach a server yourself, see docs/howto/teach.md")


if __name__ == "__main__":
    demo.end_in_order()
    sys.exit(run_command(main))
