"""Bodies of any shape, sent to every dialect: an answer, or an error of the client with a hint. Never status 500."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from tests.unit.gateway.sdk import MODEL, SCHEMA, qwen, said

from etude.gateway import GatewayConfig, ServedModel, create_app
from etude.records import Completion, CompletionRequest
from etude.testing import ScriptedEngine

TEXTS = ["", "hi", "<think>", "<|im_end|>", "\ud800", "ü\u0000", "x-anthropic-billing-header", "a" * 2000, "{}", "[["]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "2"}]},
            {"role": "tool", "tool_call_id": "2", "content": "x"},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "stream_options": {"include_usage": True},
        "logit_bias": {"3": 1},
        **dict.fromkeys(("n", "seed", "max_tokens", "top_logprobs", "top_k", "min_tokens"), 1),
        **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"), 0.5),
        **dict.fromkeys(("logprobs", "parallel_tool_calls", "return_token_ids", "stream"), True),
        "stop": ["a"],
    },
    "/v1/completions": {"prompt": "hi", "logprobs": 2, "max_tokens": 3, "stop": "a", "logit_bias": {"1": 2}, "n": 2},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "instructions": "x",
        "tools": [
            {"type": "function", "name": "weather", "parameters": SCHEMA},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
            {"type": "namespace", "name": "box", "tools": [{"type": "function", "name": "shell"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "top_logprobs": 2,
        "max_output_tokens": 4,
        "stream": True,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "x"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [], "is_error": True}]},
        ],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "clear_thinking"}]},
        "max_tokens": 5,
        "stop_sequences": ["a"],
        "top_k": 3,
        "stream": True,
    },
}
GOOD["/v1/messages/count_tokens"] = {k: v for k, v in GOOD["/v1/messages"].items() if k != "stream"}


class Babbling:
    """A policy that answers with random tokens, at most 12."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    async def complete(self, request: CompletionRequest) -> Completion:
        ids = [self.random.randrange(qwen().vocab_size) for _ in range(self.random.randrange(12))]
        if self.random.random() < 0.5:
            ids = said(
                self.random.choice(['<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', "<think>a"])
            )
        return await ScriptedEngine([[*ids, qwen().stop_token_ids[0]]], context_tokens=10_000).generate(request)


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, nested at most three times."""
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [value(chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind == 5:
        return {
            chance.choice(["type", "text", "role", *TEXTS]): value(chance, depth + 1)
            for _ in range(chance.randrange(3))
        }
    return [
        chance.choice(TEXTS),
        chance.choice([None, True, False]),
        chance.randrange(-3, 10**18),
        chance.uniform(-9, 9),
    ][kind]


def mutated(chance: random.Random, body: Any) -> Any:
    """A copy of a JSON value with one part replaced, removed, doubled or added."""
    if isinstance(body, dict) and body and chance.random() < 0.9:
        key = chance.choice(list(body))
        if chance.random() < 0.15:
            return {k: v for k, v in body.items() if k != key}
        if chance.random() < 0.1:
            return {**body, chance.choice(["type", "name", "content", *TEXTS]): value(chance)}
        return {**body, key: mutated(chance, body[key])}
    if isinstance(body, list) and body and chance.random() < 0.9:
        at = chance.randrange(len(body))
        if chance.random() < 0.2:
            return [*body[:at], *body[at + 1 :]]
        if chance.random() < 0.2:
            return [*body, body[at]]
        return [*body[:at], mutated(chance, body[at]), *body[at + 1 :]]
    return value(chance)


def drawn(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body for it: a good one with up to two changes, and sometimes a wrong byte."""
    path = chance.choice(list(GOOD))
    body: Any = {"model": MODEL, **GOOD[path]}
    for name in chance.sample(list(body), chance.randrange(len(body))):  # fewer of what excludes each other
        if name not in ("model", "messages", "input", "prompt", "max_tokens"):
            del body[name]
    for _ in range(chance.randrange(3)):
        body = mutated(chance, body)
    data = json.dumps(body).encode()
    if chance.random() < 0.05:
        cut = chance.randrange(len(data) + 1)
        data = data[:cut] + bytes([chance.randrange(256)]) + data[cut + chance.randrange(3) :]
    return path, data


@pytest.mark.parametrize(
    "requests", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_no_body_makes_an_answer_of_the_class_500(requests: int) -> None:
    chance = random.Random(requests)
    statuses: dict[int, int] = {}
    config = GatewayConfig(port=0, remembered_tokens=20_000)

    async def work() -> None:
        model = ServedModel(Babbling(), qwen(), name=MODEL, context_tokens=3000, config=config)
        app = create_app([model], config=config)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for _ in range(requests):
                path, data = drawn(chance)
                answer = await client.post(path, content=data, headers={"content-type": "application/json"})
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, (path, data, answer.text)
                if answer.status_code >= 400:
                    assert "\n  hint: " in answer.json()["error"]["message"], (path, data, answer.text)
                else:
                    assert b"event: error" not in answer.content
                    assert b"response.failed" not in answer.content
            assert model.num_running == model.num_waiting == 0

    asyncio.run(work())
    assert min(statuses.get(200, 0), statuses.get(400, 0)) > requests // 10, statuses
