"""Rollouts whose machine is forked after the first summary."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from examples.long.tasks import Logs
from tests.unit.environments.judging import on_machines
from tests.unit.harness.tokeniser import laptop_chat
from tests.unit.rollouts.reader import Reader

from etude.capture.context import HISTORY
from etude.errors import MachineError
from etude.experience import Finished, Group, make_batch, plan_batch
from etude.experience.credit import Fork as ForkCredit
from etude.harness import Call, HarnessConfig
from etude.loop.rollout_scheduler import siblings
from etude.records import Completion, CompletionRequest, Rollout, RolloutSpec
from etude.records.rollout import Boundary, Ending, Graded, TurnKind, Unforked
from etude.records.summary import summary_of
from etude.records.task import Split, Trust
from etude.rollouts import run_rollout
from etude.rollouts.forks import run_forked
from etude.seams import Machine, Runtime
from etude.testing import MemoryMachine, MemoryRuntime

CHAT, SOURCE, FORKS = laptop_chat(), Logs(num_logs=13), 3
LIMITS = HarnessConfig(
    tools=("cat", "edit", "submit"), max_turns=60, turn_tokens=80, context_tokens=320, summary_tokens=60, forks=FORKS
)


class Seeded(Reader):
    """Reads as `Reader`. In the first turn after the first summary it writes its seed into a log, so that continuations
    differ."""

    def __init__(self, **given: Any) -> None:
        super().__init__(CHAT, SOURCE.num_logs, **given)
        self.asked = list[CompletionRequest]()

    async def complete(self, request: CompletionRequest) -> Completion:
        self.asked.append(request)
        self._seed = request.sampling.seed
        return await super().complete(request)

    def _turn(self, text: str) -> np.ndarray:
        if "[summary 1," in text and text.count("\n[call]") == 0:
            return CHAT.encode_call(Call("edit", {"path": "2.log", "line": "1", "text": f"seed {self._seed % 97}"}))
        return super()._turn(text)


class Counting(MemoryRuntime):
    """Counts the machines that are open, and fails at the forks of these numbers."""

    def __init__(self, *, failing: Sequence[int] = (), machine: type[MemoryMachine] = MemoryMachine) -> None:
        super().__init__()
        self.failing, self.machine, self.num_forks, self.most_open = failing, machine, 0, 0
        self.made = list[MemoryMachine]()

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        self.num_forks += n
        if self.num_forks in self.failing:
            raise MachineError("the pool is full", "waited 30 s for free slots", hint="close machines")
        found = [self.machine(dict(one.files), self) for one in await super().fork(snapshot, n)]  # type: ignore[attr-defined]
        self.made += found
        self.most_open = max(self.most_open, sum(not one.closed for one in self.made))
        return list(found)


class Forgetful(MemoryRuntime):
    """Has room for one snapshot that nobody holds, and other rollouts that make further ones."""

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        found = await super().fork(snapshot, n)
        await self.prepare({"of another rollout": snapshot.encode()})
        return found


def spec(seed: int = 0) -> RolloutSpec:
    (made,) = siblings("g000000", SOURCE.task(Split.TRAIN, 0), 1, seed=seed, temperature=1.0, forks=FORKS)
    return made


def fork(
    policy: Any, runtime: Runtime | None = None, limits: HarnessConfig = LIMITS, *, seed: int = 0
) -> list[Rollout]:
    given = runtime or MemoryRuntime()
    return asyncio.run(run_forked(spec(seed), runtime=given, policy=policy, chat=CHAT, harness=limits))


def tokens(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids.tolist(), turn.completion.token_ids.tolist()) for turn in rollout.trace.turns]


def test_continuations_share_everything_up_to_the_first_summary_and_nothing_after_it() -> None:
    policy = Seeded()
    found = fork(policy)
    assert [one.rollout_id for one in found] == ["g000000.0", "g000000.0.1", "g000000.0.2"]
    (shared,) = {one.fork for one in found}
    assert shared is not None
    assert shared.origin == "g000000.0"
    turns = found[0].trace.turns
    assert [turn.kind for turn in turns[: shared.num_turns]].count(TurnKind.SUMMARY) == 1
    assert turns[shared.num_turns - 1].kind is TurnKind.SUMMARY
    before, *_ = starts = [tokens(one)[: shared.num_turns] for one in found]
    assert starts == [before] * FORKS
    assert sum(len(sampled) for _, sampled in before) == shared.num_sampled
    first_edits = [one.trace.turns[shared.num_turns].calls[0].arguments["text"] for one in found]
    assert len(set(first_edits)) == FORKS, "each has a seed of its own"
    for one in found:
        assert one.trace.turns[shared.num_turns].parent is None, "a new conversation"
        assert one.ending is Ending.SUBMITTED
        assert one.exports["answer.py"].decode() == SOURCE.answer(one.task).reference["answer.py"]
    assert [r.session_id for r in policy.asked if "+" in r.session_id] != []
    assert all(r.session_id.startswith("g000000.0") for r in policy.asked)
    assert len({r.request_id for r in policy.asked}) == len(policy.asked)


def test_the_first_continuation_is_the_rollout_without_forks_and_all_repeat_by_seed() -> None:
    found, again, other = fork(Seeded()), fork(Seeded()), fork(Seeded(), seed=1)
    alone = asyncio.run(run_rollout(spec(), runtime=MemoryRuntime(), policy=Seeded(), chat=CHAT, harness=LIMITS))
    assert tokens(found[0]) == tokens(alone)
    assert found[0].exports == alone.exports
    assert list(map(tokens, found)) == list(map(tokens, again))
    assert list(map(tokens, found)) != list(map(tokens, other))


def test_each_continuation_begins_with_the_files_of_the_summary() -> None:
    """On real machines: what one continuation writes is in no other one, and the history is in all."""

    async def work(runtime: Runtime) -> tuple[list[Rollout], list[bytes]]:
        seen = list[bytes]()

        forks = runtime.fork

        async def fork(snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
            made = await forks(snapshot, n, deadline_s=deadline_s)
            try:
                seen.append(await made[0].read("2.log") + await made[0].read(HISTORY))
            except FileNotFoundError:  # before the first summary
                seen.append(b"")
            return made

        runtime.fork = fork  # type: ignore[method-assign]
        return await run_forked(spec(), runtime=runtime, policy=Seeded(), chat=CHAT, harness=LIMITS), seen

    found, seen = on_machines(work)
    assert [one.invalid for one in found] == [None] * FORKS
    assert seen[0] == b""
    assert len(set(seen[1:])) == 1
    assert b"1.log" in seen[1]
    assert all(one.exports["answer.py"].decode() == SOURCE.answer(one.task).reference["answer.py"] for one in found)


def test_a_rollout_holds_one_machine_at_a_time_and_keeps_its_snapshot() -> None:
    """A pool for one machine is enough, so rollouts that wait for forks cannot block each other."""
    runtime = Counting()
    assert len(fork(Seeded(), runtime)) == FORKS
    assert (runtime.num_forks, runtime.most_open) == (1 + FORKS, 1)
    assert all(one.closed for one in runtime.made)
    assert [one.invalid for one in fork(Seeded(), Forgetful(max_bytes=1))] == [None] * FORKS


def test_a_fork_that_fails_is_invalid_and_the_others_go_on() -> None:
    runtime = Counting(failing=[3])
    first, lost, last = fork(Seeded(), runtime)
    assert lost.invalid is not None
    assert (lost.invalid.boundary, lost.invalid.reason) == (Boundary.MACHINE, "the pool is full")
    assert lost.fork == first.fork == last.fork
    assert first.invalid is last.invalid is None
    assert [one.invalid is not None for one in fork(Seeded(), Counting(failing=[2]))] == [True, False, False]
    (only,) = fork(Seeded(), Counting(failing=[1]))
    assert only.invalid is not None


class Unsaved(MemoryMachine):
    error: Exception = ValueError("the tree is too large")

    async def snapshot(self) -> str:
        raise self.error


class Gone(Unsaved):
    error = FileNotFoundError("the machine is gone")


class Broken(Unsaved):
    error = MachineError("the host is gone", hint="none")


def test_what_the_agent_did_to_its_machine_makes_no_rollout_invalid() -> None:
    alone = asyncio.run(run_rollout(spec(), runtime=MemoryRuntime(), policy=Seeded(), chat=CHAT, harness=LIMITS))
    for machine, why in ((Unsaved, Unforked.TOO_LARGE), (Gone, Unforked.GONE)):
        (found,) = fork(Seeded(), Counting(machine=machine))
        assert (found.unforked, found.fork, found.invalid) == (why, None, None)
        assert summary_of(found).unforked is why
        assert tokens(found) == tokens(alone)
    (lost,) = fork(Seeded(), Counting(machine=Broken))
    assert lost.invalid is not None
    assert lost.invalid.boundary is Boundary.MACHINE


def test_a_rollout_without_a_summary_is_alone() -> None:
    (found,) = fork(Seeded(), limits=dataclasses.replace(LIMITS, max_turns=2))
    assert (found.fork, found.ending, found.num_turns) == (None, Ending.TURNS, 2)


def test_limits_count_the_shared_part_for_each_continuation() -> None:
    limits = dataclasses.replace(LIMITS, max_turns=16)
    found = fork(Seeded(carries=False), limits=limits)
    assert len(found) == FORKS
    assert [(one.ending, one.num_turns) for one in found] == [(Ending.TURNS, 16)] * FORKS
    policy = Seeded(carries=False)
    fork(policy, limits=limits)
    (shared,) = {one.fork.num_turns for one in found if one.fork is not None}
    assert len(policy.asked) == shared + FORKS * (16 - shared), "the shared turns are sampled once"


@pytest.mark.parametrize("failing", [[], [2], [3]], ids=["none", "first", "second"])
def test_each_sampled_token_is_trained_on_once_whichever_continuation_is_invalid(failing: list[int]) -> None:
    others = [renamed(one, f"g000000.1{one.rollout_id[9:]}") for one in fork(Seeded(), seed=1)]
    rollouts = {one.rollout_id: one for one in (*fork(Seeded(), Counting(failing=failing)), *others)}
    finished = [
        Finished(
            rollout_id=one.rollout_id,
            outcome=one.invalid or Graded.of(float(n**2), trust=Trust.DATA, reason=""),
            summary=summary_of(one),
        )
        for n, one in enumerate(rollouts.values())
    ]
    group = Group("g000000", tuple(rollouts), tuple(finished))
    plan = plan_batch([group], batch_id="b000001", step=1, max_lag=9, scheme=ForkCredit())
    batch = make_batch(plan, lambda summary: rollouts[summary.rollout_id])
    trained = sum(int(sample.path.mask.sum()) for sample in batch.samples)
    assert trained == batch.num_loss_tokens == unique_tokens([one for one in rollouts.values() if one.invalid is None])


def renamed(rollout: Rollout, rollout_id: str) -> Rollout:
    fork = rollout.fork and msgspec.structs.replace(rollout.fork, origin="g000000.1")
    return msgspec.structs.replace(rollout, rollout_id=rollout_id, fork=fork)


def unique_tokens(rollouts: Sequence[Rollout]) -> int:
    """Sampled tokens, those of shared turns once."""
    shared = {one.fork.origin: one.fork.num_sampled for one in rollouts if one.fork is not None}
    times = Counter(one.fork.origin for one in rollouts if one.fork is not None)
    return sum(one.num_sampled for one in rollouts) - sum((times[i] - 1) * number for i, number in shared.items())
