"""Where encoded images and exported graphs are cached, and how large that may become: the settings of learning.

They are apart from serving/settings.py because a server does not read them, and networks are learned without one.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

FOLDER_VARIABLE = "OPENWORLD_CACHE"
LIMIT_VARIABLE = "OPENWORLD_CACHE_GB"
DEFAULT_GB = 20.0
GB = 1024**3


class _Variables(BaseSettings):
    """An empty variable counts as not set."""

    model_config = SettingsConfigDict(env_ignore_empty=True, frozen=True)


class _Folders(_Variables):
    openworld_cache: Path | None = None
    xdg_cache_home: Path | None = None


class _Limit(_Variables):
    openworld_cache_gb: float = Field(default=DEFAULT_GB, gt=0, allow_inf_nan=False)


def cache_folder() -> Path:
    """OPENWORLD_CACHE, else a folder in the user's cache folder."""
    folders = _Folders()
    if folders.openworld_cache:
        return folders.openworld_cache.expanduser().resolve()
    return (folders.xdg_cache_home or Path.home() / ".cache") / "openworld"


def cache_limit() -> int:
    """The bytes that all vectors together may take: OPENWORLD_CACHE_GB, or 20 GB; raises a ValueError."""
    try:
        return int(_Limit().openworld_cache_gb * GB)
    except ValidationError as error:
        given = error.errors()[0]["input"]
        raise ValueError(f"{LIMIT_VARIABLE} is {given!r}; allowed: gigabytes above 0, such as {DEFAULT_GB:g}") from None
