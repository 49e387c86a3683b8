"""Messages for names that do not exist: what was given, what is allowed, and the nearest allowed name."""

from collections.abc import Iterable

from serving.bundle.labels import did_you_mean


def unknown_name(what: str, got: str, allowed: Iterable[str]) -> str:
    """Such as "method is 'hatt'; allowed: hat, sup; did you mean 'hat'?"."""
    names = list(allowed)
    return f"{what} is {got!r}; allowed: {', '.join(names)}{did_you_mean(got, names)}"
