"""What an engine that computes in bf16 costs in agreement with the learner, with and without replay of its routes.

Tokens sampled by the real engine (three turns of a session, prefix reuse and all) from a trained checkpoint, in float32
and in bf16; each scored by the learner, which computes in float32 with weights rounded to bf16 (as they are published)
or as they are. k1 and k3 are of KL(sampler ‖ learner) a token; a flip is a token-layer whose experts differ.
`python -m benchmarks.bf16_engine --start CHECKPOINT [--rollouts 128] [--seed 0]`
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.report import report
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import Transformer, hf_views, load_model
from etude.numerics import ComputeDtype, Mode, Native, NumericsConfig
from etude.records import Batch, CompletionRequest, Sample, Sampling, Trace, Version
from etude.records.rollout import Turn
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import LiveWeights

VERSION = Version(step=0, incarnation="00000000", digest="0" * 64)
SAMPLED = 24  # tokens a turn
USER = (
    "Repair the repository.\n",
    "def scale(x):\n    '''Multiply x by 7.'''\n    return x + 7\n",
    "1 failed, 2 passed: scale(3) gave 10, expected 21\n",
)


async def rollout(engine: ReferenceEngine, prompts: list[np.ndarray[Any, Any]], number: int) -> Sample:
    """Three turns of one session."""
    context, turns, held = np.zeros(0, np.int32), list[Turn](), 0
    for turn, prompt in enumerate(prompts):
        context = np.concatenate([context, prompt])
        sampling = Sampling(max_tokens=SAMPLED, stop_token_ids=(), seed=number)
        done = await engine.generate(
            CompletionRequest(
                request_id=f"r{number}.{turn}",
                session_id=f"r{number}",
                prompt_ids=context,
                sampling=sampling,
                routes_from=held,
            )
        )
        held = done.routes_start + len(done.routes)
        turns.append(Turn(parent=turn - 1 if turn else None, prompt_ids=prompt, completion=done))
        context = np.concatenate([context, done.token_ids])
    return Sample(
        rollout_id=f"r{number:04d}", path=Trace(tuple(turns)).path(len(turns) - 1), advantage=(-1.0) ** number
    )


def as_published(model: Transformer, weights: LiveWeights) -> Transformer:
    """The model with the weights that a learner of this setting publishes."""
    if weights is LiveWeights.BF16:
        for view in hf_views(model).values():
            view.copy_(view.bfloat16())
    return model


def sampled(start: Path, dtype: ComputeDtype, weights: LiveWeights, rollouts: int, seed: int) -> list[Sample]:
    """What an engine says, given these prompts."""
    kind = getattr(torch, dtype)
    model = as_published(load_model(start, operators=Native(kind), held=torch.float32), weights).cast(kind)
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    prompts = [np.array(tokenizer.encode(text).ids, np.int32) for text in USER]

    async def story() -> list[Sample]:
        config = EngineConfig(context_tokens=model.config.context_tokens, dtype=dtype)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            numbers = range(seed * rollouts, (seed + 1) * rollouts)
            return list(await asyncio.gather(*(rollout(engine, prompts, n) for n in numbers)))

    return asyncio.run(story())


def scored(start: Path, weights: LiveWeights, samples: list[Sample], *, replay: bool) -> dict[str, Any]:
    """The learner's report on them."""
    learner = TorchLearner(LearnerConfig(weights=weights, replay_routes=replay), numerics=NumericsConfig(Mode.NATIVE))
    learner.load(start)
    num_sampled = sum(int(sample.path.mask.sum()) for sample in samples)
    done = learner.forward_backward(
        Batch(batch_id="b", step=1, samples=tuple(samples), rollout_ids=(), num_loss_tokens=num_sampled)
    )
    return {
        "replay": replay,
        "num_sampled": done.num_sampled,
        "k1": done.k1,
        "k3": done.k3,
        "ratio_max": done.ratio_max,
        "ratio_p99": done.ratio_p99,
        "flipped_share": done.flipped_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--start", type=Path, required=True, help="a trained checkpoint")
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for weights in LiveWeights:
        for dtype in ComputeDtype:
            began = time.process_time()
            samples = sampled(args.start, dtype, weights, args.rollouts, args.seed)
            cpu_s = round(time.process_time() - began, 2)
            rows += [
                {"engine": str(dtype), "weights": str(weights), "engine_cpu_s": cpu_s}
                | scored(args.start, weights, samples, replay=replay)
                for replay in (False, True)
            ]
    report("bf16_engine", {"threads": 1, "torch": torch.__version__, "seed": args.seed, "rows": rows})


if __name__ == "__main__":
    main()
