"""The program of a vLLM engine: ``python -m etude.inference.vllm.server --checkpoint DIR [--store PLACE] ...``.

Starts vLLM in its own environment as a child, follows the weight chain with it, and serves `app` on a socket as
`etude.inference.server` does for our own engine: the same protocol, the same ready file, the same ends. vLLM dies with
it, however it ends. ETUDE_TOKEN in the environment is the bearer token that every POST must carry. With ``--register
URL`` it joins the fleet of a run elsewhere, as `etude.inference.server` does, and needs no checkpoint.
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
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.environment import VLLM, environment
from etude.inference.foreign.following import Following
from etude.inference.foreign.serving import initial_version, offer, parser_of, prepare, read_model, run
from etude.inference.membership import NO_VERSION
from etude.inference.serving import config_of, listen, read_token, report_settings
from etude.inference.vllm.process import VllmCalls, start
from etude.records.completion import Version
from etude.stores import open_store
from etude.telemetry import Telemetry
from etude.weights.follow.head_tracker import HeadTracker

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
        head = HeadTracker(open_store(args.store, cache=args.cache), "policy", public_key=args.public_key)
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


# -------------------------------------------------------------------------------------- following the chain of weights
# Only the pointer is read here, some hundred bytes. vLLM's workers fetch, decode and prove beside the requests, and
# write what is proven between two steps, in a pause.


PREPARE_S, SWAP_S = 600.0, 120.0
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.25  # between two questions to the workers, each of which takes time of a step


class VllmFollowing(Following):
    """`place`: the store, as vLLM's workers open it, `head` is of the same; `public_key`: the workers believe only what
    its owner signed; `cache`: a directory in which a region's engines share what they fetched."""

    def __init__(
        self,
        engine: ForeignEngine,
        head: HeadTracker,
        place: str,
        *,
        public_key: bytes | None = None,
        cache: Path | None = None,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert isinstance(engine.calls, VllmCalls), "its workers are called"
        super().__init__(engine, poll_s=poll_s, telemetry=telemetry)
        self.head, self.place, self.cache, self._call = head, place, cache, engine.calls.call
        self._public_key = public_key.hex() if public_key else ""

    async def start_at_head(self) -> None:
        """As of every follower. Raises `EngineError` for a model that the workers have no map for."""
        await self._call("etude_follow", self.place, "policy", "", self._public_key, str(self.cache or ""))
        await super().start_at_head()

    async def _ready(self) -> bool:
        newest = await asyncio.to_thread(self.head.version)
        if newest is None or newest == self._held:
            return False
        await self._prepared()
        return True

    async def _prepared(self) -> None:
        """Every worker has one and the same version fetched and proven."""
        call, version = self._call, None
        await call("etude_prepare")
        end, rest_s = time.monotonic() + PREPARE_S, FIRST_LOOK_S
        while time.monotonic() < end:
            states = await call("etude_state")
            trouble = next((one["trouble"] for one in states if one["trouble"]), "")
            if trouble:
                raise WeightsError(
                    f"{self.engine.name} cannot come to the head", trouble, hint="see etude weights fsck"
                )
            found = [one["prepared"] for one in states]
            if not any(one["preparing"] for one in states):
                what = f"{self.engine.name} finds nothing new in {self.place}"
                raise WeightsError(what, "its pointer is at another version", hint="see etude weights log")
            if all(found):
                if all(one == found[0] for one in found):
                    return
                version = max(found, key=lambda one: one["step"])  # the others come to the newest
                await call("etude_prepare", version)
            await asyncio.sleep(rest_s)
            rest_s = min(LAST_LOOK_S, 1.5 * rest_s)
        raise DeadlineExceeded(
            f"{self.engine.name} did not fetch the head within {PREPARE_S:g} s",
            f"asked for {version or 'the newest'}",
            hint="see the store, and the engine's log",
        )

    async def _swap(self) -> Version:
        """The version that every worker has written."""
        call = self._call
        told: list[dict[str, Any]] = await call("etude_swap", deadline_s=SWAP_S)
        trouble = next((one["trouble"] for one in told if one["trouble"]), "")
        if trouble:
            raise WeightsError(
                f"{self.engine.name} could not write a version", trouble, hint="it is written whole next, requests wait"
            )
        versions = [msgspec.convert(one["version"], Version) for one in told]
        if any(version != versions[0] for version in versions):
            facts = ", ".join(map(str, versions))
            raise WeightsError(f"the workers of {self.engine.name} hold different versions", facts, hint="restart it")
        return versions[0]


if __name__ == "__main__":
    sys.exit(main())
