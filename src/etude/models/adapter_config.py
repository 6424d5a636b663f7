"""LoRA adapter directories: recognising them and finding their base model. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MAX_BASES = 8


def base_of(folder: Path) -> Path:
    """Return the base model's directory of an adapter directory, and any other directory itself.

    The base is searched at the path in adapter_config.json, then beside the adapter under the name `mid`, where a run
    has it. Raises `CheckpointError` when there is none, or when more than eight adapters build on each other."""
    for _ in range(_MAX_BASES):
        if not (folder / ADAPTER_CONFIG).is_file():
            return folder
        folder = next_base(folder)
    raise CheckpointError(
        f"{folder} is an adapter on top of too many adapters",
        f"at most {_MAX_BASES} are followed to their base",
        hint="export the merged model",
    )


def next_base(folder: Path) -> Path:
    """Return the base of an adapter directory, which may be an adapter itself.

    Raises `CheckpointError` when there is no checkpoint where the base should be."""
    named = read_adapter_config(folder).get("base_model_name_or_path")
    places = [Path(str(named)), folder.parent / "mid"]
    for place in places:
        if (place / "config.json").is_file() and place.resolve() != folder.resolve():
            return place
    raise CheckpointError(
        f"the base of the adapter {folder} is missing",
        f"there is no checkpoint at {named!r}",
        hint=f"copy it back, or write its path as base_model_name_or_path into {folder / ADAPTER_CONFIG}",
    )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read the JSON object in a directory's adapter_config.json.

    Raises `CheckpointError` when it is missing or damaged."""
    path = folder / ADAPTER_CONFIG
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_adapter(str(path), str(error)) from None
    if not isinstance(raw, dict):
        raise damaged_adapter(str(path), "it is not a JSON object")
    return raw


def damaged_adapter(where: str, why: str) -> CheckpointError:
    """Return the error for an adapter that cannot be used. `where` is its path, and `why` says what is wrong."""
    hint = "export it again; or merge it into its base with the tool that trained it, and use the result"
    return CheckpointError(f"{where} is damaged or not supported", why, hint=hint)
