"""Engine against learner on one GPU, on the same weights: exact mode's bits, and how far native bfloat16 parts.

Four layers of Qwen3-30B-A3B, random weights. The engine prefills prompts in chunks and decodes by its graphs, many
sequences together; then one packed forward, as in training, gives the sampled tokens' log-probabilities again. In exact
mode no bit may differ, or the run fails. Natively: the mean and largest difference, the k3 estimate of the divergence
(nats a token), the largest ratio, and the share of tokens for which some layer chose another expert; and the same with
the engine's routes replayed.

`python -m benchmarks.gpu.parity [--quick]`: quick is a tiny model, wherever it runs, and writes no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import model as gpu_model
from benchmarks.gpu.model import TINY, qwen, random_model
from etude.inference.device_runner import runner_for
from etude.inference.scheduler import Scheduler, Sequence
from etude.models import ModelConfig, Transformer
from etude.models.attention import Packed
from etude.numerics.config import Mode, NumericsConfig
from etude.numerics.factory import operators_for
from etude.records.completion import CompletionRequest, Sampling
from etude.records.wire import Routes


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    sizes: ModelConfig
    sequences: int
    prompt: int
    tokens: int


FULL = Size(qwen(4, 512), sequences=32, prompt=256, tokens=128)
QUICK = Size(TINY, sequences=3, prompt=20, tokens=12)


def sampled(model: Transformer, size: Size) -> tuple[list[Sequence], list[Routes]]:
    """What the engine says of its own tokens, and its experts."""
    runner = runner_for(model, num_slots=size.sequences, context_tokens=size.prompt + size.tokens)
    scheduler = Scheduler(
        num_slots=size.sequences,
        context_tokens=size.prompt + size.tokens,
        chunk_tokens=96,
        step_tokens=512,
        max_waiting=size.sequences,
    )
    sequences, routes = [], dict[str, Routes]()
    for i in range(size.sequences):
        prompt = np.random.default_rng(i).integers(0, size.sizes.vocab_size, size.prompt - i % 8).astype(np.int32)
        sampling = Sampling(max_tokens=size.tokens, stop_token_ids=(), seed=i)
        request = CompletionRequest(
            request_id=f"r{i}", session_id=f"r{i}", prompt_ids=prompt, sampling=sampling, routes_from=0
        )
        sequences.append(Sequence(request, arrived=0.0))
        scheduler.submit(sequences[-1])
    while plan := scheduler.plan():
        runner.step(plan)
        for sequence in [s for s in scheduler.running if s.finished]:
            routes[sequence.request.request_id] = runner.routes(sequence)
            scheduler.finish(sequence)
    return sequences, [routes[s.request.request_id] for s in sequences]


@torch.no_grad()
def learned(
    model: Transformer, sequences: list[Sequence], replayed: list[Routes] | None = None
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Log-probabilities of the sampled tokens [R] by a packed forward, and the experts of all tokens [N, L, K]."""
    on = model.embedding.device
    contexts = [np.concatenate([s.request.prompt_ids, s.token_ids]).astype(np.int64) for s in sequences]
    lengths = [len(context) - 1 for context in contexts]
    tokens = torch.from_numpy(np.concatenate([context[:-1] for context in contexts])).to(on)
    firsts = np.cumsum([0, *lengths[:-1]])
    rows = np.concatenate(
        [first + np.arange(s.num_prompt - 1, n) for first, s, n in zip(firsts, sequences, lengths, strict=True)]
    )
    targets = np.concatenate([np.array(s.token_ids) for s in sequences])
    cache, routes = Packed(lengths, model.operators, device=on), None
    if replayed is not None:
        routes = torch.from_numpy(np.concatenate(replayed)).to(on)
    done = model.eval().run(tokens, cache, routes, torch.from_numpy(rows).to(on))
    logprobs = model.operators.log_softmax(done.logits)
    return logprobs.gather(1, torch.from_numpy(targets).to(on)[:, None])[:, 0].cpu(), done.routes.cpu().numpy()


def compared(engine: torch.Tensor, learner: torch.Tensor) -> dict[str, float | int]:
    ratio = (learner - engine).double()
    return {
        "num_tokens": len(engine),
        "differing": int((engine != learner).sum()),
        "mean_abs_dlogprob": float(f"{ratio.abs().mean():.3e}"),
        "max_abs_dlogprob": float(f"{ratio.abs().max():.3e}"),
        "k3": float(f"{(torch.expm1(ratio) - ratio).mean():.3e}"),
        "max_ratio": round(float(ratio.exp().max()), 4),
    }


def measure(size: Size, on: torch.device) -> dict[str, Any]:
    """Both modes, as numbers."""
    found: dict[str, Any] = {}
    for mode in Mode:
        operators = operators_for(NumericsConfig(mode), torch.bfloat16, device=on)
        model = random_model(size.sizes, operators, operators.storage_dtype, on)
        sequences, routes = sampled(model, size)
        engine = torch.tensor([logprob for s in sequences for logprob in s.logprobs], dtype=torch.float32)
        learner, used = learned(model, sequences)
        flipped = (np.sort(np.concatenate(routes), -1) != np.sort(used, -1)).any((1, 2))
        row = {"parity": model.parity, **compared(engine, learner), "flipped": round(float(flipped.mean()), 5)}
        if mode is Mode.NATIVE:
            row["replayed"] = compared(engine, learned(model, sequences, routes)[0])
        found[str(mode)] = row
    return found


def main(quick: bool, on: torch.device) -> dict[str, Any]:
    chip = torch.cuda.get_device_name(on) if on.type == "cuda" else "cpu"
    return {"device": chip, "torch": torch.__version__, **measure(QUICK if quick else FULL, on)}


if __name__ == "__main__":
    if gpu_model.main("gpu_parity", __doc__, main)["exact"]["differing"]:
        raise SystemExit("exact mode differs: see exact.differing")
