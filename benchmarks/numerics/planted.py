"""Faults that engines have had, each planted into a model of ours that stands for the engine's.

A plant changes weights, buffers, sizes, operators or what goes to the cache, and says which operators would be right
to blame, in which layers. `near` names dtypes in whose own rounding it lies, so that no doctor can tell it from a
clean kernel unless bits must agree; `why` is the reason for bf16, in a word.

Shapes: N tokens, H query heads, G key/value heads, A and B widths of keys and values, E experts, K experts a token.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from etude.models import ModelConfig, Transformer
from etude.models.attention import Cache
from etude.models.components import Latent, Routing, Scores, Yarn
from etude.models.hooks import ForwardHook
from etude.models.rope import halves, tables
from etude.numerics.operators import Operators

QWEN = ModelConfig(
    vocab_size=96, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, expert_size=32,
    num_experts=8, top_k=2, context_tokens=128, yarn=Yarn(original_tokens=32),
)  # fmt: skip
DEEPSEEK = ModelConfig(
    vocab_size=96, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=24, expert_size=32,
    num_experts=9, top_k=2, context_tokens=128, family="deepseek_v3", dense_layers=(0,), dense_size=48,
    num_shared=1, routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=3, top_groups=2),
    latent=Latent(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16, q_rank=40),
    yarn=Yarn(original_tokens=32, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
PROMPT = 56  # tokens of a text that are computed in chunks; each other by itself

Put = Callable[[Transformer], None]
Method = Callable[..., torch.Tensor]  # an operator's, after the right operators that it stands in for
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None]  # q_NHA, k_NGA, v_NGB and the softmax's scale


@dataclass(frozen=True)
class Plant:
    """A fault, and who would be right to be blamed."""

    name: str
    right: tuple[str, ...]  # names of operators, without their layer
    layers: tuple[int, ...]  # in which it is; () outside of them
    put: Put
    why: str  # what makes it visible in bf16, or not
    near: tuple[str, ...] = ()  # dtypes that round as coarsely as this
    both: Put | None = None  # done to both sides before: what it takes for the fault to show

    def blames(self, operator: str) -> bool:
        """Whether this name, "layers.3.attention.qkv", is among the right ones."""
        places = [f"layers.{layer}." for layer in self.layers] or [""]
        return operator in {place + name for place in places for name in self.right}


# How a fault is put into a model


def in_layers(put: Callable[[Any], None], *layers: int) -> Put:
    def put_all(model: Transformer) -> None:
        for layer in layers:
            put(model.blocks[layer])

    return put_all


def computing(module: nn.Module, **methods: Method) -> None:
    """Everything in `module` computes with these in place of its own."""
    for part in module.modules():
        if isinstance(right := getattr(part, "operators", None), Operators):
            wrong = copy.copy(right)
            for name, method in methods.items():
                setattr(wrong, name, functools.partial(method, right))
            part.__dict__["operators"] = wrong


def calling(module: nn.Module, forward: Callable[..., Any]) -> None:
    """`forward` hears the right one first."""
    name = "forward"
    setattr(module, name, functools.partial(forward, module.forward))


@dataclass(frozen=True)
class _Wrong:
    """A cache that is handed something else."""

    cache: Cache
    change: Callable[[torch.Tensor, Kept], Kept]

    @property
    def positions(self) -> torch.Tensor:
        return self.cache.positions

    @property
    def compressed(self) -> bool:
        return self.cache.compressed

    def attend(
        self, layer: int, q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        return self.cache.attend(layer, *self.change(self.positions, (q_NHA, k_NGA, v_NGB, scale)))


def keeping(change: Callable[[torch.Tensor, Kept], Kept]) -> Callable[[Any], None]:
    """A block's fault: what goes to the cache, by positions, is changed."""

    def put(block: Any) -> None:
        def forward(right: Any, x: torch.Tensor, rope: Any, cache: Cache, layer: int, see: ForwardHook) -> Any:
            return right(x, rope, _Wrong(cache, change), layer, see)

        calling(block.attention, forward)

    return put


def step_behind(weight: torch.Tensor, rate: float, dtype: torch.dtype) -> None:
    """Adam's first step is the learning rate, up or down; both versions are rounded to `dtype`."""
    generator = torch.Generator().manual_seed(7)
    signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
    with torch.no_grad():
        weight.copy_((weight + rate * signs).to(dtype))


def narrow(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


# Faults


def angles_in_bf16(model: Transformer) -> None:
    """The frequencies went along when the model was cast. At position 63 the largest angle is off by .029 in `QWEN`, by
    .0015 in `DEEPSEEK`: under half a unit of bf16's."""
    cos, sin = tables(model.config)
    half = model.config.rope_dim // 2
    angle = torch.arange(len(cos))[:, None] * narrow(torch.atan2(sin[1, half:], cos[1, half:]))
    length = torch.hypot(cos[0, 0], sin[0, 0])
    model.cos.copy_(torch.cat([angle.cos(), angle.cos()], -1) * length)
    model.sin.copy_(torch.cat([-angle.sin(), angle.sin()], -1) * length)


def tables_in_bf16(model: Transformer) -> None:
    model.cos.copy_(narrow(model.cos))
    model.sin.copy_(narrow(model.sin))


def interleaved(block: Any) -> None:
    if at := getattr(block.attention, "latent", None):
        block.attention.latent = dataclasses.replace(at, interleaved=False)
    else:
        computing(block.attention, rotate=lambda right, x, cos, sin: right.rotate(halves(x), cos, sin))


def no_mscale(model: Transformer) -> None:
    yarn = model.config.yarn
    assert yarn is not None
    if model.config.latent is None:
        model.cos.div_(yarn.table_scale)
        model.sin.div_(yarn.table_scale)
    for block in model.blocks if model.config.latent else ():
        block.attention.scale = model.config.head_dim**-0.5  # type: ignore[union-attr]


def eps_of(value: float) -> Method:
    return lambda right, x, weight, eps: right.rms_norm(x, weight, value)


def one_more(right: Operators, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return right.rms_norm(x, weight if weight is None else weight + 1, eps)


def over_all_heads(right: Operators, qk: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return right.rms_norm(qk.flatten(1), None, eps).view(qk.shape)


def experts_in_another_order(block: Any) -> None:
    for weight in (block.experts.gate_up, block.experts.down):
        weight.data = weight.data.roll(1, 0)


def gate_and_up_swapped(block: Any) -> None:
    block.experts.gate_up.data = torch.cat(block.experts.gate_up.data.chunk(2, 1)[::-1], 1)


def gelu(right: Operators, h: torch.Tensor) -> torch.Tensor:
    a, b = h.float().chunk(2, -1)
    return (F.gelu(a) * b).to(h.dtype)


def routing(**changes: Any) -> Callable[[Any], None]:
    def put(block: Any) -> None:
        block.experts.routing = dataclasses.replace(block.experts.routing, **changes)

    return put


def bias_in_gates(block: Any) -> None:
    bias, block.experts.bias = block.experts.bias, None
    computing(block.experts, sigmoid=lambda right, scores: right.sigmoid(scores) + bias)


def tied(model: Transformer) -> None:
    """Experts that were copied from one: their routers score alike."""
    for block in model.blocks:
        if (experts := getattr(block, "experts", None)) is not None:
            experts.router.data[1:4] = experts.router.data[:1]
            if experts.bias is not None:
                experts.bias.zero_()


def last_of_ties(right: Operators, values: torch.Tensor, k: int) -> torch.Tensor:
    return values.shape[-1] - 1 - right.top_k(values.flip(-1), k)


def in_chunks_of_bf16(right: Operators, x: torch.Tensor, weight: torch.Tensor, size: int = 16) -> torch.Tensor:
    """What was summed so far is rounded after every `size` products."""
    total = torch.zeros(len(x), len(weight))
    for a, w in zip(torch.split(x.float(), size, 1), torch.split(weight.float(), size, 1), strict=True):
        total = narrow(total + a @ w.T)
    return total.to(right.dtype)


def in_bf16(right: Operators, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return narrow(narrow(x.float()) @ narrow(weight.float()).T).to(x.dtype)


def router_in_bf16(right: Operators, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return in_bf16(right, x, weight).float()


def in_tf32(right: Operators, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def cut(t: torch.Tensor) -> torch.Tensor:
        return (t.float().view(torch.int32) & -0x2000).view(torch.float32)

    return right.linear(cut(x).to(x.dtype), cut(weight).to(weight.dtype))


def reduced_in_bf16(block: Any) -> None:
    """Two ranks' sums are rounded before they are added."""
    ranks = block.attention.out.shape[1] // 2

    def linear(right: Operators, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight is not block.attention.out:
            return right.linear(x, weight)
        parts = zip(torch.split(x, ranks, 1), torch.split(weight, ranks, 1), strict=True)
        return functools.reduce(torch.add, (narrow(right.linear(a, w)) for a, w in parts))

    computing(block.attention, linear=linear)


def last_first(right: Operators, out: torch.Tensor, slot: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return right.combine(out, slot.flip(1), gates.flip(1))


def narrow_gates(right: Operators, out: torch.Tensor, slot: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return right.combine(out, slot, narrow(gates))


def narrow_residual(block: Any) -> None:
    def forward(right: Any, x: torch.Tensor, *rest: Any) -> Any:
        *others, see = rest
        return right(x, *others, lambda name, t: see(name, narrow(t) if name in ("middle", "output") else t))

    calling(block, forward)


def no_shared(block: Any) -> None:
    calling(block.experts.shared, lambda right, x, see: torch.zeros_like(x))


def shared_scaled(block: Any) -> None:
    calling(block.experts.shared, lambda right, x, see: right(x, see) * block.experts.routing.scaling)


def stale_absorbed(block: Any) -> None:
    """The absorbed matrices were made once, before the weights changed."""
    step_behind(block.attention.kv_up, 1e-3, block.operators.dtype)


def stale_out(rate: float) -> Callable[[Any], None]:
    return lambda block: step_behind(block.attention.out, rate, block.operators.dtype)


def one_stale_expert(block: Any) -> None:
    step_behind(block.experts.down.data[2], 1e-3, block.operators.dtype)


def stale_token(model: Transformer) -> None:
    step_behind(model.embedding.data[:4], 1e-3, model.operators.dtype)


def scaled(positions: torch.Tensor, kept: Kept) -> Kept:
    """Of hidden size / heads, where a head is wider."""
    q, k, v, scale = kept
    return q, k, v, (scale or q.shape[-1] ** -0.5) * (24 / 16) ** 0.5


def heads_dealt(positions: torch.Tensor, kept: Kept) -> Kept:
    """Query head h asks key head h mod G. Its result comes back in place of another's."""
    q, k, v, scale = kept
    return q.view(len(q), k.shape[1], -1, q.shape[-1]).transpose(1, 2).reshape(q.shape), k, v, scale


def narrow_cache(positions: torch.Tensor, kept: Kept) -> Kept:
    """An 8-bit cache."""
    q, k, v, scale = kept
    k8, v8 = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (k, v))
    return q, k8, k8[..., : v.shape[-1]] if v.shape[-1] != k.shape[-1] else v8, scale


def one_late(block: Any) -> None:
    """A decoded token's place holds what the token before it computed."""
    last: list[tuple[torch.Tensor, torch.Tensor]] = []

    def change(positions: torch.Tensor, kept: Kept) -> Kept:
        q, k, v, scale = kept
        before = last.pop() if last else (k, v)
        last.append((k[-1:].clone(), v[-1:].clone()))
        return (q, *before, scale) if len(q) == 1 else kept

    keeping(change)(block)


def stale_row(place: int) -> Callable[[torch.Tensor, Kept], Kept]:
    """One place was never written: whoever had it before left zeros."""

    def change(positions: torch.Tensor, kept: Kept) -> Kept:
        q, k, v, scale = kept
        written = (positions != place).to(k.dtype)[:, None, None]
        return q, k * written, v * written, scale

    return change


def stale_keys(positions: torch.Tensor, kept: Kept) -> Kept:
    """The first 32 places are of a version before: off by .4% each, up or down."""
    q, k, v, scale = kept
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, k.shape[1:], generator=generator) * 2 - 1
    drift = 1 + 0.004 * signs.to(torch.float32) * (positions < 32)[:, None, None]
    k_old = (k.float() * drift).to(k.dtype)
    shared = v.shape[-1] != k.shape[-1]
    return q, k_old, k_old[..., : v.shape[-1]] if shared else (v.float() * drift).to(v.dtype), scale


ALL, MOE, ONE = (0, 1, 2), (1, 2), (1,)
FIRST = ("attention.qkv", "attention.inward")
ROTATED, ATTENDED = ("attention.rotated",), ("attention.attended_latent", "attention.attended")
OUTER, BF16, FLOAT32 = (), ("bfloat16",), ("float32",)
GATE_UP, ACTIVATED = ("experts.gate_up", "mlp.gate_up"), ("experts.activated", "mlp.activated", "shared.activated")


def _on(part: str | None, **methods: Method) -> Callable[[Any], None]:
    return lambda block: computing(getattr(block, part) if part else block, **methods)


COMMON = (
    Plant("RoPE frequencies cast to bf16", ROTATED, ALL, angles_in_bf16, "angles"),
    Plant("RoPE tables cast to bf16", ROTATED, ALL, tables_in_bf16, "same", BF16),
    Plant("RoPE in the other layout", ROTATED, ALL, in_layers(interleaved, *ALL), "pairs"),
    Plant("norm epsilon 1e-5, not 1e-6", ("attention_norm", "experts_norm"), ALL,
          in_layers(lambda block: setattr(block, "eps", 1e-5), *ALL), "rounding", BF16),
    Plant("norm weight + 1", ("attention_norm",), ONE, in_layers(
        lambda block: block.attention_norm.data.add_(1), 1), "factor"),
    Plant("experts in another order", ("experts.gate_up",), ONE, in_layers(experts_in_another_order, 1), "choice"),
    Plant("gate and up swapped", ("experts.gate_up",), ONE, in_layers(gate_and_up_swapped, 1), "order"),
    Plant("gelu for silu", ACTIVATED, ALL, in_layers(_on(None, gated=gelu), *ALL), "function"),
    Plant("gates not renormalised", ("experts.gates",), MOE, in_layers(routing(normalise=False), *MOE), "factor"),
    Plant("ties to the last expert", ("experts.used",), MOE, in_layers(_on("experts", top_k=last_of_ties), *MOE),
          "choice", both=tied),
    Plant("router in bf16", ("experts.scores",), MOE, in_layers(_on("experts", router_scores=router_in_bf16), *MOE),
          "float32"),
    Plant("gates cast to bf16", ("experts.mixed",), MOE, in_layers(_on("experts", combine=narrow_gates), *MOE),
          "same", BF16),
    Plant("experts added last first", ("experts.mixed",), MOE, in_layers(_on("experts", combine=last_first), *MOE),
          "rounding", BF16 + FLOAT32),
    Plant("softmax scale of another width", ATTENDED, ONE, in_layers(keeping(scaled), 1), "factor"),
    Plant("keys kept one token late", ATTENDED, ONE, in_layers(one_late, 1), "places"),
    Plant("one place of the cache never written", ATTENDED, ONE, in_layers(keeping(stale_row(20)), 1), "place"),
    Plant("32 places of a version before", ATTENDED, ONE, in_layers(keeping(stale_keys), 1), "rounding", BF16),
    Plant("8-bit cache", ATTENDED, ONE, in_layers(keeping(narrow_cache), 1), "coarser"),
    Plant("attention's output product a step of 1e-3 behind", ("attention.out",), ONE, in_layers(stale_out(1e-3), 1),
          "step"),
    Plant("attention's output product a step of 1e-5 behind", ("attention.out",), ONE, in_layers(stale_out(1e-5), 1),
          "few"),
    Plant("one expert a step of 1e-3 behind", ("experts.down",), ONE, in_layers(one_stale_expert, 1), "step"),
    Plant("four tokens' embeddings a step of 1e-3 behind", ("embedding",), OUTER, stale_token, "copied"),
    Plant("bf16 sums, 16 products each", FIRST, ONE, in_layers(_on("attention", linear=in_chunks_of_bf16), 1),
          "sums"),
    Plant("tf32 left on", FIRST, ONE, in_layers(_on("attention", linear=in_tf32), 1), "same", BF16),
    Plant("two ranks reduced in bf16", ("attention.out",), ONE, in_layers(reduced_in_bf16, 1), "rounding", BF16),
    Plant("residual stream in bf16", ("middle", "output"), ONE, in_layers(narrow_residual, 1), "same", BF16),
    Plant("head in bf16", ("logits",), OUTER, lambda model: setattr(model, "operators", _headed(model)), "same", BF16),
)  # fmt: skip
OF_QWEN = (
    Plant("YaRN's mscale forgotten in the tables", ROTATED, ALL, no_mscale, "factor"),
    Plant("queries and keys normalised over all heads", ("attention.qk_norm",), ALL, in_layers(
        _on("attention", rms_norm=over_all_heads), *ALL), "factor"),
    Plant("query heads dealt to key heads", ATTENDED, ONE, in_layers(keeping(heads_dealt), 1), "heads"),
)  # fmt: skip
OF_DEEPSEEK = (
    Plant("YaRN's mscale forgotten in the softmax", ATTENDED, ALL, no_mscale, "factor"),
    Plant("epsilon 1e-5 in the latents' norms", ("attention.q_norm", "attention.kv_norm"), ALL, in_layers(
        _on("attention", rms_norm=eps_of(1e-5)), *ALL), "rounding", BF16),
    Plant("norm weight + 1 in the latents' norms", ("attention.q_norm", "attention.kv_norm"), ALL, in_layers(
        _on("attention", rms_norm=one_more), *ALL), "factor"),
    Plant("scaling factor forgotten", ("experts.gates",), MOE, in_layers(routing(scaling=1.0), *MOE), "factor"),
    Plant("bias added into the gates", ("experts.gates",), MOE, in_layers(bias_in_gates, *MOE), "tenth"),
    Plant("groups of experts forgotten", ("experts.used",), MOE, in_layers(
        routing(num_groups=1, top_groups=1), *MOE), "choice"),
    Plant("shared expert forgotten", ("output",), ONE, in_layers(no_shared, 1), "addend"),
    Plant("shared expert scaled as the others", ("output",), ONE, in_layers(shared_scaled, 1), "factor"),
    Plant("absorbed matrices a step of 1e-3 behind", ("attention.absorbed", *ATTENDED), ONE, in_layers(
        stale_absorbed, 1), "step"),
)  # fmt: skip
PLANTS = {"qwen3-moe": (QWEN, COMMON + OF_QWEN), "deepseek-v3": (DEEPSEEK, COMMON + OF_DEEPSEEK)}


def _headed(model: Transformer) -> Operators:
    """The model's own operators only: its layers keep theirs."""
    wrong = copy.copy(model.operators)
    name = "logits"
    setattr(wrong, name, functools.partial(in_bf16, model.operators))
    return wrong
