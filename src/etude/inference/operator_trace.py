"""Traces every operator's results for a text, computed as the engine does: a prompt in chunks, then token by token.

For diagnosis: the results of each operator are concatenated by position. It allocates its own KV cache and does not use
that of requests. Shapes: T positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from etude.errors import EngineError
from etude.inference.device_memory import DeviceMemory
from etude.inference.kv import KVCache, Span
from etude.inference.wire import OperatorResult
from etude.models import Transformer

Results = dict[str, torch.Tensor]
"""Results by operator name, each [T, ...], in the order of computation."""

CHUNK = 16
"""Default positions per chunk: small, so that a prompt has several chunks."""
MAX_SHOWN_BYTES = 256 << 20

_WIRE = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int64: "int64"}


@torch.inference_mode()
def engine_results(
    model: Transformer,
    token_ids: Sequence[int],
    *,
    prompt_tokens: int,
    chunk_tokens: int = CHUNK,
) -> Results:
    """Compute a text and return the results of every operator of the model for all positions.

    An operator is for example a norm or a matrix product. The first `prompt_tokens` tokens are computed in chunks that
    end at multiples of `chunk_tokens`, the others one by one."""
    model = model.eval()
    kv = _memory(model, len(token_ids))
    tokens = torch.tensor(list(token_ids)).to(model.embedding.device)
    parts: dict[str, list[torch.Tensor]] = {}

    def watch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts.setdefault(name, []).append(tensor.clone())
        return tensor

    none = np.zeros(0, np.int64)
    for start, stop in _pieces(len(token_ids), prompt_tokens, chunk_tokens):
        if stop <= prompt_tokens:
            cache = kv.step(none, none, [Span(0, start, stop)])
        else:
            cache = kv.step(np.zeros(1, np.int64), np.array([start], np.int64), [])
        model.run(tokens[start:stop], cache, hook=watch)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _memory(model: Transformer, length: int) -> KVCache | DeviceMemory:
    sizes = {"num_slots": 1, "context_tokens": length}
    device = model.embedding.device
    if device.type == "cpu":
        return KVCache(model.local, model.operators, **sizes)
    return DeviceMemory(model.local, model.operators, **sizes, device=device)


def _pieces(num_tokens: int, prompt_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < prompt_tokens:
        stop = min(prompt_tokens, (at // chunk_tokens + 1) * chunk_tokens)
        yield at, stop
        at = stop
    yield from ((p, p + 1) for p in range(prompt_tokens, num_tokens))


def as_wire(results: Results) -> list[OperatorResult]:
    """Encode results as messages for an engine's response. Raises `EngineError` when they exceed `MAX_SHOWN_BYTES`."""
    num_bytes = sum(tensor.nbytes for tensor in results.values())
    if num_bytes > MAX_SHOWN_BYTES:
        raise EngineError(
            f"the results of the operators have {num_bytes >> 20} MiB",
            f"at most {MAX_SHOWN_BYTES >> 20} MiB are shown",
            hint="ask for fewer tokens",
        )
    return [
        OperatorResult(
            name=name,
            dtype=_WIRE[tensor.dtype],
            shape=tuple(tensor.shape),
            data=tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in results.items()
    ]


def as_tensor(result: OperatorResult) -> torch.Tensor:
    """Decode one operator's result to a tensor. Raises `EngineError` for an invalid dtype or size."""
    kinds = {name: dtype for dtype, name in _WIRE.items()}
    kind, sizes = kinds.get(result.dtype), result.shape
    if kind is None or not sizes or min(sizes) < 1 or math.prod(sizes) * kind.itemsize != len(result.data):
        raise EngineError(
            f"an engine's result of the operator {result.name[:80]} is invalid",
            f"{len(result.data)} bytes do not make {result.dtype[:20]} numbers of shape {result.shape}",
            hint="use the same etude version for the engine and for this command",
        )
    return torch.frombuffer(bytearray(result.data), dtype=torch.uint8).view(kind).view(result.shape)
