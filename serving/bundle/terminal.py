"""Text for a terminal: file names and other data from outside must not control it."""

from __future__ import annotations

import logging


def escaped(text: object) -> str:
    """The text with every control character but line breaks written as its escape sequence, such as \\x1b."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in shown)


def one_line(text: object) -> str:
    """The text with its line breaks escaped as well."""
    return escaped(text).replace("\n", "\\n")


class EscapingFormatter(logging.Formatter):
    """Escapes whole log messages, with their arguments and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def log_to_terminal(*, clock: str | None = None) -> None:
    """Show what commands log, as plain lines on standard error; `clock` is the format of a time before each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(message)s" if clock is None else "%(asctime)s %(message)s", clock))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def duration(seconds: float) -> str:
    """Seconds in the units that people use: 4.2 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, smaller, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"
