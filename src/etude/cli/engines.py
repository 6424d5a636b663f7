"""``etude engines install | list | check``: engines of another make."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from etude.errors import EngineError
from etude.inference.vllm.environment import environment, required_version
from etude.inference.vllm.install import install, size_bytes
from etude.inference.vllm.started import started
from etude.records.completion import CompletionRequest, Sampling

MOST_APART = 1e-3  # of a log-probability in float32, of a model of two layers


def install_kind(args: argparse.Namespace) -> None:
    """Make the environment; every step is told."""
    where = environment(args.folder)
    mark = install(where, args.device, said=lambda line: print(line, flush=True))
    print(f"vLLM {mark.vllm} for {mark.device} is ready in {where.folder}")
    if mark.device == "cuda":
        print("nobody has run etude's adapter on a GPU yet: etude engines check vllm says what works")
    if args.folder is not None:
        print(f"name it to runs by vllm.environment = {str(where.folder)!r}")


def listed(args: argparse.Namespace) -> None:
    """A line for each kind."""
    print("reference  always here")
    where = environment(args.folder)
    mark, version = where.mark, where.version
    if mark is None:
        state = "not complete: etude engines install vllm goes on" if where.folder.exists() else "not installed"
    else:
        tested = "" if version == required_version() else f", not the tested {required_version()}"
        state = f"{version} for {mark.device}{tested}, {size_bytes(where.folder) / 1e9:.1f} GB"
    print(f"vllm       {state}  {where.folder}")


def check(args: argparse.Namespace) -> None:
    """Try everything that a run needs of it, with a tiny model."""
    where = environment(args.folder)
    where.require()
    with tempfile.TemporaryDirectory(prefix="etude-check-") as folder:
        asyncio.run(_check(where.folder, Path(folder)))


async def _check(where: Path, folder: Path) -> None:
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
    arguments = ["--environment", str(where), "--store", str(folder / "store"), "--context-tokens", "256"]
    async with started(folder / "model", folder, *arguments) as running:
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
                    f"vLLM does not compute what {version} says",
                    f"a log-probability is off by {apart:.2g}",
                    hint="this build packs weights in a way that is not known: install the tested one",
                )
            print(f"follows: step {step}, log-probabilities within {apart:.1e} of ours")
