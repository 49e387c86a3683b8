"""Looks at everything that could stop a server before a port is opened: a worker that fails would be started again
and again."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from serving.group import Group, Place, State
from serving.layout import BundleError
from serving.settings import Settings
from serving.shelf import Shelf

CANNOT_SERVE = 2


def first_bundle(settings: Settings) -> Path:
    """What is served at first."""
    if settings.bundles is None:
        return settings.bundle
    current = Shelf(settings.bundles).current()
    if current is None:
        raise BundleError(f"{settings.bundles}: no link `current` to a bundle; publish one there first")
    return current


def found_group(settings: Settings, bundle: Path, home: Path) -> Group:
    """Let the workers agree on a bundle that stays as it is for as long as they serve it."""
    group = Group.found(home)
    group.agree(State(serving=Place.of(bundle if settings.bundles else group.take_in(bundle))))
    return group


_begun: dict[tuple[Settings, Path], int] = {}
"""Processes that test a bundle, and whose verdict nobody has asked for yet."""


def begin_check(settings: Settings, bundle: Path) -> None:
    """Load and test a bundle in a copy of this process, which goes on; what is wrong is printed in one line.

    A copy starts at once, with all that is imported already, and takes with it the memory and the GPU that it used.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        _begun[settings, bundle] = child
        return
    code = 1
    try:
        code = _check(settings, bundle)
    finally:
        sys.stderr.flush()
        os._exit(code)


def check_in_child(settings: Settings, bundle: Path) -> int:
    """Wait for the test of a bundle, which begins now if it did not before. Gives the exit code."""
    if (settings, bundle) not in _begun:
        begin_check(settings, bundle)
    return _exit_code(os.waitpid(_begun.pop((settings, bundle)), 0)[1], bundle)


def _exit_code(status: int, bundle: Path) -> int:
    """As a shell gives it; a child that was killed could not say anything itself."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    reason = "; too little memory is the usual reason" if -code == signal.SIGKILL else ""
    print(f"{bundle}: killed by {signal.Signals(-code).name} while it was tested{reason}", file=sys.stderr)
    return 128 - code


def _check(settings: Settings, bundle: Path) -> int:
    # The workers will say it again.
    logging.disable(logging.INFO)
    from serving.quarantine import StoreError
    from serving.runtime import Model, ProviderError

    try:
        Model.load(bundle, provider=settings.provider, precision=settings.precision).self_test()
        _check_quarantine(settings)
    except (BundleError, ProviderError, StoreError) as error:
        print(error, file=sys.stderr)
        return CANNOT_SERVE
    return 0


def _check_quarantine(settings: Settings) -> None:
    """Whether there are drivers for it; the database itself may come later."""
    if settings.quarantine_url is not None:
        from serving.quarantine.store import Store

        Store(settings.quarantine_url, settings.quarantine_images).close()
