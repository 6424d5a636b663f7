"""Parity classes: processes with the same class compute the same bits.

With a fixed order of summation, a token's numbers do not depend on the batch, on chunks or on caches. But the order
itself depends on the chip, on torch and on the vendor's library. So a class is identified by results: a digest of fixed
products, norms and attention in the model's sizes, beside names that explain a difference (on a GPU the compute
capability, and version and digest of etude's kernels). Engine and learner agree to the bit where their classes are
equal. Threads and versions matter only where they change a bit."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch

from etude.numerics.device import on_device
from etude.numerics.operators import Operators

WIDEST = 4096  # rows of a weight that are computed
ROWS = 9
TOKENS = 200


CPU = torch.device("cpu")


def parity_class(
    operators: Operators, products: Iterable[tuple[int, int]], *, heads: int, key_width: int, device: torch.device = CPU
) -> str:
    """Return the parity class of processes that compute with these operators on this device, as a line of text.

    Processes of one class compute equal bits. `products`: (out, in) of each weight matrix. `heads`, `key_width`: number
    of key/value heads, and their width. Takes milliseconds.

    >>> from etude.numerics import Exact, Native
    >>> one, other = (parity_class(kind(), {(8, 16)}, heads=1, key_width=8) for kind in (Exact, Native))
    >>> one.startswith("exact float32 ") and other.startswith("native float32 ") and one != other
    True
    """
    return _class(operators, frozenset(products), heads, key_width, device, torch.get_num_threads())


@functools.lru_cache(maxsize=64)
def _class(
    operators: Operators,
    products: frozenset[tuple[int, int]],
    heads: int,
    key_width: int,
    device: torch.device,
    threads: int,
) -> str:
    digest = hashlib.sha256()
    with on_device(device):
        for result in _results(operators, sorted(products), heads, key_width, device):
            digest.update(result.float().contiguous().cpu().numpy().tobytes())
    versions = " ".join([f"torch-{torch.__version__}", *([operators.kernels] if operators.kernels else [])])
    return f"{operators.name} {chip(device)} {versions} {digest.hexdigest()[:12]}"


def chip(device: torch.device) -> str:
    """Return the name of the processor, as far as it is known to affect bits.

    >>> chip(CPU).startswith("cpu-")
    True
    """
    if device.type == "cuda":
        return "cuda-sm{}{}".format(*torch.cuda.get_device_capability(device))
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"


@torch.inference_mode()
def _results(
    operators: Operators, products: list[tuple[int, int]], heads: int, key_width: int, device: torch.device
) -> Iterable[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(operators.dtype).to(device)

    for out_size, in_size in products:
        x, weight = random(ROWS, in_size), random(min(out_size, WIDEST), in_size).float()
        yield operators.linear(x, weight)
        if operators.degree > 1 and not in_size % operators.degree:
            yield operators.linear_partial(x, weight, 1)
        yield operators.rms_norm(x, None, 1e-6)
        yield operators.gated(random(ROWS, 2 * in_size))
        yield operators.log_softmax(operators.logits(x, weight), 0.7)
    q, k, v = random(2 * heads, TOKENS, key_width), random(heads, TOKENS, key_width), random(heads, TOKENS, key_width)
    yield operators.causal_attention()(q, k, v)
