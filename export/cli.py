"""The command `openworld`: one subcommand for each step from images to answers.

Only the module of the chosen subcommand is imported.
"""

import importlib
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from models.suggest import unknown_name
from serving.bundle.command_line import glossary
from serving.bundle.labels import did_you_mean
from serving.bundle.terminal import one_line
from training.options import run_command

USAGE = """\
usage: openworld COMMAND ...    (openworld COMMAND --help explains its options; openworld --version)

An image classifier that keeps learning and knows what it does not know.
"""


class Subcommand(NamedTuple):
    """A module with the function that runs it, and its help in one line."""

    module: str
    help: str
    function: str = "main"


SUBCOMMANDS = {
    "fit": Subcommand("training.fit", "learn tasks, one after another"),
    "add-task": Subcommand("training.fit", "teach a finished run new classes", "add_task"),
    "evaluate": Subcommand("training.evaluate", "measure a run on its test images"),
    "compare": Subcommand("training.compare_scores", "compare every unknown score on a run"),
    "diagnose": Subcommand("training.diagnose", "what limits each task, and how full the network is"),
    "report": Subcommand("training.report_page", "write the report page of a run again"),
    "study": Subcommand("training.study", "the paper's systems over several seeds, as tables"),
    "cache": Subcommand("training.cache", "show or clear the cache of encoded images"),
    "export": Subcommand("export.__main__", "turn a run into a bundle"),
    "inspect": Subcommand("export.inspect", "classes, verdict, size and speed of a bundle"),
    "verify": Subcommand("export.verify", "check the files and the golden answers of a bundle"),
    "publish": Subcommand("export.publish", "export a run to a shelf that servers watch"),
    "push": Subcommand("serving.remote", "send a bundle to a URL: Hugging Face, an object store, a folder", "push"),
    "pull": Subcommand("serving.remote", "fetch a bundle from a URL", "pull"),
    "serve": Subcommand("serving.__main__", "serve a bundle over HTTP"),
    "predict": Subcommand("serving.predict", "answer image files without a server"),
    "discover": Subcommand("training.discover", "group the images of a quarantine that may be new classes"),
    "learn-unknowns": Subcommand("export.loop", "learn the labelled images of a quarantine, and publish the result"),
}


def help_text() -> str:
    width = max(map(len, SUBCOMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in SUBCOMMANDS.items())
    return f"{USAGE}\ncommands:\n{commands}\n\n{glossary()}"


def version_text() -> str:
    try:
        return f"openworld {version('openworld')}"
    except PackageNotFoundError:
        return "openworld, not installed: run from its folder"


def _option_first(words: list[str]) -> str:
    """What is wrong with words of which the first is an option, and where it belongs."""
    place = next((place for place, word in enumerate(words) if word in SUBCOMMANDS), None)
    if place is None:
        allowed = ("--help", "--version")
        return f"no such option of openworld itself: got {words[0]}; allowed: {', '.join(allowed)}, or a command" + (
            did_you_mean(words[0], allowed)
        )
    right = shlex.join(["openworld", *words[place:], *words[:place]])
    return f"options of a command follow its name: got {words[0]} before {words[place]}; allowed: {right}"


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if words[0] in ("--version", "version"):
        print(version_text())
        return 0
    name, *rest = words
    if name not in SUBCOMMANDS:
        problem = _option_first(words) if name.startswith("-") else unknown_name("command", name, SUBCOMMANDS)
        print(f"error: {one_line(problem)}", file=sys.stderr)
        return 2
    command = SUBCOMMANDS[name]
    return run_command(lambda: int(getattr(importlib.import_module(command.module), command.function)(rest)))


if __name__ == "__main__":
    sys.exit(main())
