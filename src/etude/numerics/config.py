"""How numbers are computed: what engines and learner share. Torch-free."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from etude.config import ranged


class Mode(enum.StrEnum):
    """The order in which sums are taken."""

    EXACT = "exact"  # one order for each operator: engine and learner agree to the bit
    NATIVE = "native"  # the fastest for each shape: the ratio on one version is near 1, reported and not held to it


class ComputeDtype(enum.StrEnum):
    """In what activations are rounded. In exact mode the same on both sides."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantise(enum.StrEnum):
    """The format that inputs and weights of the large products are rounded to, on both sides."""

    NONE = "none"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


def check_device(name: str) -> None:
    """Raises `ValueError` unless it names where a model can compute: "auto" (a GPU where torch sees one, else the CPU),
    "cpu", "cuda", "cuda:1"."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"device = {name!r}, expected auto, cpu, cuda, or cuda:N")


@dataclass(frozen=True)
class NumericsConfig:
    """The `[numerics]` section."""

    mode: Mode = Mode.EXACT
    quantise: Quantise = Quantise.NONE
    degree: int = ranged(1, low=1, high=64)  # the most tensor-parallel ranks with equal bits; 1, 2, 4, ...

    def __post_init__(self) -> None:
        if self.degree & (self.degree - 1):
            raise ValueError(f"degree = {self.degree}, but sums over ranks are a binary tree: 1, 2, 4, ...")
        if self.degree > 1 and self.quantise is Quantise.NVFP4:
            raise ValueError(
                f"degree = {self.degree}, but a rank has no whole rows, and quantise = 'nvfp4' scales by them"
            )
