"""Live memory of an engine that follows adapters: A and B are what versions are written to, and what proves them; the
model holds the merged matrices, written anew in the pause for each parameter whose A or B changed.

For that it needs the base beside the merged weights, in the dtype that is published. Decoding costs nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from etude.errors import WeightsError
from etude.models.lora import Adapters, rounded
from etude.models.transformer import Transformer
from etude.numerics.config import Quantise
from etude.records.adapter import PUBLISHED
from etude.weights import Tensor
from etude.weights.follow.adapter_map import published_config
from etude.weights.follow.runtime_map import Derived

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def adapted_weights(
    model: Transformer, quantise: Quantise, tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, torch.Tensor], list[Derived]]:
    """The memory that an adapter's versions are written to, and what is computed of it. `model` is its base, and stays
    as it is until the first one is written. Raises `WeightsError`, and `CheckpointError` for another base's adapter."""
    kinds = {tensor.dtype for name, tensor in tensors.items() if name != PUBLISHED}
    held = model.embedding.dtype
    dtype = _DTYPES.get(next(iter(kinds))) if len(kinds) == 1 else None
    if dtype is None or torch.promote_types(dtype, held) != held:
        raise WeightsError(
            f"an adapter in {', '.join(sorted(kinds))} is published",
            f"this engine holds weights in {str(held).removeprefix('torch.')}",
            hint="give the engine a dtype that holds every number of the learner's `weights`",
        )
    if quantise is not Quantise.NONE:
        facts = f"this engine holds weights rounded to {quantise}, and an adapter is merged into unrounded ones"
        raise WeightsError(
            "an adapter is published", facts, hint="publish all weights, or set numerics.quantise = none"
        )
    config, codes = published_config(tensors), tensors[PUBLISHED].codes
    adapters = Adapters(model, config, dtype=dtype)
    settings = torch.zeros(codes.size, dtype=torch.uint8)

    def settle() -> None:
        if not np.array_equal(settings.numpy(), codes):
            raise WeightsError(
                "an adapter of other settings is published than were at the start",
                f"held are {config}",
                hint="restart the engine: it takes up what is published then",
            )
        rounded(model, dtype)

    derived = [Derived(frozenset({PUBLISHED}), settle)]
    derived += [Derived(sources, compute) for sources, compute in adapters.derived]
    return {**adapters.views, PUBLISHED: settings}, derived
