"""Names of adapters, imported when they are asked for. The only module of the core that knows them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

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


def check_model(name: str) -> tuple[str, str, str]:
    """Provider, model and base URL of a name `provider:model@url`. UsageError says what is wrong with it."""
    provider, colon, rest = name.partition(":")
    which, at, url = rest.rpartition("@") if "@" in rest else (rest, "", "")
    if provider == "local" and not colon:
        return "local", "", ""
    if provider not in ("local", "openai"):
        meant = f" Did you mean openai:{name}?" if not colon and name else ""
        raise UsageError(f"no model is called {name!r}.{meant}", hint=MODEL_WAYS)
    if provider == "local":
        raise UsageError("`local` is one model and takes no name", hint=MODEL_WAYS)
    if not which:
        raise UsageError(f"{name!r} names no model", hint=MODEL_WAYS)
    if at:
        _check_url(url, repr(url))
    elif os.environ.get("OPENAI_BASE_URL"):
        _check_url(os.environ["OPENAI_BASE_URL"], f"OPENAI_BASE_URL {os.environ['OPENAI_BASE_URL']!r}")
    return provider, which, url


def _check_url(url: str, shown: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, an address with one bracket
        fits = False
    if not fits:
        raise UsageError(f"{shown} is no URL of a server", hint="It looks like http://127.0.0.1:8080/v1.")


def model(name: str, home: Path) -> Model:
    """The model `provider:name`; for `openai` a base URL may follow after `@`."""
    provider, which, url = check_model(name)
    if provider == "local":
        from farhand.model.local import LocalModel

        return LocalModel(home)
    from farhand.model.openai import OpenAIModel

    return OpenAIModel(which, base_url=url or os.environ.get("OPENAI_BASE_URL") or None)


def check_sandbox(name: str) -> None:
    """UsageError when no provider of boxes has this name."""
    if name not in SANDBOXES:
        raise UsageError(f"no sandbox is called {name!r}", hint=f"There are: {', '.join(SANDBOXES)}.")


def sandbox(name: str, home: Path, progress: Callable[[str], None] = lambda line: None) -> Sandbox:
    """The provider of boxes called `name`. `progress` is told of environments being built."""
    check_sandbox(name)
    if name == "local":
        from farhand.sandbox.local.sandbox import LocalSandbox

        return LocalSandbox(home, progress=progress)
    from farhand.sandbox.subprocess import SubprocessSandbox

    return SubprocessSandbox(home, progress)


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
