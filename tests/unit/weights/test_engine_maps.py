"""The maps of common engines, by names and shapes alone: complete, and on tensor-parallel ranks."""

from __future__ import annotations

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.weights import Tensor
from etude.weights.chain.undo_record import compare_tensors
from etude.weights.follow.engine_maps import fused_pieces, sharded, transformers_pieces
from etude.weights.follow.follower import Update
from etude.weights.follow.runtime_map import Map
from etude.weights.follow.targets import Target

HEAD, HIDDEN, QUERIES, KEYS, INNER, VOCABULARY, EXPERTS = 4, 8, 4, 2, 6, 11, 3
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (QUERIES * HEAD, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KEYS * HEAD, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KEYS * HEAD, HIDDEN),
    "model.layers.0.self_attn.q_proj.bias": (QUERIES * HEAD,),
    "model.layers.0.self_attn.k_proj.bias": (KEYS * HEAD,),
    "model.layers.0.self_attn.v_proj.bias": (KEYS * HEAD,),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, QUERIES * HEAD),
    "model.layers.0.mlp.gate_proj.weight": (INNER * 2, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER * 2, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER * 2),
    "model.layers.0.norm.weight": (HIDDEN,),
    **{f"model.layers.1.mlp.experts.{e}.{part}_proj.weight": (12, HIDDEN) for e in range(3) for part in ("gate", "up")},
    **{f"model.layers.1.mlp.experts.{e}.down_proj.weight": (HIDDEN, 12) for e in range(3)},
    "model.layers.2.self_attn.q_a_proj.weight": (5, HIDDEN),
    "model.layers.2.self_attn.kv_a_proj_with_mqa.weight": (7, HIDDEN),
    "model.layers.2.self_attn.kv_b_proj.weight": (24, 6),
}


def checkpoint(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    made = {}
    for name, shape in SHAPES.items():
        codes = rng.integers(0x3C00, 0x3E00, int(np.prod(shape))).astype(np.uint16)
        change = np.random.default_rng(seed).random(codes.size) < 0.2 * seed
        made[name] = Tensor("bf16", shape, codes + change.astype(np.uint16))
    return made


def of(tensors: dict[str, Tensor], name: str) -> np.ndarray:  # type: ignore[type-arg]
    return tensors[name].codes.reshape(tensors[name].shape)


def live(size: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """A rank's parameters as in vLLM: fused, stacked, with a padded vocabulary."""
    key_heads = max(1, KEYS // size)
    qkv = (QUERIES // size + 2 * key_heads) * HEAD
    shapes = {
        "model.embed_tokens.weight": (16 // size, HIDDEN),
        "model.layers.0.self_attn.qkv_proj.weight": (qkv, HIDDEN),
        "model.layers.0.self_attn.qkv_proj.bias": (qkv,),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, QUERIES * HEAD // size),
        "model.layers.0.mlp.gate_up_proj.weight": (4 * INNER // size, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 2 * INNER // size),
        "model.layers.0.norm.weight": (HIDDEN,),
        "model.layers.1.mlp.experts.w13_weight": (EXPERTS, 24 // size, HIDDEN),
        "model.layers.1.mlp.experts.w2_weight": (EXPERTS, HIDDEN, 12 // size),
        "model.layers.2.self_attn.fused_qkv_a_proj.weight": (12, HIDDEN),  # all ranks have all of it
        "model.layers.2.self_attn.kv_b_proj.weight": (24 // size, 6),
    }
    return {name: np.zeros(shape, np.uint16) for name, shape in shapes.items()}


def adopt(target: Target, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    version = Version(step=0, incarnation="0a1b2c3d", digest="ab" * 32)
    removed = tuple(old.keys() - new.keys())
    update = Update(version, *compare_tensors(old, new), removed, fetch_s=0.0, fetched_bytes=0)
    target.prepare(update, new, undoable=bool(old)).apply(lambda: target.differing(new) == [])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_holds_its_part_of_every_tensor(size: int) -> None:
    old, new = checkpoint(0), checkpoint(1)
    specs = {name: tensor.spec for name, tensor in old.items()}
    key_heads = max(1, KEYS // size)
    for rank in range(size):
        memory = live(size)
        pieces = fused_pieces(memory, query_rows=QUERIES * HEAD // size, key_rows=key_heads * HEAD, latent_rows=5)
        target = Target(Map(sharded(pieces, specs, rank=rank, size=size)))
        adopt(target, {}, old)
        adopt(target, old, new)
        first_key = rank * KEYS // size * HEAD
        keys = slice(first_key, first_key + key_heads * HEAD)
        queries = slice(rank * QUERIES * HEAD // size, (rank + 1) * QUERIES * HEAD // size)
        inner = slice(rank * 12 // size, (rank + 1) * 12 // size)
        attention = "model.layers.0.self_attn."
        for kind in ("weight", "bias"):
            parts = [(f"{attention}{x}_proj.{kind}", rows) for x, rows in (("q", queries), ("k", keys), ("v", keys))]
            expected = np.concatenate([of(new, name)[rows] for name, rows in parts])
            assert np.array_equal(memory[f"{attention}qkv_proj.{kind}"], expected)
        assert np.array_equal(memory[f"{attention}o_proj.weight"], of(new, f"{attention}o_proj.weight")[:, queries])
        for e in range(EXPERTS):
            expert = f"model.layers.1.mlp.experts.{e}."
            w13 = np.concatenate([of(new, f"{expert}{x}_proj.weight")[inner] for x in ("gate", "up")])
            assert np.array_equal(memory["model.layers.1.mlp.experts.w13_weight"][e], w13)
            w2 = of(new, f"{expert}down_proj.weight")[:, inner]
            assert np.array_equal(memory["model.layers.1.mlp.experts.w2_weight"][e], w2)
        latent = "model.layers.2.self_attn."
        both = np.concatenate([of(new, f"{latent}{x}.weight") for x in ("q_a_proj", "kv_a_proj_with_mqa")])
        assert np.array_equal(memory[f"{latent}fused_qkv_a_proj.weight"], both)
        up = of(new, f"{latent}kv_b_proj.weight")[rank * 24 // size : (rank + 1) * 24 // size]
        assert np.array_equal(memory[f"{latent}kv_b_proj.weight"], up)
        rows = 16 // size
        words = of(new, "model.embed_tokens.weight")[rank * rows : (rank + 1) * rows]
        assert np.array_equal(memory["model.embed_tokens.weight"][: len(words)], words)
        assert not memory["model.embed_tokens.weight"][len(words) :].any()


def test_parameters_of_transformers_are_the_checkpoints_but_for_experts() -> None:
    memory = {
        "model.norm.weight": np.zeros(3, np.uint16),
        "a.experts.gate_up_proj": np.zeros((2, 4, 5), np.uint16),
        "a.experts.down_proj": np.zeros((2, 5, 2), np.uint16),
        "a.shared_experts.gate_proj.weight": np.zeros((4, 5), np.uint16),
    }
    found = {name: pieces[0].window.shape for name, pieces in transformers_pieces(memory).items()}
    assert found == {
        "model.norm.weight": (3,),
        "a.shared_experts.gate_proj.weight": (4, 5),
        **{f"a.experts.{e}.{part}_proj.weight": (2, 5) for e in range(2) for part in ("gate", "up")},
        **{f"a.experts.{e}.down_proj.weight": (5, 2) for e in range(2)},
    }


def test_a_rank_outside_the_checkpoint_is_refused() -> None:
    specs = {"w": Tensor("bf16", (4, 6), np.zeros(24, np.uint16)).spec}
    for shape in ((2, 3), (4, 6, 1), (24,)):
        with pytest.raises(WeightsError, match="'w' is"):
            sharded(transformers_pieces({"w": np.zeros(shape, np.uint16)}), specs, rank=0, size=2)
    with pytest.raises(WeightsError, match="three dimensions"):
        transformers_pieces({"a.experts.down_proj": np.zeros((2, 5), np.uint16)})
    with pytest.raises(WeightsError, match="as in gpt-oss"):
        transformers_pieces({"a.experts.gate_up_proj_bias": np.zeros((2, 6), np.uint16)})
