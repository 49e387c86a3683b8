"""Group the images that servers called unknown: `openworld discover --bundle BUNDLE`."""

import argparse
import json
import sys
from pathlib import Path

from serving.bundle.terminal import log_to_terminal
from training.options import CommandParser, add_json_option, report_errors, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("openworld discover", "Group the images in a quarantine that may be new classes.")
    parser.add_argument("--quarantine", metavar="URL", help="default: OPENWORLD_QUARANTINE_URL")
    parser.add_argument("--images", metavar="PLACE", help="where its image files are, if not next to the database")
    parser.add_argument("--bundle", type=Path, required=True, metavar="BUNDLE", help="the model that is served")
    parser.add_argument("--min-size", type=int, default=10, metavar="N", help="smallest group (default: %(default)s)")
    add_json_option(parser)
    chosen = parser.parse(arguments)
    log_to_terminal()

    from serving.bundle.errors import BundleError, ProviderError

    return report_errors(lambda: _discover(chosen), BundleError, ProviderError)


def _discover(chosen: argparse.Namespace) -> None:
    from serving.bundle.model import BundleModel
    from training.data.images import DataError
    from training.data.quarantined import Address
    from training.measure.discovery import discover
    from training.show.console import print_groups

    if chosen.min_size < 2:
        raise DataError(f"--min-size is {chosen.min_size}; allowed: 2 or more")
    address = Address(chosen.quarantine, chosen.images) if chosen.quarantine else Address.from_environment()
    if address is None:
        raise DataError("no quarantine: give its URL with --quarantine, or in OPENWORLD_QUARANTINE_URL")
    model = BundleModel.load(chosen.bundle, provider="cpu")
    with address.opened() as store:
        found = discover(store, model, chosen.min_size)
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        print_groups(found, chosen.min_size)


if __name__ == "__main__":
    sys.exit(run_command(main))
