"""Weights on their way from the trainer to every engine: exact deltas under a chain of digests. Usable alone."""

from etude.weights.tensors import Tensor

__all__ = ["Tensor"]
