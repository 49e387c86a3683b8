"""Modules that others import, and that hardly any server uses: they are imported when something in them is needed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def import_late(name: str) -> None:
    """Let `import name` give a stand-in, which makes room for the module as soon as it is asked for anything."""
    if name in sys.modules:
        return
    stand_in = ModuleType(name)

    def load(attribute: str) -> Any:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    # Called for what is not found in the module itself (PEP 562).
    stand_in.__dict__["__getattr__"] = load
    sys.modules[name] = stand_in
