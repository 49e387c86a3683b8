"""What adapters add to statistics alone, for people: in the terminal and on the report page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from training.measure.adapter_gain import ALONE, WITH
from training.show.console import numbers, shown

MEASURES = {"wp": "WP %", "tp": "TP %", "cil": "CIL %", "nats": "nats within tasks", "unknown_auroc": "unknown AUROC"}


def verdict_on(gain: Mapping[str, Any]) -> str:
    """One paragraph: whether adapters are used, why, and what they cost."""
    images = gain["validation"]["images"]
    before, after = (gain["validation"][name] for name in (ALONE, WITH))
    change = (
        f"on {images} validation photos that neither had seen, WP {100 * before['wp']:.1f} % by statistics alone and "
        f"{100 * after['wp']:.1f} % with adapters of weight {gain['best_weight']:g} (cross-entropy within tasks "
        f"{before['nats']:.3f} and {after['nats']:.3f})"
    )
    cost = f"They took {gain['seconds']:.0f} s, {100 * gain['share_of_time']:.0f} % of the learning"
    if gain["used"]:
        turns = "" if gain["rotations"] == 1 else f" in {gain['rotations']} rotations"
        used = f"Adapters sharpen the classes within each task{turns}, with weight {gain['best_weight']:g}"
        return f"{used}: {change}. {cost}."
    return (
        f"Adapters did not improve accuracy enough, so statistics alone decide and a bundle has no adapters: {change}. "
        f"{cost}, which --quick saves."
    )


def gain_rows(gain: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row per measure: statistics alone and with adapters, on validation and on test photos."""
    for name, title in MEASURES.items():
        parts = [(gain[of] or {}).get(side, {}).get(name) for of in ("validation", "test") for side in (ALONE, WITH)]
        digits, times = (3, 1) if name in ("nats", "unknown_auroc") else (2, 100)
        yield title, *(shown(value, digits, times) for value in parts)


def print_gain(console: Console, gain: Mapping[str, Any] | None) -> None:
    """Print what adapters add; nothing for a run that has none."""
    if gain is None:
        return
    titles = [f"{of}\n{side}" for of in ("validation", "test") for side in ("statistics", "with adapters")]
    table = Table("", *numbers(*titles), title="what adapters add")
    for row in gain_rows(gain):
        table.add_row(*row)
    console.print(table)
    console.print(verdict_on(gain), highlight=False, markup=False)
