"""Serves checkpoints, and runs that are still training, through the gateway.

`model_of_checkpoint` starts one engine as a supervised child. For a run the engine follows a branch, such as `stable`,
or the newest version: it loads each version that is published there. `model_of_fleet` starts no engine: the gateway
uses the engines of a run that has a registry, with priority over their rollouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from etude.capture import SummaryLimits
from etude.errors import InputError, NoCheckpoint, WeightsError
from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.gateway.app import Router
from etude.harness import ChatFormat
from etude.inference import Fleet, HttpEngine
from etude.inference.config import EngineConfig
from etude.inference.registry_client import FleetUpdater, fetch_requirements
from etude.inference.registry_messages import NO_VERSION, environment_token
from etude.loop.config import read_config
from etude.loop.exported_settings import summaries_of_checkpoint, summaries_of_run
from etude.loop.locations import has_published, poll_arguments, weights_location
from etude.loop.processes import Child, Role, Supervisor
from etude.loop.run_processes import read_url
from etude.models.config import ModelConfig
from etude.models.headers import check_weights, read_model_config, report_unused_layers
from etude.numerics.config import NumericsConfig
from etude.records import Version
from etude.run import RunFolder
from etude.scratch import ScratchDirectory
from etude.seams import AnswerRecorder, EngineInfo, FeedbackReceiver
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights.chain.history import head, pointer_key
from etude.weights.chain.inspect import require_pointer

_CHANNEL = "policy"


class ModelSource(NamedTuple):
    """A model to serve. `parts_of` makes one.

    - `name`: the model name for clients.
    - `checkpoint`: a Hugging Face directory.
    - `store`: the store of a run whose newest weights are served; None: the checkpoint's own weights. `branch`: the
      branch of the run whose version is served instead of the newest; "": none.
    - `version`: the published version whose weights the checkpoint has, if no store is followed.
    - `summaries`: how the model was trained to summarise long conversations; None: it was not.
    - `numerics`, `engine`: the settings of its engine, except for the context, which is that of the model."""

    name: str
    checkpoint: Path
    store: Path | str | None
    summaries: SummaryLimits | None
    numerics: NumericsConfig
    engine: EngineConfig
    branch: str = ""
    version: Version | None = None


@contextlib.asynccontextmanager
async def serve(
    models: Sequence[AbstractAsyncContextManager[ServedModel]],
    *,
    gateway: GatewayConfig,
    keys: Keys | None,
    recorder: AnswerRecorder | None = None,
    router: Router | None = None,
    feedback: FeedbackReceiver | None = None,
) -> AsyncIterator[str]:
    """Serve models while the block runs. Yields the base URL for an OpenAI client.

    `models` are results of `model_of_checkpoint` and `model_of_fleet`; their engines end after the last request.
    `recorder` receives every answer. `router` decides which of the models answers a request of a user.
    `feedback` receives signals about answers."""
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(model) for model in models]
        app = create_app(served, config=gateway, keys=keys, recorder=recorder, router=router, feedback=feedback)
        yield await stack.enter_async_context(serving(app, config=gateway))


@contextlib.asynccontextmanager
async def model_of_checkpoint(
    source: ModelSource,
    *,
    public_key: bytes | None = None,
    gateway: GatewayConfig,
    log: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[ServedModel]:
    """Run an engine with a checkpoint while the block runs. Yields the model for `serve`.

    With `public_key` only versions of the store with this key's signature are served, and never the checkpoint's own
    weights: `WeightsError` if the engine cannot load such a version (see `require_signed`). `log` is called with a line
    on layers of the checkpoint that are left out. Raises `NoCheckpoint`, `CheckpointError`."""
    checkpoint, store = source.checkpoint, source.store
    if not (checkpoint / "config.json").is_file():
        raise NoCheckpoint(
            f"{checkpoint} is not a checkpoint",
            "it has no config.json",
            hint="give a Hugging Face directory, or a run",
        )
    model_config, chat = _read_model(checkpoint, log), ChatFormat.load(checkpoint)
    with ScratchDirectory("serve") as folder:
        telemetry = Telemetry(folder / "events.jsonl", process="serve")
        supervisor = Supervisor(telemetry)
        fleet, engines = Fleet({}), list[HttpEngine]()
        ready_file = folder / "engine.ready"
        argv = ["-m", "etude.inference.server", "--name", "engine", "--checkpoint", str(checkpoint)]
        argv += ["--ready-file", str(ready_file)] + (["--store", str(store), *poll_arguments(store)] if store else [])
        argv += ["--public-key", public_key.hex()] if public_key and store else []
        argv += ["--branch", source.branch] if source.branch and store else []
        if (version := source.version) is not None:
            argv += ["--version", f"{version.step}/{version.incarnation}/{version.digest}"]
        argv += replace(source.engine, context_tokens=model_config.context_tokens).arguments()
        numerics = source.numerics
        argv += ["--mode", numerics.mode, "--quantise", numerics.quantise, "--degree", str(numerics.degree)]

        async def on_up(child: Child) -> None:
            engines.append(HttpEngine(await read_url(ready_file, child.pid), token=environment_token()))
            if public_key and store:
                _require_published(await engines[-1].info())
            fleet.add("engine", engines[-1])

        async def answers(_: Child) -> None:
            await fleet.engines["engine"].info(deadline_s=supervisor.call_s)

        try:
            child = Child("engine", argv, logs=folder, telemetry=telemetry)
            await supervisor.add(child, Role(on_up, answers))
            info = await fleet.engines["engine"].info()
            yield _served(source, fleet, chat, context_tokens=info.context_tokens, gateway=gateway)
        finally:
            for engine in engines:
                await engine.close()
            await supervisor.close()


@contextlib.asynccontextmanager
async def model_of_fleet(source: ModelSource, *, registry: str, gateway: GatewayConfig) -> AsyncIterator[ServedModel]:
    """Use the engines of a run while the block runs, besides its rollouts. Yields the model for `serve`.

    `registry` is the URL of the run's registry of engines. The chat format is that of the source's checkpoint. Raises
    the errors of `inference.registry_client.fetch_requirements`."""
    chat, token = ChatFormat.load(source.checkpoint), environment_token()
    requirements = await asyncio.to_thread(fetch_requirements, registry, token, wait_s=0.0)
    fleet = Fleet({})
    follower = FleetUpdater(fleet, token=token)
    following = asyncio.create_task(follower.poll_registry(registry), name="follow the fleet")
    try:
        yield _served(source, fleet, chat, context_tokens=requirements.context_tokens, gateway=gateway)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await follower.close()


def require_signed(source: ModelSource, public_key: bytes) -> None:
    """Raise `InputError` unless the version of a run that is to be served is signed with a key (32 bytes).

    Raises `WeightsError` for a damaged pointer, and `StoreError`."""
    assert source.store is not None, "a checkpoint has no signature"
    store = open_store(str(source.store), readonly=True)
    key, pointer = pointer_key(_CHANNEL, source.branch), head(store, _CHANNEL, source.branch)
    if pointer is None:
        hint = f"create it: etude weights point {source.store} VERSION --branch {source.branch}"
        raise InputError(f"no version of {source.name} is signed with this key", f"there is no {key}", hint=hint)
    try:
        head(store, _CHANNEL, source.branch, public_key=public_key)
    except WeightsError as error:
        raise InputError(
            f"no version of {source.name} is signed with this key",
            f"{key} names {pointer.head.version}: {error.facts}",
            hint="give the public key that etude weights key printed for the run's stores.signing_key, or remove"
            " --public-key",
        ) from None


def _require_published(info: EngineInfo) -> None:
    """Raise `WeightsError` if an engine still has the weights of its checkpoint, which nobody signed."""
    if info.version is None or info.version.incarnation == NO_VERSION.incarnation:
        facts = info.trouble or "it has the weights of its checkpoint"
        hint = "check that the store can be read, and that who publishes signs with the key; then start again"
        raise WeightsError("the engine could not load a signed version", facts, hint=hint)


def _served(
    source: ModelSource, fleet: Fleet, chat: ChatFormat, *, context_tokens: int, gateway: GatewayConfig
) -> ServedModel:
    return ServedModel(
        fleet, chat, name=source.name, context_tokens=context_tokens, config=gateway, summaries=source.summaries
    )


def _read_model(checkpoint: Path, log: Callable[[str], None]) -> ModelConfig:
    """Read the model config of a directory, and check that all weights are in its files. `log` is called with a line on
    layers that are left out."""
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    report_unused_layers(checkpoint, config, log)
    return config


def parts_of(model: Path, name: str) -> ModelSource:
    """Return the model to serve for the path of a run or a checkpoint. `name`: the model's name for clients.

    For a run, the result has the store of its weights and the settings of its engines. For a checkpoint the store is
    None. Raises `WeightsError` when the newest version of a run cannot be determined: its first weights are not served
    instead."""
    if not (model / "run.json").is_file():
        return ModelSource(name, model, None, summaries_of_checkpoint(model), NumericsConfig(), EngineConfig())
    run = RunFolder.open(model)
    place, config = weights_location(run), read_config(run)
    store: Path | str | None = None
    if not isinstance(place, Path) or place.is_dir():
        require_pointer(open_store(place, readonly=True))
        store = place if has_published(run) else None
    checkpoint, summaries = run / "checkpoints" / "mid", summaries_of_run(run)
    return ModelSource(name, checkpoint, store, summaries, config.numerics, config.engine)


async def forever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
