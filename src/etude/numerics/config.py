"""The `[numerics]` section of the config: how numbers are computed in engines and learner. Torch-free."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from etude.config import ranged


class Mode(enum.StrEnum):
    """The order of summation of operators.

    EXACT: one order for each operator, so that engine and learner agree to the bit. NATIVE: the fastest kernel for each
    shape; then probability ratios on the same weights are near 1 instead of exactly 1, and are only reported."""

    EXACT = "exact"
    NATIVE = "native"


class ComputeDtype(enum.StrEnum):
    """The dtype to which activations are rounded. In exact mode it is the same in engine and learner."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantise(enum.StrEnum):
    """The format to which inputs and weights of the large matrix products are rounded, in engine and learner."""

    NONE = "none"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


def check_device(name: str) -> None:
    """Raise `ValueError` unless `name` is "auto", "cpu", "cuda" or "cuda:N", where N is the number of a GPU."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"device = {name!r}, expected auto, cpu, cuda, or cuda:N")


@dataclass(frozen=True)
class NumericsConfig:
    """The `[numerics]` section of a run's config.

    `quantise`: the format to which the inputs and weights of large matrix products are rounded. `degree`: the largest
    number of tensor-parallel ranks for which results have the same bits; a power of two."""

    mode: Mode = Mode.EXACT
    quantise: Quantise = Quantise.NONE
    degree: int = ranged(1, low=1, high=64)

    def __post_init__(self) -> None:
        if self.degree & (self.degree - 1):
            raise ValueError(f"degree = {self.degree} is not a power of two")
        if self.degree > 1 and self.quantise is Quantise.NVFP4:
            raise ValueError(
                f"degree = {self.degree} with quantise = 'nvfp4': nvfp4 needs full rows, and a rank has parts of them"
            )
