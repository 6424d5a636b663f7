"""Serialisation of records; untrusted bytes give a record or ValueError."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.records import Completion, CompletionRequest, Sample, Sampling, Trace, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import Turn
from etude.records.sample import Origin
from etude.records.wire import from_json, pack, to_json, unpack

V1, V2 = Version(1, "0" * 8, "a" * 64), Version(2, "0" * 8, "b" * 64)


def completion(prompt: int, n: int, *, routes_start: int, spans=None) -> Completion:
    context = prompt + n
    return Completion(
        request_id="r",
        token_ids=np.arange(n, dtype=np.int32),
        logprobs=-np.arange(n, dtype=np.float32),
        routes=np.full((context - 1 - routes_start, 2, 1), 3, np.uint8),
        routes_start=routes_start,
        spans=spans or (VersionSpan(V1, n),),
        stop_reason=StopReason.STOP,
        engine="e",
    )


def turn(parent, prompt_tokens, prompt_total, n, routes_start, spans=None) -> Turn:
    ids = np.arange(100, 100 + prompt_tokens, dtype=np.int32)
    done = completion(prompt_total, n, routes_start=routes_start, spans=spans)
    return Turn(parent=parent, prompt_ids=ids, completion=done, sampling=Sampling(max_tokens=n, stop_token_ids=()))


def test_a_completion_comes_back_the_same_in_both_forms():
    sent = completion(4, 3, routes_start=1)
    for got in (unpack(pack(sent), Completion), from_json(to_json(sent), Completion)):
        assert pack(got) == pack(sent)
        assert got.routes.dtype == np.uint8
        assert got.routes.shape == (5, 2, 1)


def test_a_completion_whose_parts_disagree_is_refused():
    with pytest.raises(ValueError, match="different lengths"):
        completion(4, 3, routes_start=0, spans=(VersionSpan(V1, 2),))


@pytest.mark.parametrize(
    "array",
    [
        ["float64", [1], b"\0" * 8],
        ["int32", [2], b"\0" * 4],
        ["int32", [-1], b""],
        ["int32", [1 << 40, 1 << 40], b""],
        ["int32", [1] * 9, b"\0" * 4],
        ["object", [1], b"\0" * 8],
        ["int32", "x", b""],
        [1],
    ],
)
def test_an_array_that_does_not_fit_its_bytes_is_refused(array):
    raw = msgspec.msgpack.decode(pack(completion(2, 1, routes_start=0)))
    raw["token_ids"] = array
    with pytest.raises(ValueError):  # noqa: PT011  msgspec wraps the message
        unpack(msgspec.msgpack.encode(raw), Completion)


GOOD = pack(
    CompletionRequest(
        request_id="a",
        session_id="s",
        prompt_ids=np.arange(5, dtype=np.int32),
        sampling=Sampling(max_tokens=4, stop_token_ids=(1,)),
    )
)


@settings(max_examples=400)
@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_mutated_bytes_give_a_record_or_a_value_error(at, byte, cut):
    mutated = bytearray(GOOD)
    mutated[at] = byte
    for data in (bytes(mutated), bytes(mutated[:cut])):
        try:
            assert isinstance(unpack(data, CompletionRequest), CompletionRequest)
        except ValueError:
            continue


def test_a_path_lays_the_turns_flat_with_masks_versions_and_routes():
    first = turn(None, 4, 4, 3, routes_start=0)
    second = turn(0, 2, 9, 2, routes_start=6, spans=(VersionSpan(V1, 1), VersionSpan(V2, 1, kv_epoch=1)))
    path = Trace((first, second)).path(1)
    assert path.mask.tolist() == [False] * 4 + [True] * 3 + [False] * 2 + [True] * 2
    assert path.steps.tolist() == [1] * 9 + [1, 2]
    assert path.kv_epochs.tolist() == [0] * 10 + [1]
    assert (path.routes[:-1] == 3).all()
    assert (path.routes[-1] == 255).all()
    assert path.digest == ""


def test_a_route_that_was_recorded_first_stays():
    first = turn(None, 4, 4, 3, routes_start=0)
    second = turn(0, 2, 9, 2, routes_start=0)  # a re-prefill under another version recorded other routes
    second = msgspec.structs.replace(
        second, completion=msgspec.structs.replace(second.completion, routes=second.completion.routes + np.uint8(1))
    )
    path = Trace((first, second)).path(1)
    assert (path.routes[:6] == 3).all()
    assert (path.routes[6:-1] == 4).all()


def test_leaves_are_the_turns_nobody_continues():
    trace = Trace((turn(None, 1, 1, 1, 0), turn(0, 1, 3, 1, 1), turn(0, 1, 3, 1, 1)))
    assert trace.leaves() == [1, 2]


def test_routes_that_reach_past_the_path_are_refused():
    bad = turn(None, 2, 5, 3, routes_start=0)
    with pytest.raises(ValueError, match="do not fit its tokens"):
        Trace((bad,)).path(0)


def test_the_oldest_version_behind_a_token_is_that_of_the_keys_it_attended_to():
    spans = (VersionSpan(V1, 0), VersionSpan(V2, 3, kv_epoch=1))  # swapped in the middle of the prompt
    second = (VersionSpan(V2, 1), VersionSpan(Version(5, "0" * 8, "c" * 64), 2, kv_epoch=1))
    trace = Trace((turn(None, 4, 4, 3, routes_start=0, spans=spans), turn(0, 2, 9, 3, routes_start=6, spans=second)))
    assert trace.turns[0].completion.oldest_steps.tolist() == [1, 1, 1]
    assert trace.turns[1].completion.oldest_steps.tolist() == [2, 2, 2]
    path = trace.path(1)
    assert path.steps.tolist() == [1] * 4 + [2] * 3 + [2] * 2 + [2, 5, 5]
    assert path.oldest_steps.tolist() == [1] * 7 + [2] * 5
    assert Sample.uniform("r", path, 1.0).oldest_step == 1
    assert not Sample.uniform("r", path, 1.0).single_version


def test_keys_that_were_computed_anew_have_no_age():
    spans = (VersionSpan(V1, 2), VersionSpan(V2, 1))
    done = completion(4, 3, routes_start=0, spans=spans)
    assert done.oldest_steps.tolist() == [1, 1, 2]
    path = Trace((turn(None, 4, 4, 3, routes_start=0, spans=spans),)).path(0)
    assert path.oldest_steps[path.mask].tolist() == [1, 1, 2]


def test_routes_of_two_shapes_or_dtypes_are_of_no_one_model():
    first, second = turn(None, 4, 4, 3, routes_start=0), turn(0, 2, 9, 2, routes_start=6)
    routes = second.completion.routes
    for other in (routes[:, :1], routes.astype(np.uint16)):
        done = msgspec.structs.replace(second.completion, routes=other)
        with pytest.raises(ValueError, match="do not fit"):
            Trace((first, msgspec.structs.replace(second, completion=done))).path(1)


def test_a_completion_without_routes_leaves_its_positions_missing():
    first, second = turn(None, 4, 4, 3, routes_start=0), turn(0, 2, 9, 2, routes_start=6)
    bare = msgspec.structs.replace(second.completion, routes=np.zeros((0, 2, 1), np.uint8), routes_start=10)
    path = Trace((first, msgspec.structs.replace(second, completion=bare))).path(1)
    assert (path.routes[:6] == 3).all()
    assert (path.routes[6:] == 255).all()


def test_a_sample_has_one_advantage_for_each_token_with_loss_and_comes_back_from_bytes():
    path = Trace((turn(None, 4, 4, 3, routes_start=0),)).path(0)
    sample = Sample(
        rollout_id="r",
        path=path,
        advantages=np.array([0.5, 0.0, -1.0], np.float32),
        temperatures=np.array([1.0, 1.0, 0.5], np.float32),
        origin=Origin.PRODUCTION,
    )
    assert pack(unpack(pack(sample), Sample)) == pack(sample)
    assert Sample.uniform("r", path, 0.1).advantages.tolist() == [np.float32(0.1)] * 3
    for name in ("advantages", "temperatures"):
        with pytest.raises(ValueError, match=f"{name} of shape .2,., expected .3,."):
            Sample(**{"rollout_id": "r", "path": path, "advantages": sample.advantages, name: np.zeros(2, np.float32)})


def test_records_from_before_the_further_sampling_parameters_are_still_read():
    old = {"max_tokens": 3, "stop_token_ids": [1], "temperature": 0.5, "seed": 7}
    sampling = unpack(msgspec.msgpack.encode(old), Sampling)
    assert sampling == Sampling(max_tokens=3, stop_token_ids=(1,), temperature=0.5, seed=7)
    assert sampling.plain
    assert msgspec.msgpack.decode(pack(sampling)) == old, "and an older reader reads a plain request"
    got = unpack(pack(completion(2, 1, routes_start=0)), Completion)
    assert got.top_ids.shape == got.top_logprobs.shape == (0, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"top_p": 0.9},
        {"top_k": 1},
        {"min_p": 0.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((3, 1.0),)},
        {"min_tokens": 1},
        {"grammar": "{}"},
    ],
)
def test_each_parameter_that_changes_the_distribution_is_not_plain_and_comes_back(changed):
    sampling = Sampling(max_tokens=3, stop_token_ids=(1,), **changed)
    assert not sampling.plain
    assert unpack(pack(sampling), Sampling) == from_json(to_json(sampling), Sampling) == sampling


def test_the_likeliest_tokens_come_back_and_must_have_a_row_for_each_token():
    ids, logprobs = np.array([[1, 2], [3, 4]], np.int32), np.array([[-0.5, -1.0], [-0.1, -3.0]], np.float32)
    sent = msgspec.structs.replace(completion(2, 2, routes_start=0), top_ids=ids, top_logprobs=logprobs)
    got = unpack(pack(sent), Completion)
    assert (got.top_ids.tolist(), got.top_logprobs.tolist()) == (ids.tolist(), logprobs.tolist())
    with pytest.raises(ValueError, match=r"top_ids and top_logprobs are not \[2, K\]"):
        msgspec.structs.replace(sent, top_ids=ids[:1], top_logprobs=logprobs[:1]).__post_init__()
    with pytest.raises(ValueError, match=r"top_ids and top_logprobs are not \[2, K\]"):
        Completion(**{f: getattr(sent, f) for f in sent.__struct_fields__} | {"top_ids": ids[:, :1]})
