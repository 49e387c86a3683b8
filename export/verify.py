"""Check a bundle again: checksums, format and golden answers of every precision: `openworld verify BUNDLE`."""

import sys
from pathlib import Path

from serving.bundle.terminal import escaped, one_line
from training.options import CommandParser, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser("openworld verify", "Check the checksums, the format and the golden answers of a bundle.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle directory")
    chosen = parser.parse(arguments)

    from serving.bundle.errors import BundleError
    from serving.bundle.manifest import load_bundle
    from serving.bundle.model import BundleModel

    try:
        bundle = load_bundle(chosen.bundle)
        bundle.check()
        for precision in bundle.manifest.precisions:
            BundleModel.load(chosen.bundle, provider="cpu", precision=precision).self_test()
    except BundleError as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    manifest = bundle.manifest
    print(
        f"{one_line(chosen.bundle)}: {manifest.name} version {manifest.version}: {len(manifest.files)} checksums and "
        f"{len(bundle.golden.pixels)} golden answers in {', '.join(manifest.precisions)} are right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
