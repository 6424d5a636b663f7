"""How numbers are computed: what engines and learner share. Torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Mode(enum.StrEnum):
    """The order in which sums are taken."""

    EXACT = "exact"  # one order for each operator: engine and learner agree to the bit
    NATIVE = "native"  # the fastest for each shape: the ratio on one version is near 1, reported and corrected for


class Quantise(enum.StrEnum):
    """The format that inputs and weights of the large products are rounded to, on both sides."""

    NONE = "none"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


@dataclass(frozen=True)
class NumericsConfig:
    """The `[numerics]` section."""

    mode: Mode = Mode.EXACT
    quantise: Quantise = Quantise.NONE
