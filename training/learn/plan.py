"""From the options of `openworld fit` to a plan: the configuration of a run, and the sources of its images."""

import argparse
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from models.trunks.patches import NAME as PATCHES
from models.trunks.trunk import Trunk, TrunkRequest, open_trunk, reopen
from training.config import Lesson, Preset, RunConfig, Tasks
from training.data.datasets import FOLDER, kind_of, load_source
from training.data.encoder import Encoder
from training.data.images import LEAST_TAUGHT, LEAST_TESTED, DataError, Source
from training.data.lister import Finder
from training.data.quarantined import LEAST_IMAGES, MIN_IMAGES, QUARANTINE, Address, address_of, choose_unknowns
from training.data.sources import Sources
from training.data.tasks import check_classes, check_names, check_new, in_tasks_of, parse_tasks, too_few
from training.learn.forecast import Expected, Photos, announce, class_names, listed
from training.learn.own_trunk import learn_trunk, phases_to_learn, stand_in_for
from training.learn.photos import (
    Loss,
    benchmark_of,
    chosen_trunk,
    photos_preset,
    with_learning,
    without_adapters,
)
from training.options import DEFAULT_RUN
from training.presets import PRESETS, choose_preset
from training.show.console import Reporter
from training.store.checkpoint import CONFIG, RunError, load, load_finished, read_config, started
from training.store.history import without_secrets

SETTLED = (
    *("preset", "trunk", "trunk_option", "quick", "method", "backbone", "loss", "buffer", "size", "width", "epochs"),
    *("batch_size", "seed", "tasks", "classes_per_task"),
)
"""The options that a run cannot change once it has begun."""


@dataclass(frozen=True)
class TrainingPlan:
    """A run in `folder` that is to learn all tasks of `config`."""

    folder: Path
    config: RunConfig
    sources: Sources
    quarantine: Address | None = None
    begun: bool = True
    """Whether `folder` already holds a checkpoint of this run."""
    grown: bool = False
    """Whether `config` is new: the run is new or has more tasks than before."""
    trunk_weights: bytes | None = None
    """The weights of a trunk that was learned from the images of this run, which keeps them."""


def make_plan(chosen: argparse.Namespace, reporter: Reporter | None = None) -> TrainingPlan:
    """The plan that the options of `openworld fit` ask for; with a trunk, images are encoded here."""
    reporter = reporter or Reporter()
    folder = chosen.add_unknowns or chosen.out or DEFAULT_RUN
    if chosen.add_unknowns and chosen.out not in (None, chosen.add_unknowns):
        raise RunError(f"--add-unknowns {chosen.add_unknowns} names the run: leave out --out {chosen.out}")
    quarantine = _quarantine(chosen)
    ways = {"--resume": chosen.resume, "--add-task": chosen.add_task, "--add-unknowns": chosen.add_unknowns}
    given = [name for name, value in ways.items() if value not in (None, False)]
    # Killed before anything was learned: what was encoded by then is in the cache.
    only_encoded = given == ["--resume"] and chosen.data is not None and not (folder / CONFIG).exists()
    if not given or only_encoded:
        return _new_run(folder, chosen, reporter)
    if len(given) > 1:
        raise RunError(f"{' and '.join(given)} exclude each other; allowed: only one of them")
    if settled := [f"--{name.replace('_', '-')}" for name in SETTLED if getattr(chosen, name) is not None]:
        raise RunError(f"{given[0]} keeps the settings of {folder}/config.json: leave out {', '.join(settled)}")
    if chosen.resume:
        config = read_config(folder)
        if config.lessons[-1].dataset == QUARANTINE:
            quarantine = quarantine or address_of(config.lessons[-1])
        begun = started(folder)
        learned = load(folder).progress.task if begun else 0
        sources = _opened(folder, config, chosen, reporter, learned, quarantine, chosen.data)
        _check_images(config, sources, learned)
        return TrainingPlan(folder, config, sources, quarantine, begun)
    config, _ = load_finished(folder)
    if chosen.add_task is not None:
        return _added_task(folder, config, chosen, reporter)
    return _added_unknowns(folder, config, chosen, reporter, quarantine)


def _quarantine(chosen: argparse.Namespace) -> Address | None:
    if chosen.quarantine:
        return Address(chosen.quarantine, chosen.images)
    return Address.from_environment() if chosen.add_unknowns else None


def _opened(
    folder: Path,
    config: RunConfig,
    chosen: argparse.Namespace,
    reporter: Reporter,
    learned: int,
    quarantine: Address | None = None,
    data: str | None = None,
) -> Sources:
    """The sources of a run that has learned some tasks; with a trunk, what is to be done is announced first."""
    if config.trunk is None:
        _check_no_ray(chosen)
        return Sources(config, data, quarantine)
    trunk = reopen(config.trunk, weights=chosen.trunk_weights, run=folder)
    encoder = Encoder(trunk, reporter=reporter, ray=chosen.ray)
    places = {data or lesson.data for lesson in config.lessons[-1:] if lesson.dataset != QUARANTINE}
    items = sum(len(numbers) for lesson in config.lessons[-1:] for numbers in lesson.items.values())
    new = config.tasks[learned:]
    expected = Expected(len(new), sum(map(len, new)), config.preset, config.seed, config.quick, learned)
    announce(encoder, reporter, Photos.inside(sorted(filter(None, places)), items), expected)
    return Sources(config, data, quarantine, encoder)


def _check_no_ray(chosen: argparse.Namespace) -> None:
    if chosen.ray:
        raise RunError("--ray encodes images with a trunk: got a run without one; allowed: --trunk NAME, or no --ray")


def _new_run(folder: Path, chosen: argparse.Namespace, reporter: Reporter) -> TrainingPlan:
    if started(folder):
        raise RunError(
            f"{folder} already holds a run: continue with --resume, teach it more with --add-task, or use another --out"
        )
    if chosen.tasks is not None and chosen.classes_per_task is not None:
        raise RunError("--tasks and --classes-per-task exclude each other; allowed: only one of them")
    request, data = chosen_trunk(chosen), _place(chosen.data)
    if request is None:
        _check_no_ray(chosen)
    _check_new_run(chosen, request, data)
    trunk = None if request is None else _opened_trunk(request, chosen, data, reporter)
    preset = _preset(chosen, trunk)
    kind = kind_of(preset.dataset, data)
    encoder = None if trunk is None else Encoder(trunk, reporter=reporter, ray=chosen.ray)
    if encoder is not None and trunk is not None and trunk.weights is None:
        _announce(encoder, chosen, preset, data, reporter)
    source = load_source(kind, preset.image, data, encoder)
    tasks = _planned_tasks(chosen, preset, source)
    buffer = preset.buffer if chosen.buffer is True else chosen.buffer or 0
    lesson = Lesson(tasks, kind, data)
    spec, quick = (trunk.spec, without_adapters(chosen)) if trunk else (None, False)
    config = RunConfig(preset, chosen.seed or 0, (lesson,), buffer, spec, quick)
    sources = Sources(config, encoder=encoder)
    sources.keep(lesson, source)
    _check_images(config, sources, 0)
    weights = trunk.weights if trunk else None
    return TrainingPlan(folder, config, sources, begun=False, grown=True, trunk_weights=weights)


def _check_new_run(chosen: argparse.Namespace, request: TrunkRequest | None, data: str | None) -> None:
    """Refuse class names that are misspelt, or that no class may have, before a trunk is opened or an image is read."""
    preset = _preset(chosen, None) if request is None else benchmark_of(chosen.preset) or PRESETS["images"]
    kind = kind_of(preset.dataset, data)
    if chosen.tasks is not None:
        tasks = parse_tasks(chosen.tasks)
        check_names(label for task in tasks for label in task)
        _check_folders(tasks, kind, data)
    elif kind == FOLDER and data is not None:
        check_names(_folders(data))


def _check_folders(tasks: Tasks, kind: str, data: str | None) -> None:
    """Refuse classes of which `data` has no folder; where there are no folders at all, reading them reports it."""
    if kind == FOLDER and data is not None and (found := _folders(data)):
        check_classes(tasks, found)


def _folders(data: str) -> list[str]:
    """The names of class folders, as far as they can be listed; reading the images raises the error."""
    return class_names(Path(data)) if Path(data).is_dir() else []


def _opened_trunk(request: TrunkRequest, chosen: argparse.Namespace, data: str | None, reporter: Reporter) -> Trunk:
    """The trunk of a new run: by its name, or learned from the images of the first task."""
    if request.name != PATCHES or request.weights is not None:
        return open_trunk(request.name, size=request.size, weights=request.weights, options=request.options)
    # What it takes to learn the filters is announced before.
    stand_in = stand_in_for(request)
    encoder = Encoder(stand_in, reporter=reporter)
    _announce(encoder, chosen, _preset(chosen, stand_in), data, reporter, filters=request)
    benchmark = benchmark_of(chosen.preset) or PRESETS["images"]

    def first_task(source: Source) -> tuple[str, ...]:
        return _planned_tasks(chosen, benchmark, source)[0]

    return learn_trunk(request, kind_of(benchmark.dataset, data), data, first_task, chosen.seed or 0, reporter)


def _announce(
    encoder: Encoder,
    chosen: argparse.Namespace,
    preset: Preset,
    data: str | None,
    reporter: Reporter,
    filters: TrunkRequest | None = None,
) -> None:
    """Announce a new run; `filters`: of a trunk that is to be learned from its images first."""
    kind = kind_of(preset.dataset, data)
    if kind == FOLDER and data is not None:
        photos, classes, tasks = Photos.inside([data]), len(class_names(Path(data))), _tasks_of(chosen, preset, data)
    else:
        source = load_source(kind, preset.image, data, Finder())
        planned = _planned_tasks(chosen, preset, source)
        photos, classes, tasks = listed(source), sum(map(len, planned)), len(planned)
    before = None if filters is None else phases_to_learn(filters, photos.number, encoder, photos.originals)
    expected = Expected(tasks, classes, preset, chosen.seed or 0, without_adapters(chosen))
    announce(encoder, reporter, photos, expected, before)


def _planned_tasks(chosen: argparse.Namespace, preset: Preset, source: Source) -> Tasks:
    """The classes of every task of a new run."""
    if chosen.tasks is not None:
        tasks = parse_tasks(chosen.tasks)
        check_names(label for task in tasks for label in task)
    else:
        known = [label for label in source.classes if label not in preset.held_out]
        size = preset.classes_per_task if chosen.classes_per_task is None else chosen.classes_per_task
        tasks = in_tasks_of(known, size)
    check_classes(tasks, source.classes)
    return tasks


def _preset(chosen: argparse.Namespace, trunk: Trunk | None) -> Preset:
    method = chosen.method or "hat"
    loss: Loss = chosen.loss or "csi"
    if trunk is None:
        name = chosen.preset or ("images" if chosen.data else "digits")
        preset = choose_preset(name, method, loss, chosen.size, chosen.width, chosen.backbone)
    else:
        preset = photos_preset(trunk.spec, method, chosen.width, loss, benchmark_of(chosen.preset))
    return with_learning(preset, chosen.epochs, chosen.batch_size)


def _tasks_of(chosen: argparse.Namespace, preset: Preset, data: str) -> int:
    """How many tasks a new run will have, as far as the folder shows before its images are read."""
    if chosen.tasks is not None:
        return len(parse_tasks(chosen.tasks))
    size = preset.classes_per_task if chosen.classes_per_task is None else chosen.classes_per_task
    return -(-len(class_names(Path(data))) // max(size, 1))


def _check_images(config: RunConfig, sources: Sources, learned: int) -> None:
    """Refuse classes with too few images now, and not hours later when their task begins."""
    tasks = range(learned, len(config.tasks))
    _check_loss(config, tasks)
    if few := [each for task in tasks for each in too_few(sources.of(config.lesson_of(task)), config, task)]:
        raise DataError(
            f"too few images: {'; '.join(few)}. A class needs {LEAST_TAUGHT} to learn from, since one of them "
            f"validates, and {LEAST_TESTED} to test on; a folder that is split for you needs "
            f"{LEAST_TAUGHT + LEAST_TESTED}, not counting files that were skipped"
        )


def _check_loss(config: RunConfig, tasks: range) -> None:
    """Refuse a task of one class with cross-entropy: its loss is 0 whatever the network does."""
    if config.loss == "ce" and (single := [task for task in tasks if len(config.tasks[task]) == 1]):
        raise DataError(
            f"task {single[0]} has the one class {config.tasks[single[0]][0]!r}, from which cross-entropy learns "
            "nothing; allowed: two or more classes per task, or --loss csi"
        )


def _added_task(folder: Path, config: RunConfig, chosen: argparse.Namespace, reporter: Reporter) -> TrainingPlan:
    tasks = parse_tasks(chosen.add_task)
    check_names(label for task in tasks for label in task)
    check_new(tasks, config)
    data = _place(chosen.data)
    if data is None:
        # The source of the first images may have more classes.
        lesson = replace(next(old for old in config.lessons if old.dataset != QUARANTINE), tasks=tasks)
    else:
        lesson = Lesson(tasks, kind_of(config.preset.dataset, data), data)
    _check_folders(tasks, lesson.dataset, lesson.data)
    learned = len(config.tasks)
    config = replace(config, lessons=(*config.lessons, lesson))
    sources = _opened(folder, config, chosen, reporter, learned)
    check_classes(tasks, sources.of(lesson).classes)
    _check_images(config, sources, learned)
    return TrainingPlan(folder, config, sources, grown=True)


def _added_unknowns(
    folder: Path, config: RunConfig, chosen: argparse.Namespace, reporter: Reporter, quarantine: Address | None
) -> TrainingPlan:
    if quarantine is None:
        raise RunError("no quarantine to learn from: give its URL with --quarantine, or in OPENWORLD_QUARANTINE_URL")
    minimum = MIN_IMAGES if chosen.min_images is None else chosen.min_images
    if minimum < LEAST_IMAGES:
        raise RunError(f"--min-images is {minimum}; allowed: {LEAST_IMAGES} or more")
    with quarantine.opened() as store:
        named = {label: [item.id for item in bearing] for label, bearing in store.labelled().items()}
    items = choose_unknowns(named, config, minimum)
    learned = len(config.tasks)
    if items:
        lesson = Lesson((tuple(items),), QUARANTINE, quarantine.public, quarantine.images, items)
        config = replace(config, lessons=(*config.lessons, lesson))
    sources = _opened(folder, config, chosen, reporter, learned, quarantine)
    if items:
        _check_loss(config, range(len(config.tasks) - 1, len(config.tasks)))
        sources.of(config.lessons[-1])
    return TrainingPlan(folder, config, sources, quarantine, grown=bool(items))


def how_to_continue(plan: TrainingPlan | None, chosen: argparse.Namespace) -> str:
    """The command that continues a run that was stopped."""
    try:
        is_written = plan is not None and read_config(plan.folder) == plan.config
    except RunError:
        is_written = False
    if plan is None or not is_written:
        return "nothing was learned yet: run the same command again"
    folder = str(plan.folder)
    words = ["fit", "--out", folder] if chosen.publish is None else ["learn-unknowns", folder]
    words = ["openworld", *words, "--resume"]
    # config.json has the place of the images, but neither another place given with --resume nor a password.
    if chosen.resume and chosen.data:
        words += ["--data", chosen.data]
    words += ["--trunk-weights", str(chosen.trunk_weights)] if chosen.trunk_weights else []
    if chosen.quarantine and (chosen.resume or without_secrets(chosen.quarantine) != chosen.quarantine):
        words += ["--quarantine", without_secrets(chosen.quarantine)]
        words += ["--images", chosen.images] if chosen.images else []
    words += [word for name in chosen.log for word in ("--log", name)]
    words += ["--compile"] if chosen.compile else []
    words += ["--publish", str(chosen.publish)] if chosen.publish else []
    # Options of learn-unknowns only.
    allowed = vars(chosen)
    words += ["--max-loss", f"{allowed['max_loss']:g}"] if allowed.get("max_loss") is not None else []
    words += ["--force"] if allowed.get("force") else []
    return f"continue with: {shlex.join(words)}"


def _place(data: str | None) -> str | None:
    """The absolute path, because a run may be continued from another directory."""
    return None if data is None else str(Path(data).resolve())
