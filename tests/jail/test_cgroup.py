"""Control groups around a box, where this machine lets us make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhand.sandbox.local.cgroup import Cgroups

from .conftest import Jail

pytestmark = pytest.mark.jail


def left_behind() -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob("**/farhand-*") if path.is_dir()]


def test_a_box_in_a_group(jail: Jail) -> None:
    before = set(left_behind())
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
    assert set(left_behind()) == before


def test_looking_leaves_nothing_behind() -> None:
    before = set(left_behind())
    assert isinstance(Cgroups.usable(), frozenset)
    assert set(left_behind()) == before


def test_groups_of_a_host_that_was_killed_are_swept() -> None:
    groups = Cgroups.open()
    if groups is None:
        assert not Cgroups.usable()
        return
    stale = [hierarchy.folder.parent / "farhand-4194303-1" for hierarchy in groups._hierarchies]
    for folder in stale:
        (folder / "box").mkdir(parents=True)
    again = Cgroups.open()
    assert again is not None
    assert not any(folder.exists() for folder in stale)
    groups.close()
    again.close()
    assert not any(hierarchy.folder.exists() for hierarchy in groups._hierarchies)
