"""What class names a model may have (they are shown on pages, in terminals and in logs), and the nearest to a name.

There are two rules: a model that exists may have longer names, and spaces around them, than new classes may.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LONGEST, LONGEST_NEW = 200, 100
UNKNOWN = "unknown"
"""The server's answer for images of no class; no new class may have this name."""
NEW_LABEL = f"1 to {LONGEST_NEW} printable characters without spaces around them, and not {UNKNOWN!r}"


def check_labels(labels: Sequence[str]) -> None:
    """Raise a ValueError unless a model may have these classes: printable, not empty, of limited length, different."""
    for label in labels:
        if not (label.strip() and label.isprintable() and len(label) <= LONGEST):
            raise ValueError(f"label {label[:LONGEST]!r}; allowed: 1 to {LONGEST} printable characters")
    if len(set(labels)) < len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        raise ValueError(f"each class belongs to one task; given twice: {', '.join(twice[:5])}")


def check_new_label(label: str) -> None:
    """Raise a ValueError unless a new class may have this name."""
    if not is_new_label(label):
        raise ValueError(f"label is {label[:LONGEST]!r}; allowed: {NEW_LABEL}")


def is_new_label(label: str) -> bool:
    """Whether a new class may have this name."""
    fits = 1 <= len(label) <= LONGEST_NEW and label.isprintable() and label == label.strip()
    return fits and label != UNKNOWN


def plain(text: str) -> str:
    """A name as people see it: without spaces around it and double ones in it, and with accents composed (NFC)."""
    return re.sub(" {2,}", " ", unicodedata.normalize("NFC", text).strip())


def same_label(text: str, labels: Iterable[str]) -> str | None:
    """The label that a person means by this text: equal, or else one that looks the same."""
    looks = plain(text)
    found = [label for label in labels if plain(label) == looks]
    return text if text in found else next(iter(found), None)


def alike_but_for_case(text: str, labels: Iterable[str]) -> str | None:
    """The first label that looks the same as this text if upper and lower case count as equal."""
    looks = plain(text).casefold()
    return next((label for label in labels if plain(label).casefold() == looks), None)


def alike(labels: Iterable[str]) -> list[tuple[str, ...]]:
    """The different labels that look the same to people, such as "cat" and "cat "."""
    found: dict[str, list[str]] = defaultdict(list)
    for label in dict.fromkeys(labels):
        found[plain(label)].append(label)
    return [tuple(some) for some in found.values() if len(some) > 1]


def did_you_mean(got: str, names: Iterable[str]) -> str:
    """ "; did you mean 'dog'?" for 'dgo' among cat and dog; empty where no name is close."""
    spelled = {name.lower(): name for name in names}
    close = get_close_matches(got.lower(), spelled, n=1)
    return f"; did you mean {spelled[close[0]]!r}?" if close else ""
