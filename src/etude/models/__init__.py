"""One mixture-of-experts model definition for training and inference, which reads and writes Hugging Face checkpoints.

Reading a config needs no torch: names that need it are imported on first use.

>>> from etude.models import ModelConfig
>>> ModelConfig(num_experts=16).to_hf()["num_experts"]
16
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from etude.models.config import ModelConfig

if TYPE_CHECKING:
    from etude.models.attention import Cache, Packed
    from etude.models.checkpoint import load_model, save_model
    from etude.models.transformer import Forward, Transformer
    from etude.models.weight_views import hf_views

__all__ = ["Cache", "Forward", "ModelConfig", "Packed", "Transformer", "hf_views", "load_model", "save_model"]

_HOME = {
    "Cache": "attention", "Forward": "transformer", "Packed": "attention", "Transformer": "transformer",
    "hf_views": "weight_views", "load_model": "checkpoint", "save_model": "checkpoint",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
