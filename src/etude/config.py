"""Configs: frozen dataclasses that are read from TOML files and overridden by ``--set a.b=c``.

Each package defines a dataclass with its own settings; `loop` combines them. This module defines no settings. A range
is declared on the field: ``steps: int = ranged(45, low=1)``. msgspec converts the values. An unknown key, a wrong type
or a value out of range raises a `ConfigError` that names the setting and suggests a correction."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import inspect
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import msgspec

from etude.errors import ConfigError, ConfigUnreadable, EtudeError, nearest, raise_all

T = TypeVar("T")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A plug-in as named in a config: a class or function of the user's own package, and its settings.

    `path` is the import path "my_package.module:Name", or the name of a built-in plug-in. `settings` are the keyword
    arguments for it; they are validated when it is constructed (`etude.plugins.make`). `digest` is the SHA-256 of the
    module's source that a run recorded; "" if none is recorded.

    In TOML it is a string, ``policy_loss = "my_package.losses:Gspo"``, or a table with the key `kind` and the settings.
    """

    path: str  # "my_package.module:Name"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    digest: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return self.path


@dataclasses.dataclass(frozen=True)
class BuiltIn:
    """An annotation of a `Plugin` field: the names that select a built-in plug-in instead of an import path.

    Used as ``Annotated[Plugin, BuiltIn(("wandb", "trackio"))]``."""

    names: tuple[str, ...]


def named(value: str | Plugin, built_in: Collection[str]) -> str | Plugin:
    """Return a `Plugin` if `value` is an import path, else `value` itself.

    An import path is "module:Name" with a dot in the module or an upper-case first letter of the name, so that file
    paths and misspelt names are not taken for import paths. If the module is one of the `built_in` names, it is not an
    import path either.

    >>> named("my_package.module:Name", ["harbor"]).path, named("harbor:tasks", ["harbor"]), named("ls", ["ls"])
    ('my_package.module:Name', 'harbor:tasks', 'ls')
    """
    if not isinstance(value, str) or not _IMPORT_PATH.fullmatch(value):
        return value
    module, _, name = value.partition(":")
    return Plugin(value) if module not in built_in and ("." in module or name[0].isupper()) else value


def ranged(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """Return a dataclass field for a number from `low` to `high`, both included. None: no limit."""
    return dataclasses.field(default=default, metadata={"range": msgspec.Meta(ge=low, le=high)})


def like(example: str, default: str = "") -> Any:
    """Return a dataclass field for a string. `example` is shown in the error for a value of another type."""
    return dataclasses.field(default=default, metadata={"example": f'"{example}"'})


def load(path: Path | str, kind: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a TOML file, apply overrides such as "rl.steps=10", and build a config of class `kind`.

    Raises `ConfigError` for a file that cannot be read, and for unknown, missing or invalid settings."""
    return build(kind, read(path, overrides))


def read(
    path: Path | str, overrides: Sequence[str] = (), *, noun: str = "config", example: str = "examples/laptop"
) -> dict[str, Any]:
    """Read a TOML file as nested dicts and apply overrides such as "rl.steps=10". The settings are not validated.

    `noun` is the kind of the file in errors, and `example` the path of an example. Raises `ConfigUnreadable` for a file
    that is not valid TOML or cannot be read, otherwise `ConfigError`."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        hint = f"give the path of a {noun}, a TOML file; see {example}"
        raise ConfigError(f"no {noun} at {path}", hint=hint) from None
    except (ValueError, RecursionError) as error:  # a number with too many digits is a plain ValueError
        hint = "fix the line that the error names"
        if "at end of document" in str(error):
            hint = "look at the last lines for a bracket or quotation mark that is not closed"
        raise ConfigUnreadable(f"{path} is not valid TOML", str(error), hint=hint) from None
    except OSError as error:
        hint = f"give the path of a readable {noun}; see {example}"
        raise ConfigUnreadable(f"{path} cannot be read", str(error.strerror), hint=hint) from None
    return overridden(overrides, raw)


def overridden(overrides: Sequence[str], raw: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a copy of the settings `raw` (nested dicts; None: empty) with overrides such as "rl.steps=10" applied.

    A value is TOML; text that is not valid TOML is a string. Raises `ConfigError` for an override that does not have
    the form "a.b=value"."""
    changed = dict(raw or {})
    for override in overrides:
        _override(changed, override)
    return changed


def leaves(plain: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dict: dotted name → value. `where` is a prefix for all names.

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
        raise ConfigError(
            f"--set {override!r} is invalid", "it does not have the form a.b=value", hint="write e.g. --set rl.steps=10"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a word without quotes is a string
    *parents, last = key.split(".")
    at = raw
    for name in parents:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ConfigError(
                f"--set {override!r} is invalid",
                f"{name} is a value, not a section",
                hint="a dot leads into a section; check the name before it",
            )
    at[last] = value


def build(kind: Callable[..., T], raw: Mapping[str, Any], where: str = "") -> T:
    """Construct `kind` from the plain values `raw`: convert and check them, and pass them as keyword arguments.

    `kind` is a dataclass, a `msgspec.Struct`, or any other callable whose parameters are annotated. `where` is the
    dotted name of the config section, for errors. Raises `ConfigError` for unknown, missing or invalid values.

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
    try:
        return kind(**arguments(kind, raw, where))
    except ValueError as error:  # raised by __post_init__ of the dataclass
        what = f"[{where}]" if where else "the config is invalid"
        raise ConfigError(what, str(error), hint="change the values that the error names") from None


def arguments(kind: Callable[..., Any], raw: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the keyword arguments that `build` passes to `kind`: the values of `raw`, converted and checked.

    Raises `ConfigError` with all errors of the values, and `TypeError` if `kind` has a parameter that has no type
    annotation or is positional-only."""
    fields, values, errors = _fields(kind), dict[str, Any](), list[EtudeError]()
    for key, value in raw.items():
        place = f"{where}.{key}" if where else key
        if key not in fields:
            hint = nearest(key, fields, where) if fields else "remove it: this section has no settings"
            if not hint.startswith("did you mean") and (own := _plugin_named(fields, raw)):
                hint = f"if it is a setting of {own!r}, write kind = {{kind = {own!r}, {key} = ...}}; {hint}"
            errors.append(ConfigError(f"unknown key {place!r}", hint=hint))
            continue
        try:
            values[key] = _converted(fields[key].hint, value, place, fields[key].example)
        except ConfigError as error:
            errors.append(error)
    for name in (name for name, field in fields.items() if name not in raw and field.required):
        place = f"{where}.{name}" if where else name
        errors.append(ConfigError(f"{place!r} is missing", hint=f"it has no default value: write {name} = ..."))
    raise_all(errors)
    return values


def _plugin_named(fields: Mapping[str, _Field], raw: Mapping[str, Any]) -> str:
    """Return the name of the plug-in if a section has `kind` as a plain text, `kind = "..."`; otherwise ""."""
    kind, field = raw.get("kind"), fields.get("kind")
    is_plugin = field is not None and Plugin in typing.get_args(field.hint)
    return kind if is_plugin and isinstance(kind, str) else ""


@dataclasses.dataclass(frozen=True)
class _Field:
    """One field or parameter: type, whether it is required, and an example value for errors."""

    hint: Any
    required: bool
    example: str | None


@functools.cache
def _fields(kind: Callable[..., Any]) -> Mapping[str, _Field]:
    """The fields of a dataclass or Struct, or the parameters of any other callable. Raises `TypeError` for a
    positional-only parameter or one without a type."""
    declared = {f.name: f.metadata for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    if declared or hasattr(kind, "__struct_fields__"):
        hints = typing.get_type_hints(kind, include_extras=True)
    else:
        hints = typing.get_type_hints(kind.__init__ if isinstance(kind, type) else kind, include_extras=True)  # type: ignore[misc]
    fields = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY or name not in hints:
            raise TypeError(f"parameter {name!r} has no type annotation, or is positional-only")
        meta: Mapping[str, Any] = declared.get(name, {})
        hint = hints[name]
        if "range" in meta:
            hint = Annotated[hint, meta["range"]]
        fields[name] = _Field(hint, parameter.default is parameter.empty, meta.get("example"))
    return fields


def _converted(hint: Any, value: Any, place: str, example: str | None = None) -> Any:
    bare, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    kinds = typing.get_args(bare) if typing.get_origin(bare) in (types.UnionType, Union) else (bare,)
    if type(None) in kinds and value in (None, "none"):
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if Plugin in kinds:
        kinds = tuple(kind for kind in kinds if kind is not Plugin)
        built_in = next((note.names for note in notes if isinstance(note, BuiltIn)), ())
        value = _plugin(kinds, value, place, built_in)
        if isinstance(value, Plugin):
            return value
        if isinstance(value, str) and built_in:
            hint = f"{nearest(value, built_in).rstrip('?')}; or give an import path: my_package.module:Name"
            raise ConfigError(f"{place} = {value!r} is unknown", hint=hint)
        if not kinds:
            facts = f"expected an import path, got {_shown(value)}"
            raise ConfigError(place, facts, hint=f'write e.g. {place} = "my_package.module:Name"')
    bare = kinds[0] if len(kinds) == 1 else Union[kinds]  # noqa: UP007  of a tuple
    if isinstance(bare, type) and (dataclasses.is_dataclass(bare) or issubclass(bare, msgspec.Struct)):
        if not isinstance(value, Mapping):
            facts = f"expected a section, got {_shown(value)}"
            raise ConfigError(place, facts, hint=f"write [{place}] and keys under it")
        return build(bare, value, place)
    if typing.get_origin(bare) is tuple and typing.get_args(bare)[-1] is ...:
        if not isinstance(value, list):
            brackets = f"[[{place}]] with double brackets" if isinstance(value, Mapping) else f"{place} = [...]"
            raise ConfigError(place, f"expected a list, got {_shown(value)}", hint=f"write {brackets}")
        return _all_converted(typing.get_args(bare)[0], dict(enumerate(value)), place, "{}[{}]")
    if typing.get_origin(bare) is Mapping:
        if not isinstance(value, Mapping):
            facts = f"expected a section, got {_shown(value)}"
            raise ConfigError(place, facts, hint=f"write [{place}] and keys under it")
        return dict(zip(value, _all_converted(typing.get_args(bare)[1], value, place, "{}.{}"), strict=True))
    if float in kinds and type(value) is int:
        value = float(value) if abs(value) < 1 << 1023 else math.copysign(math.inf, 1 if value > 0 else -1)
    whole = Annotated[(bare, *notes)] if notes else bare
    try:
        converted = msgspec.convert(value, whole, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise _invalid(bare, notes, value, place, example, str(error)) from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{place} = {value!r} is not a finite number", hint=f"it must be {_span(notes)}")
    return converted


def _all_converted(hint: Any, values: Mapping[Any, Any], place: str, form: str) -> tuple[Any, ...]:
    converted, errors = list[Any](), list[EtudeError]()
    for key, value in values.items():
        try:
            converted.append(_converted(hint, value, form.format(place, key)))
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    return tuple(converted)


def _plugin(built_in: Sequence[Any], value: Any, place: str, plugins: Collection[str]) -> Any:
    """A `Plugin` for a table with `kind`, and for an import path where the built-in choices are an enumeration; any
    other value unchanged. `built_in`: the other types of the field; `plugins`: names of built-in plug-ins. Raises
    `ConfigError`."""
    names = [str(name) for kind in built_in if issubclass(kind, enum.Enum) for name in kind]
    if isinstance(value, Mapping):
        settings = dict(value)
        kind = settings.pop("kind", None)
        if not isinstance(kind, str):
            hint = f'write kind = "my_package.module:Name" under [{place}], with its settings'
            raise ConfigError(f"{place}.kind", "expected the name or the import path of a plug-in", hint=hint)
        if kind in plugins or (_IMPORT_PATH.fullmatch(kind) and kind not in names):
            return Plugin(kind, settings)
        if settings and not plugins:
            hint = f"only a plug-in has its own table; settings of {place} = {kind!r} are in the section around it"
            raise ConfigError(f"unknown key {f'{place}.{next(iter(settings))}'!r}", hint=hint)
        return kind
    if isinstance(value, str) and value in plugins:
        return Plugin(value)
    return named(value, names) if isinstance(value, str) and (names or plugins or not built_in) else value


def _path(kind: type, value: Any) -> Any:
    """Convert to a path, the only type that msgspec does not convert."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise msgspec.ValidationError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


_KINDS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "3"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("a string", '"text"'),
    Path: ("a path", '"a/path"'),
}
"""For each type: its name and an example, for errors."""


def _invalid(kind: Any, notes: Sequence[Any], value: Any, place: str, example: str | None, message: str) -> ConfigError:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ConfigError(f"{place} = {value!r} is unknown", hint=nearest(str(value), [one.value for one in kind]))
    if kind in (int, float) and ", got " not in message:
        what = "is out of range" if isinstance(value, int) or math.isfinite(value) else "is not a finite number"
        return ConfigError(f"{place} = {value!r} {what}", hint=f"it must be {_span(notes)}")
    if kind not in _KINDS:
        return ConfigError(
            place,
            f"{message.partition(' - at ')[0]}; got {_shown(value)}",
            hint="correct the value, or remove the setting",
        )
    type_name, any_example = _KINDS[kind]
    hint = f"write e.g. {place} = {example or any_example}"
    return ConfigError(place, f"expected {type_name}, got {_shown(value)}", hint=hint)


def _span(notes: Sequence[Any]) -> str:
    note = next((note for note in notes if isinstance(note, msgspec.Meta)), msgspec.Meta())
    if note.ge is not None and note.le is not None:
        return f"from {note.ge} to {note.le}"
    limits = {"at least": note.ge, "more than": note.gt, "at most": note.le, "less than": note.lt}
    return " and ".join(f"{how} {limit}" for how, limit in limits.items() if limit is not None) or "a finite number"


def _shown(value: Any) -> str:
    return f"the section {value!r}" if isinstance(value, Mapping) else _toml_value(value)


def plugins_in(config: Any, where: str = "") -> Iterator[tuple[str, Plugin]]:
    """Yield (dotted setting, plug-in) for each plug-in in a config, such as ``("learner.policy_loss", Plugin(...))``.

    A string whose field has the metadata ``plugin`` is a plug-in if it is an import path. `where` is a prefix for the
    settings."""
    if isinstance(config, Plugin):
        yield where, config
    elif isinstance(config, tuple):
        for i, one in enumerate(config):
            yield from plugins_in(one, f"{where}[{i}]")
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.metadata.get("plugin") and _IMPORT_PATH.fullmatch(value):
                value = Plugin(value)
            yield from plugins_in(value, f"{where}.{field.name}" if where else field.name)


def with_digests(config: T, digests: Mapping[str, str]) -> T:
    """Return a copy of a config whose plug-ins have the given source digests. `digests`: import path → SHA-256."""
    if isinstance(config, Plugin):
        return dataclasses.replace(config, digest=digests.get(config.path, ""))
    if isinstance(config, tuple):
        return type(config)(with_digests(one, digests) for one in config)
    if not dataclasses.is_dataclass(config) or isinstance(config, type) or not any(plugins_in(config)):
        return config
    return dataclasses.replace(
        config, **{f.name: with_digests(getattr(config, f.name), digests) for f in dataclasses.fields(config)}
    )


def to_plain(config: Any) -> Any:
    """Convert a config to dicts, lists and scalars, as for JSON. Fields that are None are left out."""
    if isinstance(config, Plugin):
        return {"kind": config.path, **config.settings}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        items = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
        return {k: to_plain(v) for k, v in items if v is not None}
    if isinstance(config, tuple):
        return [to_plain(v) for v in config]
    if isinstance(config, Path):
        return str(config)
    return config.value if isinstance(config, enum.Enum) else config


def to_toml(config: Any) -> str:
    """Convert a config, with its defaults, to TOML text. `load` reads an equal config from it."""
    return "\n".join(_toml_section(to_plain(config), "")) + "\n"


def _toml_section(plain: Mapping[str, Any], prefix: str) -> list[str]:
    lines = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in plain.items() if not isinstance(v, Mapping)]
    for key, value in plain.items():
        if isinstance(value, Mapping):
            name = f"{prefix}.{_toml_key(key)}" if prefix else _toml_key(key)
            lines += ["", f"[{name}]", *_toml_section(value, name)]
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else repr(value)
