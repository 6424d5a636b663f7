"""The commands ``etude engines install``, ``list`` and ``check`` for vLLM and SGLang."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from etude.errors import EngineError
from etude.inference.config import EngineKind
from etude.inference.external.environment import SERVER_KINDS, VLLM, environment
from etude.inference.external.install import install, size_bytes
from etude.inference.temporary_engine import temporary_engine
from etude.records.completion import CompletionRequest, Sampling
from etude.scratch import ScratchDirectory

MAX_LOGPROB_DIFFERENCE = 1e-3  # for float32 and a model with two layers


def install_kind(args: argparse.Namespace) -> None:
    """Create a virtual environment with vLLM or SGLang, and print each step."""
    make = SERVER_KINDS[EngineKind(args.kind)]
    where = environment(args.folder, make)
    mark = install(where, args.device, report=lambda line: print(line, flush=True))
    print(f"{make.name} {make.version} for {mark.device} is ready in {where.folder}")
    if not make.pins[mark.device]["tested"]:
        print(f"etude's adapter is not tested with this build; to check it: etude engines check {make.key}")
    if args.folder is not None:
        print(f"to use it in a run, set {make.key}.environment = {str(where.folder)!r}")


def list_engines(args: argparse.Namespace) -> None:
    """Print a line for each kind of engine: version, device, size and folder."""
    print("reference  built in")
    makes = [make for make in SERVER_KINDS.values() if args.folder is None or environment(args.folder, make).version]
    for make in makes or [VLLM]:
        where = environment(args.folder, make)
        mark, version = where.mark, where.version
        if mark is None or version is None:
            again = f"incomplete; to continue: etude engines install {make.key}"
            state = again if where.folder.exists() else "not installed"
        else:
            tested = "" if version == make.version else f", not the tested {make.version}"
            state = f"{version} for {mark.device}{tested}, {size_bytes(where.folder) / 1e9:.1f} GB"
        print(f"{make.key:10} {state}  {where.folder}")


def check(args: argparse.Namespace) -> None:
    """Test with a tiny model everything that a run needs from an engine. Raises `EngineError`."""
    kind, arguments = EngineKind(args.kind), list[str]()
    if kind is not EngineKind.REFERENCE:
        where = environment(args.folder, SERVER_KINDS[kind])
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
    async with temporary_engine(folder / "model", folder, *arguments, kind=kind) as running:
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
            while held != version:  # the digest must match, too, not only the step
                await asyncio.sleep(0.05)
                held, logprobs = await engine.verify(text)
            with torch.inference_mode():
                expected = (
                    model(torch.tensor(text))[0].log_softmax(-1)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
                )
            difference = float((torch.tensor(logprobs) - expected).abs().max())
            if not difference < MAX_LOGPROB_DIFFERENCE:
                raise EngineError(
                    f"the {kind} engine computes wrong log-probabilities for {version}",
                    f"the largest error is {difference:.2g}",
                    hint=f"etude was not tested with this build's way to store weights: etude engines install {kind}",
                )
            print(f"loads versions: step {step}, log-probabilities within {difference:.1e} of the learner's")
