"""The contract of `Blobs` in `store/port.py` against every adapter, and what the folder's durability rests on."""

# Files are looked at and processes waited for right here: nothing else has to go on meanwhile.

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from farhand.errors import BlobMissing, StoreError, UsageError
from farhand.files import blobs as module
from farhand.files.blobs import DirectoryBlobs, MemoryBlobs
from farhand.limits import BLOB_TEMP_S
from farhand.store.port import Blobs

pytestmark = pytest.mark.anyio

MOST = 100_000


@pytest.fixture(params=["memory", "directory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return (
        MemoryBlobs(most_bytes=MOST) if request.param == "memory" else DirectoryBlobs(tmp_path / "b", most_bytes=MOST)
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "home" / "blobs"


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """Every flush, in order: what it was of, and the blobs that had their name at that moment."""
    seen: list[tuple[Path, list[str]]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        folder = next(one for one in (path, *path.parents) if one.name == "blobs" or one == one.parent)
        seen.append((path, [file.name for file in folder.glob("??/*")] if folder.name == "blobs" else []))

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("data", [b"", b"x", b"\x00\xff\n" * 5000, b"x" * MOST])
async def test_what_was_put_comes_back_under_its_hash(blobs: Blobs, data: bytes) -> None:
    name = await blobs.put(data)
    assert name == hashlib.sha256(data).hexdigest()
    assert await blobs.get(name) == data
    assert await blobs.has(name)


async def test_putting_twice_is_putting_once(blobs: Blobs) -> None:
    assert await blobs.put(b"same") == await blobs.put(b"same")
    assert len(set(await asyncio.gather(*(blobs.put(b"many") for _ in range(20))))) == 1


@pytest.mark.parametrize(
    "name", ["0" * 64, "", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", "é" * 64, None]
)
async def test_what_was_never_put_is_missing(blobs: Blobs, name: str) -> None:
    await blobs.put(b"something else")
    with pytest.raises(BlobMissing):
        await blobs.get(name)
    assert not await blobs.has(name)


async def test_a_blob_is_bounded(blobs: Blobs) -> None:
    with pytest.raises(UsageError, match=str(MOST)):
        await blobs.put(b"x" * (MOST + 1))
    assert not await blobs.has(hashlib.sha256(b"x" * (MOST + 1)).hexdigest())


async def test_many_at_once(blobs: Blobs) -> None:
    contents = [bytes([number]) * 3000 for number in range(100)]
    names = await asyncio.gather(*(blobs.put(data) for data in contents))
    assert await asyncio.gather(*(blobs.get(name) for name in names)) == contents


# The folder.


async def test_a_blob_is_a_private_file_under_its_name_and_nothing_else_is_left(root: Path) -> None:
    name = await DirectoryBlobs(root).put(b"data")
    assert files(root) == [f"{name[:2]}/{name}"]
    assert (root / name[:2] / name).stat().st_mode & 0o777 == 0o600
    assert root.stat().st_mode & 0o777 == 0o700
    assert await DirectoryBlobs(root).get(name) == b"data"


async def test_the_content_is_flushed_before_it_has_its_name_and_the_folders_after(
    root: Path, flushed: list[tuple[Path, list[str]]]
) -> None:
    name = await DirectoryBlobs(root).put(b"data")
    paths = [path for path, _ in flushed]
    assert paths[:2] == [root.parent, root.parent.parent]  # what leads to the new root
    content, folder, entry = flushed[2:]
    assert content[0].parent == root / "tmp"
    assert content[1] == []
    assert folder == (root / name[:2], [name])
    assert entry == (root, [name])


async def test_a_second_blob_of_a_folder_flushes_file_and_folder(
    root: Path, flushed: list[tuple[Path, list[str]]]
) -> None:
    blobs = DirectoryBlobs(root)
    by_folder: dict[str, bytes] = {}
    for number in range(2000):
        data = str(number).encode()
        folder = hashlib.sha256(data).hexdigest()[:2]
        if folder in by_folder:
            break
        by_folder[folder] = data
    await blobs.put(by_folder[folder])
    flushed.clear()
    name = await blobs.put(data)
    assert [path.parent if path.parent.name == "tmp" else path for path, _ in flushed] == [
        root / "tmp",
        root / name[:2],
    ]


async def test_known_content_costs_no_flush(root: Path, flushed: list[tuple[Path, list[str]]]) -> None:
    blobs = DirectoryBlobs(root)
    name = await blobs.put(b"data")
    flushed.clear()
    assert await blobs.put(b"data") == name
    assert flushed == []


async def test_content_that_another_process_put_there_is_flushed_again(
    root: Path, flushed: list[tuple[Path, list[str]]]
) -> None:
    name = await DirectoryBlobs(root).put(b"data")
    flushed.clear()
    await DirectoryBlobs(root).put(b"data")
    assert [path for path, _ in flushed] == [root.parent, root / name[:2] / name, root / name[:2], root]


async def test_content_removed_meanwhile_is_put_again(root: Path) -> None:
    blobs = DirectoryBlobs(root)
    name = await blobs.put(b"data")
    shutil.rmtree(root / name[:2])
    assert not await blobs.has(name)
    with pytest.raises(BlobMissing):
        await blobs.get(name)
    await blobs.put(b"data")
    assert await blobs.get(name) == b"data"


@pytest.mark.parametrize("damage", [b"", b"dat", b"dada", b"data and more"])
async def test_a_damaged_file_is_missing_until_it_is_put_again(root: Path, damage: bytes) -> None:
    name = await DirectoryBlobs(root).put(b"data")
    (root / name[:2] / name).write_bytes(damage)
    blobs = DirectoryBlobs(root)
    with pytest.raises(BlobMissing, match="damaged"):
        await blobs.get(name)
    await blobs.put(b"data")
    assert await blobs.get(name) == b"data"


async def test_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    blobs = DirectoryBlobs(root)
    name = await blobs.put(b"data")
    (tmp_path / "elsewhere").write_bytes(b"data")
    (root / name[:2] / name).unlink()
    (root / name[:2] / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        await blobs.get(name)


async def test_a_flush_that_fails_is_no_success(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = DirectoryBlobs(root)
    await blobs.put(b"first")

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module, "fsync", broken)
        with pytest.raises(StoreError, match="Input/output"):
            await blobs.put(b"data")
    assert len(files(root)) == 1  # no temporary file is left
    name = await blobs.put(b"data")
    assert await blobs.get(name) == b"data"


async def test_unfinished_files_of_the_dead_are_swept_and_those_being_written_are_not(root: Path) -> None:
    (root / "tmp").mkdir(parents=True)
    old, young, held = (root / "tmp" / name for name in ("old", "young", "held"))
    for path in (old, young, held):
        path.write_bytes(b"half")
    past = time.time() - BLOB_TEMP_S - 5
    os.utime(old, (past, past))
    os.utime(held, (past, past))
    program = (
        "import fcntl, os, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        await DirectoryBlobs(root).put(b"data")
        assert sorted(path.name for path in (root / "tmp").iterdir()) == ["held", "young"]
        writer.communicate(b"\n")


KILLED = """
import asyncio, os, sys
from farhand.files.blobs import DirectoryBlobs
async def main():
    blobs = DirectoryBlobs(sys.argv[1])
    number = 0
    while True:
        name = await blobs.put(b"%d " % number * 20_000)
        os.write(1, f"{name}\\n".encode())
        number += 1
asyncio.run(main())
"""


async def test_kill_9_loses_no_blob_and_leaves_none_half_written(root: Path) -> None:
    for round_ in range(4):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            names = [writer.stdout.readline().strip() for _ in range(3 + round_ * 5)]
            writer.kill()
            names += writer.stdout.read().split()
        blobs = DirectoryBlobs(root)
        for name in names:
            await blobs.get(name)
        for path in root.glob("??/*"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


FULL = """
import asyncio, os, sys
from farhand.errors import StoreError
from farhand.files.blobs import DirectoryBlobs
async def main():
    blobs = DirectoryBlobs(sys.argv[1])
    kept = [await blobs.put(b"small")]
    try:
        for number in range(100):
            kept.append(await blobs.put(bytes([number]) * 200_000))
    except StoreError as error:
        print("full", "space" in error.message, bool(error.hint))
    print("kept", [len(await blobs.get(name)) for name in kept] == [5] + [200_000] * (len(kept) - 1))
    print("tidy", os.listdir(sys.argv[1] + "/tmp") == [])
asyncio.run(main())
"""


async def test_a_full_disk_says_so_and_leaves_no_half_file(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system of a chosen size can be mounted here: {probe.stderr.strip()}")
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" -c "$1" {tmp_path}/blobs', sys.executable, FULL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.splitlines() == ["full True True", "kept True", "tidy True"], ended.stderr
