"""Serves rollouts from engines that production lends for a while: a `Policy` that can lose its engines.

If the engine of a request is taken, the request ends there with the tokens that it has (`seams.Ending`). It goes on at
another engine, at once or when one is lent again: the sampled tokens become part of the next prompt. Random
numbers depend on the seed and the position alone, so under the same weights the tokens are those of an undisturbed
request. The parts are joined to one `Completion`; each token keeps the log-probability, the version and the routes with
which it was sampled."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import msgspec

from etude.errors import ContextFull, EngineError, MalformedRequest
from etude.inference.partial_completions import is_complete, joined, rest_of
from etude.records.completion import Completion, CompletionRequest, Traffic
from etude.seams import Ending, Engine, stream_or_complete

PATIENCE_S = 3_600.0
END_S, POLL_S = 5.0, 0.002
REST_S = 2.0  # an engine that failed gets no request for so long


class NotLent(EngineError):
    """Raised for a rollout request that waited too long for a lent engine.

    `partial` has the tokens that were sampled before; None: there are none. To continue, send a request whose prompt is
    the old prompt followed by these tokens."""

    partial: Completion | None = None


class _Running:
    """A request on one engine: the task that reads its stream, and the number of tokens that it has got."""

    def __init__(self, engine: Engine, request: CompletionRequest) -> None:
        self.num_tokens = 0
        self.task = asyncio.ensure_future(self._read(engine, request))

    async def _read(self, engine: Engine, request: CompletionRequest) -> Completion:
        async with contextlib.aclosing(stream_or_complete(engine, engine.generate, request)) as parts:
            async for part in parts:
                if isinstance(part, Completion):
                    return part
                self.num_tokens += len(part)
        raise EngineError(f"request {request.request_id} ended without a completion", hint="see the engine's log")


@dataclass(eq=False)
class _Member:
    engine: Engine
    running: dict[str, _Running] = field(default_factory=dict)
    taken: bool = False
    rests_until: float = 0.0


class LentEngines:
    """The engines that are lent at the moment, used as one policy for rollouts. It implements `seams.Policy`.

    - `patience_s`: the longest time in seconds that a request waits for an engine.
    - `end_s`: how long `take` waits for the partial completions of an engine, in seconds. Requests that have not
      ended by then are cancelled, and lose the tokens that this engine sampled.

    Requests with penalties, truncation or a grammar (not `Sampling.plain`) start again after they lost their engine.
    Use it in one event loop."""

    def __init__(self, *, patience_s: float = PATIENCE_S, end_s: float = END_S) -> None:
        self.patience_s, self.end_s = patience_s, end_s
        self.num_resumed_tokens = 0  # tokens of requests that went on after their engine was taken
        self.num_lost_tokens = 0  # tokens that were streamed and had to be sampled again
        self._members: dict[str, _Member] = {}
        self._changed = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """The names of the engines."""
        return list(self._members)

    def add(self, name: str, engine: Engine) -> None:
        """Add an engine. Waiting requests may begin there at once."""
        self._members[name] = _Member(engine)
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, name: str) -> None:
        """Remove an engine. Unknown names are ignored.

        Its requests end within `end_s` seconds, and go on at other engines; afterwards the engine has none of them."""
        member = self._members.pop(name, None)
        if member is None:
            return
        member.taken = True
        if not member.running:
            return
        with contextlib.suppress(EngineError):  # an engine that is gone has nothing to end
            await member.engine.pause()  # no token is sampled that nobody waits for
            try:
                await self._end_all(member)
            finally:
                await member.engine.resume()
        for one in list(member.running.values()):
            one.task.cancel()

    async def _end_all(self, member: _Member) -> None:
        """End the requests of a paused engine, and wait until it has none."""
        engine, loop = member.engine, asyncio.get_running_loop()
        deadline, tasks = loop.time() + self.end_s, [one.task for one in member.running.values()]
        if isinstance(engine, Ending):
            await asyncio.gather(*(engine.end(request_id) for request_id in list(member.running)))
            info = await engine.info()
            unended = info.num_running + info.num_waiting  # they have no tokens
            going = set(tasks)
            while len(going) > unended and (left_s := deadline - loop.time()) > 0:
                _, going = await asyncio.wait(going, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        while loop.time() < deadline:
            info = await engine.info()
            if not info.num_running + info.num_waiting:
                return
            await asyncio.sleep(POLL_S)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample a completion on lent engines, like `seams.Policy.complete`. The request's `traffic` is set to
        `Traffic.ROLLOUT`.

        Raises `NotLent` when it waited `patience_s` seconds for an engine."""
        request = msgspec.structs.replace(request, traffic=Traffic.ROLLOUT)
        done: Completion | None = None
        while True:
            member = await self._next(request, done)
            part = await self._part(member, rest_of(request, done))
            done = joined(request, done, part) if part is not None else done
            if done is not None and is_complete(request, done):
                return done
            if not request.sampling.plain and done is not None:
                self.num_lost_tokens += len(done.token_ids)
                done = None
            self.num_resumed_tokens += len(done.token_ids) if done is not None else 0

    async def _next(self, request: CompletionRequest, done: Completion | None) -> _Member:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience_s
        while (now := loop.time()) < deadline:
            able = [one for one in self._members.values() if one.rests_until <= now]
            if able:
                return min(able, key=lambda one: len(one.running))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(deadline - now, REST_S))
        error = NotLent(
            f"no engine was lent for request {request.request_id}",
            f"it waited {self.patience_s:g} s and has {0 if done is None else len(done.token_ids)} tokens",
            hint="lend engines, give the request more patience, or continue its partial completion elsewhere",
        )
        error.partial = done
        raise error

    async def _part(self, member: _Member, request: CompletionRequest) -> Completion | None:
        """Run a request on one engine. None: the engine failed, or was taken before the first token."""
        running = member.running[request.request_id] = _Running(member.engine, request)
        try:
            return await running.task
        except (MalformedRequest, ContextFull):
            raise
        except asyncio.CancelledError:
            mine = asyncio.current_task()
            if not member.taken or (mine is not None and mine.cancelling()):
                raise
            self.num_lost_tokens += running.num_tokens
        except EngineError:
            self.num_lost_tokens += running.num_tokens
            member.rests_until = asyncio.get_running_loop().time() + REST_S
        finally:
            running.task.cancel()
            del member.running[request.request_id]
        return None
