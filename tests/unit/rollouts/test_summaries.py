from __future__ import annotations

import asyncio
import dataclasses
import random

import msgspec
import numpy as np
import pytest
from examples.long.tasks import Logs, Script, play
from tests.unit.harness.tokeniser import laptop_chat
from tests.unit.rollouts.reader import Reader

from etude.harness import HarnessConfig
from etude.loop.rollout_scheduler import siblings
from etude.records import Rollout, Task
from etude.records.rollout import Ending, TurnKind
from etude.records.task import Split
from etude.rollouts import ScriptedPolicy, demonstrate_long, run_rollout
from etude.testing import MemoryMachine, MemoryRuntime

CHAT = laptop_chat()
LIMITS = HarnessConfig(
    tools=("cat", "edit", "submit"), max_turns=60, turn_tokens=80, context_tokens=320, summary_tokens=60
)
SOURCE = Logs(num_logs=13)


def roll(task: Task, script: Script, limits: HarnessConfig = LIMITS) -> Rollout:
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = ScriptedPolicy(script, CHAT)
    return asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=CHAT, harness=limits))


def num_tokens(rollout: Rollout) -> int:
    """Tokens of tool outputs and calls, which a single conversation would have to hold."""
    acts = [turn for turn in rollout.trace.turns if turn.kind is TurnKind.ACT]
    return sum(len(CHAT.encode(call.output)) for turn in acts for call in turn.calls) + sum(
        len(turn.completion.token_ids) for turn in acts
    )


def test_a_policy_that_summarises_well_solves_a_task_three_times_its_window() -> None:
    task = SOURCE.task(Split.HELDOUT, 0)
    rollout = roll(task, play(SOURCE.num_logs, random.Random(0), right=1.0))
    assert rollout.ending is Ending.SUBMITTED
    assert rollout.exports["answer.py"].decode() == SOURCE.answer(task).reference["answer.py"]
    assert num_tokens(rollout) > 3 * LIMITS.context_tokens
    assert all(len(rollout.trace.path(leaf).token_ids) <= LIMITS.context_tokens for leaf in rollout.trace.leaves())
    assert sum(turn.kind is TurnKind.SUMMARY for turn in rollout.trace.turns) >= 3


@pytest.mark.parametrize("carries", [True, False])
def test_what_a_policy_knows_after_a_summary_is_only_what_the_summary_carries(carries: bool) -> None:
    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = Reader(CHAT, SOURCE.num_logs, carries=carries)
    rollout = asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=CHAT, harness=LIMITS))
    solved = rollout.exports["answer.py"].decode() == SOURCE.answer(task).reference["answer.py"]
    assert solved == carries
    assert rollout.ending is (Ending.SUBMITTED if carries else Ending.TURNS), "without memory it begins again"
    assert sum(turn.kind is TurnKind.SUMMARY for turn in rollout.trace.turns) >= 3


@pytest.mark.parametrize("limits", [dataclasses.replace(LIMITS, summary_tokens=0)])
def test_without_summaries_it_does_not_fit(limits: HarnessConfig) -> None:
    task = SOURCE.task(Split.HELDOUT, 0)
    assert roll(task, play(SOURCE.num_logs, random.Random(0), right=1.0), limits).ending is Ending.CONTEXT


def test_a_policy_that_forgets_in_its_summaries_fails() -> None:
    task = SOURCE.task(Split.HELDOUT, 1)
    rollout = roll(task, play(SOURCE.num_logs, random.Random(0), right=0.0))
    assert rollout.ending is Ending.SUBMITTED
    assert rollout.exports["answer.py"].decode() != SOURCE.answer(task).reference["answer.py"]


def test_demonstrations_are_the_conversations_of_rollouts() -> None:
    found = SOURCE.demonstration(Split.TRAIN, 5, seed=0, right=1.0)
    files = {path: text.encode() for path, text in found.task.files.items()}
    documents = demonstrate_long(found.task, found.script, CHAT, MemoryMachine(files), LIMITS, group_seed=3)
    (spec,) = siblings("g000000", found.task, 1, seed=0, temperature=1.0)
    script = SOURCE.demonstration(Split.TRAIN, 5, seed=0, right=1.0).script
    rollout = asyncio.run(
        run_rollout(
            msgspec.structs.replace(spec, group_seed=3),
            runtime=MemoryRuntime(),
            policy=ScriptedPolicy(script, CHAT),
            chat=CHAT,
            harness=LIMITS,
        )
    )
    paths = [rollout.trace.path(leaf).token_ids for leaf in rollout.trace.leaves()]
    assert len(documents) == len(paths) > 3
    assert all(np.array_equal(one, other) for one, other in zip(documents, paths, strict=True))


def test_siblings_share_the_seed_of_their_group() -> None:
    task = SOURCE.task(Split.TRAIN, 0)
    one, other = (siblings(group, task, 4, seed=0, temperature=1.0) for group in ("g000000", "g000001"))
    assert len({spec.group_seed for spec in one}) == 1
    assert len({spec.seed for spec in one}) == 4
    assert one[0].group_seed != other[0].group_seed


def test_held_out_keys_are_in_no_training_task() -> None:
    held = {SOURCE.problem(Split.HELDOUT, i).answer for i in range(200)}
    assert not held & {SOURCE.problem(Split.TRAIN, i).answer for i in range(2000)}
