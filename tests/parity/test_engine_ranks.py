"""An engine whose model is computed by two processes says, to the bit, what an engine of one process says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced
from tests.parity.same_bits import VERSION, asked, learned, prompts, sharp
from tests.parity.test_exact import DEEPSEEK, QWEN
from tests.unit.inference.drafted import Known, NoCosts

from etude.errors import EngineError, EtudeError, MalformedRequest, WeightsError
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.look_up import Drafter
from etude.inference.rank_messages import Commit, RankJob, Undo
from etude.inference.ranks import RankedTarget, Ranks, load_part
from etude.inference.weight_sync import WeightSync
from etude.models import ModelConfig, hf_views, load_model, save_model
from etude.numerics.config import Mode, NumericsConfig
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.numerics.parallel import RankLost
from etude.records import Completion, CompletionRequest
from etude.records.completion import Traffic
from etude.stores import DirectoryStore
from etude.weights import Channel, FollowerProcess, Tensor, Update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODELS = {"deepseek-v3": replace(DEEPSEEK, num_heads=4, num_kv_heads=4), "qwen3-moe": QWEN}
EXACT = NumericsConfig(degree=2)
NUM = 24
SIZES = EngineConfig(
    max_sequences=4, context_tokens=512, chunk_tokens=16, step_tokens=32, tensor_parallel=2, device="cpu", stall_s=120.0
)


def saved(folder: Path, config: ModelConfig) -> Path:
    save_model(sharp(config, Exact(degree=2)), folder / "checkpoint", dtype="f32")
    return folder / "checkpoint"


@contextlib.asynccontextmanager
async def opened(
    checkpoint: Path,
    config: EngineConfig = SIZES,
    numerics: NumericsConfig = EXACT,
    drafter: Drafter | None = None,
) -> AsyncIterator[tuple[ReferenceEngine, Ranks]]:
    job = RankJob(checkpoint, None, numerics, config, threads=1)
    with Ranks(job, name="engine-0") as ranks:
        model = load_part(job, ranks.parallel)
        ranks.wait_until_loaded()
        settings = {"name": "engine-0", "config": config, "ranks": ranks, "drafter": drafter}
        async with ReferenceEngine(model, version=VERSION, **settings) as engine:
            if engine._speculator is not None:
                engine._speculator.costs = NoCosts()
            yield engine, ranks


@contextlib.asynccontextmanager
async def alone(checkpoint: Path, operators: Operators, config: EngineConfig = SIZES) -> AsyncIterator[ReferenceEngine]:
    model = load_model(checkpoint, operators=operators)
    async with ReferenceEngine(
        model, version=VERSION, name="engine-0", config=replace(config, tensor_parallel=1)
    ) as engine:
        yield engine


def requests_of(config: ModelConfig) -> list[CompletionRequest]:
    """Siblings of one prompt, and prompts of several lengths."""
    some = prompts(config, (40, 3, 17, 150))
    return [asked(n, prompt, tokens=NUM) for n, prompt in enumerate([some[0], some[0], *some])]


def urgent_of(config: ModelConfig) -> list[CompletionRequest]:
    requests = [asked(90 + n, prompt, tokens=8) for n, prompt in enumerate(prompts(config, (60, 5)))]
    return [replaced(one, traffic=Traffic.PRODUCTION) for one in requests]


async def sampling(engine: ReferenceEngine, tokens: int) -> None:
    while engine.counters.tokens < tokens:
        assert engine.alive
        await asyncio.sleep(1e-3)


async def conversation(engine: ReferenceEngine, config: ModelConfig) -> list[Completion]:
    """More rollouts than slots, production that takes their slots in the middle, and a further turn of each."""
    requests = requests_of(config)
    work = [asyncio.create_task(engine.generate(request)) for request in requests]
    await sampling(engine, 30)
    done = await asyncio.gather(*(engine.generate(one) for one in urgent_of(config)))
    done += await asyncio.gather(*work)
    longer = [[*request.prompt_ids, *one.token_ids, 1, 2, 3] for request, one in zip(requests, done[2:], strict=True)]
    more = [asked(50 + n, np.array(ids, np.int32), tokens=5) for n, ids in enumerate(longer)]
    return [*done, *await asyncio.gather(*(engine.generate(one) for one in more))]


def bits(completions: Sequence[Completion]) -> list[tuple[str, list[int], list[float], object]]:
    return [(one.request_id, one.token_ids.tolist(), one.logprobs.tolist(), one.routes.tolist()) for one in completions]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_what_one_says_with_forks_preemption_and_drafts(name: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, MODELS[name])

    async def by_itself() -> tuple[list[Completion], list[float]]:
        async with alone(checkpoint, Exact(degree=2)) as engine:
            return await conversation(engine, MODELS[name]), (await engine.verify(range(1, 40)))[1]

    async def together(drafter: Drafter) -> tuple[list[Completion], list[float], ReferenceEngine]:
        async with opened(checkpoint, drafter=drafter) as (engine, _):
            done = await conversation(engine, MODELS[name])
            return done, (await engine.verify(range(1, 40)))[1], engine

    wanted, alone_scores = asyncio.run(by_itself())
    requests = requests_of(MODELS[name])
    prompts_of = [tuple(one.prompt_ids.tolist()) for one in (*urgent_of(MODELS[name]), *requests)]
    known = {prompt: one.token_ids.tolist() for prompt, one in zip(prompts_of, wanted, strict=False)}
    done, scores, engine = asyncio.run(together(Known(known, right=0.7)))
    assert bits(done) == bits(wanted)
    assert scores == alone_scores
    counters = engine.counters
    assert min(counters.rollouts_preempted, counters.cached_tokens, counters.accepted_tokens) > 0
    texts = [[*r.prompt_ids.tolist(), *one.token_ids.tolist()] for r, one in zip(requests, done[2:], strict=False)]
    trained = learned(load_model(checkpoint, operators=Exact(degree=2)), texts)
    for one, said in zip(done[2:], trained, strict=False):
        assert one.logprobs.tolist() == said[-NUM:]


def test_two_ranks_compute_native_sums_to_within_rounding(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, MODELS["deepseek-v3"])

    async def story() -> tuple[list[float], list[float]]:
        async with opened(checkpoint, SIZES, NumericsConfig(mode=Mode.NATIVE)) as (engine, _):
            await engine.generate(asked(1, np.arange(1, 40, dtype=np.int32), tokens=NUM))
            two = (await engine.verify(range(1, 40)))[1]
        async with alone(checkpoint, Native()) as engine:
            return two, (await engine.verify(range(1, 40)))[1]

    two, one = asyncio.run(story())
    assert np.abs(np.array(two) - np.array(one)).max() < 1e-4


def versions(config: ModelConfig) -> list[dict[str, Tensor]]:
    """Weights of other seeds, each a change of every tensor; then a change of a fifth of the numbers."""
    found = []
    for seed in (2, 3):
        views = hf_views(sharp(config, Exact(degree=2), seed=seed))
        found.append({n: Tensor("f32", tuple(v.shape), codes_of(v)) for n, v in views.items()})
    rng = np.random.default_rng(0)
    flipped = {n: t.codes ^ ((rng.random(t.codes.size) < 0.2).astype(np.uint32) << 16) for n, t in found[-1].items()}
    return [*found, {n: Tensor("f32", t.shape, flipped[n]) for n, t in found[-1].items()}]


def codes_of(view: torch.Tensor) -> np.ndarray:
    return view.contiguous().numpy().view(np.uint32).ravel().copy()


def loaded(config: ModelConfig, tensors: dict[str, Tensor]) -> list[float]:
    """What a model with these weights says of a text."""
    model = sharp(config, Exact(degree=2))
    for name, view in hf_views(model).items():
        view.copy_(torch.from_numpy(tensors[name].codes.view(np.float32).reshape(tensors[name].shape).copy()))
    ids = torch.arange(1, 40)
    with torch.inference_mode():
        logits, _ = model(ids)
        return model.operators.log_softmax(logits[:-1]).gather(1, ids[1:, None])[:, 0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_its_part_of_each_version_under_live_requests(name: str, tmp_path: Path) -> None:
    """One version does not reach rank 1: no rank writes it. Another is refused when all ranks wrote it: all undo it."""
    checkpoint, store = saved(tmp_path, MODELS[name]), DirectoryStore(tmp_path / "store")
    coming, channel = versions(MODELS[name]), Channel(store)

    async def story() -> None:
        async with opened(checkpoint) as (engine, ranks):
            with FollowerProcess(store, threads=1, poll_s=0.01) as chain:
                model = engine._runner.model
                following = WeightSync(
                    engine, hf_views(model), chain, poll_s=0.0, ranked=partial(RankedTarget, model, ranks, chain)
                )
                work = [asyncio.create_task(engine.generate(one)) for one in requests_of(MODELS[name])]
                last = None
                for step, tensors in enumerate(coming, start=1):
                    last = channel.publish(tensors, step=step, parent=last, rollout_ids=[]).version
                    if step == 2:
                        await refused(engine, ranks, following)
                        assert (await engine.verify(range(1, 40)))[1] == loaded(MODELS[name], coming[0])
                    assert await asyncio.to_thread(adopted, following) == last
                    assert (await engine.verify(range(1, 40)))[1] == loaded(MODELS[name], tensors)
                done = await asyncio.gather(*work)
                assert any(len(one.spans) > 1 for one in done), "requests went on over a swap"
                later = {n: Tensor("f32", t.shape, t.codes ^ (1 << 16)) for n, t in coming[-1].items()}
                channel.publish(later, step=len(coming) + 1, parent=last, rollout_ids=[])
                update = await asyncio.to_thread(advanced, chain)
                swap = following._target.prepare(update, chain.tensors)
                with pytest.raises(WeightsError, match="the old weights were restored on all ranks"):
                    await asyncio.wrap_future(engine.between_steps(lambda: swap.apply(lambda: False)))
                assert not swap.applied
                assert (await engine.verify(range(1, 40)))[1] == loaded(MODELS[name], coming[-1])
                assert following._target.differing(chain.tensors) == sorted(later)
                await asyncio.wrap_future(engine.between_steps(swap.apply))
                assert (await engine.verify(range(1, 40)))[1] == loaded(MODELS[name], later)
                assert following._target.differing(chain.tensors) == []

    asyncio.run(story())


def advanced(chain: FollowerProcess) -> Update:
    deadline = time.monotonic() + 120
    while (update := chain.advance()) is None:
        assert time.monotonic() < deadline
    return update


def adopted(following: WeightSync) -> object:
    deadline = time.monotonic() + 120
    while (version := following.step()) is None:
        assert time.monotonic() < deadline
    return version


async def refused(engine: ReferenceEngine, ranks: Ranks, following: WeightSync) -> None:
    """Rank 1 may open no file more, so that the version does not reach it."""
    [pid], before = ranks.pids, engine.version
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    with pytest.raises(WeightsError, match="rank 1 of engine-0: the shared memory of new weights did not arrive"):
        await asyncio.to_thread(adopted, following)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert engine.version == before


def test_a_rank_that_is_killed_ends_the_engine_with_an_error_that_names_it(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, MODELS["qwen3-moe"])

    async def story() -> None:
        async with opened(checkpoint) as (engine, ranks):
            work = asyncio.create_task(engine.generate(asked(1, np.arange(1, 40, dtype=np.int32), tokens=400)))
            await sampling(engine, 5)
            os.kill(ranks.pids[0], signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(EngineError, match=r"rank 1 of engine-0 ended: its exit code is -9") as told:
                await work
            assert time.monotonic() - begin < 60
            assert told.value.hint
            assert not engine.alive
            with pytest.raises(EngineError):
                await engine.generate(asked(2, np.arange(1, 40, dtype=np.int32), tokens=4))

    asyncio.run(story())


def test_an_idle_engine_notices_that_a_rank_was_killed_and_a_busy_one_that_it_hangs(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, MODELS["qwen3-moe"])

    async def killed() -> None:
        async with opened(checkpoint) as (engine, ranks):
            os.kill(ranks.pids[0], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while engine.alive:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    async def hung() -> None:
        async with opened(checkpoint, replace(SIZES, stall_s=8.0)) as (engine, ranks):
            os.kill(ranks.pids[0], signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"the deadline is 4 s"):
                await engine.generate(asked(1, np.arange(1, 40, dtype=np.int32), tokens=4))
            with pytest.raises(EtudeError):
                await engine.verify(range(1, 9))

    async def late() -> None:
        """It hangs while it prepares a version."""
        async with opened(checkpoint) as (engine, ranks):
            os.kill(ranks.pids[0], signal.SIGSTOP)
            ranks._weights[0]._socket.settimeout(0.1)
            with pytest.raises(RankLost, match="rank 1 of engine-0 does not answer: no reply within"):
                ranks.beside_passes(Commit(), lambda: None)
            deadline = time.monotonic() + 60
            while engine.alive:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            with pytest.raises(RankLost):
                ranks.between_passes(Undo(), lambda: None)

    asyncio.run(killed())
    asyncio.run(hung())
    asyncio.run(late())


def test_results_of_operators_are_refused_on_several_ranks(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, MODELS["qwen3-moe"])

    async def story() -> None:
        async with opened(checkpoint) as (engine, _):
            with pytest.raises(MalformedRequest, match="does not return the results"):
                await engine.operators([1, 2, 3], prompt_tokens=1)

    asyncio.run(story())
