"""The process of an engine of another make, but for what is the make's own: what is prepared, watched and ended."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from etude.errors import CheckpointError, DeadlineExceeded, EngineError, EtudeError
from etude.inference.app import build_app
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.following import Following
from etude.inference.foreign.process import Child
from etude.inference.lifetime import die_with_parent
from etude.inference.membership import Wanted
from etude.inference.metrics import Load
from etude.inference.registering import Registration, be_member, registration_of, wanted
from etude.inference.serving import add_arguments, require_weights, serve, take_key, take_sizes
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
"""What the kernel takes as a socket's path; how long a name a server gives one: a slash and a UUID."""


def parser_of(make: str, prog: str) -> argparse.ArgumentParser:
    """What an engine of another make is told."""
    parser = argparse.ArgumentParser(prog=prog, description=f"One {make} engine.")
    add_arguments(parser)
    variable = f"$ETUDE_{make.upper()}"
    parser.add_argument("--environment", type=Path, help=f"where {make} is (default: {variable}, or the user's cache)")
    parser.add_argument("--kv-tokens", type=int, default=0, help="room for keys and values (default: full contexts)")
    parser.add_argument("--needs-routes", action="store_true", help="end where routes are not told")
    parser.add_argument("--argument", action="append", default=[], metavar="A", help=f"passed to {make} (repeatable)")
    return parser


def run(args: argparse.Namespace, make: str, serving: Callable[[Path, Telemetry | None], None]) -> int:
    """`serving(folder, telemetry)` until told to stop, where `folder` is a temporary one; the process's exit code."""
    die_with_parent(watch_stdin=args.watch_stdin)
    telemetry = Telemetry(args.telemetry, process=args.name) if args.telemetry else None
    try:
        with ScratchDirectory(make) as folder:
            require_short(folder, make)
            serving(folder, telemetry)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def require_short(folder: Path, make: str) -> None:
    """Raises `EngineError` where a server's sockets would have too long a path."""
    if (size := len(os.fsencode(folder))) > SOCKET_BYTES - LONGEST_NAME:
        raise EngineError(
            f"the folder for temporary files has too long a path for the sockets of {make}",
            f"{folder} has {size} bytes, at most {SOCKET_BYTES - LONGEST_NAME} leave room for a socket's name",
            hint="set TMPDIR to a folder with a short path",
        )


def offer(
    args: argparse.Namespace,
    listener: socket.socket,
    token: str | None,
    child: Child,
    engine: ForeignEngine,
    following: Following | None,
    telemetry: Telemetry | None,
) -> None:
    """Serve the protocol until told to stop. Raises the `EtudeError` that it could not start for."""
    failed: list[EtudeError] = []
    registration = registration_of(args, listener, token)
    needs_routes = args.needs_routes and engine.model.num_moe_layers > 0
    span = lifespan(child, engine, following, telemetry, failed, registration, needs_routes=needs_routes)
    try:
        serve(build_app(engine, token=token, lifespan=span), listener, name=args.name, ready_file=args.ready_file)
    except SystemExit:  # uvicorn's, of a start that failed
        if failed:
            raise failed[0] from None
        raise


def prepare(args: argparse.Namespace, token: str | None, folder: Path) -> list[str]:
    """See to what the server starts from; the arguments that it needs for that. Raises `EngineError` where it would
    have no weights, or cannot be what a run elsewhere wants."""
    asked = wanted(args.register, token, wait_s=args.wait_s) if args.register else None
    if asked is not None:
        take_wanted(args, asked)
    require_weights(args)
    if asked is None or args.checkpoint is not None:
        return []
    args.checkpoint = folder / "checkpoint"
    return made_checkpoint(asked, args, args.checkpoint)


def read_model(checkpoint: Path) -> ModelConfig:
    """The sizes of the model in a directory. Raises `CheckpointError`."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is gone or damaged", str(error), hint="give a Hugging Face directory") from None
    return ModelConfig.from_hf(raw)


def initial_version(checkpoint: Path) -> Version:
    """The name of weights from a checkpoint, not a chain: step 0, no incarnation, digest of the content."""
    tensors = read_checkpoint(checkpoint).tensors
    digest = content_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
    return Version(step=0, incarnation="00000000", digest=digest)


def lifespan(
    child: Child,
    engine: ForeignEngine,
    following: Following | None,
    telemetry: Telemetry | None,
    failed: list[EtudeError],
    registration: Registration | None,
    *,
    needs_routes: bool,
) -> contextlib.AbstractAsyncContextManager[None]:
    """What happens before the first request and after the last. What cannot start is put into `failed`."""

    @contextlib.asynccontextmanager
    async def span() -> AsyncIterator[None]:
        try:
            async with child:
                await engine.start()
                require_routes(engine, needs_routes)
                if following is not None:
                    await following.start_at_head()
                watch = asyncio.create_task(_watch(engine, telemetry))
                member = asyncio.create_task(be_member(registration)) if registration else None
                yield
                watch.cancel()
                if registration is not None and member is not None:
                    member.cancel()
                    await registration.leave()
                if following is not None:
                    await following.stop()
        except EtudeError as error:
            failed.append(_with_words(error, child))
            raise

    return span()


def _with_words(error: EtudeError, child: Child) -> EtudeError:
    """The error, with what the server said of its own."""
    words = child.last_words()
    if child.alive or words in error.facts:
        return error
    return type(error)(error.what, f"{error.facts}; {child.make}'s last words: {words}", hint=error.hint)


def require_routes(engine: ForeignEngine, needed: bool) -> None:
    if needed and not (engine.routes.there):
        raise EngineError(
            f"{engine.name} does not tell routes, which this run needs",
            engine.routes.missing,
            hint="set learner.replay_routes = false, or take a reference engine",
        )


async def _watch(engine: ForeignEngine, telemetry: Telemetry | None) -> None:
    """Each second: report the load, and end the process if the server has ended or hangs."""
    load, last = Load(), time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        await engine.look(deadline_s=engine.config.stall_s)
        if not engine.alive or engine.stalled_s > engine.config.stall_s:
            state = f"has not answered for {engine.stalled_s:.0f} s" if engine.alive else "has ended"
            print(
                f"error: {engine.calls.make} of {engine.name} {state}: this process ends", file=sys.stderr, flush=True
            )
            os._exit(HUNG_EXIT_CODE)
        now = time.monotonic()
        facts = load.since(engine.counters, await engine.info(), wall_s=now - last)
        last = now
        if telemetry is not None:
            telemetry.event("engine.load", **facts)


# -------------------------------------------------------------------- the checkpoint of an engine that joins elsewhere
# The server must load a directory. It is made of the run's config.json and, where the run publishes adapters, of their
# base weights. Else it starts with meaningless weights, and the first version is written whole before it serves.


POLL_S = 0.5
AS_IT_COMES = ["--load-format", "dummy"]


def take_wanted(args: argparse.Namespace, asked: Wanted) -> None:
    """What a run wants of any engine stands in for what was not given. Raises `EngineError` where it cannot be."""
    if asked.mode == Mode.EXACT or asked.quantise != Quantise.NONE:
        raise EngineError(
            f"{args.name} cannot compute what the run at {args.register} wants",
            f"it wants numerics.mode = '{asked.mode}' and quantise = '{asked.quantise}'; here are 'native' and 'none'",
            hint="join with a reference engine: python -m etude.inference.server --register ...",
        )
    take_sizes(args, asked)
    take_key(args, asked)
    args.needs_routes = args.needs_routes or asked.routes


def made_checkpoint(asked: Wanted, args: argparse.Namespace, folder: Path) -> list[str]:
    """What it can start from, put into `folder`; the arguments that it needs for that. Waits for the run's first
    version. Raises `DeadlineExceeded`, `StoreError`, `WeightsError`."""
    folder.mkdir()
    (folder / "config.json").write_text(asked.model)
    store = open_store(args.store, cache=args.cache)
    _await_first(store, args)
    if head(store, BASE_CHANNEL) is not None:
        base = Channel(store, BASE_CHANNEL).fetch(public_key=args.public_key)
        with CheckpointWriter(folder, layout(base, shard_bytes=1 << 62)) as writer:
            for name, tensor in base.items():
                writer.put(name, tensor)
    return [] if is_checkpoint(folder) else AS_IT_COMES


def _await_first(store: BlobStore, args: argparse.Namespace) -> None:
    end, told = time.monotonic() + args.wait_s, False
    while head(store, "policy", public_key=args.public_key) is None:
        if not told:
            print(f"{args.name} waits for a first version in {args.store}", file=sys.stderr, flush=True)
        if time.monotonic() > end:
            facts = f"no version of policy; waited {args.wait_s:g} s"
            raise DeadlineExceeded(f"there are no weights in {args.store}", facts, hint="see whether the run goes on")
        told = True
        time.sleep(POLL_S)
