"""What the command line of training.fit asks for: a run as it shall be, and where its images are."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from training.checkpoint import RunError, load, read_config, started
from training.config import LOSSES, METHODS, Lesson, RunConfig
from training.datasets import kind_of, load_source
from training.history import without_secrets
from training.images import LEAST_TAUGHT, LEAST_TESTED, DataError
from training.presets import PRESETS, choose_preset
from training.sources import Sources
from training.tasks import check_classes, check_new, in_tasks_of, parse_tasks, too_few
from training.tracking import TRACKERS
from training.unknowns import LEAST_IMAGES, MIN_IMAGES, QUARANTINE, Address, address_of, choose_unknowns

DEFAULT_RUN = Path("runs/digits")
SETTLED = ("preset", "method", "loss", "buffer", "size", "width", "seed", "tasks", "classes_per_task")
"""What a run cannot change once it has begun."""


@dataclass(frozen=True)
class Plan:
    """A run in `folder` that shall learn all of `config`."""

    folder: Path
    config: RunConfig
    sources: Sources
    quarantine: Address | None = None
    begun: bool = True
    """Whether `folder` holds a run already."""
    grown: bool = False
    """Whether `config` is new, because there is more to learn or all of it is."""


def make_plan(chosen: argparse.Namespace) -> Plan:
    """The run that the command line asks for."""
    folder = chosen.add_unknowns or chosen.out or DEFAULT_RUN
    if chosen.add_unknowns and chosen.out not in (None, chosen.add_unknowns):
        raise RunError(f"--add-unknowns {chosen.add_unknowns} is the run: leave out --out {chosen.out}")
    quarantine = _quarantine(chosen)
    ways = {"--resume": chosen.resume, "--add-task": chosen.add_task, "--add-unknowns": chosen.add_unknowns}
    given = [name for name, value in ways.items() if value not in (None, False)]
    if not given:
        return _new_run(folder, chosen)
    if len(given) > 1:
        raise RunError(f"{' and '.join(given)} do not go together; allowed: one of them")
    if settled := [f"--{name.replace('_', '-')}" for name in SETTLED if getattr(chosen, name) is not None]:
        raise RunError(f"{given[0]} goes on as {folder}/config.json says: leave out {', '.join(settled)}")
    if chosen.resume:
        config = read_config(folder)
        if config.lessons[-1].dataset == QUARANTINE:
            quarantine = quarantine or address_of(config.lessons[-1])
        sources, begun = Sources(config, chosen.data, quarantine), started(folder)
        _check_images(config, sources, load(folder).progress.task if begun else 0)
        return Plan(folder, config, sources, quarantine, begun)
    if chosen.add_task is not None:
        return _added_task(folder, _finished(folder), chosen)
    return _added_unknowns(folder, _finished(folder), chosen, quarantine)


def _quarantine(chosen: argparse.Namespace) -> Address | None:
    if chosen.quarantine:
        return Address(chosen.quarantine, chosen.images)
    return Address.from_environment() if chosen.add_unknowns else None


def _new_run(folder: Path, chosen: argparse.Namespace) -> Plan:
    if started(folder):
        raise RunError(
            f"{folder} holds a run already: go on with --resume, teach it more with --add-task, or choose another --out"
        )
    if chosen.tasks is not None and chosen.classes_per_task is not None:
        raise RunError("--tasks and --classes-per-task do not go together; allowed: one of them")
    name = chosen.preset or ("images" if chosen.data else "digits")
    preset = choose_preset(name, chosen.method or "hat", chosen.loss or "csi", chosen.size, chosen.width)
    data = _place(chosen.data)
    kind = kind_of(preset.dataset, data)
    source = load_source(kind, preset.image, data)
    if chosen.tasks is not None:
        tasks = parse_tasks(chosen.tasks)
    else:
        known = [label for label in source.classes if label not in preset.held_out]
        tasks = in_tasks_of(
            known, preset.classes_per_task if chosen.classes_per_task is None else chosen.classes_per_task
        )
    check_classes(tasks, source)
    buffer = preset.buffer if chosen.buffer is True else chosen.buffer or 0
    lesson = Lesson(tasks, kind, data)
    config = RunConfig(preset, chosen.seed or 0, (lesson,), buffer)
    sources = Sources(config)
    sources.keep(lesson, source)
    _check_images(config, sources, 0)
    return Plan(folder, config, sources, begun=False, grown=True)


def _check_images(config: RunConfig, sources: Sources, learned: int) -> None:
    """Every class that is still to be learned has images enough: not to be found out when its task begins."""
    tasks = range(learned, len(config.tasks))
    if few := [each for task in tasks for each in too_few(sources.of(config.lesson_of(task)), config, task)]:
        raise DataError(
            f"too few images: {'; '.join(few)}. A class needs {LEAST_TAUGHT} to learn from, since one of them "
            f"validates, and {LEAST_TESTED} to test on; a folder that is split for you needs "
            f"{LEAST_TAUGHT + LEAST_TESTED}, not counting files that were skipped"
        )


def _added_task(folder: Path, config: RunConfig, chosen: argparse.Namespace) -> Plan:
    tasks = parse_tasks(chosen.add_task)
    check_new(tasks, config)
    data = _place(chosen.data)
    if data is None:
        # Where the images of the run came from there may be more classes.
        lesson = replace(next(old for old in config.lessons if old.dataset != QUARANTINE), tasks=tasks)
    else:
        lesson = Lesson(tasks, kind_of(config.preset.dataset, data), data)
    config = replace(config, lessons=(*config.lessons, lesson))
    sources = Sources(config)
    check_classes(tasks, sources.of(lesson))
    _check_images(config, sources, len(config.tasks) - len(tasks))
    return Plan(folder, config, sources, grown=True)


def _added_unknowns(folder: Path, config: RunConfig, chosen: argparse.Namespace, quarantine: Address | None) -> Plan:
    if quarantine is None:
        raise RunError("--add-unknowns learns from a quarantine: give its URL with --quarantine")
    minimum = MIN_IMAGES if chosen.min_images is None else chosen.min_images
    if minimum < LEAST_IMAGES:
        raise RunError(f"--min-images is {minimum}; allowed: {LEAST_IMAGES} or more")
    with quarantine.opened() as store:
        named = {label: [item.id for item in bearing] for label, bearing in store.labelled().items()}
    items = choose_unknowns(named, config, minimum)
    if items:
        lesson = Lesson((tuple(items),), QUARANTINE, quarantine.public, quarantine.images, items)
        config = replace(config, lessons=(*config.lessons, lesson))
    sources = Sources(config, quarantine=quarantine)
    if items:
        sources.of(config.lessons[-1])
    return Plan(folder, config, sources, quarantine, grown=bool(items))


def _finished(folder: Path) -> RunConfig:
    """The configuration of a run that has learned all its tasks."""
    config = read_config(folder)
    learned = load(folder).progress.task
    if learned < len(config.tasks):
        raise RunError(
            f"{folder}: {learned} of {len(config.tasks)} tasks are learned; "
            f"finish it first with `python -m training.fit --out {folder} --resume`"
        )
    return config


def how_to_go_on(plan: Plan | None, chosen: argparse.Namespace) -> str:
    """The command that goes on with a run that was stopped."""
    try:
        is_written = plan is not None and read_config(plan.folder) == plan.config
    except RunError:
        is_written = False
    if plan is None or not is_written:
        return "nothing was learned yet: give the same command again"
    words = ["python", "-m", "training.fit", "--out", str(plan.folder), "--resume"]
    # Where the images are is written down, but not where else they were looked for to go on, nor a password.
    if chosen.resume and chosen.data:
        words += ["--data", chosen.data]
    if chosen.quarantine and (chosen.resume or without_secrets(chosen.quarantine) != chosen.quarantine):
        words += [
            "--quarantine",
            without_secrets(chosen.quarantine),
            *(["--images", chosen.images] if chosen.images else []),
        ]
    words += [word for name in chosen.log for word in ("--log", name)]
    words += ["--compile"] if chosen.compile else []
    if chosen.publish:
        words += ["--publish", str(chosen.publish)]
    return f"go on with: {shlex.join(words)}"


def _place(data: str | None) -> str | None:
    """A folder by its full name, because days later one may stand elsewhere."""
    return None if data is None else str(Path(data).resolve())


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.fit", description=description)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: digits, or images with --data")
    parser.add_argument("--method", choices=METHODS, help="default: hat")
    parser.add_argument("--loss", choices=LOSSES, help="CSI's two steps, or plain cross-entropy; default: csi")
    parser.add_argument(
        "--buffer",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
        help="keep N training images to correct tasks by (the paper's +c); default: none, without N the preset's",
    )
    parser.add_argument("--out", type=Path, metavar="RUN", help=f"default: {DEFAULT_RUN}")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--data", metavar="FOLDER", help="class folders of images, or where a data set lies")
    parser.add_argument(
        "--tasks", metavar='"cat,dog; ship,truck"', help='which classes make which task; "a, b" is one class'
    )
    parser.add_argument("--classes-per-task", type=int, metavar="N", help="split the classes in order instead")
    parser.add_argument("--size", type=int, metavar="N", help="side of the images in pixels; default: the preset's")
    parser.add_argument("--width", type=int, metavar="N", help="first channels of the network; default: the preset's")
    parser.add_argument(
        "--log", action="append", choices=sorted(TRACKERS), default=[], help="keep losses and metrics there too, in RUN"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile step 1 with torch.compile: minutes a task before its first step"
    )
    later = parser.add_argument_group("going on with a run")
    later.add_argument("--resume", action="store_true", help="go on with the run in --out where it stopped")
    later.add_argument("--add-task", metavar='"bus,tram"', help="teach the finished run in --out new classes")
    later.add_argument("--add-unknowns", type=Path, metavar="RUN", help="teach a finished run what people have named")
    unknowns = parser.add_argument_group("with --add-unknowns, and to resume it")
    unknowns.add_argument("--quarantine", metavar="URL", help="default: what OPENWORLD_QUARANTINE_URL says")
    unknowns.add_argument("--images", metavar="PLACE", help="where its images are, if not beside it")
    unknowns.add_argument("--min-images", type=int, metavar="N", help=f"a class needs so many; default: {MIN_IMAGES}")
    unknowns.add_argument("--publish", type=Path, metavar="SHELF", help="export to this folder of bundles")
    return parser
