"""What class names a model may have: they are shown on pages, in terminals and in logs."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 200


def check_labels(labels: Sequence[str]) -> None:
    """Raise a ValueError unless the labels are printable, not empty, of limited length and different."""
    for label in labels:
        if not (label.strip() and label.isprintable() and len(label) <= LONGEST):
            raise ValueError(f"label {label[:LONGEST]!r}; allowed: 1 to {LONGEST} printable characters")
    if len(set(labels)) < len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        raise ValueError(f"each class belongs to one task; given twice: {', '.join(twice[:5])}")
