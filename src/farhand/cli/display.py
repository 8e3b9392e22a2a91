"""Rich results of a session as files a person can open: `sessions/ID/displays/figure-N.png`."""

from __future__ import annotations

import os
from pathlib import Path


class Displays:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, suffix: str, number: int, data: bytes) -> Path | None:
        """The file of the session's display `number`, written now; None when it cannot be."""
        path = self._folder / f"figure-{number}.{suffix}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = path.with_suffix(".partial")
            scratch.write_bytes(data)
            os.replace(scratch, path)
        except OSError:
            return None
        return path
