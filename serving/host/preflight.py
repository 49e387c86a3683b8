"""Checks everything that could stop a worker before a port is opened: a failing worker would be restarted endlessly.

`python -m serving.host.preflight BUNDLE` checks a bundle with the settings of the environment.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from serving.bundle.directory import recover_missing
from serving.bundle.errors import BundleError
from serving.bundle.shelf import Shelf
from serving.bundle.terminal import escaped
from serving.settings import HOME, Settings
from serving.swap.agreement import BundleLocation, SwapState, WorkerGroup

CANNOT_SERVE = 2


def first_bundle(settings: Settings) -> Path:
    """The bundle that is served at first."""
    if settings.bundles is None:
        recover_missing(settings.bundle)
        return settings.bundle
    current = Shelf(settings.bundles).current()
    if current is None:
        raise BundleError(f"{settings.bundles}: no link `current` to a bundle; publish one there first")
    return current


def create_group(settings: Settings, bundle: Path, home: Path) -> WorkerGroup:
    """Make the group in which workers agree on a bundle, which does not change while they serve it."""
    group = WorkerGroup.create(home)
    group.publish(SwapState(serving=BundleLocation.of(bundle if settings.bundles else group.copy_bundle(bundle))))
    return group


def check_in_child(bundle: Path) -> int:
    """Load and test a bundle in another process, and return its exit code; errors are printed in one line.

    The memory and the GPU that the test uses are released with the process.
    """
    path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", __name__, str(bundle)]
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    if code >= 0:
        return code
    reason = "; too little memory is the usual reason" if -code == signal.SIGKILL else ""
    name = signal.Signals(-code).name
    print(f"error: {escaped(bundle)}: killed by {name} while it was tested{reason}", file=sys.stderr)
    return 128 - code


def check(settings: Settings, bundle: Path) -> int:
    """Load and test a bundle, and check that the quarantine has its drivers; the database itself may come later."""
    # The workers log the same lines again.
    logging.disable(logging.INFO)
    from serving.bundle.errors import ProviderError
    from serving.bundle.model import BundleModel
    from serving.quarantine.records import StoreError

    try:
        BundleModel.load(bundle, provider=settings.provider, precision=settings.precision).self_test()
        if settings.quarantine_url is not None:
            from serving.quarantine.store import Store

            Store(settings.quarantine_url, settings.quarantine_images).close()
    except (BundleError, ProviderError, StoreError) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return CANNOT_SERVE
    except MemoryError:
        print(f"error: {escaped(bundle)}: too little memory to load it", file=sys.stderr)
        return CANNOT_SERVE
    return 0


if __name__ == "__main__":
    sys.exit(check(Settings.from_environment(), Path(sys.argv[1])))
