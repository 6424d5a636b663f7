"""Live memory of an engine that follows adapters: A and B are what versions are written to, and what proves them; the
model holds the merged matrices, written anew in the pause for each parameter whose A or B changed.

For that it needs the base beside the merged weights, in the dtype that is published. Decoding costs nothing more.
"""

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
    """The base that a learner published beside its adapters; where there is a public key, only one that its owner
    signed. Raises `WeightsError`, `StoreError`."""
    return Channel(store, BASE_CHANNEL).fetch(public_key=public_key)


def _take(model: Transformer, tensors: Tensors) -> None:
    """Write these weights into a model that serves no requests yet. Raises `WeightsError` where they do not fit it."""
    update = Update(Version(0, "0" * 8, "0" * 64), {}, tensors, (), fetch_s=0.0, fetched_bytes=0)
    Target(Map(named(hf_views(model)))).prepare(update, tensors, undoable=False).apply()


class AdaptedWeights:
    """Makes the live memory of an engine whose model is the base of what is published. The model stays as it is until
    the first version is written."""

    def __init__(
        self, model: Transformer, quantise: Quantise = Quantise.NONE, *, base: Callable[[], Tensors] | None = None
    ) -> None:
        """`base`: fetches what the model is to hold, where it was made without a checkpoint."""
        self._model, self._quantise, self._base = model, quantise, base
        self._digests: dict[torch.dtype, str] = {}  # of the base: it may be asked for again and again

    def __call__(self, tensors: Tensors) -> tuple[Mapping[str, torch.Tensor], list[Derived]]:
        """The memory that versions like this one are written to, and what is computed of it. Raises `WeightsError`, and
        `CheckpointError` for another base's adapter."""
        dtype, model = self._dtype(tensors), self._model
        config, codes = published_config(tensors), tensors[PUBLISHED].codes
        if dtype not in self._digests:
            if self._base is not None:
                _take(model, self._base())
            self._digests[dtype] = base_digest(model, dtype)
        adapters = Adapters(model, config, dtype=dtype, digest=self._digests[dtype])
        settings = torch.zeros(codes.size, dtype=torch.uint8)

        def settle() -> None:
            if not np.array_equal(settings.numpy(), codes):
                raise WeightsError(
                    "an adapter of other settings is published than at the start",
                    f"held are {config}",
                    hint="restart the engine: it then starts with the newest version",
                )
            round_parameters(model, dtype)

        derived = [Derived(frozenset({PUBLISHED}), settle)]
        derived += [Derived(sources, compute) for sources, compute in adapters.derived]
        return {**adapters.views, PUBLISHED: settings}, derived

    def _dtype(self, tensors: Tensors) -> torch.dtype:
        """What an adapter is published in, which this engine must be able to hold."""
        kinds = {tensor.dtype for name, tensor in tensors.items() if name != PUBLISHED}
        held = self._model.embedding.dtype
        dtype = _DTYPES.get(next(iter(kinds))) if len(kinds) == 1 else None
        if dtype is None or torch.promote_types(dtype, held) != held:
            raise WeightsError(
                f"an adapter in {', '.join(sorted(kinds))} is published",
                f"this engine holds weights in {str(held).removeprefix('torch.')}",
                hint="give the engine a dtype that holds every number of the learner's `weights`",
            )
        if self._quantise is not Quantise.NONE:
            facts = (
                f"this engine holds weights rounded to {self._quantise}, and an adapter is merged into unrounded ones"
            )
            raise WeightsError("an adapter is published", facts, hint='set numerics.quantise = "none"')
        return dtype
