"""Files of a box on our side and back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from driving import SMALL, act, changed, opened
from farhand.files.copy import collect, restore
from farhand.sandbox.hand import Hand
from farhand.sandbox.port import Sandbox

pytestmark = pytest.mark.anyio


@pytest.fixture
async def hand(sandbox: Sandbox) -> AsyncIterator[Hand]:
    async with opened(sandbox) as hand:
        yield hand


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_what_changed_is_copied_and_what_went_is_removed(hand: Hand, tmp_path: Path) -> None:
    await act(hand, "import os\nos.makedirs('a/b')\nopen('a/b/one', 'w').write('1')\nopen('two', 'w').write('2')")
    first = await collect(hand, tmp_path, {}, SMALL)
    assert tree(tmp_path) == {"a/b/one": b"1", "two": b"2"}
    assert sorted(first.changed) == ["a/b/one", "two"]
    assert first.entries[0].keys() == {"path", "size", "sha256"}
    assert {"path": "two", "size": 1, "sha256": hashlib.sha256(b"2").hexdigest()} in first.entries
    again = await collect(hand, tmp_path, first.manifest, SMALL)
    assert (again.changed, again.removed, again.manifest) == ([], [], first.manifest)
    await act(hand, "import shutil\nshutil.rmtree('a')\nopen('two', 'a').write('!')\nopen('three', 'w')")
    last = await collect(hand, tmp_path, again.manifest, SMALL)
    assert sorted(last.changed) == ["three", "two"]
    assert sorted(last.removed) == ["a", "a/b", "a/b/one"]
    assert tree(tmp_path) == {"two": b"2!", "three": b""}
    assert not (tmp_path / "a").exists()


async def test_a_file_becomes_a_folder_and_a_folder_a_file(hand: Hand, tmp_path: Path) -> None:
    await act(hand, "import os\nopen('x', 'w').write('1')\nos.makedirs('y/z')\nopen('y/z/f', 'w').write('2')")
    known = (await collect(hand, tmp_path, {}, SMALL)).manifest
    await act(
        hand,
        "import os, shutil\nos.remove('x')\nos.mkdir('x')\nopen('x/in', 'w')\n"
        "shutil.rmtree('y')\nopen('y', 'w').write('3')",
    )
    await collect(hand, tmp_path, known, SMALL)
    assert tree(tmp_path) == {"x/in": b"", "y": b"3"}


async def test_links_fifos_and_odd_names_are_named_and_not_followed(hand: Hand, tmp_path: Path) -> None:
    code = """
import os, socket
os.symlink('/etc/passwd', 'link')
os.symlink('/', 'root')
os.mkfifo('fifo')
open('with\\nline', 'w')
open('esc\\x1b]52;c;x\\x07', 'w')
open(b'\\xff\\xfe', 'w')
open('good', 'w').write('1')
s = socket.socket(socket.AF_UNIX)
s.bind('sock')
"""
    outcome = await act(hand, code)
    assert outcome.ok, outcome.error
    got = await collect(hand, tmp_path, {}, SMALL)
    assert tree(tmp_path) == {"good": b"1"}
    assert len(got.left_out) == 7
    assert all(path.isprintable() for path, _ in got.left_out)


async def test_our_own_links_are_not_followed(hand: Hand, tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "f").write_text("untouched")
    (inside / "way").symlink_to(outside)
    (inside / "f").symlink_to(outside / "f")
    await act(hand, "import os\nos.mkdir('way')\nopen('way/f', 'w').write('new')\nopen('f', 'w').write('new')")
    await collect(hand, inside, {}, SMALL)
    assert (outside / "f").read_text() == "untouched"
    assert tree(inside) == {"way/f": b"new", "f": b"new"}


async def test_bounds_of_bytes_and_files(hand: Hand, tmp_path: Path) -> None:
    await act(hand, "for i in range(20): open(f'f{i:02}', 'w').write('x' * 1000)\nopen('big', 'w').write('x' * 50_000)")
    few = await collect(hand, tmp_path / "few", {}, changed(SMALL, disk_files=5))
    assert (len(few.entries), len(few.left_out)) == (5, 16)
    small = await collect(hand, tmp_path / "small", {}, changed(SMALL, disk_bytes=30_000))
    assert len(small.entries) == 20
    assert [path for path, _ in small.left_out] == ["big"]


async def test_modes_are_kept_but_not_set_user_id(hand: Hand, tmp_path: Path) -> None:
    await act(
        hand, "import os\nopen('run', 'w')\nos.chmod('run', 0o755)\nopen('locked', 'w')\nos.chmod('locked', 0o400)"
    )
    await collect(hand, tmp_path, {}, SMALL)
    assert os.stat(tmp_path / "run").st_mode & 0o7777 == 0o755
    assert os.stat(tmp_path / "locked").st_mode & 0o7777 == 0o600


async def test_a_new_box_starts_with_the_same_files(sandbox: Sandbox, tmp_path: Path) -> None:
    async with opened(sandbox) as hand:
        await act(hand, "import os\nos.makedirs('d')\nopen('d/f', 'wb').write(bytes(600_000))\nopen('e', 'w')")
        await collect(hand, tmp_path, {}, SMALL)
    (tmp_path / "link").symlink_to("/etc/passwd")
    async with opened(sandbox) as hand:
        manifest = await restore(hand, tmp_path)
        assert set(manifest) == {"d", "d/f", "e"}
        code = "import os\nos.path.getsize('d/f'), os.path.getsize('e'), os.path.exists('link')"
        assert (await act(hand, code)).text == "(600000, 0, False)"
        assert (await collect(hand, tmp_path, manifest, SMALL)).changed == []
        assert await restore(hand, tmp_path / "nothing") == {}
