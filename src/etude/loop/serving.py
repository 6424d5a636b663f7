"""Serves a checkpoint, or a run that is still learning: one engine with the gateway before it.

The engine is a child, supervised as in a run. For a run it follows the chain of weights, so that an answer comes from
the newest version; for a checkpoint it holds what the directory holds. Or there is no engine of its own: the gateway
asks the engines of a run whose registry listens, before their rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from etude.errors import CheckpointError, NoCheckpoint
from etude.gateway import GatewayConfig, create_app, serving
from etude.harness import ChatFormat
from etude.inference import Fleet, HttpEngine
from etude.inference.config import EngineConfig
from etude.inference.registry_client import FleetUpdater, fetch_requirements
from etude.inference.registry_messages import environment_token
from etude.loop.config import read_config
from etude.loop.crew import read_url
from etude.loop.places import has_published, poll_arguments, weights_place
from etude.loop.processes import Child, Role, Supervisor
from etude.models.config import ModelConfig
from etude.models.headers import check_weights, tell_left_out
from etude.numerics.config import NumericsConfig
from etude.run import RunFolder
from etude.scratch import OwnFolder
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights.chain.inspect import require_pointer


@contextlib.asynccontextmanager
async def serve_checkpoint(
    checkpoint: Path,
    *,
    store: Path | str | None,
    public_key: bytes | None = None,
    numerics: NumericsConfig,
    engine: EngineConfig,
    model: str,
    gateway: GatewayConfig,
    key: str | None,
    said: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[str]:
    """Serve while the block runs; yields the base URL for an OpenAI client. `engine`: its settings, but for the
    context, which is the model's. `public_key`: of `store`, only versions that its owner signed are served. `said` is
    told of layers of the checkpoint that are left out."""
    if not (checkpoint / "config.json").is_file():
        raise NoCheckpoint(f"{checkpoint} is no checkpoint", "no config.json", hint="give a Hugging Face directory")
    model_config, chat = _read_model(checkpoint, said), ChatFormat.load(checkpoint)
    with OwnFolder("serve") as folder:
        telemetry = Telemetry(folder / "events.jsonl", process="serve")
        supervisor = Supervisor(telemetry)
        fleet, engines = Fleet({}), list[HttpEngine]()
        ready_file = folder / "engine.ready"
        argv = ["-m", "etude.inference.server", "--name", "engine", "--checkpoint", str(checkpoint)]
        argv += ["--ready-file", str(ready_file)] + (["--store", str(store), *poll_arguments(store)] if store else [])
        argv += ["--public-key", public_key.hex()] if public_key and store else []
        argv += replace(engine, context_tokens=model_config.context_tokens).arguments()
        argv += ["--mode", numerics.mode, "--quantise", numerics.quantise, "--degree", str(numerics.degree)]

        async def on_up(child: Child) -> None:
            engines.append(HttpEngine(await read_url(ready_file, child.pid), token=environment_token()))
            fleet.add("engine", engines[-1])

        async def answers(_: Child) -> None:
            await fleet.engines["engine"].info(deadline_s=2 * supervisor.hung_s)

        try:
            child = Child("engine", argv, logs=folder, telemetry=telemetry)
            await supervisor.add(child, Role(on_up, answers))
            info = await fleet.engines["engine"].info()
            app = create_app(fleet, chat, model=model, context_tokens=info.context_tokens, config=gateway, key=key)
            async with serving(app, config=gateway) as url:
                yield url
        finally:
            for served in engines:
                await served.close()
            await supervisor.close()


@contextlib.asynccontextmanager
async def serve_fleet(
    checkpoint: Path, *, registry: str, model: str, gateway: GatewayConfig, key: str | None
) -> AsyncIterator[str]:
    """Serve from the engines of a run while the block runs: production beside its rollouts. `checkpoint`: whose chat
    format is spoken. Raises what `inference.registry_client.fetch_requirements` does."""
    chat, token = ChatFormat.load(checkpoint), environment_token()
    asked = await asyncio.to_thread(fetch_requirements, registry, token, wait_s=0.0)
    fleet = Fleet({})
    follower = FleetUpdater(fleet, token=token)
    following = asyncio.create_task(follower.poll_registry(registry), name="follow the fleet")
    try:
        app = create_app(fleet, chat, model=model, context_tokens=asked.context_tokens, config=gateway, key=key)
        async with serving(app, config=gateway) as url:
            yield url
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await follower.close()


def _read_model(checkpoint: Path, said: Callable[[str], None]) -> ModelConfig:
    """Read the model's config of a directory, and check that its files have all weights. `said` is called with a line
    on layers that are left out."""
    try:
        config = ModelConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes()))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}/config.json is damaged", str(error), hint="export it again") from None
    check_weights(checkpoint, config)
    tell_left_out(checkpoint, config, said)
    return config


def parts_of(model: Path) -> tuple[Path, Path | str | None, NumericsConfig, EngineConfig]:
    """(checkpoint, weight store, numerics, engine's settings) behind a path: a run's are followed, and computed as its
    engines do; a checkpoint has no store. Raises `WeightsError` for a run whose newest version cannot be told: its
    first weights are not served in the place of it."""
    if not (model / "run.json").is_file():
        return model, None, NumericsConfig(), EngineConfig()
    run = RunFolder.open(model)
    place, config = weights_place(run), read_config(run)
    if isinstance(place, Path) and not place.is_dir():
        return run / "checkpoints" / "mid", None, config.numerics, config.engine
    require_pointer(open_store(place, readonly=True))
    store = place if has_published(run) else None
    return run / "checkpoints" / "mid", store, config.numerics, config.engine


async def forever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
