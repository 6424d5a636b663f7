"""Rollouts whose turns a server at a URL samples: both dialects, its counts of tokens, its refusals, foreign bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.rollouts.test_rollouts import LIMITS, SPEC, TASK

import etude.rollouts.model_url as module
from etude.errors import ConfigError, EngineError
from etude.harness import ChatFormat
from etude.loop.suites import URL_CONTEXT
from etude.records import Rollout, RolloutSpec
from etude.records.interruption import interrupted
from etude.records.rollout import Boundary, Ending
from etude.records.summary import summary_of
from etude.rollouts import run_rollout
from etude.rollouts.model_url import Endpoint, UrlPolicy, read_endpoint, write_endpoint
from etude.rollouts.view import view_turns
from etude.testing import MemoryRuntime

Call = tuple[str, dict[str, Any]]
URL_LIMITS = replace(LIMITS, context_tokens=URL_CONTEXT, turn_tokens=4096, prompt="use the tools")
REPAIR: list[Call | str] = [
    ("test", {}),
    ("edit", {"path": "calc.py", "line": "2", "text": "return n + 3 # <tool_call>"}),
    "done?",
    ("submit", {}),
]


def chat_body(said: Call | str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
    if not isinstance(said, str):
        call = {"name": said[0], "arguments": json.dumps(said[1])}
        message["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def messages_body(said: Call | str) -> dict[str, Any]:
    part = {"type": "text", "text": said} if isinstance(said, str) else {
        "type": "tool_use", "id": "t", "name": said[0], "input": said[1],
    }  # fmt: skip
    usage = {"input_tokens": 60, "cache_read_input_tokens": 40, "output_tokens": 7}
    return {"content": [part], "usage": usage, "stop_reason": "end_turn"}


class Server:
    """A server that says what it is told to, in order. An answer may also be (status, body)."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.requests, self.headers = answers, list[dict[str, Any]](), list[Any]()

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        found = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(found, bytes):
            return web.Response(body=found, content_type="application/json")
        if isinstance(found, tuple) and isinstance(found[0], int):
            return web.json_response(found[1], status=found[0])
        make = messages_body if request.path == "/v1/messages" else chat_body
        return web.json_response(make(found))


def play(
    server: Server,
    folder: Path,
    *,
    dialect: str = "chat",
    limits: Any = URL_LIMITS,
    spec: RolloutSpec = SPEC,
    then: Callable[[UrlPolicy, Rollout], None] = lambda *_: None,
) -> Rollout:
    async def work() -> Rollout:
        app = web.Application()
        app.router.add_post("/v1/{path:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        endpoint = Endpoint(url=f"http://127.0.0.1:{port}/v1", model="big", dialect=dialect, key_variable="BIG_KEY")
        write_endpoint(folder, endpoint)
        assert read_endpoint(folder) == endpoint
        policy = UrlPolicy(endpoint, ChatFormat.load(folder / "tokenizer"))
        try:
            rollout = await run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=policy.chat, harness=limits)
            then(policy, rollout)
            return rollout
        finally:
            await policy.close()
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(work(), 200))


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_model_at_a_url_repairs_a_file_with_the_same_tools(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_KEY", "secret")
    server = Server([*REPAIR])

    def counted(policy: UrlPolicy, rollout: Rollout) -> None:
        turns = view_turns(rollout.trace, policy.chat)
        summary, views = policy.counted(rollout.trace, summary_of(rollout), turns)
        assert summary.num_sampled == 28
        assert [(one.num_prompt, one.num_cached, one.num_sampled) for one in views] == [(100, 40, 7)] * 4
        assert "return n + 3 #" in views[1].reply

    rollout = play(server, tmp_path, dialect=dialect, then=counted)
    assert (rollout.ending, rollout.invalid) == (Ending.SUBMITTED, None)
    assert rollout.exports["calc.py"] == b"def f(n):\n    return n + 3 # <tool_call>\n"
    names = [(tool.get("function") or tool)["name"] for tool in server.requests[0]["tools"]]
    assert names == list(LIMITS.tools)
    last = json.dumps(server.requests[-1])
    assert "use the tools" in last
    assert "fix the failing test" in last
    assert "call a tool" in last
    key = server.headers[0]["x-api-key"] if dialect == "messages" else server.headers[0]["authorization"]
    assert key.removeprefix("Bearer ") == "secret"
    assert "secret" not in (tmp_path / "endpoint.json").read_text()


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_calls_that_do_not_fit_are_told_to_the_model_and_counted(dialect: str, tmp_path: Path) -> None:
    server = Server([("fly", {}), ("cat", {"file": "x"}), ("submit", {})])
    rollout = play(server, tmp_path, dialect=dialect)
    assert (rollout.ending, rollout.num_malformed) == (Ending.SUBMITTED, 2)
    assert "no such tool: fly" in json.dumps(server.requests[1])
    results = ('"tool_call_id"', '"tool_result"')  # servers refuse a result without a call
    assert not any(one in json.dumps(server.requests[-1]) for one in results)


def test_a_parameter_that_a_server_refuses_is_left_out_from_then_on(tmp_path: Path) -> None:
    refuse = {"error": {"message": "unknown parameter: 'max_completion_tokens'"}}
    server = Server([(400, refuse), (400, {"error": {"message": "'seed' is not supported"}}), ("submit", {})])
    assert play(server, tmp_path).ending is Ending.SUBMITTED
    assert server.requests[2]["max_tokens"] == 4096
    assert not {"seed", "max_completion_tokens"} & {*server.requests[2]}


def test_a_busy_server_is_asked_again_and_one_that_refuses_makes_the_rollout_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = (429, {"error": {"message": "slow down"}})
    assert play(Server([busy, ("submit", {})]), tmp_path).ending is Ending.SUBMITTED
    refused = play(Server([(401, {"error": {"message": "wrong key"}})]), tmp_path)
    assert refused.invalid is not None
    assert refused.invalid.boundary is Boundary.PROVIDER
    assert "status 401" in refused.invalid.reason
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    late = play(Server([busy]), tmp_path)
    assert late.invalid is not None
    assert "status 429" in late.invalid.reason


def test_a_conversation_that_is_too_long_for_the_server_ends_the_rollout_and_is_graded(tmp_path: Path) -> None:
    long = (400, {"error": {"message": "maximum context length is 8192", "code": "context_length_exceeded"}})
    rollout = play(Server([("ls", {}), long]), tmp_path)
    assert (rollout.ending, rollout.invalid) == (Ending.CONTEXT, None)


def test_a_server_with_a_small_context_is_asked_for_fewer_tokens(tmp_path: Path) -> None:
    large = (
        400,
        {"error": {"message": "max_completion_tokens: too large for the context"}},
    )
    server = Server([large, large, ("submit", {})])
    assert play(server, tmp_path).ending is Ending.SUBMITTED
    assert [one["max_completion_tokens"] for one in server.requests] == [4096, 1024, 256]


def test_the_user_says_more_after_a_turn(tmp_path: Path) -> None:
    task = replace_instruction(interrupted("fix it", "stop at once", after=1))
    program = {"program": "etude.harness.interruption:InterruptedLoop"}
    server = Server([("ls", {}), ("submit", {})])
    play(server, tmp_path, limits=replace(URL_LIMITS, **program), spec=task)
    first, second = (json.dumps(one["messages"]) for one in server.requests)
    assert "fix it" in first
    assert "stop at once" not in first
    assert second.index("calc.py") < second.index("stop at once")


def replace_instruction(text: str) -> RolloutSpec:
    return msgspec.structs.replace(SPEC, task=msgspec.structs.replace(TASK, instruction=text))


@pytest.mark.parametrize(("url", "dialect"), [("ftp://x", "chat"), ("http://x", "cat")])
def test_an_endpoint_that_cannot_be_is_refused(url: str, dialect: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint(url=url, model="m", dialect=dialect)


KEYS = [
    *("choices", "message", "content", "tool_calls", "function", "name", "arguments", "usage", "prompt_tokens"),
    *("completion_tokens", "prompt_tokens_details", "cached_tokens", "type", "text", "input", "input_tokens"),
    *("output_tokens", "cache_read_input_tokens", "finish_reason", "stop_reason"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[UrlPolicy]:
    folder = tmp_path_factory.mktemp("url")
    write_endpoint(folder, Endpoint(url="http://x", model="m"))
    chat = ChatFormat.load(folder / "tokenizer")

    async def make() -> list[UrlPolicy]:
        return [UrlPolicy(Endpoint(url="http://x", model="m", dialect=d), chat) for d in ("chat", "messages")]

    return asyncio.run(make())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_of_a_server_raise_anything_but_an_engine_error(policies: list[UrlPolicy], said: bytes) -> None:
    for policy in policies:
        with contextlib.suppress(EngineError):
            answer = policy._read(said)
            assert isinstance(answer.text, str)
            assert answer.usage.prompt >= 0


def test_an_endpoint_tells_whether_its_server_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint(url=f"http://127.0.0.1:{server.getsockname()[1]}/v1", model="m")
        assert endpoint.unreachable() == ""
    assert "refused" in endpoint.unreachable()
    assert "range" in Endpoint(url="http://127.0.0.1:99999", model="m").unreachable()
