"""Learn every task of a plan, evaluate the run, and write its files."""

from collections.abc import Sequence

from rich.console import Console

from models.trunks.trunk import OWN_WEIGHTS
from serving.bundle.atomic import replace_file
from training.config import system_title
from training.host.device import choose_device, describe, prepare
from training.host.distributed import barrier, is_main
from training.learn.forecast import MEASURING
from training.learn.learner import Learner
from training.learn.plan import TrainingPlan
from training.learn.pooled_learner import PooledLearner
from training.measure.evaluation import evaluate, measure
from training.run import RunError, open_run
from training.show.adapters import print_gain
from training.show.console import Reporter, print_summary
from training.show.page import PAGE, write_page
from training.store.checkpoint import METRICS, write_config, write_json, writing
from training.store.tracking import Tracking, check_installed


def fit_plan(
    plan: TrainingPlan, reporter: Reporter, command: Sequence[str], trackers: Sequence[str], *, compiling: bool = False
) -> None:
    """Learn, measure, write RUN/metrics.json and RUN/report.html, and print the metrics."""
    folder, config = plan.folder, plan.config
    check_installed(trackers)
    device = prepare(choose_device())
    stored = f", {config.buffer} images stored" if config.buffer else ""
    how = ", step 1 compiled" if compiling else ""
    system = system_title(config.method, config.loss)
    reporter.print(f"{config.preset.name}, {system}{stored}, seed {config.seed}, {describe(device)}{how}")
    # The other processes must have read the run before the main process changes it.
    barrier()
    tracking = Tracking(folder, config, trackers)
    if config.trunk is not None:
        learner: Learner | PooledLearner = PooledLearner(folder, config, device, reporter, tracking)
    else:
        learner = Learner(folder, config, device, reporter, tracking, compiling=compiling)
    if plan.begun:
        learner.restore()
    if is_main():
        try:
            _write_config(plan)
            tracking.begin(learner.progress, command)
        except OSError as error:
            raise RunError(f"{folder}: no run can be written there ({error.strerror}); choose another --out") from error
    learner.learn(plan.sources)
    if not is_main():
        return
    with reporter.phase(MEASURING):
        evaluation = evaluate(open_run(folder, device), plan.sources, device)
        result = measure(evaluation)
    reporter.end()
    with writing(folder / METRICS):
        write_json(folder / METRICS, result)
    tracking.measured(result)
    console = Console(quiet=reporter.console.quiet)
    print_summary(result, console)
    print_gain(console, result["adapters"])
    with writing(folder / PAGE):
        write_page(folder, evaluation, result)


def _write_config(plan: TrainingPlan) -> None:
    """Write the configuration if it is new, and remove the metrics and the report of fewer tasks."""
    if plan.grown:
        plan.folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, PAGE):
            (plan.folder / name).unlink(missing_ok=True)
        if plan.trunk_weights is not None:
            # Before the configuration, which has its checksum.
            replace_file(plan.folder / OWN_WEIGHTS, plan.trunk_weights)
        write_config(plan.folder, plan.config)
