"""Gives lent engines to a run: each joins the run's registry while it is lent, and leaves when it is taken back.

The run uses them like any engine that joins (`inference.registry_server`). A taken engine loads an older version at
once; thereby it ends the rollouts that demand a newer one, and these go on at other engines of the run with the tokens
that they have (`inference.partial_completions`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import aiohttp

from etude.errors import DeadlineExceeded, EngineError, EtudeError
from etude.inference import HttpEngine
from etude.inference.registry_client import Registration, auth_headers, fetch_roster
from etude.inference.registry_messages import JoinRequest, State
from etude.seams import Engine

POLL_S = 1.0  # between two looks at the registry


class RegisteredEngines:
    """The engines that are lent to the run with this registry. It implements `harvester.Borrower`.

    - `registry`, `token`: the URL of the run's registry, and its bearer token, which the engines accept, too.
    - `silence_s`: a run whose registry does not answer for so long has ended: `wanted` is then False. So it is for this
      time after the run refused an engine, or had an engine for so long that never got its newest version.
    - `report`: called with a line for each change.

    Use it in one event loop, and run `watch` beside it."""

    def __init__(self, registry: str, *, token: str | None, silence_s: float, report: Callable[[str], None]) -> None:
        self._registry, self._token = registry, token
        self._silence_s, self._report = silence_s, report
        self._members: dict[str, tuple[Registration, asyncio.Task[None]]] = {}
        self._answered_at, self._refused_at = -silence_s, -silence_s

    @property
    def wanted(self) -> bool:
        """Whether engines can be lent now: the run answers, and has refused none lately."""
        now = time.monotonic()
        return now - self._answered_at < self._silence_s <= now - self._refused_at

    async def watch(self) -> None:
        """Ask the registry for its engines every second, until cancelled, to see whether the run is there."""
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            answered: bool | None = None
            while True:
                reason = ""
                try:
                    await fetch_roster(session, self._registry)
                    self._answered_at = time.monotonic()
                except EtudeError as error:
                    reason = f"{error.what}: {error.facts}"
                if answered is not (answered := not reason):
                    self._report("the run answers" if answered else f"no run: {reason}")
                await asyncio.sleep(POLL_S)

    def add(self, name: str, engine: Engine) -> None:
        """Have an engine, an `HttpEngine`, join the run."""
        assert isinstance(engine, HttpEngine), "the run reaches it at its URL"
        request = JoinRequest(name=name, url=engine.url)
        registration = Registration(
            self._registry,
            request,
            token=self._token,
            wait_s=self._silence_s,
            report=lambda _: None,
            must_answer=True,
        )
        task = asyncio.create_task(self._keep(name, registration), name=f"lend {name}")
        self._members[name] = (registration, task)

    async def take(self, name: str) -> None:
        """Have an engine leave the run. Unknown names are ignored. Its rollouts are still running when this returns."""
        found = self._members.pop(name, None)
        if found is None:
            return
        registration, task = found
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await registration.leave()

    async def _keep(self, name: str, registration: Registration) -> None:
        """Keep an engine registered until it is taken. An error means that the run does not want it."""
        work = asyncio.create_task(registration.run())
        try:
            async with asyncio.timeout(self._silence_s) as limit:
                while not work.done() and registration.state is not State.SERVING:
                    await asyncio.wait({work}, timeout=0.1)
                limit.reschedule(None)
                await work
        except TimeoutError:
            error: EtudeError = DeadlineExceeded(
                f"the run gave {name} no work within {self._silence_s:g} s",
                f"it is {registration.state}",
                hint="lend to the run whose weights are served: engines load only versions of their own store",
            )
        except EtudeError as one:
            error = one
        else:  # somebody drained it
            error = EngineError(f"the run has let {name} go", "it was drained", hint="it is lent again later")
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, EtudeError):
                await work
        self._refused_at = time.monotonic()
        self._report(str(error).replace("\n", "; "))
