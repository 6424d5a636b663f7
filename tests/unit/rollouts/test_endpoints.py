"""The endpoints of a rollout: what is attributed to it, what is a repetition, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.sdk import qwen, said
from tests.unit.gateway.test_refusals import FUNCTIONS, NEVER, deep_bodies, picky, tool_of
from tests.unit.harness.test_tools import TASK
from tests.unit.harness.tokeniser import laptop_chat

from etude.errors import EngineBehind, EngineError
from etude.experience.packing import paths
from etude.gateway import RequestRefused
from etude.harness import Call, ChatFormat, Episode, HarnessConfig, RequestOptions, standard_tools
from etude.records import Completion, CompletionRequest
from etude.records.rollout import Ending, TurnKind
from etude.rollouts import attribution as attributing
from etude.rollouts import endpoints as doors
from etude.rollouts.attribution import Attribution
from etude.rollouts.endpoints import RolloutEndpoints, serve_rollout
from etude.testing import EnginePolicy, MemoryMachine, ScriptedEngine, StreamingPolicy

CHAT = laptop_chat()
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "cat", "description": "", "parameters": PARAMETERS}}]


def say(name: str, **arguments: str) -> list[int]:
    return CHAT.encode_call(Call(name, arguments)).tolist()


def text(words: str) -> list[int]:
    return [*CHAT.encode(words).tolist(), CHAT.end_id]


class Gated(EnginePolicy):
    """A policy that answers when its gate is open. `num_asked`: requests that have arrived."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(ScriptedEngine(answers))
        self.gate, self.num_asked = asyncio.Event(), 0

    async def complete(self, request: CompletionRequest) -> Completion:
        self.num_asked += 1
        await self.gate.wait()
        return await super().complete(request)


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def complete(self, request: CompletionRequest) -> Completion:
        raise self.error


class Client:
    """A client of one rollout's endpoints, with the episode behind it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, episode: Episode, asked: Attribution) -> None:
        self.http, self.url, self.key, self.episode, self.asked = http, url, key, episode, asked
        self.lines: list[str] = []

    def post(self, path: str, body: Any, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(f"{self.url}{path}", json=body, headers=named)

    async def chat(self, *words: str, headers: dict[str, str] | None = None, **more: Any) -> tuple[int, Any]:
        messages = more.pop("messages", None) or [{"role": "user", "content": w} for w in words]
        body = {"model": "any", "messages": messages, **more}
        async with self.post("/v1/chat/completions", body, **(headers or {})) as response:
            return response.status, await response.json()


@asynccontextmanager
async def client(
    policy: Any, *, name: str = "g000001.0/0", chat: ChatFormat = CHAT, **limits: Any
) -> AsyncIterator[Client]:
    sizes = {"turn_tokens": 48, "context_tokens": 1024, "max_turns": 8, **limits}
    episode = Episode(
        TASK,
        MemoryMachine({p: t.encode() for p, t in TASK.files.items()}),
        policy=policy,
        chat=chat,
        tools=standard_tools(),
        limits=HarnessConfig(**sizes),
        options=RequestOptions(session_id=name, seed=7),
    )
    lines: list[str] = []
    asked = Attribution(episode, log=lines.append)
    async with serve_rollout(episode, asked, None, log=lines.append) as (url, key), aiohttp.ClientSession() as http:
        made = Client(http, url, key, episode, asked)
        made.lines = lines
        yield made


def scripted(*answers: Sequence[int]) -> EnginePolicy:
    return EnginePolicy(ScriptedEngine(answers))


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await work()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  many kinds of conditions
        await asyncio.sleep(0.005)


def test_a_conversation_is_one_chain_and_its_tools_outputs_are_recorded() -> None:
    async def work() -> None:
        async with client(scripted(say("cat", path="a.py"), text("done"))) as c:
            first = {"role": "user", "content": "fix"}
            status, body = await c.chat(messages=[first], tools=TOOLS)
            assert status == 200, body
            reply = body["choices"][0]["message"]
            assert body["choices"][0]["finish_reason"] == "tool_calls"
            output = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "1 def f()"}
            status, body = await c.chat(messages=[first, reply, output], tools=TOOLS)
            assert body["choices"][0]["message"]["content"] == "done"
            turns = c.episode.result().trace.turns
            assert [turn.parent for turn in turns] == [None, 0]
            assert [(one.name, one.arguments, one.output) for one in turns[0].calls] == [
                ("cat", {"path": "a.py"}, "1 def f()")
            ]

    run(work)


def test_a_client_that_vanishes_loses_no_turn_and_an_equal_request_waits_for_the_first_one() -> None:
    async def work() -> None:
        policy = Gated([text("one"), text("two")])
        async with client(policy) as c:
            gone = asyncio.create_task(c.chat("hello"))
            await until(lambda: policy.num_asked)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            (entry,) = [one for entries in c.asked._by_key.values() for one in entries]
            await until(lambda: not entry.num_clients)
            again = asyncio.create_task(c.chat("hello"))
            await until(lambda: entry.num_clients)
            policy.gate.set()
            _, body = await again
            assert body["choices"][0]["message"]["content"] == "one"
            assert (policy.num_asked, len(c.episode.result().trace.turns), c.asked.num_joined) == (1, 1, 1)
            _, body = await c.chat("hello")  # the answer was delivered: this is another sample
            assert body["choices"][0]["message"]["content"] == "two"

    run(work)


@pytest.mark.parametrize("headers", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}])
def test_a_retry_gets_the_recorded_turn(headers: dict[str, str]) -> None:
    async def work() -> None:
        async with client(scripted(text("one"), text("two"))) as c:
            first = {} if "x_stainless_retry_count" in headers else headers
            _, body = await c.chat("hello", headers=first)
            _, again = await c.chat("hello", headers=headers)
            assert again == body
            assert len(c.episode.result().trace.turns) == 1

    run(work)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_idempotency_key_of_another_request_is_refused_and_samples_nothing(path: str) -> None:
    async def work() -> None:
        field = "input" if path == "/v1/responses" else "messages"

        def asks(words: str, **more: Any) -> Any:
            body = {"model": "any", field: [{"role": "user", "content": words}], **more}
            if path == "/v1/messages":
                body.setdefault("max_tokens", 16)
            return c.post(path, body, idempotency_key="k")

        async with client(scripted(text("one"), text("two"))) as c:
            async with asks("hello") as response:
                first = await response.json()
                assert response.status == 200, first
            limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 7}
            for words, more in [("else", {}), ("hello", {"n": 2}), ("hello", {"model": "other"}), ("hello", limit)]:
                async with asks(words, **more) as response:
                    refused = (await response.json())["error"]
                    assert (response.status, refused["type"]) == (422, "invalid_request_error"), (words, more)
                    assert "Idempotency-Key" in refused["message"]
                    assert "hint: " in refused["message"]
            assert len(c.episode.result().trace.turns) == 1
            async with asks("hello", stream=True) as response:  # the same request, sent in another way
                assert response.status == 200
                assert "one" in await response.text()
            assert len(c.episode.result().trace.turns) == 1

    run(work)


def test_an_answer_that_was_lost_is_not_given_to_another_model() -> None:
    async def work() -> None:
        policy = Gated([text("one"), text("two")])
        async with client(policy) as c:
            c.asked._side = ("small",)
            gone = asyncio.create_task(c.chat("hello", model="small"))
            await until(lambda: policy.num_asked)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            (entry,) = [one for entries in c.asked._by_key.values() for one in entries]
            await until(lambda: not entry.num_clients)
            policy.gate.set()
            _, body = await c.chat("hello", model="large")
            assert (body["model"], body["choices"][0]["message"]["content"]) == ("large", "two")
            assert [turn.kind for turn in c.episode.result().trace.turns] == [TurnKind.SIDE, TurnKind.ACT]

    run(work)


def test_messages_that_differ_only_in_their_reasoning_are_no_repetition() -> None:
    async def work() -> None:
        async with client(scripted(text("one"), text("two"))) as c:
            user = {"role": "user", "content": "go"}
            for thought, expected in (("left", "one"), ("right", "two")):
                said = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "so"}]
                talk = [user, {"role": "assistant", "content": said}, user]
                body = {"model": "any", "max_tokens": 16, "messages": talk}
                async with c.post("/v1/messages", body, x_stainless_retry_count="1") as response:
                    assert (await response.json())["content"] == [{"type": "text", "text": expected}]

    run(work)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", None])
def test_a_turn_goes_on_with_its_sampled_reasoning_whether_or_not_a_client_sends_it_back(field: str | None) -> None:
    async def work() -> None:
        answers = [said(f"<think>\nhm {number}\n</think>\n\nso {number}") for number in range(3)]
        async with client(scripted(*answers), chat=qwen()) as c:
            talk: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            for number in range(3):
                _, body = await c.chat(messages=talk)
                message = body["choices"][0]["message"]
                assert (message["reasoning_content"], message["content"]) == (f"hm {number}", f"so {number}")
                again = {"role": "assistant", "content": message["content"]}
                again |= {} if field is None else {field: message["reasoning_content"]}
                talk += [again, {"role": "user", "content": "go on"}]
            turns = c.episode.result().trace.turns
            assert [turn.parent for turn in turns] == [None, 0, 1]
            assert [list(turn.completion.token_ids) for turn in turns] == answers
            assert c.episode.num_resampled == 0

    run(work)


def test_a_retry_joins_the_request_in_flight() -> None:
    async def work() -> None:
        policy = Gated([text("one")])
        async with client(policy) as c:
            first = asyncio.create_task(c.chat("hello"))
            await until(lambda: policy.num_asked)
            second = asyncio.create_task(c.chat("hello", headers={"x_stainless_retry_count": "2"}))
            await until(lambda: c.asked.num_joined)
            policy.gate.set()
            assert await first == await second

    run(work)


def test_parallel_equal_requests_of_two_sub_agents_are_two_samples_with_their_own_seeds() -> None:
    async def work() -> None:
        policy = Gated([text("one"), text("two")])
        async with client(policy) as c:
            both = [asyncio.create_task(c.chat("hello")) for _ in range(2)]
            await until(lambda: policy.num_asked == 2)
            policy.gate.set()
            found = {body["choices"][0]["message"]["content"] for _, body in await asyncio.gather(*both)}
            assert found == {"one", "two"}
            seeds = {turn.sampling.seed for turn in c.episode.result().trace.turns}
            assert len(seeds) == 2

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_template_cannot_render_is_a_bad_request_in_every_dialect_and_ends_nothing(stream: bool) -> None:
    async def work() -> None:
        chat, talk = picky(), [{"role": "user", "content": NEVER}]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": talk, "stream": stream},
            "/v1/responses": {"input": talk, "stream": stream},
            "/v1/messages": {"messages": talk, "max_tokens": 9, "stream": stream},
            "/v1/messages/count_tokens": {"messages": talk},
        }
        async with client(scripted([*chat.encode("ok").tolist(), chat.end_id]), chat=chat) as c:
            for path, body in bodies.items():
                async with c.post(path, {"model": "any", **body}) as response:
                    refused = (await response.json())["error"]
                    assert (response.status, refused["type"]) == (400, "invalid_request_error"), path
                    assert "not this text" in refused["message"]
                    assert "\n  hint: " in refused["message"]
            assert (c.episode.failure, c.episode.ending, c.asked.calls) == (None, None, [])
            status, answer = await c.chat("hi")
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "ok")

    run(work)


def test_n_answers_are_n_turns() -> None:
    async def work() -> None:
        async with client(scripted(text("one"), text("two"), text("three"))) as c:
            _, body = await c.chat("hello", n=3)
            assert [one["message"]["content"] for one in body["choices"]] == ["one", "two", "three"]
            assert len(c.episode.result().trace.turns) == 3
            status, _ = await c.chat("hello", n=17)
            assert status == 400

    run(work)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("kind", [EnginePolicy, StreamingPolicy])
def test_a_stop_text_ends_the_turn_in_the_tree_too_and_is_trained_once(kind: Any, tools: Any) -> None:
    async def work() -> None:
        until = CHAT.encode("look at it\nObservation:").tolist()
        policy = kind(ScriptedEngine([text("look at it\nObservation: invented"), text("done")]))
        async with client(policy) as c:
            ask = {"tools": tools, "stop": ["\nObservation:"]}
            first = {"role": "user", "content": "fix"}
            _, body = await c.chat(messages=[first], **ask)
            choice = body["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("look at it", "stop")
            assert body["usage"]["completion_tokens"] == len(until)
            assert kind is EnginePolicy or policy.num_sampled == len(until)
            output = {"role": "user", "content": "Observation: a.py"}
            status, body = await c.chat(messages=[first, choice["message"], output], **ask)
            assert (status, body["choices"][0]["message"]["content"]) == (200, "done")
            trace = c.episode.result().trace
            assert [turn.parent for turn in trace.turns] == [None, 0, 0]
            trained = [CHAT.decode(path.token_ids[path.mask]) for path in paths(trace)]
            assert trained == ["look at itdone", "\nObservation:"]

    run(work)


def test_the_runs_sampling_is_used_and_what_was_asked_is_logged_once() -> None:
    async def work() -> None:
        policy = scripted(text("one"), text("two"))
        async with client(policy) as c:
            for word in ("a", "b"):
                asked = {"temperature": 0.1, "top_p": 0.5, "max_tokens": 9, "tool_choice": "required", "tools": TOOLS}
                asked["response_format"] = {"type": "json_object"}
                status, body = await c.chat(word, **asked)
                assert status == 200, body
            used = policy.engine.requests[0].sampling  # type: ignore[attr-defined]
            assert (used.temperature, used.max_tokens) == (1.0, 9)
            (line,) = c.lines
            assert '"temperature": 0.1' in line
            assert '"tool_choice": "required"' in line
            assert '"schema": {"type": "object"}' in line
            assert used.grammar == ""
            _, _ = await c.chat("c", max_tokens=10_000)

    run(work)


def test_a_stream_has_the_whole_answer_and_signs_of_life_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "KEEP_ALIVE_S", 0.05)

    async def work() -> None:
        policy = Gated([text("one")])
        async with client(policy) as c:
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
            async with c.post("/v1/chat/completions", body) as response:
                first = await response.content.readline()
                assert first.startswith(b":")
                policy.gate.set()
                rest = (await response.content.read()).decode()
            assert '"content":"one"' in rest
            assert rest.endswith("data: [DONE]\n\n")

    run(work)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {}, ['"code":"engine_unavailable"']),
        ("responses", {"input": "a"}, ["event: error\n", "event: response.failed\n", '"code":"engine_unavailable"']),
        ("messages", {"max_tokens": 9}, ["event: error\n", '"type":"overloaded_error"']),
    ],
)
def test_an_engine_that_is_lost_after_the_first_byte_is_an_error_event(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], said: list[str]
) -> None:
    monkeypatch.setattr(doors, "KEEP_ALIVE_S", 0.05)

    async def work() -> None:
        policy = Gated([])  # has no answer
        async with client(policy) as c:
            talk = {} if "input" in body else {"messages": [{"role": "user", "content": "a"}]}
            async with c.post(f"/v1/{path}", {"model": "m", "stream": True, **talk, **body}) as response:
                assert response.status == 200
                await response.content.readline()
                policy.gate.set()
                rest = (await response.content.read()).decode()
            assert all(one in rest for one in said), rest
            assert "no engine answered" in rest
            assert isinstance(c.episode.result().failure, EngineError)

    run(work)


@pytest.mark.parametrize("error", [EngineError("gone", hint="x"), EngineBehind("old", hint="x")])
def test_an_engine_that_is_lost_is_a_failure_and_no_client_retries(error: EngineError) -> None:
    async def work() -> None:
        async with client(Failing(error)) as c:
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            async with c.post("/v1/chat/completions", body) as response:
                assert response.status == 503
                assert response.headers["x-should-retry"] == "false"
            assert c.episode.result().failure is error
            assert c.asked.failed.is_set()

    run(work)


def test_strangers_and_swapped_urls_are_refused_and_nothing_is_attributed() -> None:
    async def work() -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        async with client(scripted(text("x"))) as one, client(scripted(text("y")), name="g000001.1/0") as two:
            base = two.url.partition("/r/")[0]
            swapped = base + "/r/" + one.url.partition("/r/")[2]
            for url, headers, status in (
                (swapped, {}, 404),
                (f"{base}/r/g000001.1.0/guess", {}, 404),
                (base, {}, 401),
                (base, {"authorization": f"Bearer {one.key}"}, 401),
                (base, {"authorization": "Bearer \xff"}, 401),
                (f"{two.url}x", {}, 404),
            ):
                async with two.http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                    assert response.status == status, url
                    assert "\n  hint: take the " in (await response.json())["error"]["message"]
            async with one.http.post(f"{one.url}/v1/chat/completion", json=body) as response:
                assert response.status == 404
                assert "hint: did you mean '/v1/chat/completions'?" in (await response.json())["error"]["message"]
            for method, path, right in (
                ("GET", "messages", "POST"),
                ("POST", "models", "GET"),
                ("PUT", "models/x", "GET"),
            ):
                async with one.http.request(method, f"{one.url}/v1/{path}") as response:
                    assert (response.status, response.headers["allow"]) == (405, right)
                    assert f"\n  hint: send {right}" in (await response.json())["error"]["message"]
            assert not one.asked.num_requests
            assert not two.asked.num_requests
            key = {"authorization": f"Bearer {two.key}"}
            async with two.http.post(f"{base}/v1/chat/completions", json=body, headers=key) as response:
                assert response.status == 200
            async with two.http.get(f"{two.url}/v1/models/gpt-9") as response:
                assert (await response.json())["id"] == "gpt-9"

    run(work)


def test_a_full_context_is_the_vendors_error_and_a_shorter_request_goes_on() -> None:
    async def work() -> None:
        async with client(scripted(text("x")), context_tokens=100) as c:
            status, body = await c.chat("word " * 200)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is 100 tokens" in body["error"]["message"]
            assert c.asked.context_full
            status, _ = await c.chat("word")
            assert status == 200
            assert not c.asked.context_full

    run(work)


def test_after_the_last_turn_requests_are_refused_for_good() -> None:
    async def work() -> None:
        async with client(scripted(text("x"), text("y")), max_turns=1) as c:
            await c.chat("a")
            for _ in range(3):
                async with c.post(
                    "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "b"}]}
                ) as r:
                    assert (r.status, r.headers["x-should-retry"]) == (403, "false")
                    assert (await r.json())["error"]["code"] == "rollout_ended"
            assert c.episode.ending is Ending.TURNS
            assert c.asked.failed.is_set()

    run(work)


def test_a_flood_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributing, "MAX_PARALLEL", 3)

    async def work() -> None:
        policy = Gated([text("x")] * 99)
        async with client(policy, max_turns=5) as c:
            tasks = [asyncio.create_task(c.chat(f"w{i}")) for i in range(3)]
            await until(lambda: policy.num_asked == 3)
            status, body = await c.chat("more")
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            statuses = [(await c.chat(f"more {i}"))[0] for i in range(40)]
            assert statuses[-1] == 403
            assert c.episode.ending is Ending.TURNS
            policy.gate.set()
            await asyncio.gather(*tasks)
            assert len(c.episode.result().trace.turns) == 3

    run(work)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"\xff",
        json.dumps({"model": "m", "messages": []}).encode(),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}]}).encode(),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": "all"}).encode(),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "n": "2"}).encode(),
        b'{"a":' * 5000,
    ],
)
def test_a_malformed_request_is_refused_and_the_rollout_goes_on(body: bytes) -> None:
    async def work() -> None:
        async with client(scripted(text("x"))) as c:
            async with c.http.post(f"{c.url}/v1/chat/completions", data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"]
            assert (await c.chat("a"))[0] == 200

    run(work)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("chat", [CHAT, qwen()], ids=["own", "qwen"])
def test_a_malformed_tool_is_refused_in_every_dialect_and_ends_nothing(path: str, chat: ChatFormat) -> None:
    async def work() -> None:
        async with client(scripted([*chat.encode("ok").tolist(), chat.stop_token_ids[0]]), chat=chat) as c:
            for function in FUNCTIONS:
                body = {"model": "m", **REQUESTS[path], "tools": [tool_of(path, function)]}
                async with c.post(path, body) as response:
                    refused = (await response.json())["error"]
                    assert (response.status, refused["type"]) == (400, "invalid_request_error"), function
                    assert "tool" in refused["message"]
            assert (c.episode.failure, c.episode.ending, c.asked.calls) == (None, None, [])
            assert (await c.chat("hi"))[0] == 200

    run(work)


@pytest.mark.parametrize("chat", [CHAT, qwen()], ids=["own", "qwen"])
@pytest.mark.parametrize("depth", [100, 300, 700, 1500])
def test_no_depth_of_a_schema_or_of_arguments_makes_a_rollout_invalid(depth: int, chat: ChatFormat) -> None:
    async def work() -> None:
        answer = [*chat.encode("ok").tolist(), chat.stop_token_ids[0]]
        async with client(scripted(*[answer] * 9), chat=chat, context_tokens=100_000) as c:
            for path, body in deep_bodies(depth):
                async with c.http.post(f"{c.url}{path}", data=body) as response:
                    assert response.status in (200, 400), (path, await response.text())
            assert (c.episode.failure, c.episode.ending) == (None, None)

    run(work)


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MAX_BODY_BYTES", 1000)

    async def work() -> None:
        async with client(scripted(text("x"))) as c:
            status, _ = await c.chat("a" * 2000)
            assert status == 413

    run(work)


def test_side_calls_are_told_from_turns_at_the_end() -> None:
    async def work() -> None:
        async with client(scripted(text("a title"), say("cat", path="a"), text("sub"))) as c:
            system = [{"role": "system", "content": "Write a title."}, {"role": "user", "content": "fix"}]
            await c.chat(messages=system, max_tokens=40)
            await c.chat("fix", tools=TOOLS)
            await c.chat("summarise this file", max_completion_tokens=4000)  # no short answer
            c.asked.finish()
            assert [turn.kind for turn in c.episode.result().trace.turns] == [TurnKind.SIDE, TurnKind.ACT, TurnKind.ACT]

    run(work)


def test_a_program_without_tools_has_no_side_calls_but_those_of_a_pattern() -> None:
    async def work() -> None:
        async with client(scripted(text("x"), text("y"))) as c:
            c.asked._side = ("*-mini",)
            await c.chat(messages=[{"role": "system", "content": "A"}, {"role": "user", "content": "b"}], max_tokens=9)
            await c.chat("b", model="gpt-mini")
            c.asked.finish()
            assert [turn.kind for turn in c.episode.result().trace.turns] == [TurnKind.ACT, TurnKind.SIDE]

    run(work)


def test_the_machine_is_reached_with_the_same_secret() -> None:
    async def work() -> None:
        async with client(scripted()) as c:
            async with c.post("/machine/exec", {"command": ["python", "tests.py"]}) as response:
                assert "of 4" in (await response.json())["output"]
            async with c.post("/machine/read", {"path": "../x"}) as response:
                assert response.status == 400
            async with c.post("/machine/write", {"path": "new", "content": "%%"}) as response:
                assert response.status == 400
            async with c.post("/machine/burn", {}) as response:
                assert response.status == 404
            c.episode.submit()
            async with c.post("/machine/exec", {"command": "ls"}) as response:
                assert response.status == 403

    run(work)


REQUESTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20},
}


OWN_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    "/v1/responses": {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
    "/v1/messages": {"name": "look", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [False, True])
def test_all_dialects_are_attributed(path: str, stream: bool, tools: bool) -> None:
    async def work() -> None:
        own = {"tools": [OWN_TOOLS[path]]} if tools else {}
        body = {"model": "m", "temperature": 0.3, "stream": stream, **REQUESTS[path], **own}
        async with client(scripted(text("hello"))) as c:
            async with c.post(path, body) as response:
                said = await response.text()
                assert response.status == 200, said
                assert "hello" in said
            (turn,) = c.episode.result().trace.turns
            assert turn.sampling.temperature == 1.0

    run(work)


@pytest.mark.parametrize("path", REQUESTS)
def test_errors_are_in_the_dialects_own_shape(path: str) -> None:
    async def work() -> None:
        async with client(scripted(), max_turns=1, turn_tokens=20, context_tokens=22) as c:
            async with c.post(path, {"model": "m", **REQUESTS[path]}) as response:
                said = await response.json()
                assert response.status == 400
                assert ("too long" if path == "/v1/messages" else "maximum context length") in said["error"]["message"]
                assert (said.get("type") == "error") is (path == "/v1/messages")
            c.episode.submit()
            async with c.post(path, {"model": "m", **REQUESTS[path]}) as response:
                assert response.status == 403
                assert "the rollout has ended" in (await response.json())["error"]["message"]

    run(work)


def test_the_tokens_of_a_prompt_are_counted_and_nothing_is_recorded() -> None:
    async def work() -> None:
        async with client(scripted()) as c:
            body = {"model": "m", "messages": [{"role": "user", "content": "fix"}]}
            async with c.post("/v1/messages/count_tokens", body) as response:
                number = await c.episode.num_tokens(body["messages"], tools=[])
                assert (await response.json())["input_tokens"] == number
            assert c.episode.result().trace.turns == ()

    run(work)


def test_a_defect_of_the_endpoints_is_a_failure_and_not_the_agents_fault() -> None:
    async def work() -> None:
        async with client(Failing(ZeroDivisionError("ours"))) as c:
            status, _ = await c.chat("a")
            assert status == 500
            assert "ZeroDivisionError: ours" in str(c.episode.result().failure)
            assert c.asked.failed.is_set()

    run(work)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
JSON = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=8
)
NAMES = ["model", "messages", "tools", "n", "stream", "max_tokens", "tool_choice", "response_format", "input", "stop"]


@given(
    st.sampled_from(sorted(REQUESTS)),
    st.binary(max_size=40)
    | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=6).map(
        lambda x: json.dumps(x).encode()
    ),
)
def test_any_bytes_are_a_request_or_are_refused(path: str, body: bytes) -> None:
    episode = Episode(
        TASK,
        MemoryMachine({}),
        policy=scripted(),
        chat=CHAT,
        tools=standard_tools(),
        limits=HarnessConfig(),
        options=RequestOptions(session_id="s", seed=0),
    )
    endpoints = RolloutEndpoints(episode, Attribution(episode, log=lambda _: None), secret=None, log=lambda _: None)
    with contextlib.suppress(RequestRefused):
        assert endpoints._parsed(doors._BY_PATH[path].read, body).messages
