"""Shared prefixes: the results are those of an engine that computes every prompt whole, to the bit."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from etude.inference.engine import ReferenceEngine
from etude.models import Transformer, hf_views
from etude.records import Completion, CompletionRequest
from etude.records.completion import Traffic
from etude.weights import Tensor

from .helpers import TINY, EngineConfig, ask, everything, version


def serving(seed: int = 1, *, share: bool = True, **settings: Any) -> ReferenceEngine:
    config = EngineConfig(
        **{"max_sequences": 4, "context_tokens": 512, "chunk_tokens": 32, "step_tokens": 64, **settings}
    )
    return ReferenceEngine(Transformer(TINY, seed=seed), version=version(0), config=config, share_prefixes=share)


def codes(seed: int) -> dict[str, Tensor]:
    views = hf_views(Transformer(TINY, seed=seed))
    whole = {n: v.contiguous().view(torch.int32).numpy().view(np.uint32).ravel() for n, v in views.items()}
    return {n: Tensor("f32", tuple(v.shape), whole[n]) for n, v in views.items()}


def siblings(number: int, prompt: int, **fields: Any) -> list[CompletionRequest]:
    system = np.random.default_rng(0).integers(0, TINY.vocab_size, prompt)
    own = [np.random.default_rng(1 + i).integers(0, TINY.vocab_size, 5) for i in range(number)]
    return [ask(f"s{i}", np.concatenate([system, end]).astype(np.int32), 6, **fields) for i, end in enumerate(own)]


def told(done: Completion) -> tuple[list[int], list[float], bytes, int]:
    return done.token_ids.tolist(), done.logprobs.tolist(), done.routes.tobytes(), done.routes_start


def forest(draw: np.random.Generator, number: int) -> list[CompletionRequest]:
    """Requests whose prompts leave one another anywhere: each extends a part of an earlier one."""
    prompts = [np.zeros(0, np.int32)]
    requests = []
    for i in range(number):
        stem = prompts[draw.integers(len(prompts))]
        stem = stem[: draw.integers(len(stem) // 2, len(stem) + 1)]
        new = draw.integers(0, TINY.vocab_size, draw.integers(1, 120))
        prompts.append(np.concatenate([stem, new]).astype(np.int32)[:400])
        fields = {
            "keep_session": bool(draw.integers(2)),
            "routes_from": [0, None, len(prompts[-1]) // 2][draw.integers(3)],
            "traffic": Traffic.PRODUCTION if draw.random() < 0.15 else Traffic.ROLLOUT,
            "session": f"s{draw.integers(6)}",
        }
        requests.append(ask(f"r{i}", prompts[-1], int(draw.integers(1, 12)), **fields))
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_a_forest_of_prompts_with_cancellations_and_a_swap_gets_the_results_of_an_engine_that_computes_all(
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    requests = forest(draw, 24)
    leaving = {int(i) for i in draw.choice(24, 4, replace=False)}

    async def together() -> list[Completion | None]:
        async with serving() as engine:
            work: list[asyncio.Task[Completion]] = []
            for i, request in enumerate(requests):
                work.append(asyncio.create_task(engine.generate(request)))
                if i == 14:  # the same bytes as another version: what is in flight keeps its results too
                    engine.swap(everything(engine._runner.model, codes(1), 1))
                if draw.random() < 0.5:
                    await asyncio.sleep(float(draw.random()) * 0.02)
                if i in leaving:
                    work[int(draw.integers(len(work)))].cancel()
            done = await asyncio.gather(*work, return_exceptions=True)
            assert engine.counters.cached_requests > 0
            while (await engine.info()).num_running:  # noqa: ASYNC110 - cancelled ones leave at the next step
                await asyncio.sleep(0)
            info = await engine.info()
            assert info.kv_tokens_free == 4 * 512, "no slot is lost"
            return [one if isinstance(one, Completion) else None for one in done]

    async def alone() -> list[Completion]:
        async with serving(share=False) as engine:
            done = [await engine.generate(request) for request in requests]
            assert engine.counters.cached_tokens == 0
            return done

    for one, expected in zip(asyncio.run(together()), asyncio.run(alone()), strict=True):
        assert one is None or told(one) == told(expected)


def test_sixteen_siblings_at_once_compute_their_prompt_once_and_all_get_its_routes() -> None:
    requests = siblings(16, 200)

    async def story(share: bool) -> tuple[list[Completion], int, int]:
        async with serving(share=share, max_sequences=16) as engine:
            done = await asyncio.gather(*map(engine.generate, requests))
            return done, engine.counters.prefill_tokens, engine.counters.cached_requests

    (shared, computed, hits), (whole, all_tokens, _) = asyncio.run(story(True)), asyncio.run(story(False))
    assert list(map(told, shared)) == list(map(told, whole))
    assert (computed, all_tokens, hits) == (200 + 16 * 5, 16 * 205, 15)
    assert sorted(one.num_cached for one in shared) == [0, *[200] * 15]
    assert {len(one.routes) for one in shared} == {210}


def test_siblings_with_fewer_slots_than_siblings_and_after_the_first_left_still_share() -> None:
    requests = siblings(9, 300, keep_session=False)

    async def story() -> None:
        async with serving(max_sequences=3) as engine:
            work = [asyncio.create_task(engine.generate(request)) for request in requests]
            while not engine.counters.prefill_tokens:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0)
            work[0].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work[0]
            await asyncio.gather(*work[1:])
            assert engine.counters.prefill_tokens <= 305 + 32 + 9 * 5

    asyncio.run(story())


def test_a_prefix_computed_by_another_version_is_not_reused() -> None:
    first, second = siblings(2, 100)

    async def story() -> None:
        async with serving() as engine, serving(2, share=False) as other:
            await engine.generate(first)
            await asyncio.wrap_future(engine.swap(everything(engine._runner.model, codes(2), 1)))
            done = await engine.generate(second)
            assert (done.num_cached, [s.kv_epoch for s in done.spans]) == (0, [0])
            assert told(done) == told(await other.generate(second))

    asyncio.run(story())
