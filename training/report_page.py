"""Write RUN/report.html, the run on one page: `openworld report RUN`."""

import sys

from serving.bundle.command_line import one_of
from serving.bundle.terminal import one_line
from training.options import add_rule_options, add_unknown_option, report_errors, run_command, run_parser


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("openworld report", "Write RUN/report.html: metrics, plots and mistakes of a run on one page.")
    add_unknown_option(parser)
    add_rule_options(parser)
    parser.add_argument(
        "--map",
        type=one_of("pca", "umap"),
        metavar="NAME",
        default="pca",
        help="places on the map of test images: pca (default), the two main directions; umap, in which groups come "
        "apart (the extra umap)",
    )
    chosen = parser.parse(arguments)
    if chosen.map == "umap":
        from serving.bundle.umap_places import MISSING, installed

        if not installed():
            parser.error(MISSING)

    def work() -> None:
        from training.measure.evaluation import evaluate_chosen, measure
        from training.show.page import write_page

        evaluation = evaluate_chosen(chosen)
        print(one_line(write_page(chosen.run, evaluation, measure(evaluation), chosen.map)))

    return report_errors(work)


if __name__ == "__main__":
    sys.exit(run_command(main))
