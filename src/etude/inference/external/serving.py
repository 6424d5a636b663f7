"""The common part of the processes of external engines: arguments, preparation, lifespan, and health checks."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from etude.errors import CheckpointError, DeadlineExceeded, EngineError, EtudeError
from etude.inference.app import build_app
from etude.inference.config import Speculation
from etude.inference.external.engine import ExternalEngine
from etude.inference.external.environment import ServerKind, environment
from etude.inference.external.process import ServerProcess
from etude.inference.external.weight_sync import ExternalWeightSync
from etude.inference.lifetime import die_with_parent
from etude.inference.metrics import Load
from etude.inference.registry_client import Registration, fetch_requirements, make_registration, run_registration
from etude.inference.registry_messages import NO_VERSION, EngineRequirements
from etude.inference.serving import (
    add_arguments,
    apply_public_key,
    apply_sizes,
    config_of,
    listen,
    read_token,
    report_settings,
    require_weights,
    serve,
)
from etude.models.config import ModelConfig
from etude.numerics.config import Mode, Quantise
from etude.records.adapter import BASE_CHANNEL
from etude.records.completion import Version
from etude.scratch import ScratchDirectory
from etude.seams import BlobStore
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import Channel, content_digest, tensor_digest
from etude.weights.chain.history import head
from etude.weights.files.checkpoint import CheckpointWriter, is_checkpoint, layout, read_checkpoint

HUNG_EXIT_CODE = 70
SOCKET_BYTES, LONGEST_NAME = 107, 37
"""The longest path of a Unix socket, and the longest name that a server gives one: a slash and a UUID."""


def make_parser(server: str, prog: str) -> argparse.ArgumentParser:
    """Return the argument parser of an external engine's process.

    `server` is the name of the software, and `prog` the command that usage messages show."""
    parser = argparse.ArgumentParser(prog=prog, description=f"One {server} engine.")
    add_arguments(parser)
    variable = f"$ETUDE_{server.upper()}"
    parser.add_argument(
        "--environment", type=Path, help=f"where {server} is (default: {variable}, or the user's cache)"
    )
    parser.add_argument("--kv-tokens", type=int, default=0, help="tokens of KV cache (default: full contexts)")
    parser.add_argument("--needs-routes", action="store_true", help="exit when the server cannot return routes")
    parser.add_argument("--argument", action="append", default=[], metavar="A", help=f"passed to {server} (repeatable)")
    return parser


def run_process(args: argparse.Namespace, server: str, serving: Callable[[Path, Telemetry | None], None]) -> int:
    """Call `serving(folder, telemetry)` with a temporary folder, and return the process's exit code.

    An `EtudeError` is printed and gives its exit code. `server` is the name of the software, for the folder's name."""
    die_with_parent(watch_stdin=args.watch_stdin)
    telemetry = Telemetry(args.telemetry, process=args.name) if args.telemetry else None
    try:
        with ScratchDirectory(server) as folder:
            require_short_path(folder, server)
            serving(folder, telemetry)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def require_short_path(folder: Path, server: str) -> None:
    """Raise `EngineError` if the paths of the server's sockets in `folder` would be too long for the kernel."""
    if (size := len(os.fsencode(folder))) > SOCKET_BYTES - LONGEST_NAME:
        raise EngineError(
            f"the folder for temporary files has too long a path for the sockets of {server}",
            f"{folder} has {size} bytes, at most {SOCKET_BYTES - LONGEST_NAME} leave room for a socket's name",
            hint="set TMPDIR to a folder with a short path",
        )


def serve_external(
    args: argparse.Namespace,
    kind: ServerKind,
    start: Callable[..., ServerProcess],
    make_weight_sync: Callable[[ExternalEngine], ExternalWeightSync],
    folder: Path,
    telemetry: Telemetry | None,
) -> None:
    """Start a server of this kind, and serve its engine over HTTP until this process is stopped.

    `start` is the function of `vllm.process` or `sglang.process`. `make_weight_sync` is called when there is a store.
    `folder` is for temporary files. Raises the `EtudeError` of a failed start."""
    if args.speculation not in (None, Speculation.OFF):
        what, facts = f"{args.name} cannot be started", f"{kind.name} has no --speculation {args.speculation}"
        raise EngineError(what, facts, hint="leave it out, or start a reference engine")
    if (args.tensor_parallel or 1) > 1:
        ranks = args.tensor_parallel
        what, facts = f"{args.name} cannot be started", f"--tensor-parallel {ranks} is for reference engines"
        raise EngineError(what, facts, hint=f"give --argument=--tensor-parallel-size={ranks}")
    token, listener = read_token(args.host), listen(args.host, args.port)
    held, has_checkpoint = environment(args.environment, kind), args.checkpoint is not None
    device = held.require().device
    more = prepare_checkpoint(args, token, folder)
    config, model = config_of(args), read_model_config(args.checkpoint)
    kv_tokens = args.kv_tokens or config.max_sequences * config.context_tokens
    process = start(
        held,
        args.checkpoint,
        name=args.name,
        model=model,
        config=config,
        kv_tokens=kv_tokens,
        threads=args.threads,
        folder=folder,
        arguments=[*more, *args.argument],
    )
    engine = ExternalEngine(
        process,
        name=args.name,
        model=model,
        config=config,
        version=args.version or (initial_version(args.checkpoint) if has_checkpoint else NO_VERSION),
        kv_tokens=kv_tokens,
        parity=f"{kind.key}-{kind.version}-{device}-{config.dtype}",
    )
    report_settings(telemetry, config, device=device)
    weight_sync = None if args.store is None else make_weight_sync(engine)
    failed: list[EtudeError] = []
    registration = make_registration(args, listener, token)
    needs_routes = args.needs_routes and model.num_moe_layers > 0
    span = make_lifespan(process, engine, weight_sync, telemetry, failed, registration, needs_routes=needs_routes)
    try:
        serve(build_app(engine, token=token, lifespan=span), listener, name=args.name, ready_file=args.ready_file)
    except SystemExit:  # raised by uvicorn when the start failed
        if failed:
            raise failed[0] from None
        raise


def prepare_checkpoint(args: argparse.Namespace, token: str | None, folder: Path) -> list[str]:
    """Prepare the checkpoint that the server starts from, and set `args.checkpoint`.

    Returns the further arguments that the server needs. Raises `EngineError` when it would have no weights, or cannot
    satisfy the requirements of the run that it joins."""
    requirements = fetch_requirements(args.register, token, wait_s=args.wait_s) if args.register else None
    if requirements is not None:
        apply_requirements(args, requirements)
    require_weights(args)
    if requirements is None or args.checkpoint is not None:
        return []
    args.checkpoint = folder / "checkpoint"
    return create_checkpoint(requirements, args, args.checkpoint)


def read_model_config(checkpoint: Path) -> ModelConfig:
    """Read the model's configuration from a checkpoint directory. Raises `CheckpointError`."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged", str(error), hint="give a Hugging Face directory"
        ) from None
    return ModelConfig.from_hf(raw)


def initial_version(checkpoint: Path) -> Version:
    """Return the version of weights from a checkpoint: step 0, incarnation of zeros, digest of the content."""
    tensors = read_checkpoint(checkpoint).tensors
    digest = content_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
    return Version(step=0, incarnation="00000000", digest=digest)


def make_lifespan(
    process: ServerProcess,
    engine: ExternalEngine,
    weight_sync: ExternalWeightSync | None,
    telemetry: Telemetry | None,
    failed: list[EtudeError],
    registration: Registration | None,
    *,
    needs_routes: bool,
) -> contextlib.AbstractAsyncContextManager[None]:
    """Return the app's lifespan, a context manager.

    It starts the server, the weight sync and the registration, and stops them at exit. The error of a failed start is
    appended to `failed`. With `needs_routes`, a server that cannot return routes also counts as a failed start."""

    @contextlib.asynccontextmanager
    async def span() -> AsyncIterator[None]:
        try:
            async with process:
                await engine.start()
                require_routes(engine, needs_routes)
                if weight_sync is not None:
                    await weight_sync.start_at_head()
                watch = asyncio.create_task(_watch(engine, telemetry))
                member = asyncio.create_task(run_registration(registration)) if registration else None
                yield
                watch.cancel()
                if registration is not None and member is not None:
                    member.cancel()
                    await registration.leave()
                if weight_sync is not None:
                    await weight_sync.stop()
        except EtudeError as error:
            failed.append(_with_server_output(error, process))
            raise

    return span()


def _with_server_output(error: EtudeError, process: ServerProcess) -> EtudeError:
    """Add the server's last output to an error, when the server has exited."""
    words = process.last_errors()
    if process.alive or words in error.facts:
        return error
    return type(error)(error.what, f"{error.facts}; {process.server}'s last output: {words}", hint=error.hint)


def require_routes(engine: ExternalEngine, needed: bool) -> None:
    """Raise `EngineError` when routes are needed and the server cannot return them."""
    if needed and not engine.routes.available:
        raise EngineError(
            f"{engine.name} returns no routes, which this run needs",
            engine.routes.missing,
            hint="set learner.replay_routes = false, or use a reference engine",
        )


async def _watch(engine: ExternalEngine, telemetry: Telemetry | None) -> None:
    """Each second: report the load, and end the process if the server has ended or hangs."""
    load, last = Load(), time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        await engine.check_health(deadline_s=engine.config.stall_s)
        if not engine.alive or engine.stalled_s > engine.config.stall_s:
            state = f"has not responded for {engine.stalled_s:.0f} s" if engine.alive else "has exited"
            print(
                f"error: {engine.client.server} of {engine.name} {state}: this process ends",
                file=sys.stderr,
                flush=True,
            )
            os._exit(HUNG_EXIT_CODE)
        now = time.monotonic()
        facts = load.since(engine.counters, await engine.info(), wall_s=now - last)
        last = now
        if telemetry is not None:
            telemetry.event("engine.load", **facts)


# The checkpoint of an engine that joins a run on another host. The server must load a directory. It is made of the
# run's config.json and, if the run publishes adapters, their base weights. Otherwise the server starts with dummy
# weights, and the first version is written completely before it serves.

POLL_S = 0.5
DUMMY_WEIGHTS = ["--load-format", "dummy"]


def apply_requirements(args: argparse.Namespace, requirements: EngineRequirements) -> None:
    """Set the missing settings in `args` from the run's requirements.

    Raises `EngineError` when this engine cannot satisfy them."""
    if requirements.mode == Mode.EXACT or requirements.quantise != Quantise.NONE:
        raise EngineError(
            f"{args.name} cannot compute as the run at {args.register} requires",
            f"it requires mode = '{requirements.mode}', quantise = '{requirements.quantise}'; "
            "this engine has 'native' and 'none'",
            hint="join with a reference engine: python -m etude.inference.server --register ...",
        )
    apply_sizes(args, requirements)
    apply_public_key(args, requirements)
    args.needs_routes = args.needs_routes or requirements.routes


def create_checkpoint(requirements: EngineRequirements, args: argparse.Namespace, folder: Path) -> list[str]:
    """Create the checkpoint that the server starts from in `folder`, for an engine that joins a run.

    Waits for the run's first version. Returns the further arguments that the server needs. Raises `DeadlineExceeded`,
    `StoreError` and `WeightsError`."""
    folder.mkdir()
    (folder / "config.json").write_text(requirements.model)
    store = open_store(args.store, cache=args.cache)
    _wait_for_first_version(store, args)
    if head(store, BASE_CHANNEL) is not None:
        base = Channel(store, BASE_CHANNEL).fetch(public_key=args.public_key)
        with CheckpointWriter(folder, layout(base, shard_bytes=1 << 62)) as writer:
            for name, tensor in base.items():
                writer.put(name, tensor)
    return [] if is_checkpoint(folder) else DUMMY_WEIGHTS


def _wait_for_first_version(store: BlobStore, args: argparse.Namespace) -> None:
    end, reported = time.monotonic() + args.wait_s, False
    while head(store, "policy", public_key=args.public_key) is None:
        if not reported:
            print(f"{args.name} waits for a first version in {args.store}", file=sys.stderr, flush=True)
        if time.monotonic() > end:
            facts = f"the channel 'policy' has no version; waited {args.wait_s:g} s"
            raise DeadlineExceeded(
                f"there are no weights in {args.store}", facts, hint="check whether the run is running"
            )
        reported = True
        time.sleep(POLL_S)
