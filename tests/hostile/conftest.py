"""Attacks over the local jail, through the whole of the harness. What they leave is looked for when all are over."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.sandbox.local.sandbox import LocalSandbox
from farhand.sandbox.port import Sandbox
from leftovers import leftovers

from .attack import Attacker


@pytest.fixture
def attack(local: Sandbox, home: Path) -> Attacker:
    return Attacker(local, home)


@pytest.fixture
def own_home(home: Path) -> Iterator[Path]:
    """A home with a record and a host of its own, which borrows built environments. Nothing may be left of it."""
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="fh-", dir=place if len(place) <= 40 else "/tmp") as name:
        folder = Path(name)
        (folder / "environments").symlink_to(home / "environments")
        yield folder
        asyncio.run(LocalSandbox(folder).stop(force=True))
        assert leftovers(folder) == []
