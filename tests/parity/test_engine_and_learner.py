"""The whole path of a number: sampled by the engine token by token with a KV cache and prefix reuse, then computed by
the learner in one packed forward with the recorded routes. The ratio must be 1."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import ParityError
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.numerics import ComputeDtype, Mode, Native, NumericsConfig, Operators
from etude.numerics.exact.operators import Exact
from etude.records import Batch, Completion, CompletionRequest, Sample, Sampling, Trace, Version
from etude.records.rollout import Turn
from etude.training import LearnerConfig, LiveWeights, TorchLearner

SIZES = ModelConfig(context_tokens=256)
VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)
TURNS = (24, 9, 3)  # prompt tokens that each turn appends


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with sharp predictions: random ones times three, so that a wrong number would show."""
    model = Transformer(SIZES, seed=7)
    with torch.no_grad():
        model.embedding.mul_(3)
    path = tmp_path_factory.mktemp("checkpoint") / "start"
    save_model(model, path, dtype="bf16")
    return path


async def rollout(engine: ReferenceEngine, number: int) -> Sample:
    """Three turns of one session."""
    generator = np.random.default_rng(number)
    context = np.zeros(0, np.int32)
    turns: list[Turn] = []
    for turn, size in enumerate(TURNS):
        prompt = generator.integers(0, SIZES.vocab_size, size + number % 5).astype(np.int32)
        context = np.concatenate([context, prompt])
        request = _request(f"r{number}.{turn}", f"r{number}", context, turns)
        done = await engine.generate(request)
        parent = turn - 1 if turn else None
        turns.append(Turn(parent=parent, prompt_ids=prompt, completion=done, sampling=request.sampling))
        context = np.concatenate([context, done.token_ids])
    return Sample.uniform(f"r{number:03d}", Trace(tuple(turns)).path(2), (-1.0) ** number)


def _request(request_id: str, session: str, context: np.ndarray, turns: list[Turn]) -> CompletionRequest:
    held = turns[-1].completion if turns else None
    return CompletionRequest(
        request_id=request_id,
        session_id=session,
        prompt_ids=context,
        sampling=Sampling(max_tokens=12, stop_token_ids=(0,), seed=sum(session.encode())),
        routes_from=0 if held is None else _routes_held(held),
    )


def _routes_held(completion: Completion) -> int:
    return completion.routes_start + len(completion.routes)


def sampled(checkpoint: Path, operators: Operators) -> Batch:
    """Sixteen rollouts of an engine."""
    torch.set_num_threads(1)
    model = load_model(checkpoint, operators=operators)

    async def story() -> list[Sample]:
        engine = ReferenceEngine(model, version=VERSION, config=EngineConfig(context_tokens=256))
        assert ("exact" in engine.capabilities) == operators.exact
        async with engine:
            return list(await asyncio.gather(*(rollout(engine, n) for n in range(16))))

    samples = asyncio.run(story())
    num_sampled = sum(int(s.path.mask.sum()) for s in samples)
    assert num_sampled > 300
    return Batch(batch_id="b", step=1, samples=tuple(samples), rollout_ids=(), num_loss_tokens=num_sampled)


@pytest.mark.parametrize("dtype", ComputeDtype)
def test_tokens_of_the_engine_have_ratio_one_in_the_learner(checkpoint: Path, dtype: ComputeDtype) -> None:
    batch = sampled(checkpoint, Exact(getattr(torch, dtype)))
    learner = TorchLearner(LearnerConfig(dtype=dtype, replay_routes=False))
    learner.load(checkpoint)
    report = learner.forward_backward(batch)
    assert report.num_sampled == batch.num_loss_tokens
    assert report.fresh_ratio_max == 0.0
    assert report.flipped_share == 0.0
    assert report.k3 == 0.0


def test_what_a_bf16_engine_sampled_is_near_and_reported_and_replay_brings_it_nearer(checkpoint: Path) -> None:
    batch = sampled(checkpoint, Native(torch.bfloat16))
    k3 = {}
    for replay in (False, True):
        learner = TorchLearner(LearnerConfig(replay_routes=replay), numerics=NumericsConfig(Mode.NATIVE))
        learner.load(checkpoint)
        report = learner.forward_backward(batch)
        assert report.fresh_ratio_max is not None
        assert report.fresh_ratio_max > 1e-4
        assert report.replayed_share == float(replay)
        assert (0.0 < report.flipped_share < 0.1) == replay
        k3[replay] = report.k3
    assert 0.0 < k3[True] < k3[False] < 0.05


@pytest.mark.parametrize("operators", [Native(torch.bfloat16), Exact(torch.bfloat16), Native()])
def test_a_learner_in_exact_mode_refuses_what_was_computed_otherwise(checkpoint: Path, operators: Operators) -> None:
    batch = sampled(checkpoint, operators)
    learner = TorchLearner(LearnerConfig())
    learner.load(checkpoint)
    with pytest.raises(ParityError, match="own weights"):
        learner.forward_backward(batch)


def test_the_learners_probe_is_the_engines(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    text = np.random.default_rng(0).integers(0, SIZES.vocab_size, 90).tolist()

    async def story() -> list[float]:
        async with ReferenceEngine(
            load_model(checkpoint), version=VERSION, config=EngineConfig(context_tokens=256)
        ) as engine:
            return (await engine.verify(text))[1]

    learner = TorchLearner(LearnerConfig())
    learner.load(checkpoint)
    assert asyncio.run(story()) == learner.probe(text)


def test_with_a_context_extended_by_yarn_engine_and_learner_agree_up_to_its_last_token(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    small = replace(SIZES, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, expert_size=16)
    extended = small.extended(4.0)
    model = Transformer(extended, seed=7)
    with torch.no_grad():
        model.embedding.mul_(3)
    save_model(model, tmp_path / "long", dtype="f32")
    held = json.loads((tmp_path / "long" / "config.json").read_text())
    assert held["max_position_embeddings"] == 1024
    assert held["rope_parameters"]["rope_type"] == "yarn"
    assert (held["rope_parameters"]["factor"], held["rope_parameters"]["original_max_position_embeddings"]) == (4, 256)
    prompt = np.random.default_rng(0).integers(1, SIZES.vocab_size, 1000).astype(np.int32)

    async def story() -> Completion:
        loaded = load_model(tmp_path / "long")
        assert loaded.config == extended
        async with ReferenceEngine(loaded, version=VERSION, config=EngineConfig(context_tokens=1024)) as engine:
            asked = Sampling(max_tokens=24, stop_token_ids=(), seed=3)
            return await engine.generate(
                CompletionRequest(request_id="r", session_id="r", prompt_ids=prompt, sampling=asked)
            )

    done = asyncio.run(story())
    assert len(done.token_ids) == 24
    learner = TorchLearner(LearnerConfig(weights=LiveWeights.F32))
    learner.load(tmp_path / "long")
    assert learner.probe([*prompt.tolist(), *done.token_ids.tolist()])[-24:] == done.logprobs.tolist()
