"""Leases and states of the registry, with a fake clock."""

from __future__ import annotations

import msgspec
import pytest

from etude.errors import MalformedRequest
from etude.inference.errors import NotRegistered
from etude.inference.registry import MAX_MEMBERS, MAX_MISSED, Registry
from etude.inference.registry_messages import JoinRequest, State
from etude.records import Version
from etude.seams import EngineInfo

from .helpers import version


def info(name: str = "west", step: int | None = 3, **facts: int) -> EngineInfo:
    held = None if step is None else version(step)
    told = {"max_sequences": 8, "num_running": 0, "num_waiting": 0, "kv_tokens_free": 512, **facts}
    return EngineInfo(name=name, version=held, paused=False, context_tokens=64, capabilities=(), **told)


def join(registry: Registry, name: str = "west", *, now: float = 0.0, standby: bool = False) -> str:
    return registry.join(JoinRequest(name=name, url=f"http://{name}:1", standby=standby), now=now)


def serving(*names: str, standbys: tuple[str, ...] = ()) -> tuple[Registry, dict[str, str]]:
    """Members with the newest version."""
    registry = Registry(lease_s=10.0)
    registry.set_head(version(3))
    leases = {name: join(registry, name, standby=name in standbys) for name in (*names, *standbys)}
    for name in leases:
        registry.record_probe(name, info(name))
    return registry, leases


def test_a_lease_ends_unless_it_is_renewed_and_its_holder_joins_again() -> None:
    registry, leases = serving("west")
    assert registry.renew("west", leases["west"], now=9.0) is State.SERVING
    assert registry.states(now=18.9) == {"west": State.SERVING}
    assert registry.states(now=19.0) == {"west": State.LOST}
    with pytest.raises(NotRegistered, match="has expired"):
        registry.renew("west", leases["west"], now=19.0)
    again = join(registry, now=20.0)
    assert registry.states(now=20.0) == {"west": State.CATCHING_UP}, "it may have missed versions"
    with pytest.raises(NotRegistered, match="has another lease"):
        registry.renew("west", "lässt", now=20.0)
    with pytest.raises(NotRegistered, match="has another lease"):
        registry.renew("west", leases["west"], now=20.0)
    with pytest.raises(NotRegistered, match="does not know east"):
        registry.renew("east", again, now=20.0)
    registry.record_probe("west", info())
    assert registry.renew("west", again, now=21.0) is State.SERVING


def test_a_late_joiner_gets_work_once_it_holds_the_version_published_when_it_joined() -> None:
    registry = Registry()
    registry.set_head(version(5))
    join(registry)
    for step in (None, 4):
        registry.record_probe("west", info(step=step))
        assert registry.states(now=0.0) == {"west": State.CATCHING_UP}
    registry.set_head(version(6))
    registry.record_probe("west", info(step=5))
    assert registry.states(now=0.0) == {"west": State.SERVING}, "it does not chase what is published meanwhile"


def test_an_engine_that_joins_before_the_first_version_waits_for_it() -> None:
    registry = Registry()
    join(registry)
    registry.record_probe("west", info(step=0))
    assert registry.states(now=0.0) == {"west": State.CATCHING_UP}
    registry.set_head(version(0))
    assert registry.states(now=0.0) == {"west": State.SERVING}


def test_a_lost_lineages_weights_are_not_served_whatever_their_step() -> None:
    registry, _ = serving("west")
    mended = Version(step=2, incarnation="ffffffff", digest="0" * 64)
    registry.set_head(mended)
    assert registry.states(now=0.0) == {"west": State.CATCHING_UP}
    registry.record_probe("west", msgspec.structs.replace(info(), version=mended))
    assert registry.states(now=0.0) == {"west": State.SERVING}


def test_an_engine_that_does_not_respond_is_lost_and_catches_up_when_it_is_back() -> None:
    registry, _ = serving("west")
    for _ in range(MAX_MISSED):
        assert registry.states(now=0.0) == {"west": State.SERVING}
        registry.record_probe("west", None)
    assert registry.states(now=0.0) == {"west": State.LOST}
    registry.set_head(version(9))
    registry.record_probe("west", info(step=3))
    assert registry.states(now=0.0) == {"west": State.CATCHING_UP}
    registry.record_probe("west", info(step=9))
    assert registry.states(now=0.0) == {"west": State.SERVING}


def test_a_standby_stands_in_for_each_that_is_lost_and_for_none_that_was_drained() -> None:
    registry, leases = serving("a", "b", standbys=("s", "t"))
    assert list(registry.states(now=0.0).values()) == [State.SERVING] * 2 + [State.STANDBY] * 2
    for name in ("b", "s", "t"):
        registry.renew(name, leases[name], now=9.0)
    assert list(registry.states(now=12.0).values()) == [State.LOST, State.SERVING, State.SERVING, State.STANDBY]
    registry.record_probe("a", info("a"))
    join(registry, "a", now=13.0)
    registry.record_probe("a", info("a"))
    registry.drain("b")
    states = registry.states(now=13.0)
    assert (states["a"], states["b"], states["s"]) == (State.SERVING, State.DRAINING, State.STANDBY)


def test_a_drained_engine_is_told_to_go_and_is_no_longer_listed() -> None:
    registry, leases = serving("west")
    registry.drain("west")
    assert registry.renew("west", leases["west"], now=1.0) is State.DRAINING
    assert registry.roster(now=1.0)["west"].state is State.DRAINING
    registry.finish_drain("west")
    assert registry.renew("west", leases["west"], now=30.0) is State.LEFT
    assert registry.roster(now=1.0) == {}
    with pytest.raises(NotRegistered, match="no engine 'east'"):
        registry.drain("east")


def test_the_number_of_members_is_bounded_and_a_lapsed_one_makes_room() -> None:
    registry = Registry(lease_s=10.0)
    for i in range(MAX_MEMBERS):
        join(registry, f"e{i}", now=float(i))
    with pytest.raises(MalformedRequest):
        registry.join(JoinRequest(name="more", url="http://more"), now=0.0)
    join(registry, "more", now=10.0)
    assert "e0" not in registry.members
    assert len(registry.members) == MAX_MEMBERS


def test_the_roster_has_the_numbers_of_the_last_probe() -> None:
    registry, _ = serving("west")
    registry.record_probe("west", info(num_running=2, num_waiting=1, kv_tokens_free=64))
    listed = registry.roster(now=0.0)["west"]
    assert (listed.region, listed.step, listed.num_running, listed.kv_tokens_free) == ("west", 3, 2, 64)
