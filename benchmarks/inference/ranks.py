"""An engine of two ranks ÷ one of one, memory and speed: ``python -m benchmarks.inference.ranks [--repeats N]``.

A reference engine on a CPU, exact mode, with random weights of a model shaped like DeepSeek-V3 (latents, sigmoid
routing, a shared expert, a first dense layer) and of one shaped like Qwen3-MoE, each of about 25 million parameters. A
rank is a process with one thread. For each number of ranks:

- `part_mb`: the weights of each rank. `private_mb`: the memory that each process alone has, by the kernel, after the
  requests; the interpreter and torch are in it. `base_mb`: that of a process which has imported torch and no model.
- `tokens_s`: tokens per second of `BATCH` requests together, wall time, the best of the repeats.

Tokens, log-probabilities and routes must be the same. On a CPU two ranks share the cores and the memory bandwidth of
one machine, and wait for each other in each layer, so no gain is expected: what ranks are for is memory."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.rank_messages import RankJob
from etude.inference.ranks import Ranks, load_part
from etude.models import ModelConfig, Transformer, save_model
from etude.models.components import Latent, Routing, Scores
from etude.numerics.config import NumericsConfig
from etude.numerics.exact.operators import Exact
from etude.records import Completion, CompletionRequest, Sampling, Version

BATCH, PROMPT, TOKENS, CONTEXT = 16, 128, 64, 256
VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)
WIDE = {"vocab_size": 1024, "hidden_size": 256, "num_layers": 4, "num_experts": 32, "top_k": 4}
WIDE["context_tokens"] = CONTEXT
MODELS = {
    "qwen3-moe": ModelConfig(**WIDE, num_heads=8, num_kv_heads=4, head_dim=32, expert_size=256),
    "deepseek-v3": ModelConfig(
        **WIDE, num_heads=8, num_kv_heads=8, head_dim=48, expert_size=256, family="deepseek_v3", dense_layers=(0,),
        dense_size=1024, num_shared=1, routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=4, top_groups=2),
        latent=Latent(kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32, q_rank=96),
    ),
}  # fmt: skip


def private_mb(pid: int | str) -> float:
    """The memory of a process that no other process shares, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1e3


def base_mb() -> float:
    """The memory of a process without a model."""
    code = "import etude.inference.rank_process, os; from benchmarks.inference.ranks import private_mb; "
    code += "print(private_mb(os.getpid()))"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


def request(number: int, tokens: int) -> CompletionRequest:
    prompt = np.random.default_rng(number).integers(0, WIDE["vocab_size"], PROMPT).astype(np.int32)
    sampling = Sampling(max_tokens=tokens, stop_token_ids=(), seed=number, temperature=1.0)
    return CompletionRequest(request_id=f"r{number}", session_id=f"r{number}", prompt_ids=prompt, sampling=sampling)


async def served(engine: ReferenceEngine, tokens: int) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request(n, tokens)) for n in range(BATCH))))


def measured(checkpoint: Path, ranks: int, repeats: int) -> tuple[dict[str, Any], list[Any]]:
    """Measure in this process, which is rank 0."""
    config = EngineConfig(max_sequences=BATCH, context_tokens=CONTEXT, tensor_parallel=ranks, device="cpu")
    job = RankJob(checkpoint, None, NumericsConfig(degree=2), config, threads=1)
    with ExitStack() as stack:
        others = stack.enter_context(Ranks(job)) if ranks > 1 else None
        model = load_part(job) if others is None else load_part(job, others.parallel)
        if others is not None:
            others.wait_until_loaded()

        async def story() -> tuple[list[Completion], float]:
            async with ReferenceEngine(model, version=VERSION, config=config, ranks=others) as engine:
                await served(engine, 1)  # the prompts are computed
                best = float("inf")
                for _ in range(repeats):
                    begin = time.perf_counter()
                    done = await served(engine, TOKENS)
                    best = min(best, time.perf_counter() - begin)
                pids = ["self", *([] if others is None else map(str, others.pids))]
                found["private_mb"] = [round(private_mb(pid), 1) for pid in pids]
                return done, best

        found: dict[str, Any] = {"ranks": ranks}
        found["part_mb"] = round(sum(p.nbytes for p in model.parameters()) / 1e6, 1)
        done, best = asyncio.run(story())
        found["tokens_s"] = round(BATCH * TOKENS / best, 1)
        return found, [(one.token_ids.tolist(), one.logprobs.tolist(), one.routes.tolist()) for one in done]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(Transformer(sizes, seed=1, operators=Exact(degree=2)), Path(folder) / "model", dtype="f32")
            (one, said), (two, same) = (measured(Path(folder) / "model", ranks, args.repeats) for ranks in (1, 2))
        assert said == same, f"{name}: two ranks say something else"
        ratio = {"part_ratio": two["part_mb"] / one["part_mb"], "speed_ratio": two["tokens_s"] / one["tokens_s"]}
        rows.append({"model": name, "by_ranks": [one, two], **{key: round(of, 3) for key, of in ratio.items()}})
    report("engine_ranks", {"mode": "exact", "batch": BATCH, "tokens": TOKENS, "base_mb": base_mb(), "models": rows})


if __name__ == "__main__":
    main()
