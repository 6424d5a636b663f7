"""Twenty swaps of a vLLM engine in mid-generation: what becomes of requests, their spans, and what is computed after.

The engine is `etude.inference.vllm.server` as a run starts it, over the installed vLLM (`etude engines install vllm`),
following a store. Versions are a random Qwen3-MoE and what optimiser-sized steps make of it, published while
streams of completions are in flight, so that every swap falls into some. Held to account: requests that failed, spans
(each begins with the version before it and counts swaps), and, after each swap, 32 greedy tokens and the
log-probabilities of a fixed text against `transformers` with that version's weights, in float32 on both sides.
`python -m benchmarks.weights.vllm_swaps [--swaps N]`
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.errors import EtudeError
from etude.inference import HttpEngine
from etude.inference.external.environment import VLLM
from etude.inference.temporary_engine import temporary_engine
from etude.models import ModelConfig, Transformer, save_model
from etude.records.completion import Completion, CompletionRequest, Sampling, Version
from etude.stores import DirectoryStore
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.training.optimizer import AdamW
from etude.weights import Channel

SIZES = ModelConfig(
    vocab_size=1024, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, expert_size=128,
    num_experts=8, top_k=2, context_tokens=512,
)  # fmt: skip
LR = 3e-3  # large steps: a token that the old weights sampled would show
STREAMS, SAMPLED, PROMPT, GREEDY = 6, 256, 24, 32
TEXT = [(7 * i * i + 3 * i) % SIZES.vocab_size for i in range(128)]
NEAR = 1e-4  # of a log-probability, engine against transformers


@dataclass
class Seen:
    """What came of the requests."""

    completions: list[Completion] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    begun: int = 0
    over: bool = False


def request(name: str, prompt: list[int], num_tokens: int, **sampling: Any) -> CompletionRequest:
    asked = Sampling(max_tokens=num_tokens, stop_token_ids=(), **sampling)
    ids = np.array(prompt, np.int32)
    return CompletionRequest(request_id=name, session_id=name, prompt_ids=ids, sampling=asked, deadline_s=300.0)


async def stream(engine: HttpEngine, number: int, seen: Seen) -> None:
    """One completion after another until the swaps are over."""
    while not seen.over:
        seen.begun += 1
        name = f"s{number}.{seen.begun}"
        prompt = [(31 * seen.begun + 7 * number + i) % SIZES.vocab_size for i in range(PROMPT)]
        try:
            seen.completions.append(await engine.generate(request(name, prompt, SAMPLED, seed=seen.begun)))
        except EtudeError as error:
            seen.failed.append(str(error))


def wrong_spans(completion: Completion, order: list[Version]) -> bool:
    """Whether its spans are not consecutive versions, of more and more swaps, over all of its tokens."""
    at = [order.index(span.version) for span in completion.spans]
    epochs = [span.kv_epoch for span in completion.spans]
    consecutive = at == list(range(at[0], at[0] + len(at)))
    whole = sum(span.num_tokens for span in completion.spans) == SAMPLED
    return not (consecutive and whole and epochs == list(range(len(at))))


def oracle(folder: Path, sampled: list[int]) -> tuple[bool, list[float]]:
    """(whether each sampled token is the most probable one after those before it, the text's log-probabilities) by
    transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        scores = model(torch.tensor([TEXT])).logits[0].log_softmax(-1)
        logprobs = scores[:-1].gather(1, torch.tensor(TEXT)[1:, None])[:, 0].tolist()
        context = torch.tensor([TEXT[:PROMPT] + sampled])
        best = model(context).logits[0, PROMPT - 1 : -1].argmax(-1).tolist()
    return best == sampled, logprobs


async def measure(num_swaps: int, place: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, noise = Transformer(SIZES, seed=0), torch.Generator().manual_seed(0)
    optimizer = AdamW(model, weights=LiveWeights.F32)
    save_model(model, place / "model", dtype="f32")
    channel = Channel(DirectoryStore(place / "store"))
    version = channel.publish(export(model, LiveWeights.F32), step=0, parent=None, rollout_ids=[]).version
    order, rows, seen = [version], list[dict[str, Any]](), Seen()
    arguments = ["--store", str(place / "store"), "--context-tokens", "512", "--max-sequences", str(STREAMS + 2)]
    async with temporary_engine(place / "model", place, *arguments) as running:
        engine = running.engine
        while (await engine.info()).version != version:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.05)
        streams = [asyncio.create_task(stream(engine, i, seen)) for i in range(STREAMS)]
        for step in range(1, num_swaps + 1):
            optimizer.grad.copy_(torch.randn(optimizer.grad.shape, generator=noise))
            optimizer.step(LR)
            version = channel.publish(export(model, LiveWeights.F32), step=step, parent=version, rollout_ids=[]).version
            order.append(version)
            began = time.perf_counter()
            await engine.adopt(step, deadline_s=120.0)
            adopted_s = time.perf_counter() - began
            save_model(model, place / f"v{step}", dtype="f32")
            held, logprobs = await engine.verify(TEXT)
            done = await engine.generate(request(f"greedy.{step}", TEXT[:PROMPT], GREEDY, temperature=0.0))
            sampled = done.token_ids.tolist()
            greedy, right_logprobs = await asyncio.to_thread(oracle, place / f"v{step}", sampled)
            rows.append(
                {
                    "held": held == version,
                    "greedy_equal": greedy and len(sampled) == GREEDY and done.spans[0].version == version,
                    "text_off": max(abs(a - b) for a, b in zip(logprobs, right_logprobs, strict=True)),
                    "adopted_s": adopted_s,
                }
            )
        seen.over = True
        await asyncio.gather(*streams)
    return told(seen, order, rows)


def told(seen: Seen, order: list[Version], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of the result."""
    crossed = [len(completion.spans) - 1 for completion in seen.completions]
    return {
        "vllm": VLLM.version,
        "parameters": SIZES.num_parameters,
        "compared": "float32 on both sides: vLLM's CPU build, eager, and transformers",
        "swaps": len(rows),
        "requests": {
            "finished": len(seen.completions),
            "failed": len(seen.failed),
            "over_a_swap": sum(n > 0 for n in crossed),
            "most_swaps_in_one": max(crossed, default=0),
        },
        "wrong_spans": sum(wrong_spans(completion, order) for completion in seen.completions),
        "after_a_swap": {
            "version_held": sum(row["held"] for row in rows),
            "greedy_equal_to_transformers": sum(row["greedy_equal"] for row in rows),
            "greedy_tokens_each": GREEDY,
            "text_logprob_off_max": max(row["text_off"] for row in rows),
            "text_within": NEAR,
        },
        "publish_to_adopted_s": {
            "p50": round(float(np.median([row["adopted_s"] for row in rows])), 3),
            "max": round(max(row["adopted_s"] for row in rows), 3),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report("vllm_swaps", asyncio.run(measure(args.swaps, Path(folder))))


if __name__ == "__main__":
    main()
