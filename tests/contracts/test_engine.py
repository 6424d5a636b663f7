"""What every engine promises. A new one joins with one line in ENGINES; one that is not exact says so in its
capabilities, and is then held to what it computes within `World.within`, to no bit.

Each implementation serves the same tiny random model and follows the same weight chain. `World.publish` moves the
chain; `World.hang` stops the engine from computing, without its leave.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from msgspec.structs import replace as replaced
from tests import vllm_server

from etude.errors import ContextFull, EngineBehind, EngineError
from etude.inference import EngineBusy, EngineConfig, HttpEngine, MalformedRequest
from etude.inference.app import build_app
from etude.inference.config import BLOCK_TOKENS
from etude.inference.engine import ReferenceEngine
from etude.inference.vllm.process import VllmProcess
from etude.inference.weight_sync import WeightSync, initial_version
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.checkpoint import load_model, save_model
from etude.records import Completion, CompletionRequest, Sampling, Version
from etude.records.completion import StopReason
from etude.seams import Ending, Engine, Streaming
from etude.stores import DirectoryStore
from etude.weights import Channel, Follower, Tensor

SIZES = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    expert_size=32,
    num_experts=4,
    top_k=2,
    context_tokens=2048,
)
CONTEXT_TOKENS = 2048
MAX_SEQUENCES = 4
MAX_WAITING = 8
LONG = 400  # tokens that take long enough for something to happen meanwhile
LONGEST = 1000  # the same for a version to be published and adopted, on a busy machine


@dataclass
class World:
    """An engine and the hands around it."""

    engine: Engine
    model: Transformer  # what the engine should compute at step 0
    channel: Channel
    hang: Callable[[], None]
    unhang: Callable[[], None]
    last: Version | None = None
    within: float = 1e-5  # of the model's own log-probabilities
    block_tokens: int = 1  # KV is reused in whole ones

    def publish(self, step: int) -> Transformer:
        """Another random model becomes version `step`."""
        model = Transformer(SIZES, seed=100 + step)
        self.last = self.channel.publish(_tensors(model), step=step, parent=self.last, rollout_ids=[]).version
        return model


def _tensors(model: Transformer) -> dict[str, Tensor]:
    return {
        n: Tensor("f32", tuple(v.shape), v.contiguous().numpy().view(np.uint32).ravel())
        for n, v in hf_views(model).items()
    }


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[World]:
    model = load_model(folder / "checkpoint")
    config = EngineConfig(max_sequences=MAX_SEQUENCES, context_tokens=CONTEXT_TOKENS, max_waiting=MAX_WAITING)
    views, store, hung = hf_views(model), DirectoryStore(folder / "store"), threading.Event()
    engine = ReferenceEngine(model, version=initial_version(views.items()), name="engine-0", config=config)
    following = WeightSync(engine, views, Follower(store), poll_s=0.01)

    def hang() -> None:
        hung.clear()
        engine.between_steps(hung.wait)

    async with engine:
        following.start_at_head()
        yield World(engine, load_model(folder / "checkpoint"), Channel(store), hang, hung.set)
        hung.set()
        await asyncio.to_thread(following.stop)


@asynccontextmanager
async def over_http(folder: Path) -> AsyncIterator[World]:
    async with in_process(folder) as world:
        assert isinstance(world.engine, ReferenceEngine)
        config = uvicorn.Config(build_app(world.engine), http="httptools", ws="none", log_level="critical")
        server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        async with HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}") as engine:
            yield replace(world, engine=engine)
        await server.shutdown(sockets=[listener])


@asynccontextmanager
async def vllm(folder: Path) -> AsyncIterator[World]:
    config = EngineConfig(max_sequences=MAX_SEQUENCES, context_tokens=CONTEXT_TOKENS, max_waiting=MAX_WAITING)
    checkpoint, store, server = folder / "checkpoint", DirectoryStore(folder / "store"), SERVERS["vllm"]
    model, (hang, unhang) = load_model(checkpoint), vllm_server.stopper(server)
    first = Channel(store).publish(_tensors(model), step=0, parent=None, rollout_ids=[]).version
    async with vllm_server.following(server, checkpoint, config, store, folder / "store") as engine:
        yield World(
            engine,
            model,
            Channel(store),
            hang,
            unhang,
            first,
            within=1e-4,
            block_tokens=BLOCK_TOKENS,
        )
        unhang()


SERVERS: dict[str, VllmProcess] = {}  # one for all tests: it takes half a minute to start


@pytest.fixture(scope="module")
def vllm_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("vllm")
    save_model(Transformer(SIZES, seed=1), folder / "checkpoint", dtype="f32")
    config = EngineConfig(max_sequences=MAX_SEQUENCES, context_tokens=CONTEXT_TOKENS)
    with vllm_server.serving(folder / "checkpoint", config) as SERVERS["vllm"]:
        vllm_server.wait(SERVERS["vllm"])
        yield


ENGINES = {"reference": in_process, "reference over http": over_http, "vllm": vllm}
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "vllm": [pytest.mark.slow, pytest.mark.timeout(1800), vllm_server.NEEDS_VLLM]
}
Story = Callable[[World], Awaitable[None]]


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Runs a story in a fresh world of one implementation."""
    torch.set_num_threads(1)
    if request.param == "vllm":
        request.getfixturevalue("vllm_up")
    save_model(Transformer(SIZES, seed=1), tmp_path / "checkpoint", dtype="f32")

    async def run(story: Story) -> None:
        async with asyncio.timeout(500), ENGINES[request.param](tmp_path) as world:
            await story(world)

    return lambda story: asyncio.run(run(story))


def ask(name: str, prompt: Any = 10, max_tokens: int = 8, **fields: Any) -> CompletionRequest:
    """A request; `prompt` is its token ids, or how many random ones, keyed by the name."""
    seed = sum(name.encode())
    if isinstance(prompt, int):
        prompt = np.random.default_rng(seed).integers(0, SIZES.vocab_size, prompt)
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=fields.pop("stop", ()), seed=seed)
    return CompletionRequest(
        request_id=name,
        session_id=fields.pop("session", name),
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=sampling,
        **fields,
    )


async def running(world: World, number: int = 1) -> None:
    """Wait until so many requests have a slot."""
    while (await world.engine.info()).num_running < number:  # noqa: ASYNC110 - the state is another process's
        await asyncio.sleep(0)


def spans(completion: Completion) -> list[tuple[int, int]]:
    return [(s.version.step, s.kv_epoch) for s in completion.spans]


def same(a: Completion, b: Completion, *, within: float = 0.0) -> bool:
    """Whether two completions agree in everything the model computed: bit for bit, or log-probabilities within so much
    where sums have another order in another batch."""
    near = np.array_equal(a.logprobs, b.logprobs) or np.allclose(a.logprobs, b.logprobs, rtol=0, atol=within)
    return near and np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.routes, b.routes)


async def slack(world: World) -> float:
    """How far two log-probabilities may be apart that an exact engine has equal."""
    return 0.0 if "exact" in (await world.engine.info()).capabilities else world.within


def test_an_engine_reports_its_name_limits_load_and_version(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        info = await world.engine.info()
        assert isinstance(world.engine, Engine)
        assert (info.name, info.context_tokens, info.max_sequences) == ("engine-0", CONTEXT_TOKENS, MAX_SEQUENCES)
        assert (info.paused, info.num_running, info.num_waiting) == (False, 0, 0)
        assert info.kv_tokens_free == MAX_SEQUENCES * CONTEXT_TOKENS
        assert info.version is not None
        assert info.version.step == 0
        assert {"routes", "spans", "adopt", "verify", "pause-keep"} <= set(info.capabilities)

    tell(story)


def test_a_stream_tells_the_tokens_while_they_are_sampled_and_ends_with_the_same_completion(
    tell: Callable[[Story], None],
) -> None:
    async def story(world: World) -> None:
        assert isinstance(world.engine, Streaming)
        request = ask("r", 20, 60, keep_session=False)
        parts = [part async for part in world.engine.stream(request)]
        told, done = [t for part in parts[:-1] for t in part], parts[-1]  # type: ignore[union-attr]
        assert isinstance(done, Completion)
        assert told == done.token_ids.tolist()
        assert len(parts) > 10
        assert same(done, await world.engine.generate(request), within=await slack(world))

    tell(story)


def test_a_stream_that_is_left_is_cancelled_and_one_that_cannot_begin_raises(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        assert isinstance(world.engine, Streaming)
        async with aclosing(world.engine.stream(ask("long", 10, LONG))) as parts:
            async for part in parts:
                assert part
                break
        while (await world.engine.info()).num_running:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0)
        with pytest.raises(ContextFull):
            await anext(world.engine.stream(ask("huge", 10, CONTEXT_TOKENS)))
        with pytest.raises(EngineBehind):
            await anext(world.engine.stream(ask("new", 10, 4, min_step=9)))

    tell(story)


def test_a_stream_that_is_ended_has_the_bits_of_a_completion_of_that_length(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        assert isinstance(world.engine, Streaming)
        assert isinstance(world.engine, Ending)
        told: list[int] = []
        async for part in world.engine.stream(ask("long", 20, LONGEST)):
            if isinstance(part, Completion):
                done = part
                break
            told += part
            if len(told) >= 5:  # a part may have several tokens
                await world.engine.end("long")
        assert 5 <= len(told) < LONGEST
        assert told == done.token_ids.tolist()
        assert done.stop_reason is StopReason.LENGTH
        assert (await world.engine.info()).num_running == 0
        within = await slack(world)
        assert same(done, await world.engine.generate(ask("long", 20, len(told))), within=within)
        longer = np.concatenate([ask("long", 20).prompt_ids, done.token_ids[:4], np.arange(5)])
        reused = await world.engine.generate(ask("next", longer, session="long"))
        assert same(reused, await world.engine.generate(ask("next", longer, session="other")), within=within)
        await world.engine.end("long")  # has ended: ignored
        await world.engine.end("unknown")

    tell(story)


def test_log_probabilities_and_routes_are_those_of_the_model(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        request = ask("r", 37, 50)
        done = await world.engine.generate(request)
        context = torch.from_numpy(np.concatenate([request.prompt_ids, done.token_ids]).astype(np.int64))
        with torch.inference_mode():
            logits, routes = world.model.eval()(context)
        expected = logits.log_softmax(-1)[36:-1].gather(1, context[37:, None])[:, 0]
        assert np.allclose(done.logprobs, expected.numpy(), atol=world.within)
        assert np.array_equal(done.routes, routes.numpy()[:-1])
        assert (done.routes_start, done.stop_reason, done.engine) == (0, StopReason.LENGTH, "engine-0")
        assert spans(done) == [(0, 0)]

    tell(story)


def test_mixed_lengths_together_and_alone_give_the_same_bits(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        requests = [ask(f"r{i}", 1 + 61 * i % 700, 5 + 17 * i % 90, keep_session=False) for i in range(12)]
        together = await asyncio.gather(*(world.engine.generate(r) for r in requests))
        alone = [await world.engine.generate(r) for r in requests]
        within = await slack(world)
        assert all(same(a, b, within=within) for a, b in zip(together, alone, strict=True))
        assert [len(c.token_ids) for c in alone] == [r.sampling.max_tokens for r in requests]

    tell(story)


def test_a_stop_token_ends_a_completion_and_is_its_last(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        free = await world.engine.generate(ask("r", 10, 30))
        stop = int(free.token_ids[12])
        done = await world.engine.generate(ask("r", 10, 30, stop=(stop,)))
        first = free.token_ids.tolist().index(stop) + 1
        assert done.token_ids.tolist() == free.token_ids.tolist()[:first]
        assert done.stop_reason is StopReason.STOP

    tell(story)


def test_the_next_turn_of_a_session_reuses_its_context_and_changes_no_bit(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        first = ask("one", 300, 20, session="s")
        done = await world.engine.generate(first)
        context = [*first.prompt_ids, *done.token_ids]
        second = ask("two", [*context, *range(30)], 20, session="s", routes_from=len(context) - 1)
        hit = await world.engine.generate(second)
        miss = await world.engine.generate(ask("two", second.prompt_ids, 20, session="t"))
        assert len(context) - 1 - world.block_tokens < hit.num_cached <= len(context) - 1
        assert np.array_equal(hit.token_ids, miss.token_ids)
        assert np.allclose(hit.logprobs, miss.logprobs, rtol=0, atol=await slack(world))
        assert hit.routes_start == len(context) - 1
        assert len(hit.routes) == 30 + 1 + 20 - 1
        assert np.array_equal(hit.routes, miss.routes[hit.routes_start :])

    tell(story)


def test_a_fork_changes_no_bit_and_leaves_its_source_as_it_is(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        first = ask("one", 300, 20, session="s")
        done = await world.engine.generate(first)
        context = [*first.prompt_ids, *done.token_ids]
        second = ask("two", [*context, *range(40)], 20, session="s")
        later = await world.engine.generate(second)
        stem = context[:310]  # the branch leaves in the middle of the first completion
        branch = ask("branch", [*stem, *range(63, 33, -1)], 20, session="s+1", fork_from="s")
        forked = await world.engine.generate(branch)
        alone = await world.engine.generate(replaced(branch, session_id="t", fork_from=None))
        assert forked.num_cached > len(stem) - world.block_tokens
        assert same(forked, alone, within=await slack(world))
        with torch.inference_mode():
            text = np.concatenate([branch.prompt_ids, forked.token_ids])[:-1].astype(np.int64)
            assert np.array_equal(forked.routes, world.model.eval()(torch.from_numpy(text))[1].numpy())
        third = ask("three", [*second.prompt_ids, *later.token_ids, 1, 2, 3], 20, session="s", fork_from="nobody")
        hit = await world.engine.generate(third)
        assert hit.num_cached >= len(third.prompt_ids) - 4 - world.block_tokens
        assert same(hit, await world.engine.generate(replaced(third, session_id="u")), within=await slack(world))

    tell(story)


def test_a_session_can_be_forked_while_it_runs(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        long = ask("long", 300, LONG, session="s")
        task = asyncio.ensure_future(world.engine.generate(long))
        await running(world)
        branch = ask("branch", [*long.prompt_ids[:250], 7, 7], 20, fork_from="s")
        forked = await world.engine.generate(branch)
        whole = await task
        alone = [await world.engine.generate(replaced(r, session_id=f"alone {r.request_id}")) for r in (branch, long)]
        assert same(forked, alone[0], within=await slack(world))
        assert same(whole, alone[1], within=await slack(world))

    tell(story)


def test_a_fork_of_a_session_of_another_version_is_computed_anew(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        first = ask("one", 100, 10, session="s")
        await world.engine.generate(first)
        world.publish(1)
        await world.engine.adopt(1, deadline_s=20.0)
        branch = ask("branch", first.prompt_ids, 10, fork_from="s")
        forked = await world.engine.generate(branch)
        assert (forked.num_cached, spans(forked)) == (0, [(1, 0)])

    tell(story)


def test_a_request_past_the_context_is_refused(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        with pytest.raises(ContextFull, match="big"):
            await world.engine.generate(ask("big", CONTEXT_TOKENS - 5, 6))
        fits = await world.engine.generate(ask("fits", CONTEXT_TOKENS - 5, 5))
        assert len(fits.token_ids) == 5

    tell(story)


def test_with_all_slots_taken_requests_wait_and_past_the_queue_they_are_refused(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        await world.engine.pause()
        number = MAX_SEQUENCES + MAX_WAITING + 1
        tasks = [asyncio.ensure_future(world.engine.generate(ask(f"r{i}", 10, 5))) for i in range(number)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [type(t.exception()) for t in done] == [EngineBusy]
        await world.engine.resume()
        assert all(len(c.token_ids) == 5 for c in await asyncio.gather(*waiting))

    tell(story)


def test_a_cancelled_request_gives_its_slot_back(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        tasks = [asyncio.ensure_future(world.engine.generate(ask(f"r{i}", 10, LONG))) for i in range(MAX_SEQUENCES)]
        await running(world, MAX_SEQUENCES)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        done = await world.engine.generate(ask("next", 10, 5))
        assert len(done.token_ids) == 5
        while (info := await world.engine.info()).num_running:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert info.kv_tokens_free == MAX_SEQUENCES * CONTEXT_TOKENS

    tell(story)


def test_a_request_past_its_deadline_fails_by_name(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        await world.engine.pause()
        with pytest.raises(EngineError, match=r"slow passed its deadline of 0.2 s"):
            await world.engine.generate(ask("slow", deadline_s=0.2))
        await world.engine.resume()
        assert len((await world.engine.generate(ask("next"))).token_ids) == 8

    tell(story)


def test_a_hang_is_noticed_at_the_deadline_and_named(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        await world.engine.generate(ask("well"))
        world.hang()
        with pytest.raises(EngineError) as error:
            await world.engine.generate(ask("stuck", deadline_s=0.2))
        assert "stuck" in error.value.what
        assert "deadline" in error.value.what or "did not answer" in error.value.what
        world.unhang()
        assert len((await world.engine.generate(ask("next"))).token_ids) == 8

    tell(story)


def test_a_paused_request_stays_alive_and_nothing_in_it_changes(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        whole = await world.engine.generate(ask("r", 20, 200))
        task = asyncio.ensure_future(world.engine.generate(ask("r", 20, 200, session="again")))
        await running(world)
        await world.engine.pause()
        info = await world.engine.info()
        assert info.paused
        assert info.num_running == 1
        assert not task.done()
        await world.engine.resume()
        assert same(await task, whole, within=await slack(world))

    tell(story)


def test_a_swap_in_mid_generation_shows_in_the_spans_and_fails_nothing(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        tasks = [asyncio.ensure_future(world.engine.generate(ask(f"r{i}", 20, LONGEST))) for i in range(3)]
        await running(world, 3)
        world.publish(1)
        assert (await world.engine.adopt(1, deadline_s=20.0)) == world.last
        for task in tasks:
            done = await task
            assert spans(done) == [(0, 0), (1, 1)]
            assert sum(s.num_tokens for s in done.spans) == LONGEST
            assert len(done.routes) == 20 + LONGEST - 1

    tell(story)


def test_after_a_swap_the_probe_gives_the_new_models_log_probabilities(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        text = list(range(1, 41))
        for step, model in ((0, world.model), (1, None), (2, None)):
            if model is None:
                model = world.publish(step)
                await world.engine.adopt(step, deadline_s=20.0)
            version, logprobs = await world.engine.verify(text)
            with torch.inference_mode():
                scores = model.eval()(torch.tensor(text))[0].log_softmax(-1)
            expected = scores[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
            assert version.step == step
            assert np.allclose(logprobs, expected.numpy(), atol=max(1e-6, await slack(world)))

    tell(story)


@pytest.mark.parametrize("text", [[], [1], [1, SIZES.vocab_size], [1, -1], [1, 2**63], [1] * (CONTEXT_TOKENS + 1)])
def test_a_text_that_cannot_be_computed_is_malformed(tell: Callable[[Story], None], text: list[int]) -> None:
    async def story(world: World) -> None:
        with pytest.raises(MalformedRequest):
            await world.engine.verify(text)

    tell(story)


def test_a_prefix_of_another_version_is_computed_anew(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        first = ask("one", 100, 10, session="s")
        done = await world.engine.generate(first)
        model = world.publish(1)
        await world.engine.adopt(1, deadline_s=20.0)
        prompt = np.concatenate([first.prompt_ids, done.token_ids, np.arange(10, dtype=np.int32)])
        again = await world.engine.generate(ask("two", prompt, 10, session="s"))
        assert again.num_cached == 0
        assert spans(again) == [(1, 0)]
        context = torch.from_numpy(np.concatenate([prompt, again.token_ids]).astype(np.int64))
        with torch.inference_mode():
            scores = model.eval()(context)[0].log_softmax(-1)
        expected = scores[len(prompt) - 1 : -1].gather(1, context[len(prompt) :, None])[:, 0]
        assert np.allclose(again.logprobs, expected.numpy(), atol=world.within)

    tell(story)


def test_work_for_a_later_version_is_refused_until_it_is_adopted(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        with pytest.raises(EngineBehind, match="early"):
            await world.engine.generate(ask("early", min_step=1))
        world.publish(1)
        await world.engine.adopt(1, deadline_s=20.0)
        done = await world.engine.generate(ask("now", min_step=1))
        assert spans(done) == [(1, 0)]

    tell(story)


def test_a_pinned_request_is_never_swapped_under(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        pinned = ask("pinned", 20, LONG, pin_step=0, keep_session=False)
        task = asyncio.ensure_future(world.engine.generate(pinned))
        await running(world)
        world.publish(1)
        await world.engine.adopt(1, deadline_s=60.0)
        assert task.done() or (await task)
        assert spans(task.result()) == [(0, 0)]
        with pytest.raises(EngineBehind, match="late"):
            await world.engine.generate(ask("late", pin_step=0))

    tell(story)


def test_an_adoption_that_does_not_come_is_named(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        with pytest.raises(EngineError, match=r"(?s)did not reach step 7 within 0.2 s: its version is v000000"):
            await world.engine.adopt(7, deadline_s=0.2)

    tell(story)


def test_an_engine_that_missed_versions_catches_up_with_the_head(tell: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        world.hang()
        for step in (1, 2, 3):
            world.publish(step)
        world.unhang()
        assert (await world.engine.adopt(3, deadline_s=20.0)) == world.last

    tell(story)


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": []},
        {"prompt": [0, SIZES.vocab_size]},
        {"prompt": [-1]},
        {"prompt": [[1, 2]]},
        {"max_tokens": 0},
        {"routes_from": 11},
        {"deadline_s": 0.0},
    ],
    ids=str,
)
def test_a_request_that_no_engine_could_serve_is_malformed(tell: Callable[[Story], None], bad: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        with pytest.raises(MalformedRequest):
            await world.engine.generate(ask("bad", **bad))
        assert len((await world.engine.generate(ask("good"))).token_ids) == 8

    tell(story)
