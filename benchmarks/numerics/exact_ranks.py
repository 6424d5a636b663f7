"""What two ranks that share a model say of texts: an engine's steps and a learner's packed forward, in each of them.

Every rank runs the engine's own scheduler, cache and steps. Tensor-parallel ranks are given the same requests, and so
make the same plans; expert-parallel ones have requests of their own, and take part in each other's steps to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from etude import progress
from etude.inference.runner import Runner
from etude.inference.scheduler import Scheduler
from etude.inference.scheduler import Sequence as Running
from etude.models import ModelConfig, Packed, Transformer
from etude.models.tensor_parallel import shard_model
from etude.numerics.operators import Operators
from etude.numerics.parallel import Parallel, Split
from etude.records import CompletionRequest
from etude.training.data_parallel import RankGroup, run_ranks

Text = tuple[list[int], int]
"""A prompt with what was sampled after it, and the prompt's length."""


@dataclass(frozen=True)
class Case:
    """A model, what computes it, what ranks share it by, and what they are asked."""

    config: ModelConfig
    operators: Operators
    split: Split
    requests: list[CompletionRequest]


def sharp(config: ModelConfig, operators: Operators) -> Transformer:
    """Random weights with predictions so sharp that a wrong number shows."""
    model = Transformer(config, seed=3, operators=operators).cast(operators.storage_dtype)
    with torch.no_grad():
        model.embedding.mul_(2)
    return model


@torch.no_grad()
def learned(model: Transformer, texts: Sequence[Text]) -> list[list[float]]:
    inputs, targets = (torch.tensor([t for ids, _ in texts for t in ids[part]]) for part in (slice(-1), slice(1, None)))
    lengths = [len(ids) - 1 for ids, _ in texts]
    done = model.train().run(inputs, Packed(lengths, model.operators))
    logprobs = model.operators.log_softmax(done.logits).gather(1, targets[:, None])[:, 0]
    model.eval()
    return [part.tolist()[start - 1 :] for part, (_, start) in zip(torch.split(logprobs, lengths), texts, strict=True)]


def served(
    model: Transformer,
    requests: Sequence[CompletionRequest],
    ranks: RankGroup,
    *,
    slots: int = 8,
    chunk_tokens: int = 64,
) -> list[Running]:
    """The requests, answered, in step with the other ranks."""
    sizes = {"num_slots": slots, "context_tokens": model.config.context_tokens}
    scheduler = Scheduler(**sizes, chunk_tokens=chunk_tokens, step_tokens=256, max_waiting=len(requests))
    runner = Runner(model, **sizes)
    running = [Running(request, arrived=0.0) for request in requests]
    for one in running:
        scheduler.submit(one)
    while True:
        plan = scheduler.plan()
        working = torch.tensor([float(bool(plan))])
        if ranks.size > 1:
            distributed.all_reduce(working)
        progress.tick()
        if not working:
            return running
        for one in runner.step(plan):
            if one.finished:
                scheduler.finish(one)


def _told(ranks: RankGroup, cases: list[Case]) -> list[tuple[list[list[float]], list[list[float]]]]:
    """Log-probabilities of this rank's texts in each case: its engine's, its learner's."""
    found = []
    for case in cases:
        parallel = Parallel(ranks.size, ranks.rank, case.split)
        model = shard_model(sharp(case.config, case.operators), parallel)
        own = case.requests if parallel.tensor is parallel else case.requests[ranks.rank :: ranks.size]
        done = served(model, own, ranks)
        texts = [([*s.request.prompt_ids.tolist(), *s.token_ids], s.num_prompt) for s in done]
        found.append(([s.logprobs for s in done], learned(model, texts)))
    return found


def two_ranks(cases: list[Case]) -> list[dict[str, list[list[float]]]]:
    """For each case what engine and learner say of all texts, by circumstance."""
    first, second = run_ranks(_told, cases, ranks=2, stall_s=600.0)
    found = []
    for case, *both in zip(cases, first, second, strict=True):
        named = {}
        for what, one, other in zip(("served", "learned"), *both, strict=True):
            name = f"2 {case.split}-parallel ranks, {what}"
            if case.split is Split.TENSOR:
                named |= {f"{name}, rank {rank}": said for rank, said in enumerate((one, other))}
            else:
                named[name] = [said for pair in zip(one, other, strict=True) for said in pair]
        found.append(named)
    return found
