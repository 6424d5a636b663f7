"""OpenAI's Responses, asked with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.unit.gateway.sdk import CALLS, MODEL, SCHEMA, qwen, run, said, served
from tests.unit.gateway.test_messages import Breaking

from etude.gateway import GatewayConfig, RequestRefused
from etude.gateway.dialects import responses

TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
THOUGHT = "<think>\nhm\n</think>\n\n"


def test_reasoning_message_and_parallel_calls_come_as_items_and_their_results_find_the_turn() -> None:
    async def work() -> None:
        async with served([said(THOUGHT + "look" + CALLS), said("sunny")]) as at:
            ask: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "instructions": "be brief", "store": False}
            first = await at.openai.responses.create(
                **ask, input="the weather?", reasoning={"effort": "low"}, include=["reasoning.encrypted_content"]
            )
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
            assert (first.status, first.output_text, first.instructions) == ("completed", "look", "be brief")
            assert first.output[0].content[0].text == "hm"  # type: ignore[union-attr]
            paris, rome = first.output[2:]
            assert json.loads(rome.arguments) == {"city": "Rome"}  # type: ignore[union-attr]
            assert first.usage is not None
            assert first.usage.output_tokens == len(said(THOUGHT + "look" + CALLS))
            talk: list[Any] = [
                {"role": "user", "content": "the weather?"},
                *(item.model_dump(exclude_none=True) for item in first.output[1:]),
                {"type": "function_call_output", "call_id": rome.call_id, "output": "of rome"},  # type: ignore[union-attr]
                {
                    "type": "function_call_output",
                    "call_id": paris.call_id,
                    "output": [{"type": "input_text", "text": "of paris"}],
                },  # type: ignore[union-attr]
            ]
            second = await at.openai.responses.create(**ask, input=talk)
            assert second.output_text == "sunny"
            one, two = at.engine.requests
            before = [*one.prompt_ids.tolist(), *said(THOUGHT + "look" + CALLS)]
            assert two.prompt_ids[: len(before)].tolist() == before
            added = qwen().decode(two.prompt_ids[len(before) :])
            assert added.index("of paris") < added.index("of rome")

    run(work)


def test_a_stream_joins_to_the_whole_response_with_events_in_order() -> None:
    async def work() -> None:
        async with served([said(THOUGHT + "look" + CALLS)] * 3) as at:
            ask: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "input": "the weather?"}
            async with at.openai.responses.stream(**ask) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]] == [
                "response.created", "response.in_progress",
                "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
                "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
                "response.output_item.added", "response.content_part.added", "response.output_text.delta",
                "response.output_text.done", "response.content_part.done", "response.output_item.done",
                *["response.output_item.added", "response.function_call_arguments.delta",
                  "response.function_call_arguments.done", "response.output_item.done"] * 2,
                "response.completed",
            ]  # fmt: skip
            whole = await at.openai.responses.create(**ask)
            assert final.output_text == whole.output_text == "look"
            assert [i.type for i in final.output] == [i.type for i in whole.output]
            raw = await at.openai.responses.create(**ask, stream=True)
            events = [event async for event in raw]
            assert [e.sequence_number for e in events] == list(range(len(events)))
            added = [e.item.id for e in events if e.type == "response.output_item.added"]
            assert added == [e.item.id for e in events if e.type == "response.output_item.done"]

    run(work)


def test_custom_tools_get_their_input_as_text() -> None:
    async def work() -> None:
        patch = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
        async with served([said(patch)] * 2) as at:
            ask: dict[str, Any] = {"model": MODEL, "input": "go", "tools": [{"type": "custom", "name": "apply_patch"}]}
            item = (await at.openai.responses.create(**ask)).output[0]
            assert (item.type, item.input) == ("custom_tool_call", "*** Begin")  # type: ignore[union-attr]
            events = [event async for event in await at.openai.responses.create(**ask, stream=True)]
            deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
            assert deltas == ["*** Begin"]
            result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}  # type: ignore[union-attr]
            talk = [{"role": "user", "content": "go"}, item.model_dump(), result]
            request = responses.read(json.dumps({**ask, "input": talk}).encode())
            assert [m["role"] for m in request.messages] == ["user", "assistant", "tool"]

    run(work)


BOX: dict[str, Any] = {
    "type": "namespace",
    "name": "box",
    "description": "A box.",
    "tools": [
        {"type": "function", "name": "shell", "description": "Run.", "parameters": SCHEMA},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
    ],
}


def test_a_call_of_a_tool_in_a_namespace_has_its_own_name_and_continues_its_turn() -> None:
    async def work() -> None:
        shell = '<tool_call>\n{"name": "box__shell", "arguments": {"city": "x"}}\n</tool_call>\n'
        patch = '<tool_call>\n{"name": "box__patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
        async with served([said(shell + patch), said("ok")] * 2) as at:
            for stream in (False, True):
                ask: dict[str, Any] = {"model": MODEL, "tools": [*TOOLS, BOX]}
                if stream:
                    async with await at.openai.responses.create(**ask, input=f"{stream}", stream=True) as events:
                        ends = [event async for event in events]
                    calls = [e.item for e in ends if e.type == "response.output_item.done"]
                else:
                    calls = (await at.openai.responses.create(**ask, input=f"{stream}")).output
                found = [item.model_dump(exclude_none=True) for item in calls]
                assert [(c["type"], c["namespace"], c["name"]) for c in found] == [
                    ("function_call", "box", "shell"),
                    ("custom_tool_call", "box", "patch"),
                ]
                assert found[1]["input"] == "*** Begin"
                outputs = [
                    {"type": f"{c['type']}_output", "call_id": c["call_id"], "output": f"of {c['name']}"} for c in found
                ]
                talk: list[Any] = [{"role": "user", "content": f"{stream}"}, *found, *outputs]
                await at.openai.responses.create(**ask, input=talk)
                one, two = at.engine.requests[-2:]
                before = [*one.prompt_ids.tolist(), *said(shell + patch)]
                assert two.prompt_ids[: len(before)].tolist() == before
                read = qwen().decode(one.prompt_ids)
                assert "A box.\\n\\nRun." in read
                assert "follows this grammar (lark):\\nstart: x" in read

    run(work)


def test_a_namespace_without_tools_or_a_name_offers_nothing() -> None:
    async def work() -> None:
        async with served([said("ok")] * 2) as at:
            for empty in ({"type": "namespace", "name": "box"}, {"type": "namespace"}):
                answer = await at.http.post("/responses", json={"model": MODEL, "input": "x", "tools": [empty]})
                assert answer.status_code == 200, answer.text

    run(work)


def test_a_tool_of_a_namespace_can_be_chosen_and_a_regex_of_a_custom_tool_is_enforced() -> None:
    def read(**more: Any) -> Any:
        return responses.read(json.dumps({"model": "m", "input": "x", **more}).encode())

    named = {"type": "function", "namespace": "box", "name": "shell"}
    functions = {**BOX, "tools": BOX["tools"][:1]}
    [tool] = read(tools=[*TOOLS, functions], tool_choice=named).tools
    assert tool["function"]["name"] == "box__shell"
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    [custom] = read(tools=[{"type": "custom", "name": "n", "format": form}], tool_choice="required").tools
    assert custom["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    with pytest.raises(RequestRefused, match="cannot be forced to call a tool with a Lark grammar") as refused:
        read(tools=[BOX], tool_choice="required")
    assert refused.value.param == "tool_choice"


def test_parameters_reach_the_policy() -> None:
    async def work() -> None:
        async with served([said("{}"), said("far too long"), said(CALLS), said("ab")]) as at:
            form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
            await at.openai.responses.create(model=MODEL, input="x", text=form, top_p=0.9, temperature=0.5)
            sampling = at.engine.requests[0].sampling
            assert (sampling.top_p, sampling.temperature) == (0.9, 0.5)
            assert json.loads(sampling.grammar) == {"json_schema": SCHEMA}
            cut = await at.openai.responses.create(model=MODEL, input="x", max_output_tokens=2)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
            named: Any = {"type": "function", "name": "weather"}
            await at.openai.responses.create(model=MODEL, input="x", tools=TOOLS, tool_choice=named)
            assert "weather" in at.engine.requests[2].sampling.grammar
            scored = await at.openai.responses.create(
                model=MODEL, input="x", include=["message.output_text.logprobs"], top_logprobs=2
            )
            logprobs = scored.output[0].content[0].logprobs  # type: ignore[union-attr]
            assert "".join(token.token for token in logprobs) == "ab"
            assert at.engine.requests[3].sampling.top_logprobs == 2

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_has_openais_code(stream: bool) -> None:
    async def work() -> None:
        async with served([], context_tokens=64) as at:
            with pytest.raises(openai.BadRequestError) as full:
                await at.openai.responses.create(model=MODEL, input="x y " * 100, stream=stream)  # type: ignore[call-overload]
            assert full.value.code == "context_length_exceeded"

    run(work)


def test_a_broken_stream_ends_with_an_error_and_a_failed_response() -> None:
    async def work() -> None:
        config = GatewayConfig(port=0, ping_s=0.1, drain_s=1)
        policy = Breaking(said("ab"))
        async with served(policy=policy, config=config) as at:
            text = await policy.read(at.http, "/responses", {"model": MODEL, "input": "x"}, ping=": keep-alive")
            kinds = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-2:] == ["error", "response.failed"]

    run(work)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [BOX]}]}, "tools[0].tools[0]"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_unsupported_request_fields_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        responses.read(json.dumps({"model": "m", "input": "x", **changes}).encode())
    assert (refused.value.status, refused.value.param) == (400, param)
