"""Stop texts: what of a cut turn stays in the conversation, and that all of it is trained once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.capture.test_tree import CHAT, SAMPLING, SIGNATURES, plain, said, sampled, tree, user

from etude.capture import Cut, Node, TurnTree, cut_at_stop
from etude.capture.tree import Start
from etude.experience.packing import paths
from etude.records import Completion, VersionSpan
from etude.records.completion import StopReason
from etude.testing import make_version

REPLY = "look at it\nObservation: none of this happened"
STOP = "\nObservation:"


def cut_turn(one: TurnTree, reply: str = REPLY, stop: str = STOP, ids: list[int] | None = None) -> tuple[Node, Cut]:
    prompt = one.prompt([user("fix")], SIGNATURES)
    completion = sampled(prompt, ids or plain(reply))
    cut = cut_at_stop(CHAT, completion, reply, [stop], num_prompt=len(prompt.token_ids))
    assert cut is not None
    return one.record(prompt, completion, said(cut.text), sampling=SAMPLING, cut=cut), cut


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, CHAT.vocab_size - 1), max_size=30)
    | st.text("abeü \n", max_size=30).map(lambda text: CHAT.encode(text).tolist()),
    st.lists(st.sampled_from(["a", "e ", "ü", "b\na", "\n"]), max_size=2),
)
def test_a_cut_is_in_whole_tokens_and_says_what_the_client_got(ids: list[int], stops: list[str]) -> None:
    text, n = CHAT.decode(ids), len(ids)
    completion = Completion(
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
    cut = cut_at_stop(CHAT, completion, text, stops, num_prompt=10)
    if cut is None:
        assert not any(stop in text for stop in stops)
        return
    kept, tail = cut.kept.token_ids.tolist(), cut.tail.token_ids.tolist()
    assert (kept + tail) == ids[: len(kept + tail)]
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
    assert cut.kept.routes_start == 5
    assert cut.tail.routes_start == 5 + len(cut.kept.routes) == 10 + len(kept) - 1
    assert cut.tail.routes_start + len(cut.tail.routes) == 10 + len(kept + tail) - 1
    steps = [np.repeat([s.version.step for s in one.spans], [s.num_tokens for s in one.spans]) for one in both]
    assert np.concatenate(steps).tolist() == ([1] * (n // 2) + [2] * n)[: len(kept + tail)]
    assert cut.kept.spans[0].version.step == 0


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
