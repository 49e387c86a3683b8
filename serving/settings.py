"""Everything that the environment may say about a server, checked before a port is opened."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "OPENWORLD_"
PROVIDER_VARIABLE = "OPENWORLD_PROVIDER"
PROVIDER_CHOICES = ("auto", "cuda", "cpu")
LOG_CHOICES = ("json", "text")

HOME = Path(__file__).resolve().parents[1]
"""The project, or its copy inside a built bento; the default bundle lies in it."""


class SettingsError(Exception):
    """A setting that cannot be used; the message says which, what it was and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """How a server runs. Zero means: as it fits the machine and the model."""

    bundle: Path = HOME / "runs/demo/bundle"
    provider: str = "auto"
    workers: int = 0
    threads: int = 0
    batch: int = 0
    queue: int = 128
    deadline: float = 30.0
    max_bytes: int = 10 * 1024 * 1024
    max_pixels: int = 16_000_000
    max_images: int = 64
    max_body: int = 64 * 1024 * 1024
    api_key: str | None = field(default=None, repr=False)
    log: str = "json"
    access_log: bool = True
    tracing: bool = False
    window: int = 1000

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings; a variable that is empty counts as not set."""
        given = {name: text for name in _READERS if (text := environment.get(PREFIX + name.upper(), ""))}
        values = {name: _read(PREFIX + name.upper(), text, _READERS[name]) for name, text in given.items()}
        if file := environment.get(PREFIX + "API_KEY_FILE", ""):
            if "api_key" in values:
                raise SettingsError(f"{PREFIX}API_KEY and {PREFIX}API_KEY_FILE are both set; allowed: one of them")
            values["api_key"] = _read(PREFIX + "API_KEY_FILE", file, _key_file)
        return cls(**values)


@dataclass(frozen=True)
class _Reader:
    """How a text becomes a value, and what is allowed, for people."""

    parse: Callable[[str], Any]
    allowed: str


def _read(variable: str, text: str, reader: _Reader) -> Any:
    try:
        return reader.parse(text)
    except (ValueError, OSError) as error:
        # A key must never reach a log, not even a bad one.
        got = str(error) if "KEY" in variable else repr(text)
        raise SettingsError(f"{variable} is {got}; allowed: {reader.allowed}") from None


def _whole(least: int, most: int = 2**40) -> _Reader:
    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return _Reader(parse, f"a whole number from {least}" + (f" to {most}" if most < 2**40 else ""))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (0 < seconds < math.inf):
        raise ValueError(text)
    return seconds


def _one_of(*choices: str) -> _Reader:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return _Reader(parse, ", ".join(choices))


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[_one_of("on", "off").parse(text)]


def _checked_key(text: str) -> str:
    if not (len(text) >= 16 and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(f"a key of {len(text)} characters")
    return text


_KEY_RULE = "at least 16 printable ASCII characters without spaces"
_key_file = _Reader(lambda path: _checked_key(Path(path).read_text().strip()), f"a file that holds {_KEY_RULE}")

_READERS: dict[str, _Reader] = {
    "bundle": _Reader(lambda text: Path(text).resolve(), "a bundle directory"),
    "provider": _one_of(*PROVIDER_CHOICES),
    "workers": _whole(1, 256),
    "threads": _whole(1, 256),
    "batch": _whole(1, 1024),
    "queue": _whole(1),
    "deadline": _Reader(_seconds, "seconds, more than 0"),
    "max_bytes": _whole(1),
    "max_pixels": _whole(1),
    "max_images": _whole(1),
    "max_body": _whole(1),
    "api_key": _Reader(_checked_key, _KEY_RULE),
    "log": _one_of(*LOG_CHOICES),
    "access_log": _Reader(_switch, "on, off"),
    "tracing": _Reader(_switch, "on, off"),
    "window": _whole(1),
}
