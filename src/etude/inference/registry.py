"""The state of the engine registry: members, leases and probe results. It has no clock; the time is an argument.

The state of an engine is not stored. It is computed from these conditions; the first that holds decides:

| condition | state |
| --- | --- |
| it left, or has finished draining | `LEFT` |
| its lease has expired, or `MAX_MISSED` probes in a row failed | `LOST` |
| it is being drained | `DRAINING` |
| it has not adopted the version that was the newest when it joined (or when a new lineage began) | `CATCHING_UP` |
| it is a standby, and not needed to replace a lost engine | `STANDBY` |
| otherwise | `SERVING` |

A new lineage begins when a learner restarts: its versions are not continuations of those that it published before and
lost. Only the monotonic clock of this process counts: a lease lasts a number of seconds from the arrival of its
renewal."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from etude.errors import MalformedRequest
from etude.inference.errors import NotRegistered
from etude.inference.registry_messages import ALIVE, NO_VERSION, JoinRequest, ListedEngine, Roster, State
from etude.records.completion import Version
from etude.seams import EngineInfo

LEASE_S = 10.0
MAX_MISSED = 3  # failed probes in a row
MAX_MEMBERS = 1024  # members that are kept; the ones gone for longest are dropped first


@dataclass(eq=False)
class Member:
    """An engine that has joined a fleet, as the registry records it. `Registry.join` makes one.

    - `joined`: the request with which it joined; `lease`: the secret with which it renews.
    - `lease_ends`: the end of the lease in seconds, on the caller's monotonic clock.
    - `target`: the version to adopt (load) before it gets work. None: the first that is published.
    - `caught_up`: whether it has adopted `target`.
    - `num_missed`: failed probes in a row; `info`: the result of the last successful one."""

    joined: JoinRequest
    lease: str
    lease_ends: float
    target: Version | None
    caught_up: bool = False
    num_missed: int = 0
    draining: bool = False
    left: bool = False
    info: EngineInfo | None = None


class Registry:
    """The engines of one fleet and their states. `RegistryServer` has one.

    `lease_s` is the number of seconds until a lease that is not renewed expires. All times `now` are seconds on the
    caller's monotonic clock.

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
        """Add an engine, or one that is back, and return its lease, a secret text.

        Raises `MalformedRequest` when the registry is full."""
        if request.name not in self.members and len(self.members) >= MAX_MEMBERS:
            self._evict_one(now)
        lease = secrets.token_hex(16)
        self.members.pop(request.name, None)
        self.members[request.name] = Member(request, lease, now + self.lease_s, self._head)
        return lease

    def renew(self, name: str, lease: str, *, now: float) -> State:
        """Extend a lease to `lease_s` from now and return the engine's state.

        Raises `NotRegistered` when the lease has expired or another engine has joined under the name. The engine must
        then join again."""
        member = self._holder(name, lease)
        if now >= member.lease_ends and not member.left:
            raise NotRegistered(
                f"the lease of {name} has expired",
                f"{now - member.lease_ends:.1f} s ago",
                hint="send a new join request, then renew that lease",
            )
        member.lease_ends = now + self.lease_s
        return self.states(now=now)[name]

    def leave(self, name: str, lease: str) -> None:
        """Record that an engine leaves. Raises `NotRegistered` when `lease` is not the engine's."""
        self._holder(name, lease).left = True

    def drain(self, name: str) -> None:
        """Start draining an engine: it gets no new sessions, and leaves when those that it has are done.

        Raises `NotRegistered` when there is no such engine, or it has left."""
        if name not in self.members:
            known = ", ".join(sorted(self.members)) or "none so far"
            raise NotRegistered(f"no engine {name!r} has joined", f"the fleet has {known}", hint="see etude fleet list")
        if self.members[name].left:
            raise NotRegistered(
                f"{name} has left", "an engine that has left gets no requests", hint="see etude fleet list"
            )
        self.members[name].draining = True

    def finish_drain(self, name: str) -> None:
        """Record that a draining engine has finished its work. An engine that joined again meanwhile is not
        affected."""
        member = self.members.get(name)
        if member is not None and member.draining:
            member.left = True

    def record_probe(self, name: str, info: EngineInfo | None) -> None:
        """Record the result of a probe (a request for the engine's state). `info`: None if the probe failed.

        Unknown names are ignored."""
        member = self.members.get(name)
        if member is None:
            return
        if info is not None and member.num_missed >= MAX_MISSED:  # it is back and may have missed versions
            member.target, member.caught_up = self._head, False
        member.num_missed = 0 if info is not None else member.num_missed + 1
        member.info = info or member.info
        self._catch_up(member)

    def set_head(self, version: Version) -> None:
        """Set the newest published version.

        If the version belongs to a new lineage, since a run was restarted, engines get no work before they have loaded
        it. It would not be enough to compare step numbers, since the abandoned weights may have later ones."""
        renewed = self._head is None or self._head.incarnation != version.incarnation
        self._head = version
        for member in self.members.values():
            if renewed:
                member.target, member.caught_up = version, False
            self._catch_up(member)

    def states(self, *, now: float) -> dict[str, State]:
        """Return the states of all engines by name. For each lost engine, one standby is serving, in the order of
        joining."""
        states = {name: self._state(member, now) for name, member in self.members.items()}
        num_lost = sum(s is State.LOST and not self.members[name].joined.standby for name, s in states.items())
        for name in [name for name, s in states.items() if s is State.STANDBY][:num_lost]:
            states[name] = State.SERVING
        return states

    def roster(self, *, now: float) -> Roster:
        """Return all engines by name, except those that have left."""
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
        if member is None:
            facts = "it did not renew its lease in time and was removed, or the registry was started again"
            raise NotRegistered(
                f"the registry does not know {name}", facts, hint="send a new join request, then renew that lease"
            )
        if not secrets.compare_digest(member.lease.encode(), lease.encode()):
            facts = "an engine joined again under this name"
            hint = "if two engines have this name, rename one; otherwise join again"
            raise NotRegistered(f"{name} has another lease", facts, hint=hint)
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
    """Return why an engine cannot catch up: its version is of another lineage than the run's. "" when it is not."""
    held, target = member.info.version if member.info else None, member.target
    if held is None or target is None or held.incarnation in (target.incarnation, NO_VERSION.incarnation):
        return ""
    return f"it has {held}, and the run published {target}: is its --store the run's?"
