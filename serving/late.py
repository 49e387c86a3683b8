"""Modules that others import, and that hardly any server uses: they are imported when something in them is needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
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
    if (spec := importlib.util.find_spec(name)) and spec.submodule_search_locations is not None:
        stand_in.__path__ = list(spec.submodule_search_locations)

    def load(attribute: str) -> Any:
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
