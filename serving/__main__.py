"""The server: python -m serving [BUNDLE] [--host HOST] [--port PORT]

What `bentoml serve serving.service:OpenWorld` starts as well, and ready sooner: it tests the bundle while BentoML is
imported, and leaves out what no server uses. Everything else is set by OPENWORLD_* variables (docs/deploy.md).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

from serving import address
from serving.layout import BundleError
from serving.lean import BY_ALL, leave_out
from serving.preflight import CANNOT_SERVE, begin_check, first_bundle
from serving.settings import Settings, SettingsError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m serving", description="Serve a bundle over HTTP until told to stop."
    )
    parser.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE", help="instead of OPENWORLD_BUNDLE")
    parser.add_argument("--host", type=address.host, help="default: all addresses of this machine (0.0.0.0)")
    parser.add_argument("--port", type=address.port, help="default: 3000")
    chosen = parser.parse_args(arguments)
    if chosen.bundle is not None:
        os.environ["OPENWORLD_BUNDLE"] = str(chosen.bundle)
    # BentoML would report the start to its makers.
    os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")
    try:
        settings = Settings.from_environment()
        begin_check(settings, first_bundle(settings))
    except (SettingsError, BundleError) as error:
        print(error, file=sys.stderr)
        return CANNOT_SERVE
    # Until it serves, next to nothing that is made goes away again.
    gc.disable()
    leave_out(BY_ALL)

    from serving.bento import ListenError, serve
    from serving.service import OpenWorld

    gc.freeze()
    gc.enable()
    try:
        serve(OpenWorld, chosen.host, chosen.port)
    except ListenError as error:
        print(error, file=sys.stderr)
        return CANNOT_SERVE
    return 0


if __name__ == "__main__":
    sys.exit(main())
