"""Anthropic's messages, asked with Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from tests.unit.gateway.sdk import CALLS, MODEL, SCHEMA, qwen, run, said, served

from etude.errors import ContextFull, EngineError
from etude.gateway import GatewayConfig, RequestRefused
from etude.gateway.dialects import messages
from etude.records import Completion, CompletionRequest
from etude.testing import ScriptedEngine

TOOLS: list[Any] = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
USER: list[Any] = [{"role": "user", "content": "the weather?"}]
THOUGHT = "<think>\nhm\n</think>\n\n"
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f3a5;"}


def test_thinking_text_and_parallel_calls_come_whole_and_their_results_find_the_turn() -> None:
    async def work() -> None:
        async with served([said(THOUGHT + "look" + CALLS), said("sunny")]) as at:
            client = at.anthropic
            first = await client.messages.create(model=MODEL, max_tokens=300, messages=USER, tools=TOOLS)
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            thinking, text, paris, rome = first.content
            assert (thinking.thinking, text.text) == ("hm", "look")  # type: ignore[union-attr]
            assert (paris.input, rome.input) == ({"city": "Paris"}, {"city": "Rome"})  # type: ignore[union-attr]
            assert (first.stop_reason, first.stop_sequence, first.role) == ("tool_use", None, "assistant")
            assert first.usage.output_tokens == len(said(THOUGHT + "look" + CALLS))
            results = [
                {"type": "tool_result", "tool_use_id": rome.id, "content": [{"type": "text", "text": "of rome"}]},  # type: ignore[union-attr]
                {"type": "tool_result", "tool_use_id": paris.id, "content": "of paris", "is_error": True},  # type: ignore[union-attr]
                {"type": "text", "text": "and now?"},
            ]
            echoed = [b for b in first.content if b.type != "thinking"]  # clients need not repeat it
            talk: list[Any] = [*USER, {"role": "assistant", "content": echoed}, {"role": "user", "content": results}]
            second = await client.messages.create(model=MODEL, max_tokens=9, messages=talk, tools=TOOLS)
            assert second.content[0].text == "sunny"  # type: ignore[union-attr]
            one, two = at.engine.requests
            before = [*one.prompt_ids.tolist(), *said(THOUGHT + "look" + CALLS)]
            assert two.prompt_ids[: len(before)].tolist() == before, "the thinking is in the context as it was sampled"
            assert two.session_id == one.session_id
            added = qwen().decode(two.prompt_ids[len(before) :])
            assert added.index("of paris") < added.index("of rome") < added.index("and now?")

    run(work)


def test_a_stream_has_the_events_of_anthropic_in_their_order() -> None:
    async def work() -> None:
        async with served([said(THOUGHT + "look" + CALLS)] * 2) as at:
            ask: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": USER, "tools": TOOLS}
            async with at.anthropic.messages.stream(**ask) as stream:
                final = await stream.get_final_message()
            whole = await at.anthropic.messages.create(**ask)
            strip = {"id", "parsed_output"}
            first, second = (
                [{k: v for k, v in b.model_dump(exclude_none=True).items() if k not in strip} for b in m.content]
                for m in (final, whole)
            )
            assert first == second
            assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)

    run(work)

    async def raw() -> None:
        async with served([said(THOUGHT + "look" + CALLS)]) as at:
            body = {"model": MODEL, "max_tokens": 300, "messages": USER, "tools": TOOLS, "stream": True}
            answer = await at.http.post("/messages", json=body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            kinds = [
                f"{e['type']}:{e.get('content_block', e.get('delta', {})).get('type', '')}".rstrip(":") for e in events
            ]
            assert [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]] == [
                "message_start", "ping",
                "content_block_start:thinking", "content_block_delta:thinking_delta",
                "content_block_delta:signature_delta", "content_block_stop",
                "content_block_start:text", "content_block_delta:text_delta", "content_block_stop",
                "content_block_start:tool_use", "content_block_delta:input_json_delta", "content_block_stop",
                "content_block_start:tool_use", "content_block_delta:input_json_delta", "content_block_stop",
                "message_delta", "message_stop",
            ]  # fmt: skip
            assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1, 2, 3]
            assert events[0]["message"]["usage"]["input_tokens"] > 0

    run(raw)


def test_a_system_block_with_a_nonce_is_dropped_so_that_conversations_have_one_beginning() -> None:
    async def work() -> None:
        async with served([said("a"), said("b"), said("c")]) as at:
            rules = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
            for system in ([BILLING, rules], [{**BILLING, "text": BILLING["text"] + "x"}, rules], "be brief"):
                await at.anthropic.messages.create(
                    model=MODEL,
                    max_tokens=9,
                    system=system,  # type: ignore[arg-type]
                    messages=USER,
                    metadata={"user_id": "u"},
                    thinking={"type": "enabled", "budget_tokens": 1024},
                    extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
                )
            prompts = [r.prompt_ids.tolist() for r in at.engine.requests]
            assert prompts[0] == prompts[1] == prompts[2]
            assert "billing" not in qwen().decode(prompts[0])

    run(work)


def test_parameters_reach_the_policy_and_a_stop_sequence_is_named() -> None:
    async def work() -> None:
        async with served([said("one STOP two"), said("far too long"), said("{}")]) as at:
            ask: dict[str, Any] = {"model": MODEL, "messages": USER}
            cut = await at.anthropic.messages.create(
                **ask,
                max_tokens=99,
                stop_sequences=["STOP"],
                extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
            )
            assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("one ", "stop_sequence", "STOP")  # type: ignore[union-attr]
            assert cut.usage.output_tokens < len(said("one STOP two"))
            sampling = at.engine.requests[0].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 99)
            assert (await at.anthropic.messages.create(**ask, max_tokens=2)).stop_reason == "max_tokens"
            form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
            await at.anthropic.messages.create(**ask, max_tokens=100_000, output_config=form)
            assert json.loads(at.engine.requests[2].sampling.grammar) == {"json_schema": SCHEMA}
            assert at.engine.requests[2].sampling.max_tokens < 4096, "lowered to what the context has left"

    run(work)


def test_tokens_are_counted_without_a_turn() -> None:
    async def work() -> None:
        async with served([said("ok")]) as at:
            ask: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "system": "be brief"}
            counted = await at.anthropic.messages.count_tokens(**ask)
            answer = await at.anthropic.messages.create(**ask, max_tokens=5)
            assert counted.input_tokens == answer.usage.input_tokens == len(at.engine.requests[0].prompt_ids)

    run(work)


def test_tokens_far_beyond_the_context_are_counted() -> None:
    async def work() -> None:
        async with served([], context_tokens=512) as at:
            counts = []
            for num in (100_000, 1_000_000):
                talk: Any = [{"role": "user", "content": "x" * num}]
                counts.append((await at.anthropic.messages.count_tokens(model=MODEL, messages=talk)).input_tokens)
            assert counts[1] - counts[0] == len(qwen().encode("x" * 1_000_000)) - len(qwen().encode("x" * 100_000))

    run(work)


def test_a_tool_that_must_be_called_is_forced_by_a_grammar() -> None:
    async def work() -> None:
        async with served([said(CALLS)] * 3) as at:
            for choice in (
                {"type": "any"},
                {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
                {"type": "none"},
            ):
                await at.anthropic.messages.create(
                    model=MODEL,
                    max_tokens=99,
                    messages=USER,
                    tools=TOOLS,
                    tool_choice=choice,  # type: ignore[arg-type]
                )
            several, one, none = (r.sampling.grammar for r in at.engine.requests)
            assert "{0,15}" in several
            assert "weather" in one
            assert "{0,15}" not in one
            assert none == ""
            with pytest.raises(anthropic.BadRequestError, match="not among the tools"):
                await at.anthropic.messages.create(
                    model=MODEL, max_tokens=9, messages=USER, tools=TOOLS, tool_choice={"type": "tool", "name": "rm"}
                )

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(stream: bool) -> None:
    async def work() -> None:
        async with served([], context_tokens=64) as at:
            long: list[Any] = [{"role": "user", "content": "x y " * 1000}]
            ask: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "stream": stream}
            not_counted = r"prompt is too long: at least 65 tokens > 64 maximum \(.* characters are at least"
            with pytest.raises(anthropic.BadRequestError, match=not_counted) as full:
                await at.anthropic.messages.create(**ask, messages=long)
            assert full.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
            short: list[Any] = [{"role": "user", "content": "x y " * 14}]
            num = (await at.anthropic.messages.count_tokens(model=MODEL, messages=short)).input_tokens
            assert 64 < num < 100
            counted = rf"prompt is too long: {num} tokens > 64 maximum \({num} in the messages\)"
            with pytest.raises(anthropic.BadRequestError, match=counted):
                await at.anthropic.messages.create(**ask, messages=short)
            with pytest.raises(anthropic.NotFoundError) as missing:
                await at.anthropic.messages.create(**{**ask, "model": "other"}, messages=USER)
            assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
            image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
            with pytest.raises(anthropic.BadRequestError, match="'image' is not supported"):
                await at.anthropic.messages.create(**ask, messages=[{"role": "user", "content": [image]}])

    run(work)


class Breaking:
    """A policy that waits until `go` is set, streams one token, and then fails."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.go = asyncio.Event()

    async def read(self, http: httpx.AsyncClient, path: str, body: dict[str, Any], *, ping: str) -> str:
        """Read a streamed answer to its end, and set `go` when it has two keep-alive events."""
        text = ""
        async with http.stream("POST", path, json=body | {"stream": True}) as answer:
            async for part in answer.aiter_text():
                text += part
                if text.count(ping) >= 2:
                    self.go.set()
        return text

    async def complete(self, request: CompletionRequest) -> Completion:
        return await ScriptedEngine([self.ids]).generate(request)

    async def stream(self, request: CompletionRequest) -> AsyncIterator[list[int] | Completion]:
        await self.go.wait()
        yield self.ids[:1]
        raise EngineError("engine-0 is gone", hint="ask again")


def test_a_slow_first_token_has_pings_and_a_broken_stream_ends_with_an_error_event() -> None:
    async def work() -> None:
        config = GatewayConfig(port=0, ping_s=0.1, drain_s=1)
        policy = Breaking(said("ab"))
        async with served(policy=policy, config=config) as at:
            body = {"model": MODEL, "max_tokens": 9, "messages": USER}
            text = await policy.read(at.http, "/messages", body, ping="event: ping")
            kinds = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
            assert kinds[0] == "message_start"
            assert kinds.count("ping") >= 2
            assert kinds[-1] == "error"
            assert "engine-0 is gone" in text
            with pytest.raises(anthropic.APIStatusError, match="engine-0 is gone"):
                async with at.anthropic.messages.stream(model=MODEL, max_tokens=9, messages=USER) as stream:
                    await stream.get_final_message()

    run(work)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_token": 3}, "max_token"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_unsupported_request_fields_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": USER}
    with pytest.raises(RequestRefused) as refused:
        messages.read(json.dumps({**body, **changes}).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_full_context_that_the_engine_finds_is_told_in_anthropics_words() -> None:
    async def work() -> None:
        class Full:
            async def complete(self, request: CompletionRequest) -> Completion:
                raise ContextFull("no room", "for 300 tokens", hint="shorten")

        async with served(policy=Full()) as at:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: for 300 tokens"):
                await at.anthropic.messages.create(model=MODEL, max_tokens=9, messages=USER)

    run(work)
