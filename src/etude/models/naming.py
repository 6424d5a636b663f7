"""Hugging Face's names as views into the live parameters.

Inside, products of one input and all experts of a layer are single tensors, because that is fast. Outside (files,
deltas, engines) every tensor has the name and shape Hugging Face gives it. One mapping serves save, load, publish and
adopt: each value shares memory with the model, so writing into it changes the model in place. A rank's share of a model
has the same names, of its own experts only, and its parts of the tensors that are cut (`models.parallel`).
"""

from __future__ import annotations

import torch

from etude.models.latent import LatentAttention
from etude.models.transformer import Attention, Block, Experts, Mlp, Transformer

_BIAS = "mlp.gate.e_score_correction_bias"


def stays_float32(name: str) -> bool:
    """Whether a tensor keeps float32 whatever the weights are stored in, as transformers and every engine keep it."""
    return name.endswith((_BIAS, ".weight_global_scale"))


def hf_views(model: Transformer) -> dict[str, torch.Tensor]:
    """Every Hugging Face name of the model's weights, in a fixed order, as contiguous detached views.

    `lm_head.weight` is absent when the embeddings are tied, as it is in Hugging Face files.
    """
    views: dict[str, torch.Tensor] = {"model.embed_tokens.weight": model.embedding}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        views |= {f"model.layers.{layer}.{name}": view for name, view in _block_views(block).items()}
    views["model.norm.weight"] = model.norm
    if model.head is not None:
        views["lm_head.weight"] = model.head
    return {name: view.detach() for name, view in views.items()}


def hf_biases(model: Transformer) -> dict[str, torch.Tensor]:
    """Of `hf_views` those that are no parameters: biases of choosing, float32 [E]."""
    found = {f"model.layers.{i}.{_BIAS}": getattr(block.experts, "bias", None) for i, block in enumerate(model.blocks)}
    return {name: bias for name, bias in found.items() if bias is not None}


def _block_views(block: Block) -> dict[str, torch.Tensor]:
    attention = block.attention
    own = _latent_views(attention) if isinstance(attention, LatentAttention) else _grouped_views(attention)
    views = {
        "input_layernorm.weight": block.attention_norm,
        **{f"self_attn.{name}.weight": view for name, view in own.items()},
        "post_attention_layernorm.weight": block.experts_norm,
    }
    if block.mlp is not None:
        views |= _mlp_views("mlp", block.mlp)
    if block.experts is not None:
        views |= _expert_views(block.experts)
    return views


def _grouped_views(attention: Attention) -> dict[str, torch.Tensor]:
    sizes = [heads * attention.head_dim for heads in (attention.heads, attention.kv_heads, attention.kv_heads)]
    q, k, v = torch.split(attention.qkv, sizes)
    named = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": attention.out}
    return named | {"q_norm": attention.q_norm, "k_norm": attention.k_norm}


def _latent_views(attention: LatentAttention) -> dict[str, torch.Tensor]:
    q, kv = torch.split(attention.inward, [attention.widths[0], sum(attention.widths[1:])])
    views = {"q_proj": q}
    if attention.q_up is not None and attention.q_norm is not None:
        views = {"q_a_proj": q, "q_a_layernorm": attention.q_norm, "q_b_proj": attention.q_up}
    views |= {"kv_a_proj_with_mqa": kv, "kv_a_layernorm": attention.kv_norm, "kv_b_proj": attention.kv_up}
    return views | {"o_proj": attention.out}


def _expert_views(experts: Experts) -> dict[str, torch.Tensor]:
    views: dict[str, torch.Tensor] = {"mlp.gate.weight": experts.router}
    if experts.bias is not None:
        views[_BIAS] = experts.bias
    for e, gate_up, down in zip(experts.held, experts.gate_up.unbind(), experts.down.unbind(), strict=True):
        gate, up = gate_up.chunk(2)
        views[f"mlp.experts.{e}.gate_proj.weight"] = gate
        views[f"mlp.experts.{e}.up_proj.weight"] = up
        views[f"mlp.experts.{e}.down_proj.weight"] = down
    return views if experts.shared is None else views | _mlp_views("mlp.shared_experts", experts.shared)


def _mlp_views(name: str, mlp: Mlp) -> dict[str, torch.Tensor]:
    gate, up = mlp.gate_up.chunk(2)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down}
    return {f"{name}.{part}.weight": view for part, view in parts.items()}
