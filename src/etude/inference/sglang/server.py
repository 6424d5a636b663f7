"""The program of an SGLang engine: ``python -m etude.inference.sglang.server --checkpoint DIR [--store PLACE] ...``.

Starts SGLang in its own environment as a child, follows the weight chain for it, and serves `app` on a socket as
`etude.inference.server` does for our own engine: the same protocol, the same ready file, the same ends. SGLang dies
with it, however it ends. ETUDE_TOKEN in the environment is the bearer token that every POST must carry. With
``--register URL`` it joins the fleet of a run elsewhere, as `etude.inference.server` does, and needs no checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.environment import SGLANG, environment
from etude.inference.foreign.serving import initial_version, offer, parser_of, prepare, read_model, run
from etude.inference.membership import NO_VERSION
from etude.inference.serving import config_of, listen, read_token, report_settings
from etude.inference.sglang.follow import SglangFollowing
from etude.inference.sglang.process import start
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import Follower


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    args = parser_of("SGLang", "python -m etude.inference.sglang.server").parse_args(argv)
    return run(args, "sglang", partial(_serve, args))


def _serve(args: argparse.Namespace, folder: Path, telemetry: Telemetry | None) -> None:
    token, listener = read_token(args.host), listen(args.host, args.port)
    held, named = environment(args.environment, SGLANG), args.checkpoint is not None
    device = held.require().device
    more = prepare(args, token, folder)
    config, model = config_of(args), read_model(args.checkpoint)
    kv_tokens = args.kv_tokens or config.max_sequences * config.context_tokens
    child = start(
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
    engine = ForeignEngine(
        child,
        name=args.name,
        model=model,
        config=config,
        version=initial_version(args.checkpoint) if named else NO_VERSION,
        kv_tokens=kv_tokens,
        parity=f"sglang-{SGLANG.version}-{device}-{config.dtype}",
    )
    report_settings(telemetry, config, device=device)
    following = None
    if args.store is not None:
        chain = Follower(open_store(args.store, cache=args.cache), public_key=args.public_key)
        following = SglangFollowing(
            engine, chain, start=args.checkpoint, folder=folder / "head", poll_s=args.poll_s, telemetry=telemetry
        )
    offer(args, listener, token, child, engine, following, telemetry)


if __name__ == "__main__":
    sys.exit(main())
