"""The settings of a server, read from environment variables and checked before a port is opened.

All variables that the server reads are here: its own (OPENWORLD_*), those that it sets for its workers, and those of
BentoML. Learning has two settings of its own (models/trunks/cache_settings.py), because it also runs without a server.
The folder of the workers' metrics is one that BentoML chooses for prometheus_client (serving/telemetry/metrics.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from serving.bundle.precisions import PRECISION_CHOICES
from serving.bundle.providers import PROVIDER_CHOICES
from serving.host.address import ALL, LOOPBACK

PREFIX = "OPENWORLD_"
LOG_CHOICES = ("json", "text")
TEACH_CHOICES = ("on", "off", "auto")
SQLITE, POSTGRESQL = "sqlite", ("postgresql", "postgres", "postgresql+psycopg")
DATABASES = "sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE"

HOME = Path(__file__).resolve().parents[1]
"""The project, or its copy inside a built bento; it contains the default bundle."""


class SettingsError(Exception):
    """A setting that cannot be used; the message has its name, its value (never a secret) and what is allowed."""


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def _absolute(path: Path) -> Path:
    """Absolute, for processes in other directories. Links are not followed, because they may be changed later."""
    return Path(os.path.abspath(path))


def _switch(value: object) -> object:
    if isinstance(value, str) and value not in ("on", "off", "1", "0"):
        raise ValueError(value)
    return value


def _key(text: str) -> str:
    if not (len(text) >= 16 and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(f"a key of {len(text)} characters")
    return text


def _database(text: str) -> str:
    """The URL, with the absolute path of a file. Does not import the database library, which takes long."""
    scheme, _, rest = text.partition("://")
    if scheme in POSTGRESQL and rest:
        return text
    if scheme != SQLITE:
        # The rest may contain a password.
        raise ValueError(f"a URL of {scheme if rest else 'no scheme'!r}")
    if len(rest) < 2 or not rest.startswith("/") or rest == "/:memory:":
        raise ValueError("a URL of SQLite without a file")
    return f"{SQLITE}:///{_absolute(Path(rest[1:]))}"


def _folder_or_url(text: str) -> str:
    return text if "://" in text else str(_absolute(Path(text)))


def _one_of(choices: tuple[str, ...], default: str) -> Any:
    return Field(default, pattern=f"^({'|'.join(choices)})$", description=", ".join(choices))


KEY_RULE = "at least 16 printable ASCII characters without spaces"
# The description of a field is what its error message shows as allowed. A field without repr is a secret.
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Count = Annotated[int, Field(ge=1, le=2**40, description="a whole number from 1")]
Processes = Annotated[int, Field(ge=1, le=256, description="a whole number from 1 to 256")]
Switch = Annotated[bool, BeforeValidator(_switch), Field(description="on, off")]
Key = Annotated[str, AfterValidator(_key)]


class _Environment(BaseSettings):
    """Settings that are read from the environment by `from_environment` only; an empty variable counts as not set."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", validate_default=False
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Settings that code constructs do not depend on the environment.
        return (init_settings,)

    @classmethod
    def from_environment(cls) -> Self:
        """Read and check the variables; raises a SettingsError."""
        try:
            return cls(**EnvSettingsSource(cls)())
        except ValidationError as error:
            detail = error.errors()[0]
            name = str(detail["loc"][0])
            field = cls.model_fields[name]
            # A secret must never reach a log, not even an invalid one.
            got = repr(detail["input"]) if field.repr else str(detail["ctx"]["error"])
            variable_name = cls.model_config["env_prefix"] + name.upper()
            raise SettingsError(f"{variable_name} is {got}; allowed: {field.description}") from None


class Settings(_Environment):
    """How a server runs. Zero means that the value is chosen for the machine and the model."""

    bundle: AbsolutePath = Field(default=HOME / "runs/demo/bundle", description="a bundle directory")
    provider: str = _one_of(PROVIDER_CHOICES, "auto")
    precision: str = _one_of(PRECISION_CHOICES, "auto")
    alpha: float | None = Field(default=None, gt=0, lt=1, description="a number between 0 and 1, such as 0.05")
    """None: the bundle's own."""
    workers: Processes = 0
    threads: Processes = 0
    batch: int = Field(default=0, ge=1, le=1024, description="a whole number from 1 to 1024")
    queue: Count = 128
    deadline: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="seconds, more than 0")
    max_bytes: Count = 32 * 1024 * 1024
    max_pixels: Count = 50_000_000
    max_side: Count = 16_384
    max_images: Count = 64
    max_body: Count = 64 * 1024 * 1024
    max_held: Count = 128 * 1024 * 1024
    api_key: Key | None = Field(default=None, description=KEY_RULE, repr=False)
    api_key_file: Path | None = None
    log: str = _one_of(LOG_CHOICES, "json")
    access_log: Switch = True
    tracing: Switch = False
    window: Count = 1000
    drift_every: Count = 10_000_000
    bundles: AbsolutePath | None = Field(default=None, description="a folder of bundles")
    admin_token: Key | None = Field(default=None, description=KEY_RULE, repr=False)
    admin_token_file: Path | None = None
    samples: AbsolutePath | None = Field(default=None, description="a folder of images")
    quarantine_url: Annotated[str, AfterValidator(_database)] | None = Field(
        default=None, description=DATABASES, repr=False
    )
    quarantine_images: Annotated[str, AfterValidator(_folder_or_url)] | None = Field(
        default=None, description="a folder, or a URL that fsspec knows"
    )
    quarantine_max_items: Count = 10_000
    quarantine_max_bytes: Count = 1024**3
    quarantine_max_days: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="days, more than 0")
    quarantine_audit_share: float = Field(default=0.0, ge=0, le=1, description="a number from 0 to 1")
    quarantine_queue: Count = 256
    quarantine_durable: Switch = False
    teach: str = _one_of(TEACH_CHOICES, "on")
    teach_auto_images: Count = 20
    teach_auto_classes: Count = 5

    @model_validator(mode="before")
    @classmethod
    def _read_key_files(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = dict(values)
        for one, other in (("api_key", "api_key_file"), ("admin_token", "admin_token_file"), ("bundle", "bundles")):
            if one in values and other in values:
                raise SettingsError(f"{variable(one)} and {variable(other)} are both set; allowed: only one of them")
            if other.endswith("_file") and other in values:
                try:
                    values[one] = _key(Path(values[other]).read_text().strip())
                except (OSError, ValueError) as error:
                    raise SettingsError(
                        f"{variable(other)} is {error}; allowed: a file that holds {KEY_RULE}"
                    ) from None
        return values

    @model_validator(mode="after")
    def _check_quarantine(self) -> Self:
        if self.quarantine_images is None and not (self.quarantine_url or SQLITE).startswith(SQLITE):
            url, images = variable("quarantine_url"), variable("quarantine_images")
            raise SettingsError(f"{url} is a server and {images} is not set; allowed: both, or SQLite")
        return self

    @property
    def swappable(self) -> bool:
        """Whether the bundle may be replaced while the server runs."""
        return self.bundles is not None or self.admin_token is not None

    @property
    def may_teach(self) -> bool:
        """Whether everything that teaching needs is set; the bundle may still be one that cannot be taught."""
        given = None not in (self.admin_token, self.quarantine_url, self.bundles)
        return given and self.teach != "off"

    @property
    def samples_folder(self) -> Path:
        """The images that the page offers; by default `samples` next to the bundle or on the shelf."""
        if self.samples is not None:
            return self.samples
        return (self.bundles or self.bundle.resolve().parent) / "samples"


class WorkerSettings(_Environment):
    """Variables that a server sets for its own worker processes."""

    group: AbsolutePath | None = Field(default=None, description="a folder")
    """The folder through which the workers agree on a bundle; see serving.swap.agreement."""
    supervisor: int | None = Field(default=None, description="a process id")
    """The process that starts and replaces the workers; see serving.host.supervisor."""


class BentoMLSettings(_Environment):
    """Variables of BentoML that the server reads, too. Address and port are checked like those of the command line."""

    model_config = SettingsConfigDict(env_prefix="BENTOML_")

    home: Path = Field(default_factory=lambda: Path.home() / "bentoml")
    """The folder that a server may write to."""
    host: str | None = None
    port: str = "3000"

    def address(self, api_key: str | None) -> str:
        """Where a server listens if no address is given: without a key, only programs on the same machine reach it."""
        return self.host or (ALL if api_key else LOOPBACK)
