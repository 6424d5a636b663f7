"""The example of long tasks: how long its tasks are, what its corpus teaches, and what its controls take away."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from examples.long.controls import ROOMS
from examples.long.tasks import Lists, Logs
from tests.unit.harness.tokeniser import laptop_chat
from tests.unit.rollouts.reader import Reader

from etude.config import Plugin
from etude.harness import HarnessConfig, standard_tools
from etude.loop.rollout_scheduler import siblings
from etude.records.rollout import TurnKind
from etude.records.task import Split
from etude.rollouts import demonstrate, run_rollout
from etude.testing import MemoryMachine, MemoryRuntime
from etude.training.tokenizer import PIECES

CONFIG = Path(__file__).parents[3] / "examples" / "long" / "config.toml"
LIMITS = HarnessConfig(
    tools=("cat", "edit", "submit"), max_turns=60, turn_tokens=80, context_tokens=320, summary_tokens=60
)
TEXTS = list(Lists(count=400).documents(seed=0))


def test_a_task_is_three_times_the_context_of_the_example() -> None:
    config = tomllib.loads(CONFIG.read_text())
    tools, source = standard_tools(tuple(config["harness"]["tools"])), Logs()
    for index in range(20):
        found = source.demonstration(Split.HELDOUT, index, seed=0, right=1.0)
        machine = MemoryMachine({path: text.encode() for path, text in found.task.files.items()})
        talk = demonstrate(found.task, found.script, tools.with_standard(), machine)
        calls = [call["function"] for message in talk for call in message.get("tool_calls", ())]
        texts = [message["content"] for message in talk]
        texts += [" ".join([call["name"], *map(str, call["arguments"].values())]) for call in calls]
        # no tokeniser of etude merges two of these pieces; each message has two more tokens, and each call one
        least = sum(len(re.findall(PIECES, text)) for text in texts) + 2 * len(talk) + len(calls)
        assert least >= 3 * config["harness"]["context_tokens"]


def test_every_word_of_a_copy_is_above_it_in_the_same_order() -> None:
    copies = 0
    for text in TEXTS:
        known: list[str] = []
        for line in text.splitlines():
            name, *words = re.findall(r"\w+", line)
            if name == "key":
                known += words
            elif name in ("keys", "return"):
                assert not known or words == known
                copies, known = copies + bool(known), words
    assert copies > 2 * len(TEXTS)


def test_copies_are_at_many_distances() -> None:
    between = set()
    for text in TEXTS:
        lines = [line.split() for line in text.splitlines()]
        lists = [i for i, line in enumerate(lines) if line[0] == "keys"]
        between |= {sum(map(len, lines[i + 1 : j])) for i, j in pairwise(lists) if len(lines[i]) == len(lines[j])}
    assert len(between) >= 5, "words between two copies of a list, without the list"


@pytest.mark.parametrize("room", [None, *ROOMS])
def test_only_a_summary_that_the_model_writes_and_reads_solves_a_task(room: str | None) -> None:
    source, chat = Logs(num_logs=13), laptop_chat()
    task = source.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    limits = LIMITS
    if room is not None:
        limits = dataclasses.replace(LIMITS, program=Plugin("examples.long.controls:Control", {"room": room}))
    policy = Reader(chat, source.num_logs)
    rollout = asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=chat, harness=limits))
    solved = rollout.exports["answer.py"].decode() == source.answer(task).reference["answer.py"]
    assert solved == (room in (None, "detached"))
    assert any("\n[user] summarise" in text for text in policy.texts) == (room in (None, "detached", "blank"))
    summaries = [turn for turn in rollout.trace.turns if turn.kind is TurnKind.SUMMARY]
    assert bool(summaries) == (room in (None, "blank")), "a detached summary is not in the trace, so it is not trained"
