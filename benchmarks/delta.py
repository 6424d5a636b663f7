"""Bytes and speed of deltas on simulated optimiser steps, against the published bound and against XOR + zstd.

For each density of change it gives the ratio snapshot / delta, the share of the bound, and encode and decode in
MB of snapshot a CPU-second; the baseline is measured in the same run on the same tensors. The weights are
random normals (sigma 0.02) in bf16, 100 tensors, moved by normal steps of the given size: what the optimiser's
learning rate does, without its history. `python -m benchmarks.delta [--elements N] [--repeats R]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import zstandard

from benchmarks.report import report
from etude.weights import Tensor
from etude.weights.bound import bound_bytes
from etude.weights.codec import decode, encode
from etude.weights.tensors import same_bits

STEP_SIZES = (1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
NUM_TENSORS = 100

T = TypeVar("T")


def bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Codes of the nearest bf16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def weights(values: np.ndarray[Any, Any]) -> list[Tensor]:
    return [Tensor("bf16", part.shape, part) for part in np.array_split(bf16(values), NUM_TENSORS)]


def best_of(repeats: int, work: Callable[[], T]) -> tuple[T, float]:
    """The result and the shortest CPU time in seconds: other work on the machine disturbs it least."""
    shortest = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        result = work()
        shortest = min(shortest, time.process_time() - started)
    return result, shortest


def xor_zstd(new: list[Tensor], old: list[Tensor]) -> bytes:
    raw = b"".join((n.codes ^ o.codes).tobytes() for n, o in zip(new, old, strict=True))
    return zstandard.ZstdCompressor(level=1).compress(raw)


def undo_xor_zstd(data: bytes, old: list[Tensor]) -> list[Tensor]:
    raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint16)
    parts = np.split(raw, np.cumsum([t.codes.size for t in old])[:-1])
    return [Tensor(o.dtype, o.shape, part ^ o.codes) for part, o in zip(parts, old, strict=True)]


def measure(step_size: float, *, num_elements: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    start, move = rng.standard_normal(num_elements) * 0.02, rng.standard_normal(num_elements)
    old, new = weights(start), weights(start + step_size * move)
    specs = [t.spec for t in new]
    delta, encode_s = best_of(repeats, lambda: encode(new, old))
    decoded, decode_s = best_of(repeats, lambda: decode(delta, specs, old))
    plain, plain_encode_s = best_of(repeats, lambda: xor_zstd(new, old))
    undone, plain_decode_s = best_of(repeats, lambda: undo_xor_zstd(plain, old))
    if not all(map(same_bits, decoded, new)) or not all(map(same_bits, undone, new)):
        raise SystemExit(f"step size {step_size}: decoded other bits")
    snapshot, bound = 2 * num_elements, bound_bytes(new, old)
    changed = sum(int(np.count_nonzero(n.codes != o.codes)) for n, o in zip(new, old, strict=True))
    return {
        "step_size": step_size,
        "changed_share": round(changed / num_elements, 5),
        "delta_bytes": len(delta),
        "ratio": round(snapshot / len(delta), 2),
        "share_of_bound": round(bound / len(delta), 4),
        "encode_mb_per_s": round(snapshot / encode_s / 1e6, 1),
        "decode_mb_per_s": round(snapshot / decode_s / 1e6, 1),
        "xor_zstd_ratio": round(snapshot / len(plain), 2),
        "xor_zstd_share_of_bound": round(bound / len(plain), 4),
        "xor_zstd_encode_mb_per_s": round(snapshot / plain_encode_s / 1e6, 1),
        "xor_zstd_decode_mb_per_s": round(snapshot / plain_decode_s / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=1_400_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rows = [measure(size, num_elements=args.elements, repeats=args.repeats) for size in STEP_SIZES]
    report("delta", {"num_elements": args.elements, "dtype": "bf16", "rows": rows})


if __name__ == "__main__":
    main()
