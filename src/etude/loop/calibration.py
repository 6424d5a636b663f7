"""Measures the CPU time that a config's model, tools and machines need on this machine, for `etude plan`.

It is a program of its own, since it loads torch. Each constant of `plan.Measured` is measured separately, in CPU
seconds:

- the learner's step on random tokens, at two sizes;
- the reference engine in this process: prompts only, few sequences, and many;
- by the processes of a scratch run: scripted rollouts (worker, grader, machines), and rollouts of the untrained model.
  The time of these that the other constants do not explain is the cost of a request to an engine.

No number comes from a run that a plan is compared with. The time of an engine to load a version of the weights is
assumed to be that of the learner to publish it: one decodes and verifies what the other encodes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.config import load, to_toml
from etude.errors import EtudeError
from etude.harness import ChatFormat, chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference import EngineConfig
from etude.inference.config import EngineKind
from etude.inference.engine import ReferenceEngine
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.config import RunConfig, open_tasks
from etude.loop.learner import make_learner
from etude.loop.processes import Supervisor
from etude.loop.rollout_scheduler import grade_and_drop, run_once, siblings
from etude.loop.run_processes import RunProcesses, open_processes
from etude.loop.usage import Processes
from etude.models import Transformer, load_model
from etude.models.checkpoint import save_model
from etude.plan import Measured
from etude.records import Batch, CompletionRequest, Sampling, Version
from etude.records.rollout import Path as RolloutPath
from etude.records.sample import Sample
from etude.records.summary import RolloutSummary
from etude.records.task import Split
from etude.run import RunFolder
from etude.stores import MemoryStore
from etude.tasks.corpus import code_documents
from etude.telemetry import Telemetry
from etude.training.tokenizer import train_tokenizer
from etude.weights.chain.channel import Channel

REPEATS, SAMPLED, PROMPT, TOKENS = 3, 24, 96, 96
FEW, MANY, PLAYED = 4, 32, 48


def cpu_of(work: Callable[[], object]) -> float:
    """Call `work` several times and return the smallest CPU time in seconds.

    The smallest is taken because other load on the computer can only make it larger."""
    took = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def sample_of(number: int, vocab_size: int, layers: int, top_k: int) -> Sample:
    """Make a training sample of random tokens. `number` is its seed and part of its id.

    `layers` and `top_k` are the shape of its (empty) record of chosen experts."""
    rng = np.random.default_rng(number)
    mask = np.arange(TOKENS) % 3 == 1
    path = RolloutPath(
        token_ids=rng.integers(3, vocab_size, TOKENS, np.int32),
        mask=mask,
        logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
        steps=np.zeros(TOKENS, np.int32),
        kv_epochs=np.zeros(TOKENS, np.int32),
        routes=np.zeros((0, layers, top_k), np.uint8),
    )
    return Sample.uniform(f"g{number:06d}.0", path, 1.0 if number % 2 else -1.0)


def learner_constants(config: RunConfig, checkpoint: Path) -> dict[str, float]:
    """Measure the learner's fields of `plan.Measured`, by name: a step at two sizes, and a publish."""
    learner = make_learner(config, Channel(MemoryStore()), None, refuse_mismatch=False)
    learner.load(str(checkpoint))
    model = learner.model.config

    def step(count: int) -> None:
        samples = tuple(sample_of(i, model.vocab_size, model.num_moe_layers, model.top_k) for i in range(count))
        ids, loss_tokens = tuple(s.rollout_id for s in samples), count * TOKENS // 3
        number = learner.step + 1
        batch = Batch(batch_id="b", step=number, samples=samples, rollout_ids=ids, num_loss_tokens=loss_tokens)
        learner.forward_backward(batch)
        learner.optim_step()

    def publish() -> None:
        step(FEW)
        learner.offer(())
        learner.published()

    step(FEW)  # warm-up
    publish()
    few, many, published = cpu_of(lambda: step(FEW)), cpu_of(lambda: step(MANY)), cpu_of(publish)
    learner.close()
    a_token = (many - few) / ((MANY - FEW) * TOKENS)
    return {
        "training_s": max(0.0, few - FEW * TOKENS * a_token),
        "training_s_token": a_token,
        "publish_s": max(0.0, published - few),
        "follow_s": max(0.0, published - few),
    }


def engine_constants(config: RunConfig, checkpoint: Path) -> dict[str, float]:
    """Measure the engine's fields of `plan.Measured`, by name: prompts only, then decoding at two batch sizes."""
    model = load_model(checkpoint)
    sizes = EngineConfig(context_tokens=PROMPT + SAMPLED + 8, max_sequences=MANY, dtype=config.engine.dtype)

    def cpu_of_engine(count: int, prompt: int, sampled: int) -> float:
        async def serve() -> float:
            async with ReferenceEngine(model, version=Version(0, "0" * 8, "0" * 64), config=sizes) as engine:
                rng, began = np.random.default_rng(count), time.process_time()
                requests = [
                    CompletionRequest(
                        request_id=f"r{i}",
                        session_id=f"r{i}",
                        prompt_ids=rng.integers(3, model.config.vocab_size, prompt).astype(np.int32),
                        sampling=Sampling(max_tokens=sampled, stop_token_ids=(), seed=i),
                    )
                    for i in range(count)
                ]
                await asyncio.gather(*(engine.generate(one) for one in requests))
                return time.process_time() - began

        return min(asyncio.run(serve()) for _ in range(REPEATS))

    cpu_of_engine(FEW, 8, 2)
    prefill_s = cpu_of_engine(MANY, PROMPT, 1) / (MANY * PROMPT)
    few, many = (cpu_of_engine(count, 8, SAMPLED) - count * 8 * prefill_s for count in (FEW, MANY))
    a_sequence = max(0.0, (many - few) / ((MANY - FEW) * SAMPLED))
    return {
        "prefill_s_token": prefill_s,
        "decode_s": max(0.0, few / SAMPLED - FEW * a_sequence),
        "decode_s_sequence": a_sequence,
    }


def prepare_run(config: RunConfig, folder: Path) -> RunFolder:
    """Create a scratch run in `folder`, with a tokeniser and a checkpoint.

    The checkpoint is the config's starting one, or has random weights."""
    one = replace(config, fleet=replace(config.fleet, engines=(EngineKind.REFERENCE,)))
    run = RunFolder.create(folder, config_toml=to_toml(one), seed=0)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    if config.start is not None:
        ChatFormat.load(config.start)  # so that an error names the user's path
        copy_start_checkpoint(config.start, run, telemetry)
        return run
    train_tokenizer(
        list(code_documents(count=400, seed=0)),
        run / "tokenizer",
        vocab_size=config.model.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        chat_template=chat_template(),
    )
    save_model(Transformer(config.model, seed=0), run / "checkpoints" / "mid", dtype="bf16", assets=run / "tokenizer")
    return run


async def machine_constants(run: RunFolder, config: RunConfig, engine: Mapping[str, float]) -> dict[str, float]:
    """Measure the fields of `plan.Measured` for requests, workers, graders and the conductor, by name.

    It runs scripted rollouts and rollouts of the model. `engine`: the results of `engine_constants`."""
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    one = replace(config, fleet=replace(config.fleet, engines=(EngineKind.REFERENCE,)))
    supervisor = Supervisor(telemetry)
    async with open_processes(run, one, telemetry, supervisor) as members:
        await members.start_sampling()

        def used() -> dict[str, float]:
            now = Processes()
            return {name: now.cpu_s(pid) for name, pid in supervisor.pids().items()} | {"me": time.process_time()}

        found = {}
        for kind in ("fresh", "oracle", "random", "model"):
            before = used()
            rollouts = await _run_rollouts(members, one, "oracle" if kind == "fresh" else kind)
            after = used()
            took = {name: after[name] - before[name] for name in after}
            found[kind] = (took, rollouts)
    return _derive_constants(found, engine)


async def _run_rollouts(members: RunProcesses, config: RunConfig, kind: str) -> list[RolloutSummary]:
    source = open_tasks(config, canaries=False)
    size = source.size(Split.TRAIN) or PLAYED  # with few tasks, some are repeated
    tasks = [source.task(Split.TRAIN, i % size) for i in range(PLAYED)]
    specs = [siblings(f"{kind}{i}", task, 1, seed=i, temperature=1.0)[0] for i, task in enumerate(tasks)]

    async def one(i: int) -> RolloutSummary:
        if kind == "model":
            return (await run_once(members, specs[i]))[0].summary
        rollout = await members.baseline(specs[i], kind)
        await grade_and_drop(members, rollout)
        return rollout.summary

    return list(await asyncio.gather(*(one(i) for i in range(PLAYED))))


def _derive_constants(
    found: Mapping[str, tuple[dict[str, float], list[RolloutSummary]]], engine: Mapping[str, float]
) -> dict[str, float]:
    """Compute the constants: tool turns and grades from the scripts; requests from the model, whose tool calls are
    mostly invalid. Raises `EtudeError` when a kind of rollout had no turn, so that nothing was measured."""

    def spent(kind: str, role: str) -> float:
        return sum(seconds for name, seconds in found[kind][0].items() if name.startswith(role))

    turns = {kind: sum(r.num_turns for r in rollouts) for kind, (_, rollouts) in found.items()}
    for kind, num_turns in turns.items():
        if not num_turns and kind in ("oracle", "random", "model"):
            why = next((r.invalid.evidence for r in found[kind][1] if r.invalid), "every prompt exceeds the context")
            raise EtudeError(f"no rollout of kind {kind!r} had a turn", why, hint="raise harness.context_tokens")
    tool_s = (spent("oracle", "worker") + spent("random", "worker")) / (turns["oracle"] + turns["random"])
    rollouts = found["model"][1]
    sampled = sum(r.num_sampled for r in rollouts)
    prompts = sum(r.num_prompt for r in rollouts)
    in_engine, elsewhere = spent("model", "engine"), spent("model", "worker") + spent("model", "grader")
    batch = max(1.0, PLAYED * in_engine / (in_engine + elsewhere))
    decoded = sampled * (engine["decode_s"] / batch + engine["decode_s_sequence"])
    return {
        "request_s": max(0.0, in_engine - decoded - prompts * engine["prefill_s_token"]) / turns["model"],
        "turn_s": tool_s + spent("model", "worker") / turns["model"],
        "grade_s": (spent("fresh", "grader") + spent("random", "grader")) / (2 * PLAYED),
        "conductor_s": spent("model", "me") / PLAYED,
    }


def measured(config: RunConfig) -> Measured:
    """Measure all constants for a config, always with one learner rank. Raises `EtudeError`."""
    learner = replace(config.learner, ranks=1, expert_parallel=1, context_parallel=1)
    config = replace(config, learner=learner)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="etude-plan-") as scratch:
        run = prepare_run(config, Path(scratch) / "run")
        checkpoint = run / "checkpoints" / "mid"
        ChatFormat.load(run / "tokenizer")
        engine = engine_constants(config, checkpoint)
        found: dict[str, Any] = {
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            **learner_constants(config, checkpoint),
            **engine,
            **asyncio.run(machine_constants(run, config, engine)),
        }
    return Measured(**found)


def main() -> int:
    """Print the constants for ``--config FILE`` as a JSON object and return 0.

    For an error, print [what, facts, hint] and return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    try:
        found = measured(load(parser.parse_args().config, RunConfig))
    except EtudeError as error:
        print(json.dumps([error.what, error.facts, error.hint]))
        return error.exit_code
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
