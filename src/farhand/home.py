"""The folder where Farhand keeps sessions, environments and models of one person."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def farhand_home() -> Path:
    """`$FARHAND_HOME`, else `$XDG_DATA_HOME/farhand`, else `~/.local/share/farhand`; made with mode 0700 if missing.

    An empty variable counts as unset, a relative XDG path is ignored as its specification asks.
    """
    chosen = os.environ.get("FARHAND_HOME", "")
    if chosen:
        home = Path(os.path.abspath(os.path.expanduser(chosen)))
    else:
        home = _data_home() / "farhand"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def _data_home() -> Path:
    data = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(data):
        return Path(data)
    return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir) / ".local" / "share"
