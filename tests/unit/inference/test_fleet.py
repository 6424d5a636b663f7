"""Fleets: choice of engines, retries, and deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection

import pytest
from tests.clock import run_at_once

from etude.errors import ContextFull, EngineBehind, EngineError
from etude.inference import Assignment, EngineBusy, EngineGone, Fleet
from etude.inference.fleet import MAX_LOST
from etude.inference.fleet_members import FORGET_S
from etude.inference.registry_messages import ListedEngine, State
from etude.records import Completion, CompletionRequest
from etude.records.completion import Traffic, Version
from etude.seams import EngineInfo, Policy
from etude.testing import ScriptedEngine, make_version

from .helpers import ask


class Member(ScriptedEngine):
    """A fake engine that samples only 7, and can be set to be gone, busy, or to hang."""

    def __init__(self, name: str, *, step: int = 0) -> None:
        super().__init__(iter(lambda: [7], None), name=name, step=step)
        self.gone = self.busy = self.hangs = self.adopts = False
        self.num_adopts = 0

    async def generate(self, request: CompletionRequest) -> Completion:
        if self.gone:
            raise EngineGone(f"{self.name} is gone", hint="restart it")
        if self.busy:
            raise EngineBusy(f"{self.name} is full", hint="later")
        if self.hangs:
            await asyncio.Event().wait()
        return await super().generate(request)

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        if self.hangs or self.gone:
            raise EngineGone(f"{self.name} is gone", hint="restart it")
        return await super().info()


def fleet(number: int = 3, **settings: object) -> tuple[Fleet, dict[str, Member]]:
    members = {f"engine-{i}": Member(f"engine-{i}") for i in range(number)}
    return Fleet(members, **settings), members  # type: ignore[arg-type]


async def waiting(members: Collection[Member], number: int) -> list[int]:
    """The numbers of requests that wait at each, once there are so many in all."""
    async with asyncio.timeout(60):
        while sum(found := [(await one.info()).num_waiting for one in members]) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def served_by(policy: Policy, *names: str, **fields: object) -> list[str]:
    return [(await policy.complete(ask(name, **fields))).engine for name in names]


def test_a_session_stays_with_its_engine_until_its_last_call() -> None:
    async def story() -> None:
        policy, _ = fleet()
        first = await served_by(policy, "a")
        assert await served_by(policy, "b", "c", "d", session="a") == first * 3

    asyncio.run(story())


def test_new_sessions_go_to_the_engine_with_the_least_work() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        for member in members.values():
            await member.pause()
        tasks = [asyncio.ensure_future(policy.complete(ask(f"r{i}"))) for i in range(6)]
        await asyncio.sleep(0.01)
        assert await waiting(members.values(), 6) == [3, 3]
        for member in members.values():
            await member.resume()
        await asyncio.gather(*tasks)

    asyncio.run(story())


def test_a_stable_assignment_is_the_same_in_any_order_and_shares_an_engine_in_a_group() -> None:
    async def assign(sessions: list[str]) -> dict[str, str]:
        policy, _ = fleet(assignment=Assignment.STABLE)
        return {s: (await served_by(policy, "r", session=s))[0] for s in sessions}

    sessions = [f"g{g:06d}.{i}/0" for g in range(12) for i in range(2)]
    forward, backward = asyncio.run(assign(sessions)), asyncio.run(assign(sessions[::-1]))
    assert forward == backward
    assert len(set(forward.values())) == 3
    assert all(forward[f"g{g:06d}.0/0"] == forward[f"g{g:06d}.1/0"] for g in range(12))


def test_the_work_of_a_dead_engine_is_done_elsewhere_under_the_same_id() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        home = (await served_by(policy, "a"))[0]
        members[home].gone = True
        done = await policy.complete(ask("b", session="a"))
        assert done.engine != home
        assert members[done.engine].requests[-1].request_id == "b"

    asyncio.run(story())


def test_an_engine_that_holds_a_request_and_does_not_answer_loses_it() -> None:
    async def story() -> None:
        policy, members = fleet(2, heartbeat_s=0.01)
        members["engine-0"].hangs = True
        assert await served_by(policy, "a", "b") == ["engine-1", "engine-1"]

    asyncio.run(story())


class Slow(Member):
    """Ends its request while its health is checked, and fails the check."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.checked, self.ended = asyncio.Event(), asyncio.Event()

    async def generate(self, request: CompletionRequest) -> Completion:
        await self.checked.wait()
        done = await super().generate(request)
        self.ended.set()
        return done

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        self.checked.set()
        await self.ended.wait()
        raise EngineError("too slow", hint="wait")


def test_a_completion_that_ends_during_a_failed_health_check_is_not_lost() -> None:
    async def story() -> None:
        engine = Slow("engine-0")
        done = await Fleet({"engine-0": engine}, heartbeat_s=5.0).complete(ask("a"))
        assert done.engine == "engine-0"
        assert [one.request_id for one in engine.requests] == ["a"]

    run_at_once(story())


def test_with_every_engine_gone_a_restarted_one_serves_at_its_new_address() -> None:
    async def story() -> None:
        policy, members = fleet(1)
        members["engine-0"].gone = True
        task = asyncio.ensure_future(policy.complete(ask("a")))
        await asyncio.sleep(0)
        policy.add("engine-0", Member("engine-0"))
        assert (await task).engine == "engine-0"

    asyncio.run(story())


def test_at_the_deadline_the_error_names_every_engine_with_its_reason() -> None:
    async def story() -> None:
        policy, members = fleet(2, patience_s=0.1)
        members["engine-0"].gone = members["engine-1"].busy = True
        with pytest.raises(EngineError) as error:
            await policy.complete(ask("a", deadline_s=0.2))
        assert "no engine served request a within 0.2 s" in str(error.value)
        assert "engine-0: engine-0 is gone" in str(error.value)
        assert "engine-1: engine-1 is full" in str(error.value)

    asyncio.run(story())


def test_an_empty_fleet_waits_for_an_engine_and_says_so() -> None:
    with pytest.raises(EngineError, match="the fleet has no engines"):
        asyncio.run(fleet(0, patience_s=0.05)[0].complete(ask("a", deadline_s=0.05)))


def test_a_busy_engine_is_asked_again_and_a_free_one_meanwhile() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        members["engine-0"].busy = True
        assert await served_by(policy, "a") == ["engine-1"]
        members["engine-1"].busy = True
        task = asyncio.ensure_future(policy.complete(ask("b")))
        await asyncio.sleep(0)
        members["engine-0"].busy = False
        assert (await task).engine == "engine-0"

    asyncio.run(story())


def test_work_for_a_later_version_goes_to_an_engine_that_holds_it() -> None:
    async def story() -> None:
        policy, members = fleet(3)
        members["engine-2"].version = make_version(5)
        assert await served_by(policy, "a", min_step=5) == ["engine-2"]
        assert members["engine-0"].version.step == 0

    asyncio.run(story())


def test_when_nobody_holds_it_a_stable_assignment_waits_for_its_engine() -> None:
    async def story() -> None:
        policy, members = fleet(2, assignment=Assignment.STABLE)
        done = await policy.complete(ask("a", min_step=5))
        assert done.spans[0].version.step == 5
        assert sorted(m.version.step for m in members.values()) == [0, 5]

    asyncio.run(story())


def test_when_nobody_holds_it_the_first_to_catch_up_serves_it() -> None:
    class Slow(Member):
        async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
            self.num_adopts += 1
            await asyncio.Event().wait()
            return self.version

    async def story() -> None:
        members = {"a-slow": Slow("a-slow"), "quick": Member("quick"), "z-slow": Slow("z-slow")}
        policy = Fleet(members)
        for done in await asyncio.gather(*(policy.complete(ask(f"r{i}", min_step=5)) for i in range(8))):
            assert (done.engine, done.spans[0].version.step) == ("quick", 5)
        assert [members[name].num_adopts for name in ("a-slow", "z-slow")] == [1, 1], "whoever waits, it is asked once"

    asyncio.run(story())


class Distant(Member):
    """A fake engine that takes a given time to adopt a version, or to restart."""

    takes_s = 600.0

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(self.takes_s)
        except TimeoutError:
            self.takes_s -= deadline_s
            raise EngineError(f"{self.name} did not reach step {min_step}", hint="later") from None
        return await super().adopt(min_step, deadline_s=deadline_s)


def test_an_engine_that_comes_up_to_its_version_in_ten_minutes_serves_what_waits_however_short_its_deadline() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        began, engine = loop.time(), Distant("far")
        done = await Fleet({"far": engine}).complete(ask("a", min_step=5, deadline_s=1.0))
        assert done.spans[0].version.step == 5
        assert loop.time() - began >= 600.0
        assert engine.requests[-1].deadline_s == pytest.approx(1.0, abs=0.01), "all of it is left to sample in"

    run_at_once(story())


def test_an_engine_that_takes_ten_minutes_to_come_back_serves_what_waits() -> None:
    async def story() -> None:
        engine = Member("far")
        engine.gone = True
        asyncio.get_running_loop().call_later(600.0, setattr, engine, "gone", False)
        assert (await Fleet({"far": engine}).complete(ask("a", deadline_s=1.0))).engine == "far"

    run_at_once(story())


def test_an_engine_that_never_comes_up_is_named_after_the_patience_as_behind() -> None:
    async def story() -> None:
        engine, loop = Distant("far"), asyncio.get_running_loop()
        engine.takes_s, began = float("inf"), loop.time()
        with pytest.raises(EngineBehind, match=r"(?s)far: far .*; 900 s of waiting were not"):
            await Fleet({"far": engine}, patience_s=900.0).complete(ask("a", min_step=5, deadline_s=10.0))
        assert 900.0 <= loop.time() - began < 1000.0

    run_at_once(story())


def test_a_long_completion_whose_engine_dies_is_sampled_again_elsewhere_and_at_last_given_up() -> None:
    class Dies(Member):
        async def generate(self, request: CompletionRequest) -> Completion:
            self.requests.append(request)
            await asyncio.sleep(3600.0)
            raise EngineGone(f"{self.name} is gone", hint="restart it")

    async def story() -> None:
        engines = {"a-dies": Dies("a-dies"), "lives": Member("lives")}
        assert (await Fleet(engines).complete(ask("a", deadline_s=60.0))).engine == "lives"
        poisoned = Dies("a-dies")
        with pytest.raises(EngineGone):
            await Fleet({"a-dies": poisoned}).complete(ask("a", deadline_s=60.0))
        assert len(poisoned.requests) == MAX_LOST

    run_at_once(story())


def test_an_engine_that_refuses_a_request_for_a_reason_of_its_own_is_asked_no_longer_than_its_deadline() -> None:
    class Fails(Member):
        async def generate(self, request: CompletionRequest) -> Completion:
            raise EngineError(f"{self.name} has no memory", hint="see its log")

    async def story() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(EngineError, match="has no memory"):
            await Fleet({"fails": Fails("fails")}).complete(ask("a", deadline_s=60.0))
        assert 60.0 <= loop.time() - began < 65.0

    run_at_once(story())


def test_a_pinned_version_that_every_engine_has_left_behind_is_refused_at_once() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        for member in members.values():
            member.version = make_version(5)
        with pytest.raises(EngineBehind):
            await policy.complete(ask("a", pin_step=3, deadline_s=60.0))
        assert await served_by(policy, "b", pin_step=5) == ["engine-0"]

    asyncio.run(story())


def test_what_no_engine_could_serve_is_not_tried_twice() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        with pytest.raises(ContextFull):
            await policy.complete(ask("a", 5000))
        assert not any(m.requests for m in members.values())

    asyncio.run(story())


def test_a_removed_engine_gets_nothing_new() -> None:
    async def story() -> None:
        policy, _ = fleet(2)
        policy.remove("engine-0")
        policy.remove("engine-0")
        assert set(await served_by(policy, *"abcd")) == {"engine-1"}

    asyncio.run(story())


def test_a_caller_that_goes_away_takes_its_request_along() -> None:
    async def story() -> None:
        policy, members = fleet(1)
        await members["engine-0"].pause()
        task = asyncio.ensure_future(policy.complete(ask("a")))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert (await members["engine-0"].info()).num_waiting == 0

    asyncio.run(story())


def test_a_fleet_is_a_policy() -> None:
    made: Callable[[], Policy] = lambda: fleet()[0]  # noqa: E731 - the annotation is the test
    assert isinstance(made(), Policy)


class StreamingMember(Member):
    """A fake engine that streams [7] and then fails if set to."""

    breaks = False

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        completion = await self.generate(request)
        yield [7]
        if self.breaks:
            raise EngineGone(f"{self.name} broke off", hint="ask again")
        yield completion


def test_a_stream_goes_to_another_engine_before_its_first_token_and_fails_after_it() -> None:
    async def story() -> None:
        members = {f"engine-{i}": StreamingMember(f"engine-{i}") for i in range(2)}
        policy = Fleet(members)
        members["engine-0"].gone = True
        parts = [part async for part in policy.stream(ask("a", max_tokens=1))]
        assert parts[0] == [7]
        assert isinstance(parts[1], Completion)
        assert parts[1].engine == "engine-1"
        members["engine-1"].breaks = True
        broken = policy.stream(ask("b", max_tokens=1, session="a"))
        assert await anext(broken) == [7]
        with pytest.raises(EngineGone, match="broke off"):
            await anext(broken)

    asyncio.run(story())


class Endless(Member):
    """A fake engine that streams [7] until the request is ended."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ended: list[str] = []

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        number = 0
        while request.request_id not in self.ended:
            number += 1
            yield [7]
        yield self.completion(request, [7] * number)

    async def end(self, request_id: str) -> None:
        self.ended.append(request_id)


def test_a_request_is_ended_at_the_engine_that_streams_it() -> None:
    async def story() -> None:
        members = [Endless(f"engine-{i}") for i in range(2)]
        policy = Fleet({member.name: member for member in members})
        streams = [policy.stream(ask(name)) for name in "ab"]
        for parts in streams:
            assert await anext(parts) == [7]
        await policy.end("b")
        assert await anext(streams[0]) == [7]
        done = await anext(streams[1])
        assert isinstance(done, Completion)
        assert len(done.token_ids) == 1
        assert sorted(member.ended for member in members) == [[], ["b"]]
        for parts in streams:
            await parts.aclose()
        await policy.end("a")  # it has ended, and is unknown
        assert sorted(member.ended for member in members) == [[], ["b"]]

    asyncio.run(story())


def test_an_engine_that_cannot_stream_tells_everything_at_once() -> None:
    async def story() -> None:
        policy, _ = fleet()
        first, last = [part async for part in policy.stream(ask("a", max_tokens=1))]
        assert first == [7]
        assert isinstance(last, Completion)

    asyncio.run(story())


def listed(state: State = State.SERVING, **facts: object) -> ListedEngine:
    return ListedEngine(url="http://e", state=state, **facts)  # type: ignore[arg-type]


def test_a_drained_engine_keeps_its_sessions_and_gets_no_new_ones() -> None:
    async def story() -> None:
        policy, _ = fleet(2)
        home = (await served_by(policy, "a"))[0]
        policy.update(home, listed(State.DRAINING))
        other = {"engine-0": "engine-1", "engine-1": "engine-0"}[home]
        assert await served_by(policy, "b", session="a") == [home]
        assert await served_by(policy, "c", "d", "e") == [other] * 3
        assert policy.sessions() == {home: 1, other: 3}
        policy.forget("a")
        assert home not in policy.sessions()

    asyncio.run(story())


def test_free_kv_tokens_bound_what_an_engine_is_given_until_it_is_told_of_again() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        for member in members.values():
            await member.pause()
        policy.update("engine-0", listed(kv_tokens_free=18))  # a request here is of 10 and at most 8 tokens
        policy.update("engine-1", listed(kv_tokens_free=3 * 18))
        tasks = [asyncio.ensure_future(policy.complete(ask(f"r{i}"))) for i in range(6)]
        await asyncio.sleep(0.01)
        assert await waiting(members.values(), 4) == [1, 3], "two wait for room"
        first = ask("production", traffic=Traffic.PRODUCTION)
        tasks.append(asyncio.ensure_future(policy.complete(first)))
        await asyncio.sleep(0.01)
        assert await waiting(members.values(), 5) == [2, 3], "production is held back by no bound"
        policy.update("engine-0", listed(kv_tokens_free=18))
        for member in members.values():
            await member.resume()
        assert {c.request_id for c in await asyncio.gather(*tasks)} == {*(f"r{i}" for i in range(6)), "production"}

    asyncio.run(story())


def test_siblings_stay_in_the_region_of_their_group_while_it_has_room() -> None:
    async def story() -> None:
        policy, members = fleet(4)
        for i in range(4):
            policy.update(f"engine-{i}", listed(region="north" if i < 2 else "south"))
        for member in members.values():
            await member.pause()
        asking = [asyncio.ensure_future(policy.complete(ask(f"g{i % 3}.{i}/0"))) for i in range(24)]
        await asyncio.sleep(0.01)
        for member in members.values():
            await member.resume()
        regions: dict[str, set[str]] = {}
        for done in await asyncio.gather(*asking):
            region = "north" if done.engine in ("engine-0", "engine-1") else "south"
            regions.setdefault(done.request_id.partition(".")[0], set()).add(region)
        assert sorted(map(len, regions.values())) == [1, 1, 1]
        assert set.union(*regions.values()) == {"north", "south"}
        for name in ("engine-0", "engine-1"):
            members[name].gone = True
        served = await served_by(policy, "g7.0/0", "g7.1/0", session="x")
        assert set(served) <= {"engine-2", "engine-3"}

    asyncio.run(story())


def test_a_new_session_goes_rather_to_an_engine_that_needs_not_catch_up() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        members["engine-1"] = Member("engine-1", step=5)
        policy.add("engine-1", members["engine-1"])
        policy.update("engine-0", listed(step=0))
        policy.update("engine-1", listed(step=5))
        assert await served_by(policy, "a", "b", min_step=5) == ["engine-1"] * 2
        assert not members["engine-0"].requests

    asyncio.run(story())


def test_a_region_far_away_gets_fewer_sessions_than_one_that_is_near() -> None:
    class Far(Member):
        async def generate(self, request: CompletionRequest) -> Completion:
            await asyncio.sleep(0.05)
            return await super().generate(request)

    async def story() -> None:
        near, far = Member("near"), Far("far")
        policy = Fleet({"near": near, "far": far})
        for name in ("near", "far"):
            policy.update(name, listed(region=name, max_sequences=8))
        await served_by(policy, "a", "b", "c", "d", session="home")
        await asyncio.gather(*(policy.complete(ask(f"first{i}")) for i in range(4)))
        await near.pause()
        asking = [asyncio.ensure_future(policy.complete(ask(f"r{i}"))) for i in range(20)]
        await asyncio.sleep(0.01)
        assert await waiting([near], 16)
        await near.resume()
        assert len({c.request_id for c in await asyncio.gather(*asking)}) == 20

    asyncio.run(story())


def regions(**paces: float) -> tuple[Fleet, dict[str, Member]]:
    """A fleet with one member per region, with known seconds per request if given."""
    members = {name: Member(name) for name in paces}
    policy = Fleet(members)
    for name, seconds in paces.items():
        policy.update(name, listed(region=name, max_sequences=64))
        seen(policy, name, alone=seconds)
    return policy, members


def seen(policy: Fleet, name: str, *, alone: float = 0.0, each: float = 0.0, ago_s: float = 0.0) -> None:
    now = time.monotonic() - ago_s
    for crowd in [1, 8, 24] * 20 if alone or each else []:
        policy._members[name].pace.served(alone + each * crowd, crowd, now=now)


def test_a_rollouts_session_leaves_a_region_where_it_takes_twice_as_long_and_a_persons_stays() -> None:
    async def story() -> None:
        policy, members = regions(far=0.2, near=0.0)
        members["near"].busy = True
        assert await served_by(policy, "a", session="rollout") == ["far"]
        assert await served_by(policy, "a", session="person", traffic=Traffic.PRODUCTION) == ["far"]
        members["near"].busy = False
        assert await served_by(policy, "b", session="rollout") == ["far"], "nobody knows how quick the other is"
        seen(policy, "near", alone=0.15)
        assert await served_by(policy, "c", session="rollout") == ["far"], "its KV is there"
        policy, members = regions(far=0.2, near=0.05)
        members["near"].busy = True
        assert await served_by(policy, "a", session="rollout") == ["far"]
        members["near"].busy = False
        assert await served_by(policy, "b", "c", session="rollout") == ["near", "near"]
        assert policy.sessions() == {"near": 1}

    asyncio.run(story())


def test_an_engine_of_unknown_pace_is_tried_with_a_few_requests() -> None:
    async def story() -> None:
        policy, members = regions(known=0.2, new=0.0)
        for member in members.values():
            await member.pause()
        asking = [asyncio.ensure_future(policy.complete(ask(f"r{i}"))) for i in range(20)]
        await asyncio.sleep(0.01)
        assert await waiting(members.values(), 20) == [12, 8]
        for member in members.values():
            await member.resume()
        await asyncio.gather(*asking)

    asyncio.run(story())


def test_an_engine_that_was_slow_is_tried_again_after_a_while() -> None:
    async def story() -> None:
        policy, _ = regions(near=0.1, slow=0.0)
        seen(policy, "slow", alone=5.0, ago_s=FORGET_S / 2)
        assert await served_by(policy, "a") == ["near"]
        policy, _ = regions(near=0.1, slow=0.0)
        seen(policy, "slow", alone=5.0, ago_s=FORGET_S)
        assert await served_by(policy, "a", "b") == ["slow", "slow"], "it is quick by now"

    asyncio.run(story())


def test_a_slow_region_gets_the_requests_that_it_finishes_in_the_time_of_the_others() -> None:
    async def story() -> None:
        policy, members = regions(far=0.0, near=0.0)
        seen(policy, "near", each=0.01)
        seen(policy, "far", alone=0.2, each=0.001)
        for member in members.values():
            await member.pause()
        asking = [asyncio.ensure_future(policy.complete(ask(f"r{i}"))) for i in range(48)]
        await asyncio.sleep(0.01)
        assert await waiting(members.values(), 48) == [26, 22], "0.22 s in each"
        for member in members.values():
            await member.resume()
        await asyncio.gather(*asking)

    asyncio.run(story())


def test_a_fork_goes_to_the_engine_of_the_session_that_it_leaves_while_that_takes_new_ones() -> None:
    async def story() -> None:
        policy, members = fleet(2)
        members["engine-0"].busy = True
        assert await served_by(policy, "a") == ["engine-1"]
        members["engine-0"].busy = False
        assert await served_by(policy, "b") == ["engine-0"]
        assert await served_by(policy, "a+1", fork_from="a") == ["engine-1"]
        policy.update("engine-1", listed(State.DRAINING))
        assert await served_by(policy, "a+2", fork_from="a") == ["engine-0"]
        assert await served_by(policy, "more", session="a+1") == ["engine-1"]
        policy.forget("a")
        assert policy.sessions() == {"engine-0": 1}  # of "b"

    asyncio.run(story())
