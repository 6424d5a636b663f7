"""Serves checkpoints, and runs that are still training, through the gateway.

`model_of_checkpoint` starts one engine as a supervised child. For a run the engine follows a branch, such as `stable`,
or the newest version: it loads each version that is published there. `model_of_fleet` starts no engine: the gateway
uses the engines of a run that has a registry, with priority over their rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from etude.harvest.config import LendConfig
from etude.inference import Fleet, HttpEngine
from etude.inference.config import SERVERS, EngineConfig, EngineKind, ExternalEngineConfig, Speculation
from etude.inference.external.environment import SERVER_KINDS, environment
from etude.inference.registry_client import FleetUpdater, fetch_requirements
from etude.inference.registry_messages import NO_VERSION, environment_token
from etude.loop.config import read_config
from etude.loop.exported_settings import summaries_of_checkpoint, summaries_of_run
from etude.loop.lending import Lender
from etude.loop.locations import has_published, poll_arguments, poll_s, weights_location
from etude.loop.processes import Child, Role, Supervisor
from etude.loop.run_processes import read_url, setting_arguments
from etude.models.config import ModelConfig
from etude.models.headers import check_weights, read_model_config, report_unused_layers
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.records import Version
from etude.run import RunFolder
from etude.scratch import ScratchDirectory
from etude.seams import AnswerRecorder, EngineInfo, FeedbackReceiver
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights.chain.history import head, pointer_key
from etude.weights.chain.inspect import require_pointer
from etude.weights.chain.signing import read_signer

_TELL_S = 10  # between two lines about engines that are starting
_CHANNEL = "policy"


class ModelSource(NamedTuple):
    """A model to serve. `parts_of` makes one.

    - `name`: the model name for clients.
    - `checkpoint`: a Hugging Face directory.
    - `store`: the store of a run whose newest weights are served; None: the checkpoint's own weights. `branch`: the
      branch of the run whose version is served instead of the newest; "": none.
    - `version`: the published version whose weights the checkpoint has, if no store is followed.
    - `summaries`: how the model was trained to summarise long conversations; None: it was not.
    - `numerics`, `engine`: the settings of its engine, except for the context, which is that of the model.
    - `kind`: the software of its engine. `foreign`: the settings of vLLM or SGLang. `adapters`: whether the run
      publishes adapters (LoRA)."""

    name: str
    checkpoint: Path
    store: Path | str | None
    summaries: SummaryLimits | None
    numerics: NumericsConfig
    engine: EngineConfig
    branch: str = ""
    version: Version | None = None
    kind: EngineKind = EngineKind.REFERENCE
    foreign: ExternalEngineConfig = ExternalEngineConfig()
    adapters: bool = False


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
    lender: Lender | None = None,
) -> AsyncIterator[ServedModel]:
    """Run an engine with a checkpoint while the block runs. Yields the model for `serve`. With `lender` there are
    several engines, and idle ones are lent.

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
    names = {name: name for name in lender.names} if lender else {"engine": source.branch}
    with ScratchDirectory("serve") as folder, lender.prepared() if lender else contextlib.nullcontext():
        telemetry = Telemetry(folder / "events.jsonl", process="serve")
        supervisor = Supervisor(telemetry)
        fleet, engines, opened = Fleet({}), dict[str, HttpEngine](), list[HttpEngine]()

        async def on_up(child: Child) -> None:
            name = child.name
            engines[name] = HttpEngine(await read_url(folder / f"{name}.ready", child.pid), token=environment_token())
            opened.append(engines[name])
            if public_key and store:
                _require_published(await engines[name].info())
            if lender:
                await lender.started(name, engines[name], fleet)
            else:
                fleet.add(name, engines[name])

        async def answers(child: Child) -> None:
            await engines[child.name].info(deadline_s=supervisor.call_s)

        def started(name: str, branch: str) -> tuple[Child, Role]:
            argv = ["-m", SERVERS[source.kind], "--name", name, "--checkpoint", str(checkpoint)]
            argv += ["--ready-file", str(folder / f"{name}.ready")]
            argv += ["--store", str(store), *poll_arguments(store)] if store else []
            argv += ["--public-key", public_key.hex()] if public_key and store else []
            argv += ["--branch", branch] if branch and store else []
            if (version := source.version) is not None:
                argv += ["--version", f"{version.step}/{version.incarnation}/{version.digest}"]
            settings = replace(source.engine, context_tokens=model_config.context_tokens)
            if source.kind is not EngineKind.REFERENCE:
                settings = replace(settings, speculation=Speculation.OFF)  # it changes no token, and others have none
            argv += setting_arguments(source.kind, settings, source.numerics, source.foreign)
            return Child(name, argv, logs=folder, telemetry=telemetry), Role(on_up, answers)

        try:
            members = [started(name, branch) for name, branch in names.items()]
            async with _told(log, checkpoint, len(members), members[0][1].ready_s):
                await asyncio.gather(*(supervisor.add(*member) for member in members))
            info = await next(iter(engines.values())).info()
            lending = lender.lending(fleet, engines, slots=info.max_sequences) if lender else contextlib.nullcontext()
            async with lending:
                yield _served(source, fleet, chat, context_tokens=info.context_tokens, gateway=gateway)
        finally:
            for engine in opened:
                await engine.close()
            await supervisor.close()


@contextlib.asynccontextmanager
async def _told(log: Callable[[str], None], checkpoint: Path, count: int, ready_s: float) -> AsyncIterator[None]:
    """Log which engines start and when they are given up, and every `_TELL_S` seconds how long the block has run."""
    what = f"{'the engine' if count == 1 else f'{count} engines'} of {checkpoint}"

    async def tell() -> None:
        for elapsed_s in itertools.count(_TELL_S, _TELL_S):
            await asyncio.sleep(_TELL_S)
            log(f"starting {what}: {elapsed_s} s of at most {ready_s:g} s")

    log(f"starting {what}: it reads the weights; given up after {ready_s:g} s")
    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling


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


def lender_of(source: ModelSource, config: LendConfig, report: Callable[[str], None]) -> Lender:
    """Return what lends the engines of a run that is served. `report` is called with a line for each change.

    Raises `InputError`, and `PluginRefused` for a forecast that cannot be used."""
    assert source.store is not None, "a checkpoint has no newer versions"
    config.make_policy(1)  # a plug-in that cannot be used is refused before engines start
    run, store = RunFolder.open(source.checkpoint.parents[1]), open_store(str(source.store))
    signer = read_signer(read_config(run).stores.signing_key)
    poll = poll_s(source.store)
    return Lender(config, run.path, store, branch=source.branch, poll_s=poll, signer=signer, report=report)


def require_servable(source: ModelSource, *, captured: bool) -> None:
    """Raise an error if engines of the source's kind cannot serve it.

    `captured`: whether answers are stored for training. Raises `EngineError` if vLLM or SGLang is not installed, and
    `InputError` if it cannot load this model, or if a learner in exact mode would refuse its answers."""
    if source.kind is EngineKind.REFERENCE:
        return
    server, why, hint = SERVER_KINDS[source.kind], "", "serve it with reference engines: leave out --engine"
    environment(source.foreign.environment, server).require()
    if source.numerics.quantise is not Quantise.NONE:
        why = f"it does not round as numerics.quantise = {str(source.numerics.quantise)!r} of the run does"
    elif source.adapters and source.kind is EngineKind.SGLANG:
        why = "the run publishes adapters (learner.lora_rank), which it cannot load"
    elif captured and source.store is not None and source.numerics.mode is Mode.EXACT:
        why = "the run is in exact mode, and its learner refuses captured answers with other bits than its own"
        hint += ", or without --capture"
    if why:
        raise InputError(f"{server.name} cannot serve {source.name}", why, hint=hint)


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


def parts_of(model: Path, name: str, kind: EngineKind = EngineKind.REFERENCE) -> ModelSource:
    """Return the model to serve for the path of a run or a checkpoint. `name`: the model's name for clients. `kind`:
    the software of its engine.

    For a run, the result has the store of its weights and the settings of its engines. For a checkpoint the store is
    None. Raises `WeightsError` when the newest version of a run cannot be determined: its first weights are not served
    instead."""
    if not (model / "run.json").is_file():
        numerics, engine = NumericsConfig(), EngineConfig()
        return ModelSource(name, model, None, summaries_of_checkpoint(model), numerics, engine, kind=kind)
    run = RunFolder.open(model)
    place, config = weights_location(run), read_config(run)
    store: Path | str | None = None
    if not isinstance(place, Path) or place.is_dir():
        require_pointer(open_store(place, readonly=True))
        store = place if has_published(run) else None
    checkpoint, summaries = run / "checkpoints" / "mid", summaries_of_run(run)
    return ModelSource(
        name,
        checkpoint,
        store,
        summaries,
        config.numerics,
        config.engine,
        kind=kind,
        foreign=config.foreign(kind),
        adapters=config.learner.lora_rank > 0,
    )


async def forever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
