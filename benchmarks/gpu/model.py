"""What the benchmarks on a GPU share: a random Qwen3-MoE, the work that it must do, and what a chip could do at best.

The shape is a layer of Qwen3-30B-A3B (its config.json), fewer of them. Work is counted, not measured:

- operations of a forward: 2 for each parameter of a matrix that a token passes (PaLM, arXiv 2204.02311, appendix B; of
  the experts those chosen, the head for rows that get logits, the embedding not), and 4 · heads · head width for each
  pair of a token and one that it sees; a training step's are three times that;
- bytes of a decoding step: every weight once (with many tokens every expert is chosen), every kept key and value once.

Peaks are the vendor's datasheet's, dense bfloat16 and memory; beside them what a large product and a large copy reach
here, in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.report import report
from etude.models import ModelConfig, Transformer
from etude.numerics.operators import Operators

DATASHEETS = {"NVIDIA H200": (989.4e12, 4.8e12), "NVIDIA H100 80GB HBM3": (989.4e12, 3.35e12)}
"""Dense bfloat16 operations and bytes a second: H200 and H100 SXM datasheets."""

QWEN = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
    "expert_size": 768, "num_experts": 128, "top_k": 8, "rope_theta": 1e6,
}  # fmt: skip
TINY = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, expert_size=16,
    num_experts=4, top_k=2, context_tokens=128,
)  # fmt: skip


def qwen(num_layers: int, context_tokens: int) -> ModelConfig:
    """So many layers of Qwen3-30B-A3B."""
    return ModelConfig(**QWEN, num_layers=num_layers, context_tokens=context_tokens)


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@torch.no_grad()
def random_model(sizes: ModelConfig, operators: Operators, held: torch.dtype, on: torch.device) -> Transformer:
    """Random weights, made on the device: normal at 1/√in, norms 1."""
    with on:
        model = Transformer(sizes, seed=None, operators=operators).to(on)
    made = torch.Generator(on).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=made)
    return model.cast(held)


@dataclass(frozen=True)
class Work:
    """What a model does for a token."""

    sizes: ModelConfig

    @property
    def passed(self) -> int:
        """Parameters of matrices in layers that a token passes."""
        c = self.sizes
        attention = c.head_dim * c.hidden_size * 2 * (c.num_heads + c.num_kv_heads)
        experts = c.hidden_size * (c.num_experts + 3 * c.top_k * c.expert_size)
        return c.num_layers * (attention + experts)

    @property
    def head(self) -> int:
        return self.sizes.vocab_size * self.sizes.hidden_size

    def forward(self, tokens: int, rows: int, pairs: int) -> float:
        """Operations: of tokens, of which `rows` get logits, that see so many others altogether (`pairs`)."""
        c = self.sizes
        seen = 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs
        return 2.0 * (self.passed * tokens + self.head * rows) + seen

    @property
    def weight_bytes(self) -> int:
        """Of a decoding step, in bfloat16: all but the embedding's table."""
        return 2 * (self.sizes.num_parameters - self.head)

    @property
    def kept_bytes(self) -> int:
        """Of one token's keys and values, in bfloat16."""
        kept = self.sizes.cache_layout
        return 2 * self.sizes.num_layers * kept.heads * (kept.key_width + kept.value_width)

    def critical_batch(self, operations_per_s: float, bytes_per_s: float) -> int:
        """Tokens a step at which computing takes as long as reading the weights."""
        return int(self.weight_bytes / bytes_per_s * operations_per_s / self.forward(1, 1, 0))


@dataclass(frozen=True)
class Peaks:
    """Of the chip at hand: by its datasheet (None: it is not known here), and as reached in this run."""

    name: str
    operations_per_s: float | None
    bytes_per_s: float | None
    reached_operations_per_s: float
    reached_bytes_per_s: float

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.name,
            "torch": torch.__version__,
            "datasheet_tflop_per_s": None if self.operations_per_s is None else self.operations_per_s / 1e12,
            "datasheet_tb_per_s": None if self.bytes_per_s is None else self.bytes_per_s / 1e12,
            "reached_tflop_per_s": round(self.reached_operations_per_s / 1e12, 3),
            "reached_copy_tb_per_s": round(self.reached_bytes_per_s / 1e12, 3),
        }


def peaks(on: torch.device) -> Peaks:
    """Measured by a product of 8192³ and a copy of 4 GiB; on a CPU by small ones."""
    gpu = on.type == "cuda"
    side, items = (8192, 1 << 31) if gpu else (256, 1 << 20)
    x = torch.randn(side, side, device=on).bfloat16()
    y, room = torch.randn(side, side, device=on).bfloat16(), torch.empty(side, side, device=on, dtype=torch.bfloat16)
    product_s = seconds(on, lambda: torch.mm(x, y, out=room), repeats=10)
    source = torch.empty(items, device=on, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    copy_s = seconds(on, lambda: target.copy_(source), repeats=10)
    name = torch.cuda.get_device_name(on) if gpu else "cpu"
    known = DATASHEETS.get(name, (None, None))
    return Peaks(name, *known, 2 * side**3 / product_s, 2 * source.nbytes / copy_s)


def seconds(on: torch.device, work: Callable[[], object], *, repeats: int, warm_ups: int = 2) -> float:
    """The median of some calls, until what they launched is done."""
    found = []
    for i in range(warm_ups + repeats):
        wait(on)
        started = time.perf_counter()
        work()
        wait(on)
        if i >= warm_ups:
            found.append(time.perf_counter() - started)
    return median(found)


def kernels(on: torch.device, work: Callable[[], object], *, most: int = 12) -> list[dict[str, Any]]:
    """Which programs of a GPU its time goes to, in one call: names, shares of all their time, launches."""
    if on.type != "cuda":
        return []
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        work()
        wait(on)
    found = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    whole = sum(e.self_device_time_total for e in found) or 1.0
    found.sort(key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:90], "share": round(e.self_device_time_total / whole, 3), "launches": e.count}
        for e in found[:most]
    ]


def wait(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def share(part: float, whole: float | None) -> float | None:
    return None if whole is None else round(part / whole, 3)


def main(name: str, doc: str | None, measure: Callable[[bool, torch.device], dict[str, Any]]) -> dict[str, Any]:
    """The command line of a benchmark: `measure(quick, device)`, reported, or printed alone where it was of a tiny
    model. What was found."""
    parser = argparse.ArgumentParser(description=doc and doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model; no result is kept")
    quick, on = parser.parse_args().quick, device()
    if not quick and on.type == "cpu":
        raise SystemExit("this benchmark needs a GPU that torch sees; --quick runs a tiny model anywhere")
    found = measure(quick, on)
    if quick:
        print(json.dumps(found, indent=2))
    else:
        report(name, found)
    return found
