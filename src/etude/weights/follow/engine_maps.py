"""Maps of common engines: which tensors of a Hugging Face checkpoint are where in their parameters.

The maps use only names and shapes of parameters; no engine is imported. If an engine transforms weights beyond fusing
and stacking (quantising, prepacking for a kernel), declare that with a `Derived` or the `reorder` of a `Piece`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.errors import WeightsError
from etude.weights.follow.runtime_map import Piece, Pieces, fused, merge_pieces, named, piece
from etude.weights.tensors import Spec


def transformers_pieces(live: Mapping[str, Any]) -> Pieces:
    """Map the `model.state_dict()` of a `transformers` model (5.x): checkpoint name -> where the tensor is in memory.

    The names are those of the checkpoint, except for stacked experts: `experts.gate_up_proj` [E, 2I, H] and
    `experts.down_proj` [E, H, I] are split by expert. Raises `WeightsError` if these have other than three dimensions,
    and for gpt-oss, whose stacks are transposed.
    """
    for name in live:
        if name.endswith(".experts.gate_up_proj_bias"):
            raise WeightsError(
                f"{name!r} belongs to a stack of experts as in gpt-oss",
                "its matrices are transposed, and gate and up alternate",
                hint="map it by hand, with `piece(name, value)`, under names that the publisher uses",
            )
    return merge_pieces(
        *(_experts(name, value, ".gate_up_proj", ".down_proj") or named({name: value}) for name, value in live.items())
    )


def fused_pieces(live: Mapping[str, Any], *, query_rows: int, key_rows: int, latent_rows: int = 0) -> Pieces:
    """Map the parameters of vLLM or SGLang by name: checkpoint name -> where the tensor is in memory.

    In these engines q, k and v are fused in `qkv_proj`, gate and up in `gate_up_proj`, and experts are stacked in
    `experts.w13_weight` [E, 2I, H] and `experts.w2_weight` [E, H, I]. With latent attention q_a_proj and
    kv_a_proj_with_mqa are fused in `fused_qkv_a_proj`, which every rank has as a whole. `query_rows`: rows of q_proj on
    this rank. `key_rows`: rows of k_proj on this rank, and of v_proj, which has as many. `latent_rows`: rows of
    q_a_proj; 0 for models without it. Raises `WeightsError` for shapes that do not fit.
    """
    rows = {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows}
    return merge_pieces(*(_fused(name, value, rows, latent_rows) for name, value in live.items()))


def sharded(pieces: Pieces, specs: Mapping[str, Spec], *, rank: int, size: int) -> Pieces:
    """Return the map of one rank of a tensor-parallel engine, given the map of its memory.

    If the memory of a tensor is smaller than the checkpoint's tensor in one axis, it contains the shard of rank `rank`
    of `size`. Shards follow one another by rank. The last may be padded (vocabularies are). If there are fewer shards
    than ranks (heads of keys and values), neighbouring ranks have the same shard. `specs`: the tensors of the
    checkpoint. Raises `WeightsError` if the shapes differ in more than one axis.
    """
    return {
        name: [_shard(name, one, specs[name], rank, size) if name in specs else one for one in found]
        for name, found in pieces.items()
    }


def _shard(name: str, one: Piece, spec: Spec, rank: int, size: int) -> Piece:
    live = one.window.shape
    axes = [i for i, (a, b) in enumerate(zip(live, spec.shape, strict=False)) if a != b]
    if len(live) != len(spec.shape) or len(axes) > 1 or one.box is not None:
        raise WeightsError(
            f"{name!r} is {list(live)} on rank {rank}, and {list(spec.shape)} in the checkpoint",
            "a rank's shard may differ in one axis only",
            hint="map it by hand, with `piece(name, value, box)`",
        )
    if not axes:
        return one
    (axis,) = axes
    part, whole = live[axis], spec.shape[axis]
    replicas = max(1, part * size // whole) if whole % part == 0 else 1
    start = min(rank // replicas * part, whole)
    stop = min(start + part, whole)
    box = tuple((start, stop) if i == axis else (0, n) for i, n in enumerate(spec.shape))
    return replace(one, window=one.window.narrowed(axis, stop - start), box=box)


def _fused(name: str, value: Any, attention: Mapping[str, int], latent_rows: int) -> Pieces:
    experts = _experts(name, value, ".w13_weight", ".w2_weight")
    if experts:
        return experts
    module, _, last = name.rpartition(".")
    parent, _, kind = module.rpartition(".")
    if kind == "qkv_proj":
        rows = attention
    elif kind == "fused_qkv_a_proj":
        rows = {"q_a_proj": latent_rows, "kv_a_proj_with_mqa": value.shape[0] - latent_rows}
    elif kind == "gate_up_proj":
        rows = {"gate_proj": value.shape[0] // 2, "up_proj": value.shape[0] // 2}
    else:
        return named({name: value})
    return fused(value, {f"{parent}.{part}.{last}": size for part, size in rows.items()})


def _experts(name: str, value: Any, both: str, down: str) -> Pieces:
    """Map each expert's part of a stacked parameter; empty if the name is not that of stacked experts."""
    stem, dot, _ = name.rpartition(".")
    if not stem.endswith("experts") or dot + name.rpartition(".")[2] not in (both, down):
        return {}
    if len(value.shape) != 3:
        raise WeightsError(
            f"{name!r} has shape {list(value.shape)}",
            "stacked experts have three dimensions",
            hint="map it by hand, with `piece`",
        )
    if name.endswith(down):
        return {f"{stem}.{e}.down_proj.weight": [piece(name, value[e])] for e in range(value.shape[0])}
    half = value.shape[1] // 2
    parts = (
        fused(value[e], {f"{stem}.{e}.gate_proj.weight": half, f"{stem}.{e}.up_proj.weight": half})
        for e in range(value.shape[0])
    )
    return merge_pieces(*parts)
