"""Who belongs to the fleet: leases, what was seen of each engine, and what follows. Pure, the clock is passed.

An engine's state is never stored; it follows from facts that are:

| facts | state |
| --- | --- |
| it left, or was drained to the end | `LEFT` |
| its lease has ended, or it did not answer `MAX_MISSED` times in a row | `LOST` |
| somebody drains it | `DRAINING` |
| it has not held the head of when it joined (or of when a new lineage began) | `CATCHING_UP` |
| it is a standby, and not more engines are lost than standbys before it | `STANDBY` |
| else | `SERVING` |

Only this side's monotonic clock counts: a lease is so many seconds from the renewal's arrival here.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from etude.inference.errors import MalformedRequest, NotRegistered
from etude.inference.registry_messages import ALIVE, NO_VERSION, JoinRequest, ListedEngine, Roster, State
from etude.records.completion import Version
from etude.seams import EngineInfo

LEASE_S = 10.0
MAX_MISSED = 3  # questions in a row without an answer
MAX_MEMBERS = 1024  # remembered; those who are gone for longest are forgotten first


@dataclass(eq=False)
class Member:
    """One engine that joined."""

    joined: JoinRequest
    lease: str
    lease_ends: float  # on the registry's monotonic clock
    target: Version | None  # what it must hold before it is given work; None: whatever the first head is
    caught_up: bool = False
    num_missed: int = 0
    draining: bool = False
    left: bool = False
    info: EngineInfo | None = None  # as last seen


class Registry:
    """The members of one fleet.

    >>> registry = Registry(lease_s=10.0)
    >>> lease = registry.join(JoinRequest(name="west", url="http://west:8000"), now=0.0)
    >>> registry.states(now=9.0), registry.states(now=10.0)
    ({'west': <State.CATCHING_UP: 'catching-up'>}, {'west': <State.LOST: 'lost'>})
    """

    def __init__(self, *, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self.members: dict[str, Member] = {}
        self._head: Version | None = None

    def join(self, request: JoinRequest, *, now: float) -> str:
        """A new member, or one that is back: its lease. Raises `MalformedRequest` when there is no place."""
        if request.name not in self.members and len(self.members) >= MAX_MEMBERS:
            self._evict_one(now)
        lease = secrets.token_hex(16)
        self.members.pop(request.name, None)
        self.members[request.name] = Member(request, lease, now + self.lease_s, self._head)
        return lease

    def renew(self, name: str, lease: str, *, now: float) -> State:
        """Another `lease_s` from now. Raises `NotRegistered` where the lease has ended or is another's: join again."""
        member = self._holder(name, lease)
        if now >= member.lease_ends and not member.left:
            raise NotRegistered(
                f"the lease of {name} has ended", f"{now - member.lease_ends:.1f} s ago", hint="join again"
            )
        member.lease_ends = now + self.lease_s
        return self.states(now=now)[name]

    def leave(self, name: str, lease: str) -> None:
        """The engine goes by itself. Raises `NotRegistered`."""
        self._holder(name, lease).left = True

    def drain(self, name: str) -> None:
        """Give it nothing new. Raises `NotRegistered`, also for one that has left."""
        if name not in self.members:
            known = ", ".join(sorted(self.members)) or "none so far"
            raise NotRegistered(
                f"no engine {name!r} has joined", f"those that have: {known}", hint="see etude fleet list"
            )
        if self.members[name].left:
            raise NotRegistered(f"{name} has left", "it is given nothing any more", hint="see etude fleet list")
        self.members[name].draining = True

    def finish_drain(self, name: str) -> None:
        """It has finished what it had. One that joined anew meanwhile goes on."""
        member = self.members.get(name)
        if member is not None and member.draining:
            member.left = True

    def record_probe(self, name: str, info: EngineInfo | None) -> None:
        """What it answered; None: nothing. Unknown names are fine: it may be gone by now."""
        member = self.members.get(name)
        if member is None:
            return
        if info is not None and member.num_missed >= MAX_MISSED:  # it is back, and has missed versions meanwhile
            member.target, member.caught_up = self._head, False
        member.num_missed = 0 if info is not None else member.num_missed + 1
        member.info = info or member.info
        self._catch_up(member)

    def set_head(self, version: Version) -> None:
        """Set the newest published version. If it starts a new lineage, no engine gets work before it holds it: step
        numbers alone would admit an engine with weights of the abandoned lineage."""
        renewed = self._head is None or self._head.incarnation != version.incarnation
        self._head = version
        for member in self.members.values():
            if renewed:
                member.target, member.caught_up = version, False
            self._catch_up(member)

    def states(self, *, now: float) -> dict[str, State]:
        """Everybody's state; standbys stand in for the lost, in order of joining."""
        states = {name: self._state(member, now) for name, member in self.members.items()}
        num_lost = sum(s is State.LOST and not self.members[name].joined.standby for name, s in states.items())
        for name in [name for name, s in states.items() if s is State.STANDBY][:num_lost]:
            states[name] = State.SERVING
        return states

    def roster(self, *, now: float) -> Roster:
        """Everybody but those who left."""
        states = self.states(now=now)
        return {n: _as_listed(m, states[n]) for n, m in self.members.items() if states[n] is not State.LEFT}

    def _state(self, member: Member, now: float) -> State:
        if member.left:
            return State.LEFT
        if now >= member.lease_ends or member.num_missed >= MAX_MISSED:
            return State.LOST
        if member.draining:
            return State.DRAINING
        if not member.caught_up:
            return State.CATCHING_UP
        return State.STANDBY if member.joined.standby else State.SERVING

    def _catch_up(self, member: Member) -> None:
        if member.target is None:
            member.target = self._head
        held, target = member.info.version if member.info else None, member.target
        if (
            held is not None
            and target is not None
            and held.incarnation == target.incarnation
            and held.step >= target.step
        ):
            member.caught_up = True

    def _holder(self, name: str, lease: str) -> Member:
        member = self.members.get(name)
        if member is None or not secrets.compare_digest(member.lease.encode(), lease.encode()):
            raise NotRegistered(f"{name} holds no such lease", "another has joined under its name", hint="join again")
        return member

    def _evict_one(self, now: float) -> None:
        gone = [name for name, state in self.states(now=now).items() if state not in ALIVE]
        if not gone:
            raise MalformedRequest(f"the fleet has {MAX_MEMBERS} engines", hint="drain some before others join")
        del self.members[gone[0]]


def _as_listed(member: Member, state: State) -> ListedEngine:
    joined, info = member.joined, member.info
    if info is None:
        return ListedEngine(url=joined.url, state=state, region=joined.region or joined.name, kv_tokens_free=0)
    return ListedEngine(
        url=joined.url,
        state=state,
        region=joined.region or joined.name,
        step=info.version.step if info.version else None,
        max_sequences=info.max_sequences,
        num_running=info.num_running,
        num_waiting=info.num_waiting,
        kv_tokens_free=info.kv_tokens_free,
        reason=_other_lineage(member) if state is State.CATCHING_UP else "",
    )


def _other_lineage(member: Member) -> str:
    """What an engine holds that is not what the run published; nothing where it is, or where it holds none."""
    held, target = member.info.version if member.info else None, member.target
    if held is None or target is None or held.incarnation in (target.incarnation, NO_VERSION.incarnation):
        return ""
    return f"it holds {held}, and the run published {target}: is its --store the run's?"
