"""Refuses options that their dataclass does not have, or whose values have another type than its fields."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "null",
}


def check_options(key: str, given: Any, options: type) -> None:
    """Raise a `ValueError`, which names key and value, for options that the dataclass `options` does not take.

    `key` is their config key.
    """
    check_type(key, given, Mapping)
    types = {field.name: field.type for field in fields(options)}
    refuse_unknown(key, given, list(types))
    for name, value in given.items():
        check_type(f"{key}.{name}", value, types[name])


def check_fields(options: Any) -> None:
    """Raise a `ValueError`, which names field and value, if a field of this dataclass has another type."""
    for option in fields(options):
        check_type(option.name, getattr(options, option.name), option.type)


def refuse_unknown(key: str, given: Iterable[str], known: list[str]) -> None:
    """Raise a `ValueError` for options that do not exist; names the first one and the known ones."""
    unknown = sorted(set(map(str, given)) - set(known))
    if unknown:
        raise ValueError(f"{key}.{unknown[0]}: no such option; known are {', '.join(known)}")


def check_type(key: str, value: Any, kind: Any) -> None:
    """Raise a `ValueError`, which names key and value, for a value of another type; `kind` is an annotation."""
    if not fits(value, kind):
        raise ValueError(f"{key}={value!r}: expected {in_words(kind)}")


def fits(value: Any, kind: Any) -> bool:
    """True if a value has the type of an annotation; for types besides numbers, texts, lists and mappings always."""
    value = value.item() if isinstance(value, np.generic) else value
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin in (int, float):
        # Other than itself is only not-a-number.
        return isinstance(value, int | origin) and not isinstance(value, bool) and value == value
    if origin in (bool, str, NoneType):
        return isinstance(value, origin)
    if not isinstance(origin, type):
        return True
    if _has_names(origin):
        return isinstance(value, Mapping | origin)
    if not issubclass(origin, Iterable):
        return True
    is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    return is_list and all(fits(entry, part) for entry in value for part in parts[:1])


def _has_names(kind: type) -> bool:
    return issubclass(kind, Mapping) or is_dataclass(kind)


def in_words(kind: Any) -> str:
    """An annotation in words, for users."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(in_words, parts))
    if origin is Literal:
        return " or ".join(map(str, parts))
    return WORDS.get(origin) or ("options with their names" if _has_names(origin) else "a list")
