"""value.py: what goes in comes out, and nothing that comes in can hurt."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import datetime as dt
import enum
import io
import json
import math
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farhand import value
from farhand.value import (
    Array,
    Column,
    Image,
    MalformedValue,
    Member,
    Missing,
    Record,
    Table,
    TupleRecord,
    UnportableValue,
    ValueProblem,
    ValueTooLarge,
    canonical,
    decode,
    digest,
    dumps,
    encode,
    loads,
    preview,
)


class Colour(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    label: str = ""


class Pair(NamedTuple):
    left: int
    right: str


zones = st.sampled_from(["Europe/Paris", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]).map(
    zoneinfo.ZoneInfo
)
offsets = st.integers(-86399, 86399).map(lambda seconds: dt.timezone(dt.timedelta(seconds=seconds)))
decimals = st.decimals(allow_nan=False, allow_infinity=True).filter(
    lambda number: not number.is_finite() or abs(number.adjusted()) < 1000
)
texts = st.text(st.characters(), max_size=20)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    texts,
    st.binary(max_size=20),
    st.dates(),
    st.datetimes(),
    st.datetimes(min_value=dt.datetime(1950, 1, 1), max_value=dt.datetime(2035, 1, 1), timezones=zones),
    st.datetimes(timezones=offsets),
    st.times(),
    st.times(timezones=offsets),
    st.timedeltas(),
    decimals,
    st.fractions(),
    st.uuids(),
    texts.map(pathlib.PurePosixPath),
    st.builds(range, st.integers(-5, 10**20), st.integers(-5, 10**20), st.integers(1, 9)),
)
leaves = hashable_leaves | st.binary(max_size=9).map(bytearray)
keys = hashable_leaves | st.tuples(hashable_leaves, hashable_leaves) | st.frozensets(st.integers() | texts, max_size=3)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(texts, inner, max_size=5),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(st.text(max_size=4), max_size=5),
        st.frozensets(st.integers() | texts, max_size=5),
    ),
    max_leaves=25,
)


def same(one: Any, two: Any) -> bool:
    """Equal in value and in type, all the way down; NaN is itself."""
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one.items()), list(two.items()))
    if isinstance(one, float):
        return repr(one) == repr(two)
    if isinstance(one, Decimal):
        return str(one) == str(two)
    if isinstance(one, (dt.datetime, dt.time)):
        return repr(one) == repr(two)
    return bool(one == two)


# What goes in comes out.


@settings(max_examples=400)
@given(values)
def test_every_value_comes_back_equal_and_of_its_type(thing: Any) -> None:
    text = dumps(thing)
    assert text.isascii()
    assert same(loads(text), thing)
    assert dumps(loads(text)) == text


@given(values)
def test_the_text_is_never_longer_than_the_bound(thing: Any) -> None:
    length = len(dumps(thing))
    for bound in (0, 5, length - 1, length, length * 2):
        try:
            text = dumps(thing, max_bytes=bound)
        except ValueTooLarge:
            assert bound < length * 2 + 3
        else:
            assert len(text) <= bound


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_floats_keep_every_bit(number: float) -> None:
    assert repr(loads(dumps([number]))[0]) == repr(number)


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**53 + 1, 10**4000, -(2**1_000_000)], ids=range(5))
def test_integers_of_any_size_within_the_bound(number: int) -> None:
    assert loads(dumps(number)) == number
    with pytest.raises(ValueTooLarge, match="1,048,577 bits"):
        dumps(1 << value.MAX_INT_BITS)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d\ude00", "\x00", "\U0001f600", "\u2028", "é" * 50])
def test_text_keeps_lone_surrogates_and_pairs_apart(text: str) -> None:
    assert loads(dumps(text)) == text
    assert loads(dumps({text: 1})) == {text: 1}
    json.loads(dumps(text)).__class__  # noqa: B018 - and what is sent is proper JSON
    json.dumps(json.loads(dumps(text)), ensure_ascii=False).encode("utf-8")


def test_nan_may_be_a_key() -> None:
    (key,) = loads(dumps({math.nan: 1}))
    assert math.isnan(key)


def test_a_key_named_like_the_tag() -> None:
    thing = {"$": "tuple", "v": [1]}
    assert loads(dumps(thing)) == thing


def test_moments_keep_zone_offset_and_fold() -> None:
    paris = zoneinfo.ZoneInfo("Europe/Paris")
    for fold in (0, 1):
        late = dt.datetime(2024, 10, 27, 2, 30, tzinfo=paris, fold=fold)
        back = loads(dumps(late))
        assert (back.tzinfo.key, back.fold, back.utcoffset()) == ("Europe/Paris", fold, late.utcoffset())
    assert loads(dumps(dt.time(1, 2, tzinfo=paris))) == dt.time(1, 2, tzinfo=paris)


def test_an_unknown_zone_keeps_its_offset() -> None:
    tree = {"$": "datetime", "v": "2024-01-02T03:04:05", "utc": 3600, "zone": "Middle/Earth"}
    assert decode(tree) == dt.datetime(2024, 1, 2, 2, 4, 5, tzinfo=dt.UTC)
    with pytest.raises(MalformedValue, match="unknown time zone"):
        decode({"$": "datetime", "v": "2024-01-02T03:04:05", "zone": "Middle/Earth"})


def test_a_zone_that_disagrees_with_its_offset_gives_way_to_it() -> None:
    tree = {"$": "datetime", "v": "2024-01-02T03:04:05", "utc": 7200, "zone": "Europe/Paris"}
    assert decode(tree).utcoffset() == dt.timedelta(hours=2)


def test_classes_of_the_other_side_come_back_as_stand_ins() -> None:
    point = loads(dumps(Point(1.5, "a")))
    assert (type(point), repr(point), point.x) == (Record, "Point(x=1.5, label='a')", 1.5)
    assert point == Record("Point", {"label": "a", "x": 1.5}) != Record("Spot", {"x": 1.5, "label": "a"})
    assert hash(point) == hash(Record("Point", {"label": "a", "x": 1.5}))
    pair = loads(dumps(Pair(1, "b")))
    assert (pair, pair.right, pair[0], repr(pair)) == ((1, "b"), "b", 1, "Pair(left=1, right='b')")
    assert loads(dumps(Colour.RED)) == Member("Colour", "RED", "r")
    assert repr(loads(dumps(Level.LOW))) == "<Level.LOW: 1>"
    assert loads(dumps(Rights.READ | Rights.WRITE)).value == 3


@pytest.mark.parametrize("thing", [Point(1.5), Pair(1, "b"), Colour.RED, {Point(1.0): 1}])
def test_stand_ins_survive_crossing_again_pickle_and_copy(thing: Any) -> None:
    back = loads(dumps(thing))
    assert dumps(back) == dumps(thing)
    assert pickle.loads(pickle.dumps(back)) == back == copy.deepcopy(back)
    assert hash(back if not isinstance(back, dict) else tuple(back)) is not None


def test_stand_ins_cannot_be_changed() -> None:
    point, pair = loads(dumps(Point(1.0))), loads(dumps(Pair(1, "b")))
    for stand_in in (point, pair, Array("|u1", (1,), b"x")):
        with pytest.raises(AttributeError):
            stand_in.x = 2
    with pytest.raises(AttributeError):
        del point.x
    with pytest.raises(AttributeError, match="no field 'y'"):
        _ = point.y
    assert "x" in dir(point)


def test_an_attacker_s_field_names_shadow_nothing() -> None:
    record = decode({"$": "record", "type": "X", "fields": {"__class__": 1, "_record_fields": 2, "__reduce__": 3}})
    assert type(record) is Record
    assert record.__class__ is Record
    assert copy.copy(record) == record
    pair = decode({"$": "namedtuple", "type": "X", "names": ["index", "_fields"], "v": [1, 2]})
    assert isinstance(pair, TupleRecord)
    assert pair.index(2) == 1
    assert pair._fields == ("index", "_fields")


def test_harmless_subclasses_cross_as_their_base() -> None:
    class Name(str):
        pass

    counts = collections.defaultdict(int, a=1)
    for thing in (collections.Counter("aab"), counts, collections.OrderedDict(b=1)):
        assert same(loads(dumps(thing)), dict(thing))
    assert same(loads(dumps([Name("x"), True])), ["x", True])


def test_hostile_subclasses_are_refused_and_never_asked() -> None:
    class Endless(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("was called")

    class Stateful(str):
        pass

    class Liar:
        @property
        def __class__(self) -> Any:
            raise AssertionError("was called")

        @__class__.setter
        def __class__(self, value: object) -> None: ...

    stateful = Stateful("x")
    stateful.more = 1  # type: ignore[attr-defined]
    for thing, way in ((Endless([1]), "list(...)"), (stateful, "str(...)"), (Liar(), "vars(...)")):
        with pytest.raises(UnportableValue) as caught:
            encode(thing)
        assert way in str(caught.value)


# Refusals say where, what and the way on.


@pytest.mark.parametrize(
    ("thing", "way"),
    [
        ((x for x in ()), "list(...)"),
        ({}.keys(), "list(...)"),
        (iter([]), "list(...)"),
        (collections.deque(), "list(...)"),
        (len, "call it"),
        (lambda: 1, "call it"),
        (json, "its name"),
        (int, "its name"),
        (ValueError("x"), "str(...)"),
        (object(), "vars(...)"),
        (memoryview(b""), "bytes(...)"),
        (io.StringIO(), "path of the file"),
    ],
)
def test_a_refusal_names_the_place_the_type_and_the_way(thing: Any, way: str) -> None:
    with pytest.raises(UnportableValue) as caught:
        encode({"rows": [1, {2: (0, thing)}]}, name="result")
    assert str(caught.value).startswith(f"result['rows'][1][2][1] is of type {type(thing).__name__}, ")
    assert way in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_too_large_is_found_early_and_names_the_way() -> None:
    huge = [0] * 50_000_000
    started = time.process_time()
    for thing in (huge, "x" * 50_000_000, b"x" * 50_000_000, bytearray(50_000_000), range(3), set(range(500_000))):
        if thing == range(3):
            continue
        with pytest.raises(ValueTooLarge, match="under /workspace and return the path"):
            encode(thing)
    assert time.process_time() - started < 1.0
    assert issubclass(ValueTooLarge, ValueError)


def test_cycles_and_depth_are_refused() -> None:
    ring: list[Any] = [1]
    ring.append({"a": ring})
    with pytest.raises(UnportableValue, match=r"value\[1\]\['a'\] \(list\) contains itself"):
        encode(ring)
    deep: Any = 1
    for _ in range(value.MAX_VALUE_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ValueTooLarge, match="nested deeper than 60"):
        encode(deep)
    shared = [1]
    assert loads(dumps([shared, shared, {"a": shared}])) == [[1], [1], {"a": [1]}]


def test_the_deepest_value_fits_the_nesting_of_a_frame() -> None:
    deep: Any = complex(math.nan, 0)
    for _ in range(value.MAX_VALUE_DEPTH - 1):
        deep = {(1,): deep}
    text = dumps(deep)
    level = top = 0
    for char in text:
        level += (char in "[{") - (char in "]}")
        top = max(top, level)
    assert top <= 190
    assert canonical(loads(text)) == canonical(deep)


def test_a_long_path_is_cut_in_the_message() -> None:
    deep: Any = object()
    for at in range(50):
        deep = {"key" * 100 + str(at): deep}
    with pytest.raises(UnportableValue) as caught:
        encode(deep)
    assert len(str(caught.value)) < 1500
    assert "…" in str(caught.value)


def test_elements_that_would_fall_together_are_refused() -> None:
    @dataclasses.dataclass(eq=False)
    class Thing:
        x: int

    with pytest.raises(UnportableValue, match="look alike"):
        encode({Thing(1), Thing(1)})


def test_a_property_that_raises_is_a_refusal() -> None:
    @dataclasses.dataclass
    class Broken:
        x: int

        def __getattribute__(self, name: str) -> Any:
            if name == "x":
                raise RuntimeError("no")
            return object.__getattribute__(self, name)

    with pytest.raises(UnportableValue, match="raised RuntimeError"):
        encode(Broken(1))


def test_a_container_that_another_thread_changes() -> None:
    shared: dict[str, int] = {str(n): n for n in range(1000)}
    stop = threading.Event()

    def churn() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            shared[f"x{n % 50}"] = n
            shared.pop(f"x{(n + 7) % 50}", None)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            assert loads(dumps(shared))["999"] == 999
    finally:
        stop.set()
        thread.join()


# Canonical text.


def test_canonical_tells_types_apart() -> None:
    apart = [1, 1.0, True, "1", b"1", Decimal(1), Fraction(1), [1], (1,), {1}, frozenset([1]), {"1": 1}, {1: 1}, 1 + 0j]
    assert len({canonical(thing) for thing in apart}) == len(apart)
    assert canonical(math.nan) == canonical(float("nan"))
    assert canonical(Point(1.0)) == canonical(loads(dumps(Point(1.0))))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "x", (2,): "y"}, {(2,): "y", 1: "x"}),
        ({"ab", "cd", "ef"}, {"ef", "cd", "ab"}),
        ([0.0, 0j], [-0.0, -0j]),
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal("1E+2"), Decimal("100")),
        (Decimal("-0.00"), Decimal("0")),
        (
            dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
            dt.datetime(2024, 7, 1, 10, tzinfo=dt.UTC),
        ),
        (collections.Counter("ab"), {"a": 1, "b": 1}),
        (Pair(1, "x"), loads(dumps(Pair(1, "x")))),
    ],
)
def test_canonical_is_one_text_for_equal_values(one: Any, two: Any) -> None:
    assert one == two
    assert canonical({"k": one}) == canonical({"k": two})
    assert digest(one) == digest(two)


@settings(max_examples=200)
@given(values, st.randoms())
def test_canonical_ignores_order_and_survives_the_crossing(thing: Any, random: Any) -> None:
    def shuffled(item: Any) -> Any:
        if isinstance(item, dict):
            pairs = [(key, shuffled(inner)) for key, inner in item.items()]
            random.shuffle(pairs)
            return dict(pairs)
        if isinstance(item, (list, tuple)):
            return type(item)(shuffled(inner) for inner in item)
        return item

    text = canonical(thing)
    assert canonical(shuffled(thing)) == text
    assert canonical(loads(dumps(thing))) == text
    assert len(digest(thing)) == 64


@given(values, values)
def test_canonical_differs_where_values_differ(one: Any, two: Any) -> None:
    if canonical(one) == canonical(two):
        assert one == two


# What comes in cannot hurt.

_NAMES = {"$"}.union(*(required | optional for _, required, optional in value._TAGS.values()))
json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(sorted(_NAMES)),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)
_FIELDS = st.one_of(
    json_trees,
    st.sampled_from(
        [
            "<f8",
            "|b1",
            "<U1",
            "<M8[ns]",
            "nan",
            "1",
            "-ff",
            "AAAA",
            "////",
            "array",
            "range",
            "category",
            "zoned",
            "png",
        ]
    ),
    st.lists(st.integers(-2, 10**13), max_size=3),
    st.just({"$": "array", "dtype": "|i1", "shape": [4], "data": "AAH/AQ=="}),
    st.just({"$": "range", "v": [0, 10**15, 1]}),
    st.just({"$": "column", "name": None, "kind": "object", "data": [1, 2]}),
)


@st.composite
def tagged(draw: st.DrawFn) -> Any:
    """A tag with exactly its own fields, or nearly, and wild contents."""
    tag = draw(st.sampled_from(sorted(value._TAGS)))
    _, required, optional = value._TAGS[tag]
    names = set(required) | draw(st.sets(st.sampled_from(sorted(optional)))) if optional else set(required)
    return {"$": tag, **{name: draw(_FIELDS | tagged_leaf) for name in sorted(names)}}


tagged_leaf = st.deferred(tagged)


def survives(tree: Any) -> None:
    try:
        thing = decode(tree)
    except MalformedValue:
        return
    text = dumps(thing, max_bytes=10**7, max_depth=100)
    assert canonical(loads(text, max_bytes=10**7, max_depth=100)) == canonical(thing, max_bytes=10**7, max_depth=100)
    preview(thing, 100)
    hash(repr(thing))


@settings(max_examples=1500)
@given(json_trees | tagged())
@example({"$": "dict", "v": [[float("nan"), 1]]})
@example({"$": {}})
@example([1e999])
def test_garbage_is_malformed_or_a_value_and_nothing_else(tree: Any) -> None:
    survives(tree)


@settings(max_examples=300)
@given(values, st.data())
def test_a_changed_text_is_malformed_or_a_value_and_nothing_else(thing: Any, data: st.DataObject) -> None:
    text = dumps(thing)
    at = data.draw(st.integers(0, len(text)))
    piece = data.draw(st.sampled_from(["", "$", "9" * 50, "[", "}", "\\ud800", '"', "-", "e99", "null", ":", "NaN"]))
    width = data.draw(st.integers(0, 4))
    try:
        loads(text[:at] + piece + text[at + width :])
    except MalformedValue:
        pass


@given(st.text() | st.binary() | st.none())
def test_loads_of_anything_at_all(text: Any) -> None:
    try:
        loads(text)
    except MalformedValue:
        pass


def _array(dtype: str = "<f8", shape: Any = (1,), data: str = "AAAAAAAA+D8=") -> Any:
    return {"$": "array", "dtype": dtype, "shape": list(shape), "data": data}


def _column(kind: Any, data: Any, **more: Any) -> Any:
    return {"$": "column", "name": None, "kind": kind, "data": data, **more}


MALFORMED: list[Any] = [
    {"$": "nonsense", "v": 1},
    {"$": ["int"], "v": "1"},
    {"$": "int"},
    {"$": "int", "v": "20000000000001", "extra": 1},
    {"$": "int", "v": "1"},
    {"$": "int", "v": "0x20000000000001"},
    {"$": "int", "v": "2_0000000000001"},
    {"$": "int", "v": "f" * (value.MAX_INT_BITS // 4 + 2)},
    {"$": "float", "v": "1.5"},
    {"$": "str", "v": "YQ=="},
    {"$": "str", "v": "/////w=="},
    {"$": "bytes", "v": "YQ"},
    {"$": "bytes", "v": "YR=="},
    {"$": "bytes", "v": "Y Q="},
    {"$": "complex", "v": [1, 2.0]},
    {"$": "range", "v": [0, 1, 0]},
    {"$": "range", "v": [0, 1, True]},
    {"$": "set", "v": [1, 1]},
    {"$": "set", "v": [[1]]},
    {"$": "dict", "v": [[1, 2], [True, 3]]},
    {"$": "dict", "v": [[1]]},
    {"$": "dict", "v": [[{"$": "decimal", "v": "sNaN"}, 1]]},
    {"$": "record", "type": "os.system", "fields": {}},
    {"$": "record", "type": "X", "fields": {"a b": 1}},
    {"$": "namedtuple", "type": "X", "names": ["a"], "v": [1, 2]},
    {"$": "namedtuple", "type": "X", "names": ["a", "a"], "v": [1, 2]},
    {"$": "decimal", "v": "1E+999999999"},
    {"$": "decimal", "v": "1__0"},
    {"$": "decimal", "v": "١"},
    {"$": "decimal", "v": "9" * 200_000},
    {"$": "fraction", "v": [1, 0]},
    {"$": "fraction", "v": [1, -2]},
    {"$": "uuid", "v": "{12345678123456781234567812345678}"},
    {"$": "path", "v": "a", "flavour": "plan9"},
    {"$": "date", "v": "2024-02-30"},
    {"$": "date", "v": "0000-01-01"},
    {"$": "datetime", "v": "2024-01-01T25:00:00"},
    {"$": "datetime", "v": "2024-01-01T01:00:00", "utc": 90000},
    {"$": "datetime", "v": "2024-01-01T01:00:00", "utc": None},
    {"$": "datetime", "v": "2024-01-01T01:00:00", "utc": 0, "zone": "../../etc/passwd"},
    {"$": "datetime", "v": "2024-01-01T01:00:00", "fold": 2},
    {"$": "timedelta", "v": [2**53, 0, 0]},
    {"$": "missing", "v": "None"},
    _array(dtype="|O8"),
    _array(dtype="<f8,<f8"),
    _array(dtype=">f8"),
    _array(shape=(2,)),
    _array(shape=(10**12,)),
    _array(shape=(-1,)),
    _array(shape=(True,)),
    _array(shape=(1,) * 40),
    _array(shape=(0, 10**6, 10**6), data=""),
    _array(dtype="<U0", shape=(10**12,), data=""),
    _array(dtype="|b1", data="Ag=="),
    _array(dtype="<U1", data="////fw=="),
    {"$": "scalar", "dtype": "<U1", "data": "YQAAAA=="},
    {"$": "scalar", "dtype": "<f8", "data": ""},
    {"$": "image", "format": "png", "data": "AAAA"},
    {"$": "image", "format": "tiff", "data": "AAAA"},
    _column("array", _array(shape=(1, 1))),
    _column("array", [1]),
    _column("pickle", [1]),
    _column("range", {"$": "range", "v": [0, 10**12, 1]}),
    _column("range", [1]),
    _column("Int64", [1.5]),
    _column("Int64", [True]),
    _column("str", [1.5]),
    _column("object", [1], zone="UTC"),
    _column("object", [1], ordered=True),
    _column("category", _array("|i1", (1,), "AQ=="), categories=_column("object", ["a"])),
    _column("category", _array("|i1", (1,), "AA==")),
    _column("category", _array("|i1", (1,), "AA=="), categories=_column("object", ["a"]), ordered=1),
    _column("zoned", _array("<M8[ns]", (1,)), zone="../x"),
    _column("zoned", _array("<f8", (1,)), zone="UTC"),
    {"$": "series", "column": _column("object", [1]), "index": _column("object", [])},
    {"$": "table", "columns": [], "header": _column("object", ["a"]), "index": _column("object", [])},
    {
        "$": "table",
        "columns": [_column("object", [1])],
        "header": _column("object", ["a"]),
        "index": _column("object", []),
    },
    2**53 + 1,
    math.nan,
    math.inf,
    "\ud800",
    {"\ud800": 1},
    {1: 2},
    b"bytes",
    object(),
    (1, 2),
]


@pytest.mark.parametrize("tree", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("rich", [False, True])
def test_each_forgery_is_malformed(tree: Any, rich: bool) -> None:
    with pytest.raises(MalformedValue):
        decode([tree], rich=rich)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 50_000, "9" * 500_000, "NaN", "-Infinity", "", "[1,]", "1e999", '"\\ud800"', "x" * 10**7],
)
def test_hostile_text_is_malformed_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises(MalformedValue):
        loads(text)
    assert time.process_time() - started < 0.5


def test_deep_trees_are_malformed_even_near_the_end_of_the_stack() -> None:
    tree: Any = 1
    for _ in range(500):
        tree = [tree]
    with pytest.raises(MalformedValue, match="too many levels"):
        decode(tree)

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            decode([[[[[[[[[[[[1]]]]]]]]]]]])

    with pytest.raises((MalformedValue, RecursionError)):
        deep(sys.getrecursionlimit())


def test_chosen_hashes_are_refused_before_they_cost_anything() -> None:
    prime = sys.hash_info.modulus
    numbers = [{"$": "int", "v": f"{n * prime:x}"} for n in range(1, 20_000)]
    numbers = [tree for tree in numbers if len(tree["v"]) > 14]
    started = time.process_time()
    for tree in ({"$": "set", "v": numbers}, {"$": "dict", "v": [[number, 0] for number in numbers]}):
        with pytest.raises(MalformedValue, match="one hash"):
            decode(tree)
    assert time.process_time() - started < 1.0


def test_too_many_parts_or_zones_are_malformed() -> None:
    with pytest.raises(MalformedValue, match="too many parts"):
        decode([None] * (value.MAX_VALUE_NODES + 1))
    moments = [
        {"$": "datetime", "v": "2024-01-02T03:04:05", "utc": 0, "zone": f"No/Zone{n}"}
        for n in range(value.MAX_ZONES + 1)
    ]
    with pytest.raises(MalformedValue, match="too many time zones"):
        decode(moments)


def test_nothing_named_by_a_text_is_imported() -> None:
    before = set(sys.modules)
    decode({"$": "record", "type": "antigravity", "fields": {"this": 1}})
    decode({"$": "enum", "type": "antigravity", "name": "this", "value": 1})
    assert "antigravity" not in set(sys.modules) - before


# Stand-ins without their libraries.


def test_an_array_lists_its_items() -> None:
    assert decode(_array()).tolist() == [1.5]
    assert decode(_array("|i1", (2, 2), "AAH/AQ==")).tolist() == [[0, 1], [-1, 1]]
    assert decode(_array("<f8", (2, 0), "")).tolist() == [[], []]
    assert decode(_array("<f8", (0, 2), "")).tolist() == []
    assert decode(_array("<f8", ())).tolist() == 1.5
    assert decode(_array("<U1", (1,), "YQAAAA==")).tolist() == ["a"]
    assert decode({"$": "scalar", "dtype": "<f8", "data": "AAAAAAAA+D8="}) == 1.5


def test_a_table_lists_its_rows() -> None:
    codes = _array("|i1", (2,), "AP8=")
    columns = [_column("object", [1, "x"]), _column("category", codes, categories=_column("object", ["u"]))]
    header, index = _column("object", ["a", "b"]), _column("range", {"$": "range", "v": [0, 2, 1]})
    table = decode({"$": "table", "columns": columns, "header": header, "index": index})
    assert isinstance(table, Table)
    assert len(table) == 2
    assert table.rows() == [{"a": 1, "b": "u"}, {"a": "x", "b": None}]
    assert loads(dumps(table)) == table
    assert isinstance(table.columns[0], Column)
    assert loads(dumps(Missing("NaT"))) == Missing("NaT")


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000000200014"
    "8afa4710000000049454e44ae426082"
)


def test_a_picture_is_bounded_by_its_header() -> None:
    picture = loads(dumps(Image("png", PNG)))
    assert (picture.size, picture.data) == ((1, 1), PNG)
    bomb = PNG[:16] + (100_000).to_bytes(4, "big") * 2 + PNG[24:]
    with pytest.raises(MalformedValue, match="100000 x 100000 pixels"):
        encode(Image("png", bomb))


# The libraries themselves.


def _crossing(thing: Any) -> Any:
    """Through stand-ins and back to the library's object; each form gives the same text."""
    text = dumps(thing)
    stand_in, real = loads(text), loads(text, rich=True)
    assert dumps(real) == text
    assert canonical(stand_in) == canonical(real) == canonical(thing)
    return real


def test_numpy_arrays_and_scalars() -> None:
    numpy = pytest.importorskip("numpy")
    arrays = [
        numpy.arange(6).reshape(2, 3),
        numpy.arange(10)[::2],
        numpy.array([1.5, numpy.nan], ">f4"),
        numpy.array(["ab", "é"]),
        numpy.array([b"x"]),
        numpy.array([True, False]),
        numpy.array([1 + 2j]),
        numpy.array(["2020-01-01", "NaT"], "M8[D]"),
        numpy.array([5], "m8[s]"),
        numpy.zeros((0, 3)),
        numpy.array(5),
        numpy.array([2**63], "u8"),
    ]
    for array in arrays:
        real = _crossing(array)
        numpy.testing.assert_array_equal(real, array)
        assert real.dtype == array.dtype.newbyteorder("<")
        assert real.flags.writeable
    for scalar, plain in [(numpy.float64(1.5), 1.5), (numpy.int8(3), 3), (numpy.bool_(True), True)]:
        assert type(loads(dumps(scalar), rich=True)) is type(scalar)
        assert same(loads(dumps(scalar)), plain)
        assert canonical(scalar) == canonical(plain)
    assert same(loads(dumps(numpy.str_("x"))), "x")


def test_numpy_refusals() -> None:
    numpy = pytest.importorskip("numpy")
    for thing, words in [
        (numpy.array([object()]), "dtype object"),
        (numpy.zeros(2, dtype="i4,f8"), "which has no plain form"),
        (numpy.zeros(10**6), "8,000,000 bytes"),
        (numpy.broadcast_to(numpy.zeros(1), (10**12,)), "more than fits"),
        (numpy.ma.array([1]), "numpy.asarray"),
        (numpy.longdouble(1), "no plain form"),
    ]:
        with pytest.raises(ValueProblem, match=words):
            encode(thing)


def test_pandas_tables() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "int": [1, 2, 3],
            "float": [1.5, None, 2],
            "text": ["x", None, "z"],
            "time": pandas.to_datetime(["2020-01-01", "2020-01-02", None]),
            "zoned": pandas.to_datetime(["2020-01-01", "2020-07-02", None]).tz_localize("Europe/Paris"),
            "category": pandas.Categorical(["u", "v", None], categories=["v", "u"], ordered=True),
            "Int": pandas.array([1, None, 3], dtype="Int64"),
            "bool": pandas.array([True, None, False], dtype="boolean"),
            "string": pandas.array(["q", None, "r"], dtype="string"),
            "object": [[1], {"k": (2,)}, None],
            "delta": pandas.to_timedelta([1, 2, 3], unit="s"),
        }
    )
    pandas.testing.assert_frame_equal(_crossing(frame), frame)
    odd = pandas.DataFrame([[1, 2]], columns=["a", "a"], index=pandas.Index(["k"], name="i"))
    for other in (odd, pandas.DataFrame(), pandas.DataFrame({1: [1], 2: [2]}), frame.describe(), frame.head(0)):
        pandas.testing.assert_frame_equal(_crossing(other), other)
    for series in (frame["float"], frame["text"].value_counts(), frame.groupby("int")["float"].sum()):
        pandas.testing.assert_series_equal(_crossing(series), series)
    pandas.testing.assert_index_equal(_crossing(odd.index), odd.index)
    assert _crossing(pandas.NaT) is pandas.NaT
    assert loads(dumps(pandas.Timestamp("2020-01-01 10:00"))) == dt.datetime(2020, 1, 1, 10)


def test_pandas_refusals_name_the_column() -> None:
    pandas = pytest.importorskip("pandas")
    levels = pandas.MultiIndex.from_tuples([(1, 2)])
    for thing, words in [
        (pandas.DataFrame({"p": pandas.period_range("2020", periods=2)}), r"\['p'\] .*astype\(str\)"),
        (pandas.DataFrame({"a": [1, object()]}), r"value\['a'\]\[1\] is of type object"),
        (pandas.DataFrame([[1]], index=levels), "reset_index"),
        (pandas.DataFrame({"a": range(2_000_000)}), "more than fits"),
        (pandas.RangeIndex(10**12), "1,000,000,000,000 rows"),
        (pandas.Timestamp(1), "nanoseconds"),
    ]:
        with pytest.raises(ValueProblem, match=words):
            encode(thing)


def test_pictures() -> None:
    pillow = pytest.importorskip("PIL.Image")
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        real = _crossing(pillow.new(mode, (3, 2)))
        assert (real.mode, real.size) == (mode, (3, 2))
    for thing, words in [
        (pillow.new("CMYK", (3, 3)), r"convert\('RGB'\)"),
        (pillow.new("1", (8000, 8000)), "pixels"),
    ]:
        with pytest.raises(ValueProblem, match=words):
            encode(thing)
    truncated = {"$": "image", "format": "png", "data": encode(PNG[:40])["v"]}
    assert decode(truncated).size == (1, 1)
    with pytest.raises(MalformedValue):
        decode(truncated, rich=True)


def test_rich_without_the_library_gives_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "pandas", "PIL"):
        monkeypatch.setitem(sys.modules, name, None)
    assert type(decode(_array(), rich=True)) is Array
    assert decode({"$": "scalar", "dtype": "<f8", "data": "AAAAAAAA+D8="}, rich=True) == 1.5
    assert type(decode({"$": "missing", "v": "NA"}, rich=True)) is Missing
    assert type(decode(_column("object", []), rich=True)) is Column
    assert type(decode(encode(Image("png", PNG)), rich=True)) is Image


def test_rich_paths_are_real_only_here() -> None:
    here, there = encode(pathlib.Path("/a")), {"$": "path", "v": "C:\\a", "flavour": "windows"}
    assert type(decode(here)) is pathlib.PurePosixPath
    assert isinstance(decode(here, rich=True), pathlib.Path)
    assert type(decode(there, rich=True)) is pathlib.PureWindowsPath


# Preview.


@given(values, st.integers(40, 300))
def test_a_preview_is_bounded(thing: Any, bound: int) -> None:
    assert len(preview(thing, bound)) <= bound


def test_a_preview_says_what_was_cut() -> None:
    assert preview({"a": [1, (2,)], "b": {3}}, 200) == "{'a': [1, (2,)], 'b': {3}}"
    assert preview("x" * 5000, 60).endswith("… (4,970 more characters)")
    shown = preview(list(range(5000)), 100)
    assert shown.startswith("[0, 1, 2")
    assert shown.endswith(" more]")
    assert preview(1 << 100_000, 100) == "<an integer of 100,001 bits>"
    assert "whose repr raised ZeroDivisionError" in preview(type("Odd", (), {"__repr__": lambda self: 1 / 0})(), 100)
    assert "\x1b" not in preview(type("Odd", (), {"__repr__": lambda self: "\x1b]52;c;eA==\x07"})(), 100)
    assert "cut" in preview(type("Odd", (), {"__repr__": lambda self: "y" * 900})(), 100)


# It travels.

SOURCE = pathlib.Path(value.__file__).read_text(encoding="utf-8")


def test_it_is_python_3_9_and_imports_only_the_standard_library() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 9))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) for node in top}
    assert names <= {"__future__", "binascii", "json", "json.encoder", "re", "sys"}
    assert "farhand." not in SOURCE.replace("farhand_value", "")
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "__import__", "compile"}
    assert "pickle" not in SOURCE


def test_it_runs_as_a_text_in_a_bare_interpreter() -> None:
    program = (
        "import sys, types; m = types.ModuleType('farhand_value'); sys.modules['farhand_value'] = m\n"
        "exec(compile(sys.stdin.read(), '<farhand_value>', 'exec'), m.__dict__)\n"
        "import datetime; t = m.dumps([1, (2,), {3: b'x'}, datetime.date(2020, 1, 2)]); m.loads(t)\n"
        "assert not {'numpy', 'decimal', 'typing', 'dataclasses', 'inspect'} & set(sys.modules), sys.modules\n"
        "print(t)"
    )
    ran = subprocess.run([sys.executable, "-ISc", program], input=SOURCE, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == dumps([1, (2,), {3: b"x"}, dt.date(2020, 1, 2)])


def test_a_uuid_keeps_its_type() -> None:
    assert same(loads(dumps(uuid.UUID(int=5))), uuid.UUID(int=5))
