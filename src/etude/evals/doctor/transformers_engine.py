"""`transformers` as an engine: it samples with its own KV cache, token by token, and hooks record the results of its
operators. The package is not a dependency of etude and is imported when it is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from etude.errors import CheckpointError, EngineError
from etude.evals.doctor.sides import Sampled
from etude.inference.operator_trace import Results
from etude.numerics.sampling import sample

Take = Callable[[Any], torch.Tensor]

GROUPED = (
    ("attention.qkv/0", "q_proj"),
    ("attention.qkv/1", "k_proj"),
    ("attention.qkv/2", "v_proj"),
    ("attention.qk_norm/0", "q_norm"),
    ("attention.qk_norm/1", "k_norm"),
)
LATENT = (
    ("attention.inward/0", "q_proj"),  # one of the two
    ("attention.inward/0", "q_a_proj"),
    ("attention.inward/1", "kv_a_proj_with_mqa"),
    ("attention.q_norm", "q_a_layernorm"),
    ("attention.q", "q_b_proj"),
    ("attention.kv_norm", "kv_a_layernorm"),
)
"""(name of a result in etude, module in transformers) for attention. transformers expands latents for all keys at each
step, so that result is not compared."""


class TransformersEngine:
    """The `EngineSide` of a checkpoint that `AutoModelForCausalLM` computes in this process."""

    name = "transformers"
    ways = ("alone",)

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @classmethod
    def load(cls, checkpoint: Path, dtype: torch.dtype) -> TransformersEngine:
        """Load a checkpoint with transformers.

        Raises `EngineError` if transformers is not installed, and `CheckpointError` if it cannot load the checkpoint.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                from transformers import AutoModelForCausalLM
            except ImportError as error:
                raise EngineError(
                    "transformers is not installed",
                    str(error),
                    hint="pip install transformers, then run the command again",
                ) from None
            try:
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"transformers cannot load {checkpoint}",
                    str(error).partition("\n")[0],
                    hint="check that it supports this model_type, or use another --engine",
                ) from None
        if not all(hasattr(layer, "self_attn") for layer in model.model.layers):
            raise EngineError(
                f"transformers cannot be compared as an engine for {checkpoint}",
                "it has layers of linear attention, whose operators are not recorded",
                hint="use another --engine",
            )
        return cls(model)

    @torch.no_grad()
    def sample(self, way: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int) -> list[Sampled]:
        return [self._sample(list(map(int, p)), max_tokens, seed + i) for i, p in enumerate(prompts)]

    def _sample(self, prompt: list[int], max_tokens: int, seed: int) -> Sampled:
        ids, logprobs, cache = list(prompt), [], None
        fresh = prompt
        for _ in range(max_tokens):
            done = self._model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            token, logprob = sample(done.logits[0, -1:], [1.0], [seed], [len(ids)])
            fresh = token.tolist()
            ids += fresh
            logprobs.append(float(logprob))
        return Sampled(ids, len(prompt), np.array(logprobs, np.float32), None)

    @torch.no_grad()
    def results(self, token_ids: Sequence[int], *, prompt_tokens: int) -> Results:
        parts: dict[str, list[torch.Tensor]] = {}
        handles = [
            hook
            for name, module, before, take in _watched(self._model)
            for hook in [_hook(parts, name, module, before, take)]
        ]
        try:
            cache = None
            for piece in (token_ids[:prompt_tokens], *([t] for t in token_ids[prompt_tokens:])):
                done = self._model(torch.tensor([list(piece)]), past_key_values=cache, use_cache=True)
                cache = done.past_key_values
        finally:
            for handle in handles:
                handle.remove()
        return _joined({name: torch.cat(pieces) for name, pieces in parts.items()})


def _hook(parts: dict[str, list[torch.Tensor]], name: str, module: nn.Module, before: bool, take: Take) -> Any:
    def keep(value: Any) -> None:
        rows = take(value)
        parts.setdefault(name, []).append(rows.reshape(-1, *rows.shape[2:]) if rows.dim() > 2 else rows.clone())

    if before:
        return module.register_forward_pre_hook(lambda _, args: keep(args[0]))
    return module.register_forward_hook(lambda _, args, out: keep(out))


def _watched(model: Any) -> list[tuple[str, nn.Module, bool, Take]]:
    """(name in etude, module in transformers, whether to record its input instead of its output, which part of it). A
    name that ends with a slash and a number is a part of one result in etude."""

    def whole(value: Any) -> torch.Tensor:
        tensor: torch.Tensor = value[0] if isinstance(value, tuple) else value
        return tensor

    def part(i: int) -> Take:
        return lambda value: value[i]

    def by_head(width: int) -> Take:
        return lambda value: value.reshape(*value.shape[:2], -1, width)

    found: list[tuple[str, nn.Module, bool, Take]] = [("embedding", model.model.embed_tokens, False, whole)]
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        heads = by_head(attention.head_dim) if hasattr(attention, "head_dim") else whole
        projections = LATENT if hasattr(attention, "kv_a_proj_with_mqa") else GROUPED
        router = getattr(mlp, "gate", getattr(mlp, "router", None))
        passed = "mlp" if hasattr(mlp, "down_proj") else "shared"  # the MLP that every token uses
        product = mlp if passed == "mlp" else getattr(mlp, "shared_experts", None)
        own: list[tuple[str, nn.Module | None, bool, Take]] = [
            ("attention_norm", layer.input_layernorm, False, whole),
            *(
                (name, getattr(attention, module, None), False, heads if "qk_norm" in name else whole)
                for name, module in projections
            ),
            ("attention.attended", attention.o_proj, True, whole),
            ("attention.out", attention.o_proj, False, whole),
            ("middle", layer.post_attention_layernorm, True, whole),
            ("experts_norm", layer.post_attention_layernorm, False, whole),
            ("experts.scores", router, False, part(0)),
            ("experts.used", router, False, part(2)),
            ("experts.gates", router, False, part(1)),
            ("experts.mixed", getattr(mlp, "experts", None), False, whole),
            (f"{passed}.gate_up/0", getattr(product, "gate_proj", None), False, whole),
            (f"{passed}.gate_up/1", getattr(product, "up_proj", None), False, whole),
            (f"{passed}.activated", getattr(product, "down_proj", None), True, whole),
            (f"{passed}.down", getattr(product, "down_proj", None), False, whole),
            ("output", layer, False, whole),
        ]
        found += [
            (f"layers.{i}.{name}", module, before, take) for name, module, before, take in own if module is not None
        ]
    return [*found, ("norm", model.model.norm, False, whole), ("logits", model.lm_head, False, whole)]


def _joined(theirs: Results) -> Results:
    """Concatenate results that are one result in etude: products side by side, norms head after head."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(theirs):
        parts.setdefault(name.partition("/")[0], []).append(theirs[name])
    return {
        name: one[0] if len(one) == 1 else torch.cat(one, -2 if name.endswith("qk_norm") else -1)
        for name, one in parts.items()
    }
