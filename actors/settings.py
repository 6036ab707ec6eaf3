"""Settings as JSON and back: what `config.json` says is enough to build the same dataclasses again."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Settings as strict JSON: dataclasses become objects that name their class, so that a union member is known;
    floats that JSON has no number for become "inf", "-inf" and "nan"."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)


def restore(cls: type[T], value: Any) -> T:
    """The inverse of `plain`: a dataclass from its JSON.

    Fields may be dataclasses, unions of those, None, bool, int, float, str, Path, Literal, and tuples, lists and
    dicts of these. Every field must be there, as `plain` writes all.

    Raises:
        ValueError: a field is unknown, missing or of another type; names it. Or what `__post_init__` raises.
    """
    settings: T = _restore(cls, value, "")
    return settings


def _restore(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) is Annotated:
        return _restore(get_args(hint)[0], value, where)
    if is_dataclass(hint):
        return _dataclass(hint, value, where)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(parts, value, where)
    if origin is Literal:
        if value in parts:
            return value
    elif origin in (tuple, list) and isinstance(value, list):
        return _sequence(hint, value, where)
    elif origin is dict and isinstance(value, dict):
        return {key: _restore(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    elif hint is float and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint in (bool, int, str) and type(value) is hint:
        return value
    elif hint in (None, type(None)) and value is None:
        return None
    raise ValueError(f"settings: {where or 'the whole'} cannot be {value!r}: expected {_name(hint)}")


def _dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict) or value.get("type") != cls.__name__:
        found = value.get("type") if isinstance(value, dict) else value
        raise ValueError(f"settings: {where or 'the whole'} must be of type {cls.__name__}, not {found!r}")
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)]
    for fault, wrong in (("unknown", value.keys() - {"type", *names}), ("missing", set(names) - value.keys())):
        if wrong:
            at = f"{where}.{min(wrong)}" if where else min(wrong)
            raise ValueError(f"settings: {fault} field {at}: written by another version of {cls.__name__}?")
    return cls(**{name: _restore(hints[name], value[name], f"{where}.{name}" if where else name) for name in names})


def _union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    """By the class that the value names; else the first member, str before others, that takes it."""
    bare = [get_args(m)[0] if get_origin(m) is Annotated else m for m in members]
    if isinstance(value, dict) and "type" in value:
        for member in bare:
            if is_dataclass(member) and isinstance(member, type) and member.__name__ == value["type"]:
                return _restore(member, value, where)
    else:
        for member in sorted((m for m in bare if not is_dataclass(m)), key=lambda m: m is not str):
            try:
                return _restore(member, value, where)
            except ValueError:
                continue  # the next member may take it; if none does, the error below names them all
    found = value.get("type") if isinstance(value, dict) else value
    raise ValueError(f"settings: {where} cannot be {found!r}: expected {' or '.join(map(_name, bare))}")


def _sequence(hint: Any, value: list[Any], where: str) -> Any:
    parts = get_args(hint)
    if get_origin(hint) is list:
        return [_restore(parts[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if len(parts) == 2 and parts[1] is Ellipsis:
        parts = parts[:1] * len(value)
    if len(parts) != len(value):
        raise ValueError(f"settings: {where} must have {len(parts)} entries, not {len(value)}")
    return tuple(
        _restore(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(zip(parts, value, strict=True))
    )


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
