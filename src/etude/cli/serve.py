"""The commands ``etude serve`` and ``export``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path

from etude.cli.locations import existing_path, newest_run, open_run
from etude.errors import InputError
from etude.gateway import GatewayConfig
from etude.numerics.config import Quantise


def serve(args: argparse.Namespace) -> int:
    """Serve a checkpoint or a run over HTTP until interrupted. Returns the exit code."""
    model = existing_path(args.model) if args.model else newest_run().path
    gateway = GatewayConfig(host=args.host, port=args.port, max_running=args.max_concurrent)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(model, gateway, args.key or os.environ.get("ETUDE_API_KEY"), args.fleet, args.public_key))
    return 0


async def _serve(
    model: Path, gateway: GatewayConfig, key: str | None, fleet: str | None, public_key: bytes | None
) -> None:
    from etude.loop.serving import forever, parts_of, serve_checkpoint, serve_fleet

    work = asyncio.current_task()
    assert work is not None, "runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, work.cancel)
    checkpoint, store, numerics, engine = parts_of(model)
    if public_key is not None and (store is None or fleet):
        raise InputError(
            "--public-key needs the weights of a run",
            f"{model} is a checkpoint, which has no signature"
            if store is None
            else "the engines of a fleet have their own",
            hint="remove --public-key",
        )
    name = model.resolve().name
    report = partial(print, file=sys.stderr)
    served = (
        serve_fleet(checkpoint, registry=fleet, model=name, gateway=gateway, key=key)
        if fleet
        else serve_checkpoint(
            checkpoint,
            store=store,
            public_key=public_key,
            numerics=numerics,
            engine=engine,
            model=name,
            gateway=gateway,
            key=key,
            log=report,
        )
    )
    async with served as url:
        print(f"serving {name} at {url} ({'with' if key else 'without'} a key); stop with Ctrl-C", flush=True)
        await forever()


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint, the result of a run, or one of its published versions as a Hugging Face directory. Returns
    0."""
    from etude.loop.export import export_adapter, export_checkpoint, export_version, export_version_adapter

    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        raise InputError(f"{args.out} is not an empty directory", hint="give a new directory")
    if args.adapter and args.quantise != "none":
        raise InputError("--adapter with --quantise", "an adapter cannot be quantised", hint="remove one of them")
    path, at, step = args.source.rpartition("@")
    settings = {"dtype": args.dtype, "quantise": Quantise(args.quantise), "log": partial(print, file=sys.stderr)}
    if at:
        if not step.isdigit():
            raise InputError(
                f"no step {step!r}",
                "a version is given by its step",
                hint="write RUN@30; etude weights log lists the versions",
            )
        run = open_run(Path(path))
        adapter = args.adapter and export_version_adapter(run, int(step), args.out)
        print(adapter or export_version(run, int(step), args.out, **settings))
    else:
        source = existing_path(Path(args.source))
        print(export_adapter(source, args.out) if args.adapter else export_checkpoint(source, args.out, **settings))
    return 0
