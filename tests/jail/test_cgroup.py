"""Control groups around a box, where this machine lets us make them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farhand.sandbox.local.cgroup import Cgroups

from .conftest import Jail

pytestmark = pytest.mark.jail


def groups_of(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/farhand-{pid}-*/"))


def test_a_box_in_a_group(jail: Jail) -> None:
    found = jail.do("grouped", zygote=jail.zygote["zygote"], memory_bytes=256 << 20, disk_bytes=32 << 20)
    if found is None:
        # The watcher is the bound then; `test_memory_of_many_children` holds it.
        assert jail.do("probe")["walls"]["memory group"][0] is False
        return
    assert found["eval"] == {"result": 20 << 20}
    if "memory" in found["controllers"]:
        assert found["after"] - found["before"] > 15 << 20
        assert found["oom_kills"] == 0
    if "freezer" in found["controllers"]:
        assert found["frozen"] is True
        assert found["thawed"] == {"result": 2}
    assert found["cpu_s"] is None or found["cpu_s"] > 0
    assert found["removed"] is True
    assert groups_of(jail.host) == []


def test_looking_leaves_nothing_behind() -> None:
    assert isinstance(Cgroups.usable(), frozenset)
    assert groups_of(os.getpid()) == []


def test_groups_of_a_host_that_was_killed_are_swept() -> None:
    groups = Cgroups.open()
    if groups is None:
        assert not Cgroups.usable()
        return
    assert groups._hierarchies
    stale = [hierarchy.folder.parent / "farhand-4194303-1" for hierarchy in groups._hierarchies]
    for folder in stale:
        (folder / "box").mkdir(parents=True)
    again = Cgroups.open()
    assert again is not None
    assert not any(folder.exists() for folder in stale)
    groups.close()
    again.close()
    assert not any(hierarchy.folder.exists() for hierarchy in groups._hierarchies)
