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
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from etude.errors import ContextFull, DeadlineExceeded, EngineBehind, EngineError, MalformedRequest
from etude.inference.errors import EngineBusy, EngineGone, EngineLate, Unauthorised
from etude.inference.partial_completions import joined, rest_of
from etude.inference.registry_messages import ListedEngine, State
from etude.records.completion import Completion, CompletionRequest, StopReason, Traffic, Version
from etude.seams import Ending, Engine, stream_or_complete

REST_S = 2.0  # an engine that was gone is skipped for so long
DRAIN_POLL_S = 0.02
RETRY_S, MAX_RETRY_S = 0.05, 1.0  # pause between two rounds: at first, and at most
STAY_FACTOR = 2.0  # a session or group stays while its call takes at most this factor of the time elsewhere
MAX_TRIAL = 8  # concurrent requests to a member of unknown pace, when the pace of others is known
PATIENCE_S = 3_600.0  # longest wait for an engine that restarts, has capacity, or adopts a version
ADOPT_S = 60.0  # deadline of one adopt call; it is repeated
MAX_LOST = 8  # engines lost while serving one request, which may be the cause
MAX_SESSIONS = 65_536  # most remembered sessions; the least recently used is dropped


# How long a request takes on an engine: a linear fit of recent requests, seconds = alone + each * crowd, where crowd is
# the number of requests that ran there together. Network latency is part of `alone`: a distant engine is slow for one
# request, and no slower for many. Old measurements fade, so that an engine that was slow is tried again.

WEIGHT = 0.05  # of the newest request in the moving averages
FORGET_S = 60.0  # a pace is unknown so long after the last request
PRIOR = 1.0  # variance of the crowd at which the fit is half the data, half a line through the origin


@dataclass
class Pace:
    """A moving linear fit of one engine's seconds per request over the number of concurrent requests.

    `Fleet` keeps one per engine, to predict where a request ends first.

    >>> near, far = Pace(), Pace()
    >>> for crowd in [1, 8, 4, 8, 1] * 20:
    ...     near.served(0.02 * crowd, crowd, now=0.0)
    ...     far.served(0.2 + 0.005 * crowd, crowd, now=0.0)
    >>> [round(near.seconds(n), 2) for n in (1, 20)], [round(far.seconds(n), 2) for n in (1, 20)]  # leans to 0
    ([0.02, 0.4], [0.19, 0.37])
    >>> far.known(now=1.0), far.known(now=100.0)
    (True, False)
    >>> far.served(0.01, 1, now=100.0)  # measured anew
    >>> round(far.seconds(1), 2)
    0.01
    """

    _num_served: int = 0
    _last: float = 0.0
    _crowd: float = 0.0  # moving means, variance and covariance
    _seconds: float = 0.0
    _spread: float = 0.0
    _joint: float = 0.0

    def known(self, now: float) -> bool:
        """Return whether a request was measured in the last `FORGET_S` seconds before `now`."""
        return self._num_served > 0 and now - self._last < FORGET_S

    def served(self, seconds: float, crowd: float, *, now: float) -> None:
        """Add a measurement: a request took `seconds`, with on average `crowd` requests running, itself included.

        `now` is the time at its end, in seconds."""
        self._num_served, self._last = (self._num_served if self.known(now) else 0) + 1, now
        weight = max(WEIGHT, 1 / self._num_served)
        off, late = crowd - self._crowd, seconds - self._seconds
        self._crowd += weight * off
        self._seconds += weight * late
        self._spread = (1 - weight) * (self._spread + weight * off * off)
        self._joint = (1 - weight) * (self._joint + weight * off * late)

    def seconds(self, crowd: float) -> float:
        """Return the expected seconds of a request among `crowd` requests, itself included.

        The result is valid only while `known` returns True."""
        share = self._seconds / self._crowd  # the slope of a line through the origin
        each = (self._joint + PRIOR * share) / (self._spread + PRIOR)
        return self._seconds + min(max(each, 0.0), share) * (crowd - self._crowd)


class Assignment(enum.StrEnum):
    """How a new session is assigned to an engine.

    `LEAST_LOADED` takes the engine that is expected to finish the request first. `STABLE` chooses by a hash of the
    session's group and the engine's name, so that a repeated run uses the same engines."""

    LEAST_LOADED = "least-loaded"
    STABLE = "stable"


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class _Member:
    name: str
    engine: Engine
    num_running: int = 0
    num_production: int = 0  # of `num_running`
    rests_until: float = 0.0  # on the monotonic clock
    probe: asyncio.Task[bool] | None = None  # the running health check, shared by all requests
    adoption: asyncio.Task[Version | EngineError] | None = None  # the running adopt call, for step `adopting`
    adopting: int = 0
    takes_new: bool = True
    step: int | None = None  # step of its version, or a lower bound; None: unknown
    size: int = 1  # sequences that it decodes together
    region: str = ""
    pace: Pace = field(default_factory=Pace)
    kv_tokens: int | None = None  # free KV tokens at the last update, less those of requests since; None: unlimited

    def seconds(self, typical_s: float | None) -> float:
        """Return the expected seconds of one more request.

        Without regions, or when no pace is known, it is the relative load.

        An engine of unknown pace is assumed to be `STAY_FACTOR` times as fast as a typical one: then new work measures
        it, and no session leaves an engine of typical pace for it."""
        crowd = self.num_running + 1
        if typical_s is None or not self.region:
            return crowd / self.size
        return (self.pace.seconds(crowd) if self.is_known else typical_s / STAY_FACTOR) * max(1.0, crowd / self.size)

    @property
    def is_known(self) -> bool:
        return self.pace.known(_now())

    def is_behind(self, step: int) -> bool:
        """Return whether its version is known to be older than `step`."""
        return self.step is not None and self.step < step

    def saw_step(self, step: int) -> None:
        """Record that it has a version of at least this step."""
        self.step = step if self.step is None else max(step, self.step)

    def has_capacity(self, request: CompletionRequest) -> bool:
        """Return whether its free KV tokens suffice for a request."""
        return self.kv_tokens is None or self.kv_tokens >= kv_tokens_needed(request)

    @contextlib.contextmanager
    def serving(self, request: CompletionRequest) -> Iterator[None]:
        """Count a request as running while the block runs, and measure its pace."""
        production = request.traffic is Traffic.PRODUCTION
        self._count(1, production, kv_tokens_needed(request))
        began, crowd = _now(), self.num_running
        try:
            yield
            now = _now()
            self.pace.served(now - began, (crowd + self.num_running) / 2, now=now)
        finally:
            self._count(-1, production, -kv_tokens_needed(request))

    def _count(self, number: int, production: bool, kv_tokens: int) -> None:
        self.num_running += number
        self.num_production += number * production
        if self.kv_tokens is not None:
            self.kv_tokens -= kv_tokens


@dataclass
class _Attempt:
    """The state of one request while the fleet looks for an engine that serves it."""

    request: CompletionRequest
    deadline: float
    patience_s: float  # remaining seconds to wait for an engine
    waited_s: float = 0.0
    num_lost: int = 0
    refused: dict[str, EngineError] = field(default_factory=dict)  # the latest error of each engine
    skipped: set[str] = field(default_factory=set)  # not tried again in this round
    behind: set[str] = field(default_factory=set)  # refused it because their version is too old
    excluded: set[str] = field(default_factory=set)  # have passed the pinned step: never tried again

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - _now()

    def wait_is_over(self, seconds: float) -> None:
        """Account for a wait of `seconds` that has ended.

        If the latest error of every engine is `EngineBehind`, `EngineBusy` or `EngineGone`, the wait is taken from
        `patience_s`, and the deadline moves back by the same time. What exceeds `patience_s`, or the complete wait if
        there is another error, counts against the deadline.
        """
        if all(isinstance(no, EngineBehind | EngineBusy | EngineGone) for no in self.refused.values()):
            free = min(seconds, self.patience_s)
            self.patience_s -= free
            self.waited_s += free
            self.deadline += free

    @property
    def step(self) -> int:
        """The version step that an engine must have."""
        return self.request.min_step if self.request.pin_step is None else self.request.pin_step

    def waits_for(self, member: _Member) -> bool:
        """Return whether the member first has to adopt a newer version."""
        return member.name in self.behind or member.is_behind(self.step)


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
        self._members = {name: _Member(name, engine) for name, engine in engines.items()}
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
        self._members[name] = _Member(name, engine)
        self._changed.set()
        self._changed = asyncio.Event()

    def remove(self, name: str) -> None:
        """Remove an engine. It gets no new requests; those that it serves continue. Unknown names are ignored."""
        self._members.pop(name, None)

    async def drain(self, name: str, *, deadline_s: float) -> None:
        """Remove an engine and wait until the requests that it serves have ended. Its sessions go on at other engines.

        Raises `EngineError` if it is no member, and `DeadlineExceeded` after `deadline_s` seconds; then, or if the wait
        is cancelled, it is a member as before."""
        member, deadline = self._members.pop(name, None), _now() + deadline_s
        if member is None:
            raise EngineError(f"{name} is not in the fleet", f"it has {sorted(self._members)}", hint="add it first")
        try:
            while member.num_running:
                if _now() >= deadline:
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
        member, deadline = self._members.pop(name, None), _now() + deadline_s
        while member is not None and member.num_running and _now() < deadline:  # noqa: ASYNC110  requests count it
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
        attempt = _Attempt(request, _now() + request.deadline_s, self.patience_s)
        while True:
            member, sent_at = await self._next(attempt), _now()
            try:
                completion = await self._serve(member, attempt)
            except EngineError as error:
                self._after_refusal(member, attempt, error, _now() - sent_at)
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
        attempt, begun = _Attempt(request, _now() + request.deadline_s, self.patience_s), False
        while True:
            member, sent_at = await self._next(attempt), _now()
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
                self._after_refusal(member, attempt, error, _now() - sent_at)

    async def end(self, request_id: str) -> None:
        streamed = self._streaming.get(request_id)
        if streamed is None:
            return
        streamed.ended = True
        if isinstance(streamed.engine, Ending):
            await streamed.engine.end(request_id)

    async def _next(self, attempt: _Attempt) -> _Member:
        """Wait for an engine that can serve the request.

        Raises `EngineBehind` when none adopted the version, and `EngineError` at the deadline, or when no engine can
        ever serve it."""
        pause_s = RETRY_S
        while attempt.left_s > 0:
            member, began = self._choose(attempt), _now()
            if member is not None and attempt.waits_for(member):
                await self._catch_up(member, attempt, min(attempt.left_s, pause_s))
                attempt.wait_is_over(_now() - began)
            elif member is not None:
                self._regions.pop(group_of(attempt.request), None)
                self._regions[group_of(attempt.request)] = member.region
                return member
            elif attempt.excluded and attempt.excluded >= self._members.keys():
                raise next(iter(attempt.refused.values()))
            else:
                attempt.skipped.clear()
                await self._pause_between_rounds(min(attempt.left_s, pause_s))
                attempt.wait_is_over(_now() - began)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
        raise _no_engine_error(attempt)

    def _choose(self, attempt: _Attempt) -> _Member | None:
        """Choose the engine to try now, or None. One that must adopt a version first is only chosen when all must."""
        now, out = _now(), attempt.skipped | attempt.excluded
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

    def _fastest(
        self, attempt: _Attempt, able: list[_Member], home: _Member | None, region: str | None
    ) -> _Member | None:
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

    async def _serve(self, member: _Member, attempt: _Attempt) -> Completion:
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

    async def _answers(self, member: _Member) -> bool:
        if member.probe is None or member.probe.done():
            member.probe = asyncio.ensure_future(_is_healthy(member.engine, self.heartbeat_s))
        return await asyncio.shield(member.probe)

    def _after_refusal(self, member: _Member, attempt: _Attempt, error: EngineError, held_s: float) -> None:
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
                member.rests_until = _now() + REST_S

    async def _catch_up(self, member: _Member, attempt: _Attempt, patience_s: float) -> None:
        """Wait until one of the engines with an older version has adopted the demanded one.

        With stable assignment, wait until `member` has. The engines fetch the weights by themselves."""
        late = [
            m
            for m in self._members.values()
            if attempt.waits_for(m) and m.name not in attempt.skipped | attempt.excluded
        ]
        request_now = {m: _adoption(m, attempt) for m in ([member] if self.assignment is Assignment.STABLE else late)}
        done, _ = await asyncio.wait(request_now.values(), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            attempt.skipped.clear()  # a busy or new engine may be first
        for member, adoption in request_now.items():
            if adoption.done():
                attempt.behind.discard(member.name)
                _apply_adoption(member, attempt, adoption.result())

    async def _pause_between_rounds(self, pause_s: float) -> None:
        """Wait until an engine joins, at most `pause_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause_s)

    def _remember(self, request: CompletionRequest, member: _Member, completion: Completion) -> None:
        self._sessions.pop(request.session_id, None)
        if request.keep_session and completion.stop_reason is not StopReason.CANCELLED:  # that engine is behind
            self._sessions[request.session_id] = member.name
        for remembered in (self._sessions, self._regions):
            if len(remembered) > MAX_SESSIONS:
                del remembered[next(iter(remembered))]


async def _stream_parts(member: _Member, attempt: _Attempt) -> AsyncGenerator[list[int] | Completion]:
    """Stream from one engine, and count the request as running there."""
    request_now = msgspec.structs.replace(attempt.request, deadline_s=max(attempt.left_s, 0.001))
    with member.serving(request_now):
        async with contextlib.aclosing(stream_or_complete(member.engine, member.engine.generate, request_now)) as parts:
            async for part in parts:
                yield part


def rank(member: _Member, attempt: _Attempt, typical_s: float | None) -> tuple[bool, float, float, str]:
    """Return the sort key of the engine `member` for the request `attempt`. The engine with the smallest key is chosen.

    `typical_s` is the mean expected time of a request over all engines in seconds, or None if it is unknown."""
    production = member.num_production if attempt.request.traffic is Traffic.PRODUCTION else 0
    return attempt.waits_for(member), production / member.size, member.seconds(typical_s), member.name


def _adoption(member: _Member, attempt: _Attempt) -> asyncio.Task[Version | EngineError]:
    """Return the task of an engine's adopt call. All requests that wait for the same step share it."""
    if member.adoption is None or member.adoption.done() or member.adopting != attempt.step:
        member.adopting = attempt.step
        member.adoption = asyncio.ensure_future(_adopt(member.engine, attempt.step, ADOPT_S))
    return member.adoption


def _apply_adoption(member: _Member, attempt: _Attempt, result: Version | EngineError) -> None:
    if isinstance(result, EngineError):
        gone = isinstance(result, EngineGone)
        attempt.refused[member.name] = result if gone else EngineBehind(result.what, result.facts, hint=result.hint)
        attempt.skipped.add(member.name)
    elif attempt.request.pin_step is not None and result.step > attempt.request.pin_step:
        attempt.excluded.add(member.name)
    elif result.step < attempt.step:
        facts = f"step {attempt.step} was requested, and its version is of step {result.step}"
        attempt.refused[member.name] = EngineBehind(
            f"{member.name} has not loaded the requested version", facts, hint="see the engine's log"
        )
        attempt.skipped.add(member.name)
    else:
        member.saw_step(result.step)
        attempt.refused.pop(member.name, None)


def group_of(request: CompletionRequest) -> str:
    """Return the group of a request's session: its id up to the last dot, or the whole id."""
    return request.session_id.rpartition(".")[0] or request.session_id


def kv_tokens_needed(request: CompletionRequest) -> int:
    """Return the most KV tokens that a request can need: those of prompt and completion."""
    return len(request.prompt_ids) + request.sampling.max_tokens


async def _adopt(engine: Engine, step: int, deadline_s: float) -> Version | EngineError:
    try:
        return await engine.adopt(step, deadline_s=deadline_s)
    except EngineError as error:
        return error


async def _is_healthy(engine: Engine, patience_s: float) -> bool:
    try:
        await engine.info(deadline_s=patience_s)
    except EngineError:
        return False
    return True


def _no_engine_error(attempt: _Attempt) -> EngineError:
    reasons = "; ".join(f"{name}: {str(e).splitlines()[0]}" for name, e in sorted(attempt.refused.items()))
    late = any(isinstance(no, EngineBehind) for no in attempt.refused.values())
    return (EngineBehind if late else EngineError)(
        f"no engine served request {attempt.request.request_id} within {attempt.request.deadline_s:g} s",
        f"{reasons or 'the fleet has no engines'}; {attempt.waited_s:.0f} s of waiting were not counted",
        hint="see the engines' logs; restarted ones join under their new address",
    )
