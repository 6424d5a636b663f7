"""vLLM serves requests while its workers follow a channel: what a swap costs them, and whether the weights are right.

vLLM runs in its own environment (`--vllm DIR`, etude beside it by its path) with etude's worker extension, on a bf16
Qwen3-MoE of random weights. Versions are optimiser-sized changes; the first is what it loads. While completions are in
flight each version is fetched and proven in the background and written between two steps of the engine; after each,
every mapped tensor's memory is compared with the version's bits. At the end a text is scored, and scored again by
another vLLM process that loaded the last version from its files: the log-probabilities have to be equal, bit for bit,
also those of tokens that are then sampled greedily. With `--latent` the model is a DeepSeek-V3.
`python -m benchmarks.weights.vllm_follow --vllm DIR [--versions N] [--latent]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import report
from etude.errors import DeadlineExceeded
from etude.models import ModelConfig, Transformer, save_model
from etude.models.components import Latent, Routing, Scores
from etude.stores import DirectoryStore
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.training.optimizer import AdamW
from etude.weights import Channel

SIZES = ModelConfig(
    vocab_size=4096, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, expert_size=128,
    num_experts=16, top_k=4, context_tokens=512,
)  # fmt: skip
LATENT = replace(
    SIZES, family="deepseek_v3", num_kv_heads=4, head_dim=96, num_shared=1, dense_layers=(0,), dense_size=512,
    latent=Latent(kv_rank=512, nope_dim=32, rope_dim=64, value_dim=32, q_rank=128),
    routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=4, top_groups=2),
)  # fmt: skip
LR = 1e-6
ENGINE = Path(__file__).with_name("vllm_follow_engine.py")
SOURCE = Path(__file__).parents[2] / "src"
DEADLINE_S = 600.0


def measure(environment: Path, num_versions: int, sizes: ModelConfig = SIZES) -> dict[str, Any]:
    """Publish as the engine asks for it; then its numbers, and what a fresh engine says of the last version."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = Transformer(sizes, seed=0)
        optimizer = AdamW(model, weights=LiveWeights.BF16)
        noise = torch.Generator().manual_seed(0)
        channel, changed = Channel(DirectoryStore(place / "store")), []
        save_model(model, place / "first", dtype="bf16")
        version = channel.publish(export(model, LiveWeights.BF16), step=0, parent=None, rollout_ids=[]).version
        follow = ["--follow", str(place / "store"), "--versions", str(num_versions)]
        engine = _start(environment, place / "first", place / "live.json", *follow)
        try:
            for step in range(1, num_versions + 1):
                _wait_for(place / f"live.json.{step - 1}", engine)  # it has adopted the version before
                optimizer.grad.copy_(torch.randn(optimizer.grad.shape, generator=noise))
                optimizer.step(LR)
                told = channel.publish(export(model, LiveWeights.BF16), step=step, parent=version, rollout_ids=[])
                version = told.version
                changed.append(told.changed_share)
            _end(engine)
        finally:
            engine.kill()
        live = json.loads((place / "live.json").read_text())
        save_model(model, place / "last", dtype="bf16")
        fresh = _start(environment, place / "last", place / "fresh.json")
        try:
            _end(fresh)
        finally:
            fresh.kill()
        loaded = json.loads((place / "fresh.json").read_text())
    before, after, right = live.pop("scores_before"), live.pop("scores"), loaded["scores"]
    return {
        "parameters": sizes.num_parameters,
        "changed_share": round(sum(changed) / len(changed), 5),
        **live,
        "logprobs": len(right),
        "max_difference_from_a_fresh_engine": max(abs(a - b) for a, b in zip(after, right, strict=True)),
        "max_difference_from_the_first_version": round(max(abs(a - b) for a, b in zip(after, before, strict=True)), 5),
    }


def _start(environment: Path, checkpoint: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    argv = [str(environment.absolute() / "bin" / "python"), str(ENGINE), "--model", str(checkpoint), "--out", str(out)]
    return subprocess.Popen([*argv, *more], env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=sys.stderr)


def _wait_for(path: Path, engine: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        if engine.poll() is not None:
            raise SystemExit(f"vLLM ended with status {engine.returncode} before it had adopted {path.suffix[1:]}")
        if time.monotonic() > end:
            what = f"vLLM did not adopt version {path.suffix[1:]} within {DEADLINE_S:g} s"
            raise DeadlineExceeded(what, hint="its own output says what it does")
        time.sleep(0.02)


def _end(engine: subprocess.Popen[bytes]) -> None:
    try:
        status = engine.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        what = f"vLLM did not end within {DEADLINE_S:g} s"
        raise DeadlineExceeded(what, hint="its own output says what it does") from None
    if status:
        raise SystemExit(f"vLLM ended with status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="a virtual environment with vLLM, zstandard, msgspec")
    parser.add_argument("--versions", type=int, default=8, help="to adopt after the first")
    parser.add_argument("--latent", action="store_true", help="a model with latent attention")
    args = parser.parse_args()
    if args.latent:
        report("vllm_follow_latent", measure(args.vllm, args.versions, LATENT))
    else:
        report("vllm_follow", measure(args.vllm, args.versions))


if __name__ == "__main__":
    main()
