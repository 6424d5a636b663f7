"""A `transformers` model follows a channel in place: its logits are a freshly loaded model's, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from etude.models import ModelConfig, Transformer, hf_views
from etude.stores import MemoryStore
from etude.weights import Channel, Follower
from etude.weights.delta.arrays import tensor_of
from etude.weights.files.checkpoint import read_checkpoint
from etude.weights.follow.engine_maps import fused_pieces, transformers_pieces
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    expert_size=24,
    num_experts=4,
    top_k=2,
    rope_theta=50_000.0,
    context_tokens=64,
)
TOKENS = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(0))


def model(tied: bool) -> Qwen3MoeForCausalLM:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=40,
        mlp_only_layers=[0],
        tie_word_embeddings=tied,
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


@torch.no_grad()
def step(trained: Qwen3MoeForCausalLM, seed: int, lr: float = 3e-5) -> None:
    """What an optimiser does to bf16 weights: most of them stay."""
    torch.manual_seed(seed)
    for value in trained.parameters():
        value.copy_((value.float() + lr * torch.randn(value.shape)).to(value.dtype))


@torch.no_grad()
def logits(of: Qwen3MoeForCausalLM) -> torch.Tensor:
    return of(TOKENS).logits


def loaded(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_after_each_step_are_a_freshly_loaded_models_and_an_undo_brings_the_old_ones_back(
    tmp_path: Path, tied: bool
) -> None:
    trained, other = model(tied), model(tied)
    step(other, seed=99, lr=1.0)
    other.save_pretrained(tmp_path / "other")
    serving = loaded(tmp_path / "other")  # whatever was there
    store = MemoryStore()
    channel, follower = Channel(store), Follower(store)
    target = Target(Map(transformers_pieces(serving.state_dict())))
    version = None
    expected = []
    for n in range(3):
        folder = tmp_path / str(n)
        trained.save_pretrained(folder)
        published = channel.publish(read_checkpoint(folder).tensors, step=n, parent=version, rollout_ids=[])
        version = published.version
        update = follower.advance()
        assert update is not None
        swap = target.prepare(update, follower.tensors, undoable=n > 0)
        swap.apply(probe=lambda: target.differing(follower.tensors) == [])
        expected.append(logits(loaded(folder)))
        assert torch.equal(logits(serving), expected[-1])
        if n:
            assert update.changed
            assert not update.replaced
            assert not torch.equal(expected[-1], expected[-2])
            swap.undo()
            assert torch.equal(logits(serving), expected[-2])
            swap.apply()
            assert torch.equal(logits(serving), expected[-1])
        step(trained, seed=n)


def test_the_fused_layout_of_other_engines_holds_the_same_weights(tmp_path: Path) -> None:
    trained = model(tied=False)
    trained.save_pretrained(tmp_path / "0")
    step(trained, seed=1)
    trained.save_pretrained(tmp_path / "1")
    old, new = (read_checkpoint(tmp_path / name).tensors for name in "01")
    live = {}
    for name, value in model(tied=False).state_dict().items():
        if name.endswith("q_proj.weight"):
            live[name.replace("q_proj", "qkv_proj")] = torch.zeros(64, 32, dtype=torch.bfloat16)
        elif name.endswith("experts.gate_up_proj"):
            live[name.replace("gate_up_proj", "w13_weight")] = torch.zeros_like(value)
        elif name.endswith("experts.down_proj"):
            live[name.replace("down_proj", "w2_weight")] = torch.zeros_like(value)
        elif name.endswith("mlp.gate_proj.weight"):
            live[name.replace("gate_proj", "gate_up_proj")] = torch.zeros(80, 32, dtype=torch.bfloat16)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "mlp.up_proj.weight")):
            live[name] = torch.zeros_like(value)
    store = MemoryStore()
    channel, follower = Channel(store), Follower(store)
    target = Target(Map(fused_pieces(live, query_rows=32, key_rows=16)))
    first = channel.publish(old, step=0, parent=None, rollout_ids=[])
    target.prepare(follower.advance(), follower.tensors, undoable=False).apply()
    channel.publish(new, step=1, parent=first.version, rollout_ids=[])
    target.prepare(follower.advance(), follower.tensors).apply()
    assert target.differing(new) == []
    state = trained.state_dict()
    qkv = torch.cat([state[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(live["model.layers.1.self_attn.qkv_proj.weight"], qkv)
    stacked = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(live["model.layers.1.mlp.experts.w13_weight"], stacked)


def test_our_own_model_is_a_target_like_any_other() -> None:
    serving, trained = (Transformer(SIZES, seed=seed) for seed in (1, 2))
    new = {name: tensor_of(name, view) for name, view in hf_views(trained).items()}
    target = Target(Map(named(hf_views(serving))))
    store = MemoryStore()
    follower = Follower(store)
    Channel(store).publish(new, step=0, parent=None, rollout_ids=[])
    target.prepare(follower.advance(), follower.tensors, undoable=False).apply()
    assert target.differing(new) == []
    with torch.no_grad():
        ours, theirs = (one.eval()(TOKENS[0])[0] for one in (serving, trained))
    assert torch.equal(ours, theirs)
