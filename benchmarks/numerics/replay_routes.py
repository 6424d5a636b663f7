"""What replay of routes buys where an engine computes in bf16, and what it costs.

(a) *Agreement.* Tokens sampled by the real engine in bf16 (three turns a session, prefix reuse and all) from a trained
checkpoint, scored by a learner's forward in float32 and in bf16: routed by itself, with the engine's routes, and, as
the floor that no replay can get under, with routing held fixed: the engine's decoding and the learner's forward both
get the routes of a third computation (float32, exact). k1 and k3 are of KL(engine ‖ learner) a token; off is |r - 1|;
a flip is a token-layer whose live experts are not the recorded ones. With `--newer`, a later checkpoint of the same run
scores them too: how far below the live choice its router sees the recorded experts.

(b) *Cost.* CPU time of a training step with and without replay, in turns; bytes of a rollout's routes as they are sent,
and what other codings would make of them.

`python -m benchmarks.numerics.replay_routes [--start CHECKPOINT] [--newer CHECKPOINT]`; without a checkpoint the laptop
model is mid-trained first, for about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard
from tokenizers import Tokenizer

from benchmarks.report import report
from benchmarks.runs import LAPTOP, start_run
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.kv import KVCache, Span, StepCache
from etude.models import Transformer, hf_views, load_model
from etude.models.attention import Packed
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.records import Batch, CompletionRequest, Sample, Sampling, Trace, Version
from etude.records.rollout import Turn
from etude.records.wire import Routes, pack
from etude.training import LearnerConfig, TorchLearner
from etude.training.flat_batch import FlatBatch, flatten_samples
from etude.training.losses import k1, k3
from etude.training.routes import RouteReplay

VERSION = Version(step=0, incarnation="00000000", digest="0" * 64)
SAMPLED = 24  # tokens a turn
USER = (
    "Repair the repository.\n",
    "def scale(x):\n    '''Multiply x by 7.'''\n    return x + 7\n",
    "1 failed, 2 passed: scale(3) gave 10, expected 21\n",
)
BRIEFLY = ["rl.steps=0", "mid_training.num_tokens=800000", "evals.heldout_tasks=8", "evals.baseline_tasks=1"]


def model_at(checkpoint: Path, operators: Operators) -> Transformer:
    """A checkpoint's model with weights as they are published: rounded to bf16."""
    model = load_model(checkpoint, operators=operators).eval()
    with torch.no_grad():
        for view in hf_views(model).values():
            view.copy_(view.bfloat16())
    return model


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
        parent = turn - 1 if turn else None
        turns.append(Turn(parent=parent, prompt_ids=prompt, completion=done, sampling=sampling))
        context = np.concatenate([context, done.token_ids])
    path = Trace(tuple(turns)).path(len(turns) - 1)
    return Sample.uniform(f"r{number:04d}", path, (-1.0) ** number)


def sampled(start: Path, num_rollouts: int, seed: int) -> list[Sample]:
    """What an engine in bf16 says, given these prompts."""
    model = model_at(start, Native(torch.bfloat16))
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    prompts = [np.array(tokenizer.encode(text).ids, np.int32) for text in USER]

    async def story() -> list[Sample]:
        config = EngineConfig(context_tokens=model.config.context_tokens, dtype=ComputeDtype.BFLOAT16)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            numbers = range(seed * num_rollouts, (seed + 1) * num_rollouts)
            return list(await asyncio.gather(*(rollout(engine, prompts, n) for n in numbers)))

    return asyncio.run(story())


@torch.inference_mode()
def decoded(model: Transformer, samples: Sequence[Sample], routes_NLK: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the sampled tokens, [R], as an engine comes to them: prompts in chunks, the rest token by
    token over its cache, but with these routes. All samples have their turns in the same places."""
    paths = [sample.path for sample in samples]
    where = np.flatnonzero(paths[0].mask)
    assert all(np.array_equal(path.mask, paths[0].mask) for path in paths), "rollouts of one shape"
    num, end = len(paths), int(where[-1])
    kv = KVCache(model.config, num_slots=num, context_tokens=end + 1, operators=model.operators)
    slots = np.arange(num)
    tokens_BT = torch.from_numpy(np.stack([path.token_ids for path in paths]).astype(np.int64))
    routes_BTLK = routes_NLK.view(num, end, *routes_NLK.shape[1:])
    found = torch.zeros(num, len(where))
    begin = 0
    for row, at in enumerate(where.tolist()):  # the token at `at` is predicted by the position before it
        chunk = slice(begin, at)
        spans = [Span(slot, begin, at) for slot in range(num)]
        one = at - begin == 1
        cache = StepCache(kv, slots, np.full(num, begin), []) if one else StepCache(kv, slots[:0], slots[:0], spans)
        last = torch.arange(1, num + 1) * (at - begin) - 1
        done = model.run(tokens_BT[:, chunk].reshape(-1), cache, routes_BTLK[:, chunk].flatten(0, 1), last)
        found[:, row] = done.logits.float().log_softmax(-1).gather(1, tokens_BT[:, at, None])[:, 0]
        begin = at
    return found.flatten()


@torch.inference_mode()
def scored(model: Transformer, rows: FlatBatch, routes_NLK: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the sampled tokens, [R], by a learner's forward, and its live choice [N, L, K]."""
    done = model.run(rows.tokens_N, Packed(rows.lengths, model.operators), routes_NLK, rows.rows_R)
    return done.logits.float().log_softmax(-1).gather(1, rows.targets_R[:, None])[:, 0], done.live


def distance(log_ratio_R: torch.Tensor) -> dict[str, float]:
    off = torch.expm1(log_ratio_R).abs()
    return {
        "k1": float(k1(log_ratio_R).mean()),
        "k3": float(k3(log_ratio_R).mean()),
        "off_p99": float(off.quantile(0.99)),
        "off_max": float(off.max()),
    }


def flips(live_NLK: torch.Tensor, routes_NLK: torch.Tensor) -> dict[str, float]:
    flipped_NL = (live_NLK.long().sort(-1).values != routes_NLK.long().sort(-1).values).any(-1)
    return {
        "flipped_token_layers": float(flipped_NL.float().mean()),
        "flipped_tokens": float(flipped_NL.any(-1).float().mean()),
    }


def agreement(start: Path, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each learner and routing."""
    model = model_at(start, Exact(torch.float32))
    rows = flatten_samples(samples, RouteReplay(model.config, step=0, max_lag=0))
    recorded = rows.routes_NLK
    assert recorded is not None
    _, fixed = scored(model, rows, None)
    engine = model_at(start, Native(torch.bfloat16))
    with_fixed_R = decoded(engine, samples, fixed)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        learner = model_at(start, Native(dtype))
        for routing, routes, theirs_R in (
            ("live", None, rows.sampler_logprobs_R),
            ("replayed", recorded, rows.sampler_logprobs_R),
            ("floor", fixed, with_fixed_R),
        ):
            logprobs_R, live = scored(learner, rows, routes)
            to = recorded if routes is None else routes
            numbers = {**distance(logprobs_R - theirs_R), **flips(live, to)}
            found.append({"learner": str(dtype).removeprefix("torch."), "routing": routing, **numbers})
    return found


def over_floor(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By learner: how many times the floor the others are."""
    by = {(row["learner"], row["routing"]): row for row in rows}
    names = ("k3", "off_p99", "off_max")
    return {
        f"{learner}, {routing}": {n: row[n] / by[learner, "floor"][n] for n in names}
        for (learner, routing), row in by.items()
        if routing != "floor"
    }


@torch.inference_mode()
def plausibility(checkpoint: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Scores of recorded experts that the live router would not choose, relative to the smallest it would."""
    model = model_at(checkpoint, Exact(torch.float32))
    rows = flatten_samples(samples, RouteReplay(model.config, step=0, max_lag=0))
    recorded = rows.routes_NLK
    assert recorded is not None
    seen: list[torch.Tensor] = []

    def watch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("experts.scores"):
            seen.append(tensor)
        return tensor

    done = model.run(rows.tokens_N, Packed(rows.lengths, model.operators), recorded, rows.rows_R, hook=watch)
    gaps = []
    for layer, scores in enumerate(seen):
        probs = scores.softmax(-1)
        asked, live = recorded[:, layer].long(), done.live[:, layer].long()
        share = probs.gather(1, asked) / probs.gather(1, live).amin(-1, keepdim=True)
        gaps.append(share[(asked[:, :, None] != live[:, None, :]).all(-1)])
    gap = torch.cat(gaps)
    quantiles = {f"p{p:g}": float(gap.quantile(p / 100)) for p in (0.1, 1, 10, 50)} if len(gap) else {}
    under = {f"under_{t:g}": float((gap < t).sum() / recorded.numel()) for t in (0.01, 0.1, 0.3, 0.5, 0.8)}
    return {"experts": recorded.numel(), "not_live": len(gap), "smallest": float(gap.min()), **quantiles, **under}


def steps(start: Path, samples: Sequence[Sample], turns: int) -> dict[str, Any]:
    """CPU milliseconds of a training step's forward and backward, replay on and off in turns."""
    learners = {}
    for replay in (False, True):
        learners[replay] = TorchLearner(LearnerConfig(replay_routes=replay), numerics=NumericsConfig(Mode.NATIVE))
        learners[replay].load(start)
    num = sum(int(sample.path.mask.sum()) for sample in samples)
    batch = Batch(batch_id="b", step=1, samples=tuple(samples), rollout_ids=(), num_loss_tokens=num)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * turns + 2):
        replay = turn % 4 in (1, 2)  # off, on, on, off: no side always follows the other
        began = time.process_time()
        learners[replay].forward_backward(batch)
        learners[replay].optimizer.clear()
        if turn >= 2:
            spent[replay].append(1000 * (time.process_time() - began))
    pairs = [on / off - 1 for off, on in zip(spent[False], spent[True], strict=True)]
    return {
        "turns": turns,
        "tokens": sum(len(s.path.token_ids) for s in samples),
        "off_ms": statistics.median(spent[False]),
        "on_ms": statistics.median(spent[True]),
        "overhead": statistics.median(pairs),
        "overhead_of_the_fastest": min(spent[True]) / min(spent[False]) - 1,
    }


def combinations_bytes(num_experts: int, top_k: int) -> float:
    """Of a token-layer's set of experts as one number (the combinatorial number system), not rounded up."""
    return float(math.log2(math.comb(num_experts, top_k))) / 8


def codings(routes: Sequence[Routes], num_experts: int) -> dict[str, float]:
    """Bytes a token of rollouts' routes, each rollout by itself as it is sent: as they are, and under other codings. A
    set's number and what is sorted lose the order of the slots, which is `order` more."""
    layers, k = routes[0].shape[1:]
    by_layer = [np.ascontiguousarray(r.transpose(1, 2, 0)) for r in routes]
    ordered = [np.ascontiguousarray(np.sort(r, -1).transpose(1, 2, 0)) for r in routes]
    return {
        "num_experts": num_experts,
        "layers": layers,
        "top_k": k,
        "layers_x_top_k_x_item": layers * k * routes[0].dtype.itemsize,
        "raw": sum(r.nbytes for r in routes) / sum(map(len, routes)),
        "zstd": compressed(routes) / sum(map(len, routes)),
        "zstd_by_layer": compressed(by_layer) / sum(map(len, routes)),
        "zstd_sorted_by_layer": compressed(ordered) / sum(map(len, routes)),
        "set_number": layers * combinations_bytes(num_experts, k),
        "order": layers * math.log2(math.factorial(k)) / 8,
    }


def compressed(routes: Sequence[Routes]) -> int:
    packer = zstandard.ZstdCompressor(level=3)
    return sum(len(packer.compress(r.tobytes())) for r in routes)


def moved(samples: Sequence[Sample], start: Path) -> dict[str, Any]:
    """Bytes a token: of what a rollout is sent as, of its routes, and of those that a router of 256 experts and 8 a
    token gives the same tokens; it is not trained, which is the hard case of a coding."""
    paths = [sample.path for sample in samples]
    num = sum(len(path.token_ids) for path in paths)
    trained = load_model(start).config
    sizes = replace(trained, num_layers=1, num_experts=256, top_k=8, expert_size=4)
    wide = Transformer(sizes, seed=0, operators=Native()).eval()
    with torch.inference_mode():
        theirs = [wide(torch.from_numpy(path.token_ids.astype(np.int64)))[1].numpy() for path in paths]
    bare = [msgspec.structs.replace(path, routes=path.routes[:0]) for path in paths]
    return {
        "path": sum(len(pack(path)) for path in paths) / num,
        "path_without_routes": sum(len(pack(path)) for path in bare) / num,
        "routes": codings([path.routes[:-1] for path in paths], trained.num_experts),
        "routes_of_256_experts_a_layer": codings(theirs, sizes.num_experts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a trained checkpoint")
    parser.add_argument("--newer", type=Path, help="a later checkpoint of the same run")
    parser.add_argument("--rollouts", type=int, default=96)
    parser.add_argument("--turns", type=int, default=8, help="of each side of the measured step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = args.start or start_run(LAPTOP, "replay-routes", BRIEFLY) / "checkpoints" / "mid"
    samples = sampled(start, args.rollouts, args.seed)
    rows = agreement(start, samples)
    facts = {
        "threads": 1,
        "torch": torch.__version__,
        "seed": args.seed,
        "num_sampled": sum(int(s.path.mask.sum()) for s in samples),
        "agreement": rows,
        "times_the_floor": over_floor(rows),
        "plausibility": {"same weights": plausibility(start, samples)},
        "step": steps(start, samples, args.turns),
        "bytes_a_token": moved(samples, start),
    }
    if args.newer is not None:
        facts["plausibility"]["newer weights"] = plausibility(args.newer, samples)
    report("replay_routes", facts)


if __name__ == "__main__":
    main()
