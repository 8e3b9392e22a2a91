"""The folder where Farhand keeps sessions, environments and models of one person."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from farhand.errors import UsageError


def farhand_home() -> Path:
    """`$FARHAND_HOME`, else `$XDG_DATA_HOME/farhand`, else `~/.local/share/farhand`; made with mode 0700 if missing.

    An empty variable counts as unset, a relative XDG path is ignored as its specification asks. UsageError when it
    cannot be a folder that this user writes to.
    """
    chosen = os.environ.get("FARHAND_HOME", "")
    if chosen:
        home = Path(os.path.abspath(os.path.expanduser(chosen)))
    else:
        home = _data_home() / "farhand"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise _unusable(home, reason) from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise _unusable(home, "it cannot be written to")
    return home


def _unusable(home: Path, reason: str) -> UsageError:
    return UsageError(
        f"the home folder {home} cannot be used: {reason}",
        hint="Set FARHAND_HOME to a folder on a local disk that this user may write.",
    )


def _data_home() -> Path:
    data = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(data):
        return Path(data)
    return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir) / ".local" / "share"
