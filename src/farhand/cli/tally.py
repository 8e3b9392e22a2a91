"""Counts over a session's events, and numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farhand import event as ev
from farhand.event import Event


@dataclass(slots=True)
class Tally:
    """A fold over a session's events."""

    session_id: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    answer: str | None = None
    limit: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    _began: float = 0.0

    def event(self, event: Event) -> None:
        self.session_id = event.session_id
        data = event.data
        match event.type:
            case ev.MESSAGE_RECEIVED:
                self._began = self._began or event.time
            case ev.MODEL_REPLIED:
                usage = data.get("usage") or {}
                self.input_tokens += int(number(usage.get("input_tokens")))
                self.output_tokens += int(number(usage.get("output_tokens")))
                self.steps += 1
            case ev.ACTION_FINISHED:
                self._changed(data.get("files") or ())
            case ev.LIMIT_REACHED:
                self.limit = str(data.get("limit", ""))
            case ev.TURN_ANSWERED:
                self.answer = answer_text(data)
        if event.type in (ev.TURN_ANSWERED, ev.TURN_FAILED, ev.TURN_CANCELLED):
            self.seconds += max(event.time - (self._began or event.time), 0.0)
            self._began = 0.0

    def _changed(self, entries: Sequence[Mapping[str, Any]]) -> None:
        for entry in entries:
            if entry.get("removed"):
                self.files.pop(str(entry["path"]), None)
            else:
                self.files[str(entry["path"])] = int(number(entry.get("size")))


def answer_text(data: Mapping[str, Any]) -> str:
    """The text of a `turn.answered`: text as it is, anything else as Python writes it."""
    answer = data.get("answer")
    if not isinstance(answer, Mapping):
        return ""
    value = answer.get("value")
    return value if isinstance(value, str) else str(answer.get("text", ""))


def seconds_text(seconds: float) -> str:
    if seconds >= 90:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def size_text(size: Any) -> str:
    size = number(size)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def hidden(path: str) -> bool:
    """Caches and settings that programs leave behind: no result that a person looks for."""
    return path.startswith(".") or "/." in path


def short_path(path: Path) -> str:
    """The path with `~` for the person's own folder."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)


def number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
