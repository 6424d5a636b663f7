"""Low precision: rounding to block-scaled formats, packing to bytes, and operators that compute with rounded numbers.

>>> import torch
>>> from etude.numerics import Native, Quantise
>>> operators = QuantisedOperators(Native(), FORMATS[Quantise.MXFP4])
>>> operators.linear(torch.ones(1, 32), torch.full((1, 32), 1.1)).tolist()
[[32.0]]
"""

from etude.numerics.formats import FORMATS, Format
from etude.numerics.quantisation.operators import QuantisedOperators
from etude.numerics.quantisation.packing import Packed, pack, unpack
from etude.numerics.quantisation.rounding import round_to_format

__all__ = ["FORMATS", "Format", "Packed", "QuantisedOperators", "pack", "round_to_format", "unpack"]
