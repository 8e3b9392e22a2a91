"""The scripts that people run, from a checkout whose path has a space."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = (
    sorted(path.name for path in (ROOT / "scripts").iterdir() if not path.suffix) if (ROOT / "scripts").is_dir() else []
)
pytestmark = pytest.mark.skipif(not SCRIPTS, reason="this is no checkout: the scripts are not here")


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A copy of what setup reads, readable by everybody."""
    folder = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    folder.chmod(0o755)
    copy = folder / "a checkout"
    copy.mkdir()
    for name in ("scripts", "src"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    yield copy
    shutil.rmtree(folder)


@pytest.fixture
def ready(checkout: Path, home: Path) -> Path:
    """The checkout with this suite's virtual environment, as if setup had made it here."""
    venv = checkout / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    where = 'printf \'%s\\n\' "$PWD" "$(readlink -f .venv/bin/python)" "$(sha256sum <pyproject.toml)"'
    (venv / "stamp").write_text(subprocess.check_output(["bash", "-c", where], cwd=checkout, text=True))
    (venv / "fetched").write_text(f"{home}  {os.environ['HOME']}\n{home}\n{venv / 'stamp'}\n")
    return checkout


def run(command: list[str | Path], **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "FARHAND_HOME", "PYENV_ROOT") if name in os.environ}
    return subprocess.run(command, cwd="/", env=kept | environ, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", ["run", "farhand"])
def test_a_link_to_a_script_is_the_script(ready: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(ready / "scripts" / name)
    done = run([tmp_path / "link", "--help"])
    assert (done.returncode, "Usage: farhand" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("name", [*SCRIPTS, "../.ci/run"])
def test_every_script_is_one_that_bash_can_read(name: str) -> None:
    path = ROOT / "scripts" / name
    assert os.access(path, os.X_OK)
    assert run(["bash", "-n", path]).stderr == ""


def test_a_second_setup_only_looks(ready: Path) -> None:
    done = run([ready / "scripts" / "setup"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_from_a_checkout(ready: Path) -> None:
    done = run([ready / "scripts" / "farhand", "--version"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("farhand ")


def test_a_usage_error_keeps_its_exit_code(ready: Path) -> None:
    assert run([ready / "scripts" / "run"]).returncode == 2


def test_an_empty_home_is_looked_up(ready: Path) -> None:
    lines = (ready / ".venv" / "fetched").read_text().splitlines()
    mine = subprocess.check_output(["bash", "-c", "getent passwd $(id -u) | cut -d: -f6"], text=True).strip()
    if not mine:
        pytest.skip("this user has no entry in the passwd database")
    (ready / ".venv" / "fetched").write_text("\n".join([f"{os.environ['FARHAND_HOME']}  {mine}", *lines[1:]]) + "\n")
    done = run([ready / "scripts" / "setup"], HOME="")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_moved_checkout_is_set_up_again(ready: Path) -> None:
    moved = ready.with_name("another place")
    ready.rename(moved)
    nothing = moved.parent / "nothing"
    nothing.mkdir()
    (nothing / "python3").write_text("#!/bin/sh\nexit 1\n")
    (nothing / "python3").chmod(0o755)
    done = run(
        [moved / "scripts" / "setup"], PATH=f"{nothing}:/usr/bin:/bin", FARHAND_PYTHON="/bin/false", PIP_NO_INDEX="1"
    )
    assert done.returncode != 0, "without an index nothing can be installed"
    assert "installing farhand into .venv" in done.stderr
    assert (Path(sys.prefix) / "bin" / "python").exists(), "the environment that the links led to is as it was"


@pytest.mark.skipif(os.getuid() != 0 or not Path("/etc/debian_version").exists(), reason="needs root on Debian")
def test_without_ensurepip_an_ordinary_user_is_told_the_line(checkout: Path) -> None:
    # Debian's python3 as it is installed: the module is covered in a mount namespace of this command alone.
    empty = checkout.parent / "empty"
    empty.mkdir()
    program = (
        f"for folder in /usr/lib/python3*/ensurepip; do mount --bind '{empty}' $folder; done; "
        "exec setpriv --reuid 1001 --regid 1001 --clear-groups --no-new-privs "
        f"env PATH=/usr/bin:/bin HOME='{empty}' '{checkout}/scripts/setup'"
    )
    made = run(["unshare", "--mount", "true"])
    if made.returncode:
        pytest.skip(f"no mount namespace can be made here: {made.stderr.strip()}")
    checkout.chmod(0o777)
    done = run(["unshare", "--mount", "bash", "-c", program])
    assert done.returncode == 1
    assert "sudo apt-get install -y python3-venv" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("required", "status"), [("1", 1), ("", 0)])
def test_where_the_jail_must_stand_a_skipped_test_of_it_fails_the_run(
    tmp_path: Path, required: str, status: int
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.jail\ndef test_box(): pytest.skip('no wall here')\n\ndef test_other(): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        tmp_path,
    ]
    done = run([*command, tmp_path], FARHAND_REQUIRE_JAIL=required, PYTHONPATH=str(ROOT / "tests"))
    assert done.returncode == status, done.stdout
    assert "SKIPPED" in done.stdout
    assert "no wall here" in done.stdout
    assert ("FAILED: tests of the jail were skipped" in done.stdout) == bool(required)
