"""What of a model an optimiser changes, and so what is saved and published: all of it, or adapters (LoRA).

The learner knows no difference beyond this file. Knows nothing of losses and batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from etude.errors import CheckpointError
from etude.models.adapter_config import ADAPTER_CONFIG, next_base
from etude.models.adapter_files import merge_adapter, read_adapter, write_adapter
from etude.models.checkpoint import load_model, write_model
from etude.models.lora import Adapters, module_name, round_parameters
from etude.models.packed_weights import quantisable_matrices
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views
from etude.numerics.config import Quantise
from etude.numerics.lora import LoraOperators
from etude.numerics.operators import Operators
from etude.records.adapter import PUBLISHED, AdapterConfig
from etude.training.config import LearnerConfig, LiveWeights, LoraOn
from etude.training.exports import encode_tensors, export, stored_dtype
from etude.weights.tensors import Tensor

MLP = ("gate_proj", "up_proj", "down_proj")


class Trainable(Protocol):
    """A model, and what of it trains."""

    model: Transformer

    @property
    def module(self) -> nn.Module:
        """The module whose parameters an optimiser takes over; `settle` comes after each time that it changed them."""
        ...

    def views(self) -> Mapping[str, torch.Tensor]:
        """What trains, by the names that it is saved under."""
        ...

    def sync_model(self) -> None:
        """Have the model compute with what was trained."""
        ...

    def exported(self) -> dict[str, Tensor]:
        """What is published. Views of live memory may be among it."""
        ...

    def base(self) -> dict[str, Tensor] | None:
        """What an engine computes with beside what is published, frozen; None: nothing."""
        ...

    def write(self, folder: Path) -> None:
        """A directory of it, beside which a learner's state goes."""
        ...


class FullWeights:
    """All weights of a model."""

    def __init__(self, model: Transformer, weights: LiveWeights, quantise: Quantise, assets: Path) -> None:
        self.model, self._weights, self._quantise, self._assets = model, weights, quantise, assets

    @property
    def module(self) -> nn.Module:
        return self.model

    def views(self) -> Mapping[str, torch.Tensor]:
        return hf_views(self.model)

    def sync_model(self) -> None:
        """The optimiser's memory is the model's."""

    def exported(self) -> dict[str, Tensor]:
        return export(self.model, self._weights, self._quantise)

    def base(self) -> None:
        """All is published."""

    def write(self, folder: Path) -> None:
        write_model(self.model, folder, dtype=self._weights, assets=self._assets)


@dataclass(frozen=True)
class LoadRequest:
    """A checkpoint, and how a learner takes it up."""

    path: Path
    config: LearnerConfig
    operators: Operators
    device: torch.device
    quantise: Quantise
    seed: int  # keys what adapters begin with
    resumed: bool  # a learner left it, of which it goes on; else it is the start of one

    @property
    def base(self) -> Path:
        """Where the model's weights lie: under adapters, the frozen ones. Raises `CheckpointError`."""
        return next_base(self.path) if self.resumed and self.config.lora_rank else self.path

    def check_kind(self) -> None:
        """Raises `CheckpointError` where its learner trained something else."""
        if self.resumed and (self.path / ADAPTER_CONFIG).is_file() != bool(self.config.lora_rank):
            was = "adapters" if not self.config.lora_rank else "all weights"
            raise CheckpointError(
                f"{self.path} is of a learner that trains {was}",
                f"this one has lora_rank = {self.config.lora_rank}",
                hint="set learner.lora_rank to the checkpoint's, or begin a new run with `start`",
            )

    def adapter(self, model: Transformer) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
        """What is adapted, and A and B where there are any yet. Raises `CheckpointError`."""
        settings = self.config
        wanted = AdapterConfig(settings.lora_rank, settings.lora_alpha, lora_modules(model, settings.lora_on), "")
        if not self.resumed:
            return wanted, {}
        found, tensors = read_adapter(self.path)
        _check_same(self.path, wanted, found)
        return found, tensors


class LoraWeights:
    """Adapters on a frozen base, which is the checkpoint at `base`."""

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


def load_trainable(loading: LoadRequest) -> Trainable:
    """What trains of a checkpoint: what a learner left there, or from its start. Raises `CheckpointError`."""
    loading.check_kind()
    path, config, device = loading.path, loading.config, loading.device
    if not config.lora_rank:
        model = load_model(path, operators=loading.operators, held=torch.float32).to(device)
        return FullWeights(set_recompute(model, config.recompute), config.weights, loading.quantise, path)
    base = loading.base
    model = load_model(base, operators=LoraOperators(loading.operators), held=torch.float32).to(device)
    wanted, tensors = loading.adapter(set_recompute(model, config.recompute))
    if loading.resumed:
        adapters = merge_adapter(model, wanted, tensors, str(path), held=True)
    else:
        kind = stored_dtype(config.weights)
        adapters = Adapters(model, wanted, dtype=kind, held=torch.float32)
        round_parameters(model, kind)
        adapters.draw(loading.seed)
    return LoraWeights(model, adapters, config.weights, base)


def set_recompute(model: Transformer, recompute: bool) -> Transformer:
    """The model, whose blocks keep nothing for the backward pass where so told."""
    for block in model.blocks:
        block.recompute = recompute  # type: ignore[assignment]
    return model


def lora_modules(model: Transformer, on: LoraOn) -> tuple[str, ...]:
    """The modules of a model that are adapted, by the last parts of their names."""
    inside, names = (
        model.config.architecture.etude_name,
        [name for matrix in quantisable_matrices(model) for name in matrix.rows],
    )
    is_mlp = {module_name(name): module_name(inside(name)) in MLP for name in names}
    return tuple(sorted(name for name in is_mlp if on is LoraOn.ALL or is_mlp[name] == (on is LoraOn.MLP)))


def _check_same(path: Path, wanted: AdapterConfig, found: AdapterConfig) -> None:
    facts = [
        f"{name} = {getattr(found, name)!r}, set is {getattr(wanted, name)!r}"
        for name in ("rank", "alpha", "modules")
        if getattr(found, name) != getattr(wanted, name)
    ]
    if facts:
        raise CheckpointError(
            f"{path} is of a learner with other adapters",
            "; ".join(facts),
            hint="set learner.lora_rank, lora_alpha and lora_on to the checkpoint's",
        )
