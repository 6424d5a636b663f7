"""Create the operators that a run's config asks for, for a device."""

from __future__ import annotations

import torch

from etude.errors import ConfigError
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.numerics.exact.operators import Exact
from etude.numerics.formats import FORMATS
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.numerics.quantisation import QuantisedOperators


def operators_for(
    numerics: NumericsConfig, dtype: torch.dtype, *, rounds_weights: bool = True, device: torch.device | None = None
) -> Operators:
    """Return the operators with which engines and learner of a run build their models.

    `dtype`: the dtype of activations. `rounds_weights`: False if the weights are rounded to the low-precision format
    already. `device`: None for the CPU. Raises `ConfigError` for a combination that is not supported on the device."""
    inner = _exact(numerics, dtype, device) if numerics.mode is Mode.EXACT else Native(dtype)
    if numerics.quantise is Quantise.NONE:
        return inner
    return QuantisedOperators(inner, FORMATS[numerics.quantise], rounds_weights=rounds_weights)


def _exact(numerics: NumericsConfig, dtype: torch.dtype, device: torch.device | None) -> Operators:
    if device is None or device.type == "cpu":
        return Exact(dtype, degree=numerics.degree)
    if numerics.quantise is not Quantise.NONE:
        raise ConfigError(
            f"exact mode with {numerics.quantise} is not possible on {device}",
            "only CPUs support it",
            hint='set device = "cpu"',
        )
    try:
        from etude.numerics.gpu import ExactGpu
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"exact mode on {device} lacks a library", str(error), hint="pip install 'etude[gpu]'"
        ) from None
    return ExactGpu(dtype, degree=numerics.degree)
