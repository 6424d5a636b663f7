"""The program of an SGLang engine: ``python -m etude.inference.sglang.server --checkpoint DIR [--store PLACE] ...``.

Starts SGLang in its own environment as a child, follows the weight chain for it, and serves `app` on a socket as
`etude.inference.server` does for our own engine: the same protocol, the same ready file, the same ends. SGLang dies
with it, however it ends. ETUDE_TOKEN in the environment is the bearer token that every POST must carry. With
``--register URL`` it joins the fleet of a run elsewhere, as `etude.inference.server` does, and needs no checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from etude.errors import WeightsError
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.environment import SGLANG, environment
from etude.inference.foreign.following import Following
from etude.inference.foreign.serving import initial_version, offer, parser_of, prepare, read_model, run
from etude.inference.membership import NO_VERSION
from etude.inference.serving import config_of, listen, read_token, report_settings
from etude.inference.sglang.process import SglangCalls, start
from etude.records.adapter import modules
from etude.records.completion import Version
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import Follower
from etude.weights.files.checkpoint import CheckpointWriter, copy_other_files, index_of, layout


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


# -------------------------------------------------------------------------------------- following the chain of weights
# Versions are fetched and proven here, written as a checkpoint, and loaded by SGLang in a pause.


class SglangFollowing(Following):
    """`start`: the checkpoint that SGLang was started from; `folder`: where there is room for another like it."""

    def __init__(
        self,
        engine: ForeignEngine,
        chain: Follower,
        *,
        start: Path,
        folder: Path,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert isinstance(engine.calls, SglangCalls), "it is told to load weights"
        super().__init__(engine, poll_s=poll_s, telemetry=telemetry)
        self._calls, self._chain, self._start, self._folder = engine.calls, chain, start, folder

    async def _ready(self) -> bool:
        await asyncio.to_thread(self._chain.advance)
        if self._chain.version is None or self._chain.version == self._held:
            return False
        await asyncio.to_thread(self._write, self._folder)
        return True

    async def _swap(self) -> Version:
        await self._calls.load(self._folder)
        assert self._chain.version is not None, "it is ready"
        return self._chain.version

    def _write(self, folder: Path) -> None:
        """The version that the chain is at, as a checkpoint. Raises `WeightsError`, `CheckpointError`."""
        tensors = self._chain.tensors
        if modules(tensors):
            facts, hint = "SGLang takes whole weights", "take vLLM or reference engines, or learner.lora_rank = 0"
            raise WeightsError("an adapter is published", facts, hint=hint)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy_other_files(self._start, folder)
        headers = layout(tensors)
        with CheckpointWriter(folder, headers, index_of(headers)) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)


if __name__ == "__main__":
    sys.exit(main())
