"""Requests repeat their conversation: only what is new is read, and the messages are those of the whole body."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from etude.capture import KeptMessages, Message
from etude.capture.digests import conversation_keys
from etude.gateway import DIALECTS, RequestRefused
from etude.gateway.requests import Conversations, check_results

FIELDS = {"chat": "messages", "messages": "messages", "responses": "input"}


def exchange(dialect: str, number: int, calls: int) -> list[dict[str, Any]]:
    """The parts that a client adds to a conversation after a turn of the model with some calls."""
    ids = [f"c{number}_{i}" for i in range(calls)]
    text, more = f"so {number}", {"role": "user", "content": f"go on {number}"}
    if dialect == "chat":
        function = {"name": "f", "arguments": '{"x": 1}'}
        reply: dict[str, Any] = {"role": "assistant", "content": text}
        reply |= {"tool_calls": [{"id": one, "type": "function", "function": function} for one in ids]} if ids else {}
        results = [{"role": "tool", "tool_call_id": one, "content": f"result {one}"} for one in ids[::-1]]
        return [reply, *(results or [more])]
    if dialect == "messages":
        uses = [{"type": "tool_use", "id": one, "name": "f", "input": {"x": 1}} for one in ids]
        given = [{"type": "tool_result", "tool_use_id": one, "content": f"result {one}"} for one in ids[::-1]]
        reply = {"role": "assistant", "content": [{"type": "text", "text": text}, *uses]}
        return [reply, {"role": "user", "content": given} if given else more]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"hm {number}"}]}
    asked = [{"type": "function_call", "call_id": one, "name": "f", "arguments": '{"x": 1}'} for one in ids]
    outputs = [{"type": "function_call_output", "call_id": one, "output": f"result {one}"} for one in ids[::-1]]
    return [thought, {"role": "assistant", "content": text}, *asked, *(outputs or [more])]


def read(dialect: str, parts: Sequence[Any], system: str = "") -> list[Message]:
    given = {"model": "m", FIELDS[dialect]: parts}
    given |= {"messages": {"max_tokens": 9, "system": system}, "responses": {"instructions": system}}.get(dialect, {})
    return DIALECTS[dialect].read(json.dumps(given).encode()).messages


@pytest.mark.parametrize("dialect", FIELDS)
def test_the_messages_of_a_repeated_conversation_are_those_of_the_whole_body(dialect: str) -> None:
    chance = random.Random(dialect)
    talks = [[{"role": "user", "content": f"{dialect} talk {number % 2}"}] for number in range(4)]
    known = 0
    for turn in range(60):
        talk = chance.choice(talks)
        talk += exchange(dialect, turn % 7, chance.randrange(4))
        if not turn % 9:
            talks[0] = copy.deepcopy(talk)
        found = read(dialect, talk, "be brief")
        assert isinstance(found, KeptMessages)
        known += found.known
        spaced = [{**part, "unknown": turn} for part in talk]  # other bytes, so that all is read
        whole = read(dialect, spaced, "be brief")
        assert isinstance(whole, KeptMessages)
        assert whole.known == 0
        assert found == whole
        for tools in ([], [{"type": "function", "function": {"name": "f"}}], []):
            assert conversation_keys(tools, found) == conversation_keys(tools, list(whole))
    assert known > 500


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_late_result_is_put_in_the_order_of_the_calls(dialect: str) -> None:
    talk = [{"role": "user", "content": f"late {dialect}"}, *exchange(dialect, 1, 3)]
    before, last = talk[:-1], talk[-1]
    read(dialect, before)
    ordered = read(dialect, [*before, last])
    assert [m["tool_call_id"] for m in ordered if m["role"] == "tool"] == ["c1_0", "c1_1", "c1_2"]


def test_a_result_twice_is_put_where_the_whole_body_has_it() -> None:
    talk = [{"role": "user", "content": "twice"}, *exchange("chat", 1, 2)]
    again = [*talk, talk[-1]]
    read("chat", talk)
    found = read("chat", again)
    assert [m["tool_call_id"] for m in found if m["role"] == "tool"] == ["c1_0", "c1_0", "c1_1"]
    with pytest.raises(RequestRefused, match="belongs to no call"):
        check_results(found, "messages")


def test_a_missing_result_is_still_missing_when_the_conversation_goes_on() -> None:
    talk: list[Any] = [{"role": "user", "content": "missing"}, *exchange("chat", 1, 2)]
    del talk[-1]
    for _ in range(2):
        with pytest.raises(RequestRefused, match="these tool calls have no result"):
            check_results(read("chat", talk), "messages")
        talk += exchange("chat", 2, 0)


def test_the_reasoning_of_a_turn_that_goes_on_is_kept() -> None:
    first, thought, reply, more = ({"role": "user", "content": "reason"}, *exchange("responses", 1, 0))
    read("responses", [first, thought])
    found = read("responses", [first, thought, reply, more])
    assert [m.get("reasoning_content") for m in found] == [None, "hm 1", None]


def test_only_new_parts_are_read_and_old_conversations_are_dropped() -> None:
    num_read: list[int] = []

    def convert(parts: Sequence[msgspec.Raw], first: int) -> list[Message]:
        num_read.append(len(parts))
        return [{"role": "user", "content": bytes(part).decode()} for part in parts]

    def ask(name: int, length: int) -> int:
        """Read a request, and return how many of its messages an earlier one had."""
        sent = json.dumps([name, *range(length)]).encode()
        return kept.read(msgspec.json.decode(sent, type=list[msgspec.Raw]), 100).known

    kept = Conversations(convert, "messages", max_bytes=1000)
    assert [ask(0, length) for length in (2, 3, 5, 3, 5)] == [0, 3, 4, 0, 6]
    assert num_read[::2] == [3, 1, 2, 4, 0]
    assert [ask(name, 2) for name in range(1, 30)] == [0] * 29
    assert ask(0, 5) == 0
    assert ask(29, 3) == 3
    assert sum(len(talks) for half in (kept._recent, kept._older) for talks in half.values()) <= 10


def test_many_conversations_with_one_beginning_are_bounded() -> None:
    def ask(name: int) -> int:
        sent = msgspec.json.decode(json.dumps(["a", "b", name]).encode(), type=list[msgspec.Raw])
        return kept.read(sent, 1).known

    kept = Conversations(lambda parts, _: [{"role": "user", "content": ""}] * len(parts), "messages")
    assert not any(ask(name) for name in range(200))
    assert ask(199) == 3
    assert ask(0) == 0
    assert len(kept._recent[("", b'"a"', b'"b"')]) <= 65
