"""Tensors' names as views into the live parameters.

Inside, products of one input and all experts of a layer are single tensors, because that is fast. Outside (files,
deltas, engines) every tensor has the name and shape that the family's Hugging Face checkpoints give it. One mapping
serves save, load, publish and adopt: each value shares memory with the model, so writing into it changes the model in
place. A rank's share of a model has the same names, of its own experts only, and its parts of the tensors that are cut
(`models.parallel`).
"""

from __future__ import annotations

from typing import cast

import torch

from etude.models.attention import AttentionLayer
from etude.models.transformer import Block, Transformer

_BIAS = "e_score_correction_bias"


def stays_float32(name: str) -> bool:
    """Whether a tensor keeps float32 whatever the weights are stored in, as transformers and every engine keep it."""
    return name.endswith((_BIAS, ".weight_global_scale"))


def views(model: Transformer) -> dict[str, torch.Tensor]:
    """Every weight of a model by etude's name, in a fixed order, as contiguous detached views. Etude's names are those
    of Qwen3 and DeepSeek-V3, whatever the family; there is no head where the embeddings are tied."""
    found: dict[str, torch.Tensor] = {"model.embed_tokens.weight": model.embedding}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        found |= {f"model.layers.{layer}.{name}": view for name, view in _block_views(block).items()}
    found["model.norm.weight"] = model.norm
    if model.head is not None:
        found["lm_head.weight"] = model.head
    return {name: view.detach() for name, view in found.items()}


def hf_views(model: Transformer) -> dict[str, torch.Tensor]:
    """`views` by the names that the family's Hugging Face checkpoints have."""
    outside = model.config.architecture.hf_name
    return {outside(name): view for name, view in views(model).items()}


def hf_biases(model: Transformer) -> dict[str, torch.Tensor]:
    """Of `hf_views` those that are no parameters: biases for the choice, float32 [E]."""
    outside, blocks = model.config.architecture.hf_name, enumerate(model.blocks)
    found = {outside(f"model.layers.{i}.mlp.gate.{_BIAS}"): getattr(one.experts, "bias", None) for i, one in blocks}
    return {name: bias for name, bias in found.items() if bias is not None}


def _block_views(block: Block) -> dict[str, torch.Tensor]:
    attention = cast(AttentionLayer, block.attention)
    return {
        "input_layernorm.weight": block.attention_norm,
        **{f"self_attn.{name}.weight": view for name, view in attention.views().items()},
        "post_attention_layernorm.weight": block.experts_norm,
        **({} if block.mlp is None else {f"mlp.{name}": view for name, view in block.mlp.views().items()}),
        **({} if block.experts is None else {f"mlp.{name}": view for name, view in block.experts.views().items()}),
    }
