"""`--out DIR`: the folder that new files and figures are copied into, where nothing is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from farhand.cli.delivery import Delivered, deliver
from farhand.errors import UsageError

SHOWN = 20
_NUMBERS = 10_000
"""Figures of one name beside each other."""


class OutFolder:
    """The folder, made when it is missing. UsageError when it cannot be one."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, Path(name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            raise UsageError(f"--out {name}: {reason}") from error

    def files(self, paths: Iterable[str], source: Path) -> list[Delivered]:
        return deliver(paths, source, self.path, shown=self.name, most=None)

    def figure(self, suffix: str, data: bytes) -> Delivered:
        """Under the next free number."""
        for number in range(1, _NUMBERS):
            path = self.path / f"figure-{number}.{suffix}"
            try:
                with path.open("xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            except OSError as error:
                return Delivered(path.name, None, error.strerror or "it cannot be written")
            return Delivered(path.name, str(path))
        return Delivered(f"figure.{suffix}", None, f"there are {_NUMBERS:,} of them here already")

    def copy_figure(self, path: Path) -> Delivered:
        try:
            data = path.read_bytes()
        except OSError as error:
            return Delivered(path.name, None, error.strerror or "it cannot be read")
        return self.figure(path.suffix.removeprefix("."), data)


def told(delivered: Sequence[Delivered]) -> list[str]:
    """What became of each, in lines of a bounded number."""
    lines = [f"kept {one.target}" if one.target else f"not kept: {one.path}: {one.reason}" for one in delivered]
    return lines[:SHOWN] + ([f"and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else [])


def not_kept(figures: int, files: int) -> str:
    """The line of a program whose results are thrown away; empty when there are none."""
    counted = [f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in ((figures, "figure"), (files, "file")) if n]
    one = figures + files == 1
    verb, them = ("was", "it") if one else ("were", "them")
    return f"{' and '.join(counted)} {verb} not kept (--out DIR keeps {them})" if counted else ""
