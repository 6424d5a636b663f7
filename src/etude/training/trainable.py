"""The part of a model that is trained, saved and published: all weights, or LoRA adapters.

This module is the only place in which a learner with LoRA differs from one that trains all weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from etude.errors import CheckpointError, ConfigError
from etude.models.adapter_config import ADAPTER_CONFIG, next_base
from etude.models.adapter_files import merge_adapter, read_adapter, write_adapter
from etude.models.checkpoint import load_model, write_model
from etude.models.lora import Adapters, module_name, round_parameters
from etude.models.mtp import trunk_of
from etude.models.packed_weights import quantisable_matrices
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views
from etude.numerics.config import Quantise
from etude.numerics.lora import LoraOperators
from etude.numerics.operators import Operators
from etude.records.adapter import PUBLISHED, AdapterConfig
from etude.training.config import LearnerConfig, LiveWeights, LoraOn, Masters
from etude.training.exports import encode_tensors, export, stored_dtype
from etude.weights.tensors import Tensor

MLP = ("gate_proj", "up_proj", "down_proj")


class Trainable(Protocol):
    """A model, and the part of it that is trained: all weights, or LoRA adapters. `ProcessGroup.load` makes one."""

    model: Transformer

    @property
    def module(self) -> nn.Module:
        """The module whose parameters an optimiser takes over. Call `sync_model` after each update of them."""

    def views(self) -> Mapping[str, torch.Tensor]:
        """Return the trained tensors, by the names under which they are saved."""

    def sync_model(self) -> None:
        """Make the model compute with the updated parameters."""

    def exported(self) -> dict[str, Tensor]:
        """Return the tensors to publish. The tensors may be views of live memory."""

    def base(self) -> dict[str, Tensor] | None:
        """Return the frozen weights that an engine needs beside the published tensors; None where it needs none."""

    def write(self, folder: Path) -> None:
        """Write a checkpoint directory, without the learner's state."""

    def write_model(self, folder: Path) -> None:
        """Write a Hugging Face directory of the full model, into which adapters are merged."""


class FullWeights:
    """A `Trainable` that trains all weights of a model."""

    def __init__(self, model: Transformer, weights: LiveWeights, quantise: Quantise, assets: Path) -> None:
        self.model, self._weights, self._quantise, self._assets = model, weights, quantise, assets

    @property
    def module(self) -> nn.Module:
        return trunk_of(self.model)

    def views(self) -> Mapping[str, torch.Tensor]:
        return hf_views(self.model)

    def sync_model(self) -> None:
        """Do nothing: the optimiser's memory is the model's."""

    def exported(self) -> dict[str, Tensor]:
        return export(self.model, self._weights, self._quantise)

    def base(self) -> None:
        """Return None: an engine needs no frozen weights, since all weights are trained and published."""

    def write(self, folder: Path) -> None:
        write_model(self.model, folder, dtype=self._weights, assets=self._assets)

    write_model = write


@dataclass(frozen=True)
class LoadRequest:
    """A checkpoint to load, and the settings to load it with.

    `seed`: for the initial adapters. `resumed`: whether a learner saved it; otherwise it is a starting checkpoint.
    `replicated`: whether each of several ranks holds the full model, instead of a part of it."""

    path: Path
    config: LearnerConfig
    operators: Operators
    device: torch.device
    quantise: Quantise
    seed: int
    resumed: bool
    replicated: bool = False

    @property
    def base(self) -> Path:
        """The directory of the model's weights; with adapters, of the frozen base.

        Raises `CheckpointError` when the base of an adapter is missing."""
        return next_base(self.path) if self.resumed and self.config.lora_rank else self.path

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The dtype in which the model of a learner with adapters is in memory: bf16 if all its numbers are bf16.

        Merged matrices and frozen weights are rounded to the published dtype. Operators that multiply bf16 with bf16
        read them as they are; exact operators need float32."""
        published = stored_dtype(self.config.weights)
        return published if self.operators.storage_dtype is published else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype in which trained weights are in memory.

        It is bf16 if `masters` is bf16 and the operators multiply bf16 with bf16; otherwise float32."""
        return self.frozen_dtype if self.config.masters is Masters.BF16 else torch.float32

    def check_kind(self) -> None:
        """Raise `ConfigError` for adapters on quantised weights, and `CheckpointError` unless the checkpoint's learner
        and this one both train adapters, or both all weights."""
        if self.config.lora_rank and self.quantise is not Quantise.NONE:
            raise ConfigError(
                f"numerics.quantise = {str(self.quantise)!r} is not possible with lora_rank = {self.config.lora_rank}",
                "adapters are merged into weights that are not quantised",
                hint='set numerics.quantise = "none", or lora_rank = 0',
            )
        if self.resumed and (self.path / ADAPTER_CONFIG).is_file() != bool(self.config.lora_rank):
            was = "adapters" if not self.config.lora_rank else "all weights"
            raise CheckpointError(
                f"{self.path} was saved by a learner that trains {was}",
                f"learner.lora_rank is now {self.config.lora_rank}",
                hint="set learner.lora_rank to the checkpoint's value, or start a new run with `start`",
            )

    def adapter(self, model: Transformer) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
        """Return the adapter's settings, and its matrices A and B if they were saved.

        Raises `CheckpointError` if they differ from the config."""
        settings = self.config
        expected = AdapterConfig(settings.lora_rank, settings.lora_alpha, lora_modules(model, settings.lora_on), "")
        if not self.resumed:
            return expected, {}
        found, tensors = read_adapter(self.path)
        _check_same(self.path, expected, found)
        return found, tensors


class LoraWeights:
    """A `Trainable` that trains LoRA adapters on a frozen base, the checkpoint at `base`."""

    def __init__(self, model: Transformer, adapters: Adapters, weights: LiveWeights, base: Path) -> None:
        self.model, self.adapters, self._weights, self._base = model, adapters, weights, base

    @property
    def module(self) -> nn.Module:
        return self.adapters

    def views(self) -> Mapping[str, torch.Tensor]:
        return self.adapters.views

    def sync_model(self) -> None:
        self.adapters.merge()

    def exported(self) -> dict[str, Tensor]:
        config = np.frombuffer(self.adapters.config.to_bytes(), np.uint8).copy()
        return {**encode_tensors(self.views(), self._weights), PUBLISHED: Tensor("u8", config.shape, config)}

    def base(self) -> dict[str, Tensor]:
        return encode_tensors(self.adapters.base, self._weights)

    def write(self, folder: Path) -> None:
        kind = stored_dtype(self._weights)
        write_adapter(folder, self.views(), self.adapters.config, self._base, dtype=kind)

    def write_model(self, folder: Path) -> None:
        write_model(self.model, folder, dtype=self._weights, assets=self._base)


def load_trainable(request: LoadRequest) -> Trainable:
    """Load the trainable weights from a learner's checkpoint or from a starting checkpoint.

    Raises `CheckpointError` when a file is missing or damaged, or was saved with other LoRA settings."""
    request.check_kind()
    path, config, device = request.path, request.config, request.device
    if not config.lora_rank:
        model = load_model(path, operators=request.operators, weight_dtype=request.weight_dtype).to(device)
        return FullWeights(set_recompute(model, config.recompute), config.weights, request.quantise, path)
    base = request.base
    model = load_model(base, operators=LoraOperators(request.operators), weight_dtype=request.frozen_dtype).to(device)
    adapter_config, tensors = request.adapter(set_recompute(model, config.recompute))
    if request.resumed:
        adapters = merge_adapter(model, adapter_config, tensors, str(path), weight_dtype=request.weight_dtype)
    else:
        kind = stored_dtype(config.weights)
        adapters = Adapters(model, adapter_config, dtype=kind, weight_dtype=request.weight_dtype)
        round_parameters(model, kind)
        adapters.draw(request.seed)
    return LoraWeights(model, adapters, config.weights, base)


def set_recompute(model: Transformer, recompute: bool) -> Transformer:
    """Turn activation checkpointing on or off. Returns the model."""
    for block in (*model.blocks, *(head.block for head in model.mtp)):
        block.recompute = recompute
    return model


def lora_modules(model: Transformer, on: LoraOn) -> tuple[str, ...]:
    """Return the modules of a model that get adapters, by the last parts of their names."""
    inside, names = (
        model.config.architecture.etude_name,
        [name for matrix in quantisable_matrices(model, mtp=False) for name in matrix.rows],
    )
    is_mlp = {module_name(name): module_name(inside(name)) in MLP for name in names}
    return tuple(sorted(name for name in is_mlp if on is LoraOn.ALL or is_mlp[name] == (on is LoraOn.MLP)))


def _check_same(path: Path, expected: AdapterConfig, found: AdapterConfig) -> None:
    differences = [
        f"{name} = {getattr(found, name)!r}, the setting is {getattr(expected, name)!r}"
        for name in ("rank", "alpha", "modules")
        if getattr(found, name) != getattr(expected, name)
    ]
    if differences:
        raise CheckpointError(
            f"{path} was saved with other LoRA settings",
            "; ".join(differences),
            hint="set learner.lora_rank, lora_alpha and lora_on to the checkpoint's values",
        )
