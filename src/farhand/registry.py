"""Names of adapters, imported when they are asked for. The only module of the core that knows them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farhand.errors import UsageError

if TYPE_CHECKING:
    from farhand.model.port import Model
    from farhand.sandbox.port import Sandbox
    from farhand.store.lock import Owner
    from farhand.store.port import Blobs, Store

SANDBOXES = ("local", "subprocess")
MODEL_WAYS = """\
Ways to choose one:
  --model PROVIDER:NAME     openai:gpt-5, openai:NAME@http://127.0.0.1:8080/v1, local
  FARHAND_MODEL=…           the same, in the environment
  OPENAI_API_KEY=…          (with OPENAI_BASE_URL for another server of that wire)
  farhand setup local       a very small model that runs here, without any key"""
DEFAULT_OPENAI_MODEL = "gpt-5-mini"
_owners: dict[tuple[int, Path], Owner] = {}
"""One for each home folder, for the life of the process."""


def choose_model(flag: str | None, environ: Mapping[str, str], home: Path) -> str:
    """The name of the model to use: flag, FARHAND_MODEL, a key in the environment, local. UsageError shows the ways."""
    if flag:
        return flag
    if environ.get("FARHAND_MODEL"):
        return environ["FARHAND_MODEL"]
    if environ.get("OPENAI_API_KEY"):
        return f"openai:{environ.get('OPENAI_MODEL') or DEFAULT_OPENAI_MODEL}"
    from farhand.model import local

    if local.ready(home):
        return "local"
    raise UsageError("no model is chosen, and no key is in the environment", hint=MODEL_WAYS)


def model(name: str, home: Path) -> Model:
    """The model `provider:name`; for `openai` a base URL may follow after `@`."""
    provider, _, rest = name.partition(":")
    if provider == "local":
        from farhand.model.local import LocalModel

        return LocalModel(home)
    if provider == "openai" and rest:
        from farhand.model.openai import OpenAIModel

        which, _, url = rest.partition("@")
        return OpenAIModel(which, base_url=url or os.environ.get("OPENAI_BASE_URL") or None)
    raise UsageError(f"no model is called {name!r}", hint=MODEL_WAYS)


def sandbox(name: str, home: Path, progress: Callable[[str], None] = lambda line: None) -> Sandbox:
    """The provider of boxes called `name`. `progress` is told of environments being built."""
    if name == "local":
        from farhand.sandbox.local.sandbox import LocalSandbox

        return LocalSandbox(home, progress=progress)
    if name == "subprocess":
        from farhand.sandbox.subprocess import SubprocessSandbox

        return SubprocessSandbox(home, progress)
    raise UsageError(f"no sandbox is called {name!r}", hint=f"There are: {', '.join(SANDBOXES)}.")


def store(home: Path) -> Store:
    """The record of this home folder."""
    from farhand.store.sqlite import SqliteStore

    return SqliteStore(home / "farhand.db")


def blobs(home: Path) -> Blobs:
    from farhand.files.blobs import DirectoryBlobs

    return DirectoryBlobs(home / "blobs")


def owner(home: Path) -> tuple[str, Callable[[str], bool]]:
    """This process's id as a driver, and the test whether another's process is provably gone."""
    from farhand.store.lock import Owner

    folder = home / "locks"
    key = (os.getpid(), folder)
    if key not in _owners:
        _owners[key] = Owner(folder)
    return _owners[key].id, _owners[key].gone
