"""Engines of production that are lent to a run by its registry: a run of one engine, beside a fleet of production."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.inference.helpers import TINY, ask, engine, everything, version
from tests.unit.inference.test_registrar import WANTED, World, world

from etude.config import load
from etude.errors import ConfigError, EngineBehind
from etude.harvest.config import LendConfig
from etude.harvest.harvester import Harvester
from etude.harvest.leases import Lease
from etude.harvest.policies import Fixed
from etude.harvest.registered import RegisteredEngines
from etude.http_server import bind, run_http_server
from etude.inference import Fleet, HttpEngine
from etude.inference.app import build_app
from etude.inference.engine import ReferenceEngine
from etude.inference.registry_client import FleetUpdater
from etude.inference.registry_messages import State
from etude.models import Transformer, hf_views
from etude.records import Version
from etude.records.completion import Completion, StopReason, Traffic
from etude.weights import Tensor

STABLE, NEWEST = version(1), version(3)


def weights(seed: int) -> dict[str, Tensor]:
    model = Transformer(TINY, seed=seed)
    codes = {n: v.view(torch.int32).numpy().view(np.uint32).ravel().copy() for n, v in hf_views(model).items()}
    return {n: Tensor("f32", tuple(v.shape), codes[n]) for n, v in hf_views(model).items()}


@dataclass
class Site:
    """A run with the engine `own` of version 3, and two engines of production of version 1, served over HTTP."""

    run: World
    own: ReferenceEngine
    engines: dict[str, ReferenceEngine]
    clients: dict[str, HttpEngine]
    rollouts: Fleet  # what workers of the run send requests to
    production: Fleet
    lent: RegisteredEngines
    harvester: Harvester
    said: list[str]

    @property
    def tokens(self) -> int:
        return sum(one.counters.tokens for one in (self.own, *self.engines.values()))


@contextlib.asynccontextmanager
async def site(*, silence_s: float = 20.0, parity: str = "") -> AsyncIterator[Site]:
    models = {name: Transformer(TINY, seed=1) for name in ("a", "b")}
    wanted = msgspec.structs.replace(WANTED, parity=parity)
    async with contextlib.AsyncExitStack() as stack:
        home = await stack.enter_async_context(world(wanted, lease_s=60.0))  # none is lost on a busy machine
        home.registrar.set_head(NEWEST)
        newest = Transformer(TINY, seed=2)
        own = await stack.enter_async_context(engine(newest, step=3, max_sequences=4))
        engines, clients = dict[str, ReferenceEngine](), dict[str, HttpEngine]()
        for name, model in models.items():
            engines[name] = await stack.enter_async_context(engine(model, step=1, max_sequences=4))
            app = build_app(engines[name], token="t")
            served = run_http_server(app, bind("127.0.0.1", 0), name=name, grace_s=0)  # type: ignore[arg-type]
            clients[name] = HttpEngine(await stack.enter_async_context(served), token="t")
            stack.push_async_callback(clients[name].close)

        async def move(name: str, to: Version) -> None:
            if engines[name].version != to:
                swap = everything(models[name], weights(1 if to == STABLE else 2), to.step)
                await asyncio.wrap_future(engines[name].swap(swap))

        said = list[str]()
        rollouts = Fleet({"own": own})
        updater = FleetUpdater(rollouts, token="t")
        updating = asyncio.create_task(updater.poll_registry(home.url))
        lent = RegisteredEngines(home.url, token="t", silence_s=silence_s, report=said.append)
        watching = asyncio.create_task(lent.watch())
        production = Fleet(dict(clients))
        harvester = Harvester(production, lent, clients, move, report=said.append)
        try:
            yield Site(home, own, engines, clients, rollouts, production, lent, harvester, said)
        finally:
            for task in (updating, watching):
                task.cancel()
            for name in engines:
                await lent.take(name)
            await updater.close()


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(600):
            await story()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  the state is elsewhere
        await asyncio.sleep(0.005)


def test_a_run_uses_a_lent_engine_and_loses_no_token_when_production_takes_it_back() -> None:
    async def story() -> None:
        requests = [ask(f"r{i}.0", 20, 60, min_step=3) for i in range(6)]
        async with site() as here:
            alone = [await here.own.generate(one) for one in requests]
            before = here.tokens
            await here.harvester.lend("b", NEWEST)
            await until(lambda: "b" in here.rollouts.engines)
            assert list(here.production.load()) == ["a"]
            working = [asyncio.ensure_future(here.rollouts.complete(one)) for one in requests]
            await until(lambda: here.engines["b"].counters.tokens >= 30)
            asked = ask("p", 20, 5, traffic=Traffic.PRODUCTION)
            await here.harvester.take_back("b", STABLE)
            assert sorted(here.production.load()) == ["a", "b"]
            assert (await here.clients["b"].generate(asked)).spans[0].version == STABLE
            for one, other in zip(alone, await asyncio.gather(*working), strict=True):
                assert np.array_equal(one.token_ids, other.token_ids)
                assert np.array_equal(one.logprobs, other.logprobs)
                assert [span.version for span in other.spans] == [NEWEST]
            assert here.tokens - before == 6 * 60 + 5, "no token was sampled twice"
            assert here.engines["b"].counters.tokens > 30
            await until(lambda: ("b", State.LEFT) in here.run.told)

    play(story)


def test_a_streamed_rollout_goes_on_at_another_engine_when_its_engine_goes_back_to_an_older_version() -> None:
    async def story() -> None:
        model = Transformer(TINY, seed=2)
        request = ask("r", 20, 60, min_step=3)
        async with engine(model, step=3) as first, engine(Transformer(TINY, seed=2), step=3) as second:
            alone = await second.generate(request)
            before, fleet, ids = second.counters.tokens, Fleet({"first": first}), list[int]()
            # to wait until the first engine has the newer version again would take 60 s
            async with asyncio.timeout(30.0), contextlib.aclosing(fleet.stream(request)) as parts:
                async for part in parts:
                    if isinstance(part, Completion):
                        assert part.stop_reason is StopReason.LENGTH
                        assert np.array_equal(part.token_ids, alone.token_ids)
                        continue
                    ids += part
                    if "second" not in fleet.engines and len(ids) > 10:
                        fleet.add("second", second)
                        await asyncio.wrap_future(first.swap(everything(model, weights(1), 1)))
            assert ids == alone.token_ids.tolist()
            assert first.counters.tokens + second.counters.tokens - before == 60

    play(story)


def test_a_request_with_a_penalty_begins_again_elsewhere() -> None:
    async def story() -> None:
        model, request = Transformer(TINY, seed=2), ask("r", 20, 60, min_step=3)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, top_k=5))
        async with engine(model, step=3) as first, engine(Transformer(TINY, seed=2), step=3) as second:
            alone = await second.generate(request)
            fleet = Fleet({"first": first})
            working = asyncio.ensure_future(fleet.complete(request))
            await until(lambda: first.counters.tokens > 10)
            fleet.add("second", second)
            await asyncio.wrap_future(first.swap(everything(model, weights(1), 1)))
            assert np.array_equal((await working).token_ids, alone.token_ids)
            with pytest.raises(EngineBehind):
                await first.generate(request)

    play(story)


def test_a_run_that_ends_gives_its_engines_back_after_its_silence() -> None:
    async def story() -> None:
        async with site(silence_s=1.0) as here:
            await until(lambda: here.lent.wanted)
            number = lambda: 1 if here.lent.wanted else 0  # noqa: E731

            class WhileWanted:
                def away(self, time_s: float, load: float, away: int) -> int:
                    return number()

            following = asyncio.ensure_future(
                here.harvester.follow(
                    WhileWanted(), stable=lambda: STABLE, newest=lambda: NEWEST, time_s=lambda: 0.0, tick_s=0.1
                )
            )
            await until(lambda: here.harvester.leases.count(Lease.LENT))
            gone = "http://127.0.0.1:1"  # nobody answers there
            here.lent._registry = gone
            for registration, _ in here.lent._members.values():
                registration._registry = gone
            await until(lambda: here.harvester.leases.count(Lease.SERVING) == 2)
            assert all(one.version == STABLE for one in here.engines.values())
            assert not here.lent.wanted
            assert any(line.startswith("no run: no registry answers at ") for line in here.said)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    play(story)


def test_a_run_that_refuses_an_engine_is_lent_none_and_the_reason_is_told() -> None:
    async def story() -> None:
        async with site(parity="another host") as here:
            await until(lambda: here.lent.wanted)
            await here.harvester.lend("b", NEWEST)
            await until(lambda: not here.lent.wanted)
            assert any("does not compute the same bits as the learner" in line for line in here.said)
            await here.harvester.take_back("b", STABLE)
            assert sorted(here.production.load()) == ["a", "b"]

    play(story)


def test_an_engine_is_lent_for_a_short_time_only_to_a_run_whose_versions_it_does_not_get() -> None:
    async def story() -> None:
        async with asyncio.timeout(60.0), site(silence_s=1.0) as here:
            here.run.registrar.set_head(msgspec.structs.replace(NEWEST, incarnation="another run"))
            await until(lambda: here.lent.wanted)
            await here.harvester.lend("b", NEWEST)
            await until(lambda: any("the run gave b no work within 1 s" in line for line in here.said))
            assert not here.lent.wanted
            assert list(here.rollouts.engines) == ["own"]

    play(story)


def test_settings_of_lending_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "lend.toml"

    def of(text: str, registry: str = "http://127.0.0.1:8790") -> LendConfig:
        path.write_text(f'registry = "{registry}"\n{text}')
        return load(path, LendConfig)

    assert of("").make_policy(8).away(0.0, 0.0, 0) <= 1
    assert of('policy = "static"\nengines = 4\nmin_serving = 3').make_policy(8) == Fixed(1)
    reactive = of('policy = "reactive"\nengines = 4\nlease_s = 0.0\ntarget = 0.5').make_policy(8)
    assert [reactive.away(0.0, load, 0) for load in (0.0, 4.0, 8.5, 100.0)] == [3, 3, 1, 0]
    for text, says in (
        ("min_serving = 2", "leaves none of engines = 2 to be lent"),
        ("engines = 1", "engines = 1"),
        ("target = 0", "target = 0"),
        ("night = true", "night"),
        ('policy = "nightly"', "policy = 'nightly'"),
    ):
        with pytest.raises(ConfigError) as caught:
            of(text)
        assert says in str(caught.value)
        assert "hint: " in str(caught.value) or caught.value.hint
    for registry in ("nope", "127.0.0.1:8790", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match=f"registry = '{registry}' is not an http:// or https:// address"):
            of("", registry)
