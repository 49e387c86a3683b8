"""What the demonstration measures, and the requirements that it checks."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from export.demo.traffic import Traffic
from serving.bundle.decision import NETWORK_NAMES
from serving.bundle.model import BundleModel
from serving.http.schemas import Answer
from training.data.images import Images, Source
from training.show.console import numbers

NEW = ("8", "9")
"""The classes that the run does not know at first."""
ENOUGH_REQUESTS = "at least 20 requests per second were answered during learning and swap"
RIGHT, OLD_RIGHT = "test images of 0 to 9 answered right", "test images of 0 to 7 answered right"
"""An answer is right if its class is, whether or not it is accepted."""


@dataclass(frozen=True)
class LoopResult:
    """The rows of the final table, and the requirements with whether each of them is met."""

    rows: list[tuple[str, ...]]
    checks: dict[str, bool]

    def print(self) -> None:
        console = Console()
        table = Table("", *numbers("before", "after"), title="The open-world loop")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for requirement, met in self.checks.items():
            console.print(f"{'yes' if met else '[bold red]NO[/] '}  {requirement}", highlight=False)


def loop_result(
    source: Source,
    before: BundleModel,
    after: BundleModel,
    answers: list[Answer],
    new_images: int,
    groups: list[tuple[int, Counter[str]]],
    traffic: Traffic,
    later_answers: list[Answer],
) -> LoopResult:
    """`answers` and `later_answers` are to the same images, before and after the swap; the first are of new classes."""
    old, new = _measured(before, source.test), _measured(after, source.test)
    rejected = [np.mean([not answer.known for answer in each[:new_images]]) for each in (answers, later_answers)]
    purity = [labels.most_common(1)[0][1] / labels.total() for _, labels in groups]
    classes = [before.manifest.labels, after.manifest.labels]
    rows: list[tuple[str, ...]] = [
        ("version", before.manifest.version, after.manifest.version),
        ("classes", *(f"{labels[0]} to {labels[-1]}" for labels in classes)),
        ("8s and 9s sent that are unknown", *(f"{share:.1%}" for share in rejected)),
        *((name, f"{old[name]:.1%}", f"{new[name]:.1%}") for name in old),
        ("groups found, and their purity", f"{len(groups)}: {', '.join(f'{share:.0%}' for share in purity)}", ""),
        ("requests during learning and swap", "", f"{len(traffic.answers)} at {traffic.rate:.0f}/s"),
        ("of which failed", "", str(len(traffic.failures))),
    ]
    checks: dict[str, bool] = {
        "at least 85 % of the 8s and 9s were unknown": bool(rejected[0] >= 0.85),
        "two groups of at least 90 % purity": len(groups) == len(NEW) and min(purity) >= 0.9,
        "at least 93 % of 0 to 9 are right now": new[RIGHT] >= 0.93,
        "0 to 7 lose at most 5 points to 8 and 9": old[OLD_RIGHT] - new[OLD_RIGHT] <= 0.05,
        "the old tasks' logits and distances are the same to the bit": _same_outputs(before, after, source.test),
        "no request failed": not traffic.failures,
        ENOUGH_REQUESTS: traffic.rate >= 20,
        "every answer named one of the two versions": set(traffic.versions()) == set(rows[0][1:]),
    }
    return LoopResult(rows, checks)


def _measured(model: BundleModel, test: Images) -> dict[str, float]:
    verdicts = model.predict(test.pixels)
    right = np.array(model.manifest.labels)[verdicts.class_id] == test.labels
    new = np.isin(test.labels, NEW)
    return {
        RIGHT: float(right.mean()),
        OLD_RIGHT: float(right[~new].mean()),
        "test images of 0 to 7 accepted": float(verdicts.known[~new].mean()),
        "test images of 8 and 9 accepted": float(verdicts.known[new].mean()),
    }


def _same_outputs(before: BundleModel, after: BundleModel, test: Images) -> bool:
    earlier, later = before.run(test.pixels), after.run(test.pixels)
    classes = len(before.manifest.labels)
    return all(np.array_equal(earlier[name], later[name][:, :classes]) for name in NETWORK_NAMES)
