"""The open-world loop in one command, on handwritten digits: `python -m export.demo_loop RUN --out FOLDER`.

RUN knows 0 to 7. It is served and gets 8s and 9s, which it calls unknown and keeps. They are grouped, labelled (here by
a script that has the true labels and uses the same HTTP API as the page in a browser), learned as the next task,
published, and loaded by the running server while clients continue to send requests.
"""

import json
import sys
import time
from pathlib import Path

from serving import demo
from serving.bundle.terminal import escaped
from serving.host import address
from training.options import CommandParser, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("python -m export.demo_loop", "Run the open-world loop on handwritten digits.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run of the digits 0 to 7")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for all files; deleted first")
    parser.add_argument("--port", type=address.port, default=3000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    chosen = parser.parse(arguments)
    if demo.taken(chosen.port):
        print(f"error: port {chosen.port} is taken; choose another one: make demo-loop PORT=3001", file=sys.stderr)
        return 2

    import httpx

    from export.demo.loop import DemoFolder, run_loop
    from serving.client import ServiceError
    from training.run import RunError

    started = time.monotonic()
    try:
        result = run_loop(chosen.run, DemoFolder(chosen.out), chosen.port)
    except (RunError, ServiceError, httpx.HTTPError) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result.print()
    print(f"{time.monotonic() - started:.0f} s; to label images yourself, see docs/howto/open-world.md")
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": result.rows, "promises": result.checks}, indent=2))
    return 0 if all(result.checks.values()) else 1


if __name__ == "__main__":
    demo.end_in_order()
    sys.exit(run_command(main))
