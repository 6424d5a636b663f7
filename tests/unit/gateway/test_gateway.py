from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.unit.harness.tokeniser import laptop_chat, laptop_tokenizer

from etude.errors import ConfigError, ContextFull, EngineError
from etude.gateway import DIALECTS, ChatRequest, GatewayConfig, Keys, ServedModel, create_app, serving
from etude.harness import Call, ChatFormat, chat_template, standard_tools
from etude.records import Completion, CompletionRequest
from etude.testing import ScriptedEngine, StreamingPolicy

CHAT = laptop_chat()
END = CHAT.end_id
TOOLS = standard_tools().to_openai()


def text(said: str) -> list[int]:
    return [*CHAT.encode(said).tolist(), END]


def call(name: str, **arguments: str) -> list[int]:
    return CHAT.encode_call(Call(name, arguments)).tolist()


class Slow:
    """A policy that responds when it is released, and records its requests and cancellations."""

    def __init__(self) -> None:
        self.let, self.asked, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.engine = ScriptedEngine([text("late")] * 100)

    async def complete(self, request: CompletionRequest) -> Completion:
        self.asked.set()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await self.engine.generate(request)


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def complete(self, request: CompletionRequest) -> Completion:
        raise self.error


@asynccontextmanager
async def served(
    answers: Sequence[Sequence[int]] = (),
    *,
    policy: object = None,
    key: str | None = None,
    context_tokens: int = 512,
    config: GatewayConfig | None = None,
    chat: ChatFormat = CHAT,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedEngine, str]]:
    """A real server and the real OpenAI client."""
    engine = ScriptedEngine(answers, context_tokens=max(4096, context_tokens))
    config = config or GatewayConfig(port=0)
    policy = policy or StreamingPolicy(engine)
    model = ServedModel(policy, chat, name="laptop", context_tokens=context_tokens, config=config)  # type: ignore[arg-type]
    app = create_app([model], config=config, keys=Keys.of(key) if key else None)
    async with (
        serving(app, config=config) as url,
        openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=300) as client,
    ):
        yield client, engine, url


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(300):
            await work()

    asyncio.run(bounded())


USER = [{"role": "user", "content": "fix the failing test"}]


def test_a_client_lists_the_model_and_chats_with_it() -> None:
    async def work() -> None:
        async with served([text("ok")]) as (client, engine, _):
            models = await client.models.list()
            assert [m.id for m in models.data] == ["laptop"]
            assert (await client.models.retrieve("laptop")).id == "laptop"
            answer = await client.chat.completions.create(
                model="laptop", messages=USER, max_tokens=9, temperature=0.5, seed=3
            )
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason, choice.message.role) == ("ok", "stop", "assistant")
            assert answer.usage is not None
            prompt = CHAT.encode_prompt(USER)
            sampled = len(text("ok"))
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), sampled)
            assert answer.system_fingerprint == str(engine.version)
            sampling = engine.requests[0].sampling
            assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.5, 3)
            assert engine.requests[0].prompt_ids.tolist() == prompt.tolist()

    run(work)


def test_tools_become_tool_calls_and_a_known_conversation_is_never_tokenised_again() -> None:
    async def work() -> None:
        # tokens that no tokeniser would give for this text: were it tokenised again, they would be lost
        odd = [call("ls")[0], *[int(i) for c in "ls" for i in CHAT.encode(c)], END]
        assert odd != call("ls")
        async with served([odd, call("submit")]) as (client, engine, _):
            messages: list[dict[str, object]] = [*USER]
            first = await client.chat.completions.create(model="laptop", messages=messages, tools=TOOLS)
            said = first.choices[0].message
            assert said.tool_calls is not None
            assert (said.tool_calls[0].function.name, said.tool_calls[0].function.arguments) == ("ls", "{}")
            assert first.choices[0].finish_reason == "tool_calls"
            messages += [
                said.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "calc.py"},
            ]
            second = await client.chat.completions.create(model="laptop", messages=messages, tools=TOOLS)
            assert second.choices[0].finish_reason == "tool_calls"
            one, two = engine.requests
            assert two.prompt_ids[: len(one.prompt_ids) + len(odd)].tolist() == [*one.prompt_ids.tolist(), *odd]
            assert two.session_id == one.session_id
            assert CHAT.last_message(two.prompt_ids) == "calc.py"

    run(work)


def test_another_history_is_another_session() -> None:
    async def work() -> None:
        async with served([text("a"), text("b"), text("c")]) as (client, engine, _):
            for content in ("x", "y"):
                history = [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
                await client.chat.completions.create(model="laptop", messages=history)
            assert len({r.session_id for r in engine.requests}) == 2

    run(work)


def test_equal_conversations_keep_their_own_tokens_and_a_second_answer_is_forked() -> None:
    async def work() -> None:
        odd = [*[int(i) for c in "ls" for i in CHAT.encode(c)], END]
        assert odd != text("ls")
        async with served([odd, text("ls"), text("a"), text("b"), text("c")]) as (client, engine, _):
            for _ in range(2):
                await client.chat.completions.create(model="laptop", messages=USER)
            on = [*USER, {"role": "assistant", "content": "ls"}, {"role": "user", "content": "more"}]
            for _ in range(3):
                await client.chat.completions.create(model="laptop", messages=on)
            left, right, *later = engine.requests
            start = len(left.prompt_ids)
            assert left.session_id != right.session_id
            assert [r.session_id for r in later[:2]] == [right.session_id, left.session_id]
            assert later[0].prompt_ids[start : start + len(text("ls"))].tolist() == text("ls")
            assert later[1].prompt_ids[start : start + len(odd)].tolist() == odd
            assert later[2].fork_from in (left.session_id, right.session_id)
            assert later[2].session_id not in (left.session_id, right.session_id)
            assert [r.fork_from for r in (left, right, *later[:2])] == [None] * 4

    run(work)


def test_arguments_reach_the_client_as_json_and_come_back() -> None:
    async def work() -> None:
        edit = call("edit", path="calc.py", line="3", text='return "ü"\n')
        async with served([edit, text("done")]) as (client, engine, _):
            first = await client.chat.completions.create(model="laptop", messages=USER, tools=TOOLS)
            said = first.choices[0].message
            assert said.tool_calls is not None
            assert json.loads(said.tool_calls[0].function.arguments)["text"] == 'return "ü"\n'
            messages = [*USER, said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "ok"}]
            await client.chat.completions.create(model="laptop", messages=messages, tools=TOOLS)
            assert engine.requests[1].session_id == engine.requests[0].session_id

    run(work)


def test_a_stream_gives_pieces_then_usage() -> None:
    async def work() -> None:
        async with served([text("héllo wörld 🎉")]) as (client, _, _url):
            stream = await client.chat.completions.create(
                model="laptop", messages=USER, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
            assert "".join(pieces) == "héllo wörld 🎉"
            assert len(pieces) > 3
            assert all("\ufffd" not in p for p in pieces)
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == len(text("héllo wörld 🎉"))

    run(work)


def test_a_stream_of_a_tool_call_adds_up_to_the_call() -> None:
    async def work() -> None:
        async with served([call("cat", path="calc.py"), text("ok")]) as (client, engine, _):
            async with client.chat.completions.stream(model="laptop", messages=USER, tools=TOOLS) as stream:
                final = await stream.get_final_completion()
            said = final.choices[0].message
            assert said.tool_calls is not None
            assert said.tool_calls[0].function.name == "cat"
            assert json.loads(said.tool_calls[0].function.arguments) == {"path": "calc.py"}
            answer = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "x"}
            echoed = {"role": "assistant", "tool_calls": [c.model_dump(exclude={"index"}) for c in said.tool_calls]}
            for c in echoed["tool_calls"]:
                c["function"].pop("parsed_arguments", None)
            await client.chat.completions.create(model="laptop", messages=[*USER, echoed, answer], tools=TOOLS)
            assert engine.requests[1].session_id == engine.requests[0].session_id

    run(work)


class Live:
    """A policy that streams the tokens that a test puts in, and records when the stream was closed."""

    def __init__(self) -> None:
        self.sampled: asyncio.Queue[list[int] | Exception] = asyncio.Queue()
        self.left = asyncio.Event()
        self.said: list[int] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        raise AssertionError("a stream was asked for")

    async def stream(self, request: CompletionRequest) -> AsyncIterator[list[int] | Completion]:
        try:
            while not self.said or self.said[-1] != END:
                part = await self.sampled.get()
                if isinstance(part, Exception):
                    raise part
                self.said += part
                yield part
            yield await ScriptedEngine([self.said]).generate(request)
        finally:
            self.left.set()


@pytest.mark.parametrize("end", [[END], EngineError("engine-0 is gone", hint="ask again")], ids=["whole", "broken"])
def test_a_stream_sends_each_token_before_the_next_is_sampled_and_tells_how_it_ends(end: list[int] | Exception) -> None:
    async def work() -> None:
        live = Live()
        async with served(policy=live) as (client, _, _url):
            live.sampled.put_nowait(CHAT.encode("a").tolist())
            stream = await client.chat.completions.create(model="laptop", messages=USER, stream=True)
            chunks = aiter(stream)
            assert (await anext(chunks)).choices[0].delta.role == "assistant"
            assert (await anext(chunks)).choices[0].delta.content == "a"
            for piece in ("b", "c"):
                live.sampled.put_nowait(CHAT.encode(piece).tolist())
                assert (await anext(chunks)).choices[0].delta.content == piece
            live.sampled.put_nowait(end)
            if isinstance(end, Exception):
                with pytest.raises(openai.APIError, match="engine-0 is gone"):
                    await anext(chunks)
                return
            last = await anext(chunks)
            assert last.choices[0].finish_reason == "stop"
            assert last.system_fingerprint is not None
            assert [chunk async for chunk in chunks] == []

    run(work)


def test_a_client_that_leaves_a_stream_ends_the_sampling() -> None:
    async def work() -> None:
        live = Live()
        async with served(policy=live) as (client, _, _url):
            live.sampled.put_nowait(CHAT.encode("a").tolist())
            stream = await client.chat.completions.create(model="laptop", messages=USER, stream=True)
            await anext(aiter(stream))
            assert not live.left.is_set()
            await stream.close()
            await live.left.wait()

    run(work)


def test_what_fails_before_the_first_token_of_a_stream_has_a_status() -> None:
    async def work() -> None:
        live = Live()
        live.sampled.put_nowait(ContextFull("too long", hint="shorten"))
        async with served(policy=live, config=GatewayConfig(port=0, deadline_s=0.5)) as (client, _, _url):
            with pytest.raises(openai.BadRequestError) as full:
                await client.chat.completions.create(model="laptop", messages=USER, stream=True)
            assert full.value.code == "context_length_exceeded"
            with pytest.raises(openai.InternalServerError) as late:
                await client.chat.completions.create(model="laptop", messages=USER, stream=True)
            assert late.value.status_code == 504

    run(work)


def test_a_stop_text_that_spans_tokens_is_never_sent() -> None:
    async def work() -> None:
        async with served([text("say one STOP two"), text("say ST")]) as (client, _, _url):
            for said in ("say one ", "say ST"):
                stream = await client.chat.completions.create(model="laptop", messages=USER, stream=True, stop=["STOP"])
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                assert "".join(pieces) == said

    run(work)


def test_text_before_a_call_streams_and_the_call_comes_whole() -> None:
    async def work() -> None:
        said = [*CHAT.encode("look ").tolist(), *call("cat", path="calc.py")]
        async with served([said]) as (client, _, _url):
            stream = await client.chat.completions.create(model="laptop", messages=USER, tools=TOOLS, stream=True)
            deltas = [chunk.choices[0] async for chunk in stream]
            assert "".join(d.delta.content or "" for d in deltas) == "look "
            calls = [c for d in deltas for c in d.delta.tool_calls or ()]
            assert [c.function.name for c in calls if c.function and c.function.name] == ["cat"]
            arguments = "".join(c.function.arguments or "" for c in calls if c.function)
            assert json.loads(arguments) == {"path": "calc.py"}
            assert deltas[-1].finish_reason == "tool_calls"

    run(work)


def test_a_text_completion_continues_a_prompt_that_no_template_touches() -> None:
    async def work() -> None:
        async with served([text("b c"), text("b c"), text("d")]) as (client, engine, _):
            whole = await client.completions.create(model="laptop", prompt="a", max_tokens=9, temperature=0)
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("b c", "stop")
            assert whole.usage is not None
            assert whole.usage.completion_tokens == len(text("b c"))
            assert engine.requests[0].prompt_ids.tolist() == CHAT.encode("a").tolist()
            assert not engine.requests[0].keep_session
            stream = await client.completions.create(
                model="laptop", prompt="a", max_tokens=9, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            pieces = [c.choices[0].text for c in chunks if c.choices]
            assert "".join(pieces) == "b c"
            assert len(pieces) > 2
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].usage is not None
            ids = await client.completions.create(model="laptop", prompt=[5, 6, 7])
            assert ids.choices[0].text == "d"
            assert engine.requests[2].prompt_ids.tolist() == [5, 6, 7]
            assert engine.requests[2].sampling.max_tokens == 16

    run(work)


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": ["a", "b"]}, {"prompt": [10**9]}, {"prompt": [-1]}])
def test_a_prompt_that_cannot_be_continued_is_refused_by_name(fields: dict[str, object]) -> None:
    async def work() -> None:
        async with served() as (client, _, _url):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="laptop", **fields)  # type: ignore[call-overload]
            assert refused.value.param == "prompt"
            with pytest.raises(openai.BadRequestError) as echo:
                await client.completions.create(model="laptop", prompt="a", echo=True)
            assert echo.value.param == "echo"

    run(work)


def test_tools_are_rendered_where_the_checkpoints_template_lists_them() -> None:
    async def work() -> None:
        template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + chat_template()
        lists = ChatFormat(laptop_tokenizer(), template)
        async with served([call("ls"), text("ok")], chat=lists) as (client, engine, _):
            said = (await client.chat.completions.create(model="laptop", messages=USER, tools=TOOLS)).choices[0].message
            assert said.tool_calls is not None
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "calc.py"}
            await client.chat.completions.create(model="laptop", messages=[*USER, said, result], tools=TOOLS)
            one, two = (lists.decode(r.prompt_ids) for r in engine.requests)
            names = "".join(f"[{tool['function']['name']}]" for tool in TOOLS)
            assert one.startswith(names + "fix")
            assert two.startswith(one)
            assert two.count(names) == 1

    run(work)


def test_a_stop_text_cuts_the_answer_and_the_length_limit_is_named() -> None:
    async def work() -> None:
        async with served([text("one two three"), text("far too long an answer")]) as (client, _, _url):
            cut = await client.chat.completions.create(model="laptop", messages=USER, stop=[" three", " two"])
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one", "stop")
            long = await client.chat.completions.create(model="laptop", messages=USER, max_completion_tokens=2)
            assert long.choices[0].finish_reason == "length"
            assert long.choices[0].message.content == CHAT.decode(text("far too long an answer")[:2])

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_sampling_ends_when_a_stop_text_is_complete_and_nothing_after_it_is_counted(stream: bool) -> None:
    async def work() -> None:
        until = CHAT.encode("one two").tolist()
        engine = ScriptedEngine([[*until, *CHAT.encode(" three" * 50), END]] * 5)
        policy = StreamingPolicy(engine)
        async with served(policy=policy) as (client, _, _url):
            ask: dict[str, Any] = {"model": "laptop", "messages": USER, "stop": [" two"], "n": 2}
            if stream:
                ask["stream_options"] = {"include_usage": True}
                chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
                parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
                said = ["".join(part.delta.content or "" for part in parts if part.index == i) for i in (0, 1)]
                usage = chunks[-1].usage
            else:
                whole = await client.chat.completions.create(**ask, logprobs=True)
                said, usage = [choice.message.content for choice in whole.choices], whole.usage
            assert said == ["one", "one"]
            assert usage is not None
            assert usage.completion_tokens == 2 * len(until)
            text = await client.completions.create(model="laptop", prompt="a", stop=[" two"], max_tokens=99)
            assert (text.choices[0].text, text.choices[0].finish_reason) == ("one", "stop")
            assert policy.num_sampled == 3 * len(until)

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_text_cut_is_continued_by_its_tokens_before_it(stream: bool) -> None:
    async def work() -> None:
        odd = [int(i) for letter in "one" for i in CHAT.encode(letter)]  # not what the tokeniser makes of the text
        sampled = [*odd, *CHAT.encode(" two three").tolist()]
        async with served([[*sampled, END], text("ok")]) as (client, engine, _):
            ask: dict[str, Any] = {"model": "laptop", "messages": USER, "stop": [" two"]}
            if stream:
                chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
                said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                said = (await client.chat.completions.create(**ask)).choices[0].message.content or ""
            assert said == "one"
            repeated: list[Any] = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
            await client.chat.completions.create(model="laptop", messages=repeated)
            one, two = engine.requests
            assert two.session_id == one.session_id
            before = [*one.prompt_ids.tolist(), *odd, END]
            assert two.prompt_ids[: len(before)].tolist() == before

    run(work)


def test_an_answer_that_was_cut_off_is_continued_by_its_own_tokens_and_an_end() -> None:
    async def work() -> None:
        async with served([text("far too long"), text("ok")]) as (client, engine, _):
            first = await client.chat.completions.create(model="laptop", messages=USER, max_tokens=2)
            said = {"role": "assistant", "content": first.choices[0].message.content}
            messages = [*USER, said, {"role": "user", "content": "go on"}]
            await client.chat.completions.create(model="laptop", messages=messages)
            one, two = engine.requests
            kept = [*one.prompt_ids.tolist(), *text("far too long")[:2], END]
            assert two.prompt_ids[: len(kept)].tolist() == kept

    run(work)


def test_token_ids_are_returned_to_who_asks() -> None:
    async def work() -> None:
        async with served([text("ok")]) as (client, _, _url):
            answer = await client.chat.completions.create(
                model="laptop", messages=USER, extra_body={"return_token_ids": True}
            )
            assert answer.model_extra is not None
            assert answer.model_extra["prompt_token_ids"] == CHAT.encode_prompt(USER).tolist()
            assert answer.choices[0].model_extra == {"token_ids": text("ok")}

    run(work)


def test_a_wrong_key_is_401_and_a_right_one_is_served() -> None:
    async def work() -> None:
        async with served([text("ok")], key="s3cret-ü") as (client, _, url):
            with pytest.raises(openai.AuthenticationError) as wrong:
                await client.with_options(api_key="guess").chat.completions.create(model="laptop", messages=USER)
            assert wrong.value.code == "invalid_api_key"
            async with httpx.AsyncClient() as bare:
                headers = {"authorization": "Bearer s3cret-ü".encode()}
                assert (await bare.get(f"{url}/models")).status_code == 401
                assert (await bare.get(f"{url}/models", headers=headers)).status_code == 200
                assert (await bare.get(f"{url[:-3]}/health")).status_code == 200

    run(work)


def test_a_context_that_is_too_long_is_400_with_the_numbers() -> None:
    async def work() -> None:
        async with served(context_tokens=64) as (client, engine, _):
            long = [{"role": "user", "content": "x " * 200}]
            with pytest.raises(openai.BadRequestError) as past:
                await client.chat.completions.create(model="laptop", messages=long)
            assert past.value.code == "context_length_exceeded"
            assert "maximum context length is 64 tokens" in past.value.message
            with pytest.raises(openai.BadRequestError, match="1000 in the completion"):
                await client.chat.completions.create(model="laptop", messages=USER, max_tokens=1000)
            assert engine.requests == []

    run(work)


def test_an_answer_without_a_limit_takes_what_room_there_is() -> None:
    async def work() -> None:
        async with served([text("ok")], context_tokens=64) as (client, engine, _):
            await client.chat.completions.create(model="laptop", messages=USER)
            assert engine.requests[0].sampling.max_tokens == 64 - len(CHAT.encode_prompt(USER))

    run(work)


def test_unsupported_fields_are_refused_by_name() -> None:
    async def work() -> None:
        async with served() as (client, _, url):
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(model="gpt", messages=USER)
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as many:
                await client.chat.completions.create(model="laptop", messages=USER, modalities=["audio"])
            assert many.value.param == "modalities"
            with pytest.raises(openai.BadRequestError) as tool:
                await client.chat.completions.create(model="laptop", messages=USER, tools=[{"type": "x"}])  # type: ignore[list-item]
            assert tool.value.param == "tools"
            async with httpx.AsyncClient() as bare:
                assert (await bare.get(f"{url}/nothing")).json()["error"]["code"] == "not_found"
                assert (await bare.get(f"{url}/chat/completions")).status_code == 405
                page = await bare.post(f"{url}/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
                assert page.status_code == 415
                foreign = await bare.get(f"{url}/models", headers={"host": "evil.example"})
                assert foreign.status_code == 403

    run(work)


def test_a_body_past_the_limit_is_413() -> None:
    async def work() -> None:
        async with served(config=GatewayConfig(port=0, max_body_bytes=2048)) as (client, _, _url):
            with pytest.raises(openai.APIStatusError) as large:
                await client.chat.completions.create(model="laptop", messages=[{"role": "user", "content": "x" * 4000}])
            assert large.value.status_code == 413

    run(work)


def test_a_long_body_is_read_apart_and_a_host_that_is_none_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def read(data: bytes) -> ChatRequest:
        threads.append(threading.current_thread().name)
        return chat.read(data)

    chat = DIALECTS["chat"]
    monkeypatch.setitem(DIALECTS, "chat", replace(chat, read=read))

    async def work() -> None:
        async with served([text("ok")] * 2) as (client, _, url):
            await client.chat.completions.create(model="laptop", messages=USER)
            said: list[Any] = [*([{"role": "user", "content": ""}] * 5000), {"role": "wizard"}]
            with pytest.raises(openai.BadRequestError, match="wizard"):
                await client.chat.completions.create(model="laptop", messages=said)
            assert [name.startswith("tokenise") for name in threads] == [False, True]
            host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /nowhere HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n")
            assert not (await reader.readline()).startswith(b"HTTP/1.1 5")
            writer.close()

    run(work)


def test_requests_past_the_bounded_queue_are_429_and_the_others_are_served() -> None:
    async def work() -> None:
        slow = Slow()
        config = GatewayConfig(port=0, max_running=1, max_waiting=0)
        async with served(policy=slow, config=config) as (client, _, _url):
            first = asyncio.create_task(client.chat.completions.create(model="laptop", messages=USER))
            await slow.asked.wait()
            with pytest.raises(openai.RateLimitError) as many:
                await client.chat.completions.create(model="laptop", messages=USER)
            assert many.value.response.headers["retry-after"] == "1"
            assert "0 wait for one of 1 running slots\n  hint: try again after" in many.value.message
            slow.let.set()
            assert (await first).choices[0].message.content == "late"
            again = await client.chat.completions.create(model="laptop", messages=USER)
            assert again.choices[0].message.content == "late"

    run(work)


def test_a_client_that_goes_away_takes_its_request_back() -> None:
    async def work() -> None:
        slow = Slow()
        async with served(policy=slow) as (client, _, _url):
            gone = asyncio.create_task(client.chat.completions.create(model="laptop", messages=USER))
            await slow.asked.wait()
            gone.cancel()
            await slow.cancelled.wait()

    run(work)


def test_a_request_past_its_deadline_is_504() -> None:
    async def work() -> None:
        slow = Slow()
        async with served(policy=slow, config=GatewayConfig(port=0, deadline_s=0.2)) as (client, _, _url):
            with pytest.raises(openai.InternalServerError) as late:
                await client.chat.completions.create(model="laptop", messages=USER)
            assert late.value.status_code == 504
            await slow.cancelled.wait()

    run(work)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("no engine answers", hint="restart"), 503, "engine_unavailable"),
        (ContextFull("too long", hint="shorten"), 400, "context_length_exceeded"),
    ],
)
def test_errors_of_engines_reach_the_client_in_its_own_shape(error: Exception, status: int, code: str) -> None:
    async def work() -> None:
        async with served(policy=Raising(error)) as (client, _, _url):
            with pytest.raises(openai.APIStatusError) as failed:
                await client.chat.completions.create(model="laptop", messages=USER)
            assert (failed.value.status_code, failed.value.code) == (status, code)

    run(work)


def test_an_address_open_to_the_network_needs_a_key() -> None:
    async def work() -> None:
        with pytest.raises(ConfigError, match="open to the network"):
            async with served(config=GatewayConfig(host="0.0.0.0", port=0)):
                raise AssertionError
        async with served(config=GatewayConfig(host="0.0.0.0", port=0), key="k"):
            pass

    run(work)


def test_a_port_in_use_is_named() -> None:
    async def work() -> None:
        async with served() as (_, _engine, url):
            port = int(url.rsplit(":", 1)[1].partition("/")[0])
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with served(config=GatewayConfig(port=port)):
                    raise AssertionError
        with pytest.raises(ConfigError, match="cannot be resolved"):
            async with served(config=GatewayConfig(host="no such host.invalid", port=0), key="k"):
                raise AssertionError

    run(work)


def test_token_ids_of_prompts_are_int32() -> None:
    async def work() -> None:
        async with served([text("ok")]) as (client, engine, _):
            await client.chat.completions.create(model="laptop", messages=USER)
            assert engine.requests[0].prompt_ids.dtype == np.int32

    run(work)


class Noting(ChatFormat):
    """A chat format that records which conversations it tokenises."""

    @classmethod
    def of_the_laptop(cls) -> Noting:
        made = cls(laptop_tokenizer(), chat_template())
        made.asked = []
        return made

    asked: list[int]

    def encode_prompt(self, messages, signatures=None, *, max_tokens=None):  # type: ignore[no-untyped-def]
        self.asked.append(sum(len(message["content"]) for message in messages))
        return super().encode_prompt(messages, signatures, max_tokens=max_tokens)


LONG = [{"role": "user", "content": "def f(x):\n    return x + 1\n" * 12_000}]


def test_the_gateway_answers_others_while_a_long_text_is_tokenised() -> None:
    async def work() -> None:
        async with served([text("ok")], context_tokens=1 << 22) as (client, _, url), httpx.AsyncClient() as other:
            long = asyncio.create_task(client.chat.completions.create(model="laptop", messages=LONG, max_tokens=9))
            answered = 0
            while not long.done():
                assert (await other.get(url.removesuffix("/v1") + "/health")).status_code == 200
                answered += 1
            assert (await long).choices[0].message.content == "ok"
            assert answered > 10, "nobody was answered meanwhile"

    run(work)


def test_a_request_without_a_place_is_refused_before_its_text_is_tokenised() -> None:
    async def work() -> None:
        slow, chat = Slow(), Noting.of_the_laptop()
        config = GatewayConfig(port=0, max_running=1, max_waiting=0)
        async with served(policy=slow, chat=chat, config=config, context_tokens=1 << 22) as (client, _, _):
            held = asyncio.create_task(client.chat.completions.create(model="laptop", messages=USER))
            await slow.asked.wait()
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError):
                    await client.chat.completions.create(model="laptop", messages=LONG, stream=stream)
            assert chat.asked == [len(USER[0]["content"])]
            slow.let.set()
            assert (await held).choices[0].message.content == "late"

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_cannot_fit_is_refused_by_its_length(stream: bool) -> None:
    async def work() -> None:
        async with served([], context_tokens=512) as (client, engine, _):
            for ask in (
                lambda: client.chat.completions.create(model="laptop", messages=LONG, stream=stream),
                lambda: client.completions.create(model="laptop", prompt=LONG[0]["content"], stream=stream),
            ):
                with pytest.raises(openai.BadRequestError, match="characters are at least") as refused:
                    await ask()
                assert refused.value.code == "context_length_exceeded"
            assert engine.requests == []

    run(work)


class Watched(ServedModel):
    """A model that counts what it does in threads."""

    num_in_threads = 0

    async def run_in_thread(self, work):  # type: ignore[no-untyped-def]
        self.num_in_threads += 1
        return await super().run_in_thread(work)


def ask(messages: list[dict[str, Any]]) -> ChatRequest:
    body = {"model": "m", "messages": messages, "tools": SEARCH, "max_tokens": 9}
    return DIALECTS["chat"].read(json.dumps(body).encode())


SEARCH = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]


def test_only_long_new_text_is_tokenised_in_a_thread() -> None:
    async def work() -> None:
        engine = ScriptedEngine([text("ok")] * 4, context_tokens=1 << 20)
        model = Watched(StreamingPolicy(engine), CHAT, name="m", context_tokens=1 << 19)
        talk: list[dict[str, Any]] = []
        threads = []
        for said in ("hi", "x y " * 20_000, "go on"):
            talk.append({"role": "user", "content": said})
            [answer] = await model.answer(ask(talk))
            talk.append({"role": "assistant", "content": answer.text})
            threads.append(model.num_in_threads)
        assert threads == [0, 1, 1]
        assert ask(talk[:1]).tools is ask(talk[:3]).tools, "the tools are parsed once"

    run(work)


def test_a_chat_format_that_is_slow_goes_to_threads() -> None:
    class Busy(ChatFormat):
        def encode_prompt(self, *args: Any, **options: Any) -> Any:
            began = time.thread_time()
            while time.thread_time() - began < 0.03:
                pass
            return super().encode_prompt(*args, **options)

    async def work() -> None:
        engine = ScriptedEngine([text("ok")] * 20, context_tokens=1 << 20)
        chat = Busy(laptop_tokenizer(), chat_template())
        model = Watched(StreamingPolicy(engine), chat, name="m", context_tokens=1 << 19)
        for i in range(12):
            await model.answer(ask([{"role": "user", "content": f"{i} " * 50}]))
        assert 0 < model.num_in_threads < 12

    run(work)


def test_an_unexpected_error_is_answered_in_the_shape_of_the_dialect_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with served(policy=Raising(ZeroDivisionError("odd"))) as (client, _, _):
            with pytest.raises(openai.InternalServerError, match="the gateway failed") as failed:
                await client.chat.completions.create(model="laptop", messages=USER)
            assert failed.value.code == "internal_error"

    run(work)
    assert "ZeroDivisionError: odd" in caplog.text
