"""Builds the distribution openworld-client: the client of the server under a separate name.

Its modules are those of `serving` that describe requests and responses. They are copied when the distribution is built,
with the names of the package in their imports, so that there is one source for both. A source distribution has the
copies, because the server is not beside it.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "openworld_client"
CHECKOUT = HERE.parent
MODULES = {
    "serving.client": "client",
    "serving.teaching.client": "teaching",
    "serving.teaching.calls": "teaching_calls",
    "serving.teaching.api.schemas": "teaching_schemas",
    "serving.quarantine.api.schemas": "quarantine_schemas",
    "serving.quarantine.records": "quarantine_records",
    "serving.http.schemas": "schemas",
    "serving.errors": "errors",
    "serving.pictures": "pictures",
    "serving.bundle.errors": "bundle_errors",
    "serving.bundle.run_verdict": "run_verdict",
    "serving.telemetry.logs": "times",
}
"""Module of the server -> module of the package."""
INIT = '''"""A typed client for servers of openworld."""

from openworld_client.client import AsyncClient, Client, Picture, PredictOptions, Retries, ServiceError
from openworld_client.schemas import Answer, DriftReport, ModelDescription

__version__ = {version!r}
__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "DriftReport",
    "ModelDescription",
    "Picture",
    "PredictOptions",
    "Retries",
    "ServiceError",
]
'''
_FROM_PARENT = re.compile(r"^from (serving[\w.]*) import (\w+)$", re.MULTILINE)
_IMPORT = re.compile(r"^(\s*)from (serving[\w.]*) import ", re.MULTILINE)


def renamed(text: str, source: Path) -> str:
    """The text of a module with the imports of the package; an import of anything else of the server is an error."""

    def of_parent(found: re.Match[str]) -> str:
        parent, name = found.groups()
        module = MODULES.get(f"{parent}.{name}")
        return found[0] if module is None else f"from openworld_client import {module} as {name}"

    def of_module(found: re.Match[str]) -> str:
        module = MODULES.get(found[2])
        if module is None:
            raise SystemExit(f"{source} imports {found[2]}, which is not part of the client: add it to {__file__}")
        return f"{found[1]}from openworld_client.{module} import "

    return _IMPORT.sub(of_module, _FROM_PARENT.sub(of_parent, text))


def copy_modules(version: str) -> None:
    shutil.rmtree(PACKAGE, ignore_errors=True)
    PACKAGE.mkdir()
    for module, name in MODULES.items():
        source = CHECKOUT.joinpath(*module.split(".")).with_suffix(".py")
        (PACKAGE / f"{name}.py").write_text(renamed(source.read_text(encoding="utf-8"), source), encoding="utf-8")
    (PACKAGE / "__init__.py").write_text(INIT.format(version=version), encoding="utf-8")
    (PACKAGE / "py.typed").touch()


def prepared_version() -> str:
    """Copy the modules, in a checkout; the version of the distribution."""
    settings = CHECKOUT / "pyproject.toml"
    if (CHECKOUT / "serving" / "client.py").is_file() and settings.is_file():
        version = str(tomllib.loads(settings.read_text(encoding="utf-8"))["project"]["version"])
        copy_modules(version)
        return version
    found = re.search(r"^__version__ = '(.+)'$", (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{PACKAGE}: no version; build it in a checkout of openworld")
    return found[1]


setup(version=prepared_version())
