"""Measure a run on its test images: `openworld evaluate RUN`, or `python -m training.evaluate RUN`."""

import json
import sys

from training.options import (
    add_json_option,
    add_rule_options,
    add_unknown_option,
    report_errors,
    run_command,
    run_parser,
)


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("openworld evaluate", "Measure a run on its test images, by the served decision rule.")
    add_unknown_option(parser)
    add_json_option(parser)
    add_rule_options(parser)
    chosen = parser.parse(arguments)

    def work() -> None:
        from rich.console import Console

        from training.measure.evaluation import evaluate_chosen, measure
        from training.show.adapters import print_gain
        from training.show.console import print_summary

        result = measure(evaluate_chosen(chosen))
        if chosen.json:
            print(json.dumps(result, indent=2))
        else:
            print_summary(result)
            print_gain(Console(), result["adapters"])

    return report_errors(work)


if __name__ == "__main__":
    sys.exit(run_command(main))
