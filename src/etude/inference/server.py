"""The process of a reference engine: ``python -m etude.inference.server --checkpoint DIR [--store PLACE] ...``.

It loads the checkpoint (architecture, and weights until the store has some), updates its weights from the versions in
the store, serves `app` on a socket, and writes ``{"url", "pid", "name"}`` to the ready file once it serves. It exits
with its parent. It also exits when its stepping thread has ended or hangs, so that it can be restarted. The environment
variable ETUDE_TOKEN is the bearer token of every POST request.

With ``--register URL`` it joins the fleet of a run on another host: the registry there gives the model and numerics,
the weights come from the store, and no checkpoint is needed. Until it has a version from the store it refuses all
requests. It exits when it was drained."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from etude.errors import DeadlineExceeded, EtudeError
from etude.inference.adapters import AdaptedWeights, fetched_base
from etude.inference.app import build_app
from etude.inference.config import check_ranks
from etude.inference.engine import ReferenceEngine
from etude.inference.lifetime import die_with_parent
from etude.inference.metrics import Load
from etude.inference.rank_messages import RankJob
from etude.inference.ranks import RankedTarget, Ranks, load_part, start_ranks
from etude.inference.registry_client import Registration, fetch_requirements, make_registration, run_registration
from etude.inference.registry_messages import NO_VERSION
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
from etude.inference.step_thread import SWITCH_S
from etude.inference.weight_sync import WeightSync, initial_version
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.checkpoint import rounded_weights
from etude.models.packed_weights import PackedWeights
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.numerics.formats import FORMATS
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import FollowerProcess
from etude.weights.follow.runtime_map import Derived

HUNG_EXIT_CODE = 70
FETCH_S = 3_600.0  # deadline of the follower while the engine has no weights: an anchor over a slow link
FOLLOWER_S, FOLLOWER_BYTES_PER_S = 30.0, 20e6  # low estimate for a busy core and a slow disk


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it is stopped. Returns the exit code. `argv` None means the process's arguments."""
    args = _parser().parse_args(argv)
    die_with_parent(watch_stdin=args.watch_stdin)
    torch.set_num_threads(args.threads)
    sys.setswitchinterval(SWITCH_S)
    telemetry = Telemetry(args.telemetry, process=args.name) if args.telemetry else None
    try:
        token = read_token(args.host)
        _apply_requirements(args, token)
        listener = listen(args.host, args.port)
        with _start_follower(args) as chain:
            _serve(args, listener, token, chain, telemetry)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _apply_requirements(args: argparse.Namespace, token: str | None) -> None:
    """With --register, take the missing settings from the run's requirements.

    Raises `EngineError` when the engine would have no weights."""
    args.model = None
    if args.register:
        requirements = fetch_requirements(args.register, token, wait_s=args.wait_s)
        args.mode, args.quantise, args.degree = (
            Mode(requirements.mode),
            Quantise(requirements.quantise),
            requirements.degree,
        )
        apply_sizes(args, requirements)
        apply_public_key(args, requirements)
        args.model = ModelConfig.from_hf(json.loads(requirements.model))
    require_weights(args)


def _start_follower(args: argparse.Namespace) -> contextlib.AbstractContextManager[FollowerProcess | None]:
    """Start the process that fetches new versions, before the model is loaded, so that both start at the same time."""
    if args.store is None:
        return contextlib.nullcontext()
    deadline_s = follower_deadline_s(args.checkpoint) if args.checkpoint else FETCH_S
    store = open_store(args.store, cache=args.cache)
    left = max(1, len(os.sched_getaffinity(0)) - args.threads)  # leave the cores of the steps free
    return FollowerProcess(
        store, public_key=args.public_key, poll_s=args.poll_s, deadline_s=deadline_s, threads=left, branch=args.branch
    )


def follower_deadline_s(checkpoint: Path) -> float:
    """Return the deadline in seconds of one update by the follower process, which fetches new weights.

    After it the process is replaced. It grows with the size of the weights in `checkpoint`, since the process may have
    to fetch, decode and hash all of them."""
    num_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    return FOLLOWER_S + num_bytes / FOLLOWER_BYTES_PER_S


def _serve(
    args: argparse.Namespace,
    listener: socket.socket,
    token: str | None,
    chain: FollowerProcess | None,
    telemetry: Telemetry | None,
) -> None:
    job = _job(args)
    with start_ranks(job, args.name) as ranks:
        engine, weight_sync = _build(args, job, ranks, chain, telemetry)
        registration = make_registration(args, listener, token)
        lifespan = _make_lifespan(
            engine, weight_sync, telemetry, registration, place=args.store or "", wait_s=args.wait_s
        )
        operators = engine.operators if args.show_operators else None
        app = build_app(engine, token=token, lifespan=lifespan, operators=operators)
        serve(app, listener, name=args.name, ready_file=args.ready_file)


def _job(args: argparse.Namespace) -> RankJob:
    numerics, config = NumericsConfig(args.mode, args.quantise, args.degree), config_of(args)
    check_ranks(config, numerics)
    return RankJob(args.checkpoint, args.model, numerics, config, args.threads)


def _build(
    args: argparse.Namespace,
    job: RankJob,
    ranks: Ranks | None,
    chain: FollowerProcess | None,
    telemetry: Telemetry | None,
) -> tuple[ReferenceEngine, WeightSync | None]:
    config, version = job.config, NO_VERSION
    if ranks is None:
        model = load_part(job)
    else:
        model = load_part(job, ranks.parallel)
        ranks.wait_until_loaded()
    views, derived = live_weights(model, args.quantise)
    if args.checkpoint is not None:
        whole: Iterable[tuple[str, torch.Tensor]] = views.items()
        if ranks is not None:
            whole = rounded_weights(args.checkpoint, model.operators.storage_dtype)
        version = args.version or initial_version(whole)
    report_settings(telemetry, config, device=str(next(model.parameters()).device))
    tokenizer = args.checkpoint / "tokenizer.json" if args.checkpoint else None
    engine = ReferenceEngine(model, version=version, name=args.name, config=config, tokenizer=tokenizer, ranks=ranks)
    if chain is None:
        return engine, None
    following = partial(WeightSync, engine, views, chain, poll_s=0.0, telemetry=telemetry)
    if ranks is not None:
        return engine, following(ranked=partial(RankedTarget, model, ranks, chain))
    base = None if args.checkpoint else partial(fetched_base, open_store(args.store, cache=args.cache), args.public_key)
    adapted = AdaptedWeights(model, args.quantise, base=base)
    return engine, following(derived=derived, adapted=adapted)


def live_weights(model: Transformer, quantise: Quantise) -> tuple[Mapping[str, torch.Tensor], list[Derived]]:
    """Return the memory to which versions are written, by published name, and the memory that is derived from it.

    In low precision, versions are written to packed bytes, from which the model's weights are then decoded."""
    if quantise is Quantise.NONE:
        return hf_views(model), []
    held = PackedWeights(model, FORMATS[quantise])
    held.decode()
    return held.tensors, [Derived(names, decode) for names, decode in held.decoders]


def _make_lifespan(
    engine: ReferenceEngine,
    weight_sync: WeightSync | None,
    telemetry: Telemetry | None,
    registration: Registration | None,
    *,
    place: str,
    wait_s: float,
) -> contextlib.AbstractAsyncContextManager[None]:
    @contextlib.asynccontextmanager
    async def span() -> AsyncIterator[None]:
        engine.start()
        if weight_sync is not None and registration is None:
            await asyncio.to_thread(weight_sync.start_at_head)
        elif weight_sync is not None:
            weight_sync.start()  # the registry gives it no work until it has caught up
        watch = asyncio.create_task(_watch(engine, weight_sync, telemetry, place, wait_s))
        member = asyncio.create_task(run_registration(registration)) if registration else None
        yield
        watch.cancel()
        if registration is not None and member is not None:
            member.cancel()
            await registration.leave()
        if weight_sync is not None:
            await asyncio.to_thread(weight_sync.stop)
        await asyncio.to_thread(engine.close)

    return span()


def wait_message(engine: ReferenceEngine, place: str, *, waited_s: float, wait_s: float) -> str:
    """Return the log message of an engine that waits for its first weights, or "" once it has some.

    `place` is the store. Raises `DeadlineExceeded` when `waited_s` is more than `wait_s`, both in seconds."""
    if engine.version != NO_VERSION:
        return ""
    if waited_s > wait_s:
        facts = f"{engine.trouble or 'no version in the channel policy'}; waited {wait_s:g} s"
        hint = "give the run's own store, as this machine reaches it; --wait-s sets the longest wait"
        raise DeadlineExceeded(f"{engine.name} has no weights from {place}", facts, hint=hint)
    return f"{engine.name} waits for a first version in {place}" + (f": {engine.trouble}" if engine.trouble else "")


async def _watch(
    engine: ReferenceEngine, weight_sync: WeightSync | None, telemetry: Telemetry | None, place: str, wait_s: float
) -> None:
    """Each second: report the load and what the engine waits for, and exit when the engine has ended or hangs."""
    load, last, reported = Load(), time.monotonic(), ""
    began = last
    while True:
        await asyncio.sleep(1.0)
        try:
            message = wait_message(
                engine, place, waited_s=weight_sync.checked - began if weight_sync else 0.0, wait_s=wait_s
            )
        except DeadlineExceeded as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        if message and message != reported:
            print(message, file=sys.stderr, flush=True)
        reported = message
        if not engine.alive or engine.stalled_s > engine.config.stall_s:
            state = f"has made no progress for {engine.stalled_s:.0f} s" if engine.alive else "has ended"
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
    parser.add_argument("--mode", type=Mode, default=numerics.mode, help="of summation: exact or native")
    parser.add_argument("--quantise", type=Quantise, default=numerics.quantise, help="what large products round to")
    parser.add_argument(
        "--degree", type=int, default=numerics.degree, help="ranks up to which exact mode keeps its bits"
    )
    parser.add_argument(
        "--show-operators", action="store_true", help="serve every operator's results, for etude parity"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
