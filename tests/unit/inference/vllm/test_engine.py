"""The adapter with a fake vLLM on a real socket, which sends recorded or broken responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from etude import grammars
from etude.errors import EngineBehind, EngineError, MalformedRequest, WeightsError
from etude.inference.config import EngineConfig
from etude.inference.errors import EngineBusy, EngineLate, InvalidGrammar
from etude.inference.external.engine import ExternalEngine
from etude.inference.external.serving import require_routes
from etude.inference.vllm.process import VllmClient
from etude.inference.vllm.server import VllmWeightSync
from etude.models.config import ModelConfig
from etude.records.completion import Completion, CompletionRequest, Sampling, Version
from etude.stores import MemoryStore
from etude.weights import Channel, Tensor
from etude.weights.chain.branches import point
from etude.weights.follow.head_tracker import HeadTracker

ANSWERS = Path(__file__).parent / "answers"
MODEL = ModelConfig(vocab_size=256, num_layers=2, num_experts=4)
FIRST, SECOND = (Version(step=step, incarnation="0a1b2c3d", digest=f"{step:064d}") for step in (0, 1))
GENERATED, STREAMED = (ANSWERS / "generate.json").read_bytes(), (ANSWERS / "stream.txt").read_bytes()


class Server:
    """A fake server on a socket. `answer` handles completion requests; every other request gets {}."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: Callable[[asyncio.StreamWriter], Awaitable[None]] = self.whole
        self.body, self.status, self.gone = GENERATED, 200, asyncio.Event()
        self.workers: Callable[[str, Any], list[Any]] = lambda method, args: []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                told = [line.split(b":") for line in head.lower().split(b"\r\n")]
                size = next((int(line[1]) for line in told if line[0] == b"content-length"), 0)
                body, path = await reader.readexactly(size), head.split()[1].decode()
                self.asked.append((path, json.loads(body or b"null")))
                if path.startswith("/inference"):
                    await self.answer(writer)
                elif path == "/collective_rpc":
                    told = json.dumps({"results": self.workers(**self.called(-1))}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(told), told))
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()

    def called(self, number: int) -> dict[str, Any]:
        """A recorded call to the workers: `method` and `args`."""
        calls = [body for path, body in self.asked if path == "/collective_rpc"]
        return {name: calls[number][name] for name in ("method", "args")}

    async def whole(self, writer: asyncio.StreamWriter) -> None:
        if self.asked[-1][1].get("stream") and self.body.startswith(b"{"):
            body = b"data: %s\n\ndata: [DONE]\n\n" % self.body  # the whole answer as the stream's one event
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (self.status, len(body), body))
            return
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (self.status, len(self.body), self.body))

    async def cut(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(self.body), self.body[:100]))
        writer.close()

    async def never(self, writer: asyncio.StreamWriter) -> None:
        return


Story = Callable[[ExternalEngine, Server], Awaitable[None]]


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[tuple[ExternalEngine, Server]]:
    server = Server()
    listening = await asyncio.start_unix_server(server.serve, folder / "s")
    calls = VllmClient(folder / "s", name="engine-1")
    config = EngineConfig(max_sequences=1, max_waiting=1, context_tokens=256, pin_lease_s=0.0)
    engine = ExternalEngine(
        calls, name="engine-1", model=MODEL, config=config, version=FIRST, kv_tokens=256, parity="vllm"
    )
    try:
        yield engine, server
    finally:
        await calls.disconnect()
        listening.close()


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[Story], None]:
    async def run(story: Story) -> None:
        async with asyncio.timeout(200), world(tmp_path) as (engine, server):
            await story(engine, server)

    return lambda story: asyncio.run(run(story))


def ask(**fields: Any) -> CompletionRequest:
    sampling, ids = Sampling(max_tokens=5, stop_token_ids=()), np.arange(40, dtype=np.int32)
    fields = {"routes_from": None, "deadline_s": 10.0} | fields
    return CompletionRequest(request_id="r", session_id="s", prompt_ids=ids, sampling=sampling, **fields)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - the state is a server's
        await asyncio.sleep(0.01)


def test_an_answer_and_a_stream_become_the_same_completion(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        done = await engine.generate(ask())
        server.body = STREAMED
        parts = [part async for part in engine.stream(ask())]
        assert parts[:-1] == [[token] for token in done.token_ids.tolist()]
        assert isinstance(parts[-1], Completion)
        assert np.array_equal(parts[-1].logprobs, done.logprobs)
        assert (await engine.info()).num_running == 0

    tell(story)


def test_a_stream_that_is_ended_is_aborted_at_the_server_and_has_the_tokens_so_far(
    tell: Callable[[Story], None],
) -> None:
    lines = [line for line in STREAMED.split(b"\n\n") if line.strip()]
    aborted = json.loads(lines[-3].removeprefix(b"data: "))
    aborted["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "abort"}

    async def story(engine: ExternalEngine, server: Server) -> None:
        async def answer(writer: asyncio.StreamWriter) -> None:
            spans = [{"version": "0", "start": 0, "end": 2}]
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for line in lines[:2]:
                writer.write(b"%x\r\n%s\n\n\r\n" % (len(line) + 2, line))
            await until(lambda: ended or server.asked[-1][0] == "/abort_requests")
            aborted["choices"][0]["weight_versions"] = spans
            for line in (b"data: " + json.dumps(aborted).encode(), b"data: [DONE]"):
                writer.write(b"%x\r\n%s\n\n\r\n" % (len(line) + 2, line))
            writer.write(b"0\r\n\r\n")

        server.answer, ended = answer, False
        parts = []
        async for part in engine.stream(ask()):
            parts.append(part)
            if len(parts) == 2:
                await engine.end("unknown")
                await engine.end("r")
        done = parts[-1]
        assert isinstance(done, Completion)
        assert done.token_ids.tolist() == [token for ids in parts[:2] for token in ids]  # type: ignore[union-attr]
        name = next(body["request_id"] for path, body in server.asked if path.startswith("/inference"))
        told = [body for path, body in server.asked if path == "/abort_requests"]
        assert told == [{"request_ids": [f"generate-tokens-{name}"]}]
        ended = True  # by the server itself
        with pytest.raises(EngineError, match="aborted request"):
            await engine.generate(ask())

    tell(story)


def test_a_slow_answer_ends_at_its_deadline_by_name_and_vllm_hears_of_it(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        server.answer = server.never
        with pytest.raises(EngineError, match=r"request r passed its deadline of 0\.2 s"):
            await engine.generate(ask(deadline_s=0.2))
        await server.gone.wait()

    tell(story)


def test_an_answer_that_breaks_off_is_an_error_and_so_is_a_stream_without_an_end(
    tell: Callable[[Story], None],
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        server.answer = server.cut
        with pytest.raises(EngineError, match="broke"):
            await engine.generate(ask())
        server.answer, server.body = server.whole, STREAMED.replace(b"data: [DONE]", b"")
        with pytest.raises(EngineError) as caught:
            [part async for part in engine.stream(ask())]
        assert caught.value.facts == "a stream without an end"
        server.status, server.body = 500, b"it fell over"
        with pytest.raises(EngineError, match="answered 500"):
            await engine.generate(ask())

    tell(story)


def test_a_text_that_cannot_follow_its_grammar_is_the_requests_fault_and_no_other_failure_is(
    tell: Callable[[Story], None],
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        sampling = Sampling(max_tokens=5, stop_token_ids=(7,), grammar=grammars.from_regex("a"))
        constrained = msgspec.structs.replace(ask(), sampling=sampling)
        event = b'data: {"error": {"message": "%s", "type": "InternalServerError", "code": 500}}\n\n'
        server.body = event % b"Internal server error"
        with pytest.raises(InvalidGrammar, match="failed to follow the grammar of request r"):
            await engine.generate(constrained)
        for request, words in ((ask(), b"Internal server error"), (constrained, b"EngineCore encountered an issue")):
            server.body = event % words
            with pytest.raises(EngineError, match="answered 500") as caught:
                await engine.generate(request)
            assert not isinstance(caught.value, InvalidGrammar)

    tell(story)


def test_a_request_that_a_server_refuses_says_the_servers_reason_with_a_grammar_and_without(
    tell: Callable[[Story], None],
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        sampling = Sampling(max_tokens=5, stop_token_ids=(7,), grammar=grammars.from_regex("a"))
        constrained = msgspec.structs.replace(ask(), sampling=sampling)
        long = "The decoder prompt (length 300) is longer than the maximum model length of 256."
        refusal = '{"error": {"message": "%s", "type": "BadRequestError", "code": 400}}'
        for in_stream in (False, True):
            server.status = 200 if in_stream else 400
            for request, said, kind in (
                (ask(), long, MalformedRequest),
                (constrained, long, MalformedRequest),
                (constrained, "Grammar error: unknown name", InvalidGrammar),
                (constrained, "Failed to compile the json schema", InvalidGrammar),
            ):
                server.body = (("data: %s\n\n" if in_stream else "\n%s") % (refusal % said)).encode()
                with pytest.raises(MalformedRequest, match="answered 400") as caught:
                    await engine.generate(request)
                assert (type(caught.value), caught.value.facts) == (kind, said)
                assert ("simplify the grammar" in caught.value.hint) == (kind is InvalidGrammar)

    tell(story)


def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as (engine, _):
            engine.client.at = tmp_path / "nobody"
            with pytest.raises(EngineError, match="vLLM of engine-1 broke"):
                await engine.generate(ask())

    asyncio.run(run())


def test_one_more_than_there_is_room_for_is_refused(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        server.answer = server.never
        held = [asyncio.ensure_future(engine.generate(ask())) for _ in range(2)]
        await until(lambda: len(server.asked) == 2)
        info = await engine.info()
        assert (info.num_running, info.num_waiting, info.kv_tokens_free) == (1, 1, 256 - 90)
        with pytest.raises(EngineBusy, match="engine-1 is full"):
            await engine.generate(ask())
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await server.gone.wait()

    tell(story)


def test_a_swap_holds_back_what_is_new_and_waits_for_sessions_that_pin(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        held = asyncio.Event()

        async def when_told(writer: asyncio.StreamWriter) -> None:
            await held.wait()
            await server.whole(writer)

        async def swap() -> None:
            async with engine.swapping():
                late = asyncio.ensure_future(engine.generate(ask(min_step=1)))
                await asyncio.sleep(0.05)
                assert not late.done()
                engine.set_version(SECOND)
            server.body = GENERATED.replace(b'"version":"0"', b'"version":"1"')
            assert (await late).spans[0].version == SECOND

        server.answer = when_told
        pinned = asyncio.ensure_future(engine.generate(ask(pin_step=0)))
        await until(lambda: bool(server.asked))
        swapping = asyncio.ensure_future(swap())
        await asyncio.sleep(0.05)
        assert [path for path, _ in server.asked] == ["/inference/v1/generate"], "nothing is paused yet"
        held.set()
        assert (await pinned).spans[0].version == FIRST
        await swapping
        control = [path for path, _ in server.asked if not path.startswith("/inference")]
        assert control == ["/pause?mode=keep&clear_cache=false", "/update_weight_version", "/resume"]
        salts = {body["cache_salt"] for path, body in server.asked if path.startswith("/inference")}
        assert len(salts) == 2, "no prefix is shared over a swap"
        with pytest.raises(EngineBehind, match="needs weights of step 0"):
            await engine.generate(ask(pin_step=0))
        assert await engine.adopt(1, deadline_s=1.0) == SECOND

    tell(story)


def test_a_swap_that_fails_leaves_the_engine_frozen_until_one_succeeds(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        with pytest.raises(ZeroDivisionError):
            async with engine.swapping():
                raise ZeroDivisionError
        with pytest.raises(EngineError, match="passed its deadline"):
            await engine.generate(ask(deadline_s=0.1))
        assert [path for path, _ in server.asked] == ["/pause?mode=keep&clear_cache=false"]
        async with engine.swapping():
            engine.set_version(SECOND)
        server.body = GENERATED.replace(b'"version":"0"', b'"version":"1"')
        assert (await engine.generate(ask())).spans[0].version == SECOND

    tell(story)


EVENTS = [part + b"\n\n" for part in STREAMED.split(b"\n\n") if part.strip()]


def tokens_one_by_one(between: Callable[[int], Awaitable[object]]) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """A streamed response that awaits `between(i)` before event i."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % sum(map(len, EVENTS)))
        for number, event in enumerate(EVENTS):
            await between(number)
            writer.write(event)

    return answer


def test_a_streamed_response_outlives_its_deadline_only_while_tokens_arrive(
    tell: Callable[[Story], None],
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        server.answer = tokens_one_by_one(lambda _: asyncio.sleep(0.25))
        began = time.monotonic()
        assert len((await engine.generate(ask(deadline_s=1.0))).token_ids) == 5
        assert time.monotonic() - began > 1.0, "no token was late, all of them were"
        over = asyncio.Event()
        server.answer = tokens_one_by_one(lambda i: asyncio.sleep(0) if i < 3 else over.wait())
        with pytest.raises(EngineLate, match=r"request r passed its deadline of 0\.2 s without a token"):
            await engine.generate(ask(deadline_s=0.2))
        over.set()

    tell(story)


def test_a_long_prompt_is_given_time_to_be_read(tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.external.engine.READ_TOKENS_PER_S", 2.0)

    async def story(engine: ExternalEngine, server: Server) -> None:
        """Forty prompt tokens extend the deadline by 20 s, at 2 tokens per second."""
        server.answer = tokens_one_by_one(lambda i: asyncio.sleep(0 if i else 1.5))
        assert len((await engine.generate(ask(deadline_s=1.0))).token_ids) == 5

    tell(story)


def test_requests_that_demand_a_later_version_than_was_swapped_in_end_as_behind(tell: Callable[[Story], None]) -> None:
    """A learner was lost, and the chain continues from an older step."""

    async def story(engine: ExternalEngine, server: Server) -> None:
        async with engine.swapping():
            engine.set_version(SECOND)
        server.answer = server.never
        work = asyncio.ensure_future(engine.generate(ask(min_step=1)))
        await until(lambda: engine.num_requests == 1 and server.asked[-1][0].startswith("/inference"))
        async with engine.swapping():
            engine.set_version(msgspec.structs.replace(FIRST, incarnation="1b2c3d4e"))
        with pytest.raises(EngineBehind, match="needs weights of step 1 or later"):
            await work
        assert engine.num_requests == 0
        await server.gone.wait()

    tell(story)


def test_a_swap_that_takes_long_makes_no_request_late(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        swapped = asyncio.Event()
        server.answer = tokens_one_by_one(lambda i: swapped.wait() if i == 2 else asyncio.sleep(0))
        running = asyncio.ensure_future(engine.generate(ask(deadline_s=0.3)))
        await until(lambda: bool(server.asked))
        async with engine.swapping():
            await asyncio.sleep(0.9)  # three deadlines
        swapped.set()
        assert len((await running).token_ids) == 5

    tell(story)


def published(step: int, store: MemoryStore) -> Version:
    weights = {"w": Tensor("f32", (2,), np.array([step, 7], np.uint32))}
    parent = HeadTracker(store, "policy").version()
    return Channel(store).publish(weights, step=step, parent=parent, rollout_ids=[]).version


def told(version: Version) -> dict[str, Any]:
    return {"step": version.step, "incarnation": version.incarnation, "digest": version.digest}


def test_workers_that_prepared_different_versions_come_to_the_newest_before_any_writes(
    tell: Callable[[Story], None],
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        store = MemoryStore()
        old, new = published(0, store), published(1, store)
        at, said = [old, new], list[str]()

        def workers(method: str, args: list[Any]) -> list[Any]:
            said.append(method if not args else f"{method} {args[0]['step']}")
            if method == "etude_prepare":
                at[0] = new if args else old
                return [None, None]
            if method == "etude_state":
                return [{"prepared": told(v), "preparing": True, "trouble": ""} for v in at]
            return [{"version": told(v), "trouble": ""} for v in at]

        server.workers = workers
        assert await VllmWeightSync(engine, HeadTracker(store, "policy"), "s").step() == new
        assert said == ["etude_prepare", "etude_state", "etude_prepare 1", "etude_state", "etude_swap"]
        assert (await engine.info()).version == new

    tell(story)


def test_a_branch_is_followed_to_what_it_names_and_back_to_an_earlier_version(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        store, followed = MemoryStore(), list[list[Any]]()
        head = HeadTracker(store, "policy", "stable")
        old, new = published(0, store), published(1, store)
        point(store, "policy", old, branch="stable")

        def workers(method: str, args: list[Any]) -> list[Any]:
            if method == "etude_follow":
                followed.append(args)
                return [None]
            there = HeadTracker(store, "policy", followed[0][2]).version()  # a worker goes where its branch is
            assert there is not None
            version = told(there)
            return [{"prepared": version, "preparing": True, "version": version, "trouble": ""}]

        server.workers = workers
        following = VllmWeightSync(engine, head, "s", branch="stable", poll_s=0.01)
        await following.start_at_head()
        assert followed == [["s", "policy", "stable", "", ""]]
        assert engine.version == old, "the newest version is another one"
        for version in (new, old):
            adoption = engine.adoption
            point(store, "policy", version, branch="stable")
            while engine.version != version:  # noqa: ASYNC110  a task follows
                await asyncio.sleep(0.01)
            assert engine.adoption == adoption + 1, "so that no cached prefix of the version before is used"
        assert not engine.trouble
        await following.stop()

    tell(story)


def test_a_version_that_could_not_be_written_is_told_and_requests_wait_for_the_next_try(
    tell: Callable[[Story], None],
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        store, swaps = MemoryStore(), 0
        version = published(0, store)

        def workers(method: str, args: list[Any]) -> list[Any]:
            nonlocal swaps
            if method == "etude_state":
                return [{"prepared": told(version), "preparing": True, "trouble": ""}]
            swaps += method == "etude_swap"
            return [{"version": told(version), "trouble": "no memory" if swaps == 1 else ""}]

        server.workers = workers
        following = VllmWeightSync(engine, HeadTracker(store, "policy"), "s")
        with pytest.raises(WeightsError, match="could not write a version") as caught:
            await following.step()
        assert caught.value.facts == "no memory"
        waiting = asyncio.ensure_future(engine.generate(ask()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await following.step() == version
        server.body = GENERATED.replace(b'"version":"0"', b'"version":"1"')
        assert (await waiting).spans[0].version == version
        assert await following.step() is None

    tell(story)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"prepared": None, "preparing": False, "trouble": ""}, "finds no new version"),
        ({"prepared": None, "preparing": False, "trouble": "a digest differs"}, "a digest differs"),
    ],
)
def test_an_error_that_keeps_workers_from_the_head_is_reported_and_changes_nothing(
    tell: Callable[[Story], None], state: dict[str, Any], said: str
) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        store = MemoryStore()
        published(0, store)
        server.workers = lambda method, args: [state]
        following = VllmWeightSync(engine, HeadTracker(store, "policy"), "s")
        await following.start_at_head()
        await following.stop()
        assert said in engine.trouble
        with pytest.raises(EngineError, match="did not reach step 1") as caught:
            await engine.adopt(1, deadline_s=0.05)
        assert said in caught.value.facts
        assert (await engine.info()).version == FIRST
        assert (await engine.generate(ask())).spans[0].version == FIRST

    tell(story)


def test_an_engine_without_routes_ends_where_a_run_needs_them(tell: Callable[[Story], None]) -> None:
    async def story(engine: ExternalEngine, server: Server) -> None:
        server.workers = lambda method, args: [{"missing": "RoutesMissing: GPUModelRunner has no requests"}]
        engine.routes = await engine.client.route_source(2)
        require_routes(engine, False)
        with pytest.raises(EngineError, match="returns no routes, which this run needs") as caught:
            require_routes(engine, True)
        assert "has no requests" in caught.value.facts
        assert "routes" not in (await engine.info()).capabilities

    tell(story)
