"""Values that cross the wall: Python values as tagged JSON, and back without trusting a byte of it.

`None`, `bool`, `str`, finite `float`, `int` within 2**53, `list` and `dict` with text keys stand for themselves.
Everything else is an object with the key `$`, the tag. Decoding never imports, calls or evaluates anything that the
text names: a class of the other side becomes a `Record`, an array, table or picture becomes a frozen stand-in (`Array`,
`Table`, `Image`), unless the caller asks for the real thing with `rich=True`.

This module runs on both sides of the wall. In a box it is `farhand_value`, joined to the runner as text; so it needs
Python 3.9 and the standard library only, imports as little as it can, and is one file although it is a long one.
"""

from __future__ import annotations

import binascii
import json
import re
import sys
from json.encoder import encode_basestring_ascii as _quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, NoReturn

    JSON = Any
else:
    JSON = object

# These bounds stand here and not in limits.py because this file travels alone.
MAX_VALUE_BYTES = 960 * 1024  # of compact ASCII JSON; a frame is 1 MiB and has an envelope
MAX_VALUE_DEPTH = 60  # at most three levels of JSON each, and a frame may have 200
MAX_VALUE_NODES = 1_000_000
MAX_INT_BITS = 1 << 20
MAX_FRACTION_BITS = 1 << 16  # the greatest common divisor is quadratic
MAX_DECIMAL_CHARS = 100_000  # of its text, and of the text without an exponent: int(Decimal("1e999999999")) never ends
MAX_TABLE_ROWS = 1_000_000
MAX_IMAGE_PIXELS = 32_000_000
MAX_ARRAY_DIMENSIONS = 32
MAX_ZONES = 32  # distinct time zones in one value; each is looked up on disk
MAX_EQUAL_HASHES = 64  # keys with one hash make a dict quadratic

_SAFE_INT = 1 << 53
_TO_FILE = "write it to a file under /workspace and return the path"
_PATH_STEPS = 12


class ValueProblem(Exception):
    """A value cannot cross. `path` says where in it, `way` what to do instead."""

    def __init__(self, what: str, way: str = "") -> None:
        super().__init__(what, way)
        self.what = what
        self.way = way
        self.root = "value"
        self.steps: list[str] = []  # innermost first: they are added while the error rises

    @property
    def path(self) -> str:
        steps = self.steps[::-1]
        if len(steps) > _PATH_STEPS:
            half = _PATH_STEPS // 2
            steps = [*steps[:half], "…", *steps[-half:]]
        return self.root + "".join(steps)

    def __str__(self) -> str:
        return f"{self.path} {self.what}" + (f"; {self.way}" if self.way else "")


class UnportableValue(ValueProblem, TypeError):
    """A value of a type that has no form outside its process."""


class ValueTooLarge(ValueProblem, ValueError):
    """A value beyond a bound of size, depth or digits."""


class MalformedValue(ValueProblem, ValueError):
    """Text or JSON that no `encode` wrote."""


# ---- what decoding gives where the type itself does not exist ----


class _Frozen:
    """Fields in `__slots__`, set once; equality, hash, text and copying come from them."""

    __slots__: tuple[str, ...] = ()

    def _set(self, *values: object) -> None:
        for name, value in zip(self.__slots__, values):
            object.__setattr__(self, name, value)

    def _fields(self) -> tuple[Any, ...]:
        return tuple(object.__getattribute__(self, name) for name in self.__slots__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._fields()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._fields()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={preview(getattr(self, name), 60)}" for name in self.__slots__)
        return f"{type(self).__name__}({shown})"


class Record(_Frozen):
    """A dataclass instance of the other side: its fields as attributes, equal to a record of equal name and fields."""

    __slots__ = ("_record_name", "_record_fields")  # noqa: RUF023 - the order of the constructor
    _record_name: str
    _record_fields: dict[str, Any]

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self._set(name, dict(fields))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_record_") and not name.startswith("__"):
            fields = self._record_fields
            if name in fields:
                return fields[name]
        raise AttributeError(f"no field {name!r}")

    def __dir__(self) -> Iterable[str]:
        return [*object.__dir__(self), *self._record_fields]

    def __hash__(self) -> int:
        return hash((self._record_name, frozenset(self._record_fields.items())))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._record_fields.items())
        return f"{self._record_name}({shown})"


class TupleRecord(tuple):  # type: ignore[type-arg]
    """A named tuple of the other side: a tuple whose items are also attributes."""

    _name: str
    _fields: tuple[str, ...]

    def __new__(cls, name: str, fields: Iterable[str], items: Iterable[Any]) -> TupleRecord:
        self = tuple.__new__(cls, items)
        self.__dict__.update(_name=name, _fields=tuple(fields))
        return self

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", ())
        if name in fields:
            return self[fields.index(name)]
        raise AttributeError(f"no field {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("TupleRecord cannot be changed")

    def __reduce__(self) -> tuple[Any, ...]:
        return TupleRecord, (self._name, self._fields, tuple(self))

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{name}={item!r}' for name, item in zip(self._fields, self))})"


class Member(_Frozen):
    """A member of an enum of the other side."""

    __slots__ = ("type_name", "name", "value")  # noqa: RUF023 - the order of the constructor
    type_name: str
    name: str | None
    value: Any

    def __init__(self, type_name: str, name: str | None, value: Any) -> None:
        self._set(type_name, name, value)

    def __repr__(self) -> str:
        return f"<{self.type_name}.{self.name}: {self.value!r}>"


class Missing(_Frozen):
    """`NaT` or `NA` of pandas."""

    __slots__ = ("kind",)
    kind: str

    def __init__(self, kind: str) -> None:
        self._set(kind)

    def __repr__(self) -> str:
        return self.kind


class Array(_Frozen):
    """A numeric or text array without numpy: little-endian items in C order."""

    __slots__ = ("dtype", "shape", "data")  # noqa: RUF023 - the order of the constructor
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self._set(dtype, tuple(shape), bytes(data))

    def tolist(self) -> Any:
        """Nested lists of Python values; dates and durations as counts of the unit in `dtype`, NaT as None."""
        items: list[Any] = _array_items(self.dtype, self.data)
        if not self.shape:
            return items[0]
        for size in self.shape[:0:-1]:
            items = [items[at : at + size] for at in range(0, len(items), size)] if size else []
        if 0 in self.shape[1:]:
            return _empty_nest(self.shape)
        return items


class Image(_Frozen):
    """A picture as the bytes of a PNG file."""

    __slots__ = ("format", "data")  # noqa: RUF023 - the order of the constructor
    format: str
    data: bytes

    def __init__(self, format: str, data: bytes) -> None:
        self._set(format, bytes(data))

    @property
    def size(self) -> tuple[int, int]:
        return _png_size(self.data)


class Column(_Frozen):
    """One column, or an index, of a table without pandas.

    `kind` says what `data` is: `array` an `Array` of one dimension, `range` a range, `category` an `Array` of codes
    into `categories`, `zoned` an `Array` of UTC times shown in `zone`, else a tuple of values and the name of the
    pandas type.
    """

    __slots__ = ("name", "kind", "data", "categories", "ordered", "zone")  # noqa: RUF023 - the order of the constructor
    name: Any
    kind: str
    data: Any
    categories: Column | None
    ordered: bool
    zone: str | None

    def __init__(
        self,
        name: Any,
        kind: str,
        data: Any,
        categories: Column | None = None,
        ordered: bool = False,
        zone: str | None = None,
    ) -> None:
        self._set(name, kind, data, categories, ordered, zone)

    def __len__(self) -> int:
        return self.data.shape[0] if type(self.data) is Array else len(self.data)

    def tolist(self) -> list[Any]:
        """The values; times as counts of the unit in the dtype."""
        if self.categories is not None:
            names = self.categories.tolist()
            return [names[code] if code >= 0 else None for code in self.data.tolist()]
        return self.data.tolist() if type(self.data) is Array else list(self.data)


class Series(_Frozen):
    """A pandas Series without pandas."""

    __slots__ = ("column", "index")
    column: Column
    index: Column

    def __init__(self, column: Column, index: Column) -> None:
        self._set(column, index)


class Table(_Frozen):
    """A pandas DataFrame without pandas; `header` holds the names of the columns."""

    __slots__ = ("columns", "header", "index")
    columns: tuple[Column, ...]
    header: Column
    index: Column

    def __init__(self, columns: Iterable[Column], header: Column, index: Column) -> None:
        self._set(tuple(columns), header, index)

    def __len__(self) -> int:
        return len(self.index)

    def rows(self) -> list[dict[Any, Any]]:
        """One dict a row, by column name."""
        names = self.header.tolist()
        cells = [column.tolist() for column in self.columns]
        return [dict(zip(names, row)) for row in zip(*cells)] if cells else [{} for _ in range(len(self))]


# ---- arrays, pictures and tables: checks and conversions ----

_DTYPE = re.compile(
    r"(?:\|b1|\|[iu]1|<[iuf][248]|<c(?:8|16)|\|S[1-9][0-9]{0,5}|<U[1-9][0-9]{0,5}"
    r"|<[Mm]8(?:\[(?:[1-9][0-9]{0,5})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)\Z"
)
_STRUCT = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_STRUCT.update({"f2": "e", "f4": "f", "f8": "d", "c8": "f", "c16": "d", "M8": "q", "m8": "q"})
_NAT = -(1 << 63)
_NULLABLE: dict[str, tuple[type, ...]] = {f"{sign}Int{bits}": (int,) for sign in ("", "U") for bits in (8, 16, 32, 64)}
_NULLABLE.update(boolean=(bool,), Float32=(float,), Float64=(float, int), string=(str,), str=(str, float))
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_PNG_MODES = frozenset(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"))
_ZONE = re.compile(r"[A-Za-z0-9_+\-:]{1,40}(?:/[A-Za-z0-9_+\-]{1,40}){0,3}\Z")


def _item_bytes(dtype: str) -> int:
    if dtype[1] == "U":
        return 4 * int(dtype[2:])
    return 8 if dtype[1] in "Mm" else int(dtype[2:])


def _array_items(dtype: str, data: bytes) -> list[Any]:
    import struct

    kind, width = dtype[1], _item_bytes(dtype)
    if kind == "b":
        return [byte != 0 for byte in data]
    if kind in "US":
        chunks = [data[at : at + width] for at in range(0, len(data), width)]
        if kind == "S":
            return [chunk.rstrip(b"\0") for chunk in chunks]
        return [chunk.decode("utf-32-le", "surrogatepass").rstrip("\0") for chunk in chunks]
    code = _STRUCT[dtype[1:3] if kind in "Mm" else dtype[1:]]
    flat = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    if kind == "c":
        return [complex(*pair) for pair in zip(flat[::2], flat[1::2])]
    return [None if item == _NAT else item for item in flat] if kind in "Mm" else list(flat)


def _empty_nest(shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1 or not shape[0]:
        return []
    return [_empty_nest(shape[1:]) for _ in range(shape[0])]


def _checked_array(dtype: object, shape: object, data: bytes) -> Array:
    """An `Array` whose shape, item size and bytes agree; everything is checked before anything is allocated."""
    if type(dtype) is not str or not _DTYPE.match(dtype):
        raise MalformedValue("holds an array of an unknown dtype")
    if type(shape) is not list or len(shape) > MAX_ARRAY_DIMENSIONS:
        raise MalformedValue("holds an array without a proper shape")
    count = nonzero = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_VALUE_BYTES:
            raise MalformedValue("holds an array without a proper shape")
        count *= size
        nonzero *= size or 1
        if nonzero > MAX_VALUE_NODES * 64:
            raise MalformedValue("holds an array that claims too many items")
    if count * _item_bytes(dtype) != len(data) or (not count and nonzero > MAX_VALUE_NODES):
        raise MalformedValue("holds an array whose shape and bytes disagree")
    if dtype == "|b1" and data.translate(None, b"\0\1"):
        raise MalformedValue("holds a boolean array with other bytes than 0 and 1")
    if dtype[1] == "U":
        data.decode("utf-32-le", "surrogatepass")
    return Array(dtype, tuple(shape), data)


def _png_size(data: bytes) -> tuple[int, int]:
    if data[:16] != _PNG or len(data) < 33:
        raise MalformedValue("holds a picture that is no PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if not width or not height or width * height > MAX_IMAGE_PIXELS:
        raise MalformedValue(f"holds a picture of {width} x {height} pixels, outside 1 to {MAX_IMAGE_PIXELS}")
    return width, height


def _array_of(value: Any, room: int) -> Array:
    """The `Array` of a numpy array or scalar, refused before it is copied when it cannot fit."""
    dtype = value.dtype.newbyteorder("<")
    if dtype.str in ("<U0", "|S0"):
        dtype = sys.modules["numpy"].dtype(dtype.str[:2] + "1")
    if not _DTYPE.match(dtype.str):
        way = "give it a numeric dtype, or convert with .tolist()"
        raise UnportableValue(f"is an array of dtype {str(value.dtype)[:60]}, which has no plain form", way)
    if value.size * dtype.itemsize * 4 // 3 > room:
        raise ValueTooLarge(f"is an array of {value.nbytes:,} bytes, more than fits in a value", _TO_FILE)
    return Array(dtype.str, tuple(value.shape), value.astype(dtype).tobytes())


def _image_of(value: Any) -> Image:
    import io

    width, height = value.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueTooLarge(f"is a picture of {width} x {height} pixels (at most {MAX_IMAGE_PIXELS:,})", _TO_FILE)
    if value.mode not in _PNG_MODES or not width or not height:
        what = f"is a picture of mode {value.mode!r} and size {width} x {height}, which PNG cannot hold"
        raise UnportableValue(what, "convert with .convert('RGB')")
    buffer = io.BytesIO()
    value.save(buffer, "PNG")
    return Image("png", buffer.getvalue())


def _column_of(values: Any, name: Any, room: int) -> Column:
    """The `Column` of a pandas Series or Index."""
    pandas = sys.modules["pandas"]
    dtype, kind = values.dtype, str(values.dtype)
    if isinstance(values, pandas.MultiIndex):
        raise UnportableValue("has an index of several levels", "convert with .reset_index()")
    if len(values) > min(room, MAX_TABLE_ROWS):
        raise ValueTooLarge(f"is a table of {len(values):,} rows, more than fits in a value", _TO_FILE)
    if isinstance(values, pandas.RangeIndex):
        return Column(name, "range", range(values.start, values.stop, values.step))
    if isinstance(values, pandas.Index):
        values = pandas.Series(values)
    if isinstance(dtype, pandas.CategoricalDtype):
        codes = _array_of(values.cat.codes.to_numpy(), room)
        return Column(name, "category", codes, _column_of(dtype.categories, None, room), bool(dtype.ordered))
    if isinstance(dtype, pandas.DatetimeTZDtype):
        naive = values.dt.tz_convert("UTC").dt.tz_localize(None)
        return Column(name, "zoned", _array_of(naive.to_numpy(), room), zone=str(dtype.tz))
    if kind in _NULLABLE:
        return Column(name, kind, tuple(None if item is pandas.NA else item for item in values.tolist()))
    if kind == "object":
        return Column(name, kind, tuple(values.tolist()))
    if not hasattr(dtype, "newbyteorder"):
        raise UnportableValue(f"has the pandas type {kind[:60]}, which has no plain form", "convert with .astype(str)")
    return Column(name, "array", _array_of(values.to_numpy(), room))


def _table_of(frame: Any, room: int) -> Table:
    if len(frame) * max(1, len(frame.columns)) > room:
        size = f"{len(frame):,} x {len(frame.columns):,}"
        raise ValueTooLarge(f"is a table of {size} cells, more than fits in a value", _TO_FILE)
    header = _column_of(frame.columns, frame.columns.name, room)
    columns = []
    for at in range(len(frame.columns)):
        try:
            columns.append(_column_of(frame.iloc[:, at], None, room))
        except ValueProblem as problem:
            problem.steps.append(_step(frame.columns[at]))
            raise
    return Table(columns, header, _column_of(frame.index, frame.index.name, room))


def _to_numpy(array: Array) -> Any:
    import numpy

    return numpy.frombuffer(array.data, dtype=array.dtype).reshape(array.shape).copy()


def _to_series(column: Column, index: Any = None) -> Any:
    import pandas

    data: Any
    if column.kind == "range":
        data = pandas.Series(column.data, dtype="int64")
    elif column.kind == "category":
        categories = _to_index(column.categories or column)
        data = pandas.Categorical.from_codes(_to_numpy(column.data), categories=categories, ordered=column.ordered)
    elif column.kind == "zoned":
        data = pandas.Series(_to_numpy(column.data)).dt.tz_localize("UTC").dt.tz_convert(column.zone)
    elif column.kind == "array":
        data = _to_numpy(column.data)
    elif column.kind in ("object", "str"):
        known = column.kind == "object" or _has_dtype(pandas, "str")
        data = pandas.Series(list(column.data), dtype=column.kind if known else "object")
    else:
        data = pandas.array(list(column.data), dtype=column.kind)
    series = pandas.Series(data, name=column.name)
    if index is not None:
        series.index = index
    return series


def _has_dtype(pandas: Any, name: str) -> bool:
    return str(pandas.Series([], dtype=name).dtype) == name


def _to_index(column: Column) -> Any:
    import pandas

    if column.kind == "range":
        return pandas.RangeIndex(column.data, name=column.name)
    return pandas.Index(_to_series(column), name=column.name)


def _to_frame(table: Table) -> Any:
    import pandas

    index = _to_index(table.index)
    frame = pandas.DataFrame({at: _to_series(column, index) for at, column in enumerate(table.columns)}, index=index)
    frame.columns = _to_index(table.header)
    return frame


def _to_picture(image: Image) -> Any:
    import io

    from PIL import Image as Pillow

    picture = Pillow.open(io.BytesIO(image.data), formats=("PNG",))
    if picture.size != image.size:
        raise MalformedValue("holds a picture with two sizes")
    picture.load()
    return picture


# ---- encoding ----


def _step(key: object) -> str:
    return f"[{preview(key, 40)}]"


def _text(tree: JSON) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False)


def _clean(text: str) -> bool:
    """Whether text has no lone surrogate; those do not survive JSON, UTF-8 or a database."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _class_name(cls: type) -> str:
    name = cls.__name__
    return name if type(name) is str and len(name) <= 200 and name.isidentifier() else "object"


def _overrides(cls: type, base: type) -> bool:
    """Whether a subclass of a builtin holds or shows anything but what its base holds."""
    content = ("__iter__", "__len__", "__getitem__", "__eq__", "__hash__", "__str__", "__missing__")
    for part in cls.__mro__[: cls.__mro__.index(base)]:
        if vars(part).get("__slots__") or any(name in vars(part) for name in content):
            return True
    return False


_WAYS = (
    (("generator", "map", "filter", "zip", "enumerate", "reversed", "deque", "array"), "convert with list(...)"),
    (("dict_keys", "dict_values", "dict_items", "islice", "chain", "product"), "convert with list(...)"),
    (("coroutine", "Task", "Future"), "await it first and pass what it gives"),
    (("function", "builtin_function_or_method", "method", "partial"), "call it and pass what it returns"),
    (("mappingproxy", "ChainMap", "UserDict"), "convert with dict(...)"),
    (("memoryview", "mmap"), "convert with bytes(...)"),
    (("Match",), "pass its .group() or .groups()"),
    (("TextIOWrapper", "BufferedReader", "BytesIO", "StringIO"), "pass what it reads, or the path of the file"),
    (("SimpleNamespace",), "convert with vars(...)"),
    (("module", "type"), "pass its name"),
)


def _way(cls: type) -> str:
    for names, way in _WAYS:
        if cls.__name__ in names:
            return way
    if issubclass(cls, BaseException):
        return "convert with str(...)"
    if hasattr(cls, "model_dump"):
        return "convert with .model_dump()"
    for base in (list, dict, set, frozenset, tuple, str, int, float, bytes):
        if issubclass(cls, base):
            return f"convert with {base.__name__}(...)"
    if hasattr(cls, "__next__"):
        return "convert with list(...)"
    return "pass a dict of what matters in it (for a plain object vars(...)), or its text with str(...)"


class _Encoder:
    """One walk over one value: depth, bytes and cycles are counted on the way down."""

    __slots__ = ("active", "canonical", "left", "max_bytes", "max_depth")

    def __init__(self, max_bytes: int, max_depth: int, canonical: bool = False) -> None:
        self.max_bytes = self.left = max_bytes
        self.max_depth = max_depth
        self.canonical = canonical
        self.active: set[int] = set()

    def charge(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ValueTooLarge(f"makes the whole larger than {self.max_bytes:,} bytes", _TO_FILE)

    def enter(self, value: object) -> None:
        if id(value) in self.active:
            raise UnportableValue(f"({type(value).__name__}) contains itself", "pass a copy without the cycle")
        if len(self.active) >= self.max_depth:
            raise ValueTooLarge(f"is nested deeper than {self.max_depth} levels", "flatten it, or " + _TO_FILE)
        self.active.add(id(value))

    def node(self, value: Any) -> JSON:
        plain = _PLAIN.get(type(value))
        return plain(self, value) if plain is not None else self.other(value)

    def tag(self, tag: str, fields: dict[str, JSON]) -> JSON:
        """A tagged object; `fields` are trees that were charged already."""
        self.charge(8 + len(tag) + sum(len(name) + 4 for name in fields))
        return {"$": tag, **fields}

    def on_none(self, value: None) -> JSON:
        self.charge(5)
        return value

    def on_bool(self, value: bool) -> JSON:
        self.charge(6)
        return value

    def on_int(self, value: int) -> JSON:
        value = int.__pos__(value)
        if -_SAFE_INT <= value <= _SAFE_INT:
            self.charge(len(int.__repr__(value)) + 1)
            return value
        if value.bit_length() > MAX_INT_BITS:
            raise ValueTooLarge(f"is a number of {value.bit_length():,} bits (at most {MAX_INT_BITS:,})", _TO_FILE)
        return self.tag("int", {"v": self.on_str(f"{value:x}")})

    def on_float(self, value: float) -> JSON:
        value = float.__pos__(value)
        if value - value == 0.0:
            value = value + 0.0 if self.canonical else value  # makes -0.0, which equals 0.0, one text with it
            self.charge(len(float.__repr__(value)) + 1)
            return value
        return self.tag("float", {"v": self.on_str("nan" if value != value else "inf" if value > 0 else "-inf")})

    def on_str(self, value: str) -> JSON:
        self.charge(str.__len__(value) + 3)  # before the copy below
        value = str.__str__(value)
        if _clean(value):
            self.charge(len(_quote(value)) - len(value) - 2)
            return value
        return self.tag("str", {"v": self.raw(value.encode("utf-8", "surrogatepass"))})

    def raw(self, value: bytes) -> JSON:
        self.charge(len(value) * 4 // 3 + 6)
        return binascii.b2a_base64(value, newline=False).decode("ascii")

    def on_bytes(self, value: bytes) -> JSON:
        return self.tag("bytes", {"v": self.raw(bytes.__getitem__(value, slice(None)))})

    def on_bytearray(self, value: bytearray) -> JSON:
        self.charge(len(value))
        self.left += len(value)
        return self.tag("bytearray", {"v": self.raw(bytes(value))})

    def on_complex(self, value: complex) -> JSON:
        return self.tag("complex", {"v": self.items([value.real, value.imag])})

    def on_range(self, value: range) -> JSON:
        return self.tag("range", {"v": self.items([value.start, value.stop, value.step])})

    def items(self, items: list[Any]) -> list[JSON]:
        trees: list[JSON] = []
        try:
            for item in items:
                trees.append(self.node(item))
        except ValueProblem as problem:
            problem.steps.append(f"[{len(trees)}]")
            raise
        self.charge(3)
        return trees

    def snapshot(self, value: Any, read: Callable[[Any], Iterator[Any]], size: int) -> list[Any]:
        """The items as they are now: another thread may change the container while it is walked."""
        if size * 2 > self.left:
            raise ValueTooLarge(f"holds {size:,} items, more than fit in {self.max_bytes:,} bytes", _TO_FILE)
        self.enter(value)
        return list(read(value))

    def on_list(self, value: list[Any]) -> JSON:
        items = self.snapshot(value, list.__iter__, list.__len__(value))
        try:
            return self.items(items)
        finally:
            self.active.discard(id(value))

    def on_tuple(self, value: tuple[Any, ...]) -> JSON:
        items = self.snapshot(value, tuple.__iter__, tuple.__len__(value))
        try:
            return self.tag("tuple", {"v": self.items(items)})
        finally:
            self.active.discard(id(value))

    def on_set(self, value: Any) -> JSON:
        base: Any = set if issubclass(type(value), set) else frozenset
        items = self.snapshot(value, base.__iter__, base.__len__(value))
        try:
            trees = self.items(items)
        finally:
            self.active.discard(id(value))
        return self.tag(base.__name__, {"v": self.distinct(trees, trees)})

    def distinct(self, keys: list[JSON], trees: list[JSON]) -> list[JSON]:
        """`trees` in the order of the text of their keys, of which no two may be equal."""
        texts = [_text(key) for key in keys]
        order = sorted(range(len(texts)), key=texts.__getitem__)
        for one, two in zip(order, order[1:]):
            if texts[one] == texts[two]:
                way = "convert with list(...), or change one of them"
                raise UnportableValue(f"has two keys or elements that look alike outside ({texts[one][:60]})", way)
        return [trees[at] for at in order]

    def on_dict(self, value: dict[Any, Any]) -> JSON:
        pairs = self.snapshot(value, lambda source: iter(dict.items(source)), dict.__len__(value))
        try:
            if all(type(key) is str and key != "$" and _clean(key) for key, _ in pairs):
                return self.fields(pairs)
            return self.pairs(pairs)
        finally:
            self.active.discard(id(value))

    def fields(self, pairs: Iterable[tuple[str, Any]], step: Callable[[str], str] = _step) -> JSON:
        tree: dict[str, JSON] = {}
        for key, item in pairs:
            try:
                self.charge(len(_quote(key)) + 1)
                tree[key] = self.node(item)
            except ValueProblem as problem:
                problem.steps.append(step(key))
                raise
        self.charge(3)
        return tree

    def pairs(self, pairs: list[tuple[Any, Any]]) -> JSON:
        keys: list[JSON] = []
        trees: list[JSON] = []
        for key, item in pairs:
            try:
                keys.append(self.node(key))
                trees.append([keys[-1], self.node(item)])
            except ValueProblem as problem:
                problem.steps.append(_step(key))
                raise
            self.charge(4)
        ordered = self.distinct(keys, trees)
        return self.tag("dict", {"v": ordered if self.canonical else trees})

    def other(self, value: Any) -> JSON:
        """A value of a type that is no builtin. Its module must be loaded for it to exist, so none is imported."""
        cls = type(value)
        for module, name, method in _LOADED:
            base = getattr(sys.modules.get(module), name, None)
            if base is None:
                continue
            if value is base or (isinstance(base, type) and issubclass(cls, base)):
                return method(self, value)
        if cls in _STAND_INS:
            return _STAND_INS[cls](self, value)
        if type(getattr(cls, "__dataclass_fields__", None)) is dict:
            return self.record(value)
        names = getattr(cls, "_fields", None)
        if issubclass(cls, tuple) and (cls is TupleRecord or type(names) is tuple):
            return self.named_tuple(value)
        for base in (str, float, int, bytes, list, dict, tuple, set, frozenset):
            if issubclass(cls, base) and not _overrides(cls, base) and not getattr(value, "__dict__", None):
                return _PLAIN[base](self, value)
        raise UnportableValue(f"is of type {cls.__name__[:80]}, which cannot leave its process as a value", _way(cls))

    def collection(self, value: Any) -> JSON:
        if type(value).__module__ == "collections":
            return self.on_dict(value)
        raise UnportableValue(f"is of type {type(value).__name__[:80]}, a changed dict", "convert with dict(...)")

    def nested(self, value: Any, tag: str, fields: dict[str, Any]) -> JSON:
        """A tagged object whose fields are values."""
        self.enter(value)
        try:
            return self.tag(tag, {name: self.node(item) for name, item in fields.items()})
        finally:
            self.active.discard(id(value))

    def record(self, value: Any) -> JSON:
        if type(value) is Record:
            name, pairs = value._record_name, list(value._record_fields.items())
        else:
            import dataclasses

            name, names = _class_name(type(value)), [field.name for field in dataclasses.fields(value)]
            pairs = [(field, getattr(value, field)) for field in names if hasattr(value, field)]
        self.enter(value)
        try:
            return self.tag("record", {"type": self.on_str(name), "fields": self.fields(pairs, lambda key: f".{key}")})
        finally:
            self.active.discard(id(value))

    def named_tuple(self, value: Any) -> JSON:
        name = value._name if type(value) is TupleRecord else _class_name(type(value))
        names = [field for field in value._fields if type(field) is str and field.isidentifier()]
        items = list(tuple.__iter__(value))
        if len(names) != len(items) or len(set(names)) != len(names):
            raise UnportableValue("is a named tuple whose names and items disagree", "convert with tuple(...)")
        self.enter(value)
        try:
            fields = {"type": self.on_str(name), "names": self.items(names), "v": self.items(items)}
            return self.tag("namedtuple", fields)
        finally:
            self.active.discard(id(value))

    def enum(self, value: Any) -> JSON:
        member = type(value) is Member
        kind = value.type_name if member else _class_name(type(value))
        return self.nested(value, "enum", {"type": kind, "name": value.name, "value": value.value})

    def missing(self, value: Any) -> JSON:
        return self.tag("missing", {"v": self.on_str(repr(value).strip("<>"))})

    def decimal(self, value: Any) -> JSON:
        text = str(value)
        if len(text) > MAX_DECIMAL_CHARS or abs(value.adjusted()) > MAX_DECIMAL_CHARS:
            raise ValueTooLarge(f"is a Decimal of more than {MAX_DECIMAL_CHARS:,} digits", "convert with str(...)")
        if self.canonical and value.is_finite():
            sign, digits, exponent = value.as_tuple()
            short = "".join(map(str, digits)).rstrip("0")
            exponent += len(digits) - len(short)
            text = f"{'-' if sign and short else ''}{short}e{exponent}" if short else "0"
        return self.tag("decimal", {"v": self.on_str(text)})

    def fraction(self, value: Any) -> JSON:
        top, bottom = value.numerator, value.denominator
        if max(top.bit_length(), bottom.bit_length()) > MAX_FRACTION_BITS:
            raise ValueTooLarge(f"is a Fraction of more than {MAX_FRACTION_BITS:,} bits", "convert with float(...)")
        return self.tag("fraction", {"v": self.items([top, bottom])})

    def uuid(self, value: Any) -> JSON:
        return self.tag("uuid", {"v": self.on_str(str(value))})

    def path(self, value: Any) -> JSON:
        windows = issubclass(type(value), sys.modules["pathlib"].PureWindowsPath)
        flavour = self.on_str("windows" if windows else "posix")
        return self.tag("path", {"v": self.on_str(str(value)), "flavour": flavour})

    def date(self, value: Any) -> JSON:
        return self.tag("date", {"v": self.on_str(value.isoformat()[:10])})

    def datetime(self, value: Any) -> JSON:
        if getattr(value, "nanosecond", 0):
            raise UnportableValue("is a time with nanoseconds", "convert with .round('us') or str(...)")
        return self.moment("datetime", value.tzinfo, value)

    def time(self, value: Any) -> JSON:
        return self.moment("time", value.tzinfo, value)

    def moment(self, tag: str, zone: Any, value: Any) -> JSON:
        fields: dict[str, JSON] = {}
        offset = value.utcoffset()
        name = getattr(zone, "key", None) or getattr(zone, "zone", None)
        if type(name) is not str or not _ZONE.match(name):
            name = None
        if zone is not None and offset is None and not name:
            raise UnportableValue("has a time zone without an offset", "convert with .replace(tzinfo=None)")
        if self.canonical and offset is not None and tag == "datetime":
            try:
                value, name, offset = (value - offset).replace(fold=0), None, offset * 0
            except OverflowError:
                pass  # within a day of the ends of the calendar
        if offset is not None:
            seconds = offset.total_seconds()
            fields["utc"] = self.node(int(seconds) if seconds == int(seconds) else seconds)
        if name:
            fields["zone"] = self.on_str(name)
        if value.fold:
            fields["fold"] = self.on_int(1)
        fields["v"] = self.on_str(value.replace(tzinfo=None).isoformat()[:26])
        return self.tag(tag, fields)

    def timedelta(self, value: Any) -> JSON:
        if getattr(value, "nanoseconds", 0):
            raise UnportableValue("is a duration with nanoseconds", "convert with .round('us') or str(...)")
        return self.tag("timedelta", {"v": self.items([value.days, value.seconds, value.microseconds])})

    def array(self, value: Any) -> JSON:
        if type(value) is Array:
            array = _checked_array(value.dtype, list(value.shape), value.data)
        elif type(value).__name__ in ("ndarray", "memmap"):
            array = _array_of(value, self.left)
        else:
            raise UnportableValue(f"is an array of type {type(value).__name__[:60]}", "convert with numpy.asarray(...)")
        fields: dict[str, Any] = {"dtype": self.on_str(array.dtype), "shape": self.items(list(array.shape))}
        return self.tag("array", {**fields, "data": self.raw(array.data)})

    def scalar(self, value: Any) -> JSON:
        if isinstance(value, (str, bytes)):
            return self.on_str(str(value)) if isinstance(value, str) else self.on_bytes(bytes(value))
        array = _array_of(value, self.left)
        if self.canonical and array.dtype[1] in "biufc":
            return self.node(array.tolist())  # what the tool itself gets
        return self.tag("scalar", {"dtype": self.on_str(array.dtype), "data": self.raw(array.data)})

    def image(self, value: Any) -> JSON:
        image = value if type(value) is Image else _image_of(value)
        _png_size(image.data)
        return self.tag("image", {"format": self.on_str(image.format), "data": self.raw(image.data)})

    def column(self, value: Any) -> JSON:
        column = value if type(value) is Column else _column_of(value, value.name, self.left)
        data = list(column.data) if type(column.data) is tuple else column.data
        fields = {"name": column.name, "kind": column.kind, "data": data}
        if column.categories is not None:
            fields.update(categories=column.categories, ordered=column.ordered)
        if column.zone is not None:
            fields.update(zone=column.zone)
        return self.nested(column, "column", fields)

    def series(self, value: Any) -> JSON:
        column = value.column if type(value) is Series else _column_of(value, value.name, self.left)
        index = value.index if type(value) is Series else _column_of(value.index, value.index.name, self.left)
        return self.nested(value, "series", {"column": column, "index": index})

    def table(self, value: Any) -> JSON:
        table = value if type(value) is Table else _table_of(value, self.left)
        self.enter(value)
        columns: list[JSON] = []
        try:
            for column in table.columns:
                columns.append(self.node(column))
        except ValueProblem as problem:
            names = table.header.tolist()
            problem.steps.append(_step(names[len(columns)] if len(columns) < len(names) else len(columns)))
            raise
        self.charge(3)
        fields = {"columns": columns, "header": self.node(table.header), "index": self.node(table.index)}
        self.active.discard(id(value))
        return self.tag("table", fields)


_PLAIN: dict[type, Callable[[_Encoder, Any], JSON]] = {
    type(None): _Encoder.on_none,
    bool: _Encoder.on_bool,
    int: _Encoder.on_int,
    float: _Encoder.on_float,
    str: _Encoder.on_str,
    list: _Encoder.on_list,
    dict: _Encoder.on_dict,
    tuple: _Encoder.on_tuple,
    set: _Encoder.on_set,
    frozenset: _Encoder.on_set,
    bytes: _Encoder.on_bytes,
    bytearray: _Encoder.on_bytearray,
    complex: _Encoder.on_complex,
    range: _Encoder.on_range,
}
_STAND_INS: dict[type, Callable[[_Encoder, Any], JSON]] = {
    Record: _Encoder.record,
    Member: _Encoder.enum,
    Missing: _Encoder.missing,
    Array: _Encoder.array,
    Image: _Encoder.image,
    Column: _Encoder.column,
    Series: _Encoder.series,
    Table: _Encoder.table,
}
# Narrower types stand before the wider ones they derive from: numpy.float64 is a float, NaT a datetime, that a date.
_LOADED: tuple[tuple[str, str, Callable[[_Encoder, Any], JSON]], ...] = (
    ("enum", "Enum", _Encoder.enum),
    ("numpy", "generic", _Encoder.scalar),
    ("numpy", "ndarray", _Encoder.array),
    ("pandas", "NaT", _Encoder.missing),
    ("pandas", "NA", _Encoder.missing),
    ("pandas", "DataFrame", _Encoder.table),
    ("pandas", "Series", _Encoder.series),
    ("pandas", "Index", _Encoder.column),
    ("PIL.Image", "Image", _Encoder.image),
    ("datetime", "datetime", _Encoder.datetime),
    ("datetime", "date", _Encoder.date),
    ("datetime", "time", _Encoder.time),
    ("datetime", "timedelta", _Encoder.timedelta),
    ("decimal", "Decimal", _Encoder.decimal),
    ("fractions", "Fraction", _Encoder.fraction),
    ("uuid", "UUID", _Encoder.uuid),
    ("pathlib", "PurePath", _Encoder.path),
    ("collections", "OrderedDict", _Encoder.collection),
    ("collections", "defaultdict", _Encoder.collection),
    ("collections", "Counter", _Encoder.collection),
)


# ---- decoding ----

_HEX = re.compile(r"-?[1-9a-f][0-9a-f]*\Z")
_DECIMAL = re.compile(
    r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?|Infinity|s?NaN[0-9]{0,20})\Z", re.ASCII
)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_DATE = r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
_TIME = r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{6}))?"
_DATE_RE, _TIME_RE, _DATETIME_RE = (re.compile(form + r"\Z") for form in (_DATE, _TIME, f"{_DATE}T{_TIME}"))
_FLOATS = ("nan", "inf", "-inf")


def _require(condition: object, what: str) -> None:
    if not condition:
        raise MalformedValue(f"holds {what}")


def _numbers(form: re.Pattern[str], text: object) -> list[int]:
    match = form.match(text) if type(text) is str else None
    if match is None:
        raise MalformedValue("holds a date or time in no known form")
    return [int(group or 0) for group in match.groups()]


class _Decoder:
    """One walk over one tree. Sizes are checked before anything is made of them."""

    __slots__ = ("depth", "nodes", "rich", "zones")

    def __init__(self, max_depth: int, rich: bool) -> None:
        self.depth = max_depth + 4  # a tagged leaf, such as a complex NaN, nests a little deeper than `encode` counts
        self.nodes = MAX_VALUE_NODES
        self.rich = rich
        self.zones: dict[str, Any] = {}

    def node(self, tree: JSON) -> Any:
        self.nodes -= 1
        _require(self.nodes >= 0, "too many parts")
        cls = type(tree)
        if tree is None or cls is bool:
            return tree
        if cls is str:
            _require(_clean(tree), "text with lone surrogates outside a tag")
            return tree
        if cls is int:
            _require(-_SAFE_INT <= tree <= _SAFE_INT, "an integer beyond 2**53 outside a tag")
            return tree
        if cls is float:
            _require(tree - tree == 0.0, "a number that is not finite outside a tag")
            return tree
        self.depth -= 1
        _require(self.depth >= 0, "too many levels")
        try:
            if cls is list:
                return [self.node(item) for item in tree]
            _require(cls is dict, "something that is not JSON")
            return self.tagged(tree) if "$" in tree else self.fields(tree)
        finally:
            self.depth += 1

    def fields(self, tree: JSON) -> dict[str, Any]:
        _require(type(tree) is dict, "fields that are no object")
        _require(all(type(key) is str and _clean(key) for key in tree), "a key that is no proper text")
        return {key: self.node(item) for key, item in tree.items()}

    def tagged(self, tree: dict[str, JSON]) -> Any:
        tag = tree["$"]
        known = _TAGS.get(tag) if type(tag) is str else None
        if known is None:
            raise MalformedValue("holds an unknown tag")
        read, required, optional = known
        names = set(tree) - {"$"}
        _require(required <= names <= required | optional, f"the tag {tag!r} with other fields than it has")
        return read(self, tree)

    def items(self, tree: JSON, count: int = -1) -> list[Any]:
        _require(type(tree) is list and count in (-1, len(tree)), "a tag without a proper list")
        return [self.node(item) for item in tree]

    def integers(self, tree: JSON, count: int) -> list[int]:
        numbers = self.items(tree, count)
        _require(all(type(number) is int for number in numbers), "a tag whose numbers are no integers")
        return numbers

    def name(self, tree: JSON) -> str:
        _require(type(tree) is str and tree.isidentifier(), "a name that is no identifier")
        return str(tree)

    def raw(self, tree: JSON) -> bytes:
        """Base64 in the one form `encode` writes."""
        _require(type(tree) is str and len(tree) % 4 == 0 and tree.isascii(), "bytes that are no base64")
        data = binascii.a2b_base64(tree)
        _require(binascii.b2a_base64(data, newline=False).decode("ascii") == tree, "bytes that are no base64")
        return data

    def real(self, stand_in: Any, convert: Callable[[Any], Any]) -> Any:
        """The library's own object where it is wanted and installed, else the stand-in."""
        if not self.rich:
            return stand_in
        try:
            return convert(stand_in)
        except ImportError:
            return stand_in

    def hashed(self, keys: list[Any]) -> list[Any]:
        """The keys, unless their hashes were chosen to collide."""
        counts: dict[int, int] = {}
        for key in keys:
            code = hash(key)
            counts[code] = counts.get(code, 0) + 1
            _require(counts[code] <= MAX_EQUAL_HASHES, "too many keys with one hash")
        return keys

    def on_int(self, tree: dict[str, JSON]) -> int:
        text = tree["v"]
        _require(type(text) is str and len(text) <= MAX_INT_BITS // 4 + 1 and _HEX.match(text), "no proper integer")
        number = int(text, 16)
        _require(not -_SAFE_INT <= number <= _SAFE_INT, "a small integer inside a tag")
        return number

    def on_float(self, tree: dict[str, JSON]) -> float:
        _require(type(tree["v"]) is str and tree["v"] in _FLOATS, "no proper number")
        return float(tree["v"])

    def on_str(self, tree: dict[str, JSON]) -> str:
        text = self.raw(tree["v"]).decode("utf-8", "surrogatepass")
        _require(not _clean(text), "plain text inside a tag")
        return text

    def on_bytes(self, tree: dict[str, JSON]) -> bytes:
        return self.raw(tree["v"])

    def on_bytearray(self, tree: dict[str, JSON]) -> bytearray:
        return bytearray(self.raw(tree["v"]))

    def on_complex(self, tree: dict[str, JSON]) -> complex:
        parts = self.items(tree["v"], 2)
        _require(all(type(part) is float for part in parts), "a complex number without two floats")
        return complex(*parts)

    def on_range(self, tree: dict[str, JSON]) -> range:
        return range(*self.integers(tree["v"], 3))

    def on_tuple(self, tree: dict[str, JSON]) -> tuple[Any, ...]:
        return tuple(self.items(tree["v"]))

    def on_set(self, tree: dict[str, JSON]) -> set[Any]:
        items = self.hashed(self.items(tree["v"]))
        result = set(items)
        _require(len(result) == len(items), "a set with two equal elements")
        return result

    def on_frozenset(self, tree: dict[str, JSON]) -> frozenset[Any]:
        return frozenset(self.on_set(tree))

    def on_dict(self, tree: dict[str, JSON]) -> dict[Any, Any]:
        _require(type(tree["v"]) is list, "a dict without pairs")
        pairs = [self.items(pair, 2) for pair in tree["v"]]
        self.hashed([key for key, _ in pairs])
        result = dict(pairs)
        _require(len(result) == len(pairs), "a dict with two equal keys")
        return result

    def on_record(self, tree: dict[str, JSON]) -> Record:
        fields = self.fields(tree["fields"])
        for name in fields:
            self.name(name)
        return Record(self.name(tree["type"]), fields)

    def on_namedtuple(self, tree: dict[str, JSON]) -> TupleRecord:
        _require(type(tree["names"]) is list, "a named tuple without names")
        names = [self.name(name) for name in tree["names"]]
        _require(len(set(names)) == len(names), "a named tuple with two equal names")
        return TupleRecord(self.name(tree["type"]), names, self.items(tree["v"], len(names)))

    def on_enum(self, tree: dict[str, JSON]) -> Member:
        _require(tree["name"] is None or type(tree["name"]) is str, "an enum member without a name")
        return Member(self.name(tree["type"]), self.node(tree["name"]), self.node(tree["value"]))

    def on_missing(self, tree: dict[str, JSON]) -> Any:
        _require(type(tree["v"]) is str and tree["v"] in ("NaT", "NA"), "no proper missing value")
        return self.real(Missing(tree["v"]), _to_missing)

    def on_decimal(self, tree: dict[str, JSON]) -> Any:
        from decimal import Decimal

        text = tree["v"]
        _require(type(text) is str and len(text) <= MAX_DECIMAL_CHARS and _DECIMAL.match(text), "no proper Decimal")
        number = Decimal(text)
        _require(abs(number.adjusted()) <= MAX_DECIMAL_CHARS, "a Decimal of too many digits")
        return number

    def on_fraction(self, tree: dict[str, JSON]) -> Any:
        from fractions import Fraction

        top, bottom = self.integers(tree["v"], 2)
        bits = max(top.bit_length(), bottom.bit_length())
        _require(bits <= MAX_FRACTION_BITS and bottom > 0, "no proper Fraction")
        return Fraction(top, bottom)

    def on_uuid(self, tree: dict[str, JSON]) -> Any:
        from uuid import UUID

        _require(type(tree["v"]) is str and _UUID.match(tree["v"]), "no proper UUID")
        return UUID(tree["v"])

    def on_path(self, tree: dict[str, JSON]) -> Any:
        """A pure path, which cannot touch a disk; with `rich` a real one where the flavour is this system's."""
        import pathlib

        flavour, text = self.node(tree["flavour"]), self.node(tree["v"])
        _require(type(text) is str and flavour in ("posix", "windows"), "no proper path")
        pure = pathlib.PurePosixPath(text) if flavour == "posix" else pathlib.PureWindowsPath(text)
        return self.real(pure, _to_path)

    def on_date(self, tree: dict[str, JSON]) -> Any:
        from datetime import date

        return date(*_numbers(_DATE_RE, tree["v"]))

    def on_datetime(self, tree: dict[str, JSON]) -> Any:
        import datetime

        year, month, day, hour, minute, second, micro = _numbers(_DATETIME_RE, tree["v"])
        return self.moment(tree, datetime.datetime(year, month, day, hour, minute, second, micro))

    def on_time(self, tree: dict[str, JSON]) -> Any:
        import datetime

        hour, minute, second, micro = _numbers(_TIME_RE, tree["v"])
        return self.moment(tree, datetime.time(hour, minute, second, micro))

    def moment(self, tree: dict[str, JSON], naive: Any) -> Any:
        """The zone by name where it is known here and agrees with the offset that was sent, else that offset."""
        import datetime

        _require("fold" not in tree or (type(tree["fold"]) is int and tree["fold"] == 1), "no proper fold")
        naive = naive.replace(fold=1 if "fold" in tree else 0)
        seconds = tree.get("utc")
        _require(seconds is None or (type(seconds) in (int, float) and abs(seconds) < 86400), "no proper UTC offset")
        _require("utc" not in tree or seconds is not None, "no proper UTC offset")
        fixed = None if seconds is None else datetime.timezone(datetime.timedelta(seconds=seconds))
        if "zone" not in tree:
            return naive.replace(tzinfo=fixed)
        zone = self.zone(tree["zone"])
        _require(zone is not None or fixed is not None, "an unknown time zone")
        zoned = naive.replace(tzinfo=zone)
        agrees = zone is not None and (fixed is None or zoned.utcoffset() == fixed.utcoffset(None))
        return zoned if agrees else naive.replace(tzinfo=fixed)

    def zone(self, name: JSON) -> Any:
        import zoneinfo

        _require(type(name) is str and _ZONE.match(name), "no proper time zone")
        if name not in self.zones:
            _require(len(self.zones) < MAX_ZONES, "too many time zones")
            try:
                self.zones[name] = zoneinfo.ZoneInfo(name)
            except (KeyError, ValueError, OSError):
                self.zones[name] = None
        return self.zones[name]

    def on_timedelta(self, tree: dict[str, JSON]) -> Any:
        from datetime import timedelta

        return timedelta(*self.integers(tree["v"], 3))

    def array(self, tree: JSON) -> Array:
        _require(type(tree) is dict and set(tree) == {"$", "dtype", "shape", "data"}, "no proper array")
        _require(tree["$"] == "array", "no proper array")
        return _checked_array(tree["dtype"], tree["shape"], self.raw(tree["data"]))

    def on_array(self, tree: dict[str, JSON]) -> Any:
        return self.real(self.array(tree), _to_numpy)

    def on_scalar(self, tree: dict[str, JSON]) -> Any:
        array = _checked_array(tree["dtype"], [], self.raw(tree["data"]))
        _require(array.dtype[1] in "biufcMm", "no proper scalar")
        plain = array if array.dtype[1] in "Mm" else array.tolist()
        return self.real(plain, lambda _: _to_numpy(array)[()])

    def on_image(self, tree: dict[str, JSON]) -> Any:
        _require(type(tree["format"]) is str and tree["format"] == "png", "a picture of an unknown format")
        data = self.raw(tree["data"])
        _png_size(data)
        return self.real(Image("png", data), _to_picture)

    def column(self, tree: JSON, inner: bool = False) -> Column:
        _require(type(tree) is dict and tree.get("$") == "column", "no proper column")
        required, optional = _TAGS["column"][1:]
        _require(required <= set(tree) - {"$"} <= required | optional, "no proper column")
        kind, source = tree["kind"], tree["data"]
        _require(type(kind) is str and kind in _COLUMNS and not (inner and kind == "category"), "an unknown column")
        data: Any
        if kind in ("array", "category", "zoned"):
            data = self.array(source)
        elif kind == "range":
            data = self.node(source)
        else:
            data = tuple(self.items(source))
        categories = self.column(tree["categories"], True) if "categories" in tree else None
        ordered = tree.get("ordered", False)
        _require(type(ordered) is bool, "a column with a stray order")
        column = Column(self.node(tree["name"]), kind, data, categories, ordered, tree.get("zone"))
        _check_column(column)
        return column

    def on_column(self, tree: dict[str, JSON]) -> Any:
        return self.real(self.column(tree), _to_index)

    def on_series(self, tree: dict[str, JSON]) -> Any:
        series = Series(self.column(tree["column"]), self.column(tree["index"]))
        _require(len(series.column) == len(series.index), "a series whose index has another length")
        return self.real(series, lambda it: _to_series(it.column, _to_index(it.index)))

    def on_table(self, tree: dict[str, JSON]) -> Any:
        _require(type(tree["columns"]) is list, "a table without columns")
        columns = [self.column(column) for column in tree["columns"]]
        table = Table(columns, self.column(tree["header"]), self.column(tree["index"]))
        _require(len(table.header) == len(columns), "a table whose header has another length")
        _require(all(len(column) == len(table.index) for column in columns), "a table whose columns differ in length")
        return self.real(table, _to_frame)


_COLUMNS = {"array", "category", "zoned", "range", "object", *_NULLABLE}


def _check_column(column: Column) -> None:
    kind, data = column.kind, column.data
    _require((column.categories is not None) == (kind == "category"), "a column with stray categories")
    _require(kind == "category" or not column.ordered, "a column with a stray order")
    _require((column.zone is not None) == (kind == "zoned"), "a column with a stray zone")
    if kind == "range":
        _require(isinstance(data, range) and abs(data.stop - data.start) <= _SAFE_INT, "an index that is no range")
        _require(len(data) <= MAX_TABLE_ROWS, "a table of too many rows")
    elif type(data) is Array:
        _require(len(data.shape) == 1, "a column of several dimensions")
    elif kind != "object":
        allowed = _NULLABLE[kind]
        _require(all(item is None or type(item) in allowed for item in data), "a column with items of another type")
        _require(kind != "str" or all(item != item for item in data if type(item) is float), "a number in text")
    if column.categories is not None:
        _require(data.dtype[1] == "i", "a category without codes")
        top = len(column.categories)
        _require(all(-1 <= code < top for code in data.tolist()), "a category with an unknown code")
    if column.zone is not None:
        _require(type(column.zone) is str and _ZONE.match(column.zone), "no proper time zone")
        _require(data.dtype in ("<M8[s]", "<M8[ms]", "<M8[us]", "<M8[ns]"), "times of an unknown unit")


def _to_path(pure: Any) -> Any:
    import pathlib

    path = pathlib.Path(pure)
    return path if isinstance(path, type(pure)) else pure


def _to_missing(missing: Missing) -> Any:
    import pandas

    return getattr(pandas, missing.kind)


def _tag(read: Callable[[_Decoder, Any], Any], required: str, optional: str = "") -> Any:
    return read, frozenset(required.split()), frozenset(optional.split())


_TAGS: dict[str, tuple[Callable[[_Decoder, Any], Any], frozenset[str], frozenset[str]]] = {
    "int": _tag(_Decoder.on_int, "v"),
    "float": _tag(_Decoder.on_float, "v"),
    "str": _tag(_Decoder.on_str, "v"),
    "bytes": _tag(_Decoder.on_bytes, "v"),
    "bytearray": _tag(_Decoder.on_bytearray, "v"),
    "complex": _tag(_Decoder.on_complex, "v"),
    "range": _tag(_Decoder.on_range, "v"),
    "tuple": _tag(_Decoder.on_tuple, "v"),
    "set": _tag(_Decoder.on_set, "v"),
    "frozenset": _tag(_Decoder.on_frozenset, "v"),
    "dict": _tag(_Decoder.on_dict, "v"),
    "record": _tag(_Decoder.on_record, "type fields"),
    "namedtuple": _tag(_Decoder.on_namedtuple, "type names v"),
    "enum": _tag(_Decoder.on_enum, "type name value"),
    "missing": _tag(_Decoder.on_missing, "v"),
    "decimal": _tag(_Decoder.on_decimal, "v"),
    "fraction": _tag(_Decoder.on_fraction, "v"),
    "uuid": _tag(_Decoder.on_uuid, "v"),
    "path": _tag(_Decoder.on_path, "v flavour"),
    "date": _tag(_Decoder.on_date, "v"),
    "datetime": _tag(_Decoder.on_datetime, "v", "utc zone fold"),
    "time": _tag(_Decoder.on_time, "v", "utc zone fold"),
    "timedelta": _tag(_Decoder.on_timedelta, "v"),
    "array": _tag(_Decoder.on_array, "dtype shape data"),
    "scalar": _tag(_Decoder.on_scalar, "dtype data"),
    "image": _tag(_Decoder.on_image, "format data"),
    "column": _tag(_Decoder.on_column, "name kind data", "categories ordered zone"),
    "series": _tag(_Decoder.on_series, "column index"),
    "table": _tag(_Decoder.on_table, "columns header index"),
}


# ---- what others call ----


def encode(
    value: Any, *, name: str = "value", max_bytes: int = MAX_VALUE_BYTES, max_depth: int = MAX_VALUE_DEPTH
) -> JSON:
    """The tagged JSON tree of a value; its compact text is at most `max_bytes` long.

    Raises `UnportableValue` or `ValueTooLarge`; the message starts with the place, written from `name`, and ends with
    the way on. Reads the value's own attributes and nothing else, but a class may make even that run its code.
    """
    return _encode(value, _Encoder(max_bytes, max_depth), name)


def _encode(value: Any, encoder: _Encoder, name: str) -> JSON:
    try:
        return encoder.node(value)
    except ValueProblem as problem:
        problem.root = name
        raise
    except RecursionError:
        raise ValueTooLarge("is nested too deeply for the stack that is left", "flatten it") from None
    except Exception as error:
        # Properties and conversions of foreign classes run while they are read.
        raise UnportableValue(f"raised {type(error).__name__} while it was read", _way(type(value))) from error


def decode(tree: JSON, *, rich: bool = False, max_depth: int = MAX_VALUE_DEPTH) -> Any:
    """The value of a tagged JSON tree from an untrusted side. Raises `MalformedValue` and nothing else.

    `rich` gives numpy, pandas and PIL objects and real paths where those libraries are installed.
    """
    try:
        return _Decoder(max_depth, rich).node(tree)
    except MalformedValue:
        raise
    except Exception as error:
        # What constructors of the standard library and of numpy refuse is as malformed as what we refuse.
        raise MalformedValue(f"holds what {type(error).__name__} refused") from error


def dumps(
    value: Any, *, name: str = "value", max_bytes: int = MAX_VALUE_BYTES, max_depth: int = MAX_VALUE_DEPTH
) -> str:
    """`encode` as compact ASCII text."""
    tree = encode(value, name=name, max_bytes=max_bytes, max_depth=max_depth)
    return json.dumps(tree, separators=(",", ":"), allow_nan=False, check_circular=False)


def loads(
    text: object, *, rich: bool = False, max_bytes: int = MAX_VALUE_BYTES, max_depth: int = MAX_VALUE_DEPTH
) -> Any:
    """`decode` of text. Raises `MalformedValue` and nothing else."""
    if not isinstance(text, str) or len(text) > max_bytes:
        raise MalformedValue(f"is no text of at most {max_bytes:,} characters")
    try:
        tree = json.loads(text, parse_constant=_no_number, parse_int=_small_int)
    except MalformedValue:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedValue("is no JSON") from error
    return decode(tree, rich=rich, max_depth=max_depth)


def _no_number(text: str) -> NoReturn:
    raise MalformedValue(f"holds {text}, which is not JSON")


def _small_int(text: str) -> int:
    if len(text) > 17:  # the conversion of a long one is quadratic
        raise MalformedValue("holds an integer beyond 2**53 outside a tag")
    return int(text)


def canonical(value: Any, *, max_bytes: int = MAX_VALUE_BYTES, max_depth: int = MAX_VALUE_DEPTH) -> str:
    """One text per value: equal values of equal types give equal text, and 1, 1.0 and True differ.

    The order of dicts and sets does not count, nor do the zone in which a moment is given, trailing zeros of a Decimal,
    the sign of zero, or whether a number is numpy's. It is meant for hashing; use `dumps` to get the value back.
    """
    return _text(_encode(value, _Encoder(max_bytes, max_depth, canonical=True), "value"))


def digest(value: Any, *, max_bytes: int = MAX_VALUE_BYTES, max_depth: int = MAX_VALUE_DEPTH) -> str:
    """The SHA-256 of `canonical`, in hexadecimal."""
    import hashlib

    return hashlib.sha256(canonical(value, max_bytes=max_bytes, max_depth=max_depth).encode("ascii")).hexdigest()


def preview(value: Any, max_chars: int) -> str:
    """The value as text of at most `max_chars` characters (at least 40); each cut says how much is missing."""
    room = max(40, max_chars)
    text = _show(value, room, 0)
    if len(text) > room:
        note = f"… ({len(text):,} characters, cut)"
        text = text[: room - len(note)] + note
    return text


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}


def _show(value: Any, room: int, depth: int) -> str:
    cls = type(value)
    if cls is str or cls is bytes:
        if len(value) <= room:
            return repr(value)
        kept = max(8, room - 30)
        return f"{value[:kept]!r}… ({len(value) - kept:,} more {'characters' if cls is str else 'bytes'})"
    if cls is int and value.bit_length() > 4096:
        return f"<an integer of {value.bit_length():,} bits>"
    if cls in _BRACKETS and value:
        return _show_items(value, room, depth)
    try:
        text = repr(value)
    except Exception as error:
        return f"<{cls.__name__[:60]} whose repr raised {type(error).__name__[:60]}>"
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text[: room + 1]) + text[room + 1 :]


def _show_items(value: Any, room: int, depth: int) -> str:
    start, end = _BRACKETS[type(value)]
    if depth >= 20:
        return f"{start}… {len(value):,} items{end}"
    shown: list[str] = []
    left = room - len(start) - len(end)
    for item in value:
        if left < 24 and shown:
            shown.append(f"… {len(value) - len(shown):,} more")
            break
        text = _show(item, left, depth + 1)
        if type(value) is dict:
            text += ": " + _show(value[item], max(16, left - len(text)), depth + 1)
        shown.append(text)
        left -= len(text) + 2
    tail = "," if type(value) is tuple and len(value) == 1 else ""
    return start + ", ".join(shown) + tail + end
