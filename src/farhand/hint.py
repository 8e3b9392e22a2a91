"""Type hints of tools: whether a value fits one, what it is made into for the function, and its JSON schema."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Final, Literal

from farhand import value

ANNOTATION_CHARS: Final = 200
CHECKED_ITEMS: Final = 1_000  # of a list or dict whose item type is declared
SCHEMA_DEPTH: Final = 8
_NONE: Final = type(None)
_SIMPLE: Final[dict[Any, tuple[type, ...]]] = {
    str: (str,),
    int: (int,),
    float: (float, int),
    complex: (complex, float, int),
    bool: (bool,),
    bytes: (bytes,),
    _NONE: (_NONE,),
    list: (list,),
    dict: (dict,),
    tuple: (tuple,),
    set: (set,),
    frozenset: (frozenset,),
    collections.abc.Mapping: (dict,),
    collections.abc.Sequence: (list, tuple, str, bytes, range),
    collections.abc.Set: (set, frozenset),
}
_JSON_NAMES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", _NONE: "null"}


def _unwrapped(hint: Any) -> Any:
    """Without Annotated, NewType, Required and the like."""
    while True:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated or origin in (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif hint is None:
            return _NONE
        else:
            return hint


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a hint that is none is its only one."""
    hint = _unwrapped(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(_unwrapped(member) for member in typing.get_args(hint))
    return (hint,)


Misfit = tuple[str, str, Any]
"""Where, what was expected there, what is there."""


def misfit(hint: Any, given: Any, path: str) -> Misfit | None:
    alternatives = members(hint)
    problems = [_misfit_one(member, given, path) for member in alternatives]
    first = problems[0]
    if first is None or any(problem is None for problem in problems):
        return None
    deeper = [problem for problem in problems if problem is not None and problem[0] != path]
    if deeper:
        return deeper[0]
    return first if len(alternatives) == 1 else (path, " or ".join(_expected(member) for member in alternatives), given)


def _misfit_one(hint: Any, given: Any, path: str) -> Misfit | None:
    wrong = (path, _expected(hint), given)
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        options = typing.get_args(hint)
        fits = any(type(option) is type(given) and option == given for option in options)
        return None if fits or any(_is_member(option, given) for option in options) else wrong
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return None if _find_member(hint, given) is not None else wrong
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return None if isinstance(given, hint) or _fields_of(hint, given) is not None else wrong
    allowed = _SIMPLE.get(origin) if isinstance(origin, collections.abc.Hashable) else None
    if allowed is None:
        return None
    if not isinstance(given, allowed) or (isinstance(given, bool) and bool not in allowed and int not in allowed):
        return wrong
    return _misfit_items(hint, given, path)


def _misfit_items(hint: Any, given: Any, path: str) -> Misfit | None:
    inner = typing.get_args(hint)
    if not inner or isinstance(given, (str, bytes, range)):
        return None
    pairs: list[tuple[Any, Any, str]] = []
    if isinstance(given, dict) and len(inner) == 2:
        for key, item in list(given.items())[:CHECKED_ITEMS]:
            pairs += [(inner[0], key, f"{path}: key"), (inner[1], item, f"{path}[{value.preview(key, 40)}]")]
    elif isinstance(given, tuple) and len(inner) == len(given) and Ellipsis not in inner:
        pairs = [(hint, item, f"{path}[{at}]") for at, (hint, item) in enumerate(zip(inner, given, strict=True))]
    elif isinstance(given, tuple) and typing.get_origin(hint) is tuple and Ellipsis not in inner:
        return path, _expected(hint), given
    elif isinstance(given, (list, tuple, set, frozenset)):
        pairs = [(inner[0], item, f"{path}[{at}]") for at, item in enumerate(list(given)[:CHECKED_ITEMS])]
    for hint_of_item, item, where in pairs:
        problem = misfit(hint_of_item, item, where)
        if problem is not None:
            return problem
    return None


def _expected(hint: Any) -> str:
    if hint is _NONE:
        return "None"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(value.preview(member.value, 40) for member in list(hint)[:20])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return f"a dict with the fields of {hint.__name__}: {', '.join(f.name for f in dataclasses.fields(hint))}"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(value.preview(option, 40) for option in typing.get_args(hint)[:20])
    return annotation_text(hint) or "a value"


def described(given: Any) -> str:
    name = given._record_name if isinstance(given, value.Record) else type(given).__name__
    return f"{name} ({value.preview(given, 60)})" if given is not None else "None"


def _is_member(option: Any, given: Any) -> bool:
    return isinstance(option, enum.Enum) and _find_member(type(option), given) is option


def _find_member(kind: type[enum.Enum], given: Any) -> enum.Enum | None:
    """The member that a value stands for: itself, its value, or an enum of the same name on the other side."""
    if isinstance(given, kind):
        return given
    if isinstance(given, value.Member):
        return kind.__members__.get(given.name or "") if given.type_name == kind.__name__ else None
    for member in kind:
        if type(member.value) is type(given) and member.value == given:
            return member
    return None


def _fields_of(kind: Any, given: Any) -> dict[str, Any] | None:
    """The arguments with which a dataclass can be made from a dict or a record of the other side."""
    if isinstance(given, value.Record):
        given = given._record_fields
    if not isinstance(given, dict):
        return None
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    missing = dataclasses.MISSING
    required = {name for name, f in fields.items() if f.default is missing and f.default_factory is missing}
    return given if required <= set(given) <= set(fields) else None


def build(hint: Any, given: Any) -> Any:
    """The value with declared enums and dataclasses made from what stood for them in the box."""
    for member in members(hint):
        if not isinstance(member, type):
            if isinstance(given, list) and typing.get_origin(member) in (list, collections.abc.Sequence):
                return [build(typing.get_args(member)[0], item) for item in given]
            if isinstance(given, dict) and typing.get_origin(member) in (dict, collections.abc.Mapping):
                return {key: build(typing.get_args(member)[1], item) for key, item in given.items()}
            continue
        if issubclass(member, enum.Enum):
            found = _find_member(member, given)
            if found is not None:
                return found
        elif dataclasses.is_dataclass(member) and not isinstance(given, member):
            fields = _fields_of(member, given)
            if fields is not None:
                hints = typing.get_type_hints(member)
                return member(**{name: build(hints.get(name), item) for name, item in fields.items()})
    return given


def is_json(thing: Any, depth: int = 0) -> bool:
    if thing is None or isinstance(thing, (str, bool, int)):
        return not isinstance(thing, enum.Enum)
    if isinstance(thing, float):
        return math.isfinite(thing)
    if isinstance(thing, list) and depth < SCHEMA_DEPTH:
        return all(is_json(item, depth + 1) for item in thing)
    if isinstance(thing, dict) and depth < SCHEMA_DEPTH:
        return all(isinstance(key, str) and is_json(item, depth + 1) for key, item in thing.items())
    return False


def json_schema(hint: Any, depth: int = 0) -> dict[str, Any]:
    """The JSON schema of a type; what has none, and what is nested beyond `SCHEMA_DEPTH`, is `{}`."""
    if depth > SCHEMA_DEPTH or hint is inspect.Parameter.empty:
        return {}
    if typing.get_origin(hint) is typing.Annotated:
        words = [extra for extra in hint.__metadata__ if isinstance(extra, str)]
        inner = json_schema(typing.get_args(hint)[0], depth)
        return {**inner, "description": words[0]} if words else inner
    alternatives = members(hint)
    if len(alternatives) > 1:
        schemas = [json_schema(member, depth + 1) for member in alternatives]
        return {"anyOf": schemas} if all(schemas) else {}
    hint = alternatives[0]
    if isinstance(hint, collections.abc.Hashable) and hint in _JSON_NAMES:
        return {"type": _JSON_NAMES[hint]}
    if typing.get_origin(hint) is Literal:
        return _options_schema(typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _options_schema([member.value for member in hint])
    if (isinstance(hint, type) and dataclasses.is_dataclass(hint)) or typing.is_typeddict(hint):
        return _object_schema(hint, depth)
    return _container_schema(hint, depth)


def _options_schema(options: Iterable[Any]) -> dict[str, Any]:
    plain = [option.value if isinstance(option, enum.Enum) else option for option in options]
    if not all(is_json(option) for option in plain):
        return {}
    kinds = {type(option) for option in plain}
    only = kinds.pop() if len(kinds) == 1 else None
    return {**({"type": _JSON_NAMES[only]} if only in _JSON_NAMES else {}), "enum": plain}


def _object_schema(hint: Any, depth: int) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(hint, include_extras=True)
    except Exception:
        return {"type": "object"}  # a field's annotation names what is not known here
    if dataclasses.is_dataclass(hint):
        fields = [f for f in dataclasses.fields(hint) if f.init]
        missing = dataclasses.MISSING
        required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
        hints = {f.name: hints[f.name] for f in fields}
    else:
        # Where annotations are kept as text, `__required_keys__` does not know of Required and NotRequired.
        wraps = {name: typing.get_origin(inner) for name, inner in hints.items()}
        required = [
            name
            for name, wrap in wraps.items()
            if wrap is typing.Required or (wrap is not typing.NotRequired and name in hint.__required_keys__)
        ]
    properties = {name: json_schema(inner, depth + 1) for name, inner in hints.items()}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _container_schema(hint: Any, depth: int) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    first = json_schema(inner[0], depth + 1) if inner and inner[0] is not Ellipsis else {}
    items = {"items": first} if first else {}
    if origin is tuple and inner and Ellipsis not in inner:
        each = [json_schema(part, depth + 1) for part in inner]
        return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection):
        return {"type": "array", **items}
    if origin in (set, frozenset, collections.abc.Set):
        return {"type": "array", **items, "uniqueItems": True}
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        more = json_schema(inner[1], depth + 1) if len(inner) == 2 else {}
        return {"type": "object", **({"additionalProperties": more} if more else {})}
    return {}


def annotation_text(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    if annotation is None or annotation is _NONE:
        return "None"
    if isinstance(annotation, str):
        text = annotation
    elif typing.get_origin(annotation) is typing.Annotated:
        return annotation_text(typing.get_args(annotation)[0])
    else:
        text = annotation.__qualname__ if isinstance(annotation, type) and not typing.get_args(annotation) else ""
        text = text or inspect.formatannotation(annotation).replace("typing.", "").replace("collections.abc.", "")
    return text if len(text) <= ANNOTATION_CHARS else text[: ANNOTATION_CHARS - 1] + "…"
