"""Every unknown score on finished runs, side by side: `openworld compare RUN...`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from training.options import (
    add_json_option,
    add_plot_option,
    add_unknown_option,
    report_errors,
    run_command,
    run_parser,
)

if TYPE_CHECKING:
    from training.measure.comparison import DecisionRow
    from training.run import Run


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser(
        "openworld compare",
        "Compare every unknown score and every fusion of them on one run, or on several that differ in their seeds.",
        several=True,
    )
    add_unknown_option(parser)
    add_json_option(parser)
    add_plot_option(parser)
    chosen = parser.parse(arguments)
    return report_errors(lambda: _compare(chosen))


def _compare(chosen: argparse.Namespace) -> None:
    from training.show import comparison, plots

    plots.check_suffix(chosen.out)
    # Only the rows of a run are kept: the measurements of its images may be large.
    found = [_rows(folder, chosen) for folder in chosen.run]
    every = [rows for _, rows, _ in found]
    if chosen.out is not None:
        comparison.save_plot(chosen.out, comparison.means(every))
    if chosen.json:
        printed = [
            {"known": known, "unknown": unknown, "rows": [row._asdict() for row in rows]}
            for _, rows, (known, unknown) in found
        ]
        print(json.dumps(printed if len(printed) > 1 else printed[0], indent=2))
    elif len(found) > 1:
        print(comparison.spread(every))
    else:
        comparison.print_table(*found[0])


def _rows(folder: Path, chosen: argparse.Namespace) -> tuple[Run, list[DecisionRow], tuple[int, int]]:
    """The run, its rows, and the numbers of known and unknown images."""
    from training.data.opening import open_sources
    from training.host.device import choose_device, prepare
    from training.measure.comparison import compare
    from training.measure.evaluation import chosen_unknown, evaluate
    from training.run import open_run

    device = prepare(choose_device())
    run = open_run(folder, device)
    sources = open_sources(run.config, chosen.data, weights=chosen.trunk_weights, run=folder)
    evaluation = evaluate(run, sources, device, other_unknown=chosen_unknown(chosen, sources))
    return run, list(compare(evaluation, sources, device)), (len(evaluation.known), len(evaluation.unknown))


if __name__ == "__main__":
    sys.exit(run_command(main))
