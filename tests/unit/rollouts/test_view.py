"""Rollouts as people read them: the tree of turns with its text, and what was trained of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.small_rollouts import completion
from tests.unit.harness.tokeniser import laptop_chat

from etude.records import Completion, Sample, Sampling, Trace
from etude.records.rollout import Start, ToolCall, Turn, TurnKind
from etude.records.view import MAX_DEPTH, Conversation, TurnView, conversations, shorten, transcript, turn_facts
from etude.records.wire import from_json, to_json
from etude.rollouts.view import view_turns

CHAT = laptop_chat()


def turn(parent: int | None, prompt: list[dict[str, Any]], reply: str, start: Start | None, **more: Any) -> Turn:
    """A turn whose prompt is these messages, which begin a conversation without a parent."""
    said = {"role": "assistant", "content": "x"}
    whole = prompt if parent is None else [{"role": "user", "content": "u"}, said, *prompt]
    ids = CHAT.encode_prompt(whole, {}) if parent is None else CHAT.continuation(whole[:2], prompt, {}, ended=True)
    token_ids = np.array([*CHAT.encode(reply).tolist(), CHAT.end_id], np.int32)
    done = completion([(3, len(token_ids))], context=len(ids))
    facts = {"token_ids": token_ids, "routes": done.routes[:0], "num_cached": more.pop("num_cached", 0)}
    done = msgspec.structs.replace(done, **facts)
    sampling = Sampling(max_tokens=64, stop_token_ids=())
    return Turn(parent=parent, prompt_ids=ids, completion=done, sampling=sampling, start=start, **more)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TRACE = Trace(
    (
        turn(None, [user("mend")], "look", Start.FIRST),
        turn(0, [user("seen")], "sum", Start.NEXT, kind=TurnKind.SUMMARY, num_cached=4),
        turn(None, [user("name it")], "title", Start.SYSTEM, kind=TurnKind.SIDE),
        turn(None, [user("mend sum")], "work", Start.SYSTEM),
        turn(3, [user("a")], "one", Start.NEXT, calls=(ToolCall(name="", arguments={}, output="e", malformed=True),)),
        turn(3, [user("a")], "two", Start.FORK),
        turn(5, [user("b")], "end", Start.NEXT),
        turn(None, [user("mend all")], "more", Start.HISTORY),
    )
)


def outline(found: list[Conversation]) -> list[Any]:
    """(title, [number of a turn, or the outline of the branches after it])."""
    made: list[Any] = []
    for one in found:
        inside: list[Any] = []
        for shown, branches in one.turns:
            inside += [shown.number, *([outline(branches)] if branches else [])]
        made.append((one.title, inside))
    return made


def test_a_rollout_is_arranged_in_conversations_with_its_branches_and_why_they_began() -> None:
    turns = view_turns(TRACE, CHAT)
    assert outline(conversations(turns)) == [
        ("conversation 1", [0, 1]),
        ("conversation 2: begins with another message", [2]),
        (
            "conversation 3: goes on from the summary of turn 1",
            [3, [("branch from turn 3, the prompt of turn 4 again", [5, 6])], 4],
        ),
        ("conversation 4: its history repeats no turn", [7]),
    ]


def test_a_turn_has_its_new_messages_its_reply_and_its_tokens() -> None:
    turns = view_turns(TRACE, CHAT)
    assert (turns[0].prompt, turns[0].reply) == ("[user] mend", "[assistant] look")
    assert (turns[1].prompt, turns[1].reply) == ("[user] seen", "[assistant] sum")
    parent, one = TRACE.turns[0], TRACE.turns[1]
    before = len(parent.prompt_ids) + len(parent.completion.token_ids)
    assert (turns[1].num_prompt, turns[1].num_new) == (before + len(one.prompt_ids), len(one.prompt_ids))
    assert (turns[1].num_cached, turns[1].steps, turns[4].num_malformed) == (4, (3,), 1)
    assert turns[5].same_prompt == 4
    assert f"prompt {turns[1].num_prompt} (4 cached), sampled {turns[1].num_sampled} · step 3" in turn_facts(turns[1])
    old = Trace((msgspec.structs.replace(TRACE.turns[0], start=None),))
    assert view_turns(old, CHAT)[0].num_cached is None
    assert from_json(to_json(turns).decode(), tuple[TurnView, ...]) == turns


def test_trained_turns_are_shown_with_their_row() -> None:
    leaf = 6
    path = TRACE.path(leaf)
    mask = path.mask.copy()
    first = len(TRACE.turns[3].prompt_ids)
    mask[first] = False  # the first token of turn 3 has no loss
    cut = msgspec.structs.replace(path, mask=mask, logprobs=np.where(mask, path.logprobs, np.float32(0)))
    advantages = np.linspace(-1, 1, int(mask.sum()), dtype=np.float32)
    sample = Sample(rollout_id="r", path=cut, advantages=advantages)
    turns = view_turns(TRACE, CHAT, [(leaf, sample)], first_row=9)
    assert [one.number for one in turns if one.trained] == [3, 5, 6]
    counts = [one.trained[0].num_tokens for one in turns if one.trained]
    sampled = [len(TRACE.turns[i].completion.token_ids) for i in (3, 5, 6)]
    assert counts == [sampled[0] - 1, *sampled[1:]]
    last = turns[6].trained[0]
    assert (last.row, last.high) == (9, 1.0)
    assert last.low == pytest.approx(float(advantages[-sampled[2]]))
    assert f"trained {sampled[2]} × {last.low:+.3g} to +1 (row 9)" in turn_facts(turns[6])


def test_the_transcript_has_all_conversations() -> None:
    text = transcript(view_turns(TRACE, CHAT))
    assert text.startswith("[user] mend\n[assistant] look\n[user] seen\n[assistant] sum\n\n--- conversation 2")
    for one in ("title", "work", "one", "two", "end", "more"):
        assert f"[assistant] {one}\n" in text + "\n"
    assert "--- branch from turn 3, the prompt of turn 4 again ---\n[user] a\n[assistant] two" in text


def test_thousands_of_nested_branches_are_arranged() -> None:
    one = TRACE.turns[0]
    turns = [one]
    for _ in range(1500):
        parent = len(turns) - 1
        turns += [msgspec.structs.replace(one, parent=parent), msgspec.structs.replace(one, parent=parent)]
    views = view_turns(Trace(tuple(turns)), CHAT)
    seen, waiting, deepest = 0, [(found, 1) for found in conversations(views)], 0
    while waiting:
        found, depth = waiting.pop()
        deepest = max(deepest, depth)
        seen += len(found.turns)
        waiting += [(branch, depth + 1) for _, branches in found.turns for branch in branches]
    assert (seen, deepest) == (3001, MAX_DEPTH + 1)
    assert transcript(views).count("[user] mend") == 3001


def test_a_text_is_shortened_by_lines_and_characters() -> None:
    assert shorten("ab\ncd\nef", lines=3, chars=2) == "ab\ncd\nef"
    assert shorten("abc\nd\ne", lines=1, chars=2) == "a…\n… 2 more lines"


def test_an_empty_reply_is_shown_as_empty() -> None:
    one = TRACE.turns[0]
    empty = Completion(
        request_id="r",
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        routes=one.completion.routes[:0],
        routes_start=0,
        spans=(),
        stop_reason=one.completion.stop_reason,
        engine="e",
    )
    [shown] = view_turns(Trace((msgspec.structs.replace(one, completion=empty),)), CHAT)
    assert (shown.prompt, shown.reply, shown.steps) == ("[user] mend", "", ())
