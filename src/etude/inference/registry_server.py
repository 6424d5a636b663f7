"""Serves the engine registry over HTTP, and probes every engine each `PROBE_INTERVAL_S` seconds.

Joining is refused when it could not work: the engine does not respond at the URL that it gives, accepts another token
than the run's, lacks a capability that the run needs, or has the name of a living engine. The caller serves `app` and
runs `watch`, and gets callbacks for each probe and for each engine whose state changed. A slow engine delays neither
the probes of others nor the callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.errors import EngineError, EtudeError, MalformedRequest
from etude.inference.client import HttpEngine
from etude.inference.errors import EngineGone, EngineUnreachable, Unauthorised, to_http
from etude.inference.registry import Registry
from etude.inference.registry_messages import (
    ALIVE,
    DRAIN,
    ENGINES,
    JOIN,
    LEAVE,
    NO_VERSION,
    RENEW,
    WANTED,
    DrainRequest,
    EngineRequirements,
    JoinAnswer,
    JoinRequest,
    ListedEngine,
    Renewal,
    RenewalAnswer,
    Roster,
    State,
)
from etude.inference.wire import JSON
from etude.records.completion import Version
from etude.seams import EngineInfo

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 3.0  # deadline of one probe
TOKEN_TIMEOUT_S = 1.0  # deadline of the request that checks the token
MAX_BODY = 16 * 1024
T = TypeVar("T")


class RegistryServer:
    """The registry of one run's engines, its HTTP endpoints, and the probes of engines.

    - `requirements`: what engines need to serve the run.
    - `token`: the bearer token of all requests, also of those to engines. None: no check.
    - `reserved`: names that engines must not join under.
    - `interval_s`: the time between two probes of an engine, in seconds."""

    def __init__(
        self,
        requirements: EngineRequirements,
        *,
        token: str | None,
        reserved: Container[str] = (),
        registry: Registry | None = None,
        interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self.requirements, self.registry = requirements, registry or Registry()
        self.engines: dict[str, HttpEngine] = {}  # clients of all engines that have not left
        self.roster: Roster = {}  # as of the last probe
        self._token, self._reserved, self._interval_s = token, reserved, interval_s
        self._probes: dict[str, asyncio.Task[None]] = {}

    @property
    def app(self) -> Starlette:
        """A new ASGI app with the HTTP endpoints."""
        return Starlette(
            routes=[
                Route(WANTED, self._authenticated(self._requirements)),
                Route(ENGINES, self._authenticated(self._listing)),
                Route(JOIN, self._authenticated(self._join), methods=["POST"]),
                Route(RENEW, self._authenticated(self._renew), methods=["POST"]),
                Route(LEAVE, self._authenticated(self._leave), methods=["POST"]),
                Route(DRAIN, self._authenticated(self._drain), methods=["POST"]),
            ]
        )

    async def watch(
        self, on_change: Callable[[str, ListedEngine], None], on_probe: Callable[[Roster], Awaitable[dict[str, int]]]
    ) -> None:
        """Probe all engines and report, forever.

        `on_change(name, engine)` is called for each engine whose state changed since the last round. `on_probe(roster)`
        is called after each round, and returns the number of sessions by engine. A draining engine has finished when it
        had no session and no running request for a round."""
        previous: Roster = {}
        while True:
            began = time.monotonic()
            self._probe_all()
            roster = self.registry.roster(now=time.monotonic())
            both = roster.keys() & previous.keys()
            draining = {n for n in both if roster[n].state is previous[n].state is State.DRAINING}
            new = {n: one for n, one in roster.items() if n not in previous or previous[n].state is not one.state}
            left = {n: msgspec.structs.replace(previous[n], state=State.LEFT) for n in previous.keys() - roster.keys()}
            previous = self.roster = roster
            await self._close_lost([*left, *(name for name, one in new.items() if one.state is State.LOST)], left)
            for name, listed in (new | left).items():
                on_change(name, listed)
            sessions = await on_probe(roster)
            for name in draining:
                if not (sessions.get(name) or roster[name].num_running):
                    self.registry.finish_drain(name)
            await asyncio.sleep(max(0.0, self._interval_s - (time.monotonic() - began)))

    async def _close_lost(self, names: Sequence[str], left: Container[str]) -> None:
        """Close the connections to lost engines, so that nothing waits for them.

        Engines that left are not probed again."""
        engines = {name: self.engines[name] for name in names if name in self.engines}
        for name, engine in engines.items():
            if self.engines.get(name) is not engine:
                continue  # it has joined again
            if name in left:
                await self._close(name)
            else:
                await engine.close()

    def set_head(self, version: Version) -> None:
        """Set the newest published version.

        Engines get no work from now on if their weights belong to versions that a restarted learner has lost."""
        self.registry.set_head(version)
        self.roster = self.registry.roster(now=time.monotonic())

    def serving(self) -> dict[str, HttpEngine]:
        """Return clients of the engines that are alive and not catching up, by name."""
        held = ALIVE - {State.CATCHING_UP}
        return {n: self.engines[n] for n, one in self.roster.items() if one.state in held and n in self.engines}

    async def close(self) -> None:
        """Stop all probes and close the connections."""
        for name in list(self.engines):
            await self._close(name)

    def _probe_all(self) -> None:
        """Start a probe of each engine whose last probe has ended."""
        for name, engine in self.engines.items():
            if name not in self._probes:
                task = asyncio.create_task(self._probe(name, engine), name=f"probe {name}")
                self._probes[name] = task
                task.add_done_callback(functools.partial(self._probe_done, name))

    def _probe_done(self, name: str, _: asyncio.Task[None]) -> None:
        self._probes.pop(name, None)

    async def _probe(self, name: str, engine: HttpEngine) -> None:
        info: EngineInfo | None = None
        with contextlib.suppress(EngineError):
            info = await engine.info(deadline_s=PROBE_TIMEOUT_S)
        if self.engines.get(name) is engine:
            self.registry.record_probe(name, info)

    async def _close(self, name: str) -> None:
        engine, probe = self.engines.pop(name, None), self._probes.get(name)
        if probe is not None:  # a running probe would open a new connection
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        if engine is not None:
            await engine.close()

    # HTTP handlers

    def _authenticated(
        self, handler: Callable[[Request], Awaitable[object]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").encode()
                if self._token is not None and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                    raise Unauthorised(
                        "the bearer token is missing or wrong", hint="set ETUDE_TOKEN to the run's token"
                    )
                return Response(msgspec.json.encode(await handler(request)), media_type=JSON)
            except EtudeError as error:
                status, body = to_http(error)
                return Response(body, status, media_type=JSON)

        return answer

    async def _requirements(self, _: Request) -> EngineRequirements:
        return self.requirements

    async def _listing(self, _: Request) -> Roster:
        return self.registry.roster(now=time.monotonic())

    async def _join(self, request: Request) -> JoinAnswer:
        join = await _read(request, JoinRequest)
        if not join.name or len(join.name) > 100 or not join.url.startswith(("http://", "https://")):
            raise MalformedRequest(
                "an engine asked to join without a valid name and URL",
                repr(join),
                hint="give a name of at most 100 characters, and a URL such as http://host:port",
            )
        await self._refuse_if_taken(join)
        engine = HttpEngine(join.url, token=self._token)
        try:
            info = await engine.info(deadline_s=PROBE_TIMEOUT_S)
            refuse_unfit(join.name, info, self.requirements)
            await _refuse_wrong_token(join, engine)
        except EngineError as error:
            await engine.close()
            if isinstance(error, (MalformedRequest, Unauthorised)):
                raise
            facts = error.facts if isinstance(error, EngineGone) else f"{error.what}: {error.facts}"
            hint = "give the URL at which the run reaches the engine: --advertise http://HOST:PORT"
            raise EngineUnreachable(f"{join.name} does not answer at {join.url}", facts, hint=hint) from None
        await self._close(join.name)
        lease = self.registry.join(join, now=time.monotonic())
        self.registry.record_probe(join.name, info)
        self.engines[join.name] = engine
        return JoinAnswer(lease=lease, lease_s=self.registry.lease_s)

    async def _refuse_if_taken(self, join: JoinRequest) -> None:
        member = self.registry.members.get(join.name)
        state = self.registry.states(now=time.monotonic()).get(join.name)
        taken = "the run starts an engine of this name itself" if join.name in self._reserved else ""
        if member is not None and state in ALIVE and member.joined.url != join.url:
            try:
                await self.engines[join.name].info(deadline_s=PROBE_TIMEOUT_S)
                taken = f"it answers at {member.joined.url}"
            except EngineError:
                pass  # the old engine is gone, and this one replaces it
        if taken:
            what = f"the fleet already has an engine with the name {join.name!r}"
            raise MalformedRequest(what, taken, hint="choose another --name")

    async def _renew(self, request: Request) -> RenewalAnswer:
        join = await _read(request, Renewal)
        return RenewalAnswer(state=self.registry.renew(join.name, join.lease, now=time.monotonic()))

    async def _leave(self, request: Request) -> RenewalAnswer:
        join = await _read(request, Renewal)
        self.registry.leave(join.name, join.lease)
        return RenewalAnswer(state=State.LEFT)

    async def _drain(self, request: Request) -> RenewalAnswer:
        name = (await _read(request, DrainRequest)).name
        self.registry.drain(name)
        return RenewalAnswer(state=self.registry.states(now=time.monotonic())[name])


def refuse_unfit(name: str, info: EngineInfo, requirements: EngineRequirements) -> None:
    """Raise `MalformedRequest` for an engine that does not meet the requirements of the run.

    Checked are its capabilities, its context and its parity class (processes of one class compute the same bits)."""
    needed = {"adopt", "spans", "verify"} | ({"routes"} if requirements.routes else set())
    if missing := needed - set(info.capabilities):
        facts = f"the run needs {', '.join(sorted(missing))}; the engine has {', '.join(sorted(info.capabilities))}"
        raise MalformedRequest(
            f"{name} cannot serve this run",
            facts,
            hint="join with an engine that has these capabilities: see docs/guides/regions.md",
        )
    if info.context_tokens < requirements.context_tokens:
        raise MalformedRequest(
            f"{name} has a context of {info.context_tokens} tokens",
            f"the run needs {requirements.context_tokens}",
            hint=f"start it with --context-tokens {requirements.context_tokens}",
        )
    if requirements.parity and info.parity != requirements.parity:
        raise MalformedRequest(
            f"{name} does not compute the same bits as the learner",
            f"its parity class is {info.parity!r}, and that of the learner {requirements.parity!r}",
            hint="run it on the same kind of host and build, or set numerics.mode = 'native'",
        )


async def _refuse_wrong_token(join: JoinRequest, engine: HttpEngine) -> None:
    """Raise `Unauthorised` when the engine has another token than the run.

    GET /info needs no token, so this sends an adopt request that every engine satisfies."""
    try:
        await engine.adopt(NO_VERSION.step, deadline_s=TOKEN_TIMEOUT_S)
    except Unauthorised as error:
        what = f"{join.name} does not accept the run's token"
        hint = "start the engine with the ETUDE_TOKEN that the run has, and join again"
        raise Unauthorised(what, f"{join.url} says: {error.what}", hint=hint) from None
    except EngineError:
        return  # the token was accepted


async def _read(request: Request, kind: type[T]) -> T:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise MalformedRequest("the body is too large", f"over {MAX_BODY} bytes", hint=f"send a {kind.__name__}")
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except ValueError as error:
        raise MalformedRequest(f"the body is not a {kind.__name__}", str(error), hint="send it as JSON") from None
