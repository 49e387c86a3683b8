"""Messages for names that do not exist: what was given, what is allowed, and the nearest allowed name.

Serving, which imports nothing of models, has its own in `serving.bundle.labels`.
"""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(what: str, got: str, allowed: Iterable[str]) -> str:
    """Such as "method is 'hatt'; allowed: hat, sup; did you mean 'hat'?"."""
    names = list(allowed)
    return f"{what} is {got!r}; allowed: {', '.join(names)}{did_you_mean(got, names)}"


def did_you_mean(got: str, names: Iterable[str]) -> str:
    """ "; did you mean 'dog'?" for 'dgo' among cat and dog; empty where no name is close."""
    spelled = {name.lower(): name for name in names}
    close = get_close_matches(got.lower(), spelled, n=1)
    return f"; did you mean {spelled[close[0]]!r}?" if close else ""
