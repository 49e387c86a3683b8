"""What all commands share on the command line: one-line usage errors that suggest names, and a glossary in the help."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from serving.bundle.labels import did_you_mean
from serving.bundle.terminal import one_line

TERMS = {
    "task": "a few classes that are learned together; tasks are learned one after another",
    "WP, TP": "within-task prediction (the class, given the task); task prediction (which task)",
    "CIL, TIL": "accuracy if no task is given (class-incremental, WP x TP); if the task is given (task-incremental)",
    "+c": "the paper's correction: one scale and one shift per task, fitted on a few stored images (--buffer)",
    "unknown": "an image of no learned class",
    "alpha": "the share of known images that may be called unknown",
    "run": "the directory that training writes; it is exported to a bundle, which servers load",
    "bundle": "the directory that `openworld export` writes: the graphs and all else that an answer needs",
    "shelf": "a folder of bundles with a link `current`, which servers watch",
    "quarantine": "the database in which servers keep the images that they called unknown",
}
TOO_MANY = "more arguments than the command takes"
OF_SERVING = ("task", "unknown", "alpha", "bundle", "shelf", "quarantine")


def one_of(*names: str) -> Callable[[str], str]:
    """A type for `add_argument`: one of some names; another one is an error that suggests the nearest."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; allowed: {', '.join(names) or 'none'}{did_you_mean(text, names)}"
            )
        return text

    return parse


def glossary(*names: str) -> str:
    """The terms that these names have, or all terms."""
    return "".join(["terms:\n", *(f"  {name:<11} {TERMS[name]}\n" for name in names or TERMS)])


class GlossaryParser(argparse.ArgumentParser):
    """Usage errors are one line, and the help ends with a glossary."""

    def __init__(self, command: str, description: str, terms: str, note: str = "") -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        self._hidden: set[str] = set()
        super().__init__(prog=command, description=description, epilog=note + terms, formatter_class=formatter)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        if settings.get("help") == argparse.SUPPRESS:
            # The usage does not have it, by which options are known.
            self._hidden.update(names)
        return super().add_argument(*names, **settings)

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The chosen options, before or after positional arguments; exits with 2 after a one-line error."""
        # argparse reports an argument that is missing first, which may be missing because of the misspelt option.
        if unknown := self._unknown_options(sys.argv[1:] if arguments is None else arguments):
            self.error(self._not_expected(unknown))
        chosen, rest = self.parse_known_intermixed_args(arguments)
        if rest:
            self.error(self._not_expected(rest))
        return chosen

    def _unknown_options(self, words: Sequence[str]) -> list[str]:
        """The long options that do not exist, not even shortened; none in a request for help."""
        given = [word.partition("=")[0] for word in itertools.takewhile("--".__ne__, words)]
        if "-h" in given or "--help" in given:
            return []
        names = [*self._long_options(), *self._hidden]
        return [
            word for word in given if re.match("--[a-zA-Z]", word) and not any(name.startswith(word) for name in names)
        ]

    def _long_options(self) -> list[str]:
        """Those of the usage."""
        return sorted({*re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_usage())})

    def _not_expected(self, rest: Sequence[str]) -> str:
        """The first unknown option. What follows it may belong to it or not, so it is not blamed."""
        unknown = next((word.partition("=")[0] for word in rest if re.match("--?[a-zA-Z]", word)), None)
        if unknown is None:
            return f"{TOO_MANY}: got {', '.join(map(repr, rest))}; allowed: see the usage line"
        names = self._long_options()
        return f"no such option: got {unknown}; allowed: {', '.join(names) or 'none'}{did_you_mean(unknown, names)}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)} (see {self.prog} --help)\n")


class ServingParser(GlossaryParser):
    """The parser of commands of a server, with the terms that they need."""

    def __init__(self, command: str, description: str, note: str = "") -> None:
        super().__init__(command, description, glossary(*OF_SERVING), note)
