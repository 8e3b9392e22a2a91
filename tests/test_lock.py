"""The lock file that proves a driver alive, and the one thing that proves it gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farhand.errors import StoreError
from farhand.limits import LOCK_FILE_KEPT_S
from farhand.store.lock import LockFile, Owner, is_free, sweep

OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from farhand.store.lock import Owner
owner = Owner(Path(sys.argv[1]))
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        os.write(1, b"forked\\n")
        time.sleep(60)
        os._exit(0)
if sys.argv[2] == "spawn":
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid
    os.write(1, b"spawned\\n")
os.write(1, f"{owner.id} {child}\\n".encode())
sys.stdin.readline()
"""


@contextmanager
def another(folder: Path, how: str = "plain") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds an Owner; gives it and the owner's id. Its child, if it has one, ends with it."""
    command = [sys.executable, "-c", OWNER, str(folder), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(1 if how == "plain" else 2))
        owner, child = next(line for line in lines if line.startswith("own_")).split()
        try:
            yield process, owner
        finally:
            if child != "0":
                os.kill(int(child), signal.SIGKILL)
            process.kill()


def test_an_owner_is_gone_when_its_process_is_and_not_before(tmp_path: Path) -> None:
    with Owner(tmp_path) as me, another(tmp_path) as (process, owner):
        assert owner != me.id
        assert not me.gone(owner)
        process.send_signal(signal.SIGSTOP)
        assert not me.gone(owner)  # it may go on any time
        process.kill()
        process.wait()
        assert me.gone(owner)
        assert me.gone(owner)


def test_an_owner_does_not_find_itself_gone(tmp_path: Path) -> None:
    with Owner(tmp_path) as me, Owner(tmp_path) as other:
        assert not me.gone(me.id)
        assert not me.gone(other.id)
        other.close()
        assert me.gone(other.id)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_does_not_keep_its_parents_lock(tmp_path: Path, how: str) -> None:
    with Owner(tmp_path) as me, another(tmp_path, how) as (process, owner):
        assert not me.gone(owner)
        process.kill()
        process.wait()
        assert me.gone(owner)


def test_nothing_else_is_proof(tmp_path: Path) -> None:
    with Owner(tmp_path) as me, Owner(tmp_path) as other:
        other.close()
        assert me.gone(other.id)
        (tmp_path / f"{other.id}.lock").unlink()
        assert not me.gone(other.id)  # the file was removed, by whomever
        host, boot, rest = me.id.split(".", 2)
        elsewhere = f"{host}.{'0' * len(boot)}.{rest}"
        (tmp_path / f"{elsewhere}.lock").touch()
        assert is_free(tmp_path / f"{elsewhere}.lock")
        assert not me.gone(elsewhere)  # another machine, or another boot, may keep it in a way that is not seen here


@pytest.mark.parametrize("owner", ["", "own_a", "../../etc/passwd", "own_h.0.1.2.3", "own_\x00", "own_" + "a" * 500])
def test_a_name_that_is_none_of_ours_is_not_gone(tmp_path: Path, owner: str) -> None:
    with Owner(tmp_path) as me:
        assert not me.gone(owner)


def test_ids_are_readable_and_fit_a_claim(tmp_path: Path) -> None:
    with Owner(tmp_path) as me, Owner(tmp_path) as other:
        assert me.id != other.id
        assert f".{os.getpid()}." in me.id
        assert len(me.id) <= 200
        assert me.id.isascii()
        assert " " not in me.id


def test_the_file_is_never_seen_unlocked(tmp_path: Path) -> None:
    with Owner(tmp_path) as me:
        assert [path.name for path in tmp_path.iterdir()] == [f"{me.id}.lock"]
        assert not is_free(tmp_path / f"{me.id}.lock")


def test_stale_files_go_an_hour_after_they_were_first_seen_free(tmp_path: Path) -> None:
    with Owner(tmp_path) as me, Owner(tmp_path) as dead:
        dead.close()
        path, mine = tmp_path / f"{dead.id}.lock", tmp_path / f"{me.id}.lock"
        past = time.time() - LOCK_FILE_KEPT_S - 5
        for one in (path, mine):
            os.utime(one, (past, past))  # old, but nobody has seen it free yet
        sweep(tmp_path)
        assert me.gone(dead.id)
        sweep(tmp_path)
        assert path.exists()
        os.utime(path, (past, past))
        sweep(tmp_path)
        assert not path.exists()
        assert mine.exists()


def test_a_file_whose_maker_was_killed_at_once_goes_too(tmp_path: Path) -> None:
    fresh, old = tmp_path / ".own_fresh", tmp_path / ".own_old"
    fresh.touch()
    old.touch()
    os.utime(old, (0, 0))
    Owner(tmp_path).close()
    assert fresh.exists()
    assert not old.exists()


def test_a_folder_that_cannot_be_is_an_error_with_a_way_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError) as caught:
        Owner(tmp_path / "file" / "locks")
    assert "FARHAND_HOME" in caught.value.hint


def test_a_lock_file_keeps_others_out_until_it_is_unlocked_or_closed(tmp_path: Path) -> None:
    one, two = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert one.try_lock()
    assert not two.try_lock()
    one.unlock()
    assert two.try_lock()
    assert not one.try_lock()
    two.close()
    assert one.try_lock()
    one.close()
    one.close()
    one.unlock()
