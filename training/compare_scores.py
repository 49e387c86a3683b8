"""Every unknown score on one finished run, side by side: `openworld compare RUN`."""

import argparse
import json
import sys

from training.options import (
    add_json_option,
    add_plot_option,
    add_unknown_option,
    report_errors,
    run_command,
    run_parser,
)


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("openworld compare", "Compare every unknown score and every fusion of them on one run.")
    add_unknown_option(parser)
    add_json_option(parser)
    add_plot_option(parser)
    chosen = parser.parse(arguments)
    return report_errors(lambda: _compare(chosen))


def _compare(chosen: argparse.Namespace) -> None:
    from training.data.opening import open_sources
    from training.host.device import choose_device, prepare
    from training.measure.comparison import compare
    from training.measure.evaluation import chosen_unknown, evaluate
    from training.run import open_run
    from training.show import comparison, plots

    plots.check_suffix(chosen.out)
    device = prepare(choose_device())
    run = open_run(chosen.run, device)
    sources = open_sources(run.config, chosen.data, weights=chosen.trunk_weights, run=chosen.run)
    evaluation = evaluate(run, sources, device, other_unknown=chosen_unknown(chosen, sources))
    rows, known, unknown = list(compare(evaluation, sources, device)), len(evaluation.known), len(evaluation.unknown)
    if chosen.out is not None:
        comparison.save_plot(chosen.out, rows)
    if chosen.json:
        rows_as_json = [row._asdict() for row in rows]
        print(json.dumps({"known": known, "unknown": unknown, "rows": rows_as_json}, indent=2))
    else:
        comparison.print_table(run, rows, (known, unknown))


if __name__ == "__main__":
    sys.exit(run_command(main))
