"""Configs: frozen dataclasses, read from TOML, overridden by ``--set a.b=c``.

An unknown key, a wrong type and a value out of range are errors that name the place and the nearest match.
Each folder owns its dataclass; only `loop` composes them. This file knows the mechanics and no setting.
Ranges are declared on the field: ``steps: int = ranged(45, low=1)``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etude.errors import ConfigError, ConfigUnreadable, nearest

T = TypeVar("T")


def ranged(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with an inclusive range."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def like(example: str, default: str = "") -> Any:
    """A string field of a dataclass. The error for a value of another type shows `example`."""
    return dataclasses.field(default=default, metadata={"example": f'"{example}"'})


def load(path: Path | str, kind: type[T], overrides: Sequence[str] = ()) -> T:
    """The config in a TOML file, with overrides applied. Raises `ConfigError`."""
    return build(kind, read(path, overrides))


def read(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a TOML file and its overrides say, not yet checked. Raises `ConfigError`."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no config at {path}", hint="give the path of a config.toml; see examples/laptop") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise ConfigUnreadable(f"{path} is not TOML", str(error), hint="mend the line it names") from None
    except OSError as error:
        hint = "give the path of a config.toml that may be read; see examples/laptop"
        raise ConfigUnreadable(f"{path} cannot be read", str(error.strerror), hint=hint) from None
    return overridden(overrides, raw)


def overridden(overrides: Sequence[str], raw: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Plain data with overrides applied. Raises `ConfigError`."""
    changed = dict(raw or {})
    for override in overrides:
        _override(changed, override)
    return changed


def leaves(plain: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Every value of nested sections by its dotted name.

    >>> leaves({"seed": 1, "rl": {"steps": 45}})
    {'seed': 1, 'rl.steps': 45}
    """
    found: dict[str, Any] = {}
    for key, value in plain.items():
        place = f"{where}.{key}" if where else key
        found |= leaves(value, place) if isinstance(value, Mapping) else {place: value}
    return found


def _override(raw: dict[str, Any], override: str) -> None:
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"--set {override!r}", "not of the form a.b=value", hint="write e.g. --set rl.steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare word is a string
    *parents, last = key.split(".")
    at = raw
    for name in parents:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {override!r}", f"{name} is a value, not a section", hint="check the dots")
    at[last] = value


def build(kind: type[T], raw: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from plain data.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Sizes:
    ...     width: int = ranged(128, low=8)
    >>> build(Sizes, {"width": 64})
    Sizes(width=64)
    >>> build(Sizes, {"wdith": 64})
    Traceback (most recent call last):
    etude.errors.ConfigError: unknown key 'wdith'
      hint: did you mean 'width'?
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        place = f"{where}.{key}" if where else key
        if key not in fields:
            raise ConfigError(f"unknown key {place!r}", hint=nearest(key, fields, where))
        values[key] = _convert(hints[key], value, place, fields[key].metadata.get("example"))
        _check_range(fields[key].metadata, values[key], place)
    missing = [
        n
        for n, f in fields.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        place = f"{where}.{missing[0]}" if where else missing[0]
        raise ConfigError(f"{place!r} is missing", hint=f"it has no default: write {missing[0]} = ...")
    try:
        return kind(**values)
    except ValueError as error:  # a dataclass's own __post_init__ check across fields
        raise ConfigError(f"[{where or 'config'}]", str(error), hint="change one of the values it names") from None


def _check_range(limits: Mapping[str, Any], value: Any, place: str) -> None:
    """Raises `ConfigError` for a number out of its field's range, and for one that is no number or without end."""
    low, high = limits.get("low"), limits.get("high")
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_range({}, item, f"{place}[{i}]")
    if not isinstance(value, int | float):
        return
    finite = isinstance(value, int) or math.isfinite(value)
    if not finite or (low is not None and value < low) or (high is not None and value > high):
        what = "is out of range" if finite else "is not a finite number"
        raise ConfigError(f"{place} = {value!r} {what}", hint=f"it must be {_span(low, high)}")


def _span(low: float | None, high: float | None) -> str:
    """A range in words."""
    if low is None and high is None:
        return "a finite number"
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"from {low} to {high}"


_KINDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "3"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("a text", '"text"'),
    Path: ("a path", '"a/path"'),
}
"""Each type in plain words, and an example of it."""


def _shown(value: Any) -> str:
    """A value that was given, as TOML writes it where TOML can."""
    return f"the section {value!r}" if isinstance(value, Mapping) else _toml_value(value)


def _convert(kind: Any, value: Any, place: str, example: str | None = None) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None or (value == "none" and type(None) in args):
            return None
        return _convert(next(a for a in args if a is not type(None)), value, place)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ConfigError(
                place, f"a section is wanted, not {_shown(value)}", hint=f"write [{place}] and keys under it"
            )
        return build(kind, value, place)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(place, f"a list is wanted, not {_shown(value)}", hint=f"write {place} = [...]")
        return tuple(_convert(args[0], v, f"{place}[{i}]") for i, v in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        if value not in list(kind):
            raise ConfigError(f"{place} = {value!r} is unknown", hint=nearest(str(value), list(kind)))
        return kind(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # its range refuses it
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words, any_example = _KINDS[kind]
        hint = f"write e.g. {place} = {example or any_example}"
        raise ConfigError(place, f"{words} is wanted, not {_shown(value)}", hint=hint)
    return value


def to_plain(config: Any) -> Any:
    """The effective config as plain data, None left out: what is stored in the run folder and digested."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        items = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
        return {k: to_plain(v) for k, v in items if v is not None}
    if isinstance(config, tuple):
        return [to_plain(v) for v in config]
    if isinstance(config, Path):
        return str(config)
    return config.value if isinstance(config, enum.Enum) else config


def to_toml(config: Any) -> str:
    """The effective config as TOML that `load` reads back to an equal config."""
    return "\n".join(_toml_section(to_plain(config), "")) + "\n"


def _toml_section(plain: Mapping[str, Any], prefix: str) -> list[str]:
    lines = [f"{k} = {_toml_value(v)}" for k, v in plain.items() if not isinstance(v, Mapping)]
    for key, value in plain.items():
        if isinstance(value, Mapping):
            name = f"{prefix}.{key}" if prefix else key
            lines += ["", f"[{name}]", *_toml_section(value, name)]
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)
