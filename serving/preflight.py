"""Looks at everything that could stop a server before a port is opened: a worker that fails would be started again
and again."""

from __future__ import annotations

import logging
import os
import sys

from serving.settings import Settings

BAD_SETTINGS_OR_BUNDLE = 2


def check_in_child(settings: Settings) -> int:
    """Load and test the bundle in a copy of this process; what is wrong is printed in one line. Gives the exit code.

    A copy starts at once, with all that is imported already, and takes with it the memory and the GPU that it used.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        code = _check(settings)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _check(settings: Settings) -> int:
    # The workers will say it again.
    logging.disable(logging.INFO)
    from serving.bundle import BundleError
    from serving.runtime import Model, ProviderError

    try:
        Model.load(settings.bundle, provider=settings.provider).self_test()
    except (BundleError, ProviderError) as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS_OR_BUNDLE
    return 0
