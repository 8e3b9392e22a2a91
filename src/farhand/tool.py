"""Tools: functions of the harness that the model's code may call. Declared and checked here, run in `call.py`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import keyword
import math
import os
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, overload

from farhand import value
from farhand.docstring import Docstring
from farhand.errors import ToolArgumentError, ToolDeclarationError
from farhand.hint import annotation_text, build, described, is_json, json_schema, members, misfit
from farhand.secret import is_secret

Effect = Literal["pure", "idempotent", "keyed", "opaque"]
Unknown = Literal["error", "ask"]
Function = TypeVar("Function", bound=Callable[..., Any])

EFFECTS: Final = ("pure", "idempotent", "keyed", "opaque")
RESERVED_NAMES: Final = frozenset({"final_answer"})
DESCRIPTION_CHARS: Final = 8_000
DEFAULT_CHARS: Final = 200
_MARK: Final = "__farhand_tool__"


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know about its call. A parameter annotated with it is filled in and never shown to the model."""

    idempotency_key: str
    session_id: str
    deadline: float
    """When the call is given up, by `time.monotonic()`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as the model sees it. `annotation` is its text, `hint` the type where it could be resolved."""

    name: str
    kind: str
    annotation: str | None
    hint: Any = inspect.Parameter.empty
    default: Any = inspect.Parameter.empty
    description: str = ""
    default_text: str | None = None
    """The default's canonical text; None when there is no default, or none that can be written down."""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty and not self.kind.startswith("var_")

    def default_repr(self) -> str | None:
        """The default as the box may see it. One that cannot be a value, such as a client with its key, is `...`."""
        if self.default is inspect.Parameter.empty:
            return None
        return value.preview(self.default, DEFAULT_CHARS) if self.default_text is not None else "..."


@dataclass(frozen=True, slots=True)
class BoundArguments:
    """The arguments of one call by parameter name, defaults included: what is written down and hashed."""

    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Options:
    """What `@tool` was given."""

    name: str | None = None
    description: str | None = None
    effect: Effect = "opaque"
    timeout_s: float | None = None
    unknown: Unknown = "error"
    probe: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function. `effect` says what may happen to a call of which nobody knows whether it took place."""

    name: str
    description: str
    function: Callable[..., Any]
    effect: Effect = "opaque"
    is_async: bool = False
    parameters: tuple[Parameter, ...] = ()
    returns: str | None = None
    timeout_s: float | None = None
    unknown: Unknown = "error"
    probe: Callable[..., Any] | None = None
    context: str | None = None
    """Name of the parameter that receives the `ToolContext`."""
    signature: inspect.Signature = field(default_factory=inspect.Signature, repr=False)
    """The function's own, with the context, without what a partial has filled in."""

    @classmethod
    def from_function(cls, function: Callable[..., Any], **options: Any) -> Tool:
        """A tool from a function, a bound method, a partial or an object with `__call__`, sync or async.

        Options given here come before those of `@tool`: name, description, effect, timeout_s, unknown, probe.
        """
        if not callable(function):
            raise ToolDeclarationError(f"{value.preview(function, 60)} is not callable, so it cannot be a tool")
        marked = getattr(function, _MARK, None)
        chosen = dataclasses.replace(marked if isinstance(marked, _Options) else _Options(), **options)
        target = _target(function)
        name = chosen.name or _name_of(function)
        _check_name(name)
        _check_options(name, chosen)
        _check_target(name, target)
        signature = _signature(name, function)
        described = Docstring.parse(_doc_of(function))
        hints = {p.name: _hint(p.annotation, target) for p in signature.parameters.values()}
        context = _context(name, signature, hints)
        parameters = tuple(
            _parameter(p, hints[p.name], described.parameters.get(p.name, ""))
            for p in signature.parameters.values()
            if p.name != context
        )
        return cls(
            name=name,
            description=_cut(chosen.description if chosen.description is not None else described.text),
            function=function,
            effect=chosen.effect,
            is_async=inspect.iscoroutinefunction(target),
            parameters=parameters,
            returns=annotation_text(signature.return_annotation),
            timeout_s=chosen.timeout_s,
            unknown=chosen.unknown,
            probe=chosen.probe,
            context=context,
            signature=signature,
        )

    def signature_text(self) -> str:
        """`search(query: str, max_results: int = 3) -> str`."""
        shown: list[str] = []
        before = ""
        for parameter in self.parameters:
            kind = parameter.kind
            if before == "positional_only" != kind:
                shown.append("/")
            if kind == "keyword_only" and before not in ("keyword_only", "var_positional"):
                shown.append("*")
            shown.append(_parameter_text(parameter))
            before = kind
        if before == "positional_only":
            shown.append("/")
        return f"{self.name}({', '.join(shown)})" + (f" -> {self.returns}" if self.returns else "")

    def stub(self) -> dict[str, Any]:
        """What the box is told, so that the tool looks like a function there. JSON."""
        parameters = [
            {"name": p.name, "kind": p.kind, "annotation": p.annotation, "default": p.default_repr()}
            for p in self.parameters
        ]
        return {
            "name": self.name,
            "doc": self.description,
            "is_async": self.is_async,
            "params": parameters,
            "returns": self.returns,
        }

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments as one object."""
        schema: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
        for parameter in self.parameters:
            own = json_schema(parameter.hint)
            if parameter.kind == "var_keyword":
                schema["additionalProperties"] = own or True
                continue
            if parameter.kind == "var_positional":
                own = {"type": "array", **({"items": own} if own else {})}
            if parameter.description:
                own = {**own, "description": parameter.description}
            if parameter.default_text is not None and is_json(parameter.default):
                own = {**own, "default": parameter.default}
            schema["properties"][parameter.name] = own
            if parameter.required:
                schema["required"].append(parameter.name)
        return schema

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
        """The arguments of a call from the box, checked, with defaults. Raises `ToolArgumentError`.

        Names, counts and simple types are checked; nothing is converted. A default that cannot be written down is left
        out: the function fills it in itself.
        """
        if self.context in kwargs:
            raise self._refused(f"got an unexpected keyword argument {self.context!r}")
        try:
            bound = self._visible().bind(*args, **kwargs)
        except TypeError as error:
            raise self._refused(f"{error}{self._did_you_mean(kwargs)}") from None
        for parameter in self.parameters:
            if parameter.name in bound.arguments:
                self._check(parameter, bound.arguments[parameter.name])
        return self.rebind(bound.arguments)

    def rebind(self, arguments: Mapping[str, Any]) -> BoundArguments:
        """Arguments by parameter name, as they were written down, in the order of the signature."""
        known: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name in arguments:
                known[parameter.name] = arguments[parameter.name]
            elif parameter.default_text is not None:
                known[parameter.name] = parameter.default
            elif parameter.required:
                raise self._refused(f"missing a required argument: {parameter.name!r}")
        unknown = [name for name in arguments if name not in known]
        if unknown:
            raise self._refused(f"got an unexpected keyword argument {unknown[0]!r}")
        return BoundArguments(known)

    def call_arguments(self, bound: BoundArguments, context: ToolContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` for `function`: the context filled in, declared enums and dataclasses built.

        An enum or dataclass of the harness cannot exist in a box, so its value or fields stand for it.
        """
        ready: dict[str, Any] = {}
        parameters = {parameter.name: parameter for parameter in self.parameters}
        for name in self.signature.parameters:
            if name == self.context:
                ready[name] = context
            elif name in bound.arguments:
                ready[name] = self._built(parameters[name], bound.arguments[name])
            elif parameters[name].default is not inspect.Parameter.empty:
                ready[name] = parameters[name].default
        call = inspect.BoundArguments(self.signature, ready)
        return call.args, call.kwargs

    def _built(self, parameter: Parameter, given: Any) -> Any:
        if _is_default(parameter, given):
            return parameter.default
        try:
            if parameter.kind == "var_positional":
                return tuple(build(parameter.hint, item) for item in given)
            if parameter.kind == "var_keyword":
                return {name: build(parameter.hint, item) for name, item in given.items()}
            return build(parameter.hint, given)
        except (TypeError, ValueError, LookupError) as error:
            raise self._refused(f"argument {parameter.name!r}: {type(error).__name__}: {error}") from error

    def _visible(self) -> inspect.Signature:
        return self.signature.replace(
            parameters=[p for p in self.signature.parameters.values() if p.name != self.context],
        )

    def _check(self, parameter: Parameter, given: Any) -> None:
        items: Iterable[tuple[str, Any]] = [(parameter.name, given)]
        if parameter.kind == "var_positional":
            items = [(f"{parameter.name}[{at}]", item) for at, item in enumerate(given)]
        elif parameter.kind == "var_keyword":
            items = given.items()
        for path, item in items:
            problem = misfit(parameter.hint, item, path)
            if problem is not None:
                where, expected, got = problem
                raise self._refused(f"argument {where} must be {expected}, not {described(got)}")

    def _refused(self, what: str) -> ToolArgumentError:
        return ToolArgumentError(f"{self.name}() {what}", hint=f"Its signature is {self.signature_text()}.")

    def _did_you_mean(self, kwargs: Mapping[str, Any]) -> str:
        names = [p.name for p in self.parameters if not p.kind.startswith("var_")]
        for name in kwargs:
            close = difflib.get_close_matches(str(name)[:100], names, n=1) if name not in names else []
            if close:
                return f" (did you mean {close[0]!r}?)"
        return ""


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    effect: Effect = "opaque",
    timeout_s: float | None = None,
    unknown: Unknown = "error",
    probe: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]: ...
def tool(function: Any = None, /, **options: Any) -> Any:
    """Marks a function as a tool and returns it unchanged; used plainly or with options.

    `effect`: `pure` and `idempotent` calls may be repeated after a crash, `keyed` ones with their `idempotency_key`,
    `opaque` ones never. `probe` is asked whether an opaque call whose outcome is unknown took place; `unknown="ask"`
    lets the action wait for a person instead of raising `OutcomeUnknown`.
    """

    def mark(marked: Any) -> Any:
        try:
            setattr(marked, _MARK, _Options(**options))
        except AttributeError as error:
            hint = "Wrap it in a function, or use Tool.from_function(..., effect=...)."
            raise ToolDeclarationError(f"{value.preview(marked, 60)} cannot be marked as a tool", hint=hint) from error
        Tool.from_function(marked)  # so that a wrong declaration fails where it stands
        return marked

    return mark if function is None else mark(function)


def collect(source: Mapping[str, Any] | types.ModuleType | Iterable[Any]) -> list[Tool]:
    """The tools of a module, of its namespace, of a dictionary name → function, or of a list of functions and tools.

    A module's tools are the entries of its `TOOLS` and every function marked with `@tool`. An entry named
    `final_answer` is ignored.
    """
    names: Any = vars(source) if isinstance(source, types.ModuleType) else source
    if not isinstance(names, Mapping):
        return _unique([_as_tool(item) for item in names])
    if "TOOLS" not in names and "__name__" not in names:
        return _unique(_from_table(names))
    table = names.get("TOOLS", {})
    tools = _from_table(table) if isinstance(table, Mapping) else [_as_tool(item) for item in table]
    taken = {id(one.function) for one in tools}
    for item in names.values():
        if isinstance(item, Tool) or (callable(item) and isinstance(getattr(item, _MARK, None), _Options)):
            found = _as_tool(item)
            if id(found.function) not in taken:
                taken.add(id(found.function))
                tools.append(found)
    return _unique(tools)


def _from_table(table: Mapping[str, Any]) -> list[Tool]:
    return [_as_tool(item, str(name)) for name, item in table.items() if name not in RESERVED_NAMES]


def _as_tool(item: Any, name: str | None = None) -> Tool:
    if isinstance(item, Tool):
        if name is None or name == item.name:
            return item
        _check_name(name)
        return dataclasses.replace(item, name=name)
    return Tool.from_function(item) if name is None else Tool.from_function(item, name=name)


def _unique(tools: list[Tool]) -> list[Tool]:
    seen: dict[str, Tool] = {}
    for one in tools:
        if one.name in seen:
            raise ToolDeclarationError(f"two tools are named {one.name!r}", hint="Give one of them @tool(name=...).")
        seen[one.name] = one
    return tools


# ---- checking a declaration ----


def _check_name(name: object) -> None:
    reason = ""
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
        reason = "is not a Python name of at most 100 characters"
    elif keyword.iskeyword(name):
        reason = "is a word of the Python language"
    elif name in RESERVED_NAMES:
        reason = "is the function with which the model's code answers"
    elif name.startswith("_"):
        reason = "starts with an underscore, which marks names of the box itself"
    elif unicodedata.normalize("NFKC", name) != name:
        reason = "is spelled with characters that Python replaces in code"
    if reason:
        raise ToolDeclarationError(f"the name {name!r} cannot be a tool's: it {reason}", hint="Use @tool(name=...).")


def _check_options(name: str, options: _Options) -> None:
    problem = ""
    probe: object = options.probe
    description: object = options.description
    if options.effect not in EFFECTS:
        problem = f"effect={options.effect!r}: it is one of {', '.join(EFFECTS)}"
    elif options.unknown not in ("error", "ask"):
        problem = f"unknown={options.unknown!r}: it is 'error' or 'ask'"
    elif options.timeout_s is not None and not _is_seconds(options.timeout_s):
        problem = f"timeout_s={options.timeout_s!r}: it is a number of seconds above 0, or None"
    elif probe is not None and not callable(probe):
        problem = "probe: it is a function"
    elif description is not None and not isinstance(description, str):
        problem = "description: it is text"
    if problem:
        raise ToolDeclarationError(f"the tool {name!r} has a wrong option {problem}")


def _is_seconds(number: object) -> bool:
    return type(number) in (int, float) and math.isfinite(number) and number > 0  # type: ignore[arg-type, operator]


def _check_target(name: str, target: Callable[..., Any]) -> None:
    if inspect.isclass(target):
        raise ToolDeclarationError(
            f"the tool {name!r} is a class", hint="Declare a function that makes what it returns."
        )
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        hint = "Return a list: what a tool gives is sent as one value."
        raise ToolDeclarationError(f"the tool {name!r} is a generator", hint=hint)


def _target(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function behind a partial, a method or an object with `__call__`: it has the annotations."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif inspect.isroutine(function) or inspect.isclass(function):
            return function
        else:
            function = type(function).__call__


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()


def _doc_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return inspect.getdoc(function) or ""
    return inspect.getdoc(type(function).__call__) or inspect.getdoc(type(function)) or ""


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        hint = "Wrap it in a `def` that names its parameters."
        raise ToolDeclarationError(f"the tool {name!r} has no signature that Python can read", hint=hint) from error
    filled: set[str] = set()
    while isinstance(function, functools.partial):
        filled.update(function.keywords)
        function = function.func
    # What a partial has filled in is the harness's own, a key for example: the model neither sees nor changes it.
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in filled])


def _hint(annotation: Any, target: Callable[..., Any]) -> Any:
    """The annotation as a type; `Parameter.empty` where there is none or a name in it is not known."""
    if annotation is inspect.Parameter.empty:
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        names = getattr(inspect.unwrap(target), "__globals__", {})
        return typing.get_type_hints(holder, names, {}, include_extras=True)["it"]
    except Exception:
        return inspect.Parameter.empty  # an unresolved annotation is allowed: it is shown, not checked


def _context(name: str, signature: inspect.Signature, hints: Mapping[str, Any]) -> str | None:
    found = [p for p in signature.parameters.values() if ToolContext in members(hints[p.name])]
    if not found:
        return None
    normal = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if len(found) > 1 or found[0].kind not in normal:
        raise ToolDeclarationError(f"the tool {name!r} must take its ToolContext as one ordinary parameter")
    return found[0].name


def _parameter(raw: inspect.Parameter, hint: Any, described: str) -> Parameter:
    if typing.get_origin(hint) is typing.Annotated:
        words = [extra for extra in hint.__metadata__ if isinstance(extra, str)]
        described = words[0] if words else described
    default_text = None
    if raw.default is not inspect.Parameter.empty and not is_secret(raw.name, raw.default, os.environ):
        try:
            default_text = value.canonical(raw.default)
        except value.ValueProblem:
            default_text = None  # it stays on this side
    return Parameter(
        name=raw.name,
        kind=raw.kind.name.lower(),
        annotation=annotation_text(raw.annotation),
        hint=hint,
        default=raw.default,
        description=described,
        default_text=default_text,
    )


def _parameter_text(parameter: Parameter) -> str:
    stars = {"var_positional": "*", "var_keyword": "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    default = parameter.default_repr()
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
        return text if default is None else f"{text} = {default}"
    return text if default is None else f"{text}={default}"


def _is_default(parameter: Parameter, given: Any) -> bool:
    """Whether the default itself may be used: it may be of a class that came back as a stand-in."""
    try:
        return parameter.default_text is not None and value.canonical(given) == parameter.default_text
    except value.ValueProblem:
        return False


def _cut(text: str) -> str:
    if len(text) <= DESCRIPTION_CHARS:
        return text
    return f"{text[:DESCRIPTION_CHARS]}\n[… {len(text) - DESCRIPTION_CHARS:,} characters cut]"
