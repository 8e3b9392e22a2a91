"""Which imports the model's code is told to use. This guides the model; protection comes from the wall alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from farhand.sandbox.environment import DEFAULT, DEFAULT_MODULES, Environment

_SHOWN = ("numpy", "pandas", "matplotlib", "PIL")


def allowed(environment: Environment, additional: Sequence[str] = ()) -> tuple[str, ...]:
    """Top-level names: the whole standard library, what the environment has, and the caller's own."""
    names = set(sys.stdlib_module_names) | {name.partition(".")[0] for name in additional}
    if set(DEFAULT.packages) <= set(environment.packages):
        names |= DEFAULT_MODULES
    return tuple(sorted(names))


def describe(environment: Environment, additional: Sequence[str] = ()) -> str:
    """The same for a model to read."""
    names = list(_SHOWN) if set(DEFAULT.packages) <= set(environment.packages) else []
    names += [name for name in additional if name not in names and name not in sys.stdlib_module_names]
    return "the standard library" + (f", {', '.join(names)}" if names else "") + "; nothing else"
