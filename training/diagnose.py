"""What limits each task of a run, WP or TP, and how full its network is: `openworld diagnose RUN`."""

import argparse
import json
import sys
from pathlib import Path

from training.options import add_json_option, add_plot_option, add_rule_options, report_errors, run_command, run_parser


def samples_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".csv", ".npz"):
        raise argparse.ArgumentTypeError(f"{text!r} ends in {path.suffix!r}; allowed: .csv, .npz")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser(
        "openworld diagnose",
        "Which of WP or TP limits each task, by accuracy and by the paper's theory; which classes are confused; how "
        "full the network is.",
    )
    add_json_option(parser)
    add_plot_option(parser)
    parser.add_argument(
        "--samples", type=samples_file, metavar="FILE", help="write the losses and bounds of every image (.csv or .npz)"
    )
    add_rule_options(parser)
    chosen = parser.parse(arguments)

    def work() -> None:
        from training.measure.diagnosis import diagnose
        from training.measure.evaluation import evaluate_chosen
        from training.show import diagnosis, plots

        plots.check_suffix(chosen.out)
        evaluation = evaluate_chosen(chosen)
        found = diagnose(evaluation)
        if chosen.out is not None:
            diagnosis.save_plot(chosen.out, evaluation, found)
        if chosen.samples is not None:
            diagnosis.save_samples(chosen.samples, diagnosis.samples(evaluation, found))
        if chosen.json:
            print(json.dumps(found.as_json(), indent=2, allow_nan=False))
        else:
            diagnosis.print_tables(evaluation, found)

    return report_errors(work)


if __name__ == "__main__":
    sys.exit(run_command(main))
