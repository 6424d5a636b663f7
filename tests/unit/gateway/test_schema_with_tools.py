"""JSON under a schema beside tools, in each dialect: the answer is such JSON or a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.gateway.sdk import CALLS, MODEL, SCHEMA, Served, run, said, served

MESSAGES = [{"role": "user", "content": "the weather?"}]
FUNCTION = {"name": "weather", "parameters": SCHEMA}
SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}


async def chat(at: Served, choice: str) -> tuple[str | None, int]:
    form: Any = {"type": "json_schema", "json_schema": {"name": "score", "schema": SCORE}}
    tools: Any = [{"type": "function", "function": FUNCTION}]
    ask: dict[str, Any] = {"messages": MESSAGES, "tools": tools, "response_format": form, "tool_choice": choice}
    message = (await at.openai.chat.completions.create(model=MODEL, **ask)).choices[0].message
    return message.content, len(message.tool_calls or ())


async def of_responses(at: Served, choice: str) -> tuple[str | None, int]:
    form: Any = {"format": {"type": "json_schema", "name": "score", "schema": SCORE}}
    tools: Any = [{"type": "function", **FUNCTION}]
    ask: dict[str, Any] = {"input": "the weather?", "tools": tools, "text": form, "tool_choice": choice}
    response = await at.openai.responses.create(model=MODEL, **ask)
    return response.output_text or None, sum(item.type == "function_call" for item in response.output)


async def of_messages(at: Served, choice: str) -> tuple[str | None, int]:
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    kind: Any = {"type": {"required": "any"}.get(choice, choice)}
    form: Any = {"format": {"type": "json_schema", "schema": SCORE}}
    ask: dict[str, Any] = {"messages": MESSAGES, "tools": tools, "output_config": form, "tool_choice": kind}
    content = (await at.anthropic.messages.create(model=MODEL, max_tokens=200, **ask)).content
    texts = [block.text for block in content if block.type == "text"]
    return "".join(texts) or None, sum(block.type == "tool_use" for block in content)


@pytest.mark.parametrize("ask", [chat, of_responses, of_messages])
def test_the_answer_is_json_under_the_schema_or_a_call(ask: Any) -> None:
    async def work() -> None:
        async with served([said('{"score": 3}'), said(CALLS), said(CALLS), said('{"score": 4}')]) as at:
            assert await ask(at, "auto") == ('{"score": 3}', 0)
            assert await ask(at, "auto") == (None, 2)
            assert await ask(at, "required") == (None, 2)
            assert await ask(at, "none") == ('{"score": 4}', 0)
            free, again, forced, forbidden = (json.loads(request.sampling.grammar) for request in at.engine.requests)
            assert free == again
            start, _, rest = free["lark"].partition("\n")
            assert start == "start: called | answer"
            assert '"score"' in rest
            assert "weather" in rest
            assert forced["lark"].splitlines()[0] == rest.splitlines()[0].replace("called:", "start:")
            assert forbidden == {"json_schema": SCORE}

    run(work)
