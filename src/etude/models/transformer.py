"""The one model definition, used by the engine and by the learner, for every family in `models/families`, with the
semantics of its implementation in transformers.

Tokens are flat: a forward takes N tokens, of one sequence or of many, and whoever keeps the keys and values (a
`Cache`) says which of them see which. So prefill, decode, mixed batches and packed training are one code path.
Router replay is an argument. Nothing is remembered between forwards.

Shapes: N tokens, R rows that get logits, L layers with a router, V vocabulary, D width, H query heads,
G key/value heads, A head width, E experts, K experts a token, F expert width.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from etude.errors import ConfigError
from etude.models.attention import Cache, Packed
from etude.models.components import Scores
from etude.models.config import ModelConfig
from etude.models.experts import Choice, choose, mix
from etude.models.hooks import ForwardHook, layer_hook, no_hook
from etude.models.replay import RecordedRoutes
from etude.models.rope import Rope, tables
from etude.numerics.exact.operators import Exact
from etude.numerics.operators import Operators
from etude.numerics.parallel import SINGLE_RANK, Parallel
from etude.numerics.parity import parity_class


@dataclass(frozen=True)
class Forward:
    """All that one forward computed."""

    logits: torch.Tensor  # [R or N, V]
    routes: torch.Tensor  # `config.route_dtype` [N, L, K]: the experts used
    live: torch.Tensor  # the same: the routers' own choice; equal to `routes` where nothing was replayed
    balance: torch.Tensor | None  # scalar: mean over layers of the load-balancing loss, 1.0 at perfect balance


class Mlp(nn.Module):
    """A gated product that every token passes: a layer without experts, or the experts that all tokens share."""

    def __init__(
        self, name: str, width: int, hidden_size: int, operators: Operators, parallel: Parallel = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.operators, self.name, self.parallel = operators, name, parallel
        self.gate_up = nn.Parameter(torch.empty(2 * width, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, width))

    def forward(self, x_ND: torch.Tensor, hook: ForwardHook) -> torch.Tensor:
        ops, down = self.operators, f"{self.name}.down"
        h = hook(f"{self.name}.gate_up", self.parallel.column_parallel(ops, x_ND, self.gate_up))
        act = hook(f"{self.name}.activated", ops.gated(h))
        return hook(down, self.parallel.row_parallel(ops, act, self.down, down))

    def views(self) -> dict[str, torch.Tensor]:
        """Each weight as a view, by its name in a checkpoint's `mlp`."""
        gate, up = self.gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down}

    def matrices(self) -> dict[str, list[int]]:
        """As of `attention.AttentionLayer`."""
        return {"gate_up": [self.down.shape[1]] * 2, "down": [self.down.shape[0]]}


class Stack(nn.Module):
    """The matrices of the experts that this rank has, stacked: a module of their own, since ranks may share them by
    another mesh than all else."""

    def __init__(self, c: ModelConfig, num_held: int, operators: Operators, parallel: Parallel) -> None:
        super().__init__()
        self.operators, self.parallel = operators, parallel
        self.gate_up = nn.Parameter(torch.empty(num_held, 2 * c.expert_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(num_held, c.hidden_size, c.expert_size))

    def forward(self, x_ND: torch.Tensor, choice: Choice, hook: ForwardHook) -> torch.Tensor:
        return mix(x_ND, choice, self.gate_up, self.down, self.operators, hook, parallel=self.parallel)

    def matrices(self) -> dict[str, list[int]]:
        """As of `attention.AttentionLayer`, in each expert."""
        return {"gate_up": [self.down.shape[2]] * 2, "down": [self.down.shape[1]]}


class Experts(nn.Module):
    """A router and its experts, and those that every token passes."""

    bias: torch.Tensor | None

    def __init__(self, c: ModelConfig, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        self.operators, self.parallel = operators, parallel
        self.top_k, self.routing = c.top_k, c.routing
        self.router = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.held = parallel.experts(c.num_experts)
        self.stack = Stack(c, len(self.held), operators, parallel)
        biased = c.routing.scores is Scores.SIGMOID  # no gradient reaches it, so it is no parameter
        self.register_buffer("bias", torch.zeros(c.num_experts) if biased else None)
        shared = ("shared", c.num_shared * c.expert_size, c.hidden_size, operators, parallel.tensor)
        self.shared = Mlp(*shared) if c.num_shared else None

    @property
    def gate_up(self) -> nn.Parameter:
        """[E, 2F, D], of the experts that this rank has."""
        return self.stack.gate_up

    @property
    def down(self) -> nn.Parameter:
        """[E, D, F]."""
        return self.stack.down

    def forward(
        self, x_ND: torch.Tensor, recorded: RecordedRoutes | None, hook: ForwardHook = no_hook
    ) -> tuple[torch.Tensor, Choice]:
        scores = hook("experts.scores", self.operators.router_scores(x_ND, self.router))
        choice = choose(
            scores, self.top_k, recorded, self.operators, routing=self.routing, bias_E=self.bias, balance=self.training
        )
        hook("experts.used", choice.experts_NK)
        choice = replace(choice, gates_NK=hook("experts.gates", choice.gates_NK))
        y_ND = hook("experts.mixed", self.stack(x_ND, choice, hook))
        return y_ND if self.shared is None else y_ND + self.shared(x_ND, hook), choice

    def views(self) -> dict[str, torch.Tensor]:
        """Each weight as a view, by its name in a checkpoint's `mlp`; of experts those that this rank has."""
        found: dict[str, torch.Tensor] = {"gate.weight": self.router}
        if self.bias is not None:
            found["gate.e_score_correction_bias"] = self.bias
        for e, gate_up, down in zip(self.held, self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = gate_up.chunk(2)
            found |= {f"experts.{e}.gate_proj.weight": gate, f"experts.{e}.up_proj.weight": up}
            found[f"experts.{e}.down_proj.weight"] = down
        shared = {} if self.shared is None else self.shared.views()
        return found | {f"shared_experts.{name}": view for name, view in shared.items()}


class Block(nn.Module):
    """One layer: attention, then experts or what every token passes, each on the normalised residual stream."""

    def __init__(self, c: ModelConfig, layer: int, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        self.operators = operators
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        module, _, name = c.attention.layer.partition(":")
        self.attention: nn.Module = getattr(importlib.import_module(module), name)(c, operators, parallel.tensor)
        self.experts_norm = nn.Parameter(torch.ones(c.hidden_size))
        dense = layer not in c.moe_layers
        self.mlp = Mlp("mlp", c.dense_width, c.hidden_size, operators, parallel.tensor) if dense else None
        self.experts = None if dense else Experts(c, operators, parallel)
        self.eps, self.recompute = c.rms_eps, False

    def forward(
        self,
        x_ND: torch.Tensor,
        rope: Rope,
        cache: Cache,
        layer: int,
        recorded: RecordedRoutes | None,
        hook: ForwardHook,
    ) -> tuple[torch.Tensor, Choice | None]:
        """The residual stream after this layer, and what its router chose where it has one. With `recompute`, nothing
        in between is kept for the backward pass, which computes it again."""
        args = (x_ND, rope, cache, layer, recorded, hook)
        if not (self.recompute and torch.is_grad_enabled()):
            return self._forward(*args)
        # no early stop: ranks that ended a forward in its middle would leave their hooks half done
        done: tuple[torch.Tensor, Choice | None] = checkpoint(
            self._forward, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return done

    def _forward(
        self,
        x_ND: torch.Tensor,
        rope: Rope,
        cache: Cache,
        layer: int,
        recorded: RecordedRoutes | None,
        hook: ForwardHook,
    ) -> tuple[torch.Tensor, Choice | None]:
        ops, choice = self.operators, None
        normed = hook("attention_norm", ops.rms_norm(x_ND, self.attention_norm, self.eps))
        x_ND = hook("middle", x_ND + self.attention(normed, rope, cache, layer, hook))
        normed = hook("experts_norm", ops.rms_norm(x_ND, self.experts_norm, self.eps))
        if self.experts is not None:
            y_ND, choice = self.experts(normed, recorded, hook)
        else:
            assert self.mlp is not None
            y_ND = self.mlp(normed, hook)
        return hook("output", x_ND + y_ND), choice


class Transformer(nn.Module):
    """A decoder of any family.

    >>> sizes = ModelConfig(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    ...                     expert_size=8, num_experts=4, top_k=2, context_tokens=16)
    >>> model = Transformer(sizes, seed=0)
    >>> logits, routes = model(torch.tensor([1, 2, 3]))
    >>> logits.shape, routes.shape, routes.dtype
    (torch.Size([3, 11]), torch.Size([3, 2, 2]), torch.uint8)
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        operators: Operators | None = None,
        parallel: Parallel = SINGLE_RANK,
    ) -> None:
        """`seed` keys the initial weights; None leaves the memory as it is, for a caller that fills it. `dtype` is the
        weights'; `operators` compute (None: exact, in `dtype`). `parallel`: this is one rank's share of a model whose
        sizes are `config`; it is filled by its caller (`models.parallel`), and its forwards are collective. Raises
        `ConfigError` for sizes that the ranks cannot share."""
        super().__init__()
        self.operators = operators = Exact(dtype) if operators is None else operators
        self.config, self.parallel = config, parallel
        self.local = local = _shared(config, operators, parallel)
        if seed is not None and parallel.degree > 1:
            raise ValueError("initial weights are a whole model's; take a share of one")
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(local, layer, operators, parallel) for layer in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = None if config.tie_embeddings else nn.Parameter(torch.empty_like(self.embedding))
        if seed is not None:
            initialise(self, seed)
        self.cast(dtype)
        cos, sin = tables(config)
        self.register_buffer("cos", cos.to(operators.storage_dtype), persistent=False)
        self.register_buffer("sin", sin.to(operators.storage_dtype), persistent=False)

    @property
    def parity(self) -> str:
        """The parity class of its numbers, on this machine with this many threads: see `numerics.parity`. That of the
        whole model, whatever this rank's share."""
        kept = self.config.cache_layout
        sizes = {"heads": kept.heads, "key_width": kept.key_width}
        return parity_class(self.operators, self.config.product_shapes, **sizes, device=self.embedding.device)

    def cast(self, dtype: torch.dtype) -> Transformer:
        """Hold the parameters in `dtype`; what must stay float32 (biases of choosing) does."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def forward(
        self,
        tokens_N: torch.Tensor,
        cache: Cache | None = None,
        routes: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R or N, V] and the experts used, [N, L, K]; arguments as in `run`."""
        done = self.run(tokens_N, cache, routes, rows)
        return done.logits, done.routes

    def run(
        self,
        tokens_N: torch.Tensor,
        cache: Cache | None = None,
        routes: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        *,
        plausible: float = 0.0,
        hook: ForwardHook = no_hook,
    ) -> Forward:
        """One forward of `tokens_N` (int64).

        `cache` None: one causal sequence. `routes` (`config.route_dtype` [N, L, K]) are replayed where they are known
        and `plausible` (see `replay.Recorded`). `rows` (int64 [R]) picks the tokens that get logits, in that order.
        `watch` sees each operator's result.
        """
        cache = Packed([len(tokens_N)], self.operators, device=tokens_N.device) if cache is None else cache
        rope = Rope(self.cos[cache.positions, None], self.sin[cache.positions, None])
        ops = self.operators
        x_ND = hook("embedding", F.embedding(tokens_N, self.embedding).to(ops.dtype))
        routers = iter([] if routes is None else [RecordedRoutes(one, plausible) for one in routes.unbind(1)])
        choices: list[Choice] = []
        for layer, block in enumerate(self.blocks):
            recorded = None if block.experts is None else next(routers, None)
            x_ND, choice = block(x_ND, rope, cache, layer, recorded, layer_hook(hook, layer))
            if choice is not None:
                choices.append(choice)
        x_RD = x_ND if rows is None else x_ND[rows]
        x_RD = hook("norm", ops.rms_norm(x_RD, self.norm, self.config.rms_eps))
        used = self._stacked([c.experts_NK for c in choices], len(tokens_N))
        balances = [c.balance for c in choices if c.balance is not None]
        return Forward(
            logits=hook("logits", ops.logits(x_RD, self.embedding if self.head is None else self.head)),
            routes=used,
            live=used if routes is None else self._stacked([c.live_NK for c in choices], len(tokens_N)),
            balance=torch.stack(balances).mean() if balances else None,
        )

    def _stacked(self, experts: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Choices of layers as routes."""
        kind = {"uint8": torch.uint8, "uint16": torch.uint16}[self.config.route_dtype]
        if not experts:
            return torch.zeros(num_tokens, 0, self.config.top_k, dtype=kind, device=self.embedding.device)
        return torch.stack(experts, 1).to(kind)


def _shared(config: ModelConfig, operators: Operators, parallel: Parallel) -> ModelConfig:
    """The sizes of a rank's share. Raises `ConfigError`."""
    ranks = parallel.tensor.degree
    if operators.exact and operators.degree % ranks:
        raise ConfigError(
            f"exact mode over {ranks} tensor-parallel ranks",
            f"its operators promise equal bits for {operators.degree}",
            hint=f"set numerics.degree = {ranks}, in engine and learner",
        )
    config.per_rank(operators.degree)
    return config.per_rank(ranks)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Normal weights: a product's at 1/√in, those into the residual stream smaller by √(2L), the head's at half of
    1/√D, embeddings at .5 when there is a head of their own.

    Compared on synthetic demonstrations, 800k tokens: share of held-out edits copied without an error, one number a
    seed. Untied at .5: 1.0, 1.0; untied at 1: .12; tied at 1/√D: .23, .02; tied at .5 with a last norm of 1/√D: .16.
    The held-out loss at 300k tokens (.43 to .44 for all) did not show it: copying forms later.
    """
    c, generator = model.config, torch.Generator().manual_seed(seed)

    def fill(parameter: torch.Tensor, std: float) -> None:
        parameter.normal_(0.0, std, generator=generator)

    residual = 1 / math.sqrt(2 * c.num_layers)
    fill(model.embedding, c.hidden_size**-0.5 if model.head is None else 0.5)
    if model.head is not None:
        fill(model.head, 0.5 * c.hidden_size**-0.5)
    for block in model.blocks:
        assert isinstance(block, Block)
        for name, parameter in block.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith((".out", ".down"))
                fill(parameter, parameter.shape[-1] ** -0.5 * (residual if into_residual else 1.0))
