"""What a bundle is, on one screen, or in detail: `openworld inspect BUNDLE`."""

import sys
from pathlib import Path

from serving.bundle.terminal import escaped
from training.options import CommandParser, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("openworld inspect", "Classes, verdict, size and speed of a bundle, on one screen.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle directory")
    parser.add_argument(
        "--verbose", action="store_true", help="units, multiplications, bytes and latency of every task, and all checks"
    )
    chosen = parser.parse(arguments)

    from export.checks.inspection import inspect, print_inspection
    from export.checks.overview import print_overview
    from export.checks.trunk_inspection import print_trunk_inspection
    from serving.bundle.errors import BundleError
    from serving.bundle.manifest import load_bundle

    try:
        bundle = load_bundle(chosen.bundle)
        if not chosen.verbose:
            print_overview(bundle)
        elif bundle.manifest.trunk is None:
            print_inspection(bundle, inspect(bundle))
        else:
            print_trunk_inspection(bundle)
    except BundleError as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
