"""Where a number stopped being one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.errors import CheckpointError
from etude.models import ModelConfig, Transformer, hf_views, save_model
from etude.models.attention import Packed
from etude.models.checkpoint import load_model
from etude.models.finite import NonFiniteOrigin, describe_non_finite, find_non_finite, first_non_finite, is_finite
from etude.numerics import Native

SIZES = ModelConfig(
    vocab_size=19, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, expert_size=8, num_experts=4,
    top_k=2, context_tokens=16,
)  # fmt: skip
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9])
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_bad_number_among_many_is_seen_and_large_ones_are_not(bad: float) -> None:
    numbers = torch.full((1000,), 3e38)
    assert is_finite(numbers)
    numbers[500] = bad
    assert not is_finite(numbers)
    assert describe_non_finite(numbers) == f"1 {'NaN' if bad != bad else 'infinite'} of 1000"
    assert is_finite(torch.full((70_000,), 60_000.0, dtype=torch.float16))
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.zeros(0))


def weight_of(name: str, model: Transformer) -> torch.Tensor:
    """The weight of the operator of that name."""
    block = model.blocks[1]
    weights = {
        "layers.1.attention.qkv": block.attention.qkv,
        "layers.1.attention.out": block.attention.out,
        "layers.1.experts.scores": block.experts.router,
        "layers.1.experts.gate_up": block.experts.gate_up,
        "layers.1.experts.down": block.experts.down,
        "norm": model.norm,
        "logits": model.head,
    }
    found = weights[name]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.attention.qkv",
        "layers.1.attention.out",
        "layers.1.experts.scores",
        "layers.1.experts.gate_up",
        "layers.1.experts.down",
        "norm",
        "logits",
    ],
)
def test_the_first_operator_that_overflows_is_found(name: str) -> None:
    model = Transformer(SIZES, seed=0)
    assert first_non_finite(lambda watch: model.run(TOKENS, hook=watch)) is None
    if name == "layers.1.experts.down":
        model.blocks[1].experts.gate_up.data.mul_(10)  # type: ignore[union-attr]
    with torch.no_grad():
        weight_of(name, model).fill_(3e38)
    assert not find_non_finite(hf_views(model))
    found = first_non_finite(lambda watch: model.run(TOKENS, hook=watch))
    assert found is not None
    assert found.name == name
    assert "infinite" in found.facts or "NaN" in found.facts


def test_the_token_is_found_too() -> None:
    model = Transformer(SIZES, seed=0)
    with torch.no_grad():
        model.embedding[4] = INF
    flat = Packed([3, 3], model.operators)
    found = first_non_finite(lambda watch: model.run(TOKENS, flat, rows=torch.tensor([2, 5]), hook=watch))
    assert found == NonFiniteOrigin("embedding", 2, "8 infinite of 48")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_checkpoint_with_a_number_that_is_none_is_refused_by_its_name(tmp_path: Path, bad: float) -> None:
    model = Transformer(SIZES, seed=0)
    with torch.no_grad():
        hf_views(model)["model.layers.1.mlp.experts.3.up_proj.weight"][2, 5] = bad
    save_model(model, tmp_path / "c", dtype="bf16")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight .* is not finite"
    ) as caught:
        load_model(tmp_path / "c")
    assert "of 64" in caught.value.facts


def test_weights_that_a_dtype_cannot_hold_are_refused_by_that_dtype(tmp_path: Path) -> None:
    model = Transformer(SIZES, seed=0)
    with torch.no_grad():
        hf_views(model)["model.layers.0.mlp.gate.weight"][0, 0] = 1e6
    save_model(model, tmp_path / "c", dtype="f32")
    assert load_model(tmp_path / "c", operators=Native(torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight .* is not finite in float16"):
        load_model(tmp_path / "c", operators=Native(torch.float16))
