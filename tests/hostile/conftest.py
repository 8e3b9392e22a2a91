"""Attacks over the local jail, through the whole of the harness. What they leave is looked for when all are over."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhand.sandbox.port import Sandbox

from .attack import Attacker


@pytest.fixture
def attack(local: Sandbox, home: Path) -> Attacker:
    return Attacker(local, home)
