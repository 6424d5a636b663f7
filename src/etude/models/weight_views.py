"""Tensor names, as views into the live parameters.

Inside the model, products of the same input and all experts of a layer are single tensors, for speed. Outside (files,
deltas, engines) each tensor has the name and shape of the family's Hugging Face checkpoints. One mapping serves saving,
loading, publishing and updating: each view shares memory with the model, so writing into it changes the model in place.
A rank's part of a model has the same names, with its own experts and its parts of divided tensors
(`models.tensor_parallel`)."""

from __future__ import annotations

from typing import cast

import torch

from etude.models.attention import AttentionLayer
from etude.models.latent import LatentAttention
from etude.models.transformer import Block, MtpHead, Transformer

_BIAS = "e_score_correction_bias"


def stays_float32(name: str) -> bool:
    """Return whether a tensor stays float32 whatever dtype weights are stored in: router biases, as in transformers,
    and indexers, which are not trained."""
    return name.endswith((_BIAS, ".weight_global_scale")) or ".indexer." in name


def views(model: Transformer) -> dict[str, torch.Tensor]:
    """Return every weight of a model by etude's name, in a fixed order, as contiguous detached views.

    Etude's names are those of Qwen3 and DeepSeek-V3, for all families: MTP heads are the layers after the last one.
    With tied embeddings there is no head."""
    found: dict[str, torch.Tensor] = {"model.embed_tokens.weight": model.embedding}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        found |= {f"model.layers.{layer}.{name}": view for name, view in _block_views(block).items()}
    found["model.norm.weight"] = model.norm
    if model.head is not None:
        found["lm_head.weight"] = model.head
    for number, head in enumerate(model.mtp, model.config.num_layers):
        assert isinstance(head, MtpHead)
        found |= {
            f"model.layers.{number}.{name}": view for name, view in (head.views() | _block_views(head.block)).items()
        }
    return {name: view.detach() for name, view in found.items()}


def hf_views(model: Transformer) -> dict[str, torch.Tensor]:
    """Return every weight of a model by its Hugging Face name, in a fixed order, as contiguous detached views.

    With tied embeddings there is no head."""
    outside = model.config.architecture.hf_name
    return {outside(name): view for name, view in views(model).items()}


def hf_biases(model: Transformer) -> dict[str, torch.Tensor]:
    """Return the router biases by Hugging Face name, float32 [E] views, and the weights of indexers. They are no
    parameters, so every rank of a sharded model has them in full."""
    found = dict[str, torch.Tensor]()
    for number, block in enumerate([*model.blocks, *(head.block for head in model.mtp)]):
        place = f"model.layers.{number}"
        if (bias := getattr(block.experts, "bias", None)) is not None:
            found[f"{place}.mlp.gate.{_BIAS}"] = bias
        if isinstance(block.attention, LatentAttention):
            found |= {f"{place}.self_attn.{name}": view for name, view in block.attention.indexer_views().items()}
    return {model.config.architecture.hf_name(name): view.detach() for name, view in found.items()}


def _block_views(block: Block) -> dict[str, torch.Tensor]:
    attention = cast(AttentionLayer, block.attention)
    return {
        "input_layernorm.weight": block.attention_norm,
        **{f"self_attn.{name}": view for name, view in attention.views().items()},
        "post_attention_layernorm.weight": block.experts_norm,
        **({} if block.mlp is None else {f"mlp.{name}": view for name, view in block.mlp.views().items()}),
        **({} if block.experts is None else {f"mlp.{name}": view for name, view in block.experts.views().items()}),
    }
