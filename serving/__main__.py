"""The command `openworld serve`, or `python -m serving`.

Checks the address and runs `bentoml serve serving.service:OpenWorld` with a bound on the time of a shutdown.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from serving.bundle.command_line import ServingParser
from serving.bundle.terminal import escaped
from serving.host import address
from serving.host.preflight import CANNOT_SERVE
from serving.settings import BentoMLSettings, Settings, SettingsError

SERVICE = "serving.service:OpenWorld"
GRACE = 2
"""Seconds beyond the deadline for clients to read their responses when the server is stopped."""


def main(arguments: list[str] | None = None, program: str = "openworld serve") -> int:
    """Replace this process by the server; return only if it cannot start."""
    chosen = _parser(program).parse(arguments)
    if chosen.bundle is not None:
        os.environ["OPENWORLD_BUNDLE"] = str(chosen.bundle)
    # BentoML would report its use to its makers.
    os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")
    try:
        settings = Settings.from_environment()
        host = chosen.host or address.host(BentoMLSettings.from_environment().address(settings.api_key))
        address.check_free(host, chosen.port)
    except (SettingsError, address.ListenError, argparse.ArgumentTypeError) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return CANNOT_SERVE
    # Without a timeout, a client that stops reading would keep the server from ending.
    timeout = f"--timeout-graceful-shutdown={math.ceil(settings.deadline) + GRACE}"
    # The service warns if everyone can reach it and it has no key.
    os.environ["BENTOML_HOST"] = host
    options = [f"--host={host}", f"--port={chosen.port}", timeout]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", "serve", SERVICE, *options])


def _parser(program: str) -> ServingParser:
    parser = ServingParser(
        program,
        "Serve a bundle over HTTP until the process is stopped.",
        "All other settings are OPENWORLD_* environment variables; see docs/reference/settings.md.\n\n",
    )
    parser.add_argument(
        "bundle", nargs="?", type=Path, metavar="BUNDLE", help="the bundle directory; default: OPENWORLD_BUNDLE"
    )
    parser.add_argument(
        "--host",
        type=address.host,
        help="the IP address to listen on; default: 127.0.0.1, or all addresses (0.0.0.0) if there is an API key",
    )
    port = BentoMLSettings.from_environment().port
    parser.add_argument("--port", type=address.port, default=port, help="the TCP port to listen on; default: 3000")
    return parser


if __name__ == "__main__":
    sys.exit(main(program="python -m serving"))
