"""Muon: matrices move by orthogonal steps, head by head and expert by expert, everything else by AdamW."""

from __future__ import annotations

import pytest
import torch
from tests.unit.models.families import FAMILIES

from etude.models import Transformer
from etude.models.attention import Packed
from etude.training.config import LiveWeights
from etude.training.muon import SIZE, Muon, muon_matrices, newton_schulz, orthogonalise
from etude.training.optimizer import AdamW
from etude.training.process_group import SINGLE_PROCESS

PLAIN = ("embedding", "head", "router", "_bias", "taps", "shared_gate")


def backward(model: Transformer) -> None:
    tokens = torch.randint(model.config.vocab_size, (24,), generator=torch.Generator().manual_seed(0))
    done = model.train().run(tokens, Packed([24], model.operators))
    done.logits.square().mean().backward()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) @ torch.diag(
        torch.logspace(0, -1, shape[1])
    )
    values = torch.linalg.svdvals(newton_schulz(matrix))
    assert values.max() < 1.3
    assert values.min() > 0.4
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.nn.functional.cosine_similarity((u @ v).flatten(), newton_schulz(matrix).flatten(), dim=0) > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_each_matrix_is_orthogonalised_by_itself_and_other_tensors_use_adamw(family: str) -> None:
    """After one step from nothing a matrix has moved by its own orthogonalised gradient, all else as AdamW moves it."""
    muon, adamw = Transformer(FAMILIES[family], seed=1), Transformer(FAMILIES[family], seed=1)
    before = {name: p.detach().clone() for name, p in muon.named_parameters()}
    by_muon = Muon(muon, exchange=SINGLE_PROCESS, momentum=0.0, weights=LiveWeights.F32, grad_clip=0.0)
    by_adamw = AdamW(adamw, weights=LiveWeights.F32, grad_clip=0.0)
    backward(muon)
    backward(adamw)
    gradients = {name: p.grad.clone() for name, p in muon.named_parameters() if p.grad is not None}
    by_muon.step(lr=0.1)
    by_adamw.step(lr=0.1)
    blocks = muon_matrices(muon)
    others = dict(adamw.named_parameters())
    for name, p in muon.named_parameters():
        if name not in blocks:
            assert torch.equal(p, others[name]), name
            continue
        parts = torch.split(gradients[name], blocks[name], -2)
        moved = torch.split((before[name] - p.detach()) / 0.1, blocks[name], -2)
        for part, step in zip(parts, moved, strict=True):
            for one, own in zip(part.view(-1, *part.shape[-2:]), step.reshape(-1, *part.shape[-2:]), strict=True):
                if one.any():
                    wanted = newton_schulz(one) * SIZE * max(one.shape) ** 0.5
                    assert torch.allclose(own, wanted, atol=1e-4), name
    left = [name for name in before if name not in blocks]
    assert all(before[name].ndim == 1 or name.endswith(PLAIN) for name in left)


def test_heads_are_orthogonalised_separately() -> None:
    whole = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    turned = orthogonalise(whole, [4, 4])
    assert torch.allclose(turned[:4], newton_schulz(whole[:4]) * SIZE * 12**0.5)
    assert not torch.allclose(turned, orthogonalise(whole, [8]))


def test_it_goes_on_from_its_state_to_the_bit() -> None:
    models = [Transformer(FAMILIES["qwen3-moe"], seed=1) for _ in range(2)]
    one, other = (Muon(model, exchange=SINGLE_PROCESS, weights=LiveWeights.BF16) for model in models)
    backward(models[0])
    one.step(lr=0.01)
    other.restore({key: vector.clone() for key, vector in one.state().items()}, live=False)
    assert len(one.state()["second"]) < len(one.state()["first"]), "matrices have no second moment"
    for optimizer in (one, other):
        optimizer.grad.copy_(torch.linspace(-1, 1, len(optimizer.grad)))
        optimizer.step(lr=0.01)
    assert torch.equal(one.state()["master"], other.state()["master"])
