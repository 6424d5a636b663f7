"""Speculative decoding: the same tokens, log-probabilities and routes with and without it, and its choice of drafts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence as Many
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference import EngineConfig
from etude.inference.config import Speculation
from etude.inference.device_runner import DeviceRunner
from etude.inference.look_up import CANDIDATES, LookUp
from etude.inference.metrics import exposition
from etude.inference.runner import Runner
from etude.inference.scheduler import Plan, Sequence
from etude.inference.speculation import MOST, Speculator, StepCosts, drafter_for
from etude.models import Transformer
from etude.records import Completion, CompletionRequest, Sampling
from etude.records.completion import Traffic

from .drafted import SAMPLINGS, ByHand, Known, NoCosts, alone, answers_of, made_request, said
from .helpers import TINY, ask
from .test_sampling_parameters import TableModel

KINDS = ("look-up", "right", "wrong", "random")


def drafter_of(kind: str, requests: Many[CompletionRequest], seed: int) -> Any:
    if kind == "look-up":
        return LookUp()
    answers = answers_of(requests, ByHand().answers(*requests))
    return Known(answers, right={"right": 1.0, "wrong": 0.0, "random": 0.8}[kind], seed=seed)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_no_bit_depends_on_drafts_across_swaps_stops_preemption_and_cancelled_requests(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    requests = {r.prompt_ids.tobytes(): r for r in (made_request(rng, f"r{i}") for i in range(4))}
    asked = [*requests.values(), made_request(rng, "p", traffic=Traffic.PRODUCTION)]
    if asked[-1].prompt_ids.tobytes() in requests:
        return
    served = ByHand(drafter=drafter_of(kind, asked, seed), max_sequences=3)
    running = [served.submit(request) for request in asked[:-1]]
    events = dict(zip(rng.permutation(10).tolist(), ("swap", "production", "cancel", "swap"), strict=False))
    versions = iter((1, 2))
    for step in range(10):
        served.step()
        match events.get(step):
            case "swap":
                served.swap(next(versions))
            case "production":
                running.append(served.submit(asked[-1]))
            case "cancel":
                running[0].future.cancel()
    kept = [one for one in running if not one.future.cancelled()]
    for one, done in zip(kept, served.finish(kept), strict=True):
        assert said(done) == said(alone(one.request, done))
    assert served.engine.counters.accepted_tokens <= served.engine.counters.drafted_tokens


@pytest.mark.parametrize(("right", "fewest", "most"), [(1.0, 4, 6), (0.0, 41, 42)])
def test_right_drafts_save_steps_and_wrong_ones_none(right: float, fewest: int, most: int) -> None:
    requests = [ask(f"r{i}", 10, 41) for i in range(2)]
    expected = ByHand().answers(*requests)
    served = ByHand(drafter=Known(answers_of(requests, expected), right=right), max_sequences=2 + 2 * MOST)
    assert list(map(said, served.answers(*requests))) == list(map(said, expected))
    seen = served.engine.counters
    assert fewest <= seen.steps <= most
    assert seen.tokens == 82
    assert seen.drafted_tokens > 0
    assert seen.accepted_tokens == (right > 0) * (82 - 2 * seen.steps)
    text = exposition(seen, asyncio.run(served.engine.info()))
    assert f'etude_engine_accepted_tokens_total{{engine="engine"}} {seen.accepted_tokens}' in text


def test_a_draft_ends_with_the_stop_token_the_token_limit_and_the_context() -> None:
    long = ask("r", 10, 246)  # fills the context of 256
    [whole] = ByHand().answers(long)
    ids = whole.token_ids.tolist()
    stop = msgspec.structs.replace(long.sampling, stop_token_ids=(ids[20],))
    for request in (long, msgspec.structs.replace(long, sampling=stop), ask("r", 10, 7)):
        [expected] = ByHand().answers(request)
        served = ByHand(drafter=Known({tuple(long.prompt_ids.tolist()): ids}, right=1.0), max_sequences=1)
        assert said(served.answers(request)[0]) == said(expected)
        assert served.engine.counters.steps < len(expected.token_ids)


def test_the_keys_of_rejected_drafts_are_not_reused_by_the_next_turn() -> None:
    first = ask("one", 20, 12, session="s")
    answers = answers_of([first], ByHand().answers(first))
    served = ByHand(drafter=Known(answers, right=0.0), max_sequences=1)
    [done] = served.answers(first)
    assert served.engine.counters.drafted_tokens > 0
    prompt = np.concatenate([first.prompt_ids, done.token_ids, np.array([3, 4], np.int32)])
    second = ask("two", prompt, 6, session="s", temperature=0.0)
    served.engine._speculator = None  # the drafter does not know this request
    [after] = served.answers(second)
    assert after.num_cached == 31  # all but the last sampled token, whose key was never computed
    assert said(after) == said(ByHand().answers(second)[0])


def test_a_rollout_that_starts_again_is_drafted_anew() -> None:
    rollout = ask("r", 20, 60)
    [expected] = ByHand().answers(rollout)
    served = ByHand(drafter=LookUp(), max_sequences=1)
    running = served.submit(rollout)
    for _ in range(5):
        served.step()
    served.finish([served.submit(ask("p", 20, 4, traffic=Traffic.PRODUCTION))])
    assert served.engine.counters.rollouts_preempted == 1
    assert said(served.finish([running])[0]) == said(expected)


def test_a_stream_gets_every_token_once() -> None:
    request = ask("r", 10, 41)
    [expected] = ByHand().answers(request)
    served = ByHand(drafter=Known(answers_of([request], [expected]), right=0.9), max_sequences=1)

    async def story() -> list[list[int] | Completion]:
        async with served.engine as engine:
            return [part async for part in engine.stream(request)]

    *parts, done = asyncio.run(story())
    assert isinstance(done, Completion)
    assert [token for part in parts for token in part] == expected.token_ids.tolist()  # type: ignore[union-attr]
    assert said(done) == said(expected)


def test_the_runner_of_a_device_verifies_the_same_tokens() -> None:
    requests = [ask(f"r{i}", 6 + i, 20) for i in range(len(SAMPLINGS))]
    requests = [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, **given))
        for r, given in zip(requests, SAMPLINGS, strict=True)
    ]
    found = []
    for kind, right in ((Runner, None), (Runner, 0.8), (DeviceRunner, None), (DeviceRunner, 0.8)):
        answers = answers_of(requests, found[0]) if found else {}
        served = ByHand(drafter=None if right is None else Known(answers, right=right), max_sequences=64)
        model = Transformer(TINY, seed=1)
        served.engine._runner = kind(model, num_slots=64, context_tokens=256)
        served.engine._runner.model = TableModel(model)  # type: ignore[assignment]
        served.engine._runner.kv.vendor = True  # type: ignore[union-attr]  # else kernels would be loaded
        found.append(served.answers(*requests))
        assert (served.engine.counters.accepted_tokens > 50) == (right is not None)
    for others in found[1:]:
        assert list(map(said, others)) == list(map(said, found[0]))


def test_logits_that_are_no_numbers_are_reported_in_drafts_too(capsys: pytest.CaptureFixture[str]) -> None:
    request = ask("r", 10, 12)
    served = ByHand(drafter=Known({tuple(request.prompt_ids.tolist()): [63] * 12}, right=1.0), max_sequences=1)
    running = served.submit(request)
    served.step()
    with torch.no_grad():
        served.model.blocks[1].attention.out.fill_(float("inf"))
    served.finish([running])
    assert "logits are not finite (request r, 11 tokens)" in capsys.readouterr().err


def test_the_setting_chooses_the_drafter_and_is_off_by_default() -> None:
    assert EngineConfig().speculation is Speculation.OFF
    assert drafter_for(Speculation.OFF) is None
    assert ByHand().engine._speculator is None
    served = ByHand(speculation=Speculation.LOOK_UP)
    request = ask("r", np.tile(np.arange(4, dtype=np.int32), 8), 60, temperature=0.0)
    assert said(served.answers(request)[0]) == said(ByHand().answers(request)[0])
    assert served.engine.counters.accepted_tokens > 10  # a greedy tiny model repeats itself


# which drafts are computed


def decoding(number: int, ids: Many[int] = (1, 2, 3), *, max_tokens: int = 100, more: int = 0) -> Sequence:
    """A sequence that runs in slot `number`. `more` is added to its tokens."""
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=())
    prompt = np.array([7, 1, 2, 3, 4, 5, 6], np.int32) + more
    request = CompletionRequest(request_id=f"r{number}", session_id="s", prompt_ids=prompt, sampling=sampling)
    sequence = Sequence(request, arrived=0.0)
    sequence.slot = type("Slot", (), {"index": number})()
    sequence.token_ids, sequence.num_computed = [i + more for i in ids], len(prompt) + len(ids) - 1
    return sequence


def drafted(speculator: Speculator, *sequences: Sequence) -> list[int]:
    """How many drafts the sequences get that have some, in order of slot."""
    return [draft.num_drafted for draft in speculator.with_drafts(Plan([*sequences], [])).drafts]


def measured(costs: StepCosts, seconds: Any, *, rows: Many[tuple[int, int]], times: int = 40) -> StepCosts:
    for _ in range(times):
        for num_sequences, num_drafts in rows:
            costs.add(num_sequences, num_drafts, seconds(num_sequences, num_drafts))
    return costs


def test_drafts_fill_the_rows_that_a_batch_leaves_free_and_a_full_batch_has_none() -> None:
    speculator = Speculator(LookUp(), num_slots=32, vocab_size=64, costs=NoCosts())
    assert drafted(speculator, *(decoding(i) for i in range(32))) == []
    assert drafted(speculator, *(decoding(i) for i in range(31))) == [1]
    assert sum(drafted(speculator, *(decoding(i) for i in range(20)))) == 12
    assert drafted(speculator, decoding(0)) == [MOST]
    small = Speculator(LookUp(), num_slots=1, vocab_size=64, costs=NoCosts())
    assert drafted(small, decoding(0)) == [MOST]
    assert drafted(small, decoding(0, max_tokens=6)) == [2]
    assert drafted(small, decoding(0, max_tokens=4)) == []
    assert drafted(small, decoding(0, [9, 8, 7, 5])) == []


def test_there_are_no_drafts_before_a_step_was_measured_or_where_their_rows_cost_as_much_as_steps() -> None:
    assert drafted(Speculator(LookUp(), num_slots=8, vocab_size=64), decoding(0)) == []
    rows = [(1, 0), (1, 4), (8, 0), (8, 8)]
    cheap = measured(StepCosts(), lambda n, k: 0.003 + 0.00005 * n + 0.00003 * k, rows=rows)
    dear = measured(StepCosts(), lambda n, k: 0.003 * (n + k), rows=rows)
    for costs, num in ((cheap, MOST), (dear, 0)):
        assert sum(drafted(Speculator(LookUp(), num_slots=8, vocab_size=64, costs=costs), decoding(0))) == num
    fixed = measured(StepCosts(), lambda n, k: 0.003 + 0.1 * (k > 0), rows=rows)
    assert drafted(Speculator(LookUp(), num_slots=8, vocab_size=64, costs=fixed), decoding(0)) == []


def test_costs_are_those_of_the_steps_and_are_forgotten() -> None:
    rows = [(1, 0), (2, 0), (8, 0), (1, 4), (8, 8), (3, 16)]
    costs = measured(StepCosts(), lambda n, k: 0.003 + 0.00005 * n + 0.001 * (k > 0) + 0.00003 * k, rows=rows)
    assert costs.step_s(4) == pytest.approx(0.0032, rel=0.02)
    assert costs.drafts_s(10) == pytest.approx(0.0013, rel=0.05)
    assert costs.draft_s == pytest.approx(0.00003, rel=0.2)
    costs.add(4, 0, 60.0)  # the host stood still
    assert costs.step_s(4) < 0.004
    measured(costs, lambda n, k: 0.003, rows=[(4, 0)], times=4000)
    assert costs.drafts_s(10) < 0.0003


def test_sequences_whose_drafts_are_rejected_get_fewer_and_later_some_again() -> None:
    rows = [(1, 0), (1, 4), (8, 0), (8, 8)]
    costs = measured(StepCosts(), lambda n, k: 0.003 + 0.0003 * k, rows=rows)
    speculator = Speculator(LookUp(), num_slots=32, vocab_size=64, costs=costs)
    good, bad, wasted = decoding(0), decoding(1, more=20), list[int]()
    for _ in range(60):
        plan = speculator.with_drafts(Plan([good, bad], []))
        for draft in plan.drafts:
            draft.sequence.num_computed += len(draft.token_ids) if draft.sequence is good else 1
        speculator.record(dataclasses.replace(plan, chunks=[None]), 1.0)  # type: ignore[list-item]  # no time is taken
        wasted.append(sum(draft.num_drafted for draft in plan.drafts if draft.sequence is bad))
        for draft in plan.drafts:
            draft.sequence.num_computed = draft.start
    assert drafted(speculator, good)[0] == MOST
    assert sum(wasted[-30:]) <= 3
    for _ in range(600):
        speculator.with_drafts(Plan([], []))
    assert drafted(speculator, good, bad)[1] > 2


def test_ids_outside_the_vocabulary_are_no_drafts() -> None:
    class Odd(LookUp):
        def draft(self, slot: int, most: int) -> list[int]:
            return [5, 6, 64, 7]

    assert drafted(Speculator(Odd(), num_slots=1, vocab_size=64, costs=NoCosts()), decoding(0)) == [2]


# look-up


def by_scan(own: list[int], others: list[list[int]], most: int) -> list[list[int]]:
    """What may be drafted: after each place with the most agreeing tokens."""
    found: dict[int, list[list[int]]] = {}
    for tokens in [own, *others]:
        for place in range(3, len(tokens)):
            num = 0
            while num < min(16, place, len(own)) and tokens[place - 1 - num] == own[-1 - num]:
                num += 1
            text = tokens[place : place + most]
            if tokens is own:
                text = (text * most)[:most]
            if num >= 3:
                found.setdefault(num, []).append(text)
    return found[max(found)] if found else []


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=3), st.integers(1, 5))
def test_look_up_drafts_what_followed_the_longest_agreement(texts: list[list[int]], most: int) -> None:
    drafter = LookUp()
    for slot, text in enumerate(texts):
        drafter.begin(slot, text[:2])
        for token in text[2:]:
            drafter.extend(slot, [token])
    for slot, text in enumerate(texts):
        able = by_scan(text, [other for other in texts if other is not text], most)
        found = drafter.draft(slot, most)
        places = sum(max(0, len(one) - 2) for one in texts)
        if not able or places <= CANDIDATES:  # all places were looked at
            assert found in able or not (able or found)
        assert not found or len(found) <= most


def test_look_up_takes_the_place_with_the_longest_agreement_and_the_latest_of_equal_ones() -> None:
    drafter = LookUp()
    drafter.begin(0, [8, 1, 2, 3, 10, 9, 1, 2, 3, 11, 7, 1, 2, 3, 12, 8, 1, 2, 3])
    assert drafter.draft(0, 1) == [10]
    drafter.begin(1, [5, 1, 2, 3])
    assert drafter.draft(1, 1) == [12]  # in slot 0, whose last place is its end


def test_look_up_continues_a_repetition_beyond_its_end() -> None:
    drafter = LookUp()
    drafter.begin(0, [1, 2, 3, 1, 2, 3, 1])
    assert drafter.draft(0, 7) == [2, 3, 1, 2, 3, 1, 2]


def test_look_up_keeps_the_tokens_of_a_conversation_and_forgets_those_of_another_request() -> None:
    drafter = LookUp()
    drafter.begin(0, [1, 2, 3, 4])
    drafter.begin(0, [1, 2, 3, 4, 9, 1, 2, 3])
    assert drafter.draft(0, 2) == [4, 9]
    drafter.begin(0, [7, 7])
    assert drafter.draft(0, 2) == []
    drafter.begin(1, [5, 1, 2, 3])
    assert drafter.draft(1, 2) == []


def test_the_memory_of_look_up_is_that_of_its_slots() -> None:
    drafter, rng = LookUp(), np.random.default_rng(0)
    for i in range(300):
        drafter.begin(i % 2, rng.integers(0, 50, 200).tolist())
        drafter.draft(i % 2, 4)
    assert sum(map(len, drafter._tokens.values())) == 400
    assert sum(map(len, drafter._older.values())) == 2 * 198


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_in_a_hundred_thousand_tokens_no_bit_depends_on_drafts_over_swaps_stops_and_preemption(
    temperature: float,
) -> None:
    rng, sizes = np.random.default_rng(int(10 * temperature)), {"context_tokens": 512, "max_sequences": 128}

    def request(number: int, **fields: Any) -> CompletionRequest:
        asked = ask(f"r{number}", np.tile(rng.integers(0, 64, 8).astype(np.int32), 4), 400, **fields)
        stops = (number % 64,) if number % 4 == 0 else ()
        sampling = msgspec.structs.replace(asked.sampling, temperature=temperature, stop_token_ids=stops)
        return msgspec.structs.replace(asked, sampling=sampling)

    served = ByHand(speculation=Speculation.LOOK_UP, **sizes)
    running = [served.submit(request(number)) for number in range(100)]
    for step in range(1, 200):
        served.step()
        if step % 60 == 0:
            served.swap(step // 60)
        if step == 20:  # more than there are free slots
            running += [served.submit(request(100 + number, traffic=Traffic.PRODUCTION)) for number in range(60)]
    done = served.finish(running)
    for one, completion in zip(running, done, strict=True):
        assert said(completion) == said(alone(one.request, completion, context_tokens=512))
    counters = served.engine.counters
    assert counters.tokens > 100_000 / 3
    assert counters.accepted_tokens > 20  # random weights repeat themselves little
    assert counters.rollouts_preempted > 0
    assert any(len(completion.token_ids) < 400 for completion in done)
    assert {span.version.step for completion in done for span in completion.spans} == {0, 1, 2, 3}
