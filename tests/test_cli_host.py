from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farhand.sandbox.local.probe import probe

FARHAND = [sys.executable, "-m", "farhand.cli.main"]


@pytest.mark.jail
def test_a_host_in_the_foreground_is_the_only_one_and_ends_when_told_to(tmp_path: Path) -> None:
    missing = probe().missing
    if missing:
        pytest.skip(f"no jail can stand here: missing {missing[0].name}")
    (tmp_path / "environments").symlink_to(Path(os.environ["FARHAND_HOME"]) / "environments")
    environ = {**os.environ, "FARHAND_HOME": str(tmp_path), "OPENAI_API_KEY": "planted-secret"}
    with subprocess.Popen([*FARHAND, "host"], env=environ, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        assert first.stderr.readline() == "farhand host: ready\n"
        assert b"planted-secret" not in Path(f"/proc/{first.pid}/environ").read_bytes()
        second = subprocess.run([*FARHAND, "host"], env=environ, capture_output=True, text=True, timeout=60)
        assert (second.returncode, "another host" in second.stderr) == (1, True)
        done = subprocess.run(
            [*FARHAND, "exec", "-"], input="1 + 1", env=environ, capture_output=True, text=True, timeout=60
        )
        assert (done.stdout, done.stderr, done.returncode) == ("=> 2\n", "", 0)
        told = subprocess.run([*FARHAND, "host", "status"], env=environ, capture_output=True, text=True, timeout=60)
        assert told.stdout.startswith(f"host {first.pid}, up ")
        assert "boxes 0, attached 0, running an action 0" in told.stdout
        assert "boxes are made from process " in told.stdout
        told = subprocess.run(
            [*FARHAND, "host", "status", "--json"], env=environ, capture_output=True, text=True, timeout=60
        )
        assert json.loads(told.stdout)["pid"] == first.pid
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
    gone = subprocess.run([*FARHAND, "host", "status"], env=environ, capture_output=True, text=True, timeout=60)
    assert (gone.stdout, gone.returncode, "no host runs" in gone.stderr) == ("", 1, True)


@pytest.mark.jail
def test_a_host_is_stopped_by_a_word(tmp_path: Path) -> None:
    missing = probe().missing
    if missing:
        pytest.skip(f"no jail can stand here: missing {missing[0].name}")
    environ = {**os.environ, "FARHAND_HOME": str(tmp_path)}
    with subprocess.Popen([*FARHAND, "host", "run"], env=environ, stderr=subprocess.PIPE, text=True) as host:
        assert host.stderr is not None
        assert host.stderr.readline() == "farhand host: ready\n"
        told = subprocess.run([*FARHAND, "host", "stop"], env=environ, capture_output=True, text=True, timeout=60)
        assert (told.returncode, told.stdout, told.stderr) == (0, "", "the host has ended\n")
        assert host.wait(60) == 0
