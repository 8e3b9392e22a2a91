"""What a box's root consists of, decided on the host's side: which of the machine's folders are shown, read-only, and
where.

Shown are /usr, the interpreter's own prefix at its own path (its libraries are found by that path), and the
environment's packages at /opt/site. Nothing of /home, /root, /var, /run, /sys and of /etc only what names and
libraries need.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from farhand.errors import SandboxUnavailable

SITE = "/opt/site"
MPLCONFIG = "/opt/mplconfig"
MPLCONFIG_HOME = "/tmp/.matplotlib"
HOME = "/tmp"
"""Not /workspace: caches and settings that libraries leave at home are no work to be saved."""
USER, USER_ID = "user", 1000

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/mime.types")
_FILES = {
    "/etc/passwd": f"root:x:0:0:root:/:/bin/sh\n{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:/bin/sh\n",
    "/etc/group": f"root:x:0:\n{USER}:x:{USER_ID}:\n",
    "/etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True, slots=True)
class Root:
    """`binds` are (source, target), `links` (path, what it says), `masked` folders that appear empty."""

    binds: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    masked: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=lambda: dict(_FILES))


def plan(python: Path, prefix: Path, version: str, site: Path | None = None, mplconfig: Path | None = None) -> Root:
    """The root for boxes of one environment. `prefix` is the interpreter's real prefix, `version` like "3.11"."""
    if prefix == Path("/") or not (python.is_relative_to(prefix) or python.is_relative_to("/usr")):
        raise SandboxUnavailable(f"{python} does not lie in its prefix {prefix}", hint="Name a Python's real path.")
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for path in (*_SYSTEM, *_ETC):
        if os.path.islink(path) and path in _SYSTEM:
            links.append((path, os.readlink(path)))
        elif os.path.exists(path):
            binds.append((path, path))
    zone = Path("/etc/localtime")
    if zone.exists():
        real = zone.resolve()
        if real.is_relative_to("/usr"):
            links.append((str(zone), str(real)))
        else:
            binds.append((str(real), str(zone)))
    if not prefix.is_relative_to("/usr"):
        binds.append((str(prefix), str(prefix)))
    for source, target in ((site, SITE), (mplconfig, MPLCONFIG)):
        if source is not None and source.is_dir():
            binds.append((str(source.resolve()), target))
    return Root(tuple(binds), tuple(links), _other_packages(prefix, version))


def _other_packages(prefix: Path, version: str) -> tuple[str, ...]:
    """Folders of packages that the interpreter would find beside the environment's own. The site is bound elsewhere,
    so they go."""
    candidates = (
        prefix / f"lib/python{version}/site-packages",
        Path(f"/usr/local/lib/python{version}/site-packages"),
        Path(f"/usr/local/lib/python{version}/dist-packages"),
        Path("/usr/lib/python3/dist-packages"),
    )
    return tuple(str(path) for path in candidates if path.is_dir())


def own_prefix() -> tuple[Path, Path, str]:
    """(interpreter, prefix, version) of the Python that runs now, outside any virtual environment."""
    version = sysconfig.get_python_version()
    prefix = Path(sys.base_prefix).resolve()
    for name in (f"python{version}", "python3"):
        if (prefix / "bin" / name).exists():
            return prefix / "bin" / name, prefix, version
    return Path(sys.executable).resolve(), prefix, version
