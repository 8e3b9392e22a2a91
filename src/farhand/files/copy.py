"""Copies of a box's files on our side, and back: bounded, and nothing of a box's names or links is trusted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from farhand.errors import SandboxError, SandboxLost
from farhand.limits import COPY_LEFT_OUT, FILE_CHUNK_BYTES, Limits
from farhand.sandbox.hand import Entry, Hand, safe_path
from farhand.sandbox.runner.workspace import DirectoryFiles

Manifest: TypeAlias = dict[str, Entry]
"""What the box said of each file when it was copied last."""


@dataclass(frozen=True, slots=True)
class Collected:
    """`entries` are the changed files {path, size, sha256}; `left_out` pairs what is not copied with the reason."""

    entries: list[dict[str, Any]]
    removed: list[str]
    manifest: Manifest
    left_out: list[tuple[str, str]]

    @property
    def changed(self) -> list[str]:
        return [entry["path"] for entry in self.entries]


async def collect(hand: Hand, destination: Path, known: Manifest, limits: Limits) -> Collected:
    """Copy what changed since `known` to `destination`, which then holds the workspace's files and nothing else.

    A file counts as changed when its size, times, inode or mode do. At most `disk_files` files and `disk_bytes` bytes
    are kept; what is beyond is named in `left_out`, as are links, FIFOs and unusable names. Each file appears whole.
    """
    listing = await hand.listing()
    left_out = list(listing.left_out)
    with _opened(destination) as files:
        copier = _Copier(hand, files, known, limits, left_out)
        for entry in listing.entries:
            await copier.take(entry)
        removed = copier.remove_others() if listing.complete else []
    if len(left_out) > COPY_LEFT_OUT:
        left_out[COPY_LEFT_OUT:] = [("", f"{len(left_out) - COPY_LEFT_OUT:,} more are left out")]
    return Collected(copier.entries, removed, copier.manifest, left_out)


async def restore(hand: Hand, source: Path) -> Manifest:
    """Bring the files below `source` into the box, and say how the box lists them now."""
    some = False
    with _opened(source) as files:
        for batch in files.walk():
            for found in batch.entries:
                if found["kind"] == "file" and safe_path(found["path"]):
                    await _put(hand, files, found["path"], found["mode"])
                    some = True
    if not some:
        return {}
    listing = await hand.listing()
    return {entry.path: entry for entry in listing.entries}


async def _put(hand: Hand, files: DirectoryFiles, path: str, mode: int) -> None:
    offset, last = 0, False
    while not last:
        data, last = files.read(path, offset, FILE_CHUNK_BYTES)
        await hand.write_chunk(path, offset, data, mode, last)
        offset += len(data)


class _Copier:
    """One collection: what is kept so far, and how much of the bounds is left."""

    def __init__(
        self, hand: Hand, files: DirectoryFiles, known: Manifest, limits: Limits, left_out: list[tuple[str, str]]
    ) -> None:
        self._hand, self._files, self._known, self._left_out = hand, files, known, left_out
        self._bytes, self._count = limits.disk_bytes, limits.disk_files
        self.entries: list[dict[str, Any]] = []
        self.manifest: Manifest = {}

    async def take(self, entry: Entry) -> None:
        if self._count <= 0 or entry.size > self._bytes:
            self._left_out.append((entry.path, "more than the limits `disk_files` and `disk_bytes` allow"))
            return
        self._count -= 1
        try:
            if self._known.get(entry.path) != entry:
                await self._fetch(entry)
            elif entry.kind == "file":
                self._bytes -= entry.size
            self.manifest[entry.path] = entry
        except SandboxLost:
            raise
        except (SandboxError, OSError, ValueError) as error:
            self._left_out.append((entry.path, str(error)[:200]))

    async def _fetch(self, entry: Entry) -> None:
        if entry.kind == "folder":
            self._make_folder(entry.path)
            return
        digest = hashlib.sha256()
        offset = 0

        def sink(data: bytes) -> None:
            nonlocal offset
            digest.update(data)
            self._files.write(entry.path, offset, data, entry.mode, False)
            offset += len(data)

        self._clear(entry.path)
        try:
            await self._hand.read_file(entry.path, sink, self._bytes)
            self._files.write(entry.path, offset, b"", entry.mode | 0o600, True)
        except BaseException:
            self._files.discard(entry.path)
            raise
        self._bytes -= offset
        self.entries.append({"path": entry.path, "size": offset, "sha256": digest.hexdigest()})

    def _make_folder(self, path: str) -> None:
        try:
            self._files.make_folder(path)
        except (NotADirectoryError, OSError):
            self._files.remove(path)  # a file was there, or a link that is not followed
            self._files.make_folder(path)

    def _clear(self, path: str) -> None:
        """Make room for a file where a folder, or on its way a file, stood."""
        parts = path.split("/")
        for end in range(1, len(parts)):
            self._make_folder("/".join(parts[:end]))
        before = self._known.get(path)
        if before is not None and before.kind == "folder":
            _remove_below(self._files, path, self._known)

    def remove_others(self) -> list[str]:
        """Take away what the box does not have any more."""
        kept = {path for path, _ in self._left_out}
        removed = [path for path in self._known if path not in self.manifest and path not in kept]
        for path in sorted(removed, key=len, reverse=True):
            try:
                self._files.remove(path)
            except OSError as error:
                self._left_out.append((path, f"cannot be removed: {error.strerror}"))
        return removed


def _remove_below(files: DirectoryFiles, path: str, known: Manifest) -> None:
    below = [other for other in known if other == path or other.startswith(path + "/")]
    for other in sorted(below, key=len, reverse=True):
        files.remove(other)


@contextmanager
def _opened(folder: Path) -> Iterator[DirectoryFiles]:
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield DirectoryFiles(fd)
    finally:
        os.close(fd)
