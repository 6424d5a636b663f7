"""Serves one `Policy` from many engines: chooses the engine of each request, and retries when engines fail.

A session (one conversation) stays on its engine, whose KV cache it extends. An engine that is gone, or fails a health
check while it serves a request, is skipped for a while, and its requests are sent to another engine under the same
request id. Sampling depends on the request alone, so a repeated request gives the same completion. There are no
background tasks; engines may join and leave at any time.

Three limits end a request:

- An engine ends it when it makes no progress for its `deadline_s`. Time that earlier engines took before they refused
  it counts too.
- Waiting for an engine that restarts, has capacity, or adopts (loads) the demanded version takes minutes with large
  weights. It does not count against `deadline_s`; it has its own limit, `patience_s`.
- At most `MAX_LOST` engines may be lost while they serve the request, since it may be the cause.

What the registry reports about an engine (`update`) limits the requests that it gets. A draining or standby engine gets
no new sessions. No new rollout goes to an engine without free KV tokens. No request goes to an engine that would first
have to adopt a version that another engine has; when none has it, all are asked to adopt it, and the first that does
gets the request. The fleet never holds production requests back, and engines serve them first.

Between regions, a rollout's next call goes to the engine where it is expected to end first (`Pace`). A session prefers
its engine, for its KV cache, and a group prefers its region, so that a lost region loses complete groups. Both move
only when a call takes less than half as long elsewhere. So work in a slow region moves when the others run out of work
(decision 30)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import msgspec

from etude.errors import ContextFull, DeadlineExceeded, EngineBehind, EngineError, MalformedRequest
from etude.inference.errors import EngineBusy, EngineGone, EngineLate, Unauthorised
from etude.inference.fleet_members import (
    STAY_FACTOR,
    Attempt,
    Member,
    adoption_of,
    apply_adoption,
    group_of,
    loop_time,
    rank,
)
from etude.inference.partial_completions import joined, rest_of
from etude.inference.registry_messages import ListedEngine, State
from etude.records.completion import Completion, CompletionRequest, StopReason, Traffic
from etude.seams import Ending, Engine, stream_or_complete

REST_S = 2.0  # an engine that was gone is skipped for so long
DRAIN_POLL_S = 0.02
RETRY_S, MAX_RETRY_S = 0.05, 1.0  # pause between two rounds: at first, and at most
MAX_TRIAL = 8  # concurrent requests to a member of unknown pace, when the pace of others is known
PATIENCE_S = 3_600.0  # longest wait for an engine that restarts, has capacity, or adopts a version
MAX_LOST = 8  # engines lost while serving one request, which may be the cause
MAX_SESSIONS = 65_536  # most remembered sessions; the least recently used is dropped


class Assignment(enum.StrEnum):
    """How a new session is assigned to an engine.

    `LEAST_LOADED` takes the engine that is expected to finish the request first. `STABLE` chooses by a hash of the
    session's group and the engine's name, so that a repeated run uses the same engines."""

    LEAST_LOADED = "least-loaded"
    STABLE = "stable"


@dataclass
class _Streamed:
    """A streamed request: the engine that has it, and whether its caller has ended it."""

    engine: object = None
    ended: bool = False


class Fleet:
    """Many engines, used as one policy. It implements `seams.Policy`, `seams.Streaming` and
    `seams.Ending`.

    - `engines`: the engines by name; `add` and `remove` change them later.
    - `assignment`: how a new session is assigned to an engine.
    - `heartbeat_s`: the interval of health checks of an engine that serves a request, in seconds.
    - `patience_s`: the longest time in seconds that a request waits until an engine has restarted, has free capacity,
      or has loaded the required version.

    The ids of sessions may have a group: "g000012" of "g000012.3", the part before the last dot. A group prefers one
    region. A fleet must be used in one event loop."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        assignment: Assignment = Assignment.LEAST_LOADED,
        heartbeat_s: float = 5.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.assignment, self.heartbeat_s, self.patience_s = assignment, heartbeat_s, patience_s
        self._members = {name: Member(name, engine) for name, engine in engines.items()}
        self._sessions: dict[str, str] = {}  # session -> engine name, least recently used first
        self._regions: dict[str, str] = {}  # group -> region of its newest session, least recently used first
        self._streaming: dict[str, _Streamed] = {}  # the streamed requests by their id
        self._changed = asyncio.Event()

    @property
    def engines(self) -> dict[str, Engine]:
        """All engines by name, including those that are skipped now."""
        return {name: member.engine for name, member in self._members.items()}

    def add(self, name: str, engine: Engine) -> None:
        """Add an engine, or replace the one of this name after a restart."""
        self._members[name] = Member(name, engine)
        self._changed.set()
        self._changed = asyncio.Event()

    def remove(self, name: str) -> None:
        """Remove an engine. It gets no new requests; those that it serves continue. Unknown names are ignored."""
        self._members.pop(name, None)

    async def drain(self, name: str, *, deadline_s: float) -> None:
        """Remove an engine and wait until the requests that it serves have ended. Its sessions go on at other engines.

        Raises `EngineError` if it is no member, and `DeadlineExceeded` after `deadline_s` seconds; then, or if the wait
        is cancelled, it is a member as before."""
        member, deadline = self._members.pop(name, None), loop_time() + deadline_s
        if member is None:
            raise EngineError(f"{name} is not in the fleet", f"it has {sorted(self._members)}", hint="add it first")
        try:
            while member.num_running:
                if loop_time() >= deadline:
                    facts = f"it still serves {member.num_running} requests"
                    hint = "let it have more time, or cancel its requests"
                    raise DeadlineExceeded(f"{name} was not drained within {deadline_s:g} s", facts, hint=hint)
                await asyncio.sleep(DRAIN_POLL_S)
        except BaseException:
            self._members[name] = member
            raise

    def load(self) -> dict[str, int]:
        """Return the number of requests of production that run or wait, by engine."""
        return {name: member.num_production for name, member in self._members.items()}

    def update(self, name: str, listed: ListedEngine) -> None:
        """Apply what the registry lists about the engine `name`. Unknown names are ignored."""
        member = self._members.get(name)
        if member is not None:
            member.takes_new, member.region = listed.state is State.SERVING, listed.region
            if listed.step is not None:
                member.saw_step(listed.step)
            member.size, member.kv_tokens = max(1, listed.max_sequences), listed.kv_tokens_free

    def sessions(self) -> dict[str, int]:
        """Return the number of sessions by engine name, including those between two calls."""
        return dict(Counter(self._sessions.values()))

    def forget(self, session_id: str) -> None:
        """Forget an ended session and its forks ("s+1" of "s"), so that they no longer count as sessions of an engine.

        Unknown ids are ignored."""
        for one in [s for s in self._sessions if s == session_id or s.startswith(f"{session_id}+")]:
            del self._sessions[one]

    async def retire(self, name: str, *, deadline_s: float) -> None:
        """Remove an engine that has left, and wait until the requests that it serves have ended, at most `deadline_s`
        seconds. Unknown names are ignored."""
        member, deadline = self._members.pop(name, None), loop_time() + deadline_s
        while member is not None and member.num_running and loop_time() < deadline:  # noqa: ASYNC110  requests count it
            await asyncio.sleep(DRAIN_POLL_S)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample a completion on one of the engines, as `seams.Policy.complete` does.

        `MalformedRequest` and `ContextFull` are raised at once. After other errors the request is sent to other
        engines, until its deadline or `patience_s` is reached (see the module). A completion that an engine has ended
        early goes on at another one."""
        done: Completion | None = None
        while True:
            part = await self._complete(rest_of(request, done))
            done = joined(request, done, part)
            if done.stop_reason is not StopReason.CANCELLED:
                return done

    async def _complete(self, request: CompletionRequest) -> Completion:
        """Sample on one engine, after errors on others. The completion may be one that the engine ended early."""
        attempt = Attempt(request, loop_time() + request.deadline_s, self.patience_s)
        while True:
            member, sent_at = await self._next(attempt), loop_time()
            try:
                completion = await self._serve(member, attempt)
            except EngineError as error:
                self._after_refusal(member, attempt, error, loop_time() - sent_at)
            else:
                self._remember(request, member, completion)
                return completion

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """Sample a completion on one of the engines and yield its parts, as `seams.Streaming.stream` does.

        Before the first tokens a failed request is retried on another engine, as in `complete`. After them the error is
        raised, since yielded tokens cannot be taken back. A completion that an engine has ended early goes on at
        another one."""
        done: Completion | None = None
        streamed = self._streaming[request.request_id] = _Streamed()
        try:
            while True:
                async with contextlib.aclosing(self._stream(rest_of(request, done), streamed)) as parts:
                    async for part in parts:
                        if not isinstance(part, Completion):
                            yield part
                            continue
                        done = joined(request, done, part)
                        if streamed.ended or done.stop_reason is not StopReason.CANCELLED:
                            yield done
                            return
        finally:
            self._streaming.pop(request.request_id, None)

    async def _stream(self, request: CompletionRequest, streamed: _Streamed) -> AsyncGenerator[list[int] | Completion]:
        """Stream from one engine, after errors on others. The completion may be one that the engine ended early."""
        attempt, begun = Attempt(request, loop_time() + request.deadline_s, self.patience_s), False
        while True:
            member, sent_at = await self._next(attempt), loop_time()
            try:
                streamed.engine = member.engine
                async with contextlib.aclosing(_stream_parts(member, attempt)) as parts:
                    async for part in parts:
                        begun = True
                        if isinstance(part, Completion):
                            self._remember(request, member, part)
                        yield part
                return
            except EngineError as error:
                if begun:
                    raise
                self._after_refusal(member, attempt, error, loop_time() - sent_at)

    async def end(self, request_id: str) -> None:
        streamed = self._streaming.get(request_id)
        if streamed is None:
            return
        streamed.ended = True
        if isinstance(streamed.engine, Ending):
            await streamed.engine.end(request_id)

    async def _next(self, attempt: Attempt) -> Member:
        """Wait for an engine that can serve the request.

        Raises `EngineBehind` when none adopted the version, and `EngineError` at the deadline, or when no engine can
        ever serve it."""
        pause_s = RETRY_S
        while attempt.left_s > 0:
            member, began = self._choose(attempt), loop_time()
            if member is not None and attempt.waits_for(member):
                await self._catch_up(member, attempt, min(attempt.left_s, pause_s))
                attempt.wait_is_over(loop_time() - began)
            elif member is not None:
                self._regions.pop(group_of(attempt.request), None)
                self._regions[group_of(attempt.request)] = member.region
                return member
            elif attempt.excluded and attempt.excluded >= self._members.keys():
                raise next(iter(attempt.refused.values()))
            else:
                attempt.skipped.clear()
                await self._pause_between_rounds(min(attempt.left_s, pause_s))
                attempt.wait_is_over(loop_time() - began)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
        raise _no_engine_error(attempt)

    def _choose(self, attempt: Attempt) -> Member | None:
        """Choose the engine to try now, or None. One that must adopt a version first is only chosen when all must."""
        now, out = loop_time(), attempt.skipped | attempt.excluded
        able = [m for m in self._members.values() if m.name not in out and m.rests_until <= now]
        home = next((m for m in able if m.name == self._sessions.get(attempt.request.session_id)), None)
        rollout = attempt.request.traffic is Traffic.ROLLOUT
        if home is not None and not (home.region and rollout):
            return home
        able, group = [m for m in able if m.takes_new], group_of(attempt.request)
        if self.assignment is Assignment.STABLE:
            stable = lambda m: hashlib.sha256(f"{group}\0{m.name}".encode()).digest()  # noqa: E731
            return home or max(able, key=stable, default=None)
        if rollout:
            able = [m for m in able if m.has_capacity(attempt.request)]
        near = home or next((m for m in able if m.name == self._sessions.get(attempt.request.fork_from or "")), None)
        return self._fastest(attempt, able, near, self._regions.get(group))

    def _fastest(self, attempt: Attempt, able: list[Member], home: Member | None, region: str | None) -> Member | None:
        """Return the engine where the request is expected to end first.

        It is its `home` (which has its session, or the one that it forks from), or one in the `region`, while that is
        worth it."""
        paces = [m.pace.seconds(m.num_running + 1) for m in able if m.is_known]
        typical_s = sum(paces) / len(paces) if paces else None
        tried = [m for m in able if m.is_known or m.num_running < MAX_TRIAL or not m.region]
        best = min(tried or able, key=lambda m: rank(m, attempt, typical_s), default=None)
        near = home or min(
            (m for m in able if m.region == region), key=lambda m: rank(m, attempt, typical_s), default=None
        )
        if best is None or near is None:
            return near or best
        late = attempt.waits_for(near) > attempt.waits_for(best) or near.seconds(
            typical_s
        ) > STAY_FACTOR * best.seconds(typical_s)
        return best if late and attempt.waits_for(best) <= attempt.waits_for(near) else near

    async def _serve(self, member: Member, attempt: Attempt) -> Completion:
        """Send the request to one engine, and check its health while waiting."""
        request_now = msgspec.structs.replace(attempt.request, deadline_s=max(attempt.left_s, 0.001))
        with member.serving(request_now):
            work = asyncio.ensure_future(member.engine.generate(request_now))
            try:
                while not (await asyncio.wait({work}, timeout=self.heartbeat_s))[0]:
                    if not await self._answers(member) and not work.done():  # it may have ended meanwhile
                        raise EngineGone(
                            f"{member.name} serves request {attempt.request.request_id} and does not respond",
                            f"a health check took more than {self.heartbeat_s:g} s",
                            hint="it hangs or its host is down: restart it",
                        )
                return work.result()
            finally:
                work.cancel()

    async def _answers(self, member: Member) -> bool:
        if member.probe is None or member.probe.done():
            member.probe = asyncio.ensure_future(_is_healthy(member.engine, self.heartbeat_s))
        return await asyncio.shield(member.probe)

    def _after_refusal(self, member: Member, attempt: Attempt, error: EngineError, held_s: float) -> None:
        """Update the state of a request after an engine's error. `held_s`: how long the engine had it.

        Raises the error again when the request itself is invalid, or may be what ends engines."""
        attempt.num_lost += held_s >= REST_S and not isinstance(error, EngineLate | EngineBehind | EngineBusy)
        if isinstance(error, MalformedRequest | ContextFull | Unauthorised) or attempt.num_lost >= MAX_LOST:
            raise error
        quiet_s = min(held_s, attempt.left_s + held_s) if isinstance(error, EngineLate) else 0.0
        attempt.deadline += held_s - quiet_s  # the engine made progress, with this request or others
        attempt.refused[member.name] = error
        if isinstance(error, EngineBehind):
            attempt.behind.add(member.name)
        else:
            attempt.skipped.add(member.name)
            if (
                not isinstance(error, EngineBusy) and attempt.left_s > 0
            ):  # at the deadline the engine may only have been slow
                member.rests_until = loop_time() + REST_S

    async def _catch_up(self, member: Member, attempt: Attempt, patience_s: float) -> None:
        """Wait until one of the engines with an older version has adopted the demanded one.

        With stable assignment, wait until `member` has. The engines fetch the weights by themselves."""
        late = [
            m
            for m in self._members.values()
            if attempt.waits_for(m) and m.name not in attempt.skipped | attempt.excluded
        ]
        request_now = {m: adoption_of(m, attempt) for m in ([member] if self.assignment is Assignment.STABLE else late)}
        done, _ = await asyncio.wait(request_now.values(), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            attempt.skipped.clear()  # a busy or new engine may be first
        for member, adoption in request_now.items():
            if adoption.done():
                attempt.behind.discard(member.name)
                apply_adoption(member, attempt, adoption.result())

    async def _pause_between_rounds(self, pause_s: float) -> None:
        """Wait until an engine joins, at most `pause_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause_s)

    def _remember(self, request: CompletionRequest, member: Member, completion: Completion) -> None:
        self._sessions.pop(request.session_id, None)
        if request.keep_session and completion.stop_reason is not StopReason.CANCELLED:  # that engine is behind
            self._sessions[request.session_id] = member.name
        for remembered in (self._sessions, self._regions):
            if len(remembered) > MAX_SESSIONS:
                del remembered[next(iter(remembered))]


async def _stream_parts(member: Member, attempt: Attempt) -> AsyncGenerator[list[int] | Completion]:
    """Stream from one engine, and count the request as running there."""
    request_now = msgspec.structs.replace(attempt.request, deadline_s=max(attempt.left_s, 0.001))
    with member.serving(request_now):
        async with contextlib.aclosing(stream_or_complete(member.engine, member.engine.generate, request_now)) as parts:
            async for part in parts:
                yield part


async def _is_healthy(engine: Engine, patience_s: float) -> bool:
    try:
        await engine.info(deadline_s=patience_s)
    except EngineError:
        return False
    return True


def _no_engine_error(attempt: Attempt) -> EngineError:
    reasons = "; ".join(f"{name}: {str(e).splitlines()[0]}" for name, e in sorted(attempt.refused.items()))
    late = any(isinstance(no, EngineBehind) for no in attempt.refused.values())
    return (EngineBehind if late else EngineError)(
        f"no engine served request {attempt.request.request_id} within {attempt.request.deadline_s:g} s",
        f"{reasons or 'the fleet has no engines'}; {attempt.waited_s:.0f} s of waiting were not counted",
        hint="see the engines' logs; restarted ones join under their new address",
    )
