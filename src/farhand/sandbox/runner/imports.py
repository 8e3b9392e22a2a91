"""Imports of guest code."""

from __future__ import annotations

import builtins
import os
from importlib.machinery import PathFinder
from typing import Any


class Imports:
    """`__import__` for guest code: names that are not listed raise ImportError. It guides; the wall protects."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.folder = os.getcwd()
        self._original = builtins.__import__
        self._known: dict[str, bool] = {}

    def allow(self, names: list[str] | None) -> None:
        self._known.clear()
        if names is None or "*" in names:
            self.allowed = None
        else:
            self.allowed = tuple(sorted({name[:-2] if name.endswith(".*") else name for name in names}))

    def __call__(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if self.allowed is not None and level == 0 and globals is not None and globals.get("__name__") == "__main__":
            self._check(name, fromlist)
        return self._original(name, globals, locals, fromlist, level)

    def _check(self, name: str, fromlist: Any) -> None:
        if self._listed(name) or self._local(name):
            return
        if fromlist and all(self._listed(f"{name}.{part}") for part in fromlist):
            return
        assert self.allowed is not None
        some = ", ".join(self.allowed[:60]) + (f" and {len(self.allowed) - 60} more" if len(self.allowed) > 60 else "")
        raise ImportError(
            f"import of {name!r} is not authorized here; authorized are: {some or 'none'}. "
            f"Do without it, or ask the user to add it: additional_authorized_imports=[{name.split('.')[0]!r}]",
            name=name,
        )

    def _listed(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            parts = name.split(".")
            known = any(
                ".".join(parts[:end]) in ("__future__", "__main__", *(self.allowed or ()))
                for end in range(1, len(parts) + 1)
            )
            if len(self._known) < 10_000:
                self._known[name] = known
        return known

    def _local(self, name: str) -> bool:
        try:
            return PathFinder.find_spec(name.split(".")[0], [self.folder]) is not None
        except (ImportError, ValueError, OSError):
            return False
