"""What class names a model may have (they are shown on pages, in terminals and in logs), and the nearest to a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LONGEST = 200


def check_labels(labels: Sequence[str]) -> None:
    """Raise a ValueError unless the labels are printable, not empty, of limited length and different."""
    for label in labels:
        if not (label.strip() and label.isprintable() and len(label) <= LONGEST):
            raise ValueError(f"label {label[:LONGEST]!r}; allowed: 1 to {LONGEST} printable characters")
    if len(set(labels)) < len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        raise ValueError(f"each class belongs to one task; given twice: {', '.join(twice[:5])}")


def did_you_mean(got: str, names: Iterable[str]) -> str:
    """ "; did you mean 'dog'?" for 'dgo' among cat and dog; empty where no name is close."""
    spelled = {name.lower(): name for name in names}
    close = get_close_matches(got.lower(), spelled, n=1)
    return f"; did you mean {spelled[close[0]]!r}?" if close else ""
