"""Files below a folder that somebody hostile may be changing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.sandbox.runner.workspace import DirectoryFiles


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DirectoryFiles]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield DirectoryFiles(fd)
    os.close(fd)


def test_writing_replaces_a_link_and_does_not_follow_it(files: DirectoryFiles, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside"
    outside.write_text("untouched")
    (tmp_path / "name").symlink_to(outside)
    files.write("name", 0, b"new", 0o777, True)
    assert outside.read_text() == "untouched"
    assert (tmp_path / "name").read_text() == "new"
    (tmp_path / "way").symlink_to(tmp_path.parent)
    with pytest.raises(OSError):
        files.write("way/outside", 0, b"new", 0o644, True)
    assert outside.read_text() == "untouched"


def test_set_user_id_is_not_kept(files: DirectoryFiles, tmp_path: Path) -> None:
    files.write("tool", 0, b"", 0o6755, True)
    assert (tmp_path / "tool").stat().st_mode & 0o7777 == 0o755


def test_names_that_are_not_utf8_are_left_out(files: DirectoryFiles, tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff\xfe", "w"):
        pass
    (batch,) = files.walk()
    assert batch.entries == []
    assert batch.left_out == [{"path": "\\udcff\\udcfe", "reason": "its name is not UTF-8"}]


def test_folders_that_go_too_deep_are_left_out(files: DirectoryFiles, tmp_path: Path) -> None:
    files.make_folder("/".join("d" * 100))
    os.makedirs(tmp_path / "/".join("d" * 100) / "d" / "d")
    batches = list(files.walk())
    assert sum(len(batch.entries) for batch in batches) == 100
    assert [left["reason"] for batch in batches for left in batch.left_out] == ["deeper than 100 folders"]
