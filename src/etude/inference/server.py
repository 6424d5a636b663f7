"""The program of a reference engine: ``python -m etude.inference.server --checkpoint DIR [--store PLACE] ...``.

It loads the checkpoint (architecture, and weights until the store has some), follows the weight chain by itself,
serves `app` on a socket, and writes ``{"url", "pid", "name"}`` to the ready file once it answers. It dies with its
parent, and it ends itself when its stepping thread is dead or stuck: a restarted engine is worth more than a hung one.
ETUDE_TOKEN in the environment is the bearer token that every POST must carry.

With ``--register URL`` it joins the fleet of a run elsewhere: the registry there says which model and numerics are
wanted, the weights come from the store, and no checkpoint is needed. It holds no version until the chain has given one,
so it refuses everything until then; it ends when it was drained.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from etude.errors import DeadlineExceeded, EtudeError
from etude.inference.adapters import AdaptedWeights, fetched_base
from etude.inference.app import build_app
from etude.inference.engine import ReferenceEngine
from etude.inference.follow import Following, initial_version
from etude.inference.lifetime import die_with_parent
from etude.inference.membership import NO_VERSION
from etude.inference.metrics import Load
from etude.inference.registering import Registration, be_member, registration_of, wanted
from etude.inference.serving import (
    add_arguments,
    config_of,
    listen,
    read_token,
    report_settings,
    require_weights,
    serve,
    take_key,
    take_sizes,
)
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.checkpoint import load_model
from etude.models.packed_weights import PackedWeights
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.numerics.device import device_for
from etude.numerics.factory import operators_for
from etude.numerics.formats import FORMATS
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import FollowerProcess
from etude.weights.follow.runtime_map import Derived

HUNG_EXIT_CODE = 70
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter from another. A step gives it up in each of its hundreds of operations,
and waits for it while a swap is prepared or checked in another thread: at Python's 5 ms a step beside that takes up to
200 ms more in a model of 1 GB, at this 100 (`benchmarks.swap_client --model 1gb`)."""
FETCH_S = 3_600.0  # for an answer of the follower whose engine has nothing yet: an anchor over a slow link
FOLLOWER_S, FOLLOWER_BYTES_PER_S = 30.0, 20e6  # a busy core from a slow disk does several times as much


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    die_with_parent(watch_stdin=args.watch_stdin)
    torch.set_num_threads(args.threads)
    sys.setswitchinterval(SWITCH_S)
    telemetry = Telemetry(args.telemetry, process=args.name) if args.telemetry else None
    try:
        token = read_token(args.host)
        _take_wanted(args, token)
        listener = listen(args.host, args.port)
        with _chain(args) as chain:
            _serve(args, listener, token, chain, telemetry)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _take_wanted(args: argparse.Namespace, token: str | None) -> None:
    """Where there is a registry, what it wants stands in for what was not given. Raises `EngineError` where an engine
    would have no weights."""
    args.model = None
    if args.register:
        asked = wanted(args.register, token, wait_s=args.wait_s)
        args.mode, args.quantise, args.degree = Mode(asked.mode), Quantise(asked.quantise), asked.degree
        take_sizes(args, asked)
        take_key(args, asked)
        args.model = ModelConfig.from_hf(json.loads(asked.model))
    require_weights(args)


def _chain(args: argparse.Namespace) -> contextlib.AbstractContextManager[FollowerProcess | None]:
    """Started before the model is loaded, so that it is up by then."""
    if args.store is None:
        return contextlib.nullcontext()
    deadline_s = follower_deadline_s(args.checkpoint) if args.checkpoint else FETCH_S
    store = open_store(args.store, cache=args.cache)
    left = max(1, len(os.sched_getaffinity(0)) - args.threads)  # what decodes takes no core from the steps
    return FollowerProcess(store, public_key=args.public_key, poll_s=args.poll_s, deadline_s=deadline_s, threads=left)


def follower_deadline_s(checkpoint: Path) -> float:
    """How long the follower may take for one answer; a hung one is killed and replaced then. It grows with the weights,
    all of which an answer may have to fetch, decode and hash."""
    num_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    return FOLLOWER_S + num_bytes / FOLLOWER_BYTES_PER_S


def _serve(
    args: argparse.Namespace,
    listener: socket.socket,
    token: str | None,
    chain: FollowerProcess | None,
    telemetry: Telemetry | None,
) -> None:
    engine, following = _build(args, chain, telemetry)
    registration = registration_of(args, listener, token)
    lifespan = _lifespan(engine, following, telemetry, registration, place=args.store or "", wait_s=args.wait_s)
    app = build_app(engine, token=token, lifespan=lifespan, operators=engine.operators if args.show_operators else None)
    serve(app, listener, name=args.name, ready_file=args.ready_file)


def _build(
    args: argparse.Namespace, chain: FollowerProcess | None, telemetry: Telemetry | None
) -> tuple[ReferenceEngine, Following | None]:
    config = config_of(args)
    dtype, device = getattr(torch, config.dtype), device_for(config.device)
    numerics = NumericsConfig(args.mode, args.quantise, args.degree)
    operators = operators_for(numerics, dtype, rounds_weights=False, device=device)
    if args.checkpoint is None:
        model = Transformer(args.model, dtype=dtype, operators=operators).to(device)
        views, derived = live_weights(model, args.quantise)
        version = NO_VERSION
    else:
        model = load_model(args.checkpoint, dtype=dtype, operators=operators, device=device)
        views, derived = live_weights(model, args.quantise)
        version = initial_version(views)
    report_settings(telemetry, config, device=str(next(model.parameters()).device))
    engine = ReferenceEngine(model, version=version, name=args.name, config=config)
    if chain is None:
        return engine, None
    base = None if args.checkpoint else partial(fetched_base, open_store(args.store, cache=args.cache), args.public_key)
    adapted = AdaptedWeights(model, args.quantise, base=base)
    return engine, Following(engine, views, chain, derived=derived, adapted=adapted, poll_s=0.0, telemetry=telemetry)


def live_weights(model: Transformer, quantise: Quantise) -> tuple[Mapping[str, torch.Tensor], list[Derived]]:
    """The memory that versions are written to, and what is computed of it. In low precision it is packed bytes, and the
    model holds what they decode to."""
    if quantise is Quantise.NONE:
        return hf_views(model), []
    held = PackedWeights(model, FORMATS[quantise])
    held.decode()
    return held.tensors, [Derived(names, decode) for names, decode in held.decoders]


def _lifespan(
    engine: ReferenceEngine,
    following: Following | None,
    telemetry: Telemetry | None,
    registration: Registration | None,
    *,
    place: str,
    wait_s: float,
) -> contextlib.AbstractAsyncContextManager[None]:
    @contextlib.asynccontextmanager
    async def span() -> AsyncIterator[None]:
        engine.start()
        if following is not None and registration is None:
            await asyncio.to_thread(following.start_at_head)
        elif following is not None:
            following.start()  # a registry gives it no work until it has caught up
        watch = asyncio.create_task(_watch(engine, following, telemetry, place, wait_s))
        member = asyncio.create_task(be_member(registration)) if registration else None
        yield
        watch.cancel()
        if registration is not None and member is not None:
            member.cancel()
            await registration.leave()
        if following is not None:
            await asyncio.to_thread(following.stop)
        await asyncio.to_thread(engine.close)

    return span()


def waits_for(engine: ReferenceEngine, place: str, *, waited_s: float, wait_s: float) -> str:
    """What an engine without weights says that it waits for; nothing once it has some. Raises `DeadlineExceeded` where
    it has waited for longer than `wait_s`."""
    if engine.version != NO_VERSION:
        return ""
    if waited_s > wait_s:
        facts = f"{engine.trouble or 'no version of policy'}; waited {wait_s:g} s"
        hint = "give the run's own store, as this machine reaches it; --wait-s says how long it is waited for"
        raise DeadlineExceeded(f"{engine.name} has no weights from {place}", facts, hint=hint)
    return f"{engine.name} waits for a first version in {place}" + (f": {engine.trouble}" if engine.trouble else "")


async def _watch(
    engine: ReferenceEngine, following: Following | None, telemetry: Telemetry | None, place: str, wait_s: float
) -> None:
    """Each second: report the load, say what is waited for, and end the process if the engine cannot be helped."""
    load, last, told = Load(), time.monotonic(), ""
    began = last
    while True:
        await asyncio.sleep(1.0)
        try:
            waits = waits_for(engine, place, waited_s=following.looked - began if following else 0.0, wait_s=wait_s)
        except DeadlineExceeded as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        if waits and waits != told:
            print(waits, file=sys.stderr, flush=True)
        told = waits
        if not engine.alive or engine.stalled_s > engine.config.stall_s:
            state = f"has not moved for {engine.stalled_s:.0f} s" if engine.alive else "is dead"
            print(
                f"error: the stepping thread of {engine.name} {state}: this process ends", file=sys.stderr, flush=True
            )
            os._exit(HUNG_EXIT_CODE)
        now = time.monotonic()
        facts = load.since(engine.counters, await engine.info(), wall_s=now - last)
        last = now
        if telemetry is not None:
            telemetry.event("engine.load", **facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.inference.server", description="One inference engine.")
    add_arguments(parser)
    numerics = NumericsConfig()
    parser.add_argument("--mode", type=Mode, default=numerics.mode, help="of sums: exact or native")
    parser.add_argument("--quantise", type=Quantise, default=numerics.quantise, help="what large products round to")
    parser.add_argument(
        "--degree", type=int, default=numerics.degree, help="ranks up to which exact mode keeps its bits"
    )
    parser.add_argument("--show-operators", action="store_true", help="to etude parity, when it asks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
