"""What a box is made of: a Python and the packages its code may import, built once and cached by hash.

Packages are installed from wheels only and never imported here: their code first runs inside a box. The default
environment is the one exception: its pinned matplotlib writes a font cache that every environment with that pin shares.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from farhand.errors import EnvironmentFailed, UsageError
from farhand.installer import PipFailed, Progress, run_pip
from farhand.sandbox.distributions import distribution_for

FORMAT = 1
"""Part of every hash: a change of the layout below makes new folders."""


@dataclass(frozen=True, slots=True)
class Environment:
    """`packages` are requirement strings; `python` is an interpreter's path, None the harness's own."""

    packages: tuple[str, ...] = ()
    python: str | None = None
    network: bool = False

    @property
    def hash(self) -> str:
        """Names what has to be built: the packages and the Python's binary interface. `network` is not part of it."""
        made_of = {
            "format": FORMAT,
            "packages": sorted(self.packages),
            "python": self.python or sysconfig.get_config_var("SOABI") or sys.version,
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Built:
    """An environment on disk. `site` goes on `sys.path`, `modules` are the top-level names it can import."""

    path: Path
    site: Path
    modules: tuple[str, ...]

    @property
    def mplconfig(self) -> Path:
        """matplotlib's font cache, if there is matplotlib. A box needs a copy: MPLCONFIGDIR must be writable."""
        return self.path / "mplconfig"


DEFAULT = Environment(
    ("numpy==2.4.6", "pandas==3.1.1", "matplotlib==3.11.2", "pillow==13.0.0", "cloudpickle==3.1.3"),
)
DEFAULT_MODULES = frozenset(
    {"numpy", "pandas", "matplotlib", "mpl_toolkits", "pylab", "PIL", "cloudpickle", "dateutil", "contourpy", "cycler"}
    | {"fontTools", "kiwisolver", "packaging", "pyparsing"}
)
"""What the default environment can import, known without building it."""
BARE = Environment()


def path_of(environment: Environment, home: Path) -> Path:
    return home / "environments" / environment.hash


def build(environment: Environment, home: Path, progress: Progress = lambda line: None) -> Built:
    """The environment's folder, made first if it is missing: some 20 s and 200 MB for the default one.

    Two builders of one environment take turns, the second finds it done. A failed build leaves nothing. Blocks.
    """
    path = path_of(environment, home)
    found = _load(path)
    if found is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock"), progress):
        found = _load(path)
        if found is not None:
            return found
        scratch = path.with_suffix(".partial")
        for leftover in (scratch, path):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            _fill(scratch, environment, home, progress)
            os.rename(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    built = _load(path)
    assert built is not None
    return built


def with_imports(environment: Environment, authorized: Iterable[str], present: Collection[str] = ()) -> Environment:
    """The environment with what it takes to import `authorized` names (`a`, `a.b` or `a.*`).

    Names of the standard library and those in `present` need nothing; the rest go through `distribution_for`.
    """
    have = {_distribution(package) for package in environment.packages}
    if set(DEFAULT.packages) <= set(environment.packages):
        present = DEFAULT_MODULES.union(present)
    added = []
    for name in authorized:
        module = name.strip().removesuffix(".*")
        if module == "*":
            raise UsageError(
                "'*' cannot be an authorized import: a box holds only the packages that were installed for it",
                hint="List the packages that the code needs, for example ['scipy', 'sklearn'].",
            )
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"{name!r} is not the name of a module")
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top in present:
            continue
        distribution = distribution_for(module)
        if _distribution(distribution) not in have:
            have.add(_distribution(distribution))
            added.append(distribution)
    return replace(environment, packages=environment.packages + tuple(added)) if added else environment


def _distribution(requirement: str) -> str:
    """The normalised name at the start of a requirement string."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else requirement


def _load(path: Path) -> Built | None:
    path = path.resolve()
    try:
        description = json.loads((path / "environment.json").read_text())
        return Built(path, path / "site", tuple(description["modules"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _locked(lock: Path, progress: Progress) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that builds the same environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(scratch: Path, environment: Environment, home: Path, progress: Progress) -> None:
    site = scratch / "site"
    site.mkdir(parents=True)
    for folder in (scratch, site):
        folder.chmod(0o755)
    if environment.packages:
        progress(f"building an environment with {', '.join(environment.packages)}")
        _install(environment, site, progress)
    if environment.hash == DEFAULT.hash:
        progress("building matplotlib's font cache")
        _make_font_cache(scratch)
    elif _pin("matplotlib", environment) == _pin("matplotlib", DEFAULT):
        shutil.copytree(build(DEFAULT, home, progress).mplconfig, scratch / "mplconfig")
    description = {"packages": environment.packages, "python": environment.python, "modules": _modules(site)}
    (scratch / "environment.json").write_text(json.dumps(description, indent=1))
    _open_modes(scratch)


def _pin(distribution: str, environment: Environment) -> str | None:
    return next((package for package in environment.packages if _distribution(package) == distribution), None)


def _install(environment: Environment, site: Path, progress: Progress) -> None:
    wanted = ["install", "--target", str(site), "--only-binary", ":all:", "--no-warn-conflicts", *environment.packages]
    try:
        run_pip(environment.python or sys.executable, wanted, progress)
    except PipFailed as error:
        what = error.package or ", ".join(environment.packages)
        raise EnvironmentFailed(f"package {what!r} could not be installed\n{error.message}", hint=error.hint) from error


_FONT_CACHE = """
import sys
sys.path.append(sys.argv[1])
import matplotlib.font_manager as fonts
# Only matplotlib's own fonts: those of the machine are not in the box.
fonts.X11FontDirectories.clear()
fonts._load_fontmanager(try_read_cache=False)
"""


def _make_font_cache(scratch: Path) -> None:
    """Writes the font list that a box would otherwise need seconds for. A PATH without fc-list hides the machine's."""
    folder = scratch / "mplconfig"
    folder.mkdir()
    environ = {"MPLCONFIGDIR": str(folder), "PATH": "/nonexistent", "HOME": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    environ |= {name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", _FONT_CACHE, str(scratch / "site")],
        env=environ, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise EnvironmentFailed(f"matplotlib could not build its font cache:\n{done.stderr[-2000:]}")


def _modules(site: Path) -> list[str]:
    """Top-level names that `site` can import, read off its files."""
    names = set()
    for entry in site.iterdir():
        name = entry.name.partition(".")[0]
        if not name.isidentifier() or name == "__pycache__":
            continue
        if entry.is_dir():
            if "." not in entry.name and next(entry.rglob("*.py"), None) is not None:
                names.add(name)
        elif entry.suffix in (".py", ".so"):
            names.add(name)
    return sorted(names)


def _open_modes(folder: Path) -> None:
    """Readable for everybody: the box's user is another one than ours."""
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                mode = os.stat(path).st_mode
                os.chmod(path, 0o755 if os.path.isdir(path) or mode & 0o100 else 0o644)


def main() -> int:
    from farhand.home import farhand_home

    try:
        built = build(DEFAULT, farhand_home(), lambda line: print("environment:", line, file=sys.stderr, flush=True))
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return 1
    print(built.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
