"""The process of an SGLang engine: ``python -m etude.inference.sglang.server --checkpoint DIR [--store PLACE] ...``.

It starts SGLang in its own environment as a child process, keeps its weights at the newest version, and serves `app` on
a socket with the same protocol, ready file and exit conditions as `etude.inference.server`. SGLang exits with it in any
case. The environment variable ETUDE_TOKEN is the bearer token of every POST request. With ``--register URL`` it joins
the fleet of a run on another host, as `etude.inference.server` does, and needs no checkpoint.
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
from etude.inference.external.engine import ExternalEngine
from etude.inference.external.environment import SGLANG
from etude.inference.external.serving import make_parser, run_process, serve_external
from etude.inference.external.weight_sync import ExternalWeightSync
from etude.inference.sglang.process import SglangClient, start
from etude.records.adapter import adapted_modules
from etude.records.completion import Version
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights import Follower
from etude.weights.files.checkpoint import CheckpointWriter, copy_other_files, index_of, layout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it is stopped. Returns the exit code. `argv` None means the process's arguments."""
    args = make_parser("SGLang", "python -m etude.inference.sglang.server").parse_args(argv)
    return run_process(args, "sglang", partial(_serve, args))


def _serve(args: argparse.Namespace, folder: Path, telemetry: Telemetry | None) -> None:
    def make_weight_sync(engine: ExternalEngine) -> SglangWeightSync:
        store = open_store(args.store, cache=args.cache)
        chain = Follower(store, branch=args.branch, public_key=args.public_key)
        return SglangWeightSync(
            engine, chain, start=args.checkpoint, folder=folder / "head", poll_s=args.poll_s, telemetry=telemetry
        )

    serve_external(args, SGLANG, start, make_weight_sync, folder, telemetry)


class SglangWeightSync(ExternalWeightSync):
    """Updates the weights of an SGLang server to each new version.

    This process fetches and checks a version, and writes it as a checkpoint. SGLang loads the checkpoint during a
    pause.

    - `chain`: where the versions come from.
    - `start`: the checkpoint that SGLang was started from.
    - `folder`: where the new checkpoint is written."""

    def __init__(
        self,
        engine: ExternalEngine,
        chain: Follower,
        *,
        start: Path,
        folder: Path,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert isinstance(engine.client, SglangClient), "only SGLang loads checkpoints"
        super().__init__(engine, poll_s=poll_s, telemetry=telemetry)
        self._client, self._chain, self._start, self._folder = engine.client, chain, start, folder

    async def _ready(self) -> bool:
        await asyncio.to_thread(self._chain.advance)
        if self._chain.version is None or self._chain.version == self._held:
            return False
        await asyncio.to_thread(self._write, self._folder)
        return True

    async def _swap(self) -> Version:
        await self._client.load(self._folder)
        assert self._chain.version is not None, "it is ready"
        return self._chain.version

    def _write(self, folder: Path) -> None:
        """Write the chain's version as a checkpoint. Raises `WeightsError`, `CheckpointError`."""
        tensors = self._chain.tensors
        if adapted_modules(tensors):
            facts, hint = "it only loads full weights", "use vLLM or reference engines, or learner.lora_rank = 0"
            raise WeightsError("SGLang cannot load the published adapter", facts, hint=hint)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy_other_files(self._start, folder)
        headers = layout(tensors)
        with CheckpointWriter(folder, headers, index_of(headers)) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)


if __name__ == "__main__":
    sys.exit(main())
