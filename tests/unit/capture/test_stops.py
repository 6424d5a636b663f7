"""Stop texts: what of a cut turn stays in the conversation, and that all of it is trained once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.capture.test_tree import CHAT, SAMPLING, SIGNATURES, plain, said, sampled, tree, user
from tests.unit.gateway.sdk import qwen
from tests.unit.gateway.sdk import said as tokens_of

from etude.capture import Cut, Node, TurnTree, complete_until_stop, cut_at_stop
from etude.capture.stops import stop_watch
from etude.capture.tree import Start
from etude.errors import EngineError
from etude.experience.packing import paths
from etude.records import Completion, CompletionRequest, VersionSpan
from etude.records.completion import StopReason
from etude.testing import EnginePolicy, ScriptedEngine, StreamingPolicy, make_version

REPLY = "look at it\nObservation: none of this happened"
STOP = "\nObservation:"


def cut_turn(one: TurnTree, reply: str = REPLY, stop: str = STOP, ids: list[int] | None = None) -> tuple[Node, Cut]:
    prompt = one.prompt([user("fix")], SIGNATURES)
    completion = sampled(prompt, ids or plain(reply))
    cut = cut_at_stop(CHAT, completion, reply, [stop], num_prompt=len(prompt.token_ids))
    assert cut is not None
    return one.record(prompt, completion, said(cut.text), sampling=SAMPLING, cut=cut), cut


def whole(ids: list[int]) -> Completion:
    """A completion of two versions, with other numbers at each position, to a prompt of 10 tokens."""
    n = len(ids)
    return Completion(
        request_id="r",
        token_ids=np.array(ids, np.int32),
        logprobs=np.arange(n, dtype=np.float32),
        routes=np.arange(n + 4, dtype=np.uint8).reshape(-1, 1, 1),
        routes_start=5,
        spans=(
            VersionSpan(make_version(0), 0),
            VersionSpan(make_version(1), n // 2),
            VersionSpan(make_version(2), n - n // 2),
        ),
        stop_reason=StopReason.LENGTH,
        engine="e",
        top_ids=np.arange(2 * n, dtype=np.int32).reshape(-1, 2),
        top_logprobs=np.zeros((n, 2), np.float32),
    )


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, CHAT.vocab_size - 1), max_size=30)
    | st.text("abeü \n", max_size=30).map(lambda text: CHAT.encode(text).tolist()),
    st.lists(st.sampled_from(["a", "e ", "ü", "b\na", "\n"]), max_size=2),
)
def test_a_cut_is_in_whole_tokens_and_says_what_the_client_got(ids: list[int], stops: list[str]) -> None:
    text, n = CHAT.decode(ids), len(ids)
    completion = whole(ids)
    cut = cut_at_stop(CHAT, completion, text, stops, num_prompt=10)
    if cut is None:
        assert not any(stop in text for stop in stops)
        return
    kept, tail = cut.kept.token_ids.tolist(), cut.tail.token_ids.tolist()
    assert (kept + tail) == ids[: len(kept + tail)] == cut.sampled.token_ids.tolist()
    assert tail
    assert cut.text == CHAT.decode(kept) + cut.rest
    assert text.startswith(cut.text + cut.stop_text)
    assert not any(stop in cut.text for stop in stops)
    assert CHAT.decode(kept + tail).startswith(cut.text + cut.stop_text)
    assert not CHAT.decode((kept + tail)[:-1]).startswith(cut.text + cut.stop_text)
    both = [cut.kept, cut.tail]
    for name in ("logprobs", "top_ids", "routes"):
        parts = np.concatenate([getattr(one, name) for one in both])
        assert (parts == getattr(completion, name)[: len(parts)]).all(), name
        assert (parts == getattr(cut.sampled, name)).all(), name
    assert cut.kept.routes_start == 5
    assert cut.tail.routes_start == 5 + len(cut.kept.routes) == 10 + len(kept) - 1
    assert cut.tail.routes_start + len(cut.tail.routes) == 10 + len(kept + tail) - 1
    steps = [np.repeat([s.version.step for s in one.spans], [s.num_tokens for s in one.spans]) for one in both]
    assert np.concatenate(steps).tolist() == ([1] * (n // 2) + [2] * n)[: len(kept + tail)]
    assert cut.kept.spans[0].version.step == 0


@settings(max_examples=300)
@given(
    st.text("abü \n", max_size=20),
    st.lists(st.text("abü \n", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=20),
)
def test_a_stop_text_is_seen_when_it_is_complete_and_later_tokens_do_not_move_the_cut(
    reply: str, stops: list[str], sizes: list[int]
) -> None:
    ids, at = CHAT.encode(reply).tolist(), 0
    enough = stop_watch(CHAT, stops, in_reasoning=None)
    assert enough is not None
    seen, pieces = False, itertools.chain(sizes, itertools.repeat(1))
    while at < len(ids) and not seen:
        start, at = at, min(at + next(pieces), len(ids))
        seen = enough(ids[start:at])
    assert seen == any(stop in CHAT.decode(ids[:at]) for stop in stops)
    cuts = set()
    for end in range(at, len(ids) + 1) if seen else ():
        cut = cut_at_stop(CHAT, whole(ids[:end]), "", stops, num_prompt=10)
        assert cut is not None
        cuts.add((cut.text, cut.stop_text, *(tuple(one.token_ids) for one in (cut.kept, cut.tail, cut.sampled))))
    assert len(cuts) == seen


def test_a_stop_text_in_reasoning_or_in_a_call_ends_nothing() -> None:
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "STOP"}}\n</tool_call>'
    for in_reasoning, reply, sees in [
        (False, "<think>\na STOP</think>\n4", False),
        (False, call, False),
        (True, "a STOP</think>\nfour STOP and more", True),
    ]:
        enough = stop_watch(qwen(), ["STOP"], in_reasoning=in_reasoning)
        assert enough is not None
        seen = [enough([token]) for token in tokens_of(reply)]
        assert any(seen) == sees
        assert not seen[len(seen) // 2]


class Breaking(StreamingPolicy):
    """A policy whose engine is lost after the first token of a stream."""

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        yield [1]
        raise EngineError("engine-0 is gone", hint="ask again")


def test_a_request_is_ended_at_its_stop_text_and_sampled_again_when_its_engine_is_lost() -> None:
    prompt, until = tree().prompt([user("fix")], SIGNATURES), CHAT.encode(f"look at it{STOP}").tolist()
    request = CompletionRequest(request_id="r", session_id="s", prompt_ids=prompt.token_ids, sampling=SAMPLING)
    for kind, found in ((StreamingPolicy, until), (Breaking, plain(REPLY)), (EnginePolicy, plain(REPLY))):
        policy = kind(ScriptedEngine([plain(REPLY)]))
        sampled = asyncio.run(complete_until_stop(policy, request, CHAT, [STOP], in_reasoning=None))
        assert sampled.token_ids.tolist() == found


def test_without_routes_a_cut_has_none() -> None:
    one = tree()
    prompt = one.prompt([user("fix")], SIGNATURES)
    whole = sampled(prompt, plain(REPLY))
    end = whole.routes_start + len(whole.routes)
    bare = msgspec.structs.replace(whole, routes=whole.routes[:0], routes_start=end)
    cut = cut_at_stop(CHAT, bare, REPLY, [STOP], num_prompt=len(prompt.token_ids))
    assert cut is not None
    assert (len(cut.kept.routes), len(cut.tail.routes)) == (0, 0)
    one.record(prompt, bare, said(cut.text), sampling=SAMPLING, cut=cut)
    assert len(one.trace().path(1).routes) == 0


def test_a_request_that_repeats_a_cut_reply_continues_its_tokens() -> None:
    one = tree()
    node, cut = cut_turn(one)
    assert (cut.text, cut.rest) == ("look at it", "")
    prompt = one.prompt([user("fix"), said("look at it"), user("a.py")], SIGNATURES)
    assert (prompt.parent, prompt.start, prompt.num_resampled) == (node, Start.NEXT, 0)
    kept = node.prompt_ids.tolist() + CHAT.encode("look at it").tolist()
    assert prompt.token_ids[: len(kept)].tolist() == kept
    assert prompt.token_ids[len(kept)] == CHAT.end_id
    assert "Observation" not in CHAT.decode(prompt.token_ids)
    assert prompt.routes_from == len(kept) - 1


def test_what_the_client_got_of_a_token_with_the_beginning_of_the_stop_text_is_in_the_context() -> None:
    both = next(i for i in range(CHAT.vocab_size) if len(CHAT.decode([i])) == 2 and CHAT.decode([i]).isalpha())
    letter, stop = CHAT.decode([both])
    ids = [*CHAT.encode("look ").tolist(), both, CHAT.end_id]
    one = tree()
    node, cut = cut_turn(one, f"look {letter}{stop}", stop, ids)
    assert (cut.rest, cut.tail.token_ids.tolist()) == (letter, [both])
    prompt = one.prompt([user("fix"), said(f"look {letter}"), user("on")], SIGNATURES)
    assert prompt.parent is node
    read = [*node.prompt_ids, *CHAT.encode("look "), *CHAT.encode(letter), CHAT.end_id]
    assert prompt.token_ids[: len(read)].tolist() == read
    assert one.prompt_tokens([user("fix"), said(f"look {letter}"), user("on")], SIGNATURES) == len(prompt.token_ids)


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_stop_text_is_trained_once_and_is_in_no_context(goes_on: bool) -> None:
    one = tree()
    _, cut = cut_turn(one)
    if goes_on:
        prompt = one.prompt([user("fix"), said(cut.text), user("a.py")], SIGNATURES)
        one.record(prompt, sampled(prompt, plain("done")), said("done"), sampling=SAMPLING)
    trace = one.trace()
    assert [turn.parent for turn in trace.turns] == ([None, 0, 0] if goes_on else [None, 0])
    assert len(trace.turns[-1].prompt_ids) == 0
    trained = [path.token_ids[path.mask].tolist() for path in paths(trace)]
    head, tail = cut.kept.token_ids.tolist(), cut.tail.token_ids.tolist()
    assert CHAT.decode(tail) == STOP
    assert trained == ([[*head, *plain("done")], tail] if goes_on else [[*head, *tail]])
    for leaf in trace.leaves():
        assert len(trace.path(leaf).routes) == len(trace.path(leaf).token_ids)


def test_a_gateways_tree_forgets_a_cut_turn_like_others() -> None:
    one = tree(max_tokens=1)
    cut_turn(one)
    assert (len(one), one.num_tokens) == (0, 0)
