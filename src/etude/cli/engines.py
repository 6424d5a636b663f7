"""``etude engines install | list | check``: engines of another make."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from etude.errors import EngineError
from etude.inference.config import EngineKind
from etude.inference.foreign.environment import MAKES, VLLM, environment
from etude.inference.foreign.install import install, size_bytes
from etude.inference.started import started
from etude.records.completion import CompletionRequest, Sampling
from etude.scratch import ScratchDirectory

MOST_APART = 1e-3  # of a log-probability in float32, of a model of two layers


def install_kind(args: argparse.Namespace) -> None:
    """Make the environment; every step is told."""
    make = MAKES[EngineKind(args.kind)]
    where = environment(args.folder, make)
    mark = install(where, args.device, said=lambda line: print(line, flush=True))
    print(f"{make.name} {make.version} for {mark.device} is ready in {where.folder}")
    if not make.pins[mark.device]["tested"]:
        print(f"nobody has run etude's adapter so yet: etude engines check {make.key} says what works")
    if args.folder is not None:
        print(f"name it to runs by {make.key}.environment = {str(where.folder)!r}")


def listed(args: argparse.Namespace) -> None:
    """A line for each kind."""
    print("reference  always here")
    makes = [make for make in MAKES.values() if args.folder is None or environment(args.folder, make).version]
    for make in makes or [VLLM]:
        where = environment(args.folder, make)
        mark, version = where.mark, where.version
        if mark is None or version is None:
            again = f"not complete: etude engines install {make.key} goes on"
            state = again if where.folder.exists() else "not installed"
        else:
            tested = "" if version == make.version else f", not the tested {make.version}"
            state = f"{version} for {mark.device}{tested}, {size_bytes(where.folder) / 1e9:.1f} GB"
        print(f"{make.key:10} {state}  {where.folder}")


def check(args: argparse.Namespace) -> None:
    """Try everything that a run needs of an engine, with a tiny model."""
    kind, arguments = EngineKind(args.kind), list[str]()
    if kind is not EngineKind.REFERENCE:
        where = environment(args.folder, MAKES[kind])
        where.require()
        arguments = ["--environment", str(where.folder)]
    with ScratchDirectory("check") as folder:
        asyncio.run(_check(kind, arguments, folder))


async def _check(kind: EngineKind, where: Sequence[str], folder: Path) -> None:
    import numpy as np
    import torch

    from etude.models import ModelConfig, Transformer
    from etude.models.checkpoint import save_model
    from etude.stores import DirectoryStore
    from etude.training.config import LiveWeights
    from etude.training.exports import export
    from etude.weights import Channel

    sizes = ModelConfig(vocab_size=256, hidden_size=64, num_layers=2, num_experts=4, expert_size=64, context_tokens=256)
    channel, text, version = Channel(DirectoryStore(folder / "store")), list(range(1, 65)), None
    save_model(Transformer(sizes, seed=0), folder / "model", dtype="f32")
    arguments = [*where, "--store", str(folder / "store"), "--context-tokens", "256"]
    async with started(folder / "model", folder, *arguments, kind=kind) as running:
        engine = running.engine
        print(f"starts: {', '.join((await engine.info()).capabilities)}")
        sampling = Sampling(max_tokens=32, stop_token_ids=())
        request = CompletionRequest(
            request_id="c", session_id="c", prompt_ids=np.array(text[:16], np.int32), sampling=sampling
        )
        print(f"samples: {len((await engine.generate(request)).token_ids)} tokens")
        for step in range(2):
            model = Transformer(sizes, seed=step).eval()
            tensors = export(model, LiveWeights.F32)
            version = channel.publish(tensors, step=step, parent=version, rollout_ids=[]).version
            held, logprobs = await engine.verify(text)
            while held != version:  # a step's number is no version's name
                await asyncio.sleep(0.05)
                held, logprobs = await engine.verify(text)
            with torch.inference_mode():
                right = model(torch.tensor(text))[0].log_softmax(-1)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
            apart = float((torch.tensor(logprobs) - right).abs().max())
            if not apart < MOST_APART:
                raise EngineError(
                    f"the {kind} engine does not compute what {version} says",
                    f"a log-probability is off by {apart:.2g}",
                    hint="this build keeps weights in a way that is not known: install the tested one",
                )
            print(f"follows: step {step}, log-probabilities within {apart:.1e} of ours")
