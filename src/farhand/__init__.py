"""Farhand: an agent harness that stays outside the sandbox.

The names below are imported when they are first used; `import farhand` alone loads nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own costs more to import than all that is here
if TYPE_CHECKING:
    from farhand.agent import CodeAgent as CodeAgent
    from farhand.agent import RunResult as RunResult
    from farhand.errors import FarhandError as FarhandError
    from farhand.errors import Interrupted as Interrupted
    from farhand.errors import LimitReached as LimitReached
    from farhand.errors import ModelError as ModelError
    from farhand.errors import OutcomeUnknown as OutcomeUnknown
    from farhand.errors import SandboxError as SandboxError
    from farhand.errors import StoreError as StoreError
    from farhand.errors import ToolError as ToolError
    from farhand.errors import ToolFailed as ToolFailed
    from farhand.errors import TurnFailed as TurnFailed
    from farhand.errors import UsageError as UsageError
    from farhand.event import Event as Event
    from farhand.limits import Limits as Limits
    from farhand.sandbox.environment import Environment as Environment
    from farhand.tool import Tool as Tool
    from farhand.tool import ToolContext as ToolContext
    from farhand.tool import tool as tool

_HOMES = {
    "agent": ("CodeAgent", "RunResult"),
    "errors": (
        "FarhandError",
        "Interrupted",
        "LimitReached",
        "ModelError",
        "OutcomeUnknown",
        "SandboxError",
        "StoreError",
        "ToolError",
        "ToolFailed",
        "TurnFailed",
        "UsageError",
    ),
    "event": ("Event",),
    "limits": ("Limits",),
    "sandbox.environment": ("Environment",),
    "tool": ("Tool", "ToolContext", "tool"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("farhand")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'farhand' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"farhand.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "__version__"})


class _Package(type(sys)):  # type: ignore[misc]
    """Importing the module farhand.tool sets the attribute `tool` of the package; the decorator keeps that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "tool" and isinstance(value, type(sys)):
            value = value.tool
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
