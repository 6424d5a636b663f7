"""A gateway's engines that are lent to a run: the registry, the store and HTTP are real, the engines are scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.errors import InputError
from etude.harvest.config import LendConfig, PolicyKind
from etude.http_server import bind, run_http_server
from etude.inference import Fleet, HttpEngine
from etude.inference.app import build_app
from etude.inference.config import EngineConfig
from etude.inference.registry import Registry
from etude.inference.registry_client import FleetUpdater
from etude.inference.registry_messages import EngineRequirements, Roster
from etude.inference.registry_server import RegistryServer
from etude.loop.lending import Lender
from etude.loop.locations import poll_s
from etude.records.completion import Completion, CompletionRequest, Version
from etude.seams import BlobStore, EngineInfo
from etude.stores import open_store
from etude.testing import ScriptedEngine
from etude.weights import Channel, Tensor
from etude.weights.chain import branches
from etude.weights.chain.history import head
from etude.weights.chain.inspect import find

WANTED = EngineRequirements(
    model="{}",
    mode="exact",
    quantise="none",
    degree=1,
    dtype="float32",
    context_tokens=512,
    max_sequences=4,
    routes=True,
)


class Follows(ScriptedEngine):
    """An engine that has the version of the branch with its name at once."""

    config, trouble, alive, stalled_s = EngineConfig(), "", True, 0.0

    def __init__(self, store: BlobStore, name: str) -> None:
        super().__init__([], name=name)
        self._store = store

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        self.version = at(self._store, self.name)
        return await super().info()

    async def stream(self, request: CompletionRequest) -> AsyncIterator[list[int] | Completion]:
        yield await self.generate(request)

    async def end(self, request_id: str) -> None:
        """Nothing is streamed here."""

    async def hold(self, seconds: float) -> Version:
        return self.version

    async def metrics(self) -> str:
        return ""


def at(store: BlobStore, branch: str) -> Version:
    pointer = head(store, "policy", branch)
    assert pointer is not None, branch
    return pointer.head.version


def publish(store: BlobStore, step: int, parent: Version | None) -> Version:
    weights = {"w": Tensor("f32", (2,), np.array([step, 7], np.uint32))}
    return Channel(store).publish(weights, step=step, parent=parent, rollout_ids=[]).version


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(200):
            while not condition():  # noqa: ASYNC110  the state is elsewhere
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited for: {what}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of a run of which two versions are published. The branch `stable` is at the first."""
    store = open_store(tmp_path / "weights")
    first = publish(store, 1, None)
    publish(store, 2, first)
    branches.point(store, "policy", first, branch="stable")
    return tmp_path


def lender_of(place: Path, url: str, said: list[str]) -> Lender:
    config = LendConfig(registry=url, policy=PolicyKind.REACTIVE, target=0.25, lease_s=0.0, tick_s=0.2, silence_s=20.0)
    store = open_store(place / "weights")
    return Lender(config, place, store, branch="stable", poll_s=0.1, signer=None, report=said.append)


@contextlib.asynccontextmanager
async def registry() -> AsyncIterator[tuple[RegistryServer, str]]:
    server = RegistryServer(WANTED, token=None, registry=Registry(lease_s=4.0), interval_s=0.05)

    async def beat(_: Roster) -> dict[str, int]:
        return {}

    async with run_http_server(server.app, bind("127.0.0.1", 0), name="a registry") as url:
        watch = asyncio.create_task(server.watch(lambda *_: None, beat))
        try:
            yield server, url
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await server.close()


def test_idle_engines_follow_the_run_while_they_are_lent_and_production_otherwise(place: Path) -> None:
    async def story() -> None:
        store, said, production = open_store(place / "weights"), list[str](), Fleet({})
        async with registry() as (run, url), contextlib.AsyncExitStack() as stack:
            run.set_head(at(store, ""))
            lender = lender_of(place, url, said)
            stack.enter_context(lender.prepared())
            engines = dict[str, HttpEngine]()
            for name in lender.names:
                assert at(store, name) == at(store, "stable")
                app = build_app(Follows(store, name))
                served = run_http_server(app, bind("127.0.0.1", 0), name=name, grace_s=0)  # type: ignore[arg-type]
                engines[name] = HttpEngine(await stack.enter_async_context(served))
                stack.push_async_callback(engines[name].close)
                await lender.started(name, engines[name], production)
            rollouts = Fleet({})
            updater = FleetUpdater(rollouts)
            updating = asyncio.create_task(updater.poll_registry(url))
            async with lender.lending(production, engines, slots=4):
                await until(lambda: rollouts.engines, "the run has an engine")
                [lent], [kept] = rollouts.engines, production.engines
                assert at(store, lent) == at(store, "")
                third = publish(store, 3, at(store, ""))
                run.set_head(third)
                await until(lambda: at(store, lent) == third, "it follows the newest version")
                branches.point(store, "policy", second := at_step(store, 2), branch="stable")
                await until(lambda: at(store, kept) == second, "the other one follows the stable version")
                await lender.started(lent, engines[lent], production)  # its process was started again
                assert list(production.engines) == [kept]
                production._members[kept].num_production = 9
                await until(lambda: len(production.engines) == 2, "it is taken back when requests come")
                assert at(store, lent) == second
                await until(lambda: not rollouts.engines, "it has left the run")
                production._members[kept].num_production = 0
                await until(lambda: rollouts.engines, "it is lent again")
            assert len(production.engines) == 2, "all are taken back at the end"
            assert all(at(store, name) == second for name in lender.names)
            updating.cancel()
            await updater.close()
        assert list(branches.list_branches(store, "policy")) == ["stable"], "none is left"
        assert sum("is lent, with" in line for line in said) == 2, said

    asyncio.run(story())


def at_step(store: BlobStore, step: int) -> Version:
    return find(store, str(step)).version


def test_two_gateways_do_not_lend_engines_of_one_run(place: Path) -> None:
    first, second = (lender_of(place, "http://127.0.0.1:1", []) for _ in range(2))
    with first.prepared(), pytest.raises(InputError, match="another process lends engines of"), second.prepared():
        pass
    with second.prepared():
        pass


def test_a_look_at_the_newest_version_is_one_request_and_a_bucket_is_asked_less_often(place: Path) -> None:
    class Counting:
        """A store that counts what is read."""

        def __init__(self) -> None:
            self.store, self.asked = open_store(place / "weights"), list[str]()

        def get(self, key: str, *part: int) -> bytes:
            self.asked.append(key)
            return self.store.get(key, *part)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    newest = at(open_store(place / "weights"), "")
    for branch, number in (("", 1), ("stable", 2)):
        counting, one = Counting(), lender_of(place, "http://127.0.0.1:1", [])
        one._store, one._branch = counting, branch  # type: ignore[assignment]
        assert one._read()[1] == newest
        assert len(counting.asked) == number, counting.asked
    assert poll_s("s3://bucket/prefix/weights") > poll_s(place)
