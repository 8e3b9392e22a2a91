"""Tools as the guest sees them: their stubs, and the errors that these raise."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from farhand import value
from farhand.sandbox.runner.bounds import KIB, WORKER_FRAME_BYTES
from farhand.sandbox.runner.channel import Channel
from farhand.sandbox.runner.frame import FrameError, dump_frame


class ToolError(Exception):
    """A tool call did not give a value."""


class ToolFailed(ToolError):
    """The tool says that it failed and nothing happened."""


class ToolTimedOut(ToolError):
    """The tool gave no value in its time."""


class ToolArgumentError(ToolError, TypeError):
    """The arguments do not fit the tool's signature."""


class OutcomeUnknown(ToolError):
    """An earlier call with these arguments may or may not have taken effect."""


class LimitReached(Exception):
    """A bound of this agent was met."""


OWN_ERRORS = (ToolError, ToolFailed, ToolTimedOut, ToolArgumentError, OutcomeUnknown, LimitReached)
for _class in OWN_ERRORS:
    _class.__module__ = "builtins"  # tracebacks show the bare name
_UNSAFE_ERRORS = frozenset(
    ("StopIteration", "StopAsyncIteration", "MemoryError", "UnicodeDecodeError", "UnicodeEncodeError")
    + ("UnicodeTranslateError", "ExceptionGroup", "SyntaxError", "IndentationError", "TabError", "Exception")
)
_ERRORS: dict[str, Any] = {
    name: found
    for name, found in vars(builtins).items()
    if isinstance(found, type) and issubclass(found, Exception) and name not in _UNSAFE_ERRORS
}
_ERRORS.update((found.__name__, found) for found in OWN_ERRORS)


def _raised(error: Any) -> Exception:
    """The exception of an error reply: the built-in class of that name, else ToolError."""
    told = error if isinstance(error, dict) else {}
    kind, message, hint = (str(told.get(name) or "") for name in ("type", "message", "hint"))
    cls = _ERRORS.get(kind)
    if kind == "KeyError":
        try:
            message = ast.literal_eval(message)  # str() of a KeyError is the repr of its key
        except (ValueError, SyntaxError):
            pass
    if cls is None:
        problem: Exception = ToolError(f"{kind}: {message}" if kind else message)
    else:
        problem = cls(message)
    if hint:
        if isinstance(problem, (ToolError, LimitReached)):
            problem.args = (f"{problem.args[0]}\n  {hint}",)
        else:
            problem.__notes__ = [hint]
    problem._farhand_tool = True  # type: ignore[attr-defined]
    return problem


class Tools:
    """The stubs of the harness's tools: functions with their signature and documentation."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._result_bytes = 512 * KIB
        self.names: list[str] = []

    def make(self, stubs: list[dict[str, Any]], result_bytes: int) -> dict[str, Any]:
        self._result_bytes = min(result_bytes, value.MAX_VALUE_BYTES)
        self.names = [stub["name"] for stub in stubs]
        return {stub["name"]: self._stub(stub) for stub in stubs}

    def _stub(self, told: dict[str, Any]) -> Any:
        name = told["name"]

        def blocking(*args: Any, **kwargs: Any) -> Any:
            return self._given(name, self._channel.call(name, *self._encoded(name, args, kwargs)))

        async def waiting(*args: Any, **kwargs: Any) -> Any:
            return self._given(name, await self._channel.call_async(name, *self._encoded(name, args, kwargs)))

        stub: Any = waiting if told.get("is_async") else blocking
        stub.__name__ = stub.__qualname__ = name
        stub.__doc__ = told.get("doc") or None
        stub.__module__ = "tools"
        stub.__signature__ = _signature(told)
        return stub

    def _encoded(self, name: str, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        most = self._result_bytes
        encoded = [
            value.encode(each, name=f"argument {i} of {name}()", max_bytes=most) for i, each in enumerate(args, 1)
        ]
        named = {key: value.encode(each, name=f"{key} of {name}()", max_bytes=most) for key, each in kwargs.items()}
        try:
            dump_frame({"t": "", "a": encoded, "k": named}, WORKER_FRAME_BYTES - 512)
        except FrameError:
            way = "write them to a file under /workspace and pass its path"
            raise ValueError(f"the arguments of {name}() are too large together; {way}") from None
        return encoded, named

    def _given(self, name: str, reply: dict[str, Any]) -> Any:
        if reply.get("ok") is not True:
            raise _raised(reply.get("error"))
        try:
            return value.decode(reply.get("value"), rich=True)
        except ValueError as error:
            raise ToolError(f"{name}() gave a value that cannot be built here: {error}") from None


class _Shown:
    """Stands for an annotation or a default of the other side: its repr is the text it had there."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(told: dict[str, Any]) -> Any:
    """A stub's `inspect.Signature`; None when what is told makes none."""
    import inspect

    def shown(text: Any) -> Any:
        return inspect.Parameter.empty if text is None else _Shown(str(text))

    try:
        parameters = [
            inspect.Parameter(
                each["name"],
                getattr(inspect.Parameter, each["kind"].upper()),
                default=shown(each.get("default")),
                annotation=shown(each.get("annotation")),
            )
            for each in told["params"]
        ]
        return inspect.Signature(parameters, return_annotation=shown(told.get("returns")))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
