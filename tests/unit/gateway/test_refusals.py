"""What cannot be answered, in each dialect, whole and streamed: the vendor's client raises its own class of error."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.parity import chats
from tests.unit.gateway.sdk import MODEL, Served, run, said, served

from etude.errors import EngineError
from etude.harness import ChatFormat
from etude.records import Completion, CompletionRequest
from etude.testing import ScriptedEngine

DIALECTS = ["chat", "text", "responses", "messages"]
NEVER = "not to be rendered"


async def ask(at: Served, dialect: str, text: str, *, stream: bool = False, function: Any = None) -> list[Any]:
    """Ask one thing by the client of a dialect. `function`: a tool. Returns the events, or the whole answer alone."""
    talk: Any = [{"role": "user", "content": text}]
    tools: Any = None if function is None else [function]
    if dialect == "chat":
        tools = tools and [{"type": "function", "function": function}]
        given = {"tools": tools} if tools else {}
        found = await at.openai.chat.completions.create(model=MODEL, messages=talk, stream=stream, **given)  # type: ignore[call-overload]
    elif dialect == "text":
        found = await at.openai.completions.create(model=MODEL, prompt=text, stream=stream, max_tokens=9)
    elif dialect == "responses":
        tools = tools and [{"type": "function", **function}]
        found = await at.openai.responses.create(model=MODEL, input=talk, stream=stream, tools=tools or [])  # type: ignore[call-overload]
    else:
        tools = tools and [{"name": function.get("name"), "input_schema": function.get("parameters")}]
        given = {"tools": tools} if tools else {}
        found = await at.anthropic.messages.create(  # type: ignore[call-overload]
            model=MODEL, messages=talk, stream=stream, max_tokens=9, **given
        )
    return [event async for event in found] if stream else [found]


def details(error: Any, dialect: str) -> tuple[str, str]:
    """The type and the message of an error, where the dialect has them."""
    body = error.body["error"] if dialect == "messages" else error.body
    if dialect == "messages":
        assert error.body["type"] == "error"
    return body["type"], body["message"]


class Lost:
    """A policy whose engine is lost, after the first token if it streams."""

    async def complete(self, request: CompletionRequest) -> Completion:
        raise EngineError("engine-0 is gone", hint="ask again")

    async def stream(self, request: CompletionRequest) -> AsyncIterator[list[int] | Completion]:
        yield said("ab")[:1]
        await self.complete(request)


def picky() -> ChatFormat:
    """A checkpoint whose template refuses one text."""
    with tempfile.TemporaryDirectory() as folder:
        path = chats.make(Path(folder), "qwen") / "chat_template.jinja"
        refusal = f"{{% if messages[-1].content == '{NEVER}' %}}{{{{ raise_exception('not this text') }}}}{{% endif %}}"
        path.write_text(refusal + path.read_text())
        return ChatFormat.load(path.parent)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_prompt_past_the_context_is_a_bad_request(dialect: str, stream: bool) -> None:
    async def work() -> None:
        async with served([], context_tokens=64) as at:
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as full:
                await ask(at, dialect, "x y " * 100, stream=stream)
            kind, message = details(full.value, dialect)
            assert kind == "invalid_request_error"
            assert ("prompt is too long: " if dialect == "messages" else "maximum context length is 64") in message
            assert dialect == "messages" or full.value.code == "context_length_exceeded"  # type: ignore[union-attr]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_template_that_refuses_a_conversation_says_so(dialect: str, stream: bool) -> None:
    async def work() -> None:
        async with served([said("ok")], chat=picky()) as at:
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
                await ask(at, dialect, NEVER, stream=stream)
            kind, message = details(refused.value, dialect)
            assert kind == "invalid_request_error"
            assert "not this text" in message
            assert "\n  hint: " in message
            assert await ask(at, dialect, "hi")

    run(work)


FUNCTIONS = [
    {"name": "f", "parameters": "x"},
    {"name": "f", "parameters": {"type": "object", "properties": ["x"]}},
    {"name": "f", "parameters": {"type": "object", "properties": {"a": 1}}},
    {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}, "required": 1}},
    {"name": "two words", "parameters": {"type": "object"}},
    {"name": "", "parameters": {"type": "object"}},
    {"name": 1, "parameters": {"type": "object"}},
    {"parameters": {"type": "object"}},
]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_malformed_tool_is_a_bad_request_that_names_the_tools(dialect: str) -> None:
    async def work() -> None:
        async with served([]) as at:
            for function in FUNCTIONS:
                for stream in (False, True):
                    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
                        await ask(at, dialect, "hi", stream=stream, function=function)
                    kind, message = details(refused.value, dialect)
                    assert kind == "invalid_request_error"
                    assert "tool" in message, (function, message)
                    if dialect != "messages":
                        assert str(refused.value.body["param"]).startswith("tools"), function  # type: ignore[index]

    run(work)


def tool_of(path: str, function: dict[str, Any]) -> dict[str, Any]:
    """A function as a tool in the form of a path's API."""
    if path == "/v1/chat/completions":
        return {"type": "function", "function": function}
    if path == "/v1/responses":
        return {"type": "function", **function}
    return {"name": function.get("name"), "input_schema": function.get("parameters")}


def deep_bodies(depth: int) -> list[tuple[str, bytes]]:
    """Bodies with the schema of a tool, or with the arguments of a call, that are nested so deep, with their paths."""
    user, schema, value = {"role": "user", "content": "hi"}, '{"properties":{"a":', '{"a":'
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [user]},
        "/v1/responses": {"input": [user]},
        "/v1/messages": {"messages": [user], "max_tokens": 9},
    }
    found: list[tuple[str, str, str, int]] = []
    for path, fields in asked.items():
        tools = [tool_of(path, {"name": "f", "parameters": {"DEEP": 0}})]
        found.append((path, json.dumps({"model": MODEL, **fields, "tools": tools}), schema, 2))
    call, of_call = {"name": "f", "arguments": "ARGUMENTS"}, {"role": "tool", "tool_call_id": "1", "content": "x"}
    talk = [user, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}, of_call]
    found.append(("/v1/chat/completions", json.dumps({"model": MODEL, "messages": talk}), value, 1))
    use, result = {"type": "tool_use", "id": "1", "name": "f"}, {"type": "tool_result", "tool_use_id": "1"}
    said_it = {"role": "assistant", "content": [{**use, "input": {"DEEP": 0}}]}
    blocks = [user, said_it, {"role": "user", "content": [result]}]
    found.append(("/v1/messages", json.dumps({"model": MODEL, "max_tokens": 9, "messages": blocks}), value, 1))
    made = []
    for path, body, opening, closing in found:
        deep = opening * (depth // closing) + "{}" + "}" * (depth // closing * closing)
        made.append((path, body.replace('{"DEEP": 0}', deep).replace('"ARGUMENTS"', json.dumps(deep)).encode()))
    return made


@pytest.mark.parametrize("depth", [100, 300, 700, 1500])
def test_no_depth_of_a_schema_or_of_arguments_makes_an_error_of_the_server(depth: int) -> None:
    async def work() -> None:
        async with served([said("ok")] * 9, context_tokens=100_000) as at:
            for path, body in deep_bodies(depth):
                headers = {"content-type": "application/json"}
                answer = await at.http.post(path.removeprefix("/v1"), content=body, headers=headers)
                allowed = {100: [200], 1500: [400]}.get(depth, [200, 400])
                assert answer.status_code in allowed, (path, answer.text[:300])

    run(work)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_that_is_lost_is_an_error_of_the_server_before_and_after_the_first_byte(dialect: str) -> None:
    async def work() -> None:
        async with served(policy=Lost()) as at:
            with pytest.raises((openai.InternalServerError, anthropic.APIStatusError)) as lost:
                await ask(at, dialect, "hi")
            assert lost.value.status_code == 503
            kind, message = details(lost.value, dialect)
            assert kind == ("overloaded_error" if dialect == "messages" else "server_error")
            assert "engine-0 is gone" in message
            if dialect == "responses":  # OpenAI's client hands its errors on as events
                *_, error, failed = await ask(at, dialect, "hi", stream=True)
                assert (error.type, error.code) == ("error", "engine_unavailable")
                assert (failed.type, failed.response.status) == ("response.failed", "failed")
                assert "engine-0 is gone" in failed.response.error.message
                return
            with pytest.raises((openai.APIError, anthropic.APIStatusError), match="engine-0 is gone") as late:
                await ask(at, dialect, "hi", stream=True)
            assert not isinstance(late.value, (openai.APIConnectionError, anthropic.APIConnectionError))

    run(work)


@pytest.mark.parametrize("body", [b"{", b'{"model": "m"', b"\xff"])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_body_that_is_not_json_has_a_reason_and_a_hint(path: str, body: bytes) -> None:
    async def work() -> None:
        async with served([]) as at:
            answer = await at.http.post(f"/{path}", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert message.startswith("the body is not JSON: ")
            assert "\n  hint: send one JSON value" in message

    run(work)


def test_tokens_that_come_together_are_one_event_and_those_apart_are_not() -> None:
    class Bursts:
        async def complete(self, request: CompletionRequest) -> Completion:
            return await ScriptedEngine([said("abcdef")]).generate(request)

        async def stream(self, request: CompletionRequest) -> AsyncIterator[list[int] | Completion]:
            done = await self.complete(request)
            for number, token in enumerate(done.token_ids.tolist()):
                if number == 3:
                    await asyncio.sleep(0.2)
                yield [token]
            yield done

    async def work() -> None:
        async with served([], policy=Bursts()) as at:
            chunks = await ask(at, "chat", "hi", stream=True)
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            assert [piece for piece in pieces if piece] == ["abc", "def"]

    run(work)
