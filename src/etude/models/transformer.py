"""The model definition, used by engine and learner, for every family, with transformers' semantics.

Tokens are flat: a forward pass takes N tokens of one or many sequences, and a `Cache` decides which of them attend to
each other. So prefill, decode, mixed batches and packed training share one code path. Router replay is an argument. A
model stores nothing between forward passes.

Shapes: N tokens, R rows with logits, L layers with a router, V vocabulary size, D width, H query heads, G key/value
heads, A head width, E experts, K experts per token, F expert width."""

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
    """The results of one forward pass of N tokens.

    `logits`: [R, V] of the R requested rows, or [N, V]. `routes`: [N, L, K] in `config.route_dtype`, the experts used
    in the L layers with a router. `live`: [N, L, K], the routers' own choice of experts; without replay it equals
    `routes`. `balance`: a scalar, the mean over layers of the load-balancing loss; None outside training. `stream`:
    [N, D], the residual stream after the last layer, from which MTP heads predict."""

    logits: torch.Tensor
    routes: torch.Tensor
    live: torch.Tensor
    balance: torch.Tensor | None
    stream: torch.Tensor


class Mlp(nn.Module):
    """A gated MLP: of a dense layer, or the shared experts. `name`: its prefix in the names of hooks."""

    def __init__(
        self, name: str, width: int, hidden_size: int, operators: Operators, parallel: Parallel = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.operators, self.name, self.parallel = operators, name, parallel
        self.gate_up = nn.Parameter(torch.empty(2 * width, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, width))

    def forward(self, x_ND: torch.Tensor, hook: ForwardHook) -> torch.Tensor:
        """Return the outputs of N tokens, [N, D] like the inputs."""
        ops, down = self.operators, f"{self.name}.down"
        h = hook(f"{self.name}.gate_up", self.parallel.column_parallel(ops, x_ND, self.gate_up))
        act = hook(f"{self.name}.activated", ops.gated(h))
        return hook(down, self.parallel.row_parallel(ops, act, self.down, down))

    def views(self) -> dict[str, torch.Tensor]:
        """Return each weight as a view, by its name in a checkpoint's `mlp`."""
        gate, up = self.gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down}

    def matrices(self) -> dict[str, list[int]]:
        """Return the parameters that Muon updates, each with the row counts of the matrices stacked in it."""
        return {"gate_up": [self.down.shape[1]] * 2, "down": [self.down.shape[0]]}


class Stack(nn.Module):
    """The matrices of this rank's experts, stacked.

    A separate module, since ranks may shard these matrices over another mesh."""

    def __init__(self, c: ModelConfig, num_held: int, operators: Operators, parallel: Parallel) -> None:
        super().__init__()
        self.operators, self.parallel = operators, parallel
        self.gate_up = nn.Parameter(torch.empty(num_held, 2 * c.expert_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(num_held, c.hidden_size, c.expert_size))
        biased = c.architecture.expert_bias
        self.gate_up_bias = nn.Parameter(torch.zeros(num_held, 2 * c.expert_size)) if biased else None
        self.down_bias = nn.Parameter(torch.zeros(num_held, c.hidden_size)) if biased else None
        self.swiglu = c.swiglu

    def forward(self, x_ND: torch.Tensor, choice: Choice, hook: ForwardHook) -> torch.Tensor:
        """Return for N tokens the sum of the outputs of their experts times their gates, [N, D] like the inputs."""
        return mix(
            x_ND,
            choice,
            self.gate_up,
            self.down,
            self.operators,
            hook,
            parallel=self.parallel,
            biases=(self.gate_up_bias, self.down_bias),
            swiglu=self.swiglu,
        )

    def matrices(self) -> dict[str, list[int]]:
        """Return the parameters that Muon updates, each with the row counts of its matrices in one expert."""
        return {"gate_up": [self.down.shape[2]] * 2, "down": [self.down.shape[1]]}


class Experts(nn.Module):
    """The mixture of experts of one layer: a router, its experts, and the shared experts."""

    bias: torch.Tensor | None

    def __init__(self, c: ModelConfig, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        self.operators, self.parallel = operators, parallel
        self.top_k, self.routing = c.top_k, c.routing
        self.router = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.router_bias = nn.Parameter(torch.zeros(c.num_experts)) if c.architecture.expert_bias else None
        self.local_experts = parallel.experts(c.num_experts)
        self.stack = Stack(c, len(self.local_experts), operators, parallel)
        biased = c.routing.scores is Scores.SIGMOID  # a buffer, since it has no gradient
        self.register_buffer("bias", torch.zeros(c.num_experts) if biased else None)
        shared = ("shared", c.num_shared * c.expert_size, c.hidden_size, operators, parallel.tensor)
        self.shared = Mlp(*shared) if c.num_shared else None
        self.shared_gate = nn.Parameter(torch.empty(1, c.hidden_size)) if c.architecture.shared_gate else None

    @property
    def gate_up(self) -> nn.Parameter:
        """[E, 2F, D] Gate and up projections of this rank's experts."""
        return self.stack.gate_up

    @property
    def down(self) -> nn.Parameter:
        """[E, D, F] Down projections of this rank's experts."""
        return self.stack.down

    def forward(
        self,
        x_ND: torch.Tensor,
        recorded: RecordedRoutes | None,
        hook: ForwardHook = no_hook,
        counts_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Choice]:
        """Return the layer's output [N, D], shared experts included, and the router's choice.

        `recorded`: experts to use in place of the router's choice. `hook`: called with each operator's result.
        `counts_N`: how often each token counts in the load-balancing loss."""
        scores = self.operators.router_scores(x_ND, self.router)
        if self.router_bias is not None:
            scores = scores + self.router_bias.to(scores.dtype)
        scores = hook("experts.scores", scores)
        choice = choose(
            scores,
            self.top_k,
            recorded,
            self.operators,
            routing=self.routing,
            bias_E=self.bias,
            balance=self.training,
            counts_N=counts_N,
        )
        hook("experts.used", choice.experts_NK)
        choice = replace(choice, gates_NK=hook("experts.gates", choice.gates_NK))
        y_ND = hook("experts.mixed", self.stack(x_ND, choice, hook))
        if self.shared is None:
            return y_ND, choice
        shared_ND = self.shared(x_ND, hook)
        if self.shared_gate is not None:
            gate_N1 = self.operators.sigmoid(self.operators.router_scores(x_ND, self.shared_gate))
            shared_ND = hook("shared.gated", (shared_ND * gate_N1).to(shared_ND.dtype))
        return y_ND + shared_ND, choice

    def views(self) -> dict[str, torch.Tensor]:
        """Return each weight as a view, by its name in a checkpoint's `mlp`; of experts only this rank's."""
        found: dict[str, torch.Tensor] = {"gate.weight": self.router}
        if self.router_bias is not None:
            found["gate.bias"] = self.router_bias
        if self.bias is not None:
            found["gate.e_score_correction_bias"] = self.bias
        for e, gate_up, down in zip(self.local_experts, self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = gate_up.chunk(2)
            found |= {f"experts.{e}.gate_proj.weight": gate, f"experts.{e}.up_proj.weight": up}
            found[f"experts.{e}.down_proj.weight"] = down
        if self.stack.gate_up_bias is not None and self.stack.down_bias is not None:
            for e, gate_up, down in zip(self.local_experts, self.stack.gate_up_bias, self.stack.down_bias, strict=True):
                gate, up = gate_up.chunk(2)
                found |= {f"experts.{e}.gate_proj.bias": gate, f"experts.{e}.up_proj.bias": up}
                found[f"experts.{e}.down_proj.bias"] = down
        shared = {} if self.shared is None else self.shared.views()
        found |= {f"shared_experts.{name}": view for name, view in shared.items()}
        return found if self.shared_gate is None else {**found, "shared_expert_gate.weight": self.shared_gate}


class Block(nn.Module):
    """One layer: attention, then experts or a dense MLP, each on the normalised residual stream."""

    def __init__(self, c: ModelConfig, layer: int, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        self.operators = operators
        self.centred = c.architecture.centred_norms
        first = torch.zeros if self.centred else torch.ones
        self.attention_norm = nn.Parameter(first(c.hidden_size))
        module, _, name = c.attention_of(layer).layer.partition(":")
        self.attention: nn.Module = getattr(importlib.import_module(module), name)(c, operators, parallel.tensor)
        self.experts_norm = nn.Parameter(first(c.hidden_size))
        dense = not c.has_router(layer)
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
        counts_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Choice | None]:
        """Return the residual stream after this layer, and the router's choice where the layer has one.

        `layer` is the number of this layer, and the other arguments are those of `Transformer.run` and
        `Experts.forward`. With `recompute` set, intermediate results are recomputed in the backward pass (activation
        checkpointing)."""
        args = (x_ND, rope, cache, layer, recorded, hook, counts_N)
        if not (self.recompute and torch.is_grad_enabled()):
            return self._forward(*args)
        # no early stop: it would skip FSDP hooks in the middle of a forward pass
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
        counts_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Choice | None]:
        ops, choice = self.operators, None
        norm = ops.centred_rms_norm if self.centred else ops.rms_norm
        normed = hook("attention_norm", norm(x_ND, self.attention_norm, self.eps))
        x_ND = hook("middle", x_ND + self.attention(normed, rope, cache, layer, hook))
        normed = hook("experts_norm", norm(x_ND, self.experts_norm, self.eps))
        if self.experts is not None:
            y_ND, choice = self.experts(normed, recorded, hook, counts_N)
        else:
            assert self.mlp is not None
            y_ND = self.mlp(normed, hook)
        return hook("output", x_ND + y_ND), choice


class MtpHead(nn.Module):
    """A multi-token prediction head (arXiv 2412.19437, §2.2): one more layer, which predicts one token further.

    Head k (from 0) at position i takes the output of head k - 1, or of the trunk, at i, and the embedding of token
    i + k + 1. It predicts token i + k + 2. `models.mtp` computes it, with the trunk's embedding and output matrix."""

    def __init__(self, c: ModelConfig, number: int, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        self.operators, self.eps = operators, c.rms_eps
        self.embedding_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.output_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.projection = nn.Parameter(torch.empty(c.hidden_size, 2 * c.hidden_size))
        self.block = Block(c, c.num_layers + number, operators, parallel)
        self.norm = nn.Parameter(torch.ones(c.hidden_size))

    def forward(
        self,
        before_ND: torch.Tensor,
        embedded_ND: torch.Tensor,
        rope: Rope,
        cache: Cache,
        layer: int,
        counts_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Choice | None]:
        """Return the normalised outputs [N, D] and the router's choice, if there is a router.

        `before_ND`: normalised outputs of the head before, or of the trunk. `embedded_ND`: embeddings of the next
        tokens. `layer`: the number of the head among all layers. The other arguments are those of `Block.forward`."""
        ops = self.operators
        embedded_ND = ops.rms_norm(embedded_ND, self.embedding_norm, self.eps)
        joined = torch.cat([embedded_ND, ops.rms_norm(before_ND, self.output_norm, self.eps)], -1)
        x_ND, choice = self.block(ops.linear(joined, self.projection), rope, cache, layer, None, no_hook, counts_N)
        return ops.rms_norm(x_ND, self.norm, self.eps), choice

    def matrices(self) -> dict[str, list[int]]:
        """Return the parameters outside its layer that Muon updates, each with the row counts of its matrices."""
        return {"projection": [len(self.projection)]}

    def views(self) -> dict[str, torch.Tensor]:
        """Return each weight outside its layer as a view, by its name in a checkpoint."""
        found = {"enorm": self.embedding_norm, "hnorm": self.output_norm, "eh_proj": self.projection}
        return {f"{name}.weight": one for name, one in (found | {"shared_head.norm": self.norm}).items()}


class Transformer(nn.Module):
    """A decoder-only model of any family.

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
        """Create a model.

        - `seed`: for the initial weights; None leaves the memory uninitialised, for a caller that fills it.
        - `dtype`: of the weights.
        - `operators`: the arithmetic of the model; None: exact, in `dtype`.
        - `parallel`: the model is one rank's part of a model with the sizes `config`. Its caller fills it
          (`models.tensor_parallel`), and forward passes are collective.

        Raises `ConfigError` for sizes that cannot be divided among the ranks."""
        super().__init__()
        self.operators = operators = Exact(dtype) if operators is None else operators
        self.config, self.parallel = config, parallel
        self.local = local = _shared(config, operators, parallel)
        if seed is not None and parallel.degree > 1:
            raise ValueError("a rank's part has no initial weights: use models.tensor_parallel.shard_model")
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(local, layer, operators, parallel) for layer in range(config.num_layers))
        centred = config.architecture.centred_norms
        self.norm = nn.Parameter((torch.zeros if centred else torch.ones)(config.hidden_size))
        self.head = None if config.tie_embeddings else nn.Parameter(torch.empty_like(self.embedding))
        self.mtp = nn.ModuleList(MtpHead(local, k, operators, parallel) for k in range(config.mtp_heads))
        if seed is not None:
            initialise(self, seed)
        self.cast(dtype)
        cos, sin = tables(config)
        self.register_buffer("cos", cos.to(operators.storage_dtype), persistent=False)
        self.register_buffer("sin", sin.to(operators.storage_dtype), persistent=False)

    @property
    def parity(self) -> str:
        """The parity class of the model on this machine with this number of threads (`numerics.parity`).

        Processes of the same parity class compute the same bits. A rank that has only a part of the model has the class
        of the full model."""
        kept = self.config.cache_layout
        sizes = {"heads": kept.heads, "key_width": kept.key_width}
        return parity_class(self.operators, self.config.product_shapes, **sizes, device=self.embedding.device)

    def extend_context(self, config: ModelConfig) -> None:
        """Use the RoPE scaling and the context of `config`, which `ModelConfig.extended` made from this model's
        config."""
        self.config = config
        self.local = replace(self.local, context_tokens=config.context_tokens, yarn=config.yarn)
        self.cos, self.sin = (table.to(self.cos) for table in tables(config))

    def cast(self, dtype: torch.dtype) -> Transformer:
        """Convert the parameters to `dtype`. Router biases, which are not parameters, stay float32."""
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
        """Return logits [R or N, V], and the experts used [N, L, K]. The arguments are those of `run`."""
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
        counts: torch.Tensor | None = None,
        hook: ForwardHook = no_hook,
    ) -> Forward:
        """Compute one forward pass of `tokens_N` (int64).

        - `cache`: which tokens attend to each other; None: they are one causal sequence.
        - `routes`: `config.route_dtype` [N, L, K], recorded experts to use in place of the routers' choice, where they
          are known and `plausible` (`replay.RecordedRoutes`). None: the routers choose.
        - `rows`: int64 [R], the tokens whose logits are computed, in this order; a token may occur several times. None:
          all tokens.
        - `counts`: float32 [N], how often each token counts in the load-balancing loss; None: once.
        - `hook`: called with each operator's result."""
        cache = Packed([len(tokens_N)], self.operators, device=tokens_N.device) if cache is None else cache
        rope = Rope(self.cos[cache.positions, None], self.sin[cache.positions, None])
        ops = self.operators
        x_ND = hook("embedding", F.embedding(tokens_N, self.embedding).to(ops.dtype))
        routers = iter([] if routes is None else [RecordedRoutes(one, plausible) for one in routes.unbind(1)])
        choices: list[Choice] = []
        for layer, block in enumerate(self.blocks):
            recorded = None if block.experts is None else next(routers, None)
            x_ND, choice = block(x_ND, rope, cache, layer, recorded, layer_hook(hook, layer), counts)
            if choice is not None:
                choices.append(choice)
        x_RD = x_ND if rows is None else F.embedding(rows, x_ND)  # its gradient sums equal rows in one order
        norm = ops.centred_rms_norm if self.config.architecture.centred_norms else ops.rms_norm
        x_RD = hook("norm", norm(x_RD, self.norm, self.config.rms_eps))
        used = self._stacked([c.experts_NK for c in choices], len(tokens_N))
        balances = [c.balance for c in choices if c.balance is not None]
        return Forward(
            logits=hook("logits", ops.logits(x_RD, self.embedding if self.head is None else self.head)),
            routes=used,
            live=used if routes is None else self._stacked([c.live_NK for c in choices], len(tokens_N)),
            balance=torch.stack(balances).mean() if balances else None,
            stream=x_ND,
        )

    def _stacked(self, experts: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Return the choices of all layers as routes."""
        kind = {"uint8": torch.uint8, "uint16": torch.uint16}[self.config.route_dtype]
        if not experts:
            return torch.zeros(num_tokens, 0, self.config.top_k, dtype=kind, device=self.embedding.device)
        return torch.stack(experts, 1).to(kind)


def _shared(config: ModelConfig, operators: Operators, parallel: Parallel) -> ModelConfig:
    """Return the sizes of this rank's part. Raises `ConfigError`."""
    ranks = parallel.tensor.degree
    if operators.exact and operators.degree % ranks:
        raise ConfigError(
            f"exact mode is not possible on {ranks} tensor-parallel ranks",
            f"the operators give equal bits for {operators.degree} ranks",
            hint=f"set numerics.degree = {ranks}, in engine and learner",
        )
    config.per_rank(operators.degree)
    return config.per_rank(ranks)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Initialise the weights from a normal distribution.

    The standard deviation is 1/√in. For products into the residual stream it is smaller by √(2L), for the head it is
    half of 1/√D, and for embeddings it is 0.5 if there is a separate head; with these values a small model learns to
    copy soonest."""
    c, generator = model.config, torch.Generator().manual_seed(seed)

    def fill(parameter: torch.Tensor, std: float) -> None:
        parameter.normal_(0.0, std, generator=generator)

    fill(model.embedding, c.hidden_size**-0.5 if model.head is None else 0.5)
    if model.head is not None:
        fill(model.head, 0.5 * c.hidden_size**-0.5)
    for layer in (*model.blocks, *model.mtp):  # heads last, so that the trunk does not depend on them
        _initialise_layer(layer, c.num_layers, generator)


def _initialise_layer(layer: nn.Module, num_layers: int, generator: torch.Generator) -> None:
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1 and not name.endswith("_bias"):  # biases begin at 0
            std = parameter.shape[-1] ** -0.5
            if name.endswith((".out", ".down")):  # into the residual stream
                std *= 1 / math.sqrt(2 * num_layers)
            parameter.normal_(0.0, std, generator=generator)


@torch.no_grad()
def resize_heads(model: Transformer, number: int, *, seed: int) -> None:
    """Give a model `number` MTP heads, in place: later ones are removed, new ones have random weights by `seed`.

    Raises `ConfigError` in a family without such heads."""
    dtype, device = model.embedding.dtype, model.embedding.device
    config = model.config.with_mtp_heads(number)
    for k in range(len(model.mtp), number):
        head = MtpHead(model.local, k, model.operators, model.parallel)
        _initialise_layer(head, config.num_layers, torch.Generator().manual_seed(seed + k))
        for parameter in head.parameters():
            parameter.data = parameter.data.to(dtype)
        model.mtp.append(head.to(device))
    del model.mtp[number:]
    model.config, model.local = config, replace(model.local, mtp_heads=number)
