"""Every place of the gateway that answers with status 400, asked for over HTTP: what is wrong, why, and a hint."""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.parity import chats
from tests.unit.gateway.sdk import MODEL, SCHEMA, run, said, served
from tests.unit.gateway.test_refusals import NEVER, picky

from etude import gateway
from etude.errors import ContextFull, EtudeError, MalformedRequest
from etude.gateway import DIALECTS
from etude.gateway.errors import RequestRefused
from etude.harness import ChatFormat
from etude.records import Completion, CompletionRequest

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}
TURN = {"role": "assistant", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
LARK = {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
LARGE = {"type": "object", "properties": {"a": {"enum": ["x" * 60_000]}}, "required": ["a"]}
CHAT, TEXT, RESPONSES, MESSAGES = "/chat/completions", "/completions", "/responses", "/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
    "/messages/count_tokens": {"messages": [USER]},
}
CASES: list[tuple[str, dict[str, Any], str]] = [
    # ranges and types of numbers
    *((path, {"temperature": 3}, "3.0 is out of range\n  hint: send a number from 0 to 2") for path in ASKED),
    *((path, {"temperature": "warm"}, "temperature has an invalid value") for path in ASKED),
    *((path, {"top_p": 1.5}, "out of range\n  hint: send a number from 0 to 1") for path in ASKED),
    *((path, {"stream": 1}, "hint: send true or false") for path in ASKED),
    *((path, {"model": 3}, "Expected `str`, got `int`\n  hint: send a string") for path in ASKED),
    *((path, {"nonsense": 3}, "Unknown parameter: 'nonsense'") for path in ASKED),
    *((path, {"max_token": 3}, "did you mean 'max_") for path in (CHAT, TEXT, MESSAGES)),
    (CHAT, {"temperature": float("inf")}, "temperature has an invalid value: Number out of range"),
    (CHAT, {"max_tokens": 0}, "max_tokens = 0 is out of range\n  hint: send a number of at least 1"),
    (CHAT, {"max_tokens": 1.5}, "hint: send an integer"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "send only one of them"),
    (CHAT, {"n": 17}, "from 1 to 16"),
    (CHAT, {"top_k": -2}, "top_k = -2 is out of range\n  hint: send a number from 0 to 2147483647"),
    (CHAT, {"top_k": 10**12}, "top_k = 1000000000000 is out of range\n  hint: send a number from 0 to 2147483647"),
    (MESSAGES, {"top_k": 10**12}, "top_k = 1000000000000 is out of range"),
    (CHAT, {"min_tokens": 6, "max_tokens": 5}, "min_tokens = 6 is out of range\n  hint: send a number from 0 to 5"),
    (RESPONSES, {"stop": "x"}, "hint: this API has no stop; leave it out"),
    (RESPONSES, {"max_tokens": 3}, "hint: this API has no max_tokens; send max_output_tokens"),
    (MESSAGES, {"seed": 3}, "hint: this API has no seed; leave it out"),
    (MESSAGES, {"stop": "x"}, "hint: this API has no stop; send stop_sequences"),
    (CHAT, {"min_tokens": -1}, "min_tokens = -1 is out of range"),
    (CHAT, {"logit_bias": {"x": 1}}, 'send an object such as {"42": -100}'),
    (CHAT, {"logit_bias": {"3": 101}}, "numbers from -100 to 100"),
    (CHAT, {"logit_bias": {"3": "x"}}, "logit_bias[...] has an invalid value"),
    (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias has an unknown token id\n  hint: send ids from 0 to "),
    (CHAT, {"stop": [""]}, "a text of 0 characters\n  hint: send at most 16 texts"),
    (CHAT, {"stop": ["a"] * 17}, "stop has an invalid value: 17 texts"),
    (CHAT, {"top_logprobs": 2}, "hint: send logprobs = true too"),
    (CHAT, {"echo": True}, "hint: leave echo out"),
    (TEXT, {"logprobs": 30}, "logprobs = 30 is out of range"),
    (TEXT, {"prompt": ["a", "b"]}, "hint: send one text, or one list of token ids"),
    (TEXT, {"prompt": [999_999]}, "prompt has an unknown token id"),
    (TEXT, {"prompt": "x" * 100_000}, "hint: reduce the length of the prompt"),
    # messages
    (CHAT, {"messages": []}, "there are no messages"),
    (CHAT, {"messages": "hi"}, "hint: send a list"),
    (CHAT, {"messages": ["hi"]}, "messages[0] has an invalid value"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x"}]}, "hint: send the message to answer as the last"),
    (CHAT, {"messages": [{"role": "usr", "content": "hi"}]}, '"system" or "tool" or "user"'),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role is missing"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "content of type 'image_url' is not supported"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 9000}]}, "maximum context length is 4096 tokens"),
    (CHAT, {"messages": [{**USER, "tool_calls": [CALL]}]}, "hint: send tool_calls in messages of the role assistant"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}, USER]}, "hint: send tool_calls"),
    (CHAT, {"messages": [USER, RESULT]}, "belongs to no call"),
    (CHAT, {"messages": [USER, TURN, USER]}, "have no result: '1'\n  hint: send one tool result"),
    (CHAT, {"messages": [USER, {**TURN, "tool_calls": [CALL, CALL]}, RESULT, RESULT]}, "two tool calls have the id"),
    (CHAT, {"messages": [USER, {**TURN, "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, RESULT]},
     "a tool call has invalid arguments"),
    (RESPONSES, {"input": [{"type": "message", "content": "x"}]}, "input[0].role is missing"),
    (RESPONSES, {"input": [{"type": "web_search_call"}]}, "an item of type 'web_search_call' is not supported"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "send content of type input_text"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "it reads only text"),
    (MESSAGES, {"messages": [{"role": "user", "content": "x " * 9000}]}, "prompt is too long"),
    (MESSAGES, {"messages": [{"role": "user", "content": "x " * 9000}]}, " in the messages)\n  hint: "),
    (MESSAGES, {"max_tokens": None}, "max_tokens is missing\n  hint: send this field"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "send clear_thinking"),
    # tools
    (CHAT, {"tools": [FLAT]}, "a tool is {type, function: {name, parameters}}"),
    (CHAT, {"tools": {"f": 1}}, "tools has an invalid value"),
    (CHAT, {"tools": [TOOL, TOOL]}, "two tools have the name 'f'\n  hint: rename one"),
    (CHAT, {"tools": [TOOL], "tool_choice": "sometimes"}, '"auto" or "none" or "required"'),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "hint: known: f"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "hint: send the tools"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "hint: send allowed_tools"),
    (CHAT, {"tool_choice": "required"}, "there are no tools\n  hint: send tools, or leave tool_choice out"),
    (CHAT, {"tools": [{"function": {"name": "f", "parameters": {"type": "objekt"}}}]}, "schema.type is 'objekt'"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools of type 'web_search' are not supported"),
    (RESPONSES, {"tools": [TOOL]}, "the form of chat completions"),
    (RESPONSES, {"tools": [LARK], "tool_choice": "required"}, "hint: use tool_choice = auto"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice of type 'web_search' is not supported"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "hint: send tools with an input_schema"),
    (MESSAGES, {"tools": [{"name": "f"}]}, "tools[0].input_schema is missing\n  hint: send the JSON schema"),
    (MESSAGES, {"tool_choice": {"type": "required"}}, '"any" or "auto" or "none" or "tool"'),
    # formats of answers
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format lacks json_schema.schema"),
    (CHAT, {"response_format": {"type": "text", "strikt": 1}}, "did you mean 'strict'?"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "type is 'x'"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format lacks schema"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "correct the JSON"),
]  # fmt: skip
HALVES, ENDS = (b"\\ud800", b"\\udc00", b"\\\\\\uD8AB"), (b'"}', b' and more than six bytes"}')
RAW = [
    *(
        (path, data, "the body is empty\n  hint: send a JSON object, such as {")
        for path in ASKED
        for data in (b"", b" ")
    ),
    *((path, data, "the body is not JSON") for path in ASKED for data in (b"{", b"\xff")),
    *((path, data, "hint: send a JSON object, such as {") for path in ASKED for data in (b"[]", b'"hi"', b"3")),
    *((path, b"{}", 'model is missing\n  hint: send this field, which is required, as in {"model"') for path in ASKED),
    (TEXT, b'{"model": "small", "prompt": "hi"} x', "the body is not JSON: JSON is malformed: trailing characters"),
    *((path, b'{"metadata": ' + b"[" * 9000, "nested too deeply\n  hint: send JSON with") for path in ASKED),
    *(
        (TEXT, b'{"model": "small", "prompt": "' + half + end, "half of a surrogate pair")
        for half in HALVES
        for end in ENDS
    ),
    (CHAT, b'{"model": "small", "messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
    (TEXT, b'{"model": "small", "prompt": "\\\\ud800', "the body is not JSON"),
    (CHAT, b'{"model": "small"}', "messages is missing\n  hint: send this field"),
    (CHAT, b'{"model": "small", "messages": [{"role": "user", "content": "\xff"}]}', "the body is not JSON"),
    (
        CHAT,
        b'{"model": "small", "messages": [{"role": "user", "content": "hi"}], "echo": 1e999}',
        "the body is not JSON",
    ),
    (RESPONSES, b'{"model": "small", "input": "hi", "metadata": 1e999}', "the body is not JSON"),
]
HEADERS = [
    ({"x-etude-summaries": "maybe"}, "hint: send on or off"),
    ({"x-etude-user": "a\tb"}, "hint: send at most"),
    ([("x-etude-user", "a"), ("x-etude-user", "b")], "hint: send one, or none"),
]


class Failing:
    """A policy that raises an error."""

    def __init__(self, error: EtudeError) -> None:
        self.error = error

    async def complete(self, request: CompletionRequest) -> Completion:
        raise self.error


def thinking() -> ChatFormat:
    """The chat format of a checkpoint whose answers begin with reasoning."""
    with tempfile.TemporaryDirectory() as folder:
        path = chats.make(Path(folder), "qwen") / "chat_template.jinja"
        path.write_text(path.read_text() + "{% if add_generation_prompt %}<think>\n{% endif %}")
        return ChatFormat.load(path.parent)


def without_calls() -> ChatFormat:
    """The chat format of a checkpoint that has no tokens of tool calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = chats.make(Path(folder), "qwen") / "tokenizer.json"
        path.write_text(path.read_text().replace("tool_call>", "another>"))
        return ChatFormat.load(path.parent)


MAKERS = ("invalid_request", "invalid_tools", "invalid_value", "not_json", "context_exceeded", "unknown_parameter")
MAKERS += ("unsupported_content", "unsupported_value")


def places() -> dict[tuple[str, int], int]:
    """The first line of each call in the gateway that makes an error with status 400, by file, and its last line."""
    found = {}
    for path in Path(gateway.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                of_status = node.func.id == "RequestRefused" and getattr(node.args[0], "value", None) == 400
                if node.func.id in MAKERS or of_status:
                    found[str(path), node.lineno] = node.end_lineno or node.lineno
    return found


def test_every_place_that_answers_400_is_reached_and_says_what_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    seen: set[tuple[str, int]] = set()
    make = RequestRefused.__init__

    def noting(self: RequestRefused, *args: Any, **given: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        make(self, *args, **given)

    monkeypatch.setattr(RequestRefused, "__init__", noting)
    wrong: list[str] = []

    async def ask(at: Any, path: str, data: bytes, says: str, headers: Any = ()) -> None:
        answer = await at.http.post(path, content=data, headers=[("content-type", "application/json"), *headers])
        message = answer.json()["error"]["message"] if answer.status_code >= 400 else answer.text[:200]
        print(f"{path} {data[:120]!r} -> {answer.status_code} {message}\n")
        what, _, hint = message.partition("\n  hint: ")
        is_plain = what and hint and "\n" not in what + hint and "$" not in message and "None" not in message
        if answer.status_code != 400 or says not in message or not is_plain:
            wrong.append(f"{path} {data[:300]!r}: {says!r} is not in, or the form is not that of {message!r}")

    async def work() -> None:
        async with served([]) as at:
            for path, fields, says in CASES:
                body = json.dumps({"model": MODEL, **ASKED[path], **fields}).encode()
                await ask(at, path, body.replace(b"Infinity", b"1e999"), says)
            for path, data, says in RAW:
                await ask(at, path, data, says)
            for headers, says in HEADERS:
                pairs = headers if isinstance(headers, list) else list(headers.items())
                await ask(at, CHAT, json.dumps({"model": MODEL, "messages": [USER]}).encode(), says, pairs)
            assert at.engine.requests == []
        hi = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": NEVER}]}).encode()
        must = json.dumps({"model": MODEL, "messages": [USER], "tools": [TOOL], "tool_choice": "required"}).encode()
        async with served([], chat=picky()) as at:
            await ask(at, CHAT, hi, "not this text")
        tools = [{"type": "function", "function": {"name": name, "parameters": LARGE}} for name in "abcde"]
        large = {"tools": tools, "response_format": {"type": "json_object"}, "messages": [USER], "model": MODEL}
        async with served([], context_tokens=1_000_000) as at:
            await ask(at, CHAT, json.dumps(large).encode(), "response_format: the grammar is too large")
        async with served([], chat=without_calls()) as at:
            await ask(at, CHAT, must, "the checkpoint has no tool-call format\n  hint: use tool_choice = auto")
        async with served([], chat=thinking()) as at:
            await ask(at, CHAT, must, "answers of this model begin with reasoning")
        refused = MalformedRequest("request 7: the grammar is invalid", "it never ends", hint="simplify the grammar")
        schema = {"messages": [USER], "model": MODEL, "response_format": {"type": "json_object"}}
        async with served(policy=Failing(refused)) as at:
            for body, field in ((schema, "response_format"), (json.loads(must), "tools")):
                await ask(at, CHAT, json.dumps(body).encode(), f"the schema of {field}: it never ends")
                answer = await at.http.post(CHAT, json={**body, "stream": True})
                assert answer.json()["error"]["param"] == field
        for error, says in (
            (MalformedRequest("vLLM of engine-0 answered 400", "no such thing", hint="change it"), "no such thing"),
            (ContextFull("request 7 needs 300 tokens", "the context has 200", hint="shorten it"), "hint: shorten it"),
        ):
            async with served(policy=Failing(error)) as at:
                await ask(at, CHAT, hi, says)

    run(work)
    assert wrong == [], "\n".join(wrong)
    missed = [
        f"{Path(path).name}:{first}"
        for (path, first), last in places().items()
        if not any(file == path and first <= line <= last for file, line in seen)
    ]
    assert missed == []


def test_the_bodies_in_hints_are_answered() -> None:
    async def work() -> None:
        async with served([said("ok")] * len(DIALECTS)) as at:
            for dialect in DIALECTS.values():
                refused = await at.http.post(dialect.path.removeprefix("/v1"), json={})
                body = refused.json()["error"]["message"].partition(", as in ")[2].replace("NAME", MODEL)
                answer = await at.http.post(dialect.path.removeprefix("/v1"), json=json.loads(body))
                assert answer.status_code == 200, (body, answer.text)

    run(work)
