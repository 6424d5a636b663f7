from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.harness.test_tools import TASK
from tests.unit.harness.tokeniser import laptop_chat

from etude.capture.context import (
    HIGH_SHARE,
    HISTORY,
    LOW_SHARE,
    REQUEST,
    Carried,
    SummaryFault,
    go_on,
    head_of,
    history_text,
    is_due,
    summary_fault,
    trigger_tokens,
    with_request,
    without_last_exchange,
)
from etude.harness import Call, Episode, HarnessConfig, RequestOptions, run_agent, run_program, standard_tools
from etude.harness.chat import Message, Reply
from etude.harness.compaction import Compactor
from etude.harness.episode import AgentRun
from etude.records.rollout import Ending, TurnKind
from etude.testing import EnginePolicy, MemoryMachine, ScriptedEngine

CHAT = laptop_chat()
SMALL = HarnessConfig(max_turns=40, turn_tokens=24, context_tokens=144, summary_tokens=24)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
CONVERSATIONS = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["assistant", "tool"]), TEXTS),
    max_size=12,
).map(lambda rest: [{"role": "user", "content": "fix"}, *rest])


# when


@given(st.integers(0, 2**63), st.integers(16, 1_000_000))
def test_the_trigger_is_a_share_of_the_context_that_only_the_groups_seed_decides(seed: int, context: int) -> None:
    trigger = trigger_tokens(seed, context_tokens=context)
    assert round(LOW_SHARE * context) <= trigger <= round(HIGH_SHARE * context)
    assert trigger == trigger_tokens(seed, context_tokens=context)


def test_triggers_spread_over_their_range() -> None:
    triggers = [trigger_tokens(seed, context_tokens=1000) for seed in range(400)]
    assert min(triggers) < 520
    assert max(triggers) > 780
    assert 630 < sum(triggers) / len(triggers) < 670


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 50), st.integers(1, 50))
def test_while_no_summary_is_due_another_exchange_and_a_summary_fit(
    num: int, trigger: int, exchange: int, reserved: int
) -> None:
    if not is_due(num, trigger=trigger, exchange=exchange, reserved=reserved, context_tokens=200):
        assert num < trigger
        assert num + exchange + reserved <= 200


# what


@given(CONVERSATIONS)
def test_pure_functions_leave_their_messages_as_they_are(messages: list[Message]) -> None:
    before = [dict(message) for message in messages]
    with_request(messages)
    without_last_exchange(messages)
    go_on(head_of(messages), Carried("s", 1, 3, HISTORY))
    assert messages == before


@given(CONVERSATIONS)
def test_a_request_keeps_everything_and_ends_with_the_user(messages: list[Message]) -> None:
    asked = with_request(messages)
    assert asked[-1]["role"] == "user"
    assert asked[-1]["content"].endswith(REQUEST)
    assert history_text(asked).startswith(history_text(messages)[:-1])


@given(CONVERSATIONS)
def test_dropping_exchanges_ends_and_never_leaves_less_than_one(messages: list[Message]) -> None:
    left: list[Message] | None = messages
    while (shorter := without_last_exchange(left)) is not None:
        assert len(shorter) < len(left)
        assert messages[: len(shorter)] == shorter
        assert any(message["role"] == "assistant" for message in shorter)
        left = shorter


@given(TEXTS.filter(str.strip), st.integers(1, 99), st.integers(0, 99))
def test_what_goes_on_has_the_task_the_summary_its_number_and_the_file(text: str, number: int, left: int) -> None:
    (message,) = go_on([{"role": "user", "content": "fix the test"}], Carried(text, number, left, HISTORY))
    assert message["content"].startswith("fix the test\n")
    assert message["content"].endswith(text.strip())
    assert all(fact in message["content"] for fact in (f"summary {number}", f"{left} turns left", HISTORY))


def test_a_content_of_parts_gets_another_part() -> None:
    head = [{"role": "user", "content": [{"type": "text", "text": "fix"}]}]
    (message,) = go_on(head, Carried("done", 1))
    assert message["content"] == [*head[0]["content"], {"type": "text", "text": "[summary 1]\ndone"}]


@given(TEXTS, st.booleans(), st.integers(0, 30))
def test_only_a_text_that_has_ended_is_a_summary(text: str, ended: bool, num: int) -> None:
    fault = summary_fault(Reply(text), ended=ended, num_tokens=num, max_tokens=20)
    assert (fault is None) == (ended and bool(text.strip()))


@pytest.mark.parametrize(
    ("reply", "ended", "num", "fault"),
    [
        (Reply(" \n"), True, 2, SummaryFault.EMPTY),
        (Reply("a b"), False, 20, SummaryFault.TOO_LONG),
        (Reply("a b"), False, 3, SummaryFault.CUT_OFF),
        (Reply("a", (Call("ls", {}),)), True, 3, SummaryFault.TOOL_CALL),
        (Reply("a", error="no such tool: rm"), True, 3, SummaryFault.TOOL_CALL),
        (Reply("a"), True, 3, None),
    ],
)
def test_summary_fault_names_why_a_summary_is_refused(
    reply: Reply, ended: bool, num: int, fault: SummaryFault | None
) -> None:
    assert summary_fault(reply, ended=ended, num_tokens=num, max_tokens=20) is fault


# in the built-in program


def say(name: str, **arguments: str) -> list[int]:
    return CHAT.encode_call(Call(name, arguments)).tolist()


def text(words: str) -> list[int]:
    return [*CHAT.encode(words).tolist(), CHAT.end_id]


def episode_of(
    answers: Sequence[Sequence[int]], limits: HarnessConfig = SMALL, machine: MemoryMachine | None = None, seed: int = 1
) -> tuple[Episode, ScriptedEngine]:
    engine = ScriptedEngine(answers)
    files = {path: content.encode() for path, content in TASK.files.items()}
    return Episode(
        TASK,
        machine or MemoryMachine(files),
        policy=EnginePolicy(engine),
        chat=CHAT,
        tools=standard_tools(limits.tools),
        limits=limits,
        options=RequestOptions(session_id="g000001.0/0", seed=7, group_seed=seed),
    ), engine


def play(answers: Sequence[Sequence[int]], **limits: int) -> tuple[AgentRun, ScriptedEngine, MemoryMachine]:
    episode, engine = episode_of(answers, dataclasses.replace(SMALL, **limits))
    run = asyncio.run(run_program(episode))
    machine = episode.machine
    assert isinstance(machine, MemoryMachine)
    return run, engine, machine


CAT = say("cat", path="calc.py")


def until_due(limits: HarnessConfig = SMALL) -> int:
    """How often the model may read a file until its conversation is summarised."""
    episode, engine = episode_of([CAT] * 30, limits)
    asyncio.run(run_program(episode))
    return sum(REQUEST not in CHAT.readable(request.prompt_ids) for request in engine.requests)


def test_a_summary_is_sampled_recorded_and_a_new_root_begins() -> None:
    reads = until_due()
    run, engine, machine = play([*[CAT] * reads, text("calc is wrong"), say("submit")])
    assert run.ending is Ending.SUBMITTED
    kinds = [turn.kind for turn in run.trace.turns]
    assert kinds == [TurnKind.ACT] * reads + [TurnKind.SUMMARY, TurnKind.ACT]
    assert [i for i, turn in enumerate(run.trace.turns) if turn.parent is None] == [0, reads + 1]
    assert len(run.trace.leaves()) == 2
    asked, after = engine.requests[-2:]
    assert asked.sampling.max_tokens == SMALL.summary_tokens
    assert CHAT.readable(asked.prompt_ids).rstrip().endswith(f"[user] {REQUEST}\n[assistant]")
    seen = CHAT.readable(after.prompt_ids).rstrip()
    left = SMALL.max_turns - reads - 1
    assert seen == (
        f"[user] {TASK.instruction}\n[summary 1, {left} turns left, history: {HISTORY}]\ncalc is wrong\n[assistant]"
    )
    history = machine.files[HISTORY].decode()
    assert history.count("[assistant] cat calc.py\n") == reads
    assert history.startswith(f"[user] {TASK.instruction}\n")
    assert history.endswith("[assistant] calc is wrong\n")


def test_the_request_for_a_summary_continues_the_tokens_of_the_conversation() -> None:
    reads = until_due()
    _, engine, _ = play([*[CAT] * reads, text("calc is wrong"), say("submit")])
    before, asked = engine.requests[-3], engine.requests[-2]
    assert asked.session_id == before.session_id
    assert (before.keep_session, asked.keep_session) == (True, False), "its KV cache can be freed at once"
    sampled = [*before.prompt_ids.tolist(), *CAT]
    assert asked.prompt_ids[: len(sampled)].tolist() == sampled


def test_the_history_has_the_messages_of_all_conversations() -> None:
    run, _, machine = play([*[CAT] * until_due(), text("one"), *[CAT, text("two")] * 2, say("submit")])
    if run.ending is not Ending.SUBMITTED:  # how many reads fit after a summary depends on the summary
        assert run.ending is Ending.CONTEXT
    history = machine.files[HISTORY].decode()
    assert history.count(f"[user] {TASK.instruction}") == 1
    assert "[assistant] one\n" in history


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (text(""), SummaryFault.EMPTY),
        (text("very " * 40), SummaryFault.TOO_LONG),
        (say("ls"), SummaryFault.TOOL_CALL),
    ],
)
def test_a_refused_summary_is_sampled_again_and_then_the_episode_ends(bad: list[int], fault: SummaryFault) -> None:
    reads = until_due()

    def of(answers: Sequence[Sequence[int]]) -> tuple[AgentRun, Compactor]:
        episode, _ = episode_of(answers)
        room = Compactor(episode)
        asyncio.run(run_agent(episode, room))
        return episode.result(), room

    run, room = of([*[CAT] * reads, bad, text("calc"), say("submit")])
    assert (run.ending, room.refused, room.number) == (Ending.SUBMITTED, {fault: 1}, 1)
    assert [turn.kind for turn in run.trace.turns][reads:] == [TurnKind.REFUSED, TurnKind.SUMMARY, TurnKind.ACT]
    seeds = {turn.sampling.seed for turn in run.trace.turns}
    assert len(seeds) == len(run.trace.turns), "another attempt has another seed"
    run, room = of([*[CAT] * reads, *[bad] * 3])
    assert (run.ending, room.refused) == (Ending.CONTEXT, {fault: 3})
    assert [turn.kind for turn in run.trace.turns][reads:] == [TurnKind.REFUSED] * 3


def test_the_last_turn_is_never_spent_on_a_summary() -> None:
    reads = until_due()
    run, engine, _ = play([*[CAT] * reads, text("calc"), say("submit")], max_turns=reads + 1, context_tokens=152)
    assert all(REQUEST not in CHAT.readable(request.prompt_ids) for request in engine.requests)
    assert run.ending in (Ending.TURNS, Ending.CONTEXT)
    run, engine, _ = play([*[CAT] * reads, text(""), text(""), say("submit")], max_turns=reads + 2)
    assert run.ending is Ending.CONTEXT
    assert len(engine.requests) == reads + 1


def test_without_room_after_a_summary_the_episode_ends() -> None:
    long = "x" * 60
    files = {"calc.py": long.encode()}
    limits = dataclasses.replace(SMALL, context_tokens=100, turn_tokens=24, summary_tokens=25)
    episode, _ = episode_of([CAT, text("y" * 20)], limits, MemoryMachine(files))
    asyncio.run(run_program(episode))
    assert episode.ending is Ending.CONTEXT


def test_an_output_too_long_to_be_summarised_is_left_out_of_the_summary() -> None:
    files = {"calc.py": b"short", "big.py": b"q" * 90}
    limits = dataclasses.replace(SMALL, context_tokens=200, summary_tokens=24)
    answers = [CAT, say("cat", path="big.py"), text("big.py is long"), say("submit")]
    episode, engine = episode_of(answers, dataclasses.replace(limits, context_tokens=140), MemoryMachine(files))
    run = asyncio.run(run_program(episode))
    assert run.ending is Ending.SUBMITTED
    request = next(r for r in engine.requests if REQUEST in CHAT.readable(r.prompt_ids))
    assert "qqq" not in CHAT.readable(request.prompt_ids)
    machine = episode.machine
    assert isinstance(machine, MemoryMachine)
    assert "q" * 90 in machine.files[HISTORY].decode()


def test_siblings_share_the_trigger_and_groups_differ() -> None:
    triggers = {seed: {Compactor(episode_of([], seed=seed)[0]).trigger for _ in range(3)} for seed in range(20)}
    assert all(len(found) == 1 for found in triggers.values())
    assert len({trigger for found in triggers.values() for trigger in found}) > 10


def test_without_summaries_a_full_context_ends_the_episode() -> None:
    run, _, machine = play([CAT] * 20, summary_tokens=0)
    assert run.ending is Ending.CONTEXT
    assert HISTORY not in machine.files
    assert {turn.kind for turn in run.trace.turns} == {TurnKind.ACT}
    assert len(run.trace.leaves()) == 1


def test_a_summary_of_more_than_a_quarter_of_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="a summary must leave room"):
        HarnessConfig(context_tokens=100, summary_tokens=26)
