"""The reference engine, beyond the contract of all engines."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from etude.errors import EngineBehind, EngineError
from etude.http_server import bind, run_http_server
from etude.inference import EngineConfig, HttpEngine, client
from etude.inference import engine as engine_module
from etude.inference.app import build_app
from etude.inference.errors import EngineLate
from etude.inference.scheduler import Plan, Sequence
from etude.models import ModelConfig, Transformer, hf_views
from etude.records.completion import Completion, CompletionRequest, StopReason, Traffic
from etude.testing import ScriptedEngine
from etude.weights import Tensor

from .helpers import TINY, ask, engine, everything, version


def weights(model: Transformer) -> dict[str, Tensor]:
    codes = {n: v.contiguous().numpy().view(np.uint32).ravel() for n, v in hf_views(model).items()}
    return {n: Tensor("f32", tuple(v.shape), codes[n]) for n, v in hf_views(model).items()}


def test_a_request_alone_and_among_sixteen_of_mixed_lengths_gets_the_same_bits_at_the_laptops_size() -> None:
    torch.set_num_threads(1)
    sizes = ModelConfig()
    requests = [ask(f"r{i}", 3 + 47 * i % 400, 10 + 7 * i, vocab_size=sizes.vocab_size) for i in range(16)]

    async def story() -> None:
        async with engine(Transformer(sizes, seed=3), max_sequences=16, context_tokens=1024) as served:
            together = await asyncio.gather(*(served.generate(r) for r in requests))
            for request, among in list(zip(requests, together, strict=True))[::3]:
                alone = await served.generate(ask(request.request_id, request.prompt_ids, request.sampling.max_tokens))
                assert np.array_equal(alone.token_ids, among.token_ids)
                assert np.array_equal(alone.logprobs, among.logprobs)
                assert np.array_equal(alone.routes, among.routes)

    asyncio.run(story())


@pytest.mark.parametrize("chunk_tokens", [7, 64, 1024])
def test_how_a_prompt_is_chunked_changes_no_bit(chunk_tokens: int) -> None:
    async def story(chunk: int) -> np.ndarray:
        async with engine(chunk_tokens=chunk, step_tokens=1024) as served:
            return (await served.generate(ask("r", 333, 40))).logprobs

    assert np.array_equal(asyncio.run(story(256)), asyncio.run(story(chunk_tokens)))


def test_greedy_is_the_models_argmax() -> None:
    async def story() -> None:
        model = Transformer(TINY, seed=1)
        async with engine(model) as served:
            done = await served.generate(ask("r", 12, 10, temperature=0.0))
        context = torch.from_numpy(np.concatenate([ask("r", 12).prompt_ids, done.token_ids]).astype(np.int64))
        with torch.inference_mode():
            assert model(context)[0].argmax(-1)[11:-1].tolist() == done.token_ids.tolist()

    asyncio.run(story())


def test_an_exception_in_a_step_fails_everybody_and_is_named_from_then_on() -> None:
    class Broken(Transformer):
        def run(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError("a kernel broke")

    async def story() -> None:
        async with engine(Broken(TINY, seed=1)) as served:
            results = await asyncio.gather(*(served.generate(ask(f"r{i}")) for i in range(3)), return_exceptions=True)
            assert [type(r) for r in results] == [EngineError] * 3
            assert "ZeroDivisionError: a kernel broke" in str(results[0])
            assert not served.alive
            with pytest.raises(EngineError, match="died"):
                await served.generate(ask("after"))

    asyncio.run(story())


def test_closing_fails_what_is_in_flight_by_name() -> None:
    async def story() -> None:
        async with engine() as served:
            await served.pause()
            task = asyncio.ensure_future(served.generate(ask("r")))
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="is closing"):
            await task

    asyncio.run(story())


def test_a_context_longer_than_the_models_is_refused_at_the_start() -> None:
    with pytest.raises(EngineError, match=r"(?s)context_tokens = 4096 of the engine is too large.*positions for 2048"):
        engine(context_tokens=4096)


def test_a_pinned_session_holds_its_version_between_two_calls_and_its_last_call_lets_go() -> None:
    async def story() -> None:
        model = Transformer(TINY, seed=1)
        new = weights(Transformer(TINY, seed=2))
        async with engine(model, pin_lease_s=600.0) as served:
            await served.generate(ask("one", session="eval", pin_step=0))
            swap = served.swap(everything(model, new, 1))
            await served.generate(ask("two", session="eval", pin_step=0))
            assert not swap.done()
            await served.generate(ask("three", session="eval", pin_step=0, keep_session=False))
            assert (await asyncio.wrap_future(swap)).version == version(1) == served.version

    asyncio.run(story())


def test_a_swap_that_nobody_wants_any_more_is_not_made() -> None:
    async def story() -> None:
        model, new = Transformer(TINY, seed=1), weights(Transformer(TINY, seed=2))
        async with engine(model) as served:
            await served.generate(ask("one", session="eval", pin_step=0))
            swap = served.swap(everything(model, new, 1))
            assert swap.cancel()
            await served.generate(ask("two", session="eval", pin_step=0, keep_session=False))
            assert len((await served.generate(ask("three"))).token_ids) == 8
            assert served.version == version(0)

    asyncio.run(story())


def test_a_request_ends_with_its_tokens_when_the_chain_goes_back_below_the_step_it_demands() -> None:
    async def story() -> None:
        model = Transformer(TINY, seed=1)
        codes = weights(model)

        def write(step: int) -> object:
            return asyncio.wrap_future(served.swap(everything(model, codes, step)))

        async with engine(model) as served:
            await write(9)
            demanding = asyncio.create_task(served.generate(ask("a", 5, 100, min_step=8)))
            request = ask("c", 5, 100, min_step=8)
            sampling = msgspec.structs.replace(request.sampling, presence_penalty=0.1)
            shaped = asyncio.create_task(served.generate(msgspec.structs.replace(request, sampling=sampling)))
            content = asyncio.create_task(served.generate(ask("b", 5, 100, min_step=5)))
            while served.counters.tokens < 9:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0)
            await write(5)
            part = await demanding
            assert part.stop_reason is StopReason.CANCELLED
            assert 0 < len(part.token_ids) < 100
            assert [span.version.step for span in part.spans] == [9]
            with pytest.raises(EngineBehind, match="needs weights of step 8 or later"):
                await shaped
            assert [span.version.step for span in (await content).spans] == [9, 5]

    asyncio.run(story())


def test_counters_tell_computed_from_reused_tokens() -> None:
    async def story() -> None:
        async with engine() as served:
            first = ask("one", 50, 10, session="s")
            done = await served.generate(first)
            prompt = np.concatenate([first.prompt_ids, done.token_ids, first.prompt_ids])
            await served.generate(ask("two", prompt, 10, session="s"))
            seen = served.counters
        assert (seen.requests, seen.failed, seen.tokens) == (2, 0, 20)
        assert (seen.prefill_tokens, seen.cached_tokens) == (50 + 51, 59)
        assert seen.busy_s > 0

    asyncio.run(story())


def test_logits_that_are_no_numbers_are_named_by_layer_in_the_log_and_marked_in_the_completion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def story() -> None:
        model = Transformer(TINY, seed=1)
        with torch.no_grad():
            model.blocks[1].attention.out.fill_(float("inf"))
        async with engine(model) as broken:
            for name in ("a", "b"):
                assert not np.isfinite((await broken.generate(ask(name))).logprobs).any()

    asyncio.run(story())
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "request a, 10 tokens" in said[0]
    assert "layers.1.attention.out" in said[0]


def test_a_rollout_preempted_by_production_has_unchanged_tokens_and_is_counted() -> None:
    rollouts = [ask(f"r{i}", 20, 60) for i in range(2)]

    async def story() -> None:
        async with engine(max_sequences=2) as served:
            alone = [await served.generate(r) for r in rollouts]
            working = [asyncio.ensure_future(served.generate(r)) for r in rollouts]
            while (await served.info()).num_running < 2:  # noqa: ASYNC110  the state is the thread's
                await asyncio.sleep(0)
            first = await served.generate(ask("p", 20, 4, traffic=Traffic.PRODUCTION))
            assert not all(work.done() for work in working)
            for before, after in zip(alone, await asyncio.gather(*working), strict=True):
                assert np.array_equal(before.token_ids, after.token_ids)
                assert np.array_equal(before.logprobs, after.logprobs)
                assert np.array_equal(before.routes, after.routes)
        assert served.counters.rollouts_preempted == 1
        assert (served.counters.production_requests, served.counters.production_tokens) == (1, len(first.token_ids))
        assert 0 < served.counters.production_wait_s < served.counters.busy_s

    asyncio.run(story())


def test_slow_tokens_and_waiting_for_a_slot_may_exceed_the_deadline_of_a_completion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=time.perf_counter)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(engine_module, "time", clock)

    async def story() -> None:
        async with engine(max_sequences=1) as served:
            step = served._runner.step

            def slow(plan: Plan) -> list[Sequence]:
                clock.now += 20.0  # a token of a large model with a long context
                return step(plan)

            served._runner.step = slow  # type: ignore[method-assign]
            asked = [ask(name, 10, 40, deadline_s=60.0) for name in ("runs", "waits")]
            done = await asyncio.gather(*map(served.generate, asked))
            assert [len(one.token_ids) for one in done] == [40, 40]
            assert clock.now >= 2 * 40 * 20.0
            await served.pause()
            stands = asyncio.ensure_future(served.generate(ask("stands", 10, 40, deadline_s=60.0)))
            while not (await served.info()).num_waiting:  # noqa: ASYNC110 - the state is a thread's
                await asyncio.sleep(0)
            clock.now += 61.0
            with pytest.raises(EngineLate, match="without a step of the engine"):
                await stands

    asyncio.run(story())


class Slow(ScriptedEngine):
    """An engine whose response takes longer than the deadline, but which is alive."""

    alive, stalled_s, trouble, config = True, 0.0, "", EngineConfig()

    async def generate(self, request: CompletionRequest) -> Completion:
        await asyncio.sleep(10 * request.deadline_s)
        return await super().generate(request)


def test_an_answer_over_http_takes_as_long_as_the_engine_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.0)

    async def story() -> None:
        app = build_app(Slow([[7]]))  # type: ignore[arg-type]
        async with (
            run_http_server(app, bind("127.0.0.1", 0), name="an engine", grace_s=1) as url,
            HttpEngine(url) as far,
        ):
            assert (await far.generate(ask("r", 10, 1, deadline_s=0.1))).token_ids.tolist() == [7]

    asyncio.run(story())
