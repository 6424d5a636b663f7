"""Exact mode on a GPU against native torch: time of each operator, of a layer decoding and training, and bits.

One layer and the head of the shape of Qwen3-30B-A3B, random bf16 weights. Native is cuBLAS, torch's attention and
`torch._grouped_mm` where torch has it, else a loop over experts. For each operator and number of rows: milliseconds of
both (the median, by events, after warm-up), their ratio, and in how many numbers rows computed alone, or among others,
differ from the same rows in the whole (exact: 0, or the run fails). `decode` is one token of each of many sequences
over kept keys; `train` is forward and backward of packed sequences, and its bits are compared with the same step again.
`--sweep` times other tiles for the products.

Needs a GPU and `pip install 'etude[gpu]'`; minutes on an H200. `python -m benchmarks.gpu.exact [--quick] [--sweep]`
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import report
from etude.errors import InputError

EPS = 1e-6
Rows = Callable[[torch.Tensor], torch.Tensor]  # work whose result has a row for each of its input
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Tile = tuple[int, int, int, int]  # rows, outputs, warps, stages

TILES: tuple[Tile, ...] = (
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 8, 3), (128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4),
    (128, 256, 8, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A layer and the head. The default is Qwen3-30B-A3B's."""

    width: int = 2048
    heads: int = 32
    key_heads: int = 4
    head: int = 128
    experts: int = 128
    top: int = 8
    inner: int = 768
    vocabulary: int = 151_936


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rows: tuple[int, ...] = (1, 64, 512, 8192)
    most_logits: int = 512  # rows of the head and of log-probabilities
    sequences: tuple[int, ...] = (8, 64, 256)
    context: int = 4096
    page: int = 256
    lengths: tuple[int, ...] = (4096, 2048, 1024, 1024)
    repeats: int = 20


QUICK = Size(rows=(1, 512), sequences=(64,), context=1024, lengths=(512, 512), repeats=5)


class Bench:
    """A layer's weights, computed both ways; what was found so far."""

    def __init__(self, shape: Shape, size: Size, device: str) -> None:
        from etude.numerics.gpu import ExactGpu, Router

        self.shape, self.size, self.device = shape, size, device
        self.operators, self.router = ExactGpu(torch.bfloat16), Router(shape.top)
        s = shape
        shapes = {
            "qkv": ((s.heads + 2 * s.key_heads) * s.head, s.width),
            "out": (s.width, s.heads * s.head),
            "router": (s.experts, s.width),
            "gate_up": (s.experts, 2 * s.inner, s.width),
            "down": (s.experts, s.width, s.inner),
        }
        self.weights = {name: self.normal(*of).mul_(of[-1] ** -0.5) for name, of in shapes.items()}
        self.found: list[dict[str, Any]] = []

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def heads(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.shape
        k, v = (self.normal(n, s.key_heads, s.head) for _ in range(2))
        return self.normal(n, s.heads, s.head), k, v

    def rope(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.rand(n, 1, self.shape.head // 2, device=self.device) * 6
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def milliseconds(self, work: Callable[[], object]) -> float:
        for _ in range(3 if self.device == "cuda" else 0):
            work()
        return median(self._once(work) for _ in range(self.size.repeats))

    def _once(self, work: Callable[[], object]) -> float:
        if self.device == "cpu":  # the interpreter, to see that all of this runs
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1000
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    def add(self, name: str, rows: int, exact: Callable[[], object], native: Callable[[], object], **bits: int) -> None:
        ours, theirs = self.milliseconds(exact), self.milliseconds(native)
        row = {"operator": name, "rows": rows, "exact_ms": round(ours, 4), "native_ms": round(theirs, 4)}
        self.found.append({**row, "exact_by_native": round(ours / theirs, 3), **bits})

    def add_rows(self, name: str, exact: Rows, native: Rows, given: torch.Tensor) -> None:
        """Both ways of work on rows, with the bits that depend on the others."""
        self.add(
            name, len(given), lambda: exact(given), lambda: native(given),
            exact_differing=_differing(exact, given), native_differing=_differing(native, given),
        )  # fmt: skip


def _differing(work: Rows, x: torch.Tensor) -> int:
    """Numbers of rows computed alone, in another order and among fewer that differ from the whole's."""
    whole, n = work(x), len(x)
    picks = ([0], [n - 1], list(range(n // 3, n // 2 + 1)), list(range(n - 1, -1, -3)))
    return sum(int((work(x[picked]) != whole[picked]).sum()) for picked in picks)


def _native_grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if hasattr(torch, "_grouped_mm") and x.is_cuda:
        y: torch.Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return y
    bounds = itertools.pairwise([0, *ends.tolist()])
    return torch.cat([x[first:stop] @ w.t() for (first, stop), w in zip(bounds, weight, strict=True)])


def _native_choice(scores: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    best, experts = scores.float().softmax(-1).topk(top, -1)
    return best / best.sum(-1, keepdim=True), experts


def _native_mix(
    x: torch.Tensor, gates: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sorted rows, grouped products, and the sum by index_add."""
    order = experts.flatten().argsort()
    token = order // experts.shape[1]
    ends = torch.bincount(experts.flatten(), minlength=len(down)).cumsum(0).to(torch.int32)
    a, b = _native_grouped(x[token], gate_up, ends).chunk(2, -1)
    out = _native_grouped(F.silu(a) * b, down, ends) * gates.flatten()[order][:, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, out)


def _native_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """[batch, heads, tokens, width] all."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _exact_layer(b: Bench, x: torch.Tensor, w: dict[str, torch.Tensor], rope: Any, attend: Attend) -> torch.Tensor:
    from etude.numerics.gpu import choose, mix

    ops, s = b.operators, b.shape
    qkv = ops.linear(ops.rms_norm(x, None, EPS), w["qkv"]).view(len(x), -1, s.head)
    qk, v = qkv.split([s.heads + s.key_heads, s.key_heads], 1)
    q, k = ops.rotate(ops.rms_norm(qk, None, EPS), *rope).split([s.heads, s.key_heads], 1)
    x = x + ops.linear(attend(q, k, v).reshape(len(x), -1), w["out"])
    normed = ops.rms_norm(x, None, EPS)
    chosen = choose(ops.router_scores(normed, w["router"]), b.router)
    return x + mix(normed, chosen.gates_NK, chosen.experts_NK, w["gate_up"], w["down"])


def _native_layer(b: Bench, x: torch.Tensor, w: dict[str, torch.Tensor], rope: Any, attend: Attend) -> torch.Tensor:
    s = b.shape
    qkv = F.linear(F.rms_norm(x, (s.width,), eps=EPS), w["qkv"]).view(len(x), -1, s.head)
    qk, v = qkv.split([s.heads + s.key_heads, s.key_heads], 1)
    qk = F.rms_norm(qk, (s.head,), eps=EPS)
    q, k = torch.addcmul(qk * rope[0], qk.roll(s.head // 2, -1), rope[1]).split([s.heads, s.key_heads], 1)
    x = x + F.linear(attend(q, k, v).reshape(len(x), -1), w["out"])
    normed = F.rms_norm(x, (s.width,), eps=EPS)
    return x + _native_mix(normed, *_native_choice(F.linear(normed, w["router"]), s.top), w["gate_up"], w["down"])


def operators(b: Bench, n: int) -> None:
    """Each operator by itself, forward, on n rows."""
    from etude.numerics.gpu import choose, mix

    s, ops, w = b.shape, b.operators, b.weights
    head, weight = b.normal(s.vocabulary, s.width).mul_(s.width**-0.5), b.normal(s.width)
    for name, matrix in (("qkv", w["qkv"]), ("out", w["out"]), ("router", w["router"]), ("head", head)):
        given = b.normal(min(n, b.size.most_logits) if name == "head" else n, matrix.shape[1])
        b.add_rows(name, lambda x, m=matrix: ops.linear(x, m), lambda x, m=matrix: F.linear(x, m), given)  # type: ignore[misc]
    x, scores = b.normal(n, s.width), b.normal(n, s.experts)
    b.add_rows("rms_norm", lambda x: ops.rms_norm(x, weight, EPS), lambda x: F.rms_norm(x, (s.width,), weight, EPS), x)
    logits = b.normal(min(n, b.size.most_logits), s.vocabulary)
    b.add_rows("log_softmax", ops.log_softmax, lambda x: x.float().log_softmax(-1), logits)
    b.add_rows("choose", lambda x: choose(x, b.router).gates_NK, lambda x: _native_choice(x, s.top)[0], scores)

    def exact_mix(both: torch.Tensor) -> torch.Tensor:
        chosen = choose(both[:, s.width :], b.router)
        return mix(both[:, : s.width].contiguous(), chosen.gates_NK, chosen.experts_NK, w["gate_up"], w["down"])

    def native_mix(both: torch.Tensor) -> torch.Tensor:
        choice = _native_choice(both[:, s.width :], s.top)
        return _native_mix(both[:, : s.width].contiguous(), *choice, w["gate_up"], w["down"])

    b.add_rows("experts", exact_mix, native_mix, torch.cat([x, scores], 1))


def decode(b: Bench, count: int) -> None:
    """One token of each of `count` sequences through the layer, at the end of contexts of one length."""
    from etude.numerics.gpu import PagedTokens, Pages
    from etude.numerics.gpu import SequenceRows as Step

    s, page, each = b.shape, b.size.page, b.size.context // b.size.page
    memory = Pages(
        num_layers=1, num_pages=count * each, page=page, heads=s.key_heads, key_width=s.head, value_width=s.head,
        shared=False, dtype=torch.bfloat16, device=b.device,
    )  # fmt: skip
    memory.keys.normal_()
    memory.values.normal_()
    whole = (count, each, s.key_heads, page, s.head)
    keys, values = (t[0].view(whole).transpose(1, 2).flatten(2, 3) for t in (memory.keys, memory.values))
    x, rope = b.normal(count, s.width), b.rope(count)
    steps = [Step(each * page - 1, 1, range(i * each, (i + 1) * each)) for i in range(count)]
    all_of_them, first = PagedTokens(memory, steps), PagedTokens(memory, steps[:1])

    def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys[:, :, -1], values[:, :, -1] = k, v
        return _native_attention(q[:, :, None], keys, values, causal=False)[:, :, 0]

    def exact(n: int, step: PagedTokens) -> torch.Tensor:
        cos, sin = rope
        return _exact_layer(b, x[:n], b.weights, (cos[:n], sin[:n]), lambda q, k, v: step.attend(0, q, k, v))

    bits = int((exact(1, first) != exact(count, all_of_them)[:1]).sum())
    b.add(
        "decode", count, lambda: exact(count, all_of_them), lambda: _native_layer(b, x, b.weights, rope, kept),
        exact_differing=bits,
    )  # fmt: skip
    q, k, v = b.heads(count)
    b.add("decode attention", count, lambda: all_of_them.attend(0, q, k, v), lambda: kept(q, k, v))


def train(b: Bench) -> None:
    """Forward, and forward and backward, of the layer over packed sequences."""
    from etude.numerics.gpu import PackedTokens

    lengths = b.size.lengths
    n, first = sum(lengths), lengths[0]
    packed, alone = PackedTokens(lengths, b.device), PackedTokens(lengths[:1], b.device)
    rope, slope, x = b.rope(n), b.normal(n, b.shape.width), b.normal(n, b.shape.width).requires_grad_()
    weights = {name: weight.clone().requires_grad_() for name, weight in b.weights.items()}
    inputs = [x, *weights.values()]

    def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(t.transpose(0, 1)[None].split(lengths, 2) for t in (q, k, v)), strict=True)
        return torch.cat([_native_attention(*part, causal=True) for part in parts], 2)[0].transpose(0, 1)

    def exact() -> torch.Tensor:
        return _exact_layer(b, x, weights, rope, lambda q, k, v: packed.attend(0, q, k, v))

    def native() -> torch.Tensor:
        return _native_layer(b, x, weights, rope, one_by_one)

    def step(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y = forward()
        return (y.detach(), *torch.autograd.grad(y, inputs, slope))

    def changed(forward: Callable[[], torch.Tensor]) -> int:
        return sum(int((once != again).sum()) for once, again in zip(step(forward), step(forward), strict=True))

    bits = {"exact_differing": changed(exact), "native_differing": changed(native)}
    b.add("train", n, lambda: step(exact), lambda: step(native), **bits)
    with torch.no_grad():
        cos, sin = rope
        own = _exact_layer(b, x[:first], weights, (cos[:first], sin[:first]), lambda *qkv: alone.attend(0, *qkv))
        b.add("layer forward", n, exact, native, exact_differing=int((own != exact()[:first]).sum()))
        q, k, v = b.heads(n)
        b.add("packed attention", n, lambda: packed.attend(0, q, k, v), lambda: one_by_one(q, k, v))


def sweep(b: Bench) -> Iterator[dict[str, Any]]:
    """The products in other tiles, for whoever sets `tiles.tiles_of`."""
    from etude.numerics.gpu.matmul import multiply
    from etude.numerics.gpu.routing import Dispatch
    from etude.numerics.gpu.tiles import tiles_of

    for rows, name, (tile_rows, outs, warps, stages) in itertools.product((64, 8192), ("qkv", "gate_up"), TILES):
        weight = b.weights[name]
        experts = torch.rand(rows, b.shape.experts, device=b.device).topk(b.shape.top, -1).indices.int()
        to = Dispatch.of(experts, b.shape.experts)
        grouped: dict[str, Any] = {"groups": to.groups, "source_N": to.token_S} if weight.dim() == 3 else {}
        base = tiles_of(weight.shape[-2], weight.shape[-1], 2, grouped=bool(grouped))
        tiles = replace(base, rows=tile_rows, outs=outs, warps=warps, stages=stages)
        x = b.normal(rows, b.shape.width)
        spent = b.milliseconds(lambda x=x, w=weight, t=tiles, g=grouped: multiply(x, w, t, **g))  # type: ignore[misc]
        yield {"product": name, "rows": rows, "tile": [tile_rows, outs, tiles.ins], "leaves": tiles.leaves,
               "warps": warps, "stages": stages, "ms": round(spent, 4)}  # fmt: skip


def measure(shape: Shape, size: Size, device: str, *, tiles: bool = False) -> dict[str, Any]:
    """All of it, as numbers."""
    torch.manual_seed(0)
    b = Bench(shape, size, device)
    with torch.no_grad():
        for n in size.rows:
            operators(b, n)
        for count in size.sequences:
            decode(b, count)
    train(b)
    with torch.no_grad():
        swept = {"sweep": list(sweep(b))} if tiles else {}
    return {"rows": b.found, "exact_differing": sum(row.get("exact_differing", 0) for row in b.found), **swept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--sweep", action="store_true", help="the products in other tiles, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        missing = InputError(
            "benchmarks.gpu.exact times kernels of a GPU", "torch sees none here",
            hint="run it where there is one; tests/gpu checks the same kernels by Triton's interpreter",
        )  # fmt: skip
        raise SystemExit(str(missing))
    found = measure(Shape(), QUICK if args.quick else Size(), "cuda", tiles=args.sweep)
    report("exact_gpu", {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bf16", **found})
    if found["exact_differing"]:
        raise SystemExit("exact mode differs: see exact_differing")


if __name__ == "__main__":
    main()
