"""Engines from elsewhere in a run: its registry listens at ``fleet.listen`` while the crew is up.

The conductor holds the registry, since it alone knows what is published, who works and how much may run. What happens
to an engine is an event (`fleet.state`), and so is how each is, every beat (`fleet.load`): the lanes of the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from etude.errors import ConfigError, DeadlineExceeded, EtudeError
from etude.inference.registry_messages import EngineRequirements, ListedEngine, Roster, State, environment_token
from etude.inference.registry_server import RegistryServer
from etude.listening import bind, listening
from etude.loop.config import RunConfig
from etude.loop.places import weights_place
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.weights.chain.signing import read_signer

NONE_S, POLL_S = 600.0, 0.1
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
Beat = Callable[[Roster], Awaitable[dict[str, int]]]


def check_listen(config: RunConfig) -> None:
    """Raises `ConfigError` for a registry that others can reach and anybody may use, and for one that has no place."""
    listen = config.fleet.listen
    host, _, port = listen.rpartition(":")
    if not host:
        return
    if host not in LOOPBACK and environment_token() is None:
        facts, hint = "anybody could join and be sent rollouts", "set ETUDE_TOKEN, here and at engines"
        raise ConfigError(f"fleet.listen = {listen!r} without a token", facts, hint=hint)
    try:
        bind(host.strip("[]"), int(port)).close()
    except ConfigError as error:
        hint = "name an address of this machine and a free port"
        raise ConfigError(f"fleet.listen = {listen!r}: {error.what}", error.facts, hint=hint) from None


@contextlib.asynccontextmanager
async def joining(
    run: RunFolder, config: RunConfig, telemetry: Telemetry, beat: Beat, *, failed: asyncio.Future[EtudeError]
) -> AsyncIterator[RegistryServer]:
    """Run a registry that engines can join, for a block. `failed` gets an error when the run has had no engine for too
    long, or the task that watches this ends."""
    check_listen(config)
    own = {f"engine-{i}" for i in range(len(config.fleet.engines))}
    registrar = RegistryServer(wanted_by(run, config), token=environment_token(), reserved=own)
    host, _, port = config.fleet.listen.rpartition(":")

    def changed(name: str, listed: ListedEngine) -> None:
        telemetry.event("fleet.state", engine=name, region=listed.region, state=str(listed.state), url=listed.url)

    had_some = time.monotonic()

    async def told(roster: Roster) -> dict[str, int]:
        nonlocal had_some
        for name, one in roster.items():
            telemetry.event("fleet.load", engine=name, **load_of(one))
        if own or any(one.state is State.SERVING for one in roster.values()):
            had_some = time.monotonic()
        elif time.monotonic() - had_some > NONE_S and not failed.done():
            failed.set_result(_no_engine(roster, config.fleet.listen))
        return await beat(roster)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not failed.done():
            facts, hint = repr(task.exception()), "this is a defect of etude: report it; the run can be resumed"
            failed.set_result(EtudeError("the fleet is watched no more", facts, hint=hint))

    async with listening(registrar.app, bind(host.strip("[]"), int(port)), what="the registry of engines") as url:
        telemetry.event("fleet.listen", url=url)
        watch = asyncio.create_task(registrar.watch(changed, told), name="watch the fleet")
        watch.add_done_callback(ended)
        try:
            yield registrar
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await registrar.close()


def wanted_by(run: RunFolder, config: RunConfig) -> EngineRequirements:
    """The model and settings that an engine must have to join a run."""
    place, signer = weights_place(run), read_signer(config.stores.signing_key)
    return EngineRequirements(
        model=(run / "checkpoints" / "mid" / "config.json").read_text(),
        mode=config.numerics.mode,
        quantise=config.numerics.quantise,
        degree=config.numerics.degree,
        dtype=config.engine.dtype,
        context_tokens=config.engine.context_tokens,
        max_sequences=config.engine.max_sequences,
        routes=config.wants_routes,
        store=place if isinstance(place, str) else "",
        public_key=signer.public_key.hex() if signer else "",
    )


def load_of(one: ListedEngine) -> dict[str, object]:
    """The facts of a `fleet.load` event."""
    return {
        "region": one.region,
        "state": str(one.state),
        "step": one.step,
        "num_running": one.num_running,
        "num_waiting": one.num_waiting,
        "max_sequences": one.max_sequences,
        "kv_tokens_free": one.kv_tokens_free,
    }


async def first_engine(registrar: RegistryServer, telemetry: Telemetry, listen: str) -> None:
    """Wait for an engine that may be given work, and tell who is there. The watch ends the run where that takes too
    long."""
    told = ""
    while not any(one.state is State.SERVING for one in registrar.roster.values()):
        reason = f"they join at {listen}, {_who_is_there(registrar.roster)}"
        if reason != told:
            telemetry.event("process", name="engines", state="waiting", reason=reason)
        told = reason
        await asyncio.sleep(POLL_S)
    telemetry.event("process", name="engines", state="ready")


def _who_is_there(roster: Roster) -> str:
    return ", ".join(f"{name} is {one.state}" for name, one in roster.items()) or "none has joined"


def _no_engine(roster: Roster, listen: str) -> DeadlineExceeded:
    hint = f"python -m etude.inference.server --register http://{listen} --store PLACE; then resume the run"
    return DeadlineExceeded("the run has no engine", f"{_who_is_there(roster)}; waited {NONE_S:g} s", hint=hint)
