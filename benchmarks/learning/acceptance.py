"""Acceptance of drafts by an MTP head before and after RL: with the head kept fresh, and frozen.

The laptop example with one head, which learns beside the trunk in mid-training and in RL (`mtp = "distill"`). The
contexts are those of the agent's turns in the first steps of RL. The policies before and after RL write on from the
same contexts with the same seeds, and the head drafts each token but the first as the engine's `heads` does: from the
trunk's output two tokens before, with the random number of the token. `acceptance` is the share of drafts that are the
token, and `ratio` that after RL ÷ that before. `frozen`: the head from before RL on the trunk from after it.

`python -m benchmarks.learning.acceptance [--seeds 0] [--steps 80] [--contexts 400] [--start CHECKPOINT] [--run FOLDER
...] [--set a.b=c]`
About ten minutes a seed on two cores. `--start`: a checkpoint with a head, in place of mid-training; `--run`: runs that
have ended (with the same `--start`, if any), in place of new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.report import report
from benchmarks.runs import LAPTOP, start_run, summary
from etude.evals.intervals import wilson
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import Transformer, load_model
from etude.models.attention import Packed
from etude.models.mtp import apply_head, head_logits, trunk_output
from etude.numerics.sampling import sample
from etude.records import CompletionRequest, Sampling, Version

GOAL = 0.9
FEW_EVALS = [
    "evals.baseline_tasks=1", "evals.heldout_tasks=64", "evals.transfer_tasks=0", "evals.every=0",
]  # fmt: skip
BATCHES, MOST_TOKENS = 4, 24
VERSION = Version(step=0, incarnation="0" * 8, digest="0" * 64)


def contexts(run: Path, count: int) -> list[tuple[list[int], Sampling]]:
    """The context of some turns of the first steps, each with how it was sampled; a context occurs once."""
    found: dict[tuple[int, ...], Sampling] = {}
    for path in sorted((run / "traces").glob("batch-*.parquet"))[:BATCHES]:
        paths: dict[tuple[str, int], list[int]] = {}
        for row in pq.read_table(path).to_pylist():
            if row["row"] != "turn":
                continue
            name = row["rollout_id"]
            before = [] if row["parent"] is None else paths[name, row["parent"]]
            context = before + row["prompt_ids"]
            paths[name, row["turn"]] = context + row["token_ids"]
            kept = row["sampling"]
            stops, most = tuple(kept["stop_token_ids"]), min(MOST_TOKENS, kept["max_tokens"])
            seed, temperature = len(found), kept["temperature"]
            found.setdefault(
                tuple(context), Sampling(max_tokens=most, stop_token_ids=stops, seed=seed, temperature=temperature)
            )
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    every = list(found.items())
    return [(list(every[i][0]), every[i][1]) for i in chosen]


async def written(model: Transformer, asked: Sequence[tuple[list[int], Sampling]]) -> list[list[int]]:
    """The tokens that a policy writes after each context."""
    config = EngineConfig(context_tokens=model.config.context_tokens)
    async with ReferenceEngine(model, version=VERSION, config=config) as engine:
        slots = asyncio.Semaphore(config.max_sequences)

        async def one(number: int, ids: list[int], sampling: Sampling) -> list[int]:
            async with slots:
                request = CompletionRequest(
                    request_id=f"r{number}",
                    session_id=f"r{number}",
                    prompt_ids=np.array(ids, np.int32),
                    sampling=sampling,
                )
                return (await engine.generate(request)).token_ids.tolist()

        return await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))


@torch.inference_mode()
def accepted(model: Transformer, context: list[int], tokens: list[int], sampling: Sampling) -> tuple[int, int]:
    """How many drafts of a completion are its tokens, and how many there are: one for each token but the first."""
    ids = torch.tensor(context + tokens)
    before = trunk_output(model, model.run(ids[:-2]).stream)
    outputs, _ = apply_head(model, 0, before, ids[1:-1], Packed([len(before)], model.operators))
    places = np.arange(len(context) + 1, len(ids))
    logits = head_logits(model, outputs[len(context) - 1 :])
    same = [sampling.temperature] * len(places), [sampling.seed] * len(places)
    drafts, _ = sample(logits, *same, places, model.operators)
    return int((drafts == ids[places]).sum()), len(places)


def acceptance(
    model: Transformer, asked: Sequence[tuple[list[int], Sampling]], wrote: list[list[int]]
) -> dict[str, Any]:
    """The acceptance of the head of a model in what its trunk wrote."""
    pairs = [accepted(model, ids, said, how) for (ids, how), said in zip(asked, wrote, strict=True) if len(said) > 1]
    good, tried = (sum(counts) for counts in zip(*pairs, strict=True))
    found = wilson(good, tried)
    return {
        "acceptance": round(found.value, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "drafts": tried,
    }


def measured(run: Path, start: Path | None, count: int) -> dict[str, Any]:
    """What a run that has ended shows."""
    asked, final = contexts(run, count), run / "checkpoints" / "final"
    before, after, frozen = (load_model(one) for one in (start or run / "checkpoints" / "mid", final, final))
    frozen.mtp.load_state_dict(before.mtp.state_dict())
    rows: dict[str, Any] = {}
    for model, names in ((before, {"before": before}), (after, {"fresh": after, "frozen": frozen})):
        wrote = asyncio.run(written(model, asked))
        rows |= {name: acceptance(one, asked, wrote) for name, one in names.items()}
    base = rows["before"]["acceptance"]
    ratios = {f"{name}_ratio": round(rows[name]["acceptance"] / base, 3) for name in ("fresh", "frozen")}
    facts = summary(run)
    solved = {when: round(facts["heldout"][when]["rate"], 4) for when in ("before", "after")}
    return {**rows, **ratios, "contexts": len(asked), "solved": solved, "drafts_of_the_run": facts.get("drafts")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--contexts", type=int, default=400)
    parser.add_argument("--start", type=Path, help="a checkpoint of the example's model with a head")
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="runs that have ended")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = f"start={args.start.resolve()}" if args.start else "model.mtp_heads=1"
    settings = ["engine.speculation=heads", f"rl.steps={args.steps}", *FEW_EVALS, *args.set]
    rows: list[dict[str, Any]] = []
    for run in args.run or (start_run(LAPTOP, "acceptance", [begin, *settings, f"seed={seed}"]) for seed in args.seeds):
        seed = tomllib.loads((run / "config.toml").read_text())["seed"]
        rows.append({"seed": seed, **measured(run, args.start, args.contexts)})
        facts = {"goal": GOAL, "steps": args.steps, "settings": settings, "given_start": args.start is not None}
        report("acceptance", {**facts, "rows": rows})


if __name__ == "__main__":
    main()
