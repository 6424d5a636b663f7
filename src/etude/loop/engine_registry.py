"""The registry at which remote engines join a run. It listens at ``fleet.listen`` while the run's processes are up.

It is part of the conductor, which knows the published version, the workers, and how many rollouts may run. Each change
of an engine is written as a `fleet.state` event, and its load as a `fleet.load` event at every heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from etude.errors import ConfigError, DeadlineExceeded, EtudeError
from etude.http_server import bind, run_http_server
from etude.inference.registry_messages import EngineRequirements, ListedEngine, Roster, State, environment_token
from etude.inference.registry_server import RegistryServer
from etude.loop.config import RunConfig
from etude.loop.locations import weights_location
from etude.models.config_json import MTP_KEY
from etude.models.headers import read_model_config
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.weights.chain.signing import read_signer

NONE_S, POLL_S = 600.0, 0.1
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
Beat = Callable[[Roster], Awaitable[dict[str, int]]]


def check_listen(config: RunConfig) -> None:
    """Check that the registry can listen at `fleet.listen`. Raises `ConfigError`.

    Also raised for an address that other machines can reach when there is no token."""
    listen = config.fleet.listen
    host, _, port = listen.rpartition(":")
    if not host:
        return
    if host not in LOOPBACK and environment_token() is None:
        facts, hint = "anybody could join and receive rollouts", "set ETUDE_TOKEN here and at the engines"
        raise ConfigError(f"fleet.listen = {listen!r} needs a token", facts, hint=hint)
    try:
        bind(host.strip("[]"), int(port)).close()
    except ConfigError as error:
        hint = "use an address of this machine and a free port"
        raise ConfigError(f"fleet.listen = {listen!r}: {error.what}", error.facts, hint=hint) from None


@contextlib.asynccontextmanager
async def open_registry(
    run: RunFolder, config: RunConfig, telemetry: Telemetry, beat: Beat, *, failed: asyncio.Future[EtudeError]
) -> AsyncIterator[RegistryServer]:
    """Run a registry of remote engines while the block runs. Yields its server.

    `beat` is awaited with the list of engines at every heartbeat. It returns the number of sessions of each engine.
    `failed` gets an error when the run has had no engine for `NONE_S` seconds, or when the task that watches the
    engines ends."""
    check_listen(config)
    own = {f"engine-{i}" for i in range(len(config.fleet.engines))}
    registrar = RegistryServer(required_of_engines(run, config), token=environment_token(), reserved=own)
    host, _, port = config.fleet.listen.rpartition(":")

    def changed(name: str, listed: ListedEngine) -> None:
        telemetry.event("fleet.state", engine=name, region=listed.region, state=str(listed.state), url=listed.url)

    had_some = time.monotonic()

    async def on_heartbeat(roster: Roster) -> dict[str, int]:
        nonlocal had_some
        for name, one in roster.items():
            telemetry.event("fleet.load", engine=name, **load_fields(one))
        if own or any(one.state is State.SERVING for one in roster.values()):
            had_some = time.monotonic()
        elif time.monotonic() - had_some > NONE_S and not failed.done():
            failed.set_result(_no_engine(roster, config.fleet.listen))
        return await beat(roster)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not failed.done():
            facts, hint = repr(task.exception()), "this is a defect of etude: report it; the run can be resumed"
            failed.set_result(EtudeError("the registry of engines has failed", facts, hint=hint))

    async with run_http_server(registrar.app, bind(host.strip("[]"), int(port)), name="the registry of engines") as url:
        telemetry.event("fleet.listen", url=url)
        watch = asyncio.create_task(registrar.watch(changed, on_heartbeat), name="watch the fleet")
        watch.add_done_callback(ended)
        try:
            yield registrar
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await registrar.close()


def required_of_engines(run: RunFolder, config: RunConfig) -> EngineRequirements:
    """Return the model and settings that an engine must have to join a run."""
    place, signer = weights_location(run), read_signer(config.stores.signing_key)
    first = run / "checkpoints" / "mid"
    model = json.loads((first / "config.json").read_text())
    if model.get(MTP_KEY):
        model[MTP_KEY] = read_model_config(first).mtp_heads  # its files may have none
    return EngineRequirements(
        model=json.dumps(model),
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


def load_fields(one: ListedEngine) -> dict[str, object]:
    """Return the fields of a `fleet.load` event for one engine."""
    return {
        "region": one.region,
        "state": str(one.state),
        "step": one.step,
        "num_running": one.num_running,
        "num_waiting": one.num_waiting,
        "max_sequences": one.max_sequences,
        "kv_tokens_free": one.kv_tokens_free,
    }


async def wait_for_first_engine(registrar: RegistryServer, telemetry: Telemetry, listen: str) -> None:
    """Wait until an engine can serve, and write events about those that have joined.

    `listen` is the registry's address, for these events. There is no deadline: the registry ends the run after
    `NONE_S`."""
    last_reason = ""
    while not any(one.state is State.SERVING for one in registrar.roster.values()):
        reason = f"they join at {listen}, {_joined(registrar.roster)}"
        if reason != last_reason:
            telemetry.event("process", name="engines", state="waiting", reason=reason)
        last_reason = reason
        await asyncio.sleep(POLL_S)
    telemetry.event("process", name="engines", state="ready")


def _joined(roster: Roster) -> str:
    return ", ".join(f"{name} is {one.state}" for name, one in roster.items()) or "none has joined"


def _no_engine(roster: Roster, listen: str) -> DeadlineExceeded:
    hint = f"python -m etude.inference.server --register http://{listen} --store PLACE; then resume the run"
    return DeadlineExceeded("the run has no engine", f"{_joined(roster)}; waited {NONE_S:g} s", hint=hint)
