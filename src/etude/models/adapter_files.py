"""Reads and writes adapters as directories that peft and vLLM read: adapter_config.json and adapter_model.safetensors.

Ours also have the base model's config.json and tokeniser, so that such a directory is enough to know the model and its
chat format. When it is loaded the adapters are merged into the base's weights. The metadata of the safetensors file
names the base, by a digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from etude.errors import CheckpointError, ConfigError
from etude.file_checksums import verify_files
from etude.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of, damaged, next_base, read_peft
from etude.models.checkpoint import ASSETS, load_model, load_tensors, save_tensors
from etude.models.headers import HINT_DAMAGED
from etude.models.lora import Adapters, rounded
from etude.models.transformer import Transformer
from etude.numerics.operators import Operators
from etude.numerics.parallel import ALONE, Parallel
from etude.records.adapter import AdapterConfig

_BASE = "etude_base"
"""Of the metadata: the base's digest."""


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: AdapterConfig, base: Path, *, dtype: torch.dtype
) -> None:
    """Write adapter files into `folder`, which the caller then syncs and renames into place. `tensors` have PEFT's
    names; `base`: the directory of the base weights, from which config and tokeniser are copied."""
    base = base.resolve()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config.to_peft(base), indent=2) + "\n")
    held = {name: t.to(dtype) for name, t in tensors.items()}
    save_tensors(held, folder / ADAPTER_WEIGHTS, metadata={_BASE: config.base})
    for asset in ("config.json", *ASSETS):
        if (base / asset).is_file():
            shutil.copyfile(base / asset, folder / asset)


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """Read an adapter's directory: its config and its tensors. Raises `CheckpointError`."""
    path = folder / ADAPTER_WEIGHTS
    tensors = load_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            base = (file.metadata() or {}).get(_BASE, "")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None
    try:
        config = AdapterConfig.from_peft(read_peft(folder), base)
    except ValueError as error:
        raise damaged(str(folder / ADAPTER_CONFIG), str(error)) from None
    verify_files(folder, [ADAPTER_CONFIG], kind=CheckpointError)
    return config, tensors


def merged(
    model: Transformer, config: AdapterConfig, tensors: Mapping[str, torch.Tensor], where: str, *, held: bool = False
) -> Adapters:
    """Have a base compute with an adapter of it: A and B by PEFT's names, all in the dtype that it was trained to.
    `held`: they lie in float32, for an optimiser. Raises `CheckpointError`."""
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) != 1:
        raise CheckpointError(f"{where} is in {len(kinds)} dtypes", "an adapter is in one", hint=HINT_DAMAGED)
    kind = kinds.pop()
    adapters = Adapters(model, config, dtype=kind, held=torch.float32 if held else None)
    rounded(model, kind)
    fill(adapters, tensors, where)
    adapters.settle()
    return adapters


@torch.no_grad()
def fill(adapters: Adapters, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Have A and B be these, by PEFT's names. Raises `CheckpointError`."""
    views = adapters.views
    for name in sorted(views.keys() ^ tensors.keys()):
        facts = f"it {'lacks' if name in views else 'has, and the base has no place for,'} {name}"
        raise CheckpointError(f"{where} does not fit its base", facts, hint=HINT_DAMAGED)
    for name, view in views.items():
        if tensors[name].shape != view.shape:
            facts = f"{name} has shape {list(tensors[name].shape)}, wanted is {list(view.shape)}"
            raise CheckpointError(f"{where} does not fit its base", facts, hint=HINT_DAMAGED)
        view.copy_(tensors[name])


def load_merged(
    folder: Path,
    *,
    dtype: torch.dtype,
    operators: Operators | None,
    held: torch.dtype | None,
    parallel: Parallel = ALONE,
) -> Transformer:
    """`checkpoint.load_model` of an adapter's directory: its base, merged. Raises `CheckpointError`."""
    if parallel is not ALONE:
        raise ConfigError(f"{folder} on several ranks", "an adapter", hint="export it merged, and take that")
    base_of(folder)  # chains end
    config, tensors = read_adapter(folder)
    model = load_model(next_base(folder), dtype=dtype, operators=operators, held=held)
    merged(model, config, tensors, str(folder / ADAPTER_WEIGHTS))
    return model.requires_grad_()
