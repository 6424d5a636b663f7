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
from etude.models.adapter_files import merged, read_adapter, write_adapter
from etude.models.checkpoint import load_model, write_model
from etude.models.lora import Adapters, module_of, rounded
from etude.models.packed_weights import matrices
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views
from etude.numerics.config import Quantise
from etude.numerics.lora import Adapted
from etude.numerics.operators import Operators
from etude.records.adapter import PUBLISHED, AdapterConfig
from etude.training.config import LearnerConfig, LiveWeights, LoraOn
from etude.training.exports import export, published, stored_dtype
from etude.weights.tensors import Tensor

MLP = ("gate_proj", "up_proj", "down_proj")


class Trained(Protocol):
    """A model, and what of it trains."""

    model: Transformer

    @property
    def parameters_of(self) -> nn.Module:
        """The module whose parameters an optimiser takes over; `settle` comes after each time that it changed them."""
        ...

    def views(self) -> Mapping[str, torch.Tensor]:
        """What trains, by the names that it is saved under."""
        ...

    def settle(self) -> None:
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


class Whole:
    """All weights of a model."""

    def __init__(self, model: Transformer, weights: LiveWeights, quantise: Quantise, assets: Path) -> None:
        self.model, self._weights, self._quantise, self._assets = model, weights, quantise, assets

    @property
    def parameters_of(self) -> nn.Module:
        return self.model

    def views(self) -> Mapping[str, torch.Tensor]:
        return hf_views(self.model)

    def settle(self) -> None:
        """The optimiser's memory is the model's."""

    def exported(self) -> dict[str, Tensor]:
        return export(self.model, self._weights, self._quantise)

    def base(self) -> None:
        """All is published."""

    def write(self, folder: Path) -> None:
        write_model(self.model, folder, dtype=self._weights, assets=self._assets)


@dataclass(frozen=True)
class Loading:
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
        wanted = AdapterConfig(settings.lora_rank, settings.lora_alpha, chosen_modules(model, settings.lora_on), "")
        if not self.resumed:
            return wanted, {}
        found, tensors = read_adapter(self.path)
        _check_same(self.path, wanted, found)
        return found, tensors


class LowRank:
    """Adapters on a frozen base, which is the checkpoint at `base`."""

    def __init__(self, model: Transformer, adapters: Adapters, weights: LiveWeights, base: Path) -> None:
        self.model, self.adapters, self._weights, self._base = model, adapters, weights, base

    @property
    def parameters_of(self) -> nn.Module:
        return self.adapters

    def views(self) -> Mapping[str, torch.Tensor]:
        return self.adapters.views

    def settle(self) -> None:
        self.adapters.settle()

    def exported(self) -> dict[str, Tensor]:
        config = np.frombuffer(self.adapters.config.to_bytes(), np.uint8).copy()
        return {**published(self.views(), self._weights), PUBLISHED: Tensor("u8", config.shape, config)}

    def base(self) -> dict[str, Tensor]:
        return published(self.adapters.base, self._weights)

    def write(self, folder: Path) -> None:
        kind = stored_dtype(self._weights)
        write_adapter(folder, self.views(), self.adapters.config, self._base, dtype=kind)


def load_trained(loading: Loading) -> Trained:
    """What trains of a checkpoint: what a learner left there, or from its start. Raises `CheckpointError`."""
    loading.check_kind()
    path, config, device = loading.path, loading.config, loading.device
    if not config.lora_rank:
        model = load_model(path, operators=loading.operators, held=torch.float32).to(device)
        return Whole(recomputing(model, config.recompute), config.weights, loading.quantise, path)
    base = loading.base
    model = load_model(base, operators=Adapted(loading.operators), held=torch.float32).to(device)
    wanted, tensors = loading.adapter(recomputing(model, config.recompute))
    if loading.resumed:
        adapters = merged(model, wanted, tensors, str(path), held=True)
    else:
        kind = stored_dtype(config.weights)
        adapters = Adapters(model, wanted, dtype=kind, held=torch.float32)
        rounded(model, kind)
        adapters.draw(loading.seed)
    return LowRank(model, adapters, config.weights, base)


def recomputing(model: Transformer, recompute: bool) -> Transformer:
    """The model, whose blocks keep nothing for the backward pass where so told."""
    for block in model.blocks:
        block.recompute = recompute  # type: ignore[assignment]
    return model


def chosen_modules(model: Transformer, on: LoraOn) -> tuple[str, ...]:
    """The modules of a model that are adapted, by the last parts of their names."""
    inside, names = model.config.architecture.inside, [name for matrix in matrices(model) for name in matrix.rows]
    is_mlp = {module_of(name): module_of(inside(name)) in MLP for name in names}
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
