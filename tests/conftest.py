"""What every test shares. The suite has a home of its own, which borrows only built environments and models."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from farhand.home import farhand_home
from farhand.sandbox.port import Sandbox
from farhand.sandbox.subprocess import SubprocessSandbox
from leftovers import leftovers

_HOME = pytest.StashKey[Path]()

hypothesis.settings.register_profile("farhand", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("farhand")


def pytest_configure(config: pytest.Config) -> None:
    # A unix socket's path has room for 107 bytes: this folder's name stays short, wherever TMPDIR points.
    place = tempfile.gettempdir()
    home = Path(tempfile.mkdtemp(prefix="fh-", dir=place if len(place) <= 40 else "/tmp"))
    real = farhand_home()
    for name in ("environments", "models"):
        (real / name).mkdir(exist_ok=True)
        (home / name).symlink_to(real / name)
    config.stash[_HOME] = home
    os.environ["FARHAND_HOME"] = str(home)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "FARHAND_API_KEY", "FARHAND_MODEL"):
        os.environ.pop(name, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    home = config.stash.get(_HOME, None)
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)


_skipped_jail: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or {"jail", "hostile"}.isdisjoint(report.keywords):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if os.getuid() == 0 or "only root" not in reason:
        _skipped_jail.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped_jail.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where the jail must stand (FARHAND_REQUIRE_JAIL), a skipped test of it fails the run."""
    if _skipped_jail and os.environ.get("FARHAND_REQUIRE_JAIL"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped_jail and os.environ.get("FARHAND_REQUIRE_JAIL"):
        terminalreporter.write_line(f"FAILED: tests of the jail were skipped: {', '.join(_skipped_jail)}", red=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Path:
    """FARHAND_HOME of the suite."""
    return request.config.stash[_HOME]


@pytest.fixture(scope="session")
def local(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """The local jail; its host ends with the tests."""
    from farhand.sandbox.local.probe import probe
    from farhand.sandbox.local.sandbox import LocalSandbox

    missing = probe().missing
    if missing:
        pytest.skip(f"no jail can stand here: {missing[0].name}: {missing[0].detail}")
    home = request.config.stash[_HOME]
    sandbox = LocalSandbox(home)
    yield sandbox
    asyncio.run(sandbox.stop(force=True))
    assert leftovers(home) == []


@pytest.fixture(params=["subprocess", pytest.param("local", marks=pytest.mark.jail)])
def sandbox(request: pytest.FixtureRequest, home: Path) -> Iterator[Sandbox]:
    """Each provider of boxes that this machine can run. No box of it is left when the test is over."""
    sandbox: Sandbox = SubprocessSandbox(home) if request.param == "subprocess" else request.getfixturevalue("local")
    yield sandbox
    left = asyncio.run(_left(sandbox))
    assert not left, f"boxes that the test left: {left}"


async def _left(sandbox: Sandbox) -> list[str]:
    boxes = await sandbox.list({})
    for box in boxes:
        await box.destroy()
    return [box.id for box in boxes]
