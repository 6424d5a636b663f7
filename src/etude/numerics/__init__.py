"""Numerics that engine and learner share: operators with a fixed order of summation, and keyed sampling.

Reading the config needs no torch: names that need it are imported on first use.

>>> import torch
>>> from etude.numerics import Exact, sample
>>> Exact().linear(torch.eye(2), torch.tensor([[1.0, 2.0]])).flatten().tolist()
[1.0, 2.0]
>>> sample(torch.tensor([[0.0, 3.0]]), [0.0], [7], [5])[0].tolist()
[1]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from etude.numerics.config import ComputeDtype, Mode, NumericsConfig, Quantise

if TYPE_CHECKING:
    from etude.numerics.exact.operators import Exact
    from etude.numerics.factory import operators_for
    from etude.numerics.native import Native
    from etude.numerics.operators import Operators
    from etude.numerics.parity import parity_class
    from etude.numerics.sampling import sample, uniform

__all__ = [
    "ComputeDtype", "Exact", "Mode", "Native", "NumericsConfig", "Operators", "Quantise", "operators_for",
    "parity_class", "sample", "uniform",
]  # fmt: skip

_HOME = {
    "Exact": "exact.operators", "Native": "native", "Operators": "operators", "operators_for": "factory",
    "parity_class": "parity", "sample": "sampling", "uniform": "sampling",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
