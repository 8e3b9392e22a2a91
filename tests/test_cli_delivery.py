from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from farhand.cli.delivery import FILES_MOST, deliver
from farhand.cli.display import Displays


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "session"
    (folder / "data").mkdir(parents=True)
    (folder / "plot.png").write_bytes(b"png")
    (folder / "data" / "out.csv").write_bytes(b"csv")
    (folder / "plot.png").chmod(0o755)
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def test_new_files_come_and_are_named(source: Path, here: Path) -> None:
    went = deliver(["plot.png", "data/out.csv"], source, here)
    assert [one.text() for one in went] == ["→ ./plot.png", "→ ./data/out.csv"]
    assert (here / "plot.png").read_bytes() == b"png"
    assert (here / "data" / "out.csv").read_bytes() == b"csv"
    assert not stat.S_IMODE((here / "plot.png").stat().st_mode) & 0o111


def test_nothing_is_overwritten(source: Path, here: Path) -> None:
    (here / "plot.png").write_bytes(b"mine")
    (here / "data").write_bytes(b"mine too")
    went = deliver(["plot.png", "data/out.csv"], source, here)
    assert [one.target for one in went] == [None, None]
    assert "is here already" in went[0].reason
    assert (here / "plot.png").read_bytes() == b"mine"
    assert (here / "data").read_bytes() == b"mine too"


@pytest.mark.parametrize(
    "path",
    ["../out", "/etc/x", "a/../../x", ".bashrc", ".git/hooks/x", "a/.env", "a\nb", "a\x1b]0;x", "a\u202eb", "", "a\0"],
)
def test_paths_that_a_box_must_not_choose(path: str, source: Path, here: Path) -> None:
    (one,) = deliver([path], source, here)
    assert one.target is None
    assert one.reason
    assert list(here.iterdir()) == []


def test_no_symbolic_link_is_followed(source: Path, here: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (here / "data").symlink_to(outside)
    (here / "dangling").symlink_to(outside / "new")
    (source / "dangling").write_bytes(b"x")
    (source / "link").symlink_to("/etc/hostname")
    went = deliver(["data/out.csv", "dangling", "link"], source, here)
    assert [one.target for one in went] == [None, None, None]
    assert list(outside.iterdir()) == []
    assert not os.path.lexists(here / "link")


def test_what_is_no_regular_file_stays(source: Path, here: Path) -> None:
    os.mkfifo(source / "pipe")
    (one,) = deliver(["pipe"], source, here)
    assert one.text() == "not copied: it is no regular file"
    assert list(here.iterdir()) == []


def test_a_missing_file_is_said_to_be_missing(source: Path, here: Path) -> None:
    (one,) = deliver(["none"], source, here)
    assert one.target is None


def test_very_many_files_are_left_where_they_are(source: Path, here: Path) -> None:
    went = deliver([f"f{n}" for n in range(FILES_MOST + 1)], source, here)
    assert {one.reason for one in went} == {f"more than {FILES_MOST} files"}


def test_displays_are_kept_by_number(tmp_path: Path) -> None:
    displays = Displays(tmp_path / "displays")
    path = displays.keep("png", 2, b"one")
    assert path == tmp_path / "displays" / "figure-2.png"
    assert displays.keep("png", 2, b"two") == path
    assert path is not None
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["figure-2.png"]


def test_a_display_that_cannot_be_kept_is_none(tmp_path: Path) -> None:
    (tmp_path / "displays").write_text("in the way")
    assert Displays(tmp_path / "displays").keep("png", 1, b"") is None
