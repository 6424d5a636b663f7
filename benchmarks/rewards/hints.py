"""What hints buy: steps until a model has lost a planted bad habit.

For each seed a small model is mid-trained on conversations that nearly always read a file twice (`reads`). Two runs
train from this checkpoint with equal settings: the reward is the grade, minus a penalty for each repeated read. The run
`hints` also gets the credit of the hints of the same reward term. Reported: the steps until `RATE` of the last `WINDOW`
rollouts are right (solved, and nothing read twice), and `hints` ÷ `plain` over the seeds, with 95 % intervals.

The loop is a plain one, in this process: etude's engine, agent, terms, credit and learner, without the processes and
files of a run. Machines are in memory.

`python -m benchmarks.rewards.hints [--seeds 0 1 2] [--steps 80] [--most RUNS]`
A minute a run on one core. Rows are kept in `runs/`, so it goes on where it broke off; `--most 0` reports them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.rewards import Rewards
from benchmarks.learning.seeds import mean, ratio
from benchmarks.report import report
from benchmarks.rewards.reads import HINT, Reads, talk
from etude.environments.memory import MemoryRuntime
from etude.experience import SCHEMES, Finished, Group, make_batch, plan_batch
from etude.experience.credit import Credit
from etude.experience.hints import HintFormat
from etude.harness import ChatFormat, HarnessConfig, chat_template, standard_tools
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.loop.hint_format import message_ends
from etude.loop.rollout_scheduler import siblings
from etude.models import ModelConfig
from etude.numerics import Mode, NumericsConfig
from etude.records import Graded, Rollout, RolloutSpec, Version
from etude.records.summary import summary_of
from etude.records.task import Split
from etude.rewards import Composition, NamedTerm, measure_group
from etude.rewards.process import RepeatedReads
from etude.rollouts.rollout import run_rollout, submitted
from etude.testing import EnginePolicy, FakeGrader
from etude.training import LearnerConfig, TorchLearner, mid_train
from etude.training.config import MidTrainingConfig
from etude.training.corpus import write_corpus
from etude.training.tokenizer import train_tokenizer

WAYS = ("plain", "hints")
RATE, WINDOW, GOAL = 0.9, 64, 2 / 3
TOOLS = ("cat", "edit", "submit")
GROUPS, GROUP_SIZE, CONTEXT = 4, 8, 192
HARNESS = HarnessConfig(tools=TOOLS, max_turns=6, context_tokens=CONTEXT)
ENGINE = EngineConfig(max_sequences=GROUPS * GROUP_SIZE, context_tokens=CONTEXT, device="cpu")
MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    expert_size=32,
    num_experts=4,
    top_k=2,
    context_tokens=256,
    tie_embeddings=True,
)
Row = dict[str, Any]


def start_of(seed: int, habit: float, hinted: float, num_tokens: int) -> Path:
    """The checkpoint from which the runs of a seed train; made once."""
    folder = Path("runs") / f"hints-start-{seed}-{habit}-{hinted}-{num_tokens}"
    if (folder / "start").is_dir():
        return folder / "start"
    rng = random.Random(f"hints {seed}")
    talks = [talk(rng, habit=habit, hinted=hinted) for _ in range(2_000)]
    words = [message["content"] or " ".join(_words(message)) for one in talks[:200] for message in one]
    train_tokenizer(
        words,
        folder / "tokenizer",
        vocab_size=MODEL.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        chat_template=chat_template(),
    )
    chat, signatures = ChatFormat.load(folder / "tokenizer"), standard_tools(TOOLS).signatures
    write_corpus(folder / "corpus", [chat.encode_conversation(one, signatures) for one in talks])
    mid_train(
        MidTrainingConfig(num_tokens=num_tokens, batch_tokens=1024, document_tokens=256, lr=5e-3),
        folder / "corpus",
        folder / "start",
        model=MODEL,
        ranks=1,
        seed=seed,
        assets=folder / "tokenizer",
    )
    return folder / "start"


def _words(message: Mapping[str, Any]) -> list[str]:
    [call] = message["tool_calls"]
    arguments = call["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call["function"]["name"], *map(str, arguments.values())]


def one(way: str, seed: int, args: argparse.Namespace) -> Row:
    """Train until it is right often enough, or for all steps: a run's numbers."""
    began = time.perf_counter()
    start = start_of(seed, args.habit, args.hinted, args.tokens)
    made_s = time.perf_counter() - began
    native = NumericsConfig(mode=Mode.NATIVE)
    learner = TorchLearner(LearnerConfig(device="cpu", lr=args.lr, replay_routes=False), numerics=native)
    learner.load(start)
    chat = ChatFormat.load(start)
    how = Composition(weights={"reads": args.penalty}, hints={"reads": args.weight} if way == "hints" else {})
    seen, steps, kls, num_hints = Rewards(GROUPS * GROUP_SIZE, WINDOW), list[Row](), list[float | None](), list[int]()
    began = time.perf_counter()
    while len(seen.means) < args.steps and not seen.reached(RATE):
        groups, rollouts = asyncio.run(sampled(learner, chat, Reads(), seed))
        outcomes = [one.outcome for group in groups for one in group.finished if isinstance(one.outcome, Graded)]
        right = [one.grade == 1.0 and one.values["reads"] == 0.0 for one in outcomes]
        seen.add(sum(right) / len(right))
        plan = plan_batch(
            groups,
            batch_id=f"b{learner.step + 1:06d}",
            step=learner.step + 1,
            max_lag=0,
            composition=how,
            scheme=SCHEMES[Credit.DR_GRPO],
        )
        written = HintFormat(chat.encode, message_ends(chat), CONTEXT)
        batch = make_batch(plan, lambda one: rollouts[one.rollout_id], hint_format=written)  # noqa: B023
        done = learner.forward_backward(batch)
        learner.optim_step()
        kls.append(None if done.hint_kl is None else round(done.hint_kl, 4))
        num_hints.append(sum(len(sample.hints) for sample in batch.samples))
        steps.append({"solved": sum(one.grade == 1.0 for one in outcomes) / len(outcomes)})
    return {
        "way": way,
        "seed": seed,
        "steps": len(seen.means) if seen.reached(RATE) else None,
        "right_by_step": [round(share, 4) for share in seen.means],
        "solved_by_step": [round(step["solved"], 4) for step in steps],
        "hints_by_step": num_hints,
        "hint_kl_by_step": kls,
        "wall_s": round(time.perf_counter() - began, 1),
        "mid_training_s": round(made_s, 1),
    }


async def sampled(
    learner: TorchLearner, chat: ChatFormat, source: Reads, seed: int
) -> tuple[list[Group], Mapping[str, Rollout]]:
    """Sample and judge the groups of the next step by the live weights: the groups, and their rollouts by id."""
    version = Version(learner.step, "0" * 8, "0" * 64)
    tasks = [source.task(Split.TRAIN, learner.step * GROUPS + i) for i in range(GROUPS)]
    specs = [
        siblings(
            f"g{task.index:06d}", task, GROUP_SIZE, seed=seed, temperature=1.0, min_step=learner.step, keep_routes=False
        )
        for task in tasks
    ]
    runtime, grader = MemoryRuntime(), FakeGrader()
    async with ReferenceEngine(learner.model, version=version, config=ENGINE) as engine:

        def roll(spec: RolloutSpec) -> Any:
            return run_rollout(spec, runtime=runtime, policy=EnginePolicy(engine), chat=chat, harness=HARNESS)

        rollouts: Sequence[Rollout] = await asyncio.gather(*(roll(spec) for some in specs for spec in some))
    terms, groups, by_id = [NamedTerm("reads", RepeatedReads(hint=HINT))], list[Group](), dict[str, Rollout]()
    for task, some in zip(tasks, specs, strict=True):
        mine = [one for one in rollouts if one.group_id == some[0].group_id]
        grades = [await grader.grade(task, source.answer(task), one.exports) for one in mine]
        judged = zip(grades, mine, strict=True)
        graded = [grade.with_terms(submitted(one)) for grade, one in judged if isinstance(grade, Graded)]
        found = await measure_group(terms, mine, graded)
        finished = [
            Finished(
                rollout_id=one.rollout_id,
                outcome=grade.with_terms(*(new.term for new in own)),
                summary=summary_of(one),
            )
            for one, grade, own in zip(mine, graded, found, strict=True)
        ]
        by_id |= {one.rollout_id: one for one in mine}
        groups.append(
            Group(
                group_id=some[0].group_id, rollout_ids=tuple(one.rollout_id for one in mine), finished=tuple(finished)
            )
        )
    return groups, by_id


def result(rows: list[Row], most: int) -> Row:
    """The seeds that have both runs. A run that never was right often enough counts with all its steps, as a bound."""
    by_seed = {seed: {row["way"]: row for row in rows if row["seed"] == seed} for seed in {row["seed"] for row in rows}}
    both = [found for _, found in sorted(by_seed.items()) if set(found) == set(WAYS)]
    if not both:
        return {"rows": rows}
    steps = {way: [float(found[way]["steps"] or most) for found in both] for way in WAYS}
    found = ratio(steps["hints"], steps["plain"])
    return {
        "seeds": len(both),
        "steps": {way: mean(values) for way, values in steps.items()},
        "never": {way: sum(found[way]["steps"] is None for found in both) for way in WAYS},
        "steps_hints_over_plain": found,
        "goal": f"at most {GOAL:.3f}",
        "reached": found["ratio"] <= GOAL,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--habit", type=float, default=0.9, help="probability of a repeated read in mid-training")
    parser.add_argument("--hinted", type=float, default=0.3, help="share of mid-training conversations with a hint")
    parser.add_argument("--tokens", type=int, default=150_000, help="tokens of mid-training")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--penalty", type=float, default=0.5, help="weight of a repeated read in the reward")
    parser.add_argument("--weight", type=float, default=0.5, help="of the credit of hints")
    parser.add_argument("--most", type=int, default=100, help="runs to make now")
    args = parser.parse_args()
    kept = Path("runs") / "hints-rows.json"
    rows: list[Row] = json.loads(kept.read_text()) if kept.is_file() else []
    there = {(row["way"], row["seed"]) for row in rows}
    wanted = [(way, seed) for seed in args.seeds for way in WAYS if (way, seed) not in there]
    kept.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for way, seed in wanted[: args.most]:
        rows.append(one(way, seed, args))
        kept.write_text(json.dumps(rows))
    names = ("habit", "hinted", "tokens", "lr", "penalty", "weight")
    settings = {name: getattr(args, name) for name in names} | {"max_steps": args.steps, "rate": RATE, "window": WINDOW}
    report("hints", {**settings, **result(rows, args.steps)})


if __name__ == "__main__":
    main()
