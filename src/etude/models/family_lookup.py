"""Finds a model family, by its name or for a config.json. Torch-free.

The built-in families are the modules of `models/families`; a user's own family is a plug-in."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.config import Plugin
from etude.errors import CheckpointError, ConfigError, nearest
from etude.plugins import Kind, make

if TYPE_CHECKING:
    from etude.models.config import ModelFamily  # which imports this module

FAMILIES = "etude.models.families"
"""The package with one module per built-in family."""
FAMILY_NAMES = tuple(sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "families")])))
"""The built-in families: the names of these modules."""
OWN_FAMILIES = "ETUDE_MODEL_FAMILIES"
"""Environment variable with the import paths of the user's own families, separated by commas. A family named in a
config is added to it, so child processes know it."""
_OF_WRAPPER = ("tie_word_embeddings", "quantization_config", "compression_config")
"""Keys of a model for images and text that are about the text model, too."""


@functools.cache
def family_of(name: str) -> ModelFamily:
    """Return the family with this name: one of `FAMILY_NAMES`, or a plug-in's import path.

    Raises `ConfigError` for an unknown name or a model_type that is taken, and `PluginRefused` for a bad plug-in."""
    if name in FAMILY_NAMES:
        classes = vars(importlib.import_module(f"{FAMILIES}.{name}")).values()
        (built_in,) = (c for c in classes if isinstance(c, type) and c.__module__ == f"{FAMILIES}.{name}")
        family: ModelFamily = built_in()
        return family
    if ":" not in name:
        hint = f'{nearest(name, FAMILY_NAMES)}; a family of your own is "my_package.module:Name"'
        raise ConfigError(f"model.family = {name!r} is unknown", hint=hint)
    family = make(Kind.MODEL_FAMILY, Plugin(name))
    types = {known: known for known in FAMILY_NAMES}
    types |= {make(Kind.MODEL_FAMILY, Plugin(known)).model_type: known for known in own_family_names()}
    if types.get(family.model_type, name) != name:
        raise ConfigError(
            f"the model family {name} has model_type = {family.model_type!r}",
            f"the family {types[family.model_type]} has the same one",
            hint="choose a unique model_type, and write it into config.json of its checkpoints",
        )
    os.environ[OWN_FAMILIES] = ",".join(dict.fromkeys([*own_family_names(), name]))
    return family


def own_family_names() -> list[str]:
    """Return the import paths in the environment variable `OWN_FAMILIES`, of families that users wrote."""
    return [name for name in os.environ.get(OWN_FAMILIES, "").split(",") if name]


def wrapped_family(raw: Mapping[str, Any]) -> ModelFamily | None:
    """Return the family whose `wrappers` have the model_type of `raw`, the config.json of a model for images and text.

    None for any other model_type."""
    kind = raw.get("model_type")
    families = (family_of(name) for name in (*FAMILY_NAMES, *own_family_names()))
    return next((family for family in families if kind in family.wrappers), None)


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model, from that of a model for images and text; of a text model its own.

    Raises `CheckpointError` where it has none."""
    family = wrapped_family(raw)
    if family is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            "config.json is damaged",
            f"a {raw['model_type']} model needs a section text_config, not {text!r:.80}",
            hint="copy or download the checkpoint again",
        )
    outer = {key: raw[key] for key in _OF_WRAPPER if raw.get(key) is not None}
    return {**text, **outer, "model_type": family.model_type, "architectures": [family.hf_class]}


def family_for(raw: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a config.json. Raises `CheckpointError`, which names an unknown architecture."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    listed = names[0] if isinstance(names, list) and names else None
    own = {family_of(name).model_type: name for name in own_family_names()}
    name = kind if kind in FAMILY_NAMES else own.get(kind) if isinstance(kind, str) else None
    family = None if name is None else family_of(name)
    if family is None or (listed is not None and listed != family.hf_class):
        known = [family_of(name) for name in (*FAMILY_NAMES, *own_family_names())]
        classes, types = ", ".join(dict.fromkeys(one.hf_class for one in known)), [one.model_type for one in known]
        raise CheckpointError(
            f"the architecture {listed or kind or 'unnamed'} (model_type {kind}) is not supported",
            f"etude supports only {classes} (model_type {', '.join(types)})",
            hint=f"start from a checkpoint of one of these families, or set the environment variable {OWN_FAMILIES} to"
            ' the import path of your own family, "my_package.module:Name"',
        )
    return family
