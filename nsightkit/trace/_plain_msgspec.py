"""The few names of msgspec that the Kineto reader uses, over the standard library's ``json``.

Recordings are made on machines where only PyTorch's own company is installed. There a profile of a few
steps is decoded a dozen times more slowly, which nobody notices; everywhere else msgspec is a dependency.
"""

from __future__ import annotations

import inspect
import json as _json
import types
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["UNSET", "DecodeError", "Raw", "Struct", "UnsetType", "ValidationError", "field", "json"]

_T = TypeVar("_T")


class DecodeError(Exception):
    """The text is not JSON."""


class ValidationError(DecodeError):
    """The text is JSON of another shape."""


class Raw(bytes):
    """A value as it stands in the text."""

    __slots__ = ()


class UnsetType:
    """The type of `UNSET`."""


UNSET = UnsetType()


class _Field:
    def __init__(self, default: Any, name: str) -> None:
        self.default, self.name = default, name


def field(*, default: Any, name: str | None = None) -> Any:
    """Give a field's default and its name in JSON.

    Parameters
    ----------
    default : any
    name : str, optional
    """
    return default if name is None else _Field(default, name)


class Struct:
    """A record with typed fields."""

    _fields: typing.ClassVar[dict[str, str]] = {}  # {name in JSON: attribute}, in order of definition

    def __init_subclass__(cls, **_: object) -> None:
        cls._fields = dict(cls._fields)
        for attribute in inspect.get_annotations(cls):
            value = cls.__dict__.get(attribute)
            if isinstance(value, _Field):
                cls._fields[value.name] = attribute
                setattr(cls, attribute, value.default)
            else:
                cls._fields[attribute] = attribute

    def __init__(self, *values: Any, **named: Any) -> None:
        for attribute, value in zip(self._fields.values(), values, strict=False):
            setattr(self, attribute, value)
        for attribute, value in named.items():
            setattr(self, attribute, value)


class _Float(float):
    """A number that remembers how it was written: a time in microseconds has more digits than a float."""

    text: str


def _number(text: str) -> _Float:
    value = _Float(text)
    value.text = text
    return value


def _parse(text: bytes | str) -> Any:
    try:
        return _json.loads(text, parse_float=_number, parse_constant=_refuse)
    except ValueError as error:
        words = str(error)
        if isinstance(error, _json.JSONDecodeError) and error.msg == "Extra data":
            # The words the reader looks for, and the place in bytes.
            start = text if isinstance(text, str) else text.decode("utf-8", "replace")
            words = f"JSON is malformed: trailing characters (byte {len(start[: error.pos].encode())})"
        raise DecodeError(words) from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_Converter = Callable[[Any], Any]


def _raw(value: Any) -> Raw:
    return Raw((value.text if isinstance(value, _Float) else _json.dumps(value)).encode())


def _converter(hint: Any) -> _Converter:
    if hint is Any:
        return lambda value: value
    if hint is Raw:
        return _raw
    if typing.get_origin(hint) is list:
        item = _converter(typing.get_args(hint)[0])
        return lambda value: [item(each) for each in _only(value, list)]
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _struct(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return _union(typing.get_args(hint))
    return lambda value: _only(value, hint)


def _only(value: Any, wanted: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ValidationError(f"Expected `{wanted}`, got `{type(value).__name__}`")
    return value


def _union(hints: tuple[Any, ...]) -> _Converter:
    plain = tuple(h for h in hints if h in (int, float, str, type(None)))
    deep = [_converter(h) for h in hints if h not in plain and h is not UnsetType]

    def convert(value: Any) -> Any:
        if not isinstance(value, bool) and isinstance(value, plain):
            return value
        if not deep:
            raise ValidationError(f"got `{type(value).__name__}`")
        return deep[0](value)

    return convert


def _struct(cls: type[Struct]) -> _Converter:
    hints = typing.get_type_hints(cls)
    fields = {name: (attribute, _converter(hints[attribute])) for name, attribute in cls._fields.items()}

    def convert(value: Any) -> Any:
        made = cls.__new__(cls)
        known = made.__dict__
        for name, item in _only(value, dict).items():
            if name in fields:
                attribute, of = fields[name]
                known[attribute] = of(item)
        return made

    return convert


class _Decoder(Generic[_T]):
    def __init__(self, type: Any) -> None:  # noqa: A002 - msgspec's own name
        self._convert = _converter(type)

    def decode(self, text: bytes | str) -> Any:
        return self._convert(_parse(text))


class json:  # stands for the module msgspec.json
    """Stand-in for ``msgspec.json``."""

    Decoder = _Decoder

    @staticmethod
    def decode(text: bytes | str, type: Any = Any) -> Any:  # noqa: A002
        """Decode a text into a type.

        Parameters
        ----------
        text : bytes or str
        type : type
        """
        return _Decoder[Any](type).decode(text)
