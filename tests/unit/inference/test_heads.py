"""Drafts by MTP heads: no token changes, and each draft is that of the heads on the tokens that a sequence has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import EngineError
from etude.inference import EngineConfig
from etude.inference import heads as heads_module
from etude.inference.config import Speculation
from etude.inference.device_runner import runner_for
from etude.inference.engine import ReferenceEngine
from etude.inference.metrics import Load
from etude.inference.scheduler import Sequence
from etude.models import ModelConfig, Transformer
from etude.models.attention import Packed
from etude.models.family_lookup import family_of
from etude.models.mtp import apply_head, head_logits, trunk_output
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.sampling import sample
from etude.records.completion import Sampling, Traffic

from .drafted import ByHand, NoCosts, alone, made_request, said
from .helpers import TINY, ask, version

HEADS = Speculation.HEADS


@torch.no_grad()
def foreseen(step: int, *, heads: int, sizes: ModelConfig = TINY, noise: float = 0.3) -> Transformer:
    """A model at version `step` whose heads often agree with its trunk: both mostly look at the last token."""
    model = Transformer(replace(sizes, mtp_heads=heads), seed=1 + step, operators=Exact())
    for block in (*model.blocks, *(head.block for head in model.mtp)):
        for name, parameter in block.named_parameters():
            if name.endswith((".out", ".down")):
                parameter *= noise
    for head in model.mtp:
        head.projection.copy_(torch.eye(*head.projection.shape))
    return model


def drafts_of(model: Transformer, ids: list[int], most: int, sampling: Sampling) -> list[int]:
    """Return the drafts after a sequence, from a forward pass over all of it."""
    num, tokens, last = len(ids) - 1, list(ids), len(model.mtp) - 1
    before = trunk_output(model, model.run(torch.tensor(ids[:-1])).stream)
    for step in range(most):
        head = min(step, last)
        if step <= last:
            inputs, following = before, tokens[step + 1 : step + 1 + num]
        else:
            inputs, following = torch.cat([inputs, before[-1:]]), [*following, tokens[-1]]
        before, _ = apply_head(model, head, inputs, torch.tensor(following), Packed([len(inputs)], model.operators))
        place = len(tokens)
        drawn, _ = sample(
            head_logits(model, before[-1:]), [sampling.temperature], [sampling.seed], [place], model.operators
        )
        tokens.append(int(drawn))
    return tokens[len(ids) :]


class Compared(ByHand):
    """An engine whose drafts are compared with those of forward passes over whole sequences."""

    def __init__(self, *, heads: int, **settings: Any) -> None:
        self.num_drafts = 0
        super().__init__(make=partial(foreseen, heads=heads), speculation=HEADS, **settings)
        drafter = self.engine._speculator._together  # type: ignore[union-attr]
        assert drafter is not None
        original = drafter.draft_all

        @torch.inference_mode()
        def compared(wanted: Many[tuple[Sequence, int]]) -> list[list[int]]:
            found = original(wanted)
            for (sequence, most), drafts in zip(wanted, found, strict=True):
                ids = [*sequence.request.prompt_ids.tolist(), *sequence.token_ids]
                assert drafts in ([], drafts_of(self.model, ids, most, sequence.request.sampling))
                self.num_drafts += len(drafts)
            return found

        drafter.draft_all = compared  # type: ignore[method-assign]


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("catch_up", [4, 256])
def test_drafts_are_those_of_the_heads_on_the_accepted_tokens_whatever_was_rejected_shared_or_left_out(
    heads: int, catch_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, "CATCH_UP", catch_up)
    rng, served = np.random.default_rng(heads), Compared(heads=heads, max_sequences=5)
    prompt = rng.integers(0, TINY.vocab_size, 70).astype(np.int32)
    requests = [ask(f"r{i}", prompt, 30) for i in range(3)]  # the keys of the first one are copied
    requests += [ask(f"s{i}", int(rng.integers(1, 60)), int(rng.integers(1, 30))) for i in range(3)]
    running = [served.submit(request) for request in requests]
    for _ in range(4):
        served.step()
    running.append(served.submit(ask("p", 20, 8, traffic=Traffic.PRODUCTION)))  # one rollout starts again
    done = served.finish(running)
    served.answers(ask("turn", np.concatenate([prompt, done[0].token_ids[:9], prompt[:3]]), 20))  # in a slot with keys
    for one, completion in zip(running, done, strict=True):
        assert said(completion) == said(alone(one.request, completion, partial(foreseen, heads=0)))
    seen = served.engine.counters
    assert served.num_drafts == seen.drafted_tokens > 20
    assert seen.drafted_tokens > seen.accepted_tokens > 8
    assert seen.rollouts_preempted == 1
    assert seen.cached_requests >= 3


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
def test_no_bit_depends_on_heads_across_swaps_stops_preemption_and_cancelled_requests(seed: int, heads: int) -> None:
    rng, make = np.random.default_rng(seed), partial(foreseen, heads=heads)
    requests = {r.prompt_ids.tobytes(): r for r in (made_request(rng, f"r{i}") for i in range(4))}
    served = ByHand(make=make, speculation=HEADS, max_sequences=3)
    running = [served.submit(request) for request in requests.values()]
    events = dict(zip(rng.permutation(10).tolist(), ("swap", "production", "cancel", "swap"), strict=False))
    versions = iter((1, 2))
    for step in range(10):
        served.step()
        match events.get(step):
            case "swap":
                served.swap(next(versions))
            case "production":
                running.append(served.submit(made_request(rng, "p", traffic=Traffic.PRODUCTION)))
            case "cancel":
                running[0].future.cancel()
    kept = [one for one in running if not one.future.cancelled()]
    for one, done in zip(kept, served.finish(kept), strict=True):
        assert said(done) == said(alone(one.request, done, partial(foreseen, heads=0)))


def test_heads_change_with_the_trunk_when_a_version_is_swapped_in() -> None:
    served, other = Compared(heads=1, max_sequences=1), foreseen(1, heads=1)
    served.swap(1)
    swapped = dict(served.model.mtp.named_parameters())
    assert all(torch.equal(swapped[name], one) for name, one in other.mtp.named_parameters())
    served.answers(ask("r", 20, 30))  # each draft is compared
    assert served.num_drafts > 10


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_the_same_random_number_draws_draft_and_token(temperature: float) -> None:
    served = ByHand(make=partial(foreseen, heads=1, noise=0.0), speculation=HEADS, max_sequences=8)
    request = ask("r", 10, 40, temperature=temperature)
    [expected] = ByHand(make=partial(foreseen, heads=0, noise=0.0)).answers(request)
    assert said(served.answers(request)[0]) == said(expected)
    counters = served.engine.counters  # both distributions are equal, so nearly all drafts are right
    assert counters.accepted_tokens >= 0.9 * (counters.drafted_tokens - 16)
    assert counters.steps < 20


def test_the_acceptance_of_heads_is_counted_as_that_of_any_drafter() -> None:
    served, load = ByHand(make=partial(foreseen, heads=1), speculation=HEADS, max_sequences=8), Load()
    served.answers(ask("r", 10, 40))
    text = asyncio.run(served.engine.metrics())
    assert f'drafted_tokens_total{{engine="engine"}} {served.engine.counters.drafted_tokens}' in text
    event = load.since(served.engine.counters, asyncio.run(served.engine.info()), wall_s=1.0)
    assert event["drafted_tokens"] > event["accepted_tokens"] > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3"])
@pytest.mark.parametrize("native", [False, True])
def test_each_family_drafts_with_its_heads(family: str, native: bool) -> None:
    sizes = replace(family_of(family).tiny(), context_tokens=256, mtp_heads=2)
    requests = [ask(f"r{i}", ids, 40) for i, ids in enumerate(np.arange(24, dtype=np.int32).reshape(2, 12))]
    found = []
    for speculation in (Speculation.OFF, HEADS):
        model = foreseen(0, heads=2, sizes=sizes)
        if native:
            model = Transformer(sizes, seed=2, operators=Native())
        served = ByHand(model=model, speculation=speculation)
        found.append(served.answers(*requests))
    assert served.engine.counters.drafted_tokens > 20
    if not native:
        assert list(map(said, found[0])) == list(map(said, found[1]))


def test_an_engine_without_heads_or_on_a_device_says_so() -> None:
    config = EngineConfig(context_tokens=64, speculation=HEADS)
    with pytest.raises(EngineError, match=r"'heads' is not possible: the model has no MTP heads") as error:
        ReferenceEngine(Transformer(TINY), version=version(0), config=config)
    assert "mid_training.mtp_heads" in str(error.value)
    with torch.device("meta"):
        model = Transformer(replace(TINY, mtp_heads=1), seed=None)
    with pytest.raises(EngineError, match="the engine computes on meta"):
        runner_for(model, num_slots=1, context_tokens=8, drafts=True)


def test_a_full_batch_computes_no_head_and_the_next_draft_makes_up_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Compared(heads=1, max_sequences=17)
    assert served.engine._speculator is not None
    served.engine._speculator._max_rows = 2
    rng = np.random.default_rng(0)
    running = [served.submit(ask(f"r{i}", int(rng.integers(5, 20)), 12 + 20 * (i == 0))) for i in range(2)]
    monkeypatch.setattr(heads_module.Heads, "_compute", None)  # would raise
    for _ in range(8):
        served.step()
    monkeypatch.undo()
    served.finish(running)
    assert served.num_drafts > 3
    assert isinstance(served.engine._speculator.costs, NoCosts)
