"""Makes the checkpoint directory that a vLLM or SGLang server starts with when it joins a run on another machine.

The server must load a directory. It is made of the run's config.json and, where the run publishes adapters, of their
base weights. Else the server starts with meaningless weights, and the first version is written whole before anything is
served.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from etude.errors import DeadlineExceeded, EngineError
from etude.inference.membership import Wanted
from etude.inference.serving import take_key, take_sizes
from etude.numerics.config import Mode, Quantise
from etude.records.adapter import BASE_CHANNEL
from etude.seams import BlobStore
from etude.stores import open_store
from etude.weights import Channel
from etude.weights.chain.history import head
from etude.weights.files.checkpoint import CheckpointWriter, is_checkpoint, layout

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
