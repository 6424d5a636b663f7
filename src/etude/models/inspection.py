"""What a checkpoint directory contains, and everything that etude cannot use in it, from config.json and the headers of
its files. Torch-free: reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from etude.errors import CheckpointError
from etude.models.adapter_config import base_of
from etude.models.config import ModelConfig, ModelFamily
from etude.models.family_lookup import family_for, text_config
from etude.models.headers import StoredTensor, read_headers, read_json, weight_errors, without_missing_heads
from etude.models.quantised_storage import check_scheme

MOST = 1000
"""At most this many problems with tensors are listed."""


@dataclass(frozen=True)
class Inspection:
    """The content of a checkpoint directory, and the problems that were found in it.

    - `folder`: the directory; for an adapter, that of its base.
    - `family`: the model family of its config.json.
    - `config`: the sizes; None where config.json does not have them. Unsupported settings are replaced by supported
      ones.
    - `tensors`: the stored tensors, by name.
    - `problems`: an error for everything that etude cannot use; at most `MOST` of them are about tensors."""

    folder: Path
    family: ModelFamily
    config: ModelConfig | None
    tensors: Mapping[str, StoredTensor]
    problems: tuple[CheckpointError, ...]


def inspect(folder: Path) -> Inspection:
    """Inspect a checkpoint directory.

    Raises `CheckpointError` for an unknown architecture, and for a missing or damaged config.json."""
    folder = base_of(folder)
    raw = text_config(read_json(folder / "config.json"))
    family = family_for(raw)
    problems = list(family.unsupported(raw))
    supported = {key: value for key, (value, _) in family.fixed.items()} | dict.fromkeys(family.each)
    config: ModelConfig | None = None
    tensors: dict[str, StoredTensor] = {}
    try:
        check_scheme(raw)
    except CheckpointError as error:
        problems.append(error)
    try:
        config = family.from_hf({**raw, **supported})
        tensors = read_headers(folder)
        config = without_missing_heads(config, tensors)
        problems += islice(weight_errors(folder, tensors, config), MOST)
    except CheckpointError as error:
        problems.append(error)
    return Inspection(folder, family, config, tensors, tuple(problems))
