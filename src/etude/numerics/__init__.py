"""Numbers that are the same on both sides: products that ignore their neighbours, sampling that is keyed.

>>> import torch
>>> from etude.numerics import linear, sample
>>> linear(torch.eye(2), torch.tensor([[1.0, 2.0]])).flatten().tolist()
[1.0, 2.0]
>>> sample(torch.tensor([[0.0, 3.0]]), [0.0], [7], [5])[0].tolist()
[1]
"""

from etude.numerics.exact import MIN_ROWS, check_row_invariance, linear
from etude.numerics.sampling import sample, uniform

__all__ = ["MIN_ROWS", "check_row_invariance", "linear", "sample", "uniform"]
