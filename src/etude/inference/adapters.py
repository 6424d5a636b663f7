"""The live weights of an engine whose learner publishes LoRA adapters.

Each version of an adapter is written to the matrices A and B, which are then compared with what was published. The
model has the merged matrices. When a version is written, they are computed again for each parameter whose A or B
changed. This needs the base weights beside the merged ones, in the published dtype. Decoding costs nothing extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from etude.errors import WeightsError
from etude.models.lora import Adapters, base_digest, round_parameters
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views
from etude.numerics.config import Quantise
from etude.records.adapter import BASE_CHANNEL, PUBLISHED
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights import Channel, Tensor, Update
from etude.weights.follow.adapter_map import published_config
from etude.weights.follow.runtime_map import Derived, Map, named
from etude.weights.follow.targets import Target

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


Tensors = Mapping[str, Tensor]


def fetched_base(store: BlobStore, public_key: bytes | None = None) -> Tensors:
    """Fetch the base weights that a learner published beside its adapters, by tensor name.

    With `public_key`, only weights signed with this key are accepted. Raises `WeightsError` and `StoreError`."""
    return Channel(store, BASE_CHANNEL).fetch(public_key=public_key)


def _load(model: Transformer, tensors: Tensors) -> None:
    """Load weights into a model that serves no requests yet. Raises `WeightsError` when they do not fit."""
    update = Update(Version(0, "0" * 8, "0" * 64), {}, tensors, (), fetch_s=0.0, fetched_bytes=0)
    Target(Map(named(hf_views(model)))).prepare(update, tensors, undoable=False).apply()


class AdaptedWeights:
    """Creates the live weights (the memory to which versions are written) of an engine that loads LoRA adapters.

    The engine's model must be the base of the adapters. `base` is called to fetch the base weights if the model was
    created without a checkpoint. The model does not change until the first version is written."""

    def __init__(
        self, model: Transformer, quantise: Quantise = Quantise.NONE, *, base: Callable[[], Tensors] | None = None
    ) -> None:
        self._model, self._quantise, self._base = model, quantise, base
        self._digests: dict[torch.dtype, str] = {}  # of the base, by dtype

    def __call__(self, tensors: Tensors) -> tuple[Mapping[str, torch.Tensor], list[Derived]]:
        """Return the live memory for adapters like this one, by published name, and what is derived from it.

        Raises `WeightsError`, and `CheckpointError` for an adapter of another base."""
        dtype, model = self._dtype(tensors), self._model
        config, codes = published_config(tensors), tensors[PUBLISHED].codes
        if dtype not in self._digests:
            if self._base is not None:
                _load(model, self._base())
            self._digests[dtype] = base_digest(model, dtype)
        adapters = Adapters(model, config, dtype=dtype, digest=self._digests[dtype])
        settings = torch.zeros(codes.size, dtype=torch.uint8)

        def check_and_round() -> None:
            if not np.array_equal(settings.numpy(), codes):
                raise WeightsError(
                    "the settings of the published adapter have changed",
                    f"this engine started with {config}",
                    hint="restart the engine, which then starts with the newest version",
                )
            round_parameters(model, dtype)

        derived = [Derived(frozenset({PUBLISHED}), check_and_round)]
        derived += [Derived(sources, compute) for sources, compute in adapters.derived]
        return {**adapters.views, PUBLISHED: settings}, derived

    def _dtype(self, tensors: Tensors) -> torch.dtype:
        """Return the dtype of a published adapter. Raises `WeightsError` when this engine cannot represent it."""
        kinds = {tensor.dtype for name, tensor in tensors.items() if name != PUBLISHED}
        held = self._model.embedding.dtype
        dtype = _DTYPES.get(next(iter(kinds))) if len(kinds) == 1 else None
        if dtype is None or torch.promote_types(dtype, held) != held:
            raise WeightsError(
                f"this engine cannot load an adapter in {', '.join(sorted(kinds))}",
                f"its own weights are in {str(held).removeprefix('torch.')}",
                hint="set engine.dtype to one that represents every number of the adapter's dtype",
            )
        if self._quantise is not Quantise.NONE:
            facts = f"its weights are rounded to {self._quantise}, and an adapter is merged into unrounded ones"
            raise WeightsError(
                "this engine cannot load the published adapter", facts, hint='set numerics.quantise = "none"'
            )
        return dtype
