"""Small rollouts to feed ledgers, batches and traces with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from etude.experience import Finished, Group, Ledger
from etude.records import Completion, Graded, Invalid, Rollout, RolloutSpec, Sampling, Task, Trace, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import Boundary, Ending, Turn
from etude.records.summary import RolloutSummary, StoredFile, summary_of
from etude.records.task import Split, Trust
from etude.records.wire import pack

TASK = Task(
    source="test",
    split=Split.TRAIN,
    index=0,
    family="fix",
    instruction="fix it",
    files={"a.py": "1"},
    exports=("a.py",),
)


def version(step: int) -> Version:
    return Version(step=step, incarnation="0" * 8, digest="0" * 64)


def completion(spans: Sequence[tuple[int, int]], *, context: int, routes_start: int = 0, epoch: int = 0) -> Completion:
    """A completion of [(step, num_tokens), ...] after `context` tokens, its arrays drawn from a keyed generator."""
    num_tokens = sum(n for _, n in spans)
    rng = np.random.default_rng([context, num_tokens, routes_start])
    return Completion(
        request_id="r",
        token_ids=rng.integers(0, 700, num_tokens, np.int32),
        logprobs=-rng.random(num_tokens, np.float32),
        routes=rng.integers(0, 8, (context + num_tokens - 1 - routes_start, 2, 2), np.uint8),
        routes_start=routes_start,
        spans=tuple(VersionSpan(version(step), n, epoch) for step, n in spans),
        stop_reason=StopReason.STOP,
        engine="engine-0",
    )


def turn(parent: int | None, num_prompt: int, completion: Completion) -> Turn:
    """A turn that adds `num_prompt` tokens and a completion."""
    prompt_ids, sampling = np.arange(num_prompt, dtype=np.int32), Sampling(max_tokens=64, stop_token_ids=())
    return Turn(parent=parent, prompt_ids=prompt_ids, completion=completion, sampling=sampling)


def chain(*turns: Sequence[tuple[int, int]]) -> Trace:
    """A linear trace: each turn adds 3 prompt tokens and what its spans sampled."""
    made, context = [], 0
    for i, spans in enumerate(turns):
        one = completion(spans, context=context + 3, routes_start=max(0, context - 1))
        made.append(turn(i - 1 if i else None, 3, one))
        context += 3 + sum(n for _, n in spans)
    return Trace(tuple(made))


def rollout(rollout_id: str, trace: Trace | None = None, attempt: int = 0) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        group_id=rollout_id.partition(".")[0],
        attempt=attempt,
        task=TASK,
        trace=trace or chain([(0, 4)]),
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=1.0,
        tool_s=0.5,
    )


STORED: dict[StoredFile, Rollout] = {}


def summary(rollout_id: str, trace: Trace | None = None, attempt: int = 0) -> RolloutSummary:
    """The summary of a rollout that `read` gives back."""
    whole = rollout(rollout_id, trace, attempt)
    data = pack(whole)
    stored = StoredFile(len(data), hashlib.sha256(data).hexdigest())
    STORED[stored] = whole
    return summary_of(whole, stored)


def read(one: RolloutSummary) -> Rollout:
    assert one.stored is not None
    return STORED[one.stored]


def spec(rollout_id: str) -> RolloutSpec:
    return RolloutSpec(
        rollout_id=rollout_id, group_id=rollout_id.partition(".")[0], attempt=0, task=TASK, seed=1, temperature=1.0
    )


def graded(reward: float) -> Graded:
    return Graded.of(reward, {"tests": reward}, trust=Trust.DATA, reason="as the tests say")


INVALID = Invalid(boundary=Boundary.MACHINE, reason="the machine died", evidence="exit status 137")


def group(group_id: str, rewards: Sequence[float | None], trace: Trace | None = None) -> Group:
    """A finished group; None is an invalid member."""
    ids = tuple(f"{group_id}.{i}" for i in range(len(rewards)))
    return Group(
        group_id=group_id,
        rollout_ids=ids,
        finished=tuple(
            Finished(rollout_id=i, outcome=INVALID if r is None else graded(r), summary=summary(i, trace))
            for i, r in zip(ids, rewards, strict=True)
        ),
    )


class Kit:
    """The builders, handed to tests as one fixture."""

    version = staticmethod(version)
    completion = staticmethod(completion)
    turn = staticmethod(turn)
    chain = staticmethod(chain)
    rollout = staticmethod(rollout)
    summary = staticmethod(summary)
    read = staticmethod(read)
    spec = staticmethod(spec)
    graded = staticmethod(graded)
    group = staticmethod(group)
    invalid = INVALID


def finishing(ledger: Ledger) -> Callable[[str, Sequence[float | None]], None]:
    """Admit, run and finish a whole group in a ledger."""

    def work(group_id: str, rewards: Sequence[float | None]) -> None:
        for one in group(group_id, rewards).finished:
            ledger.admit(spec(one.rollout_id))
            ledger.move(one.rollout_id, "running")
            assert one.summary is not None
            assert ledger.finish(one.summary, one.outcome)

    return work
