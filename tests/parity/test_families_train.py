"""The circle in small for every family: mid-trained, sampled by the engine, trained on, published, adopted."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiers import first_few

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.weight_sync import WeightSync
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.records import Batch, CompletionRequest, Sample, Sampling, Trace, Version
from etude.records.rollout import Turn
from etude.stores import MemoryStore
from etude.training import LearnerConfig, MidTrainingConfig, TorchLearner, mid_train, write_corpus
from etude.weights import Channel, Follower
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

_spec = importlib.util.spec_from_file_location(
    "families", Path(__file__).parents[1] / "unit" / "models" / "families.py"
)
assert _spec is not None
assert _spec.loader is not None
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)
MID = MidTrainingConfig(
    num_tokens=6000, batch_tokens=200, document_tokens=32, lr=1e-2, warmup_steps=3, eval_every=30, checkpoint_every=99
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counting up from somewhere: the next token is always known."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [(np.arange(20, dtype=np.int32) + i) % 24 for i in range(90)]
    write_corpus(folder, documents, heldout=documents[5:6])
    return folder


async def rollout(engine: ReferenceEngine, number: int) -> Sample:
    prompt = np.arange(3 + number, dtype=np.int32)
    request = CompletionRequest(
        request_id=f"r{number}",
        session_id=f"s{number}",
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=12, stop_token_ids=(), seed=number),
    )
    done = await engine.generate(request)
    trace = Trace((Turn(parent=None, prompt_ids=prompt, completion=done, sampling=request.sampling),))
    return Sample.uniform(request.request_id, trace.path(0), (-1.0) ** number)


@pytest.mark.parametrize("sizes", first_few(families.FAMILIES.values(), 7), ids=families.FAMILIES)
def test_it_learns_agrees_with_its_engine_and_is_published_to_the_bit(
    corpus: Path, tmp_path: Path, sizes: ModelConfig
) -> None:
    torch.set_num_threads(1)
    mid = mid_train(MID, corpus, tmp_path / "mid", model=sizes, ranks=1)
    assert mid.heldout_loss is not None
    assert mid.heldout_loss < 1.0 < np.log(24)

    learner = TorchLearner(LearnerConfig(), channel=Channel(store := MemoryStore()))
    learner.load(tmp_path / "mid")
    learner.save(tmp_path / "start")

    async def story() -> list[Sample]:
        model = load_model(tmp_path / "start")
        async with ReferenceEngine(model, version=VERSION, config=EngineConfig(context_tokens=64)) as engine:
            return list(await asyncio.gather(*(rollout(engine, n) for n in range(4))))

    samples = tuple(asyncio.run(story()))
    report = learner.forward_backward(Batch(batch_id="b", step=1, samples=samples, rollout_ids=(), num_loss_tokens=48))
    assert report.fresh_ratio_max == 0.0  # in exact mode
    assert report.flipped_share == 0.0
    assert learner.optim_step()["grad_norm"] > 0

    for name, view in hf_views(learner.model).items():
        if name.endswith("e_score_correction_bias"):
            view.copy_(torch.linspace(-1, 1, len(view)))  # as balancing would
    learner.publish([])
    learner.close()
    serving = load_model(tmp_path / "start")
    follower = Follower(store)
    update = follower.advance()
    assert update is not None
    Target(Map(named(hf_views(serving)))).prepare(update, follower.tensors, undoable=False).apply()
    for name, view in hf_views(serving).items():
        assert torch.equal(view, hf_views(learner.model)[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_four_steps_of_rl_have_ratio_one_in_every_version(tmp_path: Path, name: str) -> None:
    """The engine samples with what the learner published last, adopted while it serves."""
    torch.set_num_threads(1)
    save_model(Transformer(families.FAMILIES[name], seed=0), tmp_path / "start", dtype="f32")
    learner = TorchLearner(LearnerConfig(lr=1e-2), channel=Channel(store := MemoryStore()))
    learner.load(tmp_path / "start")

    async def story() -> None:
        model = load_model(tmp_path / "start")
        async with ReferenceEngine(model, version=VERSION, config=EngineConfig(context_tokens=64)) as engine:
            following = WeightSync(engine, hf_views(model), Follower(store))
            learner.publish([])
            for step in range(1, 5):
                before = {name: view.clone() for name, view in hf_views(model).items()}
                await asyncio.to_thread(following.step)
                changed = sum(not torch.equal(before[name], view) for name, view in hf_views(model).items())
                assert changed > (0 if step == 1 else len(before) // 2)
                for name, view in hf_views(model).items():
                    assert torch.equal(view, hf_views(learner.model)[name]), name
                samples = tuple(await asyncio.gather(*(rollout(engine, 4 * step + n) for n in range(4))))
                report = learner.forward_backward(
                    Batch(batch_id=f"b{step}", step=step, samples=samples, rollout_ids=(), num_loss_tokens=48)
                )
                assert report.fresh_ratio_max == 0.0
                assert report.flipped_share == 0.0
                assert learner.optim_step()["grad_norm"] > 0
                learner.publish([])

    asyncio.run(story())
    learner.close()
