"""An engine's side of the registry: ask what is wanted, join, renew, join again when the lease was lost, leave.

A `Registration` is kept beside an engine of any kind, in its process or in one of its own: it knows the engine by its
URL. A registry that is not there yet, or away, is waited for, told once with what it is and until when; meanwhile the
engine goes on with what it has, and follows the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from etude.errors import DeadlineExceeded, EngineError, EtudeError, InputError
from etude.inference.errors import (
    EngineGone,
    EngineUnreachable,
    ErrorBody,
    MalformedRequest,
    NotRegistered,
    Unauthorised,
    from_http,
)
from etude.inference.membership import (
    JOIN,
    LEAVE,
    RENEW,
    WANTED,
    Join,
    Renewal,
    Standing,
    State,
    Wanted,
    Welcome,
)

ANSWER_S = 10.0
AGAIN_S = 1.0
WAIT_S = 3_600.0  # for a registry that is not there: a home that is resumed, or has its corpus yet to make
RENEWALS = 4  # in the time of a lease
AWAY = (502, 503, 504)  # what stands before a registry says that nobody is behind it
T = TypeVar("T")
Said = Callable[[str], None]


def say(text: str) -> None:
    """To whoever started this."""
    print(text, file=sys.stderr, flush=True)


class Waiting:
    """For a registry, or until it reaches the engine: told once, `wait_s` at most from the first failure after a
    success."""

    def __init__(self, registry: str, wait_s: float, said: Said = say) -> None:
        self._registry, self._wait_s, self._said = registry, wait_s, said
        self._end: float | None = None

    def answered(self) -> None:
        """It is there."""
        self._end = None

    def failed(self, cause: str, unreached: EngineUnreachable | None = None) -> None:
        """It is not, or it does not reach the engine. Raises `DeadlineExceeded`, or `unreached`."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._wait_s
            if self._wait_s > 0:
                until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._wait_s))
                who = f"the registry at {self._registry}"
                who = f"{who} to reach the engine" if unreached else who
                self._said(f"waiting for {who} until {until}: {cause}")
        if now >= self._end:
            if unreached is not None:
                raise unreached
            facts = f"{cause}; waited {self._wait_s:g} s"
            hint = "start the run, or resume it: it is its fleet.listen"
            hint += "; --wait-s says how long it is waited for" if self._wait_s > 0 else ""
            raise DeadlineExceeded(f"no registry at {self._registry}", facts, hint=hint)


def wanted(registry: str, token: str | None, *, wait_s: float = WAIT_S) -> Wanted:
    """What the run wants of an engine; waits for a registry that is not there yet. Raises `InputError` for what is no
    registry, `Unauthorised`, `DeadlineExceeded`."""
    asked = urllib.request.Request(base(registry) + WANTED, headers=bearing(token))
    waiting = Waiting(registry, wait_s)
    while True:
        try:
            try:
                with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
                    return understood(registry, 200, answer.read(), Wanted)
            except urllib.error.HTTPError as error:
                return understood(registry, error.code, error.read(), Wanted)
        except EngineGone as error:
            waiting.failed(error.facts)
        except OSError as error:
            waiting.failed(str(error))
        except http.client.HTTPException as error:
            raise no_registry(registry, repr(error)) from None
        time.sleep(AGAIN_S)


def understood(registry: str, status: int, body: bytes, kind: type[T]) -> T:
    """What a registry answered. Raises the error that it tells; `EngineGone` where something before it says that it is
    away; `InputError` for what no registry says."""
    try:
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        msgspec.json.decode(body, type=ErrorBody)
    except ValueError:
        facts = f"it answers {status} with {body[:60]!r}"
        if status in AWAY:
            raise EngineGone(f"no registry answers at {registry}", facts, hint="is the run up?") from None
        raise no_registry(registry, facts) from None
    raise from_http(status, body, engine=registry)


def no_registry(registry: str, facts: str) -> InputError:
    """An error for a URL of something else."""
    return InputError(f"{registry} is no registry", facts, hint="give the run's: http://HOST:PORT of its fleet.listen")


async def answer_of(
    session: aiohttp.ClientSession,
    registry: str,
    path: str,
    kind: type[T],
    *,
    asked: object = None,
    deadline_s: float = ANSWER_S,
) -> T:
    """A registry's answer: to a GET, or to a POST where something is `asked`. Raises as `understood` does, and
    `EngineGone` where nobody answers."""
    method, data = ("GET", None) if asked is None else ("POST", msgspec.json.encode(asked))
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.request(method, base(registry) + path, data=data, timeout=timeout) as answer:
            status, said = answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        facts = f"{type(error).__name__}: {error}"
        raise EngineGone(f"no registry answers at {registry}", facts, hint="is the run up?") from None
    return understood(registry, status, said, kind)


class Registration:
    """One engine's place in a fleet. `runs`: the engine answers already, so that a registry which does not reach it
    when it first joins was given a wrong URL; else it is waited for."""

    def __init__(
        self,
        registry: str,
        asked: Join,
        *,
        token: str | None,
        wait_s: float = WAIT_S,
        said: Said = say,
        runs: bool = False,
    ) -> None:
        self._must_answer = runs
        self.asked, self.state = asked, State.LOST
        self._registry, self._token, self._said = base(registry), token, said
        self._waiting = Waiting(self._registry, wait_s, said)
        self._lease, self._every_s, self._told = "", AGAIN_S, ""

    async def keep(self) -> None:
        """Be a member until drained; returns then. Raises `MalformedRequest` and `Unauthorised`: the registry will not
        have it; `InputError`: it is none; `DeadlineExceeded`: it was away for `wait_s`; `EngineUnreachable`: it does
        not reach the engine."""
        async with aiohttp.ClientSession(headers=bearing(self._token)) as session:
            while self.state is not State.LEFT:  # noqa: ASYNC110  the state is the registry's
                await asyncio.sleep(await self._tried(session))

    async def leave(self) -> None:
        """Say goodbye, if there is a lease and somebody listens."""
        if not self._lease or self.state is State.LEFT:
            return
        renewal = Renewal(name=self.asked.name, lease=self._lease)
        async with aiohttp.ClientSession(headers=bearing(self._token)) as session:
            try:
                await answer_of(session, self._registry, LEAVE, Standing, asked=renewal, deadline_s=2.0)
            except (EngineError, InputError):
                return

    async def _tried(self, session: aiohttp.ClientSession) -> float:
        """Join or renew; the seconds until the next."""
        try:
            if not self._lease:
                welcome = await answer_of(session, self._registry, JOIN, Welcome, asked=self.asked)
                self._waiting.answered()
                self._must_answer = False
                self._lease, self.state, self._every_s = welcome.lease, State.CATCHING_UP, welcome.lease_s / RENEWALS
                self._tell(f"{self.asked.name} has joined {self._registry}")
                return 0.0
            renewal = Renewal(name=self.asked.name, lease=self._lease)
            every_s = self._every_s
            self.state = (
                await answer_of(session, self._registry, RENEW, Standing, asked=renewal, deadline_s=every_s)
            ).state
            self._waiting.answered()
            self._tell(f"{self.asked.name} is {self.state}")
            return every_s
        except (MalformedRequest, Unauthorised):
            raise
        except NotRegistered as error:
            self._lease = ""
            self._tell(error.what)
            return 0.0
        except EngineUnreachable as error:
            if self._must_answer:
                raise
            self._told = ""
            self._waiting.failed(f"{error.what}: {error.facts}", error)
            return AGAIN_S
        except EngineError as error:
            self._told = ""
            self._waiting.failed(error.facts if isinstance(error, EngineGone) else f"{error.what}: {error.facts}")
            return AGAIN_S

    def _tell(self, text: str) -> None:
        """What is new, once."""
        if text != self._told:
            self._said(text)
        self._told = text


def registration_of(args: argparse.Namespace, listener: socket.socket, token: str | None) -> Registration | None:
    """The place that an engine is to have in a fleet elsewhere, not yet taken; None where it joins none."""
    if not args.register:
        return None
    listener.listen()  # whoever calls before the engine serves waits for it, instead of being refused
    host, port = listener.getsockname()[:2]
    host = address_towards(args.register) if host in ("0.0.0.0", "::") else host
    url = args.advertise or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    asked = Join(name=args.name, url=url, region=args.region, standby=args.standby)
    return Registration(args.register, asked, token=token, wait_s=args.wait_s)


async def be_member(registration: Registration) -> None:
    """Until it is drained, or the registry will not have it: then the process ends."""
    try:
        await registration.keep()
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    os._exit(0)  # it has finished what it had; what it started ends with it


def address_towards(registry: str) -> str:
    """This host's address on its way to the registry: what others may reach it at, behind no translation."""
    parts = urlsplit(registry)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname, port))  # sends nothing
        return str(way.getsockname()[0])


def base(registry: str) -> str:
    """The URL of a registry, checked. Raises `InputError`."""
    if urlsplit(registry).scheme not in ("http", "https") or not urlsplit(registry).hostname:
        raise InputError(f"{registry!r} is no registry", hint="write http://HOST:PORT, the run's fleet.listen")
    return registry.rstrip("/")


def bearing(token: str | None) -> dict[str, str]:
    """The headers of a request to a registry."""
    return {"authorization": f"Bearer {token}"} if token else {}
