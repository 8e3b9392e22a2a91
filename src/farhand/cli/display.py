"""Rich results as files a person can open: `sessions/ID/displays/figure-N.png`."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farhand import event as ev
from farhand.event import Event

SUFFIXES: Final = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/svg+xml": "svg",
    "text/html": "html",
}
_IMAGES: Final = {"png": "png", "jpeg": "jpg", "gif": "gif"}
"""Formats of an answer that is a picture."""


def figure(bundle: Any) -> tuple[str, str, bytes] | None:
    """MIME type, suffix and content of the first part of a display that a file can hold."""
    for kind in bundle if isinstance(bundle, Mapping) else ():
        content = bundle[kind]
        if kind not in SUFFIXES or not isinstance(content, str):
            continue
        if kind.startswith("text/") or kind.endswith("xml"):
            return kind, SUFFIXES[kind], content.encode("utf-8", "backslashreplace")
        try:
            return kind, SUFFIXES[kind], base64.b64decode(content)
        except (binascii.Error, ValueError):
            continue
    return None


def picture(bundle: Any) -> bool:
    """Whether a value is shown as a picture; of a table that is a value the text is shown."""
    return isinstance(bundle, Mapping) and any(kind in SUFFIXES and kind != "text/html" for kind in bundle)


def shown(event: Event) -> list[Any]:
    """The displays of an event, in order: what is counted as display N of the session."""
    if event.type == ev.ACTION_WROTE:
        return [bundle for bundle in event.data.get("displays") or () if isinstance(bundle, Mapping)]
    if event.type == ev.ACTION_FINISHED and picture(event.data.get("value")) and not event.data.get("answer"):
        return [event.data["value"]]
    return []


def answer_picture(event: Event) -> tuple[str, bytes] | None:
    """Suffix and content of an answer that is a picture."""
    answer = event.data.get("answer")
    value = answer.get("value") if isinstance(answer, Mapping) else None
    if not isinstance(value, Mapping) or value.get("$") != "image":
        return None
    suffix = _IMAGES.get(str(value.get("format")).lower())
    try:
        return (suffix, base64.b64decode(str(value.get("data")))) if suffix else None
    except (binascii.Error, ValueError):
        return None


class Displays:
    """The folder of a session's displays. `kept` are the files written by this process, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: list[Path] = []

    def keep(self, suffix: str, number: int, data: bytes) -> Path | None:
        """The file of the session's display `number`, written now; None when it cannot be."""
        return self._write(self.folder / f"figure-{number}.{suffix}", data)

    def keep_answer(self, event: Event) -> Path | None:
        """The file of a picture that a turn was answered with."""
        found = answer_picture(event)
        return self._write(self.folder / f"answer-{event.seq}.{found[0]}", found[1]) if found is not None else None

    def _write(self, path: Path, data: bytes) -> Path | None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = path.with_suffix(".partial")
            scratch.write_bytes(data)
            os.replace(scratch, path)
        except OSError:
            return None
        if path not in self.kept:
            self.kept.append(path)
        return path
