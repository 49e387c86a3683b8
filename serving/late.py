"""Modules that others import, and that hardly any server uses: they are imported when something in them is needed."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


def import_late(name: str, *functions: str) -> None:
    """Let `import name` give a stand-in, which makes room for the module as soon as it is asked for anything.

    `functions` may be taken from it (`from name import function`) without that: to call one counts. So may modules of
    a package (`import name.part`).
    """
    if name in sys.modules:
        return
    stand_in = ModuleType(name)

    def load(attribute: str) -> Any:
        if attribute == "__path__" and (places := _places(name)) is not None:
            return places
        if attribute.startswith("__"):
            # Asked by the import system itself, of every module.
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
            parts = {key: part for key, part in vars(stand_in).items() if isinstance(part, ModuleType)}
            vars(importlib.import_module(name)).update(parts)
        return getattr(importlib.import_module(name), attribute)

    def call(function: str, *arguments: Any, **named: Any) -> Any:
        return load(function)(*arguments, **named)

    stand_in.__dict__.update({function: partial(call, function) for function in functions})
    # Called for what is not found in the module itself (PEP 562).
    stand_in.__dict__["__getattr__"] = load
    sys.modules[name] = stand_in


def _places(name: str) -> list[str] | None:
    """Where the parts of a package lie; looked for only when one is wanted, as that imports the package around it."""
    around = name.rpartition(".")[0]
    spec = PathFinder.find_spec(name, importlib.import_module(around).__path__ if around else None)
    return None if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
