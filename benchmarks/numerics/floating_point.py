"""How far two right programs are apart: an engine that decodes from its cache and a trainer that reads whole texts.

The same weights, rounded to bf16 as they are published: the engine samples and logs its log-probabilities; the trainer
computes them anew, packed, once with its routers' own choice (live) and once with the engine's experts (replayed). r is
the ratio of their probabilities of a token, which should be 1. Counted: |r - 1| in bins, how many of a token's routers
chose another expert than the engine's did, and what that does to r. Of random weights with many experts, or of a
checkpoint. `python -m benchmarks.numerics.floating_point [--start CHECKPOINT] [--rollouts N]` (some minutes)
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.numerics.replay_routes import USER, VERSION, model_at, rollout
from benchmarks.report import report
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer, load_model
from etude.models.attention import Packed
from etude.models.checkpoint import save_model
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.records import Sample
from etude.training.flat_batch import flatten_samples, microbatches
from etude.training.routes import RouteReplay

MODES: dict[str, Callable[[torch.dtype], Operators]] = {"native": Native, "exact": Exact}
PAIRS = [  # what the engine computes in, and the trainer
    *((mode, dtype, dtype) for mode in MODES for dtype in ("float32", "float16", "bfloat16")),
    ("native", "bfloat16", "float32"),
]
LOWEST, HIGHEST, A_DECADE = -9, 3, 4  # of the bins of |r - 1|: powers of ten, and bins in one
BUDGET_TOKENS = 2048
SIZES = ModelConfig(
    vocab_size=2048,
    hidden_size=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    expert_size=32,
    num_experts=64,
    top_k=8,
    context_tokens=512,
)


def prompts_of(start: Path, vocab_size: int) -> list[np.ndarray[Any, Any]]:
    """Three turns: of the checkpoint's own language, or of random tokens."""
    if (start / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        return [np.array(tokenizer.encode(text).ids, np.int32) for text in USER]
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocab_size, 24, np.int32) for _ in USER]


async def sampled(model: Transformer, prompts: list[np.ndarray[Any, Any]], rollouts: int) -> list[Sample]:
    """What an engine says, many at once."""
    config = EngineConfig(context_tokens=model.config.context_tokens)
    async with ReferenceEngine(model, version=VERSION, config=config) as engine:
        return list(await asyncio.gather(*(rollout(engine, prompts, n) for n in range(rollouts))))


@torch.no_grad()
def log_ratios(model: Transformer, samples: list[Sample], *, replay: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Trainer minus engine [R], and of each such token the number of layers with another expert [R]."""
    found, flips = [], []
    for some in microbatches(samples, budget_tokens=BUDGET_TOKENS):
        rows = flatten_samples(some, RouteReplay(model.config, step=VERSION.step, max_lag=0))
        packed = Packed(rows.lengths, model.operators)
        done = model.eval().run(rows.tokens_N, packed, rows.routes_NLK if replay else None, rows.rows_R)
        logprobs = model.operators.log_softmax(done.logits).gather(1, rows.targets_R[:, None])[:, 0]
        found.append((logprobs - rows.sampler_logprobs_R).double())
        assert rows.routes_NLK is not None, "engines return routes"
        differs = (rows.routes_NLK.sort(-1).values != done.live.sort(-1).values).any(-1)
        flips.append(differs[rows.rows_R].sum(1))
    return torch.cat(found), torch.cat(flips)


def told(log_ratio: torch.Tensor) -> dict[str, Any]:
    """|r - 1| in numbers and in bins."""
    off = torch.expm1(log_ratio).abs()
    logs = off[off > 0].log10().clamp(LOWEST, HIGHEST - 1e-9)
    bins = torch.histc(logs, (HIGHEST - LOWEST) * A_DECADE, LOWEST, HIGHEST)
    return {
        "num_tokens": len(off),
        "num_equal": int((off == 0).sum()),
        "mean_abs_log_ratio": float(log_ratio.abs().mean()) if len(off) else 0.0,
        "k3": float((torch.expm1(log_ratio) - log_ratio).mean()) if len(off) else 0.0,
        "ratio_p50": _quantile(off, 0.5),
        "ratio_p99": _quantile(off, 0.99),
        "ratio_max": float(off.max()) if len(off) else 0.0,
        "bins": [int(count) for count in bins],
    }


def _quantile(values: torch.Tensor, share: float) -> float:
    return float(values.sort().values[int(share * (len(values) - 1))]) if len(values) else 0.0


def computing(start: Path, mode: str, dtype: str) -> Transformer:
    """A checkpoint's model that computes in a mode and a dtype."""
    return model_at(start, MODES[mode](getattr(torch, dtype)))


def compared(start: Path, mode: str, engine: str, trainer: str, rollouts: int) -> dict[str, Any]:
    """An engine against a trainer."""
    sampler, model = computing(start, mode, engine), computing(start, mode, trainer)
    samples = asyncio.run(sampled(sampler, prompts_of(start, model.config.vocab_size), rollouts))
    live, flips = log_ratios(model, samples, replay=False)
    replayed, _ = log_ratios(model, samples, replay=True)
    return {
        "mode": mode,
        "engine": engine,
        "trainer": trainer,
        "num_rollouts": rollouts,
        "flipped_share": float(flips.double().mean()) / model.config.num_layers,  # of the routers' choices
        "tokens_with_a_flip": float((flips > 0).double().mean()),
        "live": told(live),
        "replayed": told(replayed),
        "by_flips": [{"flips": n, **told(live[flips == n])} for n in range(int(flips.max()) + 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--start", type=Path, help="a checkpoint (default: random weights, 6 layers of 64 experts)")
    parser.add_argument("--rollouts", type=int, default=64, help="of three turns, 72 sampled tokens each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start = args.start or Path(folder) / "random"
        if args.start is None:
            save_model(Transformer(SIZES, seed=0), start, dtype="f32")
        rows = [compared(start, *pair, args.rollouts) for pair in PAIRS]
        sizes = load_model(start).config
    report(
        "floating_point",
        {
            "weights": "trained" if args.start else "random",
            "layers": sizes.num_layers,
            "experts": sizes.num_experts,
            "top_k": sizes.top_k,
            "bins": {"lowest": LOWEST, "highest": HIGHEST, "a_decade": A_DECADE},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
