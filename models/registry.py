"""Named implementations of an extension point: backbones, mask mechanisms, unknown scores."""

import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import Any


class Registry(UserDict[str, Any]):
    """Maps names to classes or functions, in the order of registration.

    An entry is the class or function itself, or "module:attribute", which is imported when it is first used. Built-in
    entries are written in the second way, so that a command can list the allowed names without importing torch.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        super().__init__(entries)

    def check(self, name: str) -> None:
        """Raise a ValueError that lists the allowed names, unless `name` is one of them."""
        if name not in self:
            raise ValueError(f"{self._kind} is {name!r}; allowed: {', '.join(self)}")

    def __getitem__(self, name: str) -> Any:
        entry = self.data[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self.data[name] = getattr(importlib.import_module(module), attribute)
        return entry

    def __setitem__(self, name: str, entry: Any) -> None:
        if not name.isidentifier():
            # Names become parts of tensor names in checkpoints and of node names in graphs.
            raise ValueError(f"{self._kind} name is {name!r}; allowed: letters, digits and _, such as my_{self._kind}")
        super().__setitem__(name, entry)
