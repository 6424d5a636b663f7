"""An engine's side of the registry: ask what is wanted, join, renew, join again when the lease was lost, leave.

A `Registration` is kept beside an engine of any kind, in its process or in one of its own: it knows the engine by its
URL. A registry that is not there yet, or away, is waited for, told once with what it is and until when; meanwhile the
engine goes on with what it has, and follows the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from etude.inference.client import HttpEngine
from etude.inference.errors import (
    EngineGone,
    EngineUnreachable,
    ErrorBody,
    MalformedRequest,
    NotRegistered,
    Unauthorised,
    from_http,
)
from etude.inference.fleet import Fleet
from etude.inference.registry_messages import (
    ALIVE,
    ENGINES,
    JOIN,
    LEAVE,
    RENEW,
    WANTED,
    EngineRequirements,
    JoinAnswer,
    JoinRequest,
    Renewal,
    RenewalAnswer,
    Roster,
    State,
    environment_token,
)

ANSWER_TIMEOUT_S = 10.0
RETRY_S = 1.0
WAIT_S = 3_600.0  # for a registry that is not there: a home that is resumed, or has its corpus yet to make
RENEWALS = 4  # in the time of a lease
UNAVAILABLE = (502, 503, 504)  # what stands before a registry says that nobody is behind it
T = TypeVar("T")
Report = Callable[[str], None]


def print_to_stderr(text: str) -> None:
    """To whoever started this."""
    print(text, file=sys.stderr, flush=True)


class RegistryWait:
    """For a registry, or until it reaches the engine: told once, `wait_s` at most from the first failure after a
    success."""

    def __init__(self, registry: str, wait_s: float, report: Report = print_to_stderr) -> None:
        self._registry, self._wait_s, self._report = registry, wait_s, report
        self._end: float | None = None

    def succeeded(self) -> None:
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
                self._report(f"waiting for {who} until {until}: {cause}")
        if now >= self._end:
            if unreached is not None:
                raise unreached
            facts = f"{cause}; waited {self._wait_s:g} s"
            hint = "start the run, or resume it: it is its fleet.listen"
            hint += "; --wait-s says how long it is waited for" if self._wait_s > 0 else ""
            raise DeadlineExceeded(f"no registry at {self._registry}", facts, hint=hint)


def fetch_requirements(registry: str, token: str | None, *, wait_s: float = WAIT_S) -> EngineRequirements:
    """What the run wants of an engine; waits for a registry that is not there yet. Raises `InputError` for what is no
    registry, `Unauthorised`, `DeadlineExceeded`."""
    request = urllib.request.Request(registry_url(registry) + WANTED, headers=auth_headers(token))
    waiting = RegistryWait(registry, wait_s)
    while True:
        try:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                    return parse_answer(registry, 200, answer.read(), EngineRequirements)
            except urllib.error.HTTPError as error:
                return parse_answer(registry, error.code, error.read(), EngineRequirements)
        except EngineGone as error:
            waiting.failed(error.facts)
        except OSError as error:
            waiting.failed(str(error))
        except http.client.HTTPException as error:
            raise not_a_registry(registry, repr(error)) from None
        time.sleep(RETRY_S)


def parse_answer(registry: str, status: int, body: bytes, kind: type[T]) -> T:
    """What a registry answered. Raises the error that it tells; `EngineGone` where something before it says that it is
    away; `InputError` for what no registry says."""
    try:
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        msgspec.json.decode(body, type=ErrorBody)
    except ValueError:
        facts = f"it answers {status} with {body[:60]!r}"
        if status in UNAVAILABLE:
            raise EngineGone(f"no registry answers at {registry}", facts, hint="is the run up?") from None
        raise not_a_registry(registry, facts) from None
    raise from_http(status, body, engine=registry)


def not_a_registry(registry: str, facts: str) -> InputError:
    """An error for a URL of something else."""
    return InputError(f"{registry} is no registry", facts, hint="give the run's: http://HOST:PORT of its fleet.listen")


async def call_registry(
    session: aiohttp.ClientSession,
    registry: str,
    path: str,
    kind: type[T],
    *,
    body: object = None,
    deadline_s: float = ANSWER_TIMEOUT_S,
) -> T:
    """A registry's answer: to a GET, or to a POST where something is `body`. Raises as `parse_answer` does, and
    `EngineGone` where nobody answers."""
    method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.request(method, registry_url(registry) + path, data=data, timeout=timeout) as answer:
            status, data = answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        facts = f"{type(error).__name__}: {error}"
        raise EngineGone(f"no registry answers at {registry}", facts, hint="is the run up?") from None
    return parse_answer(registry, status, data, kind)


class Registration:
    """One engine's place in a fleet. `must_answer`: the engine answers already, so that a registry which does not reach it
    when it first joins was given a wrong URL; else it is waited for."""

    def __init__(
        self,
        registry: str,
        join_request: JoinRequest,
        *,
        token: str | None,
        wait_s: float = WAIT_S,
        report: Report = print_to_stderr,
        must_answer: bool = False,
    ) -> None:
        self._must_answer = must_answer
        self.join_request, self.state = join_request, State.LOST
        self._registry, self._token, self._report = registry_url(registry), token, report
        self._wait = RegistryWait(self._registry, wait_s, report)
        self._lease, self._every_s, self._reported = "", RETRY_S, ""

    async def run(self) -> None:
        """Be a member until drained; returns then. Raises `MalformedRequest` and `Unauthorised`: the registry will not
        have it; `InputError`: it is none; `DeadlineExceeded`: it was away for `wait_s`; `EngineUnreachable`: it does
        not reach the engine."""
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            while self.state is not State.LEFT:  # noqa: ASYNC110  the state is the registry's
                await asyncio.sleep(await self._join_or_renew(session))

    async def leave(self) -> None:
        """Say goodbye, if there is a lease and somebody listens."""
        if not self._lease or self.state is State.LEFT:
            return
        renewal = Renewal(name=self.join_request.name, lease=self._lease)
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            try:
                await call_registry(session, self._registry, LEAVE, RenewalAnswer, body=renewal, deadline_s=2.0)
            except (EngineError, InputError):
                return

    async def _join_or_renew(self, session: aiohttp.ClientSession) -> float:
        """Join or renew; the seconds until the next."""
        try:
            if not self._lease:
                welcome = await call_registry(session, self._registry, JOIN, JoinAnswer, body=self.join_request)
                self._wait.succeeded()
                self._must_answer = False
                self._lease, self.state, self._every_s = welcome.lease, State.CATCHING_UP, welcome.lease_s / RENEWALS
                self._report_change(f"{self.join_request.name} has joined {self._registry}")
                return 0.0
            renewal = Renewal(name=self.join_request.name, lease=self._lease)
            every_s = self._every_s
            self.state = (
                await call_registry(session, self._registry, RENEW, RenewalAnswer, body=renewal, deadline_s=every_s)
            ).state
            self._wait.succeeded()
            self._report_change(f"{self.join_request.name} is {self.state}")
            return every_s
        except (MalformedRequest, Unauthorised):
            raise
        except NotRegistered as error:
            self._lease = ""
            self._report_change(error.what)
            return 0.0
        except EngineUnreachable as error:
            if self._must_answer:
                raise
            self._reported = ""
            self._wait.failed(f"{error.what}: {error.facts}", error)
            return RETRY_S
        except EngineError as error:
            self._reported = ""
            self._wait.failed(error.facts if isinstance(error, EngineGone) else f"{error.what}: {error.facts}")
            return RETRY_S

    def _report_change(self, text: str) -> None:
        """What is new, once."""
        if text != self._reported:
            self._report(text)
        self._reported = text


def make_registration(args: argparse.Namespace, listener: socket.socket, token: str | None) -> Registration | None:
    """The place that an engine is to have in a fleet elsewhere, not yet taken; None where it joins none."""
    if not args.register:
        return None
    listener.listen()  # whoever calls before the engine serves waits for it, instead of being refused
    host, port = listener.getsockname()[:2]
    host = local_address_for(args.register) if host in ("0.0.0.0", "::") else host
    url = args.advertise or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    request = JoinRequest(name=args.name, url=url, region=args.region, standby=args.standby)
    return Registration(args.register, request, token=token, wait_s=args.wait_s)


async def run_registration(registration: Registration) -> None:
    """Until it is drained, or the registry will not have it: then the process ends."""
    try:
        await registration.run()
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    os._exit(0)  # it has finished what it had; what it started ends with it


def local_address_for(registry: str) -> str:
    """This host's address on its way to the registry: what others may reach it at, behind no translation."""
    parts = urlsplit(registry)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname, port))  # sends nothing
        return str(way.getsockname()[0])


def registry_url(registry: str) -> str:
    """The URL of a registry, checked. Raises `InputError`."""
    if urlsplit(registry).scheme not in ("http", "https") or not urlsplit(registry).hostname:
        raise InputError(f"{registry!r} is no registry", hint="write http://HOST:PORT, the run's fleet.listen")
    return registry.rstrip("/")


def auth_headers(token: str | None) -> dict[str, str]:
    """The headers of a request to a registry."""
    return {"authorization": f"Bearer {token}"} if token else {}


POLL_S, ROSTER_TIMEOUT_S = 1.0, 5.0
GIVEN_WORK = ALIVE - {State.CATCHING_UP}


class FleetUpdater:
    """Applies rosters to a fleet: joins, changed addresses, the lost, and what is known of each."""

    def __init__(self, fleet: Fleet, *, token: str | None = None) -> None:
        self.fleet, self._token = fleet, token or environment_token()
        self._known: dict[str, HttpEngine] = {}

    async def apply(self, roster: Roster) -> None:
        """The fleet as it is now. What an engine that is lost was asked is asked elsewhere at once."""
        listed = {name: one for name, one in roster.items() if one.state in GIVEN_WORK}
        for name in self._known.keys() - listed.keys():
            self.fleet.remove(name)
            await self._known.pop(name).close()
        for name, one in listed.items():
            old = self._known.get(name)
            if old is None or old.url != one.url:
                self._known[name] = HttpEngine(one.url, token=self._token)
                self.fleet.add(name, self._known[name])
                if old is not None:
                    await old.close()
            self.fleet.update(name, one)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.apply({})

    async def poll_registry(self, url: str) -> None:
        """Ask the registry again and again, for ever. One that does not answer, or has something else answer in its
        place, leaves the fleet as it was."""
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            while True:
                with contextlib.suppress(EngineGone, InputError):
                    await self.apply(await fetch_roster(session, url))
                await asyncio.sleep(POLL_S)


async def fetch_roster(session: aiohttp.ClientSession, url: str) -> Roster:
    """What a registry lists. Raises as `registering.call_registry` does."""
    return await call_registry(session, url, ENGINES, Roster, deadline_s=ROSTER_TIMEOUT_S)
