"""Low precision, whole: a learner trains unrounded weights and ships packed bytes, an engine decodes them and samples
with a cache, and what it sampled has exactly the learner's probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.server import live_weights
from etude.inference.weight_sync import WeightSync
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.models.checkpoint_files import load_tensors
from etude.models.components import Latent, Routing, Scores
from etude.numerics import NumericsConfig, Quantise
from etude.numerics.factory import operators_for
from etude.records import Batch, CompletionRequest, Sample, Sampling, Trace, Version
from etude.records.rollout import Turn
from etude.stores import MemoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.weights import Channel, Follower

QWEN = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, expert_size=32,
    num_experts=4, top_k=2, context_tokens=96,
)  # fmt: skip
DEEPSEEK = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=48, expert_size=32,
    num_experts=4, top_k=2, context_tokens=96, family="deepseek_v3", routing=Routing(scores=Scores.SIGMOID),
    num_shared=1, latent=Latent(kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32, q_rank=32),
)  # fmt: skip
LOW = [kind for kind in Quantise if kind is not Quantise.NONE]


async def rollout(engine: ReferenceEngine, number: int) -> Sample:
    """Two turns of one session, the second of which finds the first in the cache."""
    draw, context, turns, held = np.random.default_rng(number), np.zeros(0, np.int32), list[Turn](), 0
    for turn in range(2):
        prompt = draw.integers(0, 64, 9 + number % 5).astype(np.int32)
        context = np.concatenate([context, prompt])
        sampling = Sampling(max_tokens=8, stop_token_ids=(), seed=number)
        request = CompletionRequest(
            request_id=f"{number}.{turn}",
            session_id=f"{number}",
            prompt_ids=context,
            sampling=sampling,
            routes_from=held,
        )
        done = await engine.generate(request)
        turns.append(Turn(parent=turn - 1 if turn else None, prompt_ids=prompt, completion=done, sampling=sampling))
        held, context = done.routes_start + len(done.routes), np.concatenate([context, done.token_ids])
    return Sample.uniform(f"r{number:03d}", Trace(tuple(turns)).path(1), (-1.0) ** number)


@pytest.mark.parametrize(
    ("kind", "sizes"), [(Quantise.MXFP8, QWEN), (Quantise.NVFP4, DEEPSEEK), (Quantise.MXFP4, QWEN)], ids=str
)
def test_what_an_engine_samples_from_packed_bytes_has_exactly_the_learners_probabilities(
    tmp_path: Path, kind: Quantise, sizes: ModelConfig
) -> None:
    torch.set_num_threads(1)
    save_model(Transformer(sizes, seed=5), tmp_path / "start", dtype="bf16")
    numerics, store = NumericsConfig(quantise=kind), MemoryStore()
    learner = TorchLearner(LearnerConfig(lr=1e-2), channel=Channel(store), numerics=numerics)
    learner.load(tmp_path / "start")
    model = load_model(tmp_path / "start", operators=operators_for(numerics, torch.float32, rounds_weights=False))
    views, derived = live_weights(model, kind)
    version = Version(step=0, incarnation="00000000", digest="00" * 32)
    engine = ReferenceEngine(model, version=version, config=EngineConfig(context_tokens=96, chunk_tokens=16))
    following = WeightSync(engine, views, Follower(store), derived=derived)

    async def story() -> None:
        async with engine:
            for step in range(2):
                published = learner.publish([])
                assert await asyncio.to_thread(following.step) == published.version
                samples = await asyncio.gather(*(rollout(engine, n) for n in range(6)))
                count = sum(int(sample.path.mask.sum()) for sample in samples)
                report = learner.forward_backward(
                    Batch(batch_id="b", step=step, samples=tuple(samples), rollout_ids=(), num_loss_tokens=count)
                )
                assert report.fresh_ratio_max == 0.0, "every token's ratio is 1 to the bit"
                assert report.flipped_share == 0.0
                text = samples[0].path.token_ids.tolist()
                assert (await engine.verify(text))[1] == learner.probe(text)
                learner.optim_step()

    asyncio.run(story())
    assert not any(name.endswith("_proj.weight") for name in views) or kind is Quantise.MXFP8


@pytest.mark.parametrize("kind", LOW, ids=str)
def test_a_directory_and_a_channel_hold_the_same_bytes(tmp_path: Path, kind: Quantise) -> None:
    save_model(Transformer(QWEN, seed=5), tmp_path / "start", dtype="bf16")
    store = MemoryStore()
    learner = TorchLearner(LearnerConfig(), channel=Channel(store), numerics=NumericsConfig(quantise=kind))
    learner.load(tmp_path / "start")
    learner.publish([])
    follower = Follower(store)
    follower.advance()
    save_model(load_model(tmp_path / "start"), tmp_path / "low", dtype="bf16", quantise=kind)
    held = load_tensors(tmp_path / "low" / "model.safetensors")
    assert follower.tensors.keys() == held.keys()
    for name, tensor in held.items():
        if tensor.itemsize == 1:
            assert np.array_equal(follower.tensors[name].codes, tensor.view(torch.uint8).flatten().numpy()), name
