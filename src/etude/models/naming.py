"""Hugging Face's names as views into the live parameters.

Inside, query/key/value and all experts of a layer are single tensors, because that is fast. Outside (files, deltas,
engines) every tensor has the name and shape Hugging Face gives it. One mapping serves save, load, publish and
adopt: each value shares memory with the model, so writing into it changes the model in place.
"""

from __future__ import annotations

import torch

from etude.models.transformer import Block, Transformer


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


def _block_views(block: Block) -> dict[str, torch.Tensor]:
    attention, experts = block.attention, block.experts
    sizes = [heads * attention.head_dim for heads in (attention.heads, attention.kv_heads, attention.kv_heads)]
    q, k, v = torch.split(attention.qkv, sizes)
    views = {
        "input_layernorm.weight": block.attention_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": attention.out,
        "self_attn.q_norm.weight": attention.q_norm,
        "self_attn.k_norm.weight": attention.k_norm,
        "post_attention_layernorm.weight": block.experts_norm,
        "mlp.gate.weight": experts.router,
    }
    for e, (gate_up, down) in enumerate(zip(experts.gate_up.unbind(), experts.down.unbind(), strict=True)):
        gate, up = gate_up.chunk(2)
        views[f"mlp.experts.{e}.gate_proj.weight"] = gate
        views[f"mlp.experts.{e}.up_proj.weight"] = up
        views[f"mlp.experts.{e}.down_proj.weight"] = down
    return views
