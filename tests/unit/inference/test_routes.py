"""Routes and versions of cached prefixes and of preempted requests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.models import Transformer, hf_views
from etude.records import Completion, CompletionRequest, Trace
from etude.records.completion import Traffic
from etude.records.rollout import Turn
from etude.weights import Tensor

from .helpers import TINY, ask, engine, everything


def codes(model: Transformer) -> dict[str, Tensor]:
    whole = {n: v.view(torch.int32).numpy().view(np.uint32).ravel().copy() for n, v in hf_views(model).items()}
    return {n: Tensor("f32", tuple(v.shape), whole[n]) for n, v in hf_views(model).items()}


def alone(prompt: np.ndarray, seed: int = 1) -> np.ndarray:
    """The routes of these tokens, from one forward pass without an engine."""
    with torch.inference_mode():
        return Transformer(TINY, seed=seed).eval()(torch.from_numpy(prompt.astype(np.int64)))[1].numpy()


def context(prompt: np.ndarray, done: Completion) -> np.ndarray:
    return np.concatenate([prompt, done.token_ids])


def one_turn(request: CompletionRequest, done: Completion) -> Trace:
    return Trace((Turn(parent=None, prompt_ids=request.prompt_ids, completion=done, sampling=request.sampling),))


def test_routes_of_a_cached_prefix_are_kept_with_it_and_returned_on_request() -> None:
    async def story() -> None:
        async with engine() as served:
            request = ask("one", 20, 6, session="s")
            first = await served.generate(request)
            prompt = np.concatenate([context(request.prompt_ids, first), np.array([1, 2, 3], np.int32)])
            second = await served.generate(ask("two", prompt, 5, session="s"))
            assert second.num_cached == len(first.routes)
            assert np.array_equal(second.routes, alone(context(prompt, second)[:-1]))
            assert np.array_equal(second.routes[: len(first.routes)], first.routes)

    asyncio.run(story())


def test_routes_are_sent_only_to_requests_that_ask_for_them() -> None:
    async def story() -> None:
        async with engine() as served:
            request = ask("one", 20, 6, routes_from=None)
            done = await served.generate(request)
            assert done.routes.shape == (0, TINY.num_layers, TINY.top_k)
            assert done.routes_start == 25
            assert len(one_turn(request, done).path(0).routes) == 0

    asyncio.run(story())


@pytest.mark.parametrize("kept", [0, 3])
def test_tokens_that_a_left_stream_had_sampled_take_their_routes_along(kept: int) -> None:
    async def story() -> None:
        async with engine(max_sequences=1) as served:
            request = ask("left", 20, 400, session="s")
            async with aclosing(served.stream(request)) as parts:
                ids = [t async for part in _first(parts, 8) for t in part]
            prompt = np.concatenate([request.prompt_ids, np.array([*ids[:kept], 7, 7], np.int32)])
            done = await served.generate(ask("next", prompt, 5, session="s"))
            assert done.num_cached == 20 + kept  # what was sampled beyond is no part of this conversation
            assert np.array_equal(done.routes, alone(context(prompt, done)[:-1]))

    asyncio.run(story())


async def _first(parts, num_tokens):
    told = 0
    async for part in parts:
        told += len(part)
        yield part
        if told >= num_tokens:
            return


def test_a_truncated_completion_must_leave_the_routes_of_what_was_cut() -> None:
    async def story() -> Completion:
        async with engine() as served:
            return await served.generate(ask("one", 20, 6))

    done = asyncio.run(story())
    spans = (replace_tokens(done.spans[0], 4),)
    cut = {"token_ids": done.token_ids[:4], "logprobs": done.logprobs[:4], "spans": spans}
    long = Completion(**{**{f: getattr(done, f) for f in done.__struct_fields__}, **cut})
    right = Completion(**{**{f: getattr(done, f) for f in done.__struct_fields__}, **cut, "routes": done.routes[:-2]})
    with pytest.raises(ValueError, match="do not fit its tokens"):
        one_turn(ask("one", 20), long).path(0)
    path = one_turn(ask("one", 20), right).path(0)
    assert np.array_equal(path.routes[:-1], done.routes[:-2])


@pytest.mark.parametrize("swaps", ["before the preemption", "after it"])
def test_a_preempted_rollout_keeps_its_tokens_with_versions_and_routes_across_a_swap(swaps: str) -> None:
    rollout = ask("r", 20, 60)

    async def story() -> None:
        model = Transformer(TINY, seed=1)
        async with engine(model, max_sequences=1) as served:
            alone = await served.generate(rollout)
            sampled: list[int] = []
            stream = served.stream(rollout)
            while len(sampled) < 10:
                sampled += await anext(stream)
            new = everything(model, codes(Transformer(TINY, seed=2)), 1)
            if swaps == "before the preemption":
                await asyncio.wrap_future(served.swap(new))
                before = len(sampled)
                while len(sampled) < before + 10:
                    sampled += await anext(stream)
            first = asyncio.ensure_future(served.generate(ask("p", 20, 40, traffic=Traffic.PRODUCTION)))
            while not served.counters.rollouts_preempted:  # noqa: ASYNC110  the state is the thread's
                await asyncio.sleep(0)
            if swaps == "after it":
                await asyncio.wrap_future(served.swap(new))
            await first
            done = None
            async for part in stream:
                if isinstance(part, Completion):
                    done = part
                else:
                    sampled += part
        assert done is not None
        assert served.counters.rollouts_preempted == 1
        assert done.token_ids.tolist() == sampled  # no token that was streamed is sampled again
        assert done.routes_start + len(done.routes) == 20 + 60 - 1
        old = done.spans[0].num_tokens
        assert [s.version.step for s in done.spans] == ([0, 1, 1] if swaps == "before the preemption" else [0, 1])
        assert [s.kv_epoch for s in done.spans] == ([0, 1, 0] if swaps == "before the preemption" else [0, 0])
        assert np.array_equal(done.token_ids[:old], alone.token_ids[:old])
        assert np.array_equal(done.routes[: 19 + old], alone.routes[: 19 + old])

    asyncio.run(story())


def replace_tokens(span, num_tokens):
    return type(span)(span.version, num_tokens, span.kv_epoch)


def test_after_a_swap_a_session_finds_no_prefix_of_the_old_version_and_gets_the_new_ones_routes() -> None:
    async def story() -> None:
        model = Transformer(TINY, seed=1)
        async with engine(model) as served:
            request = ask("one", 20, 6, session="s")
            first = await served.generate(request)
            await asyncio.wrap_future(served.swap(everything(model, codes(Transformer(TINY, seed=2)), 1)))
            prompt = context(request.prompt_ids, first)
            second = await served.generate(ask("two", prompt, 5, session="s"))
            assert second.num_cached == 0
            assert [(s.version.step, s.kv_epoch) for s in second.spans] == [(1, 0)]
            assert np.array_equal(second.routes, alone(context(prompt, second)[:-1], seed=2))

    asyncio.run(story())


def test_routes_of_more_experts_than_a_byte_names_come_in_two() -> None:
    sizes = replace(TINY, num_experts=260, expert_size=4)

    async def story() -> None:
        model = Transformer(sizes, seed=1)
        async with engine(model) as served:
            request = ask("one", 30, 6)
            done = await served.generate(request)
            assert done.routes.dtype == np.uint16
            with torch.inference_mode():
                tokens = torch.from_numpy(context(request.prompt_ids, done)[:-1].astype(np.int64))
                assert np.array_equal(done.routes, model(tokens)[1].numpy())
            path = one_turn(request, done).path(0)
            assert path.routes.dtype == np.uint16
            assert (path.routes[-1] == 65535).all()

    asyncio.run(story())
