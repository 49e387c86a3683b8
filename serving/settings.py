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
PRECISION_VARIABLE = "OPENWORLD_PRECISION"
PRECISION_CHOICES = ("auto", "fp32", "int8", "fp16")
LOG_CHOICES = ("json", "text")
SQLITE, POSTGRESQL = "sqlite", ("postgresql", "postgres", "postgresql+psycopg")

HOME = Path(__file__).resolve().parents[1]
"""The project, or its copy inside a built bento; the default bundle lies in it."""


class SettingsError(Exception):
    """A setting that cannot be used; the message says which, what it was and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """How a server runs. Zero means: as it fits the machine and the model."""

    bundle: Path = HOME / "runs/demo/bundle"
    provider: str = "auto"
    precision: str = "auto"
    alpha: float | None = None
    """None: the bundle's."""
    workers: int = 0
    threads: int = 0
    batch: int = 0
    queue: int = 128
    deadline: float = 30.0
    max_bytes: int = 10 * 1024 * 1024
    max_pixels: int = 16_000_000
    max_images: int = 64
    max_body: int = 64 * 1024 * 1024
    max_held: int = 128 * 1024 * 1024
    api_key: str | None = field(default=None, repr=False)
    log: str = "json"
    access_log: bool = True
    tracing: bool = False
    window: int = 1000
    bundles: Path | None = None
    admin_token: str | None = field(default=None, repr=False)
    quarantine_url: str | None = field(default=None, repr=False)
    quarantine_images: str | None = None
    quarantine_max_items: int = 10_000
    quarantine_max_bytes: int = 1024**3
    quarantine_max_days: float = 30.0
    quarantine_audit_share: float = 0.0
    quarantine_queue: int = 256

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings; a variable that is empty counts as not set."""
        given = {name: text for name in _READERS if (text := environment.get(PREFIX + name.upper(), ""))}
        values = {name: _read(PREFIX + name.upper(), text, _READERS[name]) for name, text in given.items()}
        for name in ("api_key", "admin_token"):
            variable = f"{PREFIX}{name.upper()}_FILE"
            if file := environment.get(variable, ""):
                _allow_one(name, values, variable)
                values[name] = _read(variable, file, _key_file)
        if "bundles" in values:
            _allow_one("bundle", values, PREFIX + "BUNDLES")
        if "quarantine_images" not in values and not values.get("quarantine_url", SQLITE).startswith(SQLITE):
            raise SettingsError(
                f"{PREFIX}QUARANTINE_URL is a server and {PREFIX}QUARANTINE_IMAGES is not set; allowed: both, or SQLite"
            )
        return cls(**values)

    @property
    def swappable(self) -> bool:
        """Whether another bundle may come while the server runs."""
        return self.bundles is not None or self.admin_token is not None


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
        got = str(error) if any(word in variable for word in ("KEY", "TOKEN", "URL")) else repr(text)
        raise SettingsError(f"{variable} is {got}; allowed: {reader.allowed}") from None


def _allow_one(name: str, values: Mapping[str, Any], variable: str) -> None:
    if name in values:
        raise SettingsError(f"{PREFIX}{name.upper()} and {variable} are both set; allowed: one of them")


def _absolute(text: str) -> Path:
    """For processes in other directories, too; links are not followed, because they may lead elsewhere later."""
    return Path(os.path.abspath(text))


def _whole(least: int, most: int = 2**40) -> _Reader:
    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return _Reader(parse, f"a whole number from {least}" + (f" to {most}" if most < 2**40 else ""))


def _positive(text: str) -> float:
    number = float(text)
    if not (0 < number < math.inf):
        raise ValueError(text)
    return number


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(text)
    return share


def _inner_share(text: str) -> float:
    share = _share(text)
    if share in (0, 1):
        raise ValueError(text)
    return share


def _database(text: str) -> str:
    """The URL, with the absolute path of a file; without the database library, which takes long to import."""
    scheme, _, rest = text.partition("://")
    if scheme in POSTGRESQL and rest:
        return text
    if scheme != SQLITE:
        # What comes after it may hold a password.
        raise ValueError(f"a URL of {scheme if rest else 'no scheme'!r}")
    if len(rest) < 2 or not rest.startswith("/") or rest == "/:memory:":
        raise ValueError("a URL of SQLite without a file")
    return f"{SQLITE}:///{_absolute(rest[1:])}"


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
    "bundle": _Reader(_absolute, "a bundle directory"),
    "provider": _one_of(*PROVIDER_CHOICES),
    "precision": _one_of(*PRECISION_CHOICES),
    "alpha": _Reader(_inner_share, "a number between 0 and 1, such as 0.05"),
    "workers": _whole(1, 256),
    "threads": _whole(1, 256),
    "batch": _whole(1, 1024),
    "queue": _whole(1),
    "deadline": _Reader(_positive, "seconds, more than 0"),
    "max_bytes": _whole(1),
    "max_pixels": _whole(1),
    "max_images": _whole(1),
    "max_body": _whole(1),
    "max_held": _whole(1),
    "api_key": _Reader(_checked_key, _KEY_RULE),
    "log": _one_of(*LOG_CHOICES),
    "access_log": _Reader(_switch, "on, off"),
    "tracing": _Reader(_switch, "on, off"),
    "window": _whole(1),
    "bundles": _Reader(_absolute, "a folder of bundles"),
    "admin_token": _Reader(_checked_key, _KEY_RULE),
    "quarantine_url": _Reader(_database, "sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE"),
    "quarantine_images": _Reader(
        lambda text: text if "://" in text else str(_absolute(text)), "a folder, or a URL that fsspec knows"
    ),
    "quarantine_max_items": _whole(1),
    "quarantine_max_bytes": _whole(1),
    "quarantine_max_days": _Reader(_positive, "days, more than 0"),
    "quarantine_audit_share": _Reader(_share, "a number from 0 to 1"),
    "quarantine_queue": _whole(1),
}
