"""`--tools FILE.py`: a file of the person's own, run here in the harness, whose functions become tools."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from farhand.errors import UsageError
from farhand.tool import Tool, collect

MODULE = "farhand_tools_file"


def load_tools(name: str | None) -> list[Tool]:
    """The tools of a file: its `TOOLS` and the functions marked @tool. It may import from its folder, like a script."""
    if name is None:
        return []
    path = Path(os.path.abspath(name))
    if not path.is_file():
        raise UsageError(f"--tools {name}: there is no such file")
    tools = collect(_execute(path, name))
    if not tools:
        raise UsageError(
            f"--tools {name}: it holds no tools", hint="Give it a dictionary TOOLS, or mark functions with @tool."
        )
    return tools


def _execute(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--tools {name}: it is no Python file", hint="Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and type hints look their module up by name.
    sys.modules[MODULE] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        told = "".join(traceback.format_exception(error, limit=-2)).strip()
        raise UsageError(f"--tools {name}: it could not be run:\n{told}") from error
    return module
