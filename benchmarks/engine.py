"""Tokens a second of the reference engine, against transformers' continuous batching in the same run, on one thread.

Two random Qwen3-MoE models of 9.2M parameters (16 experts, top-4; 4 layers of 256 and 6 layers of 192), prompts of
64 tokens, 128 sampled tokens each, float32, eager; and the laptop example's model, without the comparison. The
reference engine is measured whole: asyncio face, log-probabilities, routes, spans. transformers runs
`generate_batch` without log-probabilities, with the fastest of its expert implementations (found by one run each).
Wall and CPU seconds are of this process; best of `--repeats`, the two engines taking turns. With `--vllm DIR`, a
virtual environment in which vLLM's CPU build is installed, it is measured on the first checkpoint after them: without
log-probabilities, in float32 and bfloat16, eager and compiled.
`python -m benchmarks.engine [--batches 1,16,64] [--repeats N] [--vllm DIR]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer
from etude.models.checkpoint import save_model
from etude.records import CompletionRequest, Sampling, Version

PROMPT_TOKENS, SAMPLED_TOKENS = 64, 128
BIG = {"vocab_size": 4096, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_experts": 16, "top_k": 4}
MODELS = {
    "9.2M, 4 layers of 256": ModelConfig(**BIG, hidden_size=256, num_layers=4, expert_size=128),
    "9.2M, 6 layers of 192": ModelConfig(**BIG, hidden_size=192, num_layers=6, expert_size=128),
    "laptop": ModelConfig(),
}
BESIDE_VLLM = "9.2M, 4 layers of 256"
TRIAL_BATCH = 16
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # transformers' implementations of the mixture

Run = Callable[[int], None]


def prompts(number: int, vocab_size: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    rng = np.random.default_rng(number)
    return [rng.integers(3, vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(number)]


def ours(sizes: ModelConfig, model: Transformer) -> Run:
    config = EngineConfig(context_tokens=PROMPT_TOKENS + SAMPLED_TOKENS)
    sampling = [Sampling(max_tokens=SAMPLED_TOKENS, stop_token_ids=(), seed=i) for i in range(config.max_sequences)]

    async def serve(number: int) -> None:
        async with ReferenceEngine(model, version=Version(0, "0" * 8, "0" * 64), config=config) as engine:
            requests = (
                CompletionRequest(request_id=f"r{i}", session_id=f"r{i}", prompt_ids=p, sampling=sampling[i])
                for i, p in enumerate(prompts(number, sizes.vocab_size))
            )
            done = await asyncio.gather(*(engine.generate(r) for r in requests))
        assert all(len(c.token_ids) == SAMPLED_TOKENS for c in done)

    return lambda number: asyncio.run(serve(number))


def theirs(sizes: ModelConfig, folder: Path, experts: str) -> Run:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
    ).eval()
    config = transformers.GenerationConfig(
        max_new_tokens=SAMPLED_TOKENS, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )

    def serve(number: int) -> None:
        inputs = [p.tolist() for p in prompts(number, sizes.vocab_size)]
        done = model.generate_batch(inputs, generation_config=config, progress_bar=False)
        assert [len(o.generated_tokens) for o in done.values()] == [SAMPLED_TOKENS] * number

    return serve


def vllms(environment: Path, sizes: ModelConfig, checkpoint: Path, batches: list[int], repeats: int) -> list[Any]:
    """vLLM on the same checkpoint and prompts, in its own environment, one process for each dtype and mode."""
    asked, answer = checkpoint.parent / "prompts.json", checkpoint.parent / "vllm.json"
    asked.write_text(json.dumps({b: [p.tolist() for p in prompts(b, sizes.vocab_size)] for b in batches}))
    argv = [str(environment.absolute() / "bin" / "python"), str(Path(__file__).with_name("vllm_engine.py"))]
    argv += ["--model", str(checkpoint), "--prompts", str(asked), "--sampled", str(SAMPLED_TOKENS)]
    argv += ["--repeats", str(repeats), "--out", str(answer)]
    found = []
    for dtype in ("float32", "bfloat16"):
        for mode in ("eager", "compiled"):
            subprocess.run([*argv, "--dtype", dtype, "--mode", mode], check=True, stdout=sys.stderr, timeout=600)
            found.append(json.loads(answer.read_text()))
    return found


def timed(run: Run, number: int) -> tuple[float, float]:
    """Tokens a wall second and a CPU second."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(number)
    tokens = number * SAMPLED_TOKENS
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def measure(name: str, batches: list[int], repeats: int, vllm: Path | None) -> list[dict[str, Any]]:
    sizes = MODELS[name]
    model = Transformer(sizes, seed=0)
    runs: dict[str, Run] = {"etude": ours(sizes, model)}
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model", dtype="f32")
        tried: dict[str, float] = {}
        if name != "laptop":
            candidates = {e: theirs(sizes, Path(folder) / "model", e) for e in EXPERTS}
            tried = {
                e: timed(run, TRIAL_BATCH)[1] for e, run in candidates.items()
            }  # CPU: a busy machine misleads less
            runs["transformers"] = candidates[max(tried, key=lambda e: tried[e])]
        rows = []
        for batch in batches:
            seen: dict[str, list[tuple[float, float]]] = {engine: [] for engine in runs}
            for _ in range(repeats):
                for engine, run in runs.items():
                    seen[engine].append(timed(run, batch))
            best = {engine: (max(w for w, _ in v), max(c for _, c in v)) for engine, v in seen.items()}
            rows.append({"model": name, "batch": batch, **_numbers(best, tried)})
        if vllm and name == BESIDE_VLLM:
            _beside(rows, vllms(vllm, sizes, Path(folder) / "model", batches, repeats))
    return rows


def _beside(rows: list[dict[str, Any]], vllm: list[dict[str, Any]]) -> None:
    """vLLM's numbers into the row of each batch size, and ours over the best of the same dtype."""
    for row in rows:
        same = [
            {"vllm": v["vllm"], "dtype": v["dtype"], "mode": v["mode"], **r}
            for v in vllm
            for r in v["rows"]
            if r["batch"] == row["batch"]
        ]
        best = max(v["tokens_per_cpu_s"] for v in same if v["dtype"] == "float32")
        row |= {"vllm": same, "ratio_to_vllm_per_cpu_s": round(row["tokens_per_cpu_s"] / best, 2)}


def _numbers(best: dict[str, tuple[float, float]], tried: dict[str, float]) -> dict[str, Any]:
    wall, cpu = best["etude"]
    row: dict[str, Any] = {"tokens_per_s": round(wall, 1), "tokens_per_cpu_s": round(cpu, 1)}
    if "transformers" in best:
        their_wall, their_cpu = best["transformers"]
        row["transformers"] = {
            "tokens_per_s": round(their_wall, 1),
            "tokens_per_cpu_s": round(their_cpu, 1),
            "tried_tokens_per_cpu_s": {e: round(v, 1) for e, v in tried.items()},
        }
        row["ratio"], row["ratio_per_cpu_s"] = round(wall / their_wall, 2), round(cpu / their_cpu, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    batches = [int(b) for b in args.batches.split(",")]
    rows = [row for name in MODELS for row in measure(name, batches, args.repeats, args.vllm)]
    facts = {"threads": 1, "torch": torch.__version__, "transformers": transformers.__version__, "mode": "eager"}
    report("engine", {**facts, "prompt_tokens": PROMPT_TOKENS, "sampled_tokens": SAMPLED_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
