from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from farhand.cli.doctor import jail
from farhand.cli.main import cli
from farhand.sandbox.local.probe import Report, Wall
from pseudo_terminal import PseudoTerminal


def invoke(home: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["doctor", *arguments], env={"FARHAND_HOME": str(home), **environ})
    return result.exit_code, result.stdout, result.stderr


def report(*missing: str, privileged: bool = True) -> Report:
    names = ("seccomp", "memory group")
    walls = [Wall(name, "why", name == "seccomp", name not in missing, "detail", "a hint") for name in names]
    return Report(tuple(walls), "6.1", privileged)


def test_a_jail_that_stands_still_says_what_it_does_not_protect_against() -> None:
    found = jail(report())
    assert found.stands
    assert any("kernel" in text for text in found.open_to)
    assert not any("control groups" in text or "your user" in text for text in found.open_to)


def test_as_a_user_and_without_groups_more_is_open() -> None:
    found = jail(report("memory group", privileged=False))
    assert found.stands
    assert any("control groups" in text for text in found.open_to)
    assert any("is your user" in text for text in found.open_to)


def test_a_missing_wall_is_named() -> None:
    found = jail(report("seccomp"))
    assert not found.stands
    assert found.detail == "missing seccomp: detail"


def test_doctor_speaks_of_every_part(tmp_path: Path) -> None:
    code, out, err = invoke(tmp_path)
    assert (code in (0, 1), err) == (True, "")
    for expected in (
        "sandbox local",
        "sandbox subprocess",
        "does not protect against",
        "environment:",
        "model:",
        "record:",
    ):
        assert expected in out
    assert "0 sessions" in out
    assert "farhand setup environment" in out


def test_doctor_fits_the_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "farhand", "doctor"]
    with PseudoTerminal(command, columns=80, environ={"FARHAND_HOME": str(tmp_path)}) as terminal:
        terminal.finish()
    lines = terminal.text.splitlines()
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    first = next(n for n, line in enumerate(lines) if line.startswith("    ✓ ") and len(line) > 60)
    assert lines[first + 1].startswith("    "), "what goes on is not further left than where it began"


def test_doctor_as_json(tmp_path: Path) -> None:
    code, out, _ = invoke(tmp_path, "--json", FARHAND_MODEL="openai:some")
    found = json.loads(out)
    assert found["well"] is (code == 0)
    assert [provider["name"] for provider in found["sandboxes"]] == ["local", "subprocess"]
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["model"]["detail"] == "openai:some"
    assert not parts["environment"]["well"]


def test_a_record_that_cannot_be_read_makes_it_fail(tmp_path: Path) -> None:
    (tmp_path / "farhand.db").write_bytes(b"this is no database" * 100)
    code, out, err = invoke(tmp_path)
    assert (code, err) == (1, "")
    assert "✗ record:" in out


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_knows_itself(option: str) -> None:
    result = CliRunner().invoke(cli, [option])
    assert result.exit_code == 0
    assert "farhand" in result.output.lower()
