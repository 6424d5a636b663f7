"""Requests that are wrong inside: schemas, tools, results of tools, formats and paths. Each is refused before sampling,
by the class of error of the vendor's client, and says what is needed."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.unit.gateway.sdk import CALLS, MODEL, SCHEMA, Served, run, said, served

from etude.errors import MalformedRequest
from etude.gateway import DIALECTS, GatewayConfig, Keys
from etude.gateway.errors import context_exceeded
from etude.gateway.recording import MAX_USER_CHARS
from etude.gateway.schemas import fault_of
from etude.privacy import Subject
from etude.records import Completion, CompletionRequest

USER = {"role": "user", "content": "the weather?"}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"type": "objekt"}, "objekt"),
    ({"type": "object", "properties": {"a": {"type": "objekt"}}}, "a.type"),
    ({"type": "object", "properties": {"a": {"type": "number", "minimum": "x"}}}, "minimum"),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}}, "nothing"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "look"),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}},
            "required": ["a"],
        },
        "Unsatisfiable",
    ),
]
BAD_REQUESTS = (openai.BadRequestError, anthropic.BadRequestError)


async def ask(at: Served, dialect: str, *, schema: Any = None, function: Any = None, choice: str = "auto") -> Any:
    """Ask for JSON under `schema`, or offer a tool with the parameters `function`, by the client of a dialect."""
    given: dict[str, Any] = {"model": MODEL}
    if dialect == "chat":
        if schema is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        if function is not None:
            given |= {"tools": [{"type": "function", "function": {"name": "weather", "parameters": function}}]}
            given["tool_choice"] = choice
        return await at.openai.chat.completions.create(messages=[USER], **given)  # type: ignore[list-item]
    if dialect == "responses":
        if schema is not None:
            given["text"] = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
        if function is not None:
            given |= {"tools": [{"type": "function", "name": "weather", "parameters": function}], "tool_choice": choice}
        return await at.openai.responses.create(input="hi", **given)
    if schema is not None:
        given["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if function is not None:
        given |= {"tools": [{"name": "weather", "input_schema": function}]}
        given["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
    return await at.anthropic.messages.create(messages=[USER], max_tokens=50, **given)  # type: ignore[list-item]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_schema_that_cannot_be_followed_is_a_bad_request_before_anything_is_sampled(dialect: str) -> None:
    pytest.importorskip("llguidance")

    async def work() -> None:
        async with served([]) as at:
            for schema, says in INVALID + UNSUPPORTED:
                for given in ({"schema": schema}, {"function": schema, "choice": "required"}):
                    with pytest.raises(BAD_REQUESTS, match=says) as refused:
                        await ask(at, dialect, **given)
                    assert "  hint: " in str(refused.value)
                    assert "weather" in str(refused.value) or "schema" in given
                    if dialect != "messages":
                        param = {"chat": "response_format", "responses": "text.format"}[dialect]
                        assert refused.value.body["param"] == (param if "schema" in given else "tools")  # type: ignore[index]
            assert at.engine.requests == []

    run(work)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_tool_that_need_not_be_called_must_have_a_json_schema_but_may_have_any_keyword(dialect: str) -> None:
    async def work() -> None:
        async with served([said("sunny")] * len(UNSUPPORTED)) as at:
            for schema, says in INVALID:
                with pytest.raises(BAD_REQUESTS, match=says):
                    await ask(at, dialect, function=schema)
            for schema, _ in UNSUPPORTED:
                await ask(at, dialect, function=schema)
            assert len(at.engine.requests) == len(UNSUPPORTED)

    run(work)


def test_a_fault_of_a_schema_names_its_path() -> None:
    assert fault_of({"type": ["string", "null"], "items": [], "anyOf": [True, {"type": "null"}], "x-any": 3}) == ""
    assert fault_of({"anyOf": [{}, {"items": {"maxItems": True}}]}).startswith("schema.anyOf[1].items.maxItems is")
    assert fault_of({"allOf": {}}) == "schema.allOf is not a list of schemas"
    assert fault_of({"$defs": {"a": 1}}).startswith("schema.$defs.a is '1'")
    assert fault_of({"properties": []}) == "schema.properties is not an object of schemas"


class Refusing:
    """A policy whose engine refuses the grammar of a request."""

    async def complete(self, request: CompletionRequest) -> Completion:
        raise MalformedRequest(f"request {request.request_id}: the grammar", "it matches nothing", hint="simplify it")


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_request_that_engines_refuse_is_a_bad_request_without_the_name_that_it_has_there(dialect: str) -> None:
    async def work() -> None:
        async with served(policy=Refusing()) as at:
            with pytest.raises(BAD_REQUESTS, match="it matches nothing") as refused:
                await ask(at, dialect, schema=SCHEMA)
            assert "request chat-" not in str(refused.value)

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_not_returned_as_text(stream: bool) -> None:
    async def work() -> None:
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
        async with served([said(CALLS)[:12], said("so: " + CALLS)[:14]]) as at:
            for text, most in (("", 12), ("so: ", 14)):
                ask: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": tools, "max_tokens": most}
                if stream:
                    chunks = [c async for c in await at.openai.chat.completions.create(stream=True, **ask)]
                    content = "".join(c.choices[0].delta.content or "" for c in chunks)
                    finish = chunks[-1].choices[0].finish_reason
                else:
                    [choice] = (await at.openai.chat.completions.create(**ask)).choices
                    content, finish = choice.message.content or "", choice.finish_reason
                assert (content, finish) == (text, "length")

    run(work)


FUNCTION = {"name": "weather", "parameters": SCHEMA}
OF_CHAT = {"type": "function", "function": FUNCTION}
FLAT = {"type": "json_schema", "schema": SCHEMA}
NESTED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/chat/completions", {"response_format": FLAT}, '"json_schema": {"name"'),
        ("/chat/completions", {"response_format": {"type": "json_schema"}}, '"json_schema": {"name"'),
        ("/chat/completions", {"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema.schema"),
        ("/chat/completions", {"response_format": {**NESTED, "strikt": True}}, "strikt"),
        ("/chat/completions", {"tools": [{"type": "function", **FUNCTION}]}, "function: {name, parameters}"),
        ("/chat/completions", {"tools": [OF_CHAT, OF_CHAT]}, "two tools have the name 'weather'"),
        ("/chat/completions", {"max_tokens": 5, "max_completion_tokens": 6}, "send only one of them"),
        ("/chat/completions", {"messages": [{"role": "usr", "content": "hi"}]}, '"system" or "tool" or "user"'),
        ("/chat/completions", {"tool_choice": "sometimes"}, '"auto" or "none" or "required"'),
        ("/chat/completions", {"response_format": {"type": "xml"}}, '"json_object" or "json_schema" or "text"'),
        ("/responses", {"text": {"format": NESTED}}, '"schema": {'),
        ("/responses", {"text": {"format": {"type": "json_schema"}}}, '"schema": {'),
        ("/responses", {"tools": [OF_CHAT]}, "the form of chat completions"),
        ("/responses", {"input": [{"role": "usr", "content": "hi"}]}, '"system" or "user"'),
        ("/messages", {"messages": [{"role": "usr", "content": "hi"}]}, '"assistant" or "system" or "user"'),
        ("/messages", {"tool_choice": {"type": "required"}}, '"any" or "auto" or "none" or "tool"'),
    ],
)
def test_a_field_of_another_api_or_value_is_refused_with_what_is_needed(
    path: str, fields: dict[str, Any], says: str
) -> None:
    conversation = {"input": "hi"} if path == "/responses" else {"messages": [USER]}

    async def work() -> None:
        async with served([]) as at:
            limit = {"max_tokens": 9} if path == "/messages" else {}
            refused = await at.http.post(path, json={"model": MODEL, **limit, **conversation, **fields})
            assert refused.status_code == 400, refused.text
            assert says in refused.json()["error"]["message"]
            assert at.engine.requests == []

    run(work)


def call(number: str, name: str = "weather") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


def result(number: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": "sunny"}


def turn(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([USER, result("1")], "belongs to no call"),
        ([result("1"), USER], "belongs to no call"),
        ([USER, turn(call("1")), result("2")], "'2' belongs to no call"),
        ([USER, turn(call("1"), call("2")), result("1")], "have no result: '2'"),
        ([USER, turn(call("1")), USER], "have no result: '1'"),
        ([USER, turn(call("1"), call("1")), result("1"), result("1")], "two tool calls have the id '1'"),
        ([USER, turn(call("1")), result("1"), result("1")], "belongs to no call"),
    ],
)
def test_results_of_tools_must_match_the_calls(messages: list[Any], says: str) -> None:
    async def work() -> None:
        async with served([said("ok")] * 3) as at:
            refused = await at.http.post("/chat/completions", json={"model": MODEL, "messages": messages})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
            assert says in refused.json()["error"]["message"]
            assert at.engine.requests == []
            both = [USER, turn(call("1"), call("2")), result("2"), result("1"), turn(call("1")), result("1")]
            for talk in (both, [USER, turn(call("")), {"role": "tool", "content": "sunny"}]):
                fine = await at.http.post("/chat/completions", json={"model": MODEL, "messages": talk})
                assert fine.status_code == 200, fine.text

    run(work)


@pytest.mark.parametrize(
    ("path", "headers", "status", "says"),
    [
        ("/v1/chat/completion", {}, 404, "did you mean '/v1/chat/completions'?"),
        ("/chat/completions", {}, 404, "did you mean '/v1/chat/completions'?"),
        ("/completion", {}, 404, "did you mean '/v1/completions'?"),
        ("/v1/v1/messages", {"anthropic-version": "2023-06-01"}, 404, "did you mean '/v1/messages'?"),
        ("/v1/message", {}, 404, "did you mean '/v1/messages'?"),
        ("/messages", {}, 404, "did you mean '/v1/messages'?"),
        ("/v1/embeddings", {}, 404, "the paths are /health, "),
        ("/v1/embeddings", {"anthropic-version": "2023-06-01"}, 404, "the paths are /health, "),
        ("/" + "v1/" * 3000, {}, 404, "the paths are /health, "),
        ("/v1/models", {}, 405, "send GET"),
    ],
)
def test_a_wrong_path_names_the_nearest_one_and_the_base_urls(
    path: str, headers: dict[str, str], status: int, says: str
) -> None:
    async def work() -> None:
        async with served([]) as at, httpx.AsyncClient(base_url=str(at.http.base_url).removesuffix("/v1/")) as client:
            refused = await client.post(path, json={}, headers=headers)
            assert refused.status_code == status
            message = refused.json()["error"]["message"]
            assert says in message
            assert status == 405 or "base URL" in message
            assert (refused.json().get("type") == "error") == (bool(headers) or "'/v1/messages'" in says)

    run(work)


@pytest.mark.parametrize(("dialect", "param"), [("text", "prompt"), ("responses", "input"), ("chat", "messages")])
def test_a_full_context_names_the_field_that_has_the_prompt(dialect: str, param: str) -> None:
    async def work() -> None:
        long = "x y " * 20
        async with served([], context_tokens=64) as at:
            fields: dict[str, Any] = {
                "text": {"prompt": long, "max_tokens": 60},
                "responses": {"input": long, "max_output_tokens": 60},
                "chat": {"messages": [{"role": "user", "content": long}], "max_tokens": 60},
            }[dialect]
            full = await at.http.post(DIALECTS[dialect].path.removeprefix("/v1"), json={"model": MODEL, **fields})
            assert (full.status_code, full.json()["error"]["param"]) == (400, param)
            assert f"in the {param}, 60 in the completion" in full.json()["error"]["message"]

    run(work)


def test_a_prompt_that_leaves_no_token_for_an_answer_is_told_so() -> None:
    full = context_exceeded(64, 64, 0)
    assert "you requested 65 tokens (64 in the messages, and an answer has at least 1)" in full.message
    assert full.context.startswith("65 tokens > 64 maximum")


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ANTHROPIC = {"anthropic-version": "2023-06-01"}
REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", "", {"headers": {"authorization": ""}, "json": {}}, 401, "the request has none"),
    ("POST", "", {"headers": {"authorization": "Bearer guess"}, "json": {}}, 401, "none of this gateway's keys"),
    ("GET", "", {}, 405, "takes only POST"),
    ("POST", "", {"json": {"messages": "x" * 3000}}, 413, "more than 2048 bytes"),
    ("POST", "", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "'text/plain'"),
    ("POST", "", {"content": b"{}"}, 415, "it has no content-type"),
    ("POST", "/v1/models", {"json": {}}, 405, "takes only GET"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", MESSAGES, "/v1/messages/count_tokens"])
def test_what_http_refuses_says_why_and_what_to_do_in_the_dialect_of_the_path(path: str) -> None:
    async def work() -> None:
        config = GatewayConfig(port=0, max_body_bytes=2048)
        async with (
            served([], config=config, keys=Keys.of("right"), key="right") as at,
            httpx.AsyncClient(base_url=str(at.http.base_url).removesuffix("/v1/")) as client,
        ):
            for method, other, given, status, says in REFUSED:
                of_anthropic = path.startswith(MESSAGES)
                named = {"authorization": "Bearer right", **(ANTHROPIC if of_anthropic else {})}
                headers = {**named, **given.get("headers", {})}
                refused = await client.request(method, other or path, **{**given, "headers": headers})
                assert refused.status_code == status, refused.text
                message = refused.json()["error"]["message"]
                what, _, hint = message.partition("\n  hint: ")
                assert ": " in what, message
                assert says in what, message
                assert hint, message
                assert (refused.json().get("type") == "error") == of_anthropic
                assert status != 405 or ("GET" if other else "POST") in refused.headers["allow"]
                assert other or status != 405 or hint == "send POST"

    run(work)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("name", [b"b" * 257, b"bob\tx", "Übel".encode("latin-1"), "a\u200bb".encode()])
def test_a_user_under_whose_name_nothing_can_be_captured_is_refused_by_the_header(path: str, name: bytes) -> None:
    async def work() -> None:
        async with served([said("ok")]) as at:
            body = {"model": MODEL, "messages": [USER], "max_tokens": 9}
            headers: Any = {b"x-etude-user": name}
            refused = await at.http.post(path.removeprefix("/v1"), json=body, headers=headers)
            assert refused.status_code == 400
            assert "x-etude-user is not a name" in refused.json()["error"]["message"]
            headers = {b"x-etude-user": b"b" * MAX_USER_CHARS}
            assert (await at.http.post(path.removeprefix("/v1"), json=body, headers=headers)).status_code == 200
            assert Subject.of("local", "b" * MAX_USER_CHARS)
            two = [(b"x-etude-user", b"bob"), (b"x-etude-user", b"eve")]
            refused = await at.http.post(path.removeprefix("/v1"), json=body, headers=two)
            assert refused.status_code == 400
            assert "has 2 headers x-etude-user" in refused.json()["error"]["message"]

    run(work)
