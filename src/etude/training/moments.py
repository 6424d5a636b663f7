"""The moments of an optimiser: float32 numbers, or 8-bit codes with one float32 scale for each block.

A code c stands for scale · (c / L)⁴ with L = 127 (first moment, signed) or 255 (second moment). Fourth powers cover
eight or nine powers of ten, which the second moments of one block need (Dettmers et al., arXiv 2110.02861, choose a
table for the same reason), and square roots have the same bits on every device.

Codes are rounded stochastically. With rounding to the nearest code, many moments would never decay: a step lowers them
by 5 to 10 %, and neighbouring codes can be that far apart. A second moment above zero never gets code 0, since the step
divides by its square root.

Blocks are runs of at most 256 numbers within one row of a parameter. Ranks have whole rows, so they have whole blocks,
and their bits are those of one process. The optimisers of torchao 0.18 and bitsandbytes 0.50 are not used, because
their blocks run through a rank's flattened shard, so results depend on the number of ranks; they round moments to the
nearest code; and torchao rounds weights with random numbers from the global generator.

Shapes: B blocks of S numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

BLOCK = 256
SMALLEST_BLOCK = 16
"""Parameters with shorter blocks, such as the weights of norms, keep float32 moments: a scale would take more."""
CHUNKS = {"cpu": 1 << 16}
"""Numbers that an optimiser updates at a time: on CPUs what fits into the cache of a core."""
CHUNK_DEVICE = 1 << 24


def block_size(shape: torch.Size) -> int:
    """Return the length of the blocks of a parameter: the largest divisor of a row's length up to `BLOCK`.

    A row is all numbers with the same index in the first dimension.

    >>> [block_size(torch.Size(shape)) for shape in ([5, 2048], [8, 3, 160], [7], [4, 257])]
    [256, 240, 1, 1]
    """
    width = math.prod(shape[1:])
    return next(size for size in range(min(width, BLOCK), 0, -1) if width % size == 0)


def chunks(num_blocks: int, size: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that together cover the blocks of a parameter, each with about `CHUNKS` numbers."""
    step = max(1, CHUNKS.get(device.type, CHUNK_DEVICE) // size)
    for start in range(0, num_blocks, step):
        yield slice(start, min(num_blocks, start + step))


class Moment:
    """One moment of one parameter, or of this rank's rows of it. It is zero at first.

    `signed`: True for a first moment, and False for a second one, whose numbers are not negative. `quantised`: whether
    to store codes; moments with short blocks are float32 in any case. `device`: where it is stored."""

    def __init__(
        self, shape: torch.Size, *, signed: bool, quantised: bool, device: torch.device, pinned: bool = False
    ) -> None:
        self.size, self._signed = block_size(shape), signed
        self.is_quantised = quantised and self.size >= SMALLEST_BLOCK
        kind = (torch.int8 if signed else torch.uint8) if self.is_quantised else torch.float32
        self.values = torch.zeros(shape, dtype=kind, device=device, pin_memory=pinned)
        blocks = (shape[0], math.prod(shape[1:]) // self.size) if self.is_quantised else (0,)
        self.scales = torch.zeros(blocks, device=device, pin_memory=pinned)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors by name: float32 numbers, or codes and their scales.

        The first dimension of each is the rows of the parameter."""
        return {name: self.values} | ({f"{name}.scales": self.scales} if self.is_quantised else {})

    def read(self, blocks: slice, device: torch.device) -> torch.Tensor:
        """Return the numbers of some blocks, float32 [B, S], as a copy on `device`."""
        stored = self.values.view(-1, self.size)[blocks].to(device, non_blocking=True, copy=not self.is_quantised)
        if not self.is_quantised:
            return stored
        scales = self.scales.flatten()[blocks].to(device, non_blocking=True)
        return decode(stored, scales, signed=self._signed)

    def write(self, blocks: slice, numbers: torch.Tensor, uniform: torch.Tensor | None) -> None:
        """Store new values of some blocks, float32 [B, S].

        `uniform`: random numbers in [0, 1) for the rounding, [B, S]; needed where `is_quantised`."""
        if self.is_quantised:
            assert uniform is not None, "codes are rounded stochastically"
            numbers, scales = encode(numbers, uniform, signed=self._signed)
            self.scales.flatten()[blocks].copy_(scales, non_blocking=True)
        self.values.view(-1, self.size)[blocks].copy_(numbers, non_blocking=True)


def encode(numbers: torch.Tensor, uniform: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) of numbers [B, S]: int8 or uint8 [B, S], and float32 [B].

    `uniform`: random numbers in [0, 1) for the rounding. The expectation of a decoded number is the number."""
    levels = 127.0 if signed else 255.0
    sizes = numbers.abs()
    scales = sizes.amax(1)
    exact = sizes.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).mul_(levels**4)
    code = exact.sqrt().sqrt_().floor_()
    low, high = _fourth(code), _fourth(code + 1)
    code.add_(exact.sub_(low).div_(high.sub_(low)) > uniform)
    code.clamp_(min=0.0 if signed else 1.0, max=levels)
    if signed:
        return code.copysign_(numbers).to(torch.int8), scales
    return code.to(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the numbers that codes [B, S] stand for, float32. `scales`: float32 [B]."""
    code = codes.float()
    square = code * code.abs()
    return square.mul_(square.abs()).mul_(scales.mul((127.0 if signed else 255.0) ** -4)[:, None])


def _fourth(code: torch.Tensor) -> torch.Tensor:
    square = code * code
    return square.mul_(square)
