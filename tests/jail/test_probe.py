"""The doctor's trial of each wall, and what it says of one that is missing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from farhand.errors import SandboxUnavailable
from farhand.sandbox.local import probe as probing

from .conftest import Jail

pytestmark = pytest.mark.jail


def test_every_wall_stands_here(jail: Jail) -> None:
    report = jail.do("probe")
    assert report["missing"] == []
    assert report["privileged"] is (jail.identity == "root")
    assert report["walls"]["proc"] == [True, "pid"]
    assert set(report["walls"]) == {*probing._NEEDED, *probing._WELCOME}


@pytest.mark.timing
def test_it_is_fast() -> None:
    took = []
    for _ in range(5):
        start = time.perf_counter()
        probing.probe()
        took.append(time.perf_counter() - start)
    assert sorted(took)[2] < 0.15


def test_a_missing_wall_is_named_with_its_reason() -> None:
    report = probing.probe()
    walls = [
        replace(wall, stands=False, detail="user namespace: unshare: Operation not permitted", hint="As root: …")
        if wall.name == "user namespace"
        else wall
        for wall in report.walls
    ]
    broken = replace(report, walls=tuple(walls))
    with pytest.raises(SandboxUnavailable, match="missing user namespace .*not permitted") as caught:
        broken.require()
    assert caught.value.hint
    report.require()
