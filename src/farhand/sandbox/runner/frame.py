"""One frame, one line of the stream: read without trusting it, written, found in a stream."""

from __future__ import annotations

import gc
import json
import re
import sys
from typing import Any, NoReturn

from farhand.sandbox.runner.bounds import DEPTH, FRAME_BYTES, KIB


class FrameError(ValueError):
    """A line that is no frame of the protocol."""


_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def _too_deep(line: bytes) -> bool:
    """Whether brackets nest deeper than DEPTH, before a parser recurses into them."""
    brackets = line.translate(None, _NOT_BRACKETS)
    if len(brackets) <= DEPTH:
        return False
    for _ in range(8):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return False
    depth = 0
    for byte in _STRING.sub(b"", line).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > DEPTH:
            return True
    return False


def _no_constant(text: str) -> NoReturn:
    raise FrameError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise FrameError("a number beyond a float")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > 4300:
        raise FrameError("an integer of too many digits")
    return int(text)


_PARSE: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
if not hasattr(sys, "get_int_max_str_digits"):
    _PARSE["parse_int"] = _bounded_int
_DECODE = json.JSONDecoder(**_PARSE).decode
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _decode(text: str) -> Any:
    """Half a million nested lists fit a frame. They hold no cycles, and looking for some while they pile up would take
    ten times as long as all of the parsing."""
    if len(text) < 16 * KIB or not gc.isenabled():
        return _DECODE(text)
    gc.disable()
    try:
        return _DECODE(text)
    finally:
        gc.enable()


def parse_frame(line: bytes) -> dict[str, Any]:
    """The object of one line. FrameError when it is too large, no ASCII JSON, nested too deep, holds NaN, infinities or
    half a surrogate pair, or has no type."""
    if len(line) > FRAME_BYTES:
        raise FrameError(f"a frame larger than {FRAME_BYTES:,} bytes")
    if _too_deep(line):
        raise FrameError(f"a frame nested deeper than {DEPTH}")
    try:
        text = line.decode("ascii")
        frame = _decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(frame, ensure_ascii=False).encode("utf-8")
    except FrameError:
        raise
    except UnicodeEncodeError:
        raise FrameError("half a surrogate pair in a text") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise FrameError(f"a line that is no frame: {str(error)[:200]}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("t"), str):
        raise FrameError("a line that is no object with a type")
    return frame


def dump_frame(frame: dict[str, Any], limit: int = FRAME_BYTES) -> bytes:
    """One line. FrameError when it is larger than `limit` or holds what is no JSON."""
    try:
        line = _ENCODE(frame).encode("ascii") + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"this frame cannot be sent: {str(error)[:200]}") from None
    if len(line) > limit:
        raise FrameError(f"a {frame.get('t')} frame of {len(line):,} bytes; at most {limit:,} can be sent")
    return line


class Lines:
    """Bytes of a stream, taken out line by line."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._scanned = 0

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> bytes | None:
        """The next whole line, or None. FrameError when a line does not end within a frame's size."""
        end = self._data.find(b"\n", self._scanned)
        if end < 0:
            self._scanned = len(self._data)
            if self._scanned >= FRAME_BYTES:
                raise FrameError("a line that does not end")
            return None
        line = bytes(self._data[: end + 1])
        del self._data[: end + 1]
        self._scanned = 0
        return line
