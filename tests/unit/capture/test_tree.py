"""Turn trees: nothing is tokenised twice, and equal turns stay separate."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.harness.tokeniser import laptop_chat

from etude.capture import KeptMessage, Message, Node, Prompt, TurnTree
from etude.capture.digests import conversation_keys
from etude.capture.tree import _KEPT_CONTEXTS
from etude.errors import ContextFull
from etude.harness import standard_tools
from etude.records import Completion, Sampling, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import ToolCall, TurnKind
from etude.testing import make_version

CHAT = laptop_chat()
SIGNATURES = standard_tools().signatures
TOOLS = standard_tools().to_openai()
SAMPLING = Sampling(max_tokens=64, stop_token_ids=CHAT.stop_token_ids, temperature=0.5, seed=7)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def plain(text: str) -> list[int]:
    """The tokens of a complete reply."""
    return [*CHAT.encode(text).tolist(), CHAT.end_id]


def odd(text: str) -> list[int]:
    """The same reply in tokens that the tokeniser would not produce."""
    return [*(int(i) for letter in text for i in CHAT.encode(letter)), CHAT.end_id]


def sampled(prompt: Prompt, ids: list[int], stop: StopReason = StopReason.STOP) -> Completion:
    """A completion of these tokens, with the routes that the prompt lacks."""
    start = prompt.routes_from
    return Completion(
        request_id="r",
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        routes=np.zeros((len(prompt.token_ids) + len(ids) - 1 - start, 1, 1), np.uint8),
        routes_start=start,
        spans=(VersionSpan(make_version(0), len(ids)),),
        stop_reason=stop,
        engine="e",
    )


def tree(max_tokens: int | None = None) -> TurnTree:
    return TurnTree(CHAT, session_id="s", max_tokens=max_tokens)


def answer(one: TurnTree, prompt: Prompt, text: str, ids: list[int] | None = None, **fields: Any) -> Node:
    fields = {"sampling": SAMPLING, **fields}
    return one.record(prompt, sampled(prompt, ids or plain(text)), said(text), **fields)


def talk(one: TurnTree, *texts: str, first: str = "fix") -> list[Node]:
    """A conversation in which the user says `first`, then "go on"."""
    messages, nodes = [user(first)], []
    for text in texts:
        nodes.append(answer(one, one.prompt(messages, SIGNATURES), text))
        messages += [said(text), user("go on")]
    return nodes


def test_a_conversation_becomes_a_chain_of_turns_with_the_tokens_of_the_whole() -> None:
    one = tree()
    nodes = talk(one, "ls", "cat", "test")
    trace = one.trace()
    assert [turn.parent for turn in trace.turns] == [None, 0, 1]
    whole = [user("fix"), said("ls"), user("go on"), said("cat"), user("go on"), said("test")]
    assert (
        trace.path(2).token_ids.tolist()
        == CHAT.encode_conversation(whole, SIGNATURES).tolist()
        == nodes[2].context().tolist()
    )
    assert trace.path(2).mask.sum() == sum(len(plain(text)) for text in ("ls", "cat", "test"))
    assert {node.session_id for node in nodes} == {"s"}
    assert len(one) == 3
    assert one.num_tokens == nodes[2].num_tokens == len(trace.path(2).token_ids)


def test_sampled_tokens_are_never_tokenised_again_and_known_messages_never_rendered() -> None:
    class Watched:
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def encode_prompt(self, messages: list[Message], *rest: Any, **options: Any) -> Any:
            self.calls.append((0, len(messages)))
            return CHAT.encode_prompt(messages, *rest, **options)

        def continuation(self, previous: list[Message], new: list[Message], *rest: Any, **options: Any) -> Any:
            self.calls.append((len(previous), len(new)))
            return CHAT.continuation(previous, new, *rest, **options)

    chat = Watched()
    one = TurnTree(chat, session_id="s")  # type: ignore[arg-type]
    first = one.prompt([user("fix")], SIGNATURES)
    answer(one, first, "ls", odd("ls"))
    second = one.prompt([user("fix"), said("ls"), user("more")], SIGNATURES)
    assert odd("ls") != plain("ls")
    assert second.token_ids.tolist() == [*first.token_ids.tolist(), *odd("ls"), *second.new_ids.tolist()]
    assert chat.calls == [(0, 1), (2, 1)]
    assert second.routes_from == len(first.token_ids) + len(odd("ls")) - 1


def test_a_turn_keeps_its_calls_its_kind_and_how_it_was_sampled() -> None:
    one, call = tree(), ToolCall(name="ls", arguments={}, output="calc.py")
    answer(one, one.prompt([user("fix")], SIGNATURES), "ls", calls=(call,), kind=TurnKind.SUMMARY)
    [turn] = one.trace().turns
    assert (turn.calls, turn.kind, turn.sampling) == ((call,), TurnKind.SUMMARY, SAMPLING)


def test_an_answer_that_was_cut_off_is_ended_by_the_next_prompt() -> None:
    one = tree()
    first = one.prompt([user("fix")], SIGNATURES)
    cut = sampled(first, plain("ls")[:-1], StopReason.LENGTH)
    one.record(first, cut, said("ls"), sampling=SAMPLING)
    assert one.prompt([user("fix"), said("ls"), user("more")], SIGNATURES).new_ids[0] == CHAT.end_id


def test_siblings_that_say_the_same_keep_their_own_tokens_and_sessions() -> None:
    one, messages = tree(), [user("fix")]
    left, right = (one.prompt(messages, SIGNATURES) for _ in range(2))
    answer(one, left, "ls", odd("ls"))
    answer(one, right, "ls", plain("ls"), sampling=Sampling(max_tokens=64, stop_token_ids=(), seed=8))
    assert (left.session_id, right.session_id) == ("s", "s+1")
    both = [one.prompt([*messages, said("ls"), user("more")], SIGNATURES) for _ in range(2)]
    assert [prompt.parent and prompt.parent.session_id for prompt in both] == ["s+1", "s"]
    assert [(prompt.session_id, prompt.fork_from) for prompt in both] == [("s+1", None), ("s", None)]
    assert [len(prompt.token_ids) - len(prompt.new_ids) - len(left.token_ids) for prompt in both] == [
        len(plain("ls")),
        len(odd("ls")),
    ]


def test_a_second_continuation_is_a_branch_with_a_fork_of_the_session() -> None:
    one = tree()
    [stem, *_] = talk(one, "ls", "cat")
    branch = one.prompt([user("fix"), said("ls"), user("another way")], SIGNATURES)
    assert (branch.parent, branch.session_id, branch.fork_from) == (stem, "s+1", "s")
    answer(one, branch, "test")
    trace = one.trace()
    assert [turn.parent for turn in trace.turns] == [None, 0, 0]
    assert trace.leaves() == [1, 2]
    whole = [user("fix"), said("ls"), user("another way"), said("test")]
    assert trace.path(2).token_ids.tolist() == CHAT.encode_conversation(whole, SIGNATURES).tolist()
    on = one.prompt([*whole, user("go on")], SIGNATURES)
    assert (on.session_id, on.fork_from) == ("s+1", None)  # the branch goes on in its own session


def test_a_request_that_is_sent_again_is_the_same_turn() -> None:
    one = tree()
    talk(one, "ls")
    messages = [user("fix"), said("ls"), user("go on")]
    prompts = [one.prompt(messages, SIGNATURES) for _ in range(3)]
    assert [prompt.fork_from for prompt in prompts] == [None, "s", "s"]
    node = answer(one, prompts[0], "cat")
    assert answer(one, prompts[1], "cat") is node
    other = answer(one, prompts[2], "cat", sampling=Sampling(max_tokens=64, stop_token_ids=(), seed=9))
    assert other is not node
    assert [turn.parent for turn in one.trace().turns] == [None, 0, 0]


def test_another_history_or_other_tools_are_another_root_and_a_changed_end_leaves_at_the_last_common_turn() -> None:
    one = tree()
    first, second, _ = talk(one, "ls", "cat", "test")
    long = [user("fix"), said("ls"), user("go on"), said("cat"), user("go on"), said("test")]
    changed = [*long[:4], user("stop"), said("test"), user("more")]
    assert one.prompt(changed, SIGNATURES).parent is second
    assert one.prompt([*long[:3], said("no"), user("more")], SIGNATURES).parent is first
    assert one.prompt([user("fix it"), *long[1:], user("more")], SIGNATURES).parent is None
    assert one.prompt([*long, user("more")], SIGNATURES, tools=TOOLS).parent is None


def test_keys_ignore_how_a_message_is_written_and_tell_histories_apart() -> None:
    one = conversation_keys([], [user("a"), said("b")])
    assert one == conversation_keys([], [{"content": "a", "role": "user"}, said("b")])
    assert one[0] == conversation_keys([], [user("a")])[0]
    assert one[1] != conversation_keys([], [said("b")])[0]
    assert one[0] != conversation_keys([{"type": "function"}], [user("a")])[0]


def test_a_prompt_that_surely_does_not_fit_is_refused_before_it_is_tokenised() -> None:
    one = tree()
    [node] = talk(one, "ls")
    messages = [user("fix"), said("ls"), user("x" * 4000)]
    with pytest.raises(ContextFull):
        one.prompt(messages, SIGNATURES, max_tokens=node.num_tokens + 20)
    with pytest.raises(ContextFull):
        one.prompt([user("x" * 4000)], SIGNATURES, max_tokens=20)
    again = one.prompt(messages, SIGNATURES)
    assert (again.parent, again.fork_from) == (node, "s")  # the refused request had taken the session


def test_the_least_recently_used_turn_is_forgotten_first_and_a_parent_after_its_children() -> None:
    size = talk(tree(), "ls", first="a")[0].num_tokens
    one = tree(max_tokens=3 * size)
    for first in "abc":
        talk(one, "ls", first=first)
    assert one.prompt([user("a"), said("ls"), user("x")], SIGNATURES).parent is not None
    talk(one, "ls", first="d")
    assert one.prompt([user("b"), said("ls"), user("x")], SIGNATURES).parent is None
    assert one.prompt([user("a"), said("ls"), user("x")], SIGNATURES).parent is not None
    assert (len(one), one.num_tokens) == (3, 3 * size)


def test_a_turn_whose_parent_was_forgotten_meanwhile_brings_it_back() -> None:
    size = talk(tree(), "ls", first="a")[0].num_tokens
    one = tree(max_tokens=4 * size)
    [parent] = talk(one, "ls", first="a")
    prompt = one.prompt([user("a"), said("ls"), user("x")], SIGNATURES)
    for first in "bcde":
        talk(one, "ls", first=first)
    answer(one, prompt, "cat")
    assert one.num_tokens <= 4 * size
    trace = one.trace()
    [leaf] = [i for i, turn in enumerate(trace.turns) if turn.parent is not None]
    assert trace.path(leaf).token_ids[: parent.num_tokens].tolist() == parent.context().tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from(["ls", "cat"]), max_size=3)), max_size=14))
def test_a_bounded_tree_counts_what_it_holds_and_holds_the_parents_of_all(talks: list[tuple[str, list[str]]]) -> None:
    one = tree(max_tokens=60)
    for first, texts in talks:
        messages = [user(first)]
        for text in texts:
            prompt = one.prompt(messages, SIGNATURES)
            assert prompt.token_ids.tolist() == CHAT.encode_prompt(messages, SIGNATURES).tolist()
            answer(one, prompt, text)
            messages += [said(text), user("go on")]
            trace = one.trace()  # every parent has an index
            assert len(trace.turns) == len(one)
            total = sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in trace.turns)
            assert total == one.num_tokens <= 60


def test_many_threads_lose_no_turn_and_share_no_session() -> None:
    one, number = tree(), 8
    start = threading.Barrier(number)

    def work(index: int) -> list[str]:
        messages, sessions = [user("fix")], []
        start.wait(timeout=300)
        for i in range(6):
            prompt = one.prompt(messages, SIGNATURES)
            answer(one, prompt, "ls", sampling=Sampling(max_tokens=64, stop_token_ids=(), seed=10 * index + i))
            messages += [said("ls"), user("go on")]
            sessions.append(prompt.session_id)
        return sessions

    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(work, range(number)))
    trace = one.trace()
    assert len(trace.turns) == len(one) == 6 * number
    for depth in range(6):  # equal turns, each continued by one request, or forked
        assert len({sessions[depth] for sessions in found}) == number
    whole = [user("fix"), *[said("ls"), user("go on")] * 5, said("ls")]
    assert all(
        trace.path(leaf).token_ids.tolist() == CHAT.encode_conversation(whole, SIGNATURES).tolist()
        for leaf in trace.leaves()
    )


def test_a_reply_is_found_without_its_reasoning_ids_and_outer_blanks() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "cat", "arguments": {"path": "x", "n": 1}}}
    reply = {"role": "assistant", "content": "so \n", "tool_calls": [call], "reasoning_content": "hm"}
    one = tree()
    first = one.prompt([user("fix")], SIGNATURES)
    node = one.record(first, sampled(first, plain("so")), reply, sampling=SAMPLING)
    repeated = {"function": {"name": "cat", "arguments": '{"n":1, "path":"x"}'}, "type": "function", "id": "b"}
    messages = [user("fix"), {"role": "assistant", "content": "so", "tool_calls": [repeated]}, user("more")]
    assert one.prompt(messages, SIGNATURES).parent is node
    changed = {"function": {"name": "cat", "arguments": {"path": "y", "n": 1}}}
    messages[1] = {"role": "assistant", "content": "so", "tool_calls": [changed]}
    assert one.prompt(messages, SIGNATURES).parent is None


def test_each_prompt_says_why_it_continues_or_starts_a_root() -> None:
    one = tree()
    starts = []

    def ask(messages: list[Message], tools: Any = ()) -> Prompt:
        prompt = one.prompt(messages, SIGNATURES, tools=tools)
        answer(one, prompt, "ls")
        starts.append(prompt.start.value)
        return prompt

    talked = [user("fix"), said("ls"), user("more")]
    ask([user("fix")])
    ask(talked)
    ask([*talked[:2], user("other")])
    ask([user("title of this?")])
    ask([user("fix"), said("edited"), user("more")])
    resampled = ask([user("summary"), said("ls"), user("more")])
    ask([user("fix")], TOOLS)
    assert starts == ["first", "next", "fork", "system", "history", "system", "tools"]
    assert resampled.num_resampled == 1


def test_a_long_conversation_is_read_from_one_array_and_a_branch_of_it_has_the_same_tokens() -> None:
    one = tree()
    nodes = talk(one, *["ls", "cat", "test"] * 30)
    assert [len(node.context_parts()) for node in nodes[-2:]] == [2 * len(nodes) - 2, 1]
    for node in (nodes[-1], nodes[40]):
        turns = [(at.prompt_ids, at.completion.token_ids) for at in node.ancestry()][::-1]
        assert node.context().tolist() == [int(i) for turn in turns for ids in turn for i in ids]


def test_the_contexts_of_many_conversations_are_kept_up_to_a_bound() -> None:
    one = tree()
    nodes = [talk(one, "ls", first=f"fix {i}")[0] for i in range(_KEPT_CONTEXTS + 5)]
    assert sum(len(node.context_parts()) == 1 for node in nodes) == _KEPT_CONTEXTS
    again = one.prompt([user("fix 0"), said("ls"), user("more")], SIGNATURES)
    assert again.parent is nodes[0]
    assert again.token_ids[: nodes[0].num_tokens].tolist() == nodes[0].context().tolist()


def test_only_new_text_is_counted_in_characters_and_no_session_is_taken() -> None:
    one = tree()
    [node] = talk(one, "ls", first="long " * 100)
    messages = [KeptMessage(m) for m in (user("long " * 100), said("ls"), user("x" * 50))]
    assert 50 <= one.num_new_chars(messages) < 60
    prompt = one.prompt(messages, SIGNATURES)
    assert (prompt.parent, prompt.fork_from) == (node, None)
