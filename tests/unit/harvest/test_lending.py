"""Engines that are lent to rollouts and taken back: reference engines, with production in a fleet beside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.unit.inference.helpers import TINY, ask, engine, everything, version

from etude.errors import DeadlineExceeded, EngineError
from etude.harvest import Lease
from etude.harvest.harvester import Harvester
from etude.harvest.pool import LentEngines, NotLent
from etude.inference import Fleet
from etude.inference.engine import ReferenceEngine
from etude.models import Transformer, hf_views
from etude.records import Completion, Version
from etude.records.completion import Traffic
from etude.weights import Tensor

STABLE, NEWEST = version(1), version(2)


def weights(seed: int) -> dict[str, Tensor]:
    model = Transformer(TINY, seed=seed)
    whole = {n: v.view(torch.int32).numpy().view(np.uint32).ravel().copy() for n, v in hf_views(model).items()}
    return {n: Tensor("f32", tuple(v.shape), whole[n]) for n, v in hf_views(model).items()}


@dataclass
class Place:
    """Two engines with version 1: both serve production."""

    engines: dict[str, ReferenceEngine]
    production: Fleet
    rollouts: LentEngines
    harvester: Harvester


@contextlib.asynccontextmanager
async def place(**settings: float) -> AsyncIterator[Place]:
    models = {name: Transformer(TINY, seed=1) for name in ("a", "b")}
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(engine(model, step=1, max_sequences=2))
            for name, model in models.items()
        }

        async def move(name: str, to: Version) -> None:
            if to in (STABLE, NEWEST):
                swap = everything(models[name], weights(1 if to == STABLE else 2), to.step)
                await asyncio.wrap_future(engines[name].swap(swap))

        production, rollouts = Fleet(engines), LentEngines(patience_s=30.0)
        yield Place(engines, production, rollouts, Harvester(production, rollouts, engines, move, **settings))


async def has_tokens(served: ReferenceEngine, number: int) -> None:
    while served.counters.tokens < number:  # noqa: ASYNC110  the state is the thread's
        await asyncio.sleep(0)


def same(one: Completion, other: Completion) -> None:
    for part in ("token_ids", "logprobs", "routes"):
        assert np.array_equal(getattr(one, part), getattr(other, part)), part
    assert (one.spans, one.stop_reason, one.routes_start) == (other.spans, other.stop_reason, other.routes_start)


def test_rollouts_whose_engine_is_taken_go_on_at_another_with_no_token_sampled_twice() -> None:
    requests = [ask(f"r{i}", 20, 200) for i in range(3)]

    async def story() -> None:
        async with place() as here:
            alone = [await here.engines["a"].generate(one) for one in requests]
            before = here.engines["a"].counters.tokens
            here.rollouts.add("a", here.engines["a"])
            working = [asyncio.ensure_future(here.rollouts.complete(one)) for one in requests]
            await has_tokens(here.engines["a"], before + 20)
            here.rollouts.add("b", here.engines["b"])
            await here.rollouts.take("a")
            assert not any(one.done() for one in working)
            assert (await here.engines["a"].info()).num_running == 0
            for one, other in zip(alone, await asyncio.gather(*working), strict=True):
                same(one, other)
            sampled = sum(one.counters.tokens for one in here.engines.values()) - before
            assert sampled == 3 * 200
            assert here.rollouts.num_lost_tokens == 0 < here.rollouts.num_resumed_tokens

    asyncio.run(story())


def test_without_an_engine_a_rollout_waits_and_then_returns_what_it_has_in_a_typed_error() -> None:
    async def story() -> None:
        async with place() as here:
            rollouts = LentEngines(patience_s=0.2)
            rollouts.add("a", here.engines["a"])
            request = ask("r", 20, 400)
            working = asyncio.ensure_future(rollouts.complete(request))
            await has_tokens(here.engines["a"], 10)
            await rollouts.take("a")
            with pytest.raises(NotLent, match="no engine was lent for request r") as caught:
                await working
            partial = caught.value.partial
            assert partial is not None
            assert len(partial.token_ids) == here.engines["a"].counters.tokens >= 10

    asyncio.run(story())


def test_an_engine_is_lent_with_another_version_and_comes_back_while_rollouts_keep_their_tokens() -> None:
    async def story() -> None:
        async with place() as here:
            await here.harvester.lend("b", NEWEST)
            assert here.harvester.leases.states["b"] is Lease.LENT
            assert list(here.production.load()) == ["a"]
            working = asyncio.ensure_future(here.rollouts.complete(ask("r", 20, 300, min_step=2)))
            await has_tokens(here.engines["b"], 20)
            await here.harvester.take_back("b", STABLE)
            assert here.engines["b"].version == STABLE
            assert sorted(here.production.load()) == ["a", "b"]
            assert not working.done()
            await here.harvester.lend("b", NEWEST)
            done = await working
            assert len(done.token_ids) == 300
            assert [one.version for one in done.spans] == [NEWEST]
            assert here.engines["b"].counters.tokens == 300
            assert len(here.harvester.served_s) == 1

    asyncio.run(story())


def test_production_of_an_engine_that_is_lent_ends_under_its_version_and_new_requests_go_elsewhere() -> None:
    async def story() -> None:
        async with place() as here:
            asked = [ask(f"p{i}", 20, 100, traffic=Traffic.PRODUCTION) for i in range(4)]
            working = [asyncio.ensure_future(here.production.complete(one)) for one in asked]
            await has_tokens(here.engines["b"], 10)
            lending = asyncio.ensure_future(here.harvester.lend("b", NEWEST))
            await asyncio.sleep(0)
            later = await here.production.complete(ask("later", 10, 4, traffic=Traffic.PRODUCTION))
            await lending
            for one in await asyncio.gather(*working):
                assert [span.version for span in one.spans] == [STABLE]
            assert later.engine == "engine"
            assert (
                here.engines["a"].counters.production_requests + here.engines["b"].counters.production_requests
                == len(asked) + 1
            )

    asyncio.run(story())


def test_an_engine_that_cannot_be_drained_in_time_serves_production_as_before() -> None:
    async def story() -> None:
        async with place(drain_s=0.05) as here:
            await here.engines["b"].pause()
            working = [
                asyncio.ensure_future(here.production.complete(ask(f"p{i}", 10, 4, traffic=Traffic.PRODUCTION)))
                for i in range(2)
            ]
            await asyncio.sleep(0)
            with pytest.raises(DeadlineExceeded, match="b was not drained"):
                await here.harvester.lend("b", NEWEST)
            assert here.harvester.leases.states["b"] is Lease.SERVING
            assert "b" in here.production.load(), "it gets requests again"
            await here.engines["b"].resume()
            await asyncio.gather(*working)
            await here.harvester.lend("a", NEWEST)
            with pytest.raises(EngineError, match="must stay"):
                await here.harvester.lend("b", NEWEST)

    asyncio.run(story())


def test_a_version_that_is_not_loaded_ends_the_wait_and_the_engine_can_be_taken_back() -> None:
    async def story() -> None:
        async with place(load_s=0.1) as here:
            with pytest.raises(DeadlineExceeded, match="b did not load v000009"):
                await here.harvester.lend("b", version(9))
            assert here.rollouts.names == []
            await here.harvester.take_back("b", STABLE)
            assert sorted(here.production.load()) == ["a", "b"]

    asyncio.run(story())


def test_a_policy_is_followed_and_all_engines_serve_production_after_its_end() -> None:
    class Twice:
        def __init__(self) -> None:
            self.asked: list[float] = []

        def away(self, time_s: float, load: float, away: int) -> int:
            self.asked.append(load)
            return 1 if len(self.asked) < 4 else 0

    async def story() -> None:
        async with place() as here:
            policy = Twice()
            following = asyncio.ensure_future(
                here.harvester.follow(
                    policy, stable=lambda: STABLE, newest=lambda: NEWEST, time_s=lambda: 0.0, tick_s=0.05
                )
            )
            lent = False
            async with asyncio.timeout(60):
                while not here.harvester.served_s:
                    lent = lent or Lease.LENT in here.harvester.leases.states.values()
                    await asyncio.sleep(0.001)
            assert lent
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            assert set(here.harvester.leases.states.values()) == {Lease.SERVING}
            assert {one.version for one in here.engines.values()} == {STABLE}

    asyncio.run(story())
