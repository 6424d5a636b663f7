"""The process of a vLLM engine: ``python -m etude.inference.vllm.server --checkpoint DIR [--store PLACE] ...``.

It starts vLLM in its own environment as a child process, keeps its weights at the newest version, and serves `app` on a
socket with the same protocol, ready file and exit conditions as `etude.inference.server`. vLLM exits with it in any
case. The environment variable ETUDE_TOKEN is the bearer token of every POST request. With ``--register URL`` it joins
the fleet of a run on another host, as `etude.inference.server` does, and needs no checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from etude.errors import DeadlineExceeded, WeightsError
from etude.inference.external.engine import ExternalEngine
from etude.inference.external.environment import VLLM
from etude.inference.external.serving import make_parser, run_process, serve_external
from etude.inference.external.weight_sync import ExternalWeightSync
from etude.inference.vllm.process import VllmClient, start
from etude.records.completion import Version
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights.follow.head_tracker import HeadTracker

EXTENSION = "etude.inference.vllm.worker.WorkerExtension"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it is stopped. Returns the exit code. `argv` None means the process's arguments."""
    args = _parser().parse_args(argv)
    return run_process(args, "vllm", partial(_serve, args))


def _serve(args: argparse.Namespace, folder: Path, telemetry: Telemetry | None) -> None:
    def make_weight_sync(engine: ExternalEngine) -> VllmWeightSync:
        store = open_store(args.store, cache=args.cache)
        head = HeadTracker(store, "policy", args.branch, public_key=args.public_key)
        return VllmWeightSync(
            engine,
            head,
            args.store,
            branch=args.branch,
            public_key=args.public_key,
            cache=args.cache,
            poll_s=args.poll_s,
            telemetry=telemetry,
        )

    serve_external(args, VLLM, partial(start, extension=args.extension), make_weight_sync, folder, telemetry)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("vLLM", "python -m etude.inference.vllm.server")
    parser.add_argument("--extension", default=EXTENSION, help="the class of vLLM's worker extension")
    return parser


PREPARE_S, SWAP_S = 600.0, 120.0
MIN_POLL_S, MAX_POLL_S = 0.01, 0.25  # interval of polling the workers, which delays their steps


class VllmWeightSync(ExternalWeightSync):
    """Updates the weights of a vLLM server to each new version of the channel, or of a branch of it.

    vLLM's workers fetch, decode and check a version while requests run, and write it during a pause. This process only
    reads the pointer to the newest version.

    - `head`: reads the pointer of the same `branch`, which may also move back to an earlier version.
    - `place`: the path or URL of the same store, as the workers open it.
    - `public_key`: accept only versions signed with this key. None accepts all.
    - `cache`: a directory in which engines of a region share downloads, or None."""

    def __init__(
        self,
        engine: ExternalEngine,
        head: HeadTracker,
        place: str,
        *,
        branch: str = "",
        public_key: bytes | None = None,
        cache: Path | None = None,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert isinstance(engine.client, VllmClient), "its workers are called"
        super().__init__(engine, poll_s=poll_s, telemetry=telemetry)
        self.head, self.place, self.branch, self.cache, self._call = head, place, branch, cache, engine.client.call
        self._public_key = public_key.hex() if public_key else ""

    async def start_at_head(self) -> None:
        """Adopt the newest version, then start the task, as `ExternalWeightSync.start_at_head` does.

        Raises `EngineError` for a model that the workers do not support."""
        await self._call("etude_follow", self.place, "policy", self.branch, self._public_key, str(self.cache or ""))
        await super().start_at_head()

    async def _ready(self) -> bool:
        newest = await asyncio.to_thread(self.head.version)
        if newest is None or newest == self._held:
            return False
        await self._prepared()
        return True

    async def _prepared(self) -> None:
        """Have all workers fetch and check the same version. Raises `WeightsError`, `DeadlineExceeded`."""
        call, version = self._call, None
        await call("etude_prepare")
        end, rest_s = time.monotonic() + PREPARE_S, MIN_POLL_S
        while time.monotonic() < end:
            states = await call("etude_state")
            trouble = next((one["trouble"] for one in states if one["trouble"]), "")
            if trouble:
                raise WeightsError(
                    f"{self.engine.name} cannot load the newest version",
                    trouble,
                    hint="check the store: etude weights fsck",
                )
            found = [one["prepared"] for one in states]
            if not any(one["preparing"] for one in states):
                what = f"{self.engine.name} finds no new version in {self.place}"
                raise WeightsError(
                    what,
                    "the channel's pointer names a version that the engine has loaded already",
                    hint="list the published versions: etude weights log",
                )
            if all(found):
                if all(one == found[0] for one in found):
                    return
                version = max(found, key=lambda one: one["step"])  # the other workers prepare the newest too
                await call("etude_prepare", version)
            await asyncio.sleep(rest_s)
            rest_s = min(MAX_POLL_S, 1.5 * rest_s)
        raise DeadlineExceeded(
            f"{self.engine.name} did not fetch the newest version within {PREPARE_S:g} s",
            f"requested: {version or 'the newest'}",
            hint="check the store, and see the engine's log",
        )

    async def _swap(self) -> Version:
        """Have all workers write the prepared version, and return it."""
        call = self._call
        results: list[dict[str, Any]] = await call("etude_swap", deadline_s=SWAP_S)
        trouble = next((one["trouble"] for one in results if one["trouble"]), "")
        if trouble:
            raise WeightsError(
                f"{self.engine.name} could not write a version",
                trouble,
                hint="wait: the engine writes all weights again, and requests wait until then",
            )
        versions = [msgspec.convert(one["version"], Version) for one in results]
        if any(version != versions[0] for version in versions):
            facts = ", ".join(map(str, versions))
            raise WeightsError(
                f"the workers of {self.engine.name} have different versions", facts, hint="restart the engine"
            )
        return versions[0]


if __name__ == "__main__":
    sys.exit(main())
