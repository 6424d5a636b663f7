"""Encode the learner's live weights as they are published: as integers with the bits of each number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from etude.models.packed_weights import pack_weights
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views, stays_float32
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS
from etude.training.config import LiveWeights
from etude.weights.delta.arrays import name_of
from etude.weights.tensors import Codes, Tensor

_CODES = {
    LiveWeights.BF16: (torch.bfloat16, (torch.int16, np.uint16)),
    LiveWeights.F32: (torch.float32, (torch.int32, np.uint32)),
}


def export(model: Transformer, weights: LiveWeights, quantise: Quantise = Quantise.NONE) -> dict[str, Tensor]:
    """Return every tensor of a model by its Hugging Face name, as integers with its bits (`encode_tensors`).

    `weights`: the precision. `quantise`: the quantised format of the large matrices."""
    return encode_tensors(
        hf_views(model) if quantise is Quantise.NONE else pack_weights(model, FORMATS[quantise]), weights
    )


def encode_tensors(views: Mapping[str, torch.Tensor], weights: LiveWeights) -> dict[str, Tensor]:
    """Encode tensors as integers with their bits in bf16 or float32.

    bf16 is exact when the live weights are already rounded to it. Tensors of `stays_float32` keep float32. Memory that
    several tensors share is converted once. In host memory the integers of float32 tensors are views of the live
    weights: copy those that you keep."""
    memory: dict[int, Codes] = {}  # by address
    tensors = {}
    for name, view in views.items():
        if view.itemsize == 1:  # packed
            codes = view.view(torch.uint8).flatten().numpy(force=True)
            tensors[name] = Tensor(name_of(str(view.dtype)), tuple(view.shape), codes)
            continue
        stored = LiveWeights.F32 if stays_float32(name) else weights
        storage, start = view.untyped_storage(), view.storage_offset()
        if storage.data_ptr() not in memory:
            shared = torch.empty(0, dtype=view.dtype, device=view.device).set_(storage)
            memory[storage.data_ptr()] = encode(shared, stored)
        own = memory[storage.data_ptr()][start : start + view.numel()]
        tensors[name] = Tensor(str(stored), tuple(view.shape), own)
    return tensors


def stored_dtype(weights: LiveWeights) -> torch.dtype:
    """Return the torch dtype of the published weights for a precision."""
    return _CODES[weights][0]


def encode(values: torch.Tensor, stored: LiveWeights) -> Codes:
    """Return the bits of a tensor's numbers in the stored precision, as a flat array of unsigned integers."""
    kind, (signed, unsigned) = _CODES[stored]
    return values.to(kind).view(signed).flatten().numpy(force=True).view(unsigned)
