"""tool.py: what can be a tool, what the box is told of it, and which calls of it are let through."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand import value
from farhand.docstring import Docstring
from farhand.errors import FarhandError, ToolArgumentError, ToolDeclarationError
from farhand.tool import Parameter, Tool, ToolContext, collect, tool

CONTEXT = ToolContext(idempotency_key="eff_1", session_id="ses_1", deadline=1.0)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Through the box and back, as the harness does it: bound, written down, read, bound again, called."""
    declared = Tool.from_function(function)
    bound = declared.bind(args, kwargs)
    stored = declared.rebind(value.loads(value.dumps(dict(bound.arguments))))
    assert value.canonical(stored.arguments) == value.canonical(bound.arguments)
    positional, named = declared.call_arguments(stored, CONTEXT)
    return declared.function(*positional, **named)


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ToolArgumentError) as caught:
        Tool.from_function(function).bind(args, kwargs)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, FarhandError)
    return str(caught.value)


def search(query: str, max_results: int = 3) -> str:
    """Search the web.

    Args:
        query: What to look for,
            in plain words.
        max_results (int): How many: at most 10.

    Returns:
        query: One line a result.
    """
    return f"{query}/{max_results}"


# Declaring.


def test_a_function_as_a_tool() -> None:
    declared = Tool.from_function(search)
    assert (declared.name, declared.effect, declared.is_async, declared.returns) == ("search", "opaque", False, "str")
    assert declared.signature_text() == "search(query: str, max_results: int = 3) -> str"
    assert declared.description.startswith("Search the web.\n\nArgs:\n    query: What")
    assert (declared.timeout_s, declared.unknown, declared.probe) == (None, "error", None)
    assert declared.stub() == {
        "name": "search",
        "doc": declared.description,
        "is_async": False,
        "params": [
            {"name": "query", "kind": "positional_or_keyword", "annotation": "str", "default": None},
            {"name": "max_results", "kind": "positional_or_keyword", "annotation": "int", "default": "3"},
        ],
        "returns": "str",
    }
    assert declared.schema() == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in plain words."},
            "max_results": {"type": "integer", "description": "How many: at most 10.", "default": 3},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_the_decorator_leaves_the_function_as_it_is() -> None:
    def probe(**arguments: Any) -> str:
        return "done"

    @tool
    def plain(x: int) -> int:
        return x + 1

    @tool(effect="keyed", timeout_s=30, name="pay", description="Pays.", unknown="ask", probe=probe)
    async def other(amount: float) -> None: ...

    assert plain(1) == 2
    assert Tool.from_function(plain).effect == "opaque"
    declared = Tool.from_function(other)
    assert (declared.name, declared.effect, declared.timeout_s, declared.is_async) == ("pay", "keyed", 30, True)
    assert (declared.description, declared.unknown, declared.probe) == ("Pays.", "ask", probe)
    assert Tool.from_function(other, effect="pure").effect == "pure"


class Shop:
    """A shop."""

    def __init__(self, key: str) -> None:
        self.key = key

    @tool(effect="idempotent")
    def price(self, item: str, /, *, currency: str = "EUR") -> str:
        """The price."""
        return f"{self.key}:{item}:{currency}"

    async def __call__(self, item: str) -> str:
        """Buys."""
        return item


def test_methods_partials_and_callables() -> None:
    shop = Shop("k")
    price = Tool.from_function(shop.price)
    assert (price.name, price.effect, price.description) == ("price", "idempotent", "The price.")
    assert price.signature_text() == "price(item: str, /, *, currency: str = 'EUR') -> str"
    assert call(shop.price, "tea") == "k:tea:EUR"
    buy = Tool.from_function(shop)
    assert (buy.name, buy.is_async, buy.description) == ("shop", True, "Buys.")
    assert [p.name for p in buy.parameters] == ["item"]
    assert call(functools.partial(search, max_results=9), "x") == "x/9"
    assert call(functools.partial(search, "fixed"), max_results=2) == "fixed/2"
    assert Tool.from_function(functools.partial(shop.price, "tea")).name == "price"


def test_what_a_partial_filled_in_is_neither_seen_nor_changed() -> None:
    def send(to: str, token: str, text: str = "") -> str:
        return f"{to}:{token}:{text}"

    ready = functools.partial(send, token="MARKER-SECRET")
    assert "MARKER" not in json.dumps(Tool.from_function(ready).stub()) + Tool.from_function(ready).signature_text()
    assert call(ready, "bob", text="hi") == "bob:MARKER-SECRET:hi"
    assert "unexpected keyword argument 'token'" in refusal(ready, "bob", token="x")


def test_a_default_that_is_no_value_stays_in_the_harness() -> None:
    class Client:
        def __repr__(self) -> str:
            return "MARKER-SECRET"

    client = Client()

    def ask(question: str, client: Client = client) -> bool:  # type: ignore[assignment]
        return client is ask.__defaults__[0]  # type: ignore[index]

    declared = Tool.from_function(ask)
    assert "MARKER" not in json.dumps(declared.stub()) + json.dumps(declared.schema())
    assert declared.stub()["params"][1]["default"] == "..."
    assert declared.bind(["x"], {}).arguments == {"question": "x"}
    assert call(ask, "x") is True


def test_a_default_that_looks_like_a_secret_stays_in_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANK_TOKEN", "MARKER-of-the-environment")

    def pay(amount: int, api_key: str = "MARKER-by-name", to: str = "x MARKER-of-the-environment", max_tokens: int = 9,
            key: str = "name") -> str:  # fmt: skip
        return f"{api_key} {to} {max_tokens} {key}"

    declared = Tool.from_function(pay)
    assert "MARKER" not in json.dumps(declared.stub()) + json.dumps(declared.schema()) + declared.signature_text()
    assert [each["default"] for each in declared.stub()["params"]] == [None, "...", "...", "9", "'name'"]
    assert declared.bind([1], {}).arguments == {"amount": 1, "max_tokens": 9, "key": "name"}
    assert call(pay, 1) == "MARKER-by-name x MARKER-of-the-environment 9 name"
    assert call(pay, 1, api_key="other").startswith("other ")


def test_missing_bare_and_unresolved_annotations_are_accepted() -> None:
    def loose(a, b: "Nowhere", c: dict, *rest, d=None, **more):  # type: ignore[no-untyped-def, name-defined, type-arg]  # noqa: F821, UP037
        return a, b, c, rest, d, more

    declared = Tool.from_function(loose)
    assert declared.signature_text() in (
        "loose(a, b: Nowhere, c: dict, *rest, d=None, **more)",
        "loose(a, b: 'Nowhere', c: dict, *rest, d=None, **more)",
    )
    assert call(loose, 1, 2, {}, 4, d=5, e=6) == (1, 2, {}, (4,), 5, {"e": 6})
    assert call(loose, 1, 2, {}) == (1, 2, {}, (), None, {})
    assert declared.schema()["required"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("final_answer", "answers"),
        ("class", "word of the Python language"),
        ("_hidden", "underscore"),
        ("two words", "not a Python name"),
        ("", "not a Python name"),
        ("x" * 101, "100 characters"),
        ("ﬁnd", "characters that Python replaces"),
        (5, "not a Python name"),
    ],
)
def test_reserved_names_are_refused_with_the_reason(name: Any, reason: str) -> None:
    with pytest.raises(ToolDeclarationError, match=reason):
        Tool.from_function(search, name=name if name != "" else " ")


def test_wrong_declarations_fail_where_they_stand() -> None:
    def generator() -> Any:
        yield 1

    def two(a: ToolContext, b: ToolContext) -> None: ...

    def starred(*a: ToolContext) -> None: ...

    for wrong, words in [
        (lambda: 1, "not a Python name"),
        (generator, "is a generator"),
        (two, "one ordinary parameter"),
        (starred, "one ordinary parameter"),
        (dict, "class"),
        (5, "not callable"),
    ]:
        with pytest.raises(ToolDeclarationError, match=words):
            Tool.from_function(wrong)  # type: ignore[arg-type]
    for options, words in [
        ({"effect": "safe"}, "pure, idempotent, keyed, opaque"),
        ({"timeout_s": 0}, "above 0"),
        ({"timeout_s": True}, "above 0"),
        ({"timeout_s": float("nan")}, "above 0"),
        ({"unknown": "guess"}, "'error' or 'ask'"),
        ({"probe": 1}, "it is a function"),
        ({"description": 1}, "it is text"),
    ]:
        with pytest.raises(ToolDeclarationError, match=words):
            tool(**options)(search_again)  # type: ignore[arg-type]
    with pytest.raises(ToolDeclarationError, match="cannot be marked"):
        tool(Shop("k").price)


def search_again(query: str) -> str:
    return query


# The context.


def test_the_context_is_injected_and_hidden() -> None:
    def pay(context: ToolContext, amount: float, *notes: str, currency: str = "EUR") -> Any:
        return context.idempotency_key, amount, notes, currency

    declared = Tool.from_function(pay)
    assert declared.context == "context"
    assert declared.signature_text() == "pay(amount: float, *notes: str, currency: str = 'EUR') -> Any"
    assert "context" not in json.dumps(declared.stub()) + json.dumps(declared.schema())
    assert call(pay, 5, "a", "b") == ("eff_1", 5, ("a", "b"), "EUR")
    assert call(pay, amount=5.0) == ("eff_1", 5.0, (), "EUR")
    assert "unexpected keyword argument 'context'" in refusal(pay, 5, context=1)

    def maybe(x: int, *, ctx: ToolContext | None = None, **more: Any) -> Any:
        return ctx, more

    assert call(maybe, 1) == (CONTEXT, {})
    assert "'ctx'" in refusal(maybe, 1, ctx=None)


# Binding.


def test_wrong_calls_show_the_signature() -> None:
    signature = "search(query: str, max_results: int = 3) -> str"
    for text, words in [
        (refusal(search), "missing a required argument: 'query'"),
        (refusal(search, "a", 1, 2), "too many positional arguments"),
        (refusal(search, "a", query="b"), "multiple values for argument 'query'"),
        (refusal(search, "a", max_result=2), "'max_result' (did you mean 'max_results'?)"),
        (refusal(search, 5), "argument query must be str, not int (5)"),
        (refusal(search, "a", "5"), "argument max_results must be int, not str ('5')"),
        (refusal(search, "a", 5.0), "argument max_results must be int, not float (5.0)"),
        (refusal(search, None), "argument query must be str, not None"),
    ]:
        assert words in text
        assert signature in text
        assert text.startswith("search() ")


class Mode(enum.Enum):
    FAST = "fast"
    DEEP = 2


@dataclasses.dataclass
class Address:
    street: str
    number: int = 1


class Options(TypedDict, total=False):
    limit: typing.Required[int]
    words: list[str]


UserId = NewType("UserId", int)


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (str, ["x"], [1, None, b"x"]),
        (int, [1, True], ["1", 1.0]),
        (float, [1, 1.5], ["1", None]),
        (bool, [True], [1, "yes"]),
        (bytes, [b"x"], ["x"]),
        (None, [None], [0]),
        (list[int], [[], [1, 2]], [(1,), [1, "2"], "12"]),
        (list, [[1, "x"]], [()]),
        (dict[str, float], [{}, {"a": 1}], [{1: 1.0}, {"a": "b"}, []]),
        (tuple[int, str], [(1, "a")], [(1,), (1, 2), [1, "a"]]),
        (tuple[int, ...], [(), (1, 2, 3)], [(1, "a")]),
        (set[str], [{"a"}], [["a"], {1}]),
        (collections.abc.Sequence[int], [[1], (1,), range(3)], [{1}, 5]),
        (collections.abc.Mapping[str, int], [{"a": 1}], [[]]),
        (Optional[int], [1, None], ["x"]),  # noqa: UP045
        (Union[int, str], [1, "x"], [1.5, []]),  # noqa: UP007
        (int | list[str], [1, ["x"]], ["x", [1]]),
        (Literal["a", 1], ["a", 1], ["b", True, 2]),
        (Annotated[int, "a count"], [1], ["x"]),
        (UserId, [1], ["x"]),
        (Mode, ["fast", 2, value.Member("Mode", "FAST", "fast")], ["slow", 2.0, value.Member("Kind", "FAST", 1)]),
        (
            Address,
            [{"street": "x"}, value.Record("Address", {"street": "x", "number": 3})],
            [{"number": 1}, {"street": "x", "town": "y"}, "x"],
        ),
        (Any, [1, None, "x"], []),
        (datetime.date, [datetime.date(2020, 1, 1), "anything"], []),
        (Options, [{"limit": 1}], []),
    ],
)
def test_simple_types_are_checked_and_nothing_is_converted(hint: Any, good: list[Any], bad: list[Any]) -> None:
    def function(x): ...  # type: ignore[no-untyped-def]

    function.__annotations__["x"] = hint
    declared = Tool.from_function(function)
    for thing in good:
        bound = declared.bind([thing], {}).arguments["x"]
        assert bound is thing
    for thing in bad:
        with pytest.raises(ToolArgumentError, match=r"argument x\S*( key)? must be .+, not .+"):
            declared.bind([thing], {})


def test_a_misfit_names_the_place_inside() -> None:
    def send(to: list[str], more: dict[str, list[int]] | None = None, *cc: str, **headers: str) -> None: ...

    assert "argument to[1] must be str, not int (2)" in refusal(send, ["a", 2])
    assert "argument to must be list[str], not str ('bob@x.org')" in refusal(send, "bob@x.org")
    assert "argument more['k'][0] must be int, not str ('x')" in refusal(send, [], {"k": ["x"]})
    assert "argument cc[1] must be str, not int (5)" in refusal(send, [], None, "a", 5)
    assert "argument subject must be str, not None" in refusal(send, [], subject=None)


def test_a_misfit_is_readable_for_enums_and_dataclasses() -> None:
    def f(mode: Mode, address: Address) -> None: ...

    assert "argument mode must be one of 'fast', 2, not str ('slow')" in refusal(f, "slow", {"street": "x"})
    assert "a dict with the fields of Address: street, number, not str ('x')" in refusal(f, 2, "x")


def test_enums_and_dataclasses_are_built_for_the_function() -> None:
    def f(mode: Mode, addresses: list[Address], by: dict[str, Mode] | None = None, default: Mode = Mode.DEEP) -> Any:
        return mode, addresses, by, default

    got = call(f, "fast", [{"street": "x"}, {"street": "y", "number": 2}], {"a": 2})
    assert got == (Mode.FAST, [Address("x"), Address("y", 2)], {"a": Mode.DEEP}, Mode.DEEP)

    @dataclasses.dataclass
    class Strict:
        x: int

        def __post_init__(self) -> None:
            raise ValueError("not today")

    def g(strict): ...  # type: ignore[no-untyped-def]

    g.__annotations__["strict"] = Strict
    with pytest.raises(ToolArgumentError, match="ValueError: not today"):
        call(g, {"x": 1})


def test_defaults_are_part_of_what_is_written_down() -> None:
    declared = Tool.from_function(search)
    one, two = declared.bind(["q"], {}), declared.bind([], {"max_results": 3, "query": "q"})
    assert one.arguments == two.arguments == {"query": "q", "max_results": 3}
    assert list(two.arguments) == ["query", "max_results"]
    assert value.digest(one.arguments) == value.digest(two.arguments)


def test_a_default_of_a_foreign_class_reaches_the_function_as_itself() -> None:
    address = Address("x")

    def f(mode: Mode = Mode.FAST, address: Any = address, when: Any = datetime.date(2020, 1, 1)) -> Any:
        return mode, address, when

    mode, got, when = call(f)
    assert (mode, when) == (Mode.FAST, datetime.date(2020, 1, 1))
    assert got is address


def test_stored_arguments_are_checked_when_they_are_read() -> None:
    declared = Tool.from_function(search)
    with pytest.raises(ToolArgumentError, match="missing a required argument"):
        declared.rebind({})
    with pytest.raises(ToolArgumentError, match="unexpected"):
        declared.rebind({"query": "x", "gone": 1})


names = st.sampled_from(["query", "max_results", "context", "self", "x", "", "1"])


@given(
    st.lists(st.integers() | st.text(max_size=3), max_size=4),
    st.dictionaries(names, st.integers() | st.text(max_size=3)),
)
def test_binding_refuses_exactly_what_the_call_would(args: list[Any], kwargs: dict[str, Any]) -> None:
    declared = Tool.from_function(search)
    try:
        bound = declared.bind(args, kwargs)
    except ToolArgumentError:
        try:
            query, most = (lambda query, max_results=3: (query, max_results))(*args, **kwargs)
        except TypeError:
            return
        assert not isinstance(query, str) or not isinstance(most, int)
    else:
        positional, named = declared.call_arguments(bound, CONTEXT)
        assert search(*positional, **named) == search(*args, **kwargs)


# Schemas.


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (dict, {"type": "object"}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | Any, {}),
        (Annotated[int, "a count"], {"type": "integer", "description": "a count"}),
        (UserId, {"type": "integer"}),
        (Mode, {"enum": ["fast", 2]}),
        (object, {}),
        (Callable[[int], str], {}),
        (TypedDict, {}),
        (
            Address,
            {
                "type": "object",
                "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["street"],
                "additionalProperties": False,
            },
        ),
        (
            Options,
            {
                "type": "object",
                "properties": {
                    "limit": {"type": "integer"},
                    "words": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["limit"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_the_schema_of_a_type(hint: Any, schema: Any) -> None:
    def function(x): ...  # type: ignore[no-untyped-def]

    function.__annotations__["x"] = hint
    got = Tool.from_function(function).schema()
    assert got["properties"]["x"] == schema
    json.dumps(got)


@dataclasses.dataclass
class Node:
    name: str
    children: list[Node]


def test_a_recursive_type_has_a_bounded_schema() -> None:
    def function(node: Node, *rest: int, **more: str) -> None: ...

    schema = Tool.from_function(function).schema()
    assert len(json.dumps(schema)) < 5000
    assert schema["additionalProperties"] == {"type": "string"}
    assert schema["properties"]["rest"] == {"type": "array", "items": {"type": "integer"}}


def test_annotations_are_texts_a_person_reads() -> None:
    def function(
        a: Optional[int],  # noqa: UP045
        b: list[dict[str, Any]],
        c: Annotated[int, "x"],
        d: Address,
        e: Literal["x"],
    ) -> None: ...

    # Taken as objects, as they are without `from __future__ import annotations`.
    function.__annotations__ = typing.get_type_hints(function, include_extras=True)
    shown = [p.annotation for p in Tool.from_function(function).parameters]
    assert shown[1:] == ["list[dict[str, Any]]", "int", "Address", "Literal['x']"]
    assert shown[0] in ("Optional[int]", "int | None")
    assert Tool.from_function(function).returns == "None"
    long = Parameter("x", "positional_or_keyword", None, default="y" * 1000, default_text="x")
    assert len(long.default_repr() or "") <= 200


# Docstrings.

NUMPY = """Summary.

    Parameters
    ----------
    a : int
        The first.

        Still the first.
    b, c : str, optional
        Both.
    *rest
        Others.

    Returns
    -------
    d : int
        Not a parameter.
    """
SPHINX = """Summary.

    :param a: The first,
        still the first.
    :param int b: The second.
    :type b: int
    :param rest: Others.
    :returns: nothing
    :param: broken
    """
GOOGLE = """Summary.

    Args:
      a: The first,
        still the first.
      b (dict[str, int], optional): The second: with a colon.
      *rest: Others.
    Note:
      c: not one.
    """


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NUMPY, {"a": "The first. Still the first.", "b": "Both.", "c": "Both.", "rest": "Others."}),
        (SPHINX, {"a": "The first, still the first.", "b": "The second.", "rest": "Others."}),
        (GOOGLE, {"a": "The first, still the first.", "b": "The second: with a colon.", "rest": "Others."}),
        ("Just a summary: with colon.", {}),
        ("Args:", {}),
        ("Args:\nnot indented: x", {}),
        ("", {}),
    ],
)
def test_parameter_descriptions_of_three_styles(text: str, expected: dict[str, str]) -> None:
    assert Docstring.parse(text).parameters == expected


@given(st.text(st.sampled_from("Args: \n\tParameters-:param x:*,()"), max_size=200))
def test_any_docstring_is_read(text: str) -> None:
    Docstring.parse(text)


def test_a_long_docstring_is_cut_and_says_so() -> None:
    def f() -> None: ...

    f.__doc__ = "x" * 10_000 + ("\n:param " + " " * 3000) * 20
    assert "characters cut]" in Tool.from_function(f).description


# Collecting.


def test_a_module_s_tools() -> None:
    module = types.ModuleType("some_tools")
    exec(
        "from farhand.tool import tool\n"
        "def search(q): return q\n"
        "def final_answer(x): return x\n"
        "def helper(): ...\n"
        "@tool(effect='pure')\n"
        "def add(a: int, b: int): return a + b\n"
        "@tool\n"
        "def both(): ...\n"
        "TOOLS = dict(search=search, find=search, both=both, final_answer=final_answer)\n",
        module.__dict__,
    )
    for source in (module, vars(module)):
        found = {one.name: one for one in collect(source)}
        assert list(found) == ["search", "find", "both", "add"]
        assert found["add"].effect == "pure"
        assert found["find"].function is module.search


def test_tables_and_lists_of_tools() -> None:
    ready = Tool.from_function(search)
    assert [one.name for one in collect({"a": search, "final_answer": print, "b": ready})] == ["a", "b"]
    assert [one.name for one in collect([search, Tool.from_function(search, name="other")])] == ["search", "other"]
    assert collect({}) == []
    assert collect({"__name__": "m", "TOOLS": [search]})[0].name == "search"
    with pytest.raises(ToolDeclarationError, match="two tools are named 'search'"):
        collect([search, ready])
    with pytest.raises(ToolDeclarationError, match="underscore"):
        collect({"_x": ready})
    with pytest.raises(ToolDeclarationError, match="not callable"):
        collect({"x": 5})
