"""What a fleet knows of its engines (paces, loads, versions) and of a request that waits for one (refusals)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from etude.errors import EngineBehind, EngineError
from etude.inference.errors import EngineBusy, EngineGone
from etude.records.completion import CompletionRequest, Traffic, Version
from etude.seams import Engine

STAY_FACTOR = 2.0  # a session or group stays while its call takes at most this factor of the time elsewhere
ADOPT_S = 60.0  # deadline of one adopt call; it is repeated


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


def loop_time() -> float:
    """Return the time of the running event loop in seconds."""
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class Member:
    """An engine of a fleet: its load, its version, and whether it can be used now."""

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
        return self.pace.known(loop_time())

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
        began, crowd = loop_time(), self.num_running
        try:
            yield
            now = loop_time()
            self.pace.served(now - began, (crowd + self.num_running) / 2, now=now)
        finally:
            self._count(-1, production, -kv_tokens_needed(request))

    def _count(self, number: int, production: bool, kv_tokens: int) -> None:
        self.num_running += number
        self.num_production += number * production
        if self.kv_tokens is not None:
            self.kv_tokens -= kv_tokens


@dataclass
class Attempt:
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
        return self.deadline - loop_time()

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

    def waits_for(self, member: Member) -> bool:
        """Return whether the member first has to adopt a newer version."""
        return member.name in self.behind or member.is_behind(self.step)


def rank(member: Member, attempt: Attempt, typical_s: float | None) -> tuple[bool, float, float, str]:
    """Return the sort key of the engine `member` for the request `attempt`. The engine with the smallest key is chosen.

    `typical_s` is the mean expected time of a request over all engines in seconds, or None if it is unknown."""
    production = member.num_production if attempt.request.traffic is Traffic.PRODUCTION else 0
    return attempt.waits_for(member), production / member.size, member.seconds(typical_s), member.name


def adoption_of(member: Member, attempt: Attempt) -> asyncio.Task[Version | EngineError]:
    """Return the task of an engine's adopt call. All requests that wait for the same step share it."""
    if member.adoption is None or member.adoption.done() or member.adopting != attempt.step:
        member.adopting = attempt.step
        member.adoption = asyncio.ensure_future(_adopt(member.engine, attempt.step, ADOPT_S))
    return member.adoption


def apply_adoption(member: Member, attempt: Attempt, result: Version | EngineError) -> None:
    """Record for a request what an engine's adopt call returned: its version, or its error."""
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
