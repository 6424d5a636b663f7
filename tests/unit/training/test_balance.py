"""Balancing by a bias that only choosing sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.models import ModelConfig, Transformer, hf_views, save_model
from etude.models.components import Latent, Routing, Scores
from etude.models.experts import choose
from etude.records import Batch, Sample
from etude.records.rollout import Path as TokenPath
from etude.stores import MemoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.training.balance import ExpertBalancer, balance_bias_update, expert_loads, router_biases
from etude.weights import Channel, Follower

SIZES = ModelConfig(
    family="deepseek_v3",
    vocab_size=31,
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=12,
    expert_size=8,
    num_experts=6,
    top_k=2,
    dense_layers=(0,),
    num_shared=1,
    routing=Routing(scores=Scores.SIGMOID, scaling=1.5),
    latent=Latent(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
    context_tokens=64,
)
SPEED = 0.01


def test_an_expert_with_too_little_becomes_likelier_and_one_with_the_mean_stays() -> None:
    moved = balance_bias_update(torch.full((4,), 0.25), torch.tensor([0, 4, 2, 2]), speed=0.125)
    assert moved.tolist() == [0.375, 0.125, 0.25, 0.25]


def test_loads_are_counted_layer_by_layer_in_either_dtype() -> None:
    live = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [3, 2]]])
    for dtype in (torch.uint8, torch.uint16):
        assert expert_loads(live.to(dtype), 4).tolist() == [[2, 1, 1, 0], [0, 0, 2, 2]]


def test_skewed_routers_come_to_balance_and_gates_are_those_of_the_scores_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    bias, scores = torch.zeros(8), torch.zeros(0)
    worst = []
    for _ in range(400):
        scores = torch.randn(256, 8, generator=generator) + torch.linspace(-1, 1, 8)
        live = choose(scores, 2, routing=SIZES.routing, bias_E=bias).live_NK[:, None]
        load = expert_loads(live, 8)[0]
        worst.append(float(load.max() / load.float().mean()) - 1)
        bias = balance_bias_update(bias, load, speed=SPEED)
    assert worst[0] > 0.8
    assert np.mean(worst[-20:]) < 0.25
    choice = choose(scores, 2, routing=SIZES.routing, bias_E=bias)
    gates = scores.sigmoid().gather(1, choice.experts_NK)
    assert torch.allclose(choice.gates_NK, 1.5 * gates / gates.sum(-1, keepdim=True))


def learner_of(tmp_path: Path, **settings: float) -> TorchLearner:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="bf16")
    learner = TorchLearner(
        replace(LearnerConfig(lr=1e-2, replay_plausible=0.0), **settings), channel=Channel(MemoryStore())
    )  # type: ignore[arg-type]
    learner.load(tmp_path / "start")
    return learner


@torch.no_grad()
def sample_of(learner: TorchLearner, shift: int) -> tuple[Sample, torch.Tensor]:
    """A stale sample whose recorded experts lie `shift` beside the live ones; and the loads of the live ones."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, SIZES.vocab_size, 20))
    logits, routes = learner.model.eval()(tokens)
    logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    mask = np.arange(20) >= 4
    path = TokenPath(
        token_ids=tokens.numpy().astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.concatenate([[0], logprobs]), 0).astype(np.float32),
        steps=np.where(mask, 7, -1).astype(np.int32),
        kv_epochs=np.zeros(20, np.int32),
        routes=((routes.numpy() + shift) % SIZES.num_experts).astype(np.uint8),
    )
    recorded = torch.from_numpy(path.routes[:-1])
    live = learner.model.run(tokens[:-1], None, recorded).live
    return Sample.uniform("g.0", path, 1.0), expert_loads(live, SIZES.num_experts)


def batch(sample: Sample) -> Batch:
    return Batch(batch_id="b000001", step=1, samples=(sample,), rollout_ids=("g.0",), num_loss_tokens=16)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_step_moves_each_layers_bias_by_the_live_choice_and_publishes_and_saves_it_whole(
    tmp_path: Path, shift: int
) -> None:
    learner = learner_of(tmp_path, balance_bias=SPEED)
    assert len(router_biases(learner.model)) == SIZES.num_moe_layers == 2
    sample, load = sample_of(learner, shift)
    assert load.sum(1).tolist() == [38, 38]
    expected = SPEED * (load.float().mean(1, keepdim=True) - load).sign()
    learner.forward_backward(batch(sample))
    learner.optim_step()
    assert torch.equal(torch.stack(router_biases(learner.model)), expected)
    assert expected.any()
    store = MemoryStore()
    learner._channel = Channel(store)
    learner.publish(["g.0"])
    follower = Follower(store)
    follower.advance()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert follower.tensors[name].dtype == "f32"
    assert np.array_equal(follower.tensors[name].codes.view(np.float32), expected[0].numpy())
    learner.save(tmp_path / "saved")
    learner.close()
    again = TorchLearner(learner.config)
    again.load(tmp_path / "saved")
    assert torch.equal(hf_views(again.model)[name], expected[0])


def test_a_step_that_failed_counts_nothing_and_without_a_speed_no_bias_moves(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, balance_bias=SPEED)
    sample, _ = sample_of(learner, 0)
    learner.forward_backward(batch(sample))
    with pytest.raises(ValueError, match="no sampled token"):
        learner.forward_backward(batch(Sample.uniform("g.0", unsampled(sample.path), 1.0)))
    learner.optim_step()
    assert not torch.stack(router_biases(learner.model)).any()
    still = learner_of(tmp_path)
    still.forward_backward(batch(sample))
    still.optim_step()
    assert not torch.stack(router_biases(still.model)).any()


def unsampled(path: TokenPath) -> TokenPath:
    return TokenPath(**{**{f: getattr(path, f) for f in path.__struct_fields__}, "mask": np.zeros(20, bool)})


def test_a_family_without_biases_has_nothing_to_balance() -> None:
    balance = ExpertBalancer(Transformer(ModelConfig(num_layers=1, hidden_size=8, head_dim=4), seed=0), speed=SPEED)
    balance.count(torch.zeros(3, 1, 2, dtype=torch.uint8))
    balance.update()
    assert balance.load_LE.shape == (0, 8)
