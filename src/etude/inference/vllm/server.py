"""One vLLM engine as a process: ``python -m etude.inference.vllm.server --checkpoint DIR [--store PLACE] ...``.

Starts vLLM in its own environment as a child, follows the weight chain with it, and serves `app` on a socket as
`etude.inference.server` does for our own engine: the same protocol, the same ready file, the same ends. vLLM dies with
it, however it ends. ETUDE_TOKEN in the environment is the bearer token that every POST must carry. With ``--register
URL`` it joins the fleet of a run elsewhere, as `etude.inference.server` does, and needs no checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from etude.errors import CheckpointError, EngineError, EtudeError
from etude.inference.app import build_app
from etude.inference.lifetime import die_with_parent
from etude.inference.membership import NO_VERSION
from etude.inference.metrics import Load
from etude.inference.registering import Registration, be_member, registration_of, wanted
from etude.inference.serving import add_arguments, config_of, listen, read_token, require_weights, serve
from etude.inference.vllm.engine import VllmEngine
from etude.inference.vllm.environment import environment, required_version
from etude.inference.vllm.follow import Following
from etude.inference.vllm.joining import made_checkpoint, take_wanted
from etude.inference.vllm.process import Vllm, start
from etude.models.config import ModelConfig
from etude.records.completion import Version
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import content_digest, tensor_digest
from etude.weights.files.checkpoint import read_checkpoint
from etude.weights.follow.head import Head

HUNG_EXIT_CODE = 70
EXTENSION = "etude.inference.vllm.worker.WorkerExtension"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    die_with_parent(watch_stdin=args.watch_stdin)
    telemetry = Telemetry(args.telemetry, process=args.name) if args.telemetry else None
    try:
        with tempfile.TemporaryDirectory(prefix="etude-vllm-") as folder:
            _serve(args, Path(folder), telemetry)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _serve(args: argparse.Namespace, folder: Path, telemetry: Telemetry | None) -> None:
    token, listener = read_token(args.host), listen(args.host, args.port)
    held, named = environment(args.environment), args.checkpoint is not None
    more = _prepare(args, token, folder)
    config, model = config_of(args), read_model(args.checkpoint)
    kv_tokens = args.kv_tokens or config.max_sequences * config.context_tokens
    vllm = start(
        held,
        args.checkpoint,
        name=args.name,
        model=model,
        config=config,
        kv_tokens=kv_tokens,
        threads=args.threads,
        folder=folder,
        extension=args.extension,
        arguments=[*more, *args.argument],
    )
    engine = VllmEngine(
        vllm,
        name=args.name,
        model=model,
        config=config,
        version=initial_version(args.checkpoint) if named else NO_VERSION,
        kv_tokens=kv_tokens,
        parity=f"vllm-{required_version()}-{held.require().device}-{config.dtype}",
    )
    following = None
    if args.store is not None:
        head = Head(open_store(args.store, cache=args.cache), "policy")
        following = Following(engine, head, args.store, cache=args.cache, poll_s=args.poll_s, telemetry=telemetry)
    registration = registration_of(args, listener, token)
    failed: list[EtudeError] = []
    needs_routes = args.needs_routes and model.num_moe_layers > 0
    lifespan = _lifespan(vllm, engine, following, telemetry, failed, registration, needs_routes=needs_routes)
    try:
        serve(build_app(engine, token=token, lifespan=lifespan), listener, name=args.name, ready_file=args.ready_file)
    except SystemExit:  # uvicorn's, of a start that failed
        if failed:
            raise failed[0] from None
        raise


def _prepare(args: argparse.Namespace, token: str | None, folder: Path) -> list[str]:
    """See to what vLLM starts from; the arguments that it needs for that. Raises `EngineError` where it would have no
    weights, or cannot be what a run elsewhere wants."""
    asked = wanted(args.register, token) if args.register else None
    if asked is not None:
        take_wanted(args, asked)
    require_weights(args)
    if asked is None or args.checkpoint is not None:
        return []
    args.checkpoint = folder / "checkpoint"
    return made_checkpoint(asked, args.store, args.cache, args.checkpoint)


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


def _lifespan(
    vllm: Vllm,
    engine: VllmEngine,
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
            async with vllm:
                await engine.start()
                _require_routes(engine, needs_routes)
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
            failed.append(_with_words(error, vllm))
            raise

    return span()


def _with_words(error: EtudeError, vllm: Vllm) -> EtudeError:
    """The error, with what vLLM said of its own."""
    words = vllm.last_words()
    if vllm.alive or words in error.facts:
        return error
    return type(error)(error.what, f"{error.facts}; vLLM's last words: {words}", hint=error.hint)


def _require_routes(engine: VllmEngine, needed: bool) -> None:
    if needed and not (engine.routes.native or engine.routes.kept):
        raise EngineError(
            f"{engine.name} does not tell routes, which this run needs",
            engine.routes.missing,
            hint="set learner.replay_routes = false, or take a reference engine",
        )


async def _watch(engine: VllmEngine, telemetry: Telemetry | None) -> None:
    """Each second: report the load, and end the process if vLLM has ended or hangs."""
    load, last = Load(), time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        await engine.look(deadline_s=engine.config.stall_s)
        if not engine.alive or engine.stalled_s > engine.config.stall_s:
            state = f"has not answered for {engine.stalled_s:.0f} s" if engine.alive else "has ended"
            print(f"error: vLLM of {engine.name} {state}: this process ends", file=sys.stderr, flush=True)
            os._exit(HUNG_EXIT_CODE)
        now = time.monotonic()
        facts = load.since(engine.counters, await engine.info(), wall_s=now - last)
        last = now
        if telemetry is not None:
            telemetry.event("engine.load", **facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.inference.vllm.server", description="One vLLM engine.")
    add_arguments(parser)
    parser.add_argument("--environment", type=Path, help="where vLLM is (default: $ETUDE_VLLM, or the user's cache)")
    parser.add_argument("--kv-tokens", type=int, default=0, help="room for keys and values (default: full contexts)")
    parser.add_argument("--needs-routes", action="store_true", help="end where routes are not told")
    parser.add_argument("--extension", default=EXTENSION, help="the class that vLLM's workers are given")
    parser.add_argument("--argument", action="append", default=[], metavar="A", help="passed to vLLM (repeatable)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
