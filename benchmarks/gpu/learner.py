"""Model FLOPs utilisation of a training step on one GPU: a random Qwen3-MoE of 4.4 billion parameters.

Float32 weights and gradients, bfloat16 activations, torch's fused AdamW: 16 bytes a parameter. A microbatch is packed
sequences of 4096 tokens, of which every fourth carries loss (what an agent sampled among what it read); a step is four
of them and the optimiser's. Utilisation is the operations that the model must do (benchmarks/gpu/model.py) over the
time and the chip's dense bfloat16 peak: nothing that is computed twice counts. What RL does beside (checks, ratios,
entropy) is not in it. Also: the same over what a large product reaches here, the memory at its peak, which programs a
microbatch's time goes to, and how close the device's forward is to one in float32, sequence by sequence.

`python -m benchmarks.gpu.learner [--quick]`: quick is a tiny model, wherever it runs, and writes no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import model as gpu_model
from benchmarks.gpu.model import TINY, Peaks, Work, kernels, peaks, qwen, random_model, seconds, share
from etude.models import ModelConfig, Transformer
from etude.models.attention import Packed
from etude.numerics.native import Native

EVERY = 4  # one token of so many carries loss


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    sizes: ModelConfig
    length: int  # tokens a sequence
    sequences: int  # a microbatch
    microbatches: int  # a step
    repeats: int


FULL = Size(qwen(num_layers=6, context_tokens=4096), length=4096, sequences=8, microbatches=4, repeats=5)
QUICK = Size(TINY, length=16, sequences=2, microbatches=2, repeats=1)


class Step:
    """A model, its optimiser and one microbatch."""

    def __init__(self, size: Size, on: torch.device) -> None:
        self.size, self.on = size, on
        self.model = random_model(size.sizes, Native(torch.bfloat16), torch.float32, on).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        tokens, drawn = size.length * size.sequences, torch.Generator().manual_seed(0)
        self.tokens_N = torch.randint(size.sizes.vocab_size, (tokens,), generator=drawn).to(on)
        self.rows_R = torch.arange(0, tokens, EVERY).to(on)
        self.targets_R = self.tokens_N[(self.rows_R + 1) % tokens]
        self.lengths = [size.length] * size.sequences

    def forward(self) -> torch.Tensor:
        """The mean log-probability of the targets."""
        cache = Packed(self.lengths, self.model.operators, device=self.on)
        done = self.model.run(self.tokens_N, cache, rows=self.rows_R)
        logprobs = self.model.operators.log_softmax(done.logits)
        loss = -logprobs.gather(1, self.targets_R[:, None]).mean()
        return loss if done.balance is None else loss + 1e-3 * done.balance

    def microbatch(self) -> None:
        self.forward().backward()  # type: ignore[no-untyped-call]

    def whole(self) -> None:
        for _ in range(self.size.microbatches):
            self.microbatch()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    @property
    def operations(self) -> float:
        """Of a microbatch, forward and back."""
        length, tokens = self.size.length, self.size.length * self.size.sequences
        pairs = self.size.sequences * length * (length + 1) // 2
        return 3 * Work(self.size.sizes).forward(tokens, len(self.rows_R), pairs)


@torch.no_grad()
def closeness(model: Transformer, size: Size, on: torch.device) -> dict[str, float]:
    """Of one sequence's log-probabilities by the device's way and in float32, the mean and the largest difference."""
    tokens = torch.randint(size.sizes.vocab_size, (size.length,), generator=torch.Generator().manual_seed(1)).to(on)
    rows = torch.arange(0, size.length, max(1, size.length // 256)).to(on)
    found = []
    for operators in (Native(torch.bfloat16), Native(torch.float32)):
        for module in model.modules():
            if hasattr(module, "operators"):
                module.operators = operators
        logits, _ = model.eval()(tokens, rows=rows)
        found.append(operators.log_softmax(logits).gather(1, tokens[(rows + 1) % size.length, None]))
    off = (found[0] - found[1]).abs()
    return {"mean_abs_dlogprob": round(float(off.mean()), 5), "max_abs_dlogprob": round(float(off.max()), 5)}


def measure(size: Size, on: torch.device, peak: Peaks) -> dict[str, Any]:
    """All of it, as numbers."""
    step = Step(size, on)
    microbatch_s = seconds(on, step.microbatch, repeats=size.repeats)
    with torch.no_grad():
        forward_s = seconds(on, step.forward, repeats=size.repeats)
    whole_s = seconds(on, step.whole, repeats=max(1, size.repeats // 2), warm_ups=1)
    most = kernels(on, step.microbatch)
    operations, tokens = step.operations, size.length * size.sequences
    rates = {"microbatch": operations / microbatch_s, "step": operations * size.microbatches / whole_s}
    held = torch.cuda.max_memory_allocated(on) if on.type == "cuda" else 0
    step.optimizer.zero_grad(set_to_none=True)
    return {
        "num_parameters": size.sizes.num_parameters,
        "num_layers": size.sizes.num_layers,
        "tokens_a_microbatch": tokens,
        "rows_a_microbatch": len(step.rows_R),
        "tflop_a_microbatch": operations / 1e12,
        "forward_s": round(forward_s, 4),
        "microbatch_s": round(microbatch_s, 4),
        "step_s": round(whole_s, 4),
        "tokens_per_s": round(tokens * size.microbatches / whole_s, 1),
        **{f"mfu_{name}": share(rate, peak.operations_per_s) for name, rate in rates.items()},
        **{f"of_reached_{name}": share(rate, peak.reached_operations_per_s) for name, rate in rates.items()},
        "peak_memory_gb": round(held / 1e9, 2),
        "kernels": most,
        **closeness(step.model, size, on),
    }


def main(quick: bool, on: torch.device) -> dict[str, Any]:
    peak = peaks(on)
    return {**peak.facts(), **measure(QUICK if quick else FULL, on, peak)}


if __name__ == "__main__":
    gpu_model.main("gpu_learner", __doc__, main)
