"""What a harness asks of the host: one line of JSON a request, one line an answer. Both ends of it.

    {"v": 1, "op": "create", "environment": "{...}", "limits": {...}, "labels": {...}, "generation": 3, "attach": true}
    {"ok": true, "box": {"id": "sbx_…", "labels": {...}, "ended": false, "suspended": false}}
    {"ok": false, "error": {"code": "sandbox_unavailable", "message": "…", "hint": "…"}}

`create`, `list`, `suspend`, `resume`, `destroy`, `status`, `stop`; `channel` and a `create` with `attach` turn the
connection, after a good answer, into the box's channel (docs/protocol.md). A harness and a host of different versions
refuse one another.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from farhand.errors import (
    EnvironmentFailed,
    FarhandError,
    Fenced,
    ProtocolViolation,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    UsageError,
)
from farhand.limits import Limits
from farhand.sandbox.local.zygote import BoxSpec

VERSION = 1
OUTFITS_KNOWN = 256
cached = lru_cache(OUTFITS_KNOWN)
REQUEST_BYTES = 256 * 1024
LABELS = 50
LABEL_CHARS = 500
_TOLD = (EnvironmentFailed, Fenced, ProtocolViolation, SandboxError, SandboxLost, SandboxUnavailable, UsageError)
_ERRORS = {error.code: error for error in _TOLD}
LIMITS = ("memory_bytes", "processes", "disk_bytes", "disk_files")


@dataclass(frozen=True, slots=True)
class Outfit:
    """An environment as the host needs it: folders, an interpreter. `packages` pairs names with versions; `version` is
    like "3.11", `release` like "3.11.2"."""

    python: str
    prefix: str
    version: str
    release: str
    site: str | None = None
    mplconfig: str | None = None
    packages: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()

    @cached
    def text(self) -> str:
        """As a request carries it: JSON text, so that a host which knows it need not take it apart."""
        return json.dumps(asdict(self))

    @classmethod
    @cached
    def from_text(cls, text: Any) -> Outfit:
        if not isinstance(text, str):
            raise ProtocolViolation("environment is no text")
        found = _object(_load(text.encode("utf-8", "replace")), "environment")
        for name in ("python", "prefix"):
            if not Path(_text(found, name)).is_absolute():
                raise ProtocolViolation(f"environment.{name} is no absolute path")
        packages, preload = found.get("packages"), found.get("preload")
        if not isinstance(packages, list) or not all(_texts(pair) and len(pair) == 2 for pair in packages):
            raise ProtocolViolation("environment.packages is no list of pairs")
        if not _texts(preload):
            raise ProtocolViolation("environment.preload is no list of names")
        return cls(
            _text(found, "python"),
            _text(found, "prefix"),
            _text(found, "version"),
            _text(found, "release"),
            _optional(found, "site"),
            _optional(found, "mplconfig"),
            tuple((name, version) for name, version in packages),
            tuple(str(name) for name in found["preload"]),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. Fields that its operation does not use hold their defaults."""

    operation: str
    box: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    generation: int | None = None
    outfit: Outfit | None = None
    spec: BoxSpec = field(default_factory=BoxSpec)
    attach: bool = False
    force: bool = False


def spec_of(limits: Limits) -> BoxSpec:
    """The bounds of a box that are set when it is made."""
    return BoxSpec(**{name: int(getattr(limits, name)) for name in LIMITS})


def dump(message: dict[str, Any]) -> bytes:
    line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > REQUEST_BYTES:
        raise ProtocolViolation(f"a request of {len(line):,} bytes; at most {REQUEST_BYTES:,} can be sent")
    return line


def parse(line: bytes) -> Request:
    """ProtocolViolation for anything that is no request of this version."""
    found = _object(_load(line), "request")
    if found.get("v") != VERSION:
        raise ProtocolViolation(
            f"this host speaks version {VERSION}, the request version {str(found.get('v'))[:20]}",
            hint="Stop the host that runs: farhand host stop",
        )
    operation = found.get("op")
    if not isinstance(operation, str) or operation not in _PARSERS:
        raise ProtocolViolation(f"no operation is called {str(operation)[:100]!r}")
    return _PARSERS[operation](operation, found)


def _create(operation: str, found: dict[str, Any]) -> Request:
    numbers = {}
    limits = _object(found.get("limits"), "limits")
    for name in LIMITS:
        number = limits.get(name)
        if type(number) is not int or not 0 < number < 1 << 50:
            raise ProtocolViolation(f"limits.{name} is no number above 0")
        numbers[name] = number
    return Request(
        operation,
        labels=_labels(found),
        generation=_generation(found),
        outfit=Outfit.from_text(found.get("environment")),
        spec=BoxSpec(**numbers),
        attach=found.get("attach") is True,
    )


def _of_box(operation: str, found: dict[str, Any]) -> Request:
    return Request(operation, box=_text(found, "box"), generation=_generation(found))


def _list(operation: str, found: dict[str, Any]) -> Request:
    return Request(operation, labels=_labels(found))


def _plain(operation: str, found: dict[str, Any]) -> Request:
    return Request(operation, force=found.get("force") is True)


_PARSERS = {
    "create": _create,
    "list": _list,
    "channel": _of_box,
    "suspend": _of_box,
    "resume": _of_box,
    "destroy": _of_box,
    "status": _plain,
    "stop": _plain,
}


def failure(error: Exception) -> dict[str, Any]:
    """The answer that says why a request was refused."""
    if isinstance(error, FarhandError):
        told = {"code": error.code, "message": error.message, "hint": error.hint}
    else:
        text = f"the host failed: {type(error).__name__}: {error}"[:2000]
        told = {"code": SandboxError.code, "message": text, "hint": ""}
    return {"ok": False, "error": told}


def answer_of(line: bytes) -> dict[str, Any]:
    """A good answer; a bad one is raised as the error that it names."""
    answer = _object(_load(line), "answer of the host")
    if answer.get("ok") is True:
        return answer
    told = _object(answer.get("error"), "error")
    raise _ERRORS.get(str(told.get("code")), SandboxError)(str(told.get("message")), hint=str(told.get("hint") or ""))


def _load(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"a line that is no JSON: {str(error)[:200]}") from error


def _object(found: Any, name: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ProtocolViolation(f"the {name} is no object")
    return found


def _text(found: dict[str, Any], name: str) -> str:
    text = found.get(name)
    if not isinstance(text, str) or not 0 < len(text) <= 4096 or "\0" in text:
        raise ProtocolViolation(f"{name!r} is no text of at most 4,096 characters")
    return text


def _texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _optional(found: dict[str, Any], name: str) -> str | None:
    return None if found.get(name) is None else _text(found, name)


def _labels(found: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    labels = _object(found.get("labels"), "labels")
    if len(labels) > LABELS or not all(
        isinstance(text, str) and max(len(name), len(text)) <= LABEL_CHARS for name, text in labels.items()
    ):
        raise ProtocolViolation(f"labels are at most {LABELS} texts of at most {LABEL_CHARS} characters")
    return tuple(labels.items())


def _generation(found: dict[str, Any]) -> int | None:
    generation = found.get("generation")
    if generation is not None and (type(generation) is not int or not 0 <= generation < 1 << 53):
        raise ProtocolViolation("the generation is no number")
    return generation
