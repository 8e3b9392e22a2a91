"""What lies in /workspace when its files are collected: nothing is followed, nothing is waited for, all is bounded."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from farhand import event as ev
from farhand.limits import MIB
from farhand.sandbox.environment import DEFAULT

from .attack import Attacker, Fallout, memory_grows_at_most

pytestmark = [pytest.mark.anyio, pytest.mark.jail, pytest.mark.hostile]

SECRET = "text of the machine that no box has seen"


def kept(fallout: Fallout, attack: Attacker) -> dict[str, Path]:
    """What lies in the session's folder on our side."""
    folder = attack.home / "sessions" / fallout.result.session_id / "files"
    return {str(path.relative_to(folder)): path for path in folder.rglob("*")}


def size_on_disk(attack: Attacker) -> int:
    """Bytes under the harness's home, without environments, models and the files of sessions."""
    size = 0
    for root, _, files in os.walk(attack.home):  # links are not followed
        for name in files:
            size += os.lstat(os.path.join(root, name)).st_blocks * 512
    return size


async def test_nothing_is_followed_and_nothing_is_waited_for(attack: Attacker, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text(SECRET)
    code = f"""
os.chdir("/workspace")
outside = {str(outside)!r}
open("plain", "w").write("kept")
os.symlink(outside, "link"); os.symlink("plain", "inside"); os.symlink("loop", "loop")
os.symlink(os.path.dirname(outside), "folder"); os.symlink("/proc/self/root", "root"); os.symlink("/proc/1/fd/0", "fd")
os.mkfifo("fifo"); os.mkfifo("also.txt")
listening = socket.socket(socket.AF_UNIX); listening.bind("socket"); listening.listen()
os.mkdir("deep"); os.symlink("..", "deep/up"); os.symlink("/etc", "deep/etc")
os.link("plain", "hard")
for name, kind in (("block", stat.S_IFBLK), ("character", stat.S_IFCHR)):
    try: os.mknod(name, kind | 0o666, os.makedev(1, 3))
    except OSError as error: print(name, error.errno)
open("closed", "w").write("x"); os.chmod("closed", 0)
os.mkdir("shut"); open("shut/x", "w").write("x"); os.chmod("shut", 0)
open("program", "w").write("#!/bin/sh"); os.chmod("program", 0o6777)
"""
    began = time.monotonic()
    fallout = await attack(code)
    assert time.monotonic() - began < 10
    found = kept(fallout, attack)
    assert {name for name, path in found.items() if path.is_file()} == {"plain", "hard", "program"}
    assert not any(path.is_symlink() for path in found.values())
    assert all(SECRET not in path.read_text() for path in found.values() if path.is_file())
    assert found["program"].stat().st_mode & 0o7000 == 0
    told = dict(fallout.first["left_out"])
    left_out = {
        "link",
        "inside",
        "loop",
        "folder",
        "root",
        "fd",
        "fifo",
        "also.txt",
        "socket",
        "closed",
        "shut",
        "deep/up",
    }
    assert left_out <= set(told)
    assert fallout.output.split() == ["block", "1", "character", "1"]


async def test_files_that_change_while_they_are_taken(attack: Attacker, tmp_path: Path) -> None:
    """Files become links, FIFOs, folders and other files for as long as the box runs."""
    outside = tmp_path / "secret"
    outside.write_text(SECRET)
    code = f"""
os.chdir("/workspace")
def turn():
    number = 0
    while True:
        number += 1
        try:
            for name in ("a", "b", "c/d"):
                kind = number % 5
                if kind == 0: os.symlink({str(outside)!r}, "new")
                elif kind == 1: os.mkfifo("new")
                elif kind == 2: os.mkdir("new")
                elif kind == 3: os.symlink({str(tmp_path)!r}, "new")
                else: open("new", "w").write("x" * number)
                try: os.rename("new", name)
                except OSError: os.rename(name, "old" + str(number)); os.rename("new", name)
        except OSError:
            for each in ("new", "a", "b", "c"):
                try: os.unlink(each)
                except OSError:
                    try: os.rmdir(each)
                    except OSError: pass
for _ in range(4):
    if os.fork() == 0: turn()
time.sleep(0.1)
"""
    fallout = await attack(code, "time.sleep(0.1)", "time.sleep(0.1)", disk_files=300)
    for path in kept(fallout, attack).values():
        assert not path.is_symlink()
        assert not path.is_file() or SECRET not in path.read_text()
        assert path.is_file() or path.is_dir()


async def test_names_that_nobody_wants(attack: Attacker) -> None:
    names = [
        "plain", "-rf", " ", "a\tb", "a\nb", "\x1b]52;c;aGk=\x07", "\x7f", "‮gpj.exe", "​", "é" * 100, "x" * 255,
        "con", "a\\b", "...", "$(id)", "\U000e0041", "<script>",
    ]  # fmt: skip
    code = f"""
os.chdir("/workspace")
for name in {names!r}: open(name, "w").write(name)
for name in (b"\\xff\\xfe", b"a\\x80b", b"\\xed\\xa0\\x80"):
    open(name, "w").write("x")
    os.mkdir(b"folder" + name); open(b"folder" + name + b"/inside", "w").write("x")
path = "."
for _ in range(300):
    path += "/" + "d" * 10
    os.mkdir(path)
"""
    fallout = await attack(code)
    found = kept(fallout, attack)
    assert {"plain", "-rf", "a\\b", "...", "$(id)", "<script>", "é" * 100, "x" * 255} <= set(found)
    assert all(name.isprintable() for name in found)
    told = [text for pair in fallout.first["left_out"] for text in pair]
    assert all(text.isprintable() or text in names for text in told), told
    assert any("is not UTF-8" in text for text in told)
    assert any("deeper than" in text for text in told)


async def test_sizes_that_are_not_there(attack: Attacker) -> None:
    """Sparse files and files with many names count with what would be copied."""
    code = """
os.chdir("/workspace")
for number in range(20): open(f"sparse{number}", "wb").truncate(15 << 20)
open("large", "wb").write(b"x" * (10 << 20))
for number in range(50): os.link("large", f"again{number}")
open("last", "w").write("x")
"""
    with memory_grows_at_most(48 * MIB):
        fallout = await attack(code, disk_bytes=16 * MIB)
    assert sum(path.stat().st_size for path in kept(fallout, attack).values() if path.is_file()) <= 16 * MIB
    assert any("disk_bytes" in reason for _, reason in fallout.first["left_out"])


async def test_a_file_that_grows_while_it_is_read(attack: Attacker) -> None:
    code = """
if os.fork() == 0:
    file = open("/workspace/growing", "wb", 0)
    while True:
        file.write(b"x" * 65536)
        if file.tell() > 12 << 20: file.truncate(0); file.seek(0)
"""
    fallout = await attack(code, "time.sleep(0.05)", disk_bytes=16 * MIB)
    assert sum(path.stat().st_size for path in kept(fallout, attack).values()) <= 16 * MIB


async def test_as_many_files_as_there_may_be(attack: Attacker) -> None:
    code = "for number in range(100_000): open(f'/workspace/{number}', 'w').close()"
    fallout = await attack(code, disk_files=500)
    assert fallout.error["limit"] == "disk_files"
    assert len(kept(fallout, attack)) <= 500
    links = "for number in range(10_000): os.symlink('x' * 4000, f'/workspace/{number}')"
    assert (await attack(links, disk_files=500)).error["limit"] == "disk_files"


IMAGES = """
from PIL import Image
number = 0
while True:
    Image.frombytes("RGB", (400, 400), os.urandom(480_000)).save(f"/workspace/{number}.png")
    number += 1
"""


@pytest.mark.parametrize(("limit", "bound"), [("disk_bytes", 24 * MIB), ("disk_files", 20)])
async def test_images_without_end(attack: Attacker, limit: str, bound: int) -> None:
    """With real Pillow. None of it is on the harness's disk beyond the bound."""
    bounds = {"disk_bytes": 64 * MIB, "disk_files": 1000, limit: bound}
    before = size_on_disk(attack)
    fallout = await attack(IMAGES, environment=DEFAULT, wall_s=60, memory_bytes=512 * MIB, **bounds)
    assert fallout.error["limit"] == limit
    assert limit in fallout.error["message"]
    assert limit in [event["limit"] for event in fallout.of(ev.LIMIT_REACHED)]
    assert len(kept(fallout, attack)) <= bounds["disk_files"]
    assert size_on_disk(attack) - before <= bounds["disk_bytes"] + MIB
