"""The program of a vLLM engine: ``python -m etude.inference.vllm.server --checkpoint DIR [--store PLACE] ...``.

Starts vLLM in its own environment as a child, follows the weight chain with it, and serves `app` on a socket as
`etude.inference.server` does for our own engine: the same protocol, the same ready file, the same ends. vLLM dies with
it, however it ends. ETUDE_TOKEN in the environment is the bearer token that every POST must carry. With ``--register
URL`` it joins the fleet of a run elsewhere, as `etude.inference.server` does, and needs no checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.environment import VLLM, environment
from etude.inference.foreign.serving import initial_version, offer, parser_of, prepare, read_model, run
from etude.inference.membership import NO_VERSION
from etude.inference.serving import config_of, listen, read_token, report_settings
from etude.inference.vllm.follow import VllmFollowing
from etude.inference.vllm.process import start
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights.follow.head import Head

EXTENSION = "etude.inference.vllm.worker.WorkerExtension"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    return run(args, "vllm", partial(_serve, args))


def _serve(args: argparse.Namespace, folder: Path, telemetry: Telemetry | None) -> None:
    token, listener = read_token(args.host), listen(args.host, args.port)
    held, named = environment(args.environment), args.checkpoint is not None
    device = held.require().device
    more = prepare(args, token, folder)
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
    engine = ForeignEngine(
        vllm,
        name=args.name,
        model=model,
        config=config,
        version=initial_version(args.checkpoint) if named else NO_VERSION,
        kv_tokens=kv_tokens,
        parity=f"vllm-{VLLM.version}-{device}-{config.dtype}",
    )
    report_settings(telemetry, config, device=device)
    following = None
    if args.store is not None:
        head = Head(open_store(args.store, cache=args.cache), "policy", public_key=args.public_key)
        following = VllmFollowing(
            engine,
            head,
            args.store,
            public_key=args.public_key,
            cache=args.cache,
            poll_s=args.poll_s,
            telemetry=telemetry,
        )
    offer(args, listener, token, vllm, engine, following, telemetry)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("vLLM", "python -m etude.inference.vllm.server")
    parser.add_argument("--extension", default=EXTENSION, help="the class that vLLM's workers are given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
