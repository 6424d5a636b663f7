"""Read and write LoRA adapters as directories that peft and vLLM read.

They have an adapter_config.json and an adapter_model.safetensors. Etude's adapter directories also have the base
model's config.json and tokeniser, so that the directory alone tells the model and its chat format. The metadata of the
safetensors file has the base's digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from etude.errors import CheckpointError
from etude.file_checksums import verify_files
from etude.models.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    damaged_adapter,
    read_adapter_config,
)
from etude.models.checkpoint_files import ASSETS, load_tensors, save_tensors
from etude.models.headers import HINT_DAMAGED
from etude.models.lora import Adapters, round_parameters
from etude.models.transformer import Transformer
from etude.records.adapter import AdapterConfig

_BASE = "etude_base"
"""Key of the metadata: the base's digest."""
HINT_BASE = f"use the base with which the adapter was trained; if this is the one: {HINT_DAMAGED}"


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: AdapterConfig, base: Path, *, dtype: torch.dtype
) -> None:
    """Write adapter files into `folder`, which the caller then syncs and renames into place.

    `tensors`: A and B by PEFT's names, which are stored in `dtype`. `base`: the directory of the base weights, from
    which config and tokeniser files are copied."""
    base = base.resolve()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config.to_peft(base), indent=2) + "\n")
    held = {name: t.to(dtype) for name, t in tensors.items()}
    save_tensors(held, folder / ADAPTER_WEIGHTS, metadata={_BASE: config.base})
    for asset in ("config.json", *ASSETS):
        if (base / asset).is_file():
            shutil.copyfile(base / asset, folder / asset)


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """Read an adapter directory, and return its config and its A and B matrices by PEFT's names.

    Raises `CheckpointError` when a file is missing or damaged, or the adapter is not plain LoRA."""
    path = folder / ADAPTER_WEIGHTS
    tensors = load_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            base = (file.metadata() or {}).get(_BASE, "")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None
    try:
        config = AdapterConfig.from_peft(read_adapter_config(folder), base)
    except ValueError as error:
        raise damaged_adapter(str(folder / ADAPTER_CONFIG), str(error)) from None
    verify_files(folder, [ADAPTER_CONFIG], kind=CheckpointError)
    return config, tensors


def merge_adapter(
    model: Transformer,
    config: AdapterConfig,
    tensors: Mapping[str, torch.Tensor],
    where: str,
    *,
    weight_dtype: torch.dtype | None = None,
) -> Adapters:
    """Merge an adapter into the weights of `model`, its base, in place. Returns the adapters.

    `tensors`: A and B by PEFT's names, all of one dtype; the model is rounded to the same dtype. `where`: path of the
    adapter, for errors. `weight_dtype`: the dtype of A and B in memory, for an optimiser (None: that of `tensors`).

    Raises `CheckpointError` when the adapter does not fit."""
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) != 1:
        raise CheckpointError(f"{where} has {len(kinds)} dtypes", "an adapter must have one", hint=HINT_DAMAGED)
    kind = kinds.pop()
    adapters = Adapters(model, config, dtype=kind, weight_dtype=weight_dtype)
    round_parameters(model, kind)
    load_adapter(adapters, tensors, where)
    adapters.merge()
    return adapters


@torch.no_grad()
def load_adapter(adapters: Adapters, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy tensors, given by PEFT's names, into the matrices A and B of `adapters`. `where`: path of the adapter, for
    errors.

    Raises `CheckpointError` for a missing or surplus tensor, or a wrong shape."""
    views = adapters.views
    for name in sorted(views.keys() ^ tensors.keys()):
        facts = f"it lacks {name}" if name in views else f"it has {name}, which the base does not have"
        raise CheckpointError(f"{where} does not fit its base", facts, hint=HINT_BASE)
    for name, view in views.items():
        if tensors[name].shape != view.shape:
            facts = f"{name} has shape {list(tensors[name].shape)}, expected {list(view.shape)}"
            raise CheckpointError(f"{where} does not fit its base", facts, hint=HINT_BASE)
        view.copy_(tensors[name])
