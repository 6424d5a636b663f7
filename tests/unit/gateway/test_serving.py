"""Several models, keys with limits, metrics, log lines, draining, CORS, and clients that vanish."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tests.unit.gateway.sdk import CALLS, MODEL, SCHEMA, qwen, run, said, served
from tests.unit.gateway.test_refusals import Lost
from tests.unit.harness.tokeniser import laptop_chat, laptop_tokenizer

from etude import grammars
from etude.errors import ConfigError
from etude.gateway import GatewayConfig, KeyLimits, Keys, RequestRefused, ServedModel, create_app, serving
from etude.gateway.access_log import Metrics, Record
from etude.harness import standard_tools
from etude.records import Completion, CompletionRequest
from etude.testing import ScriptedEngine, StreamingPolicy

USER: list[Any] = [{"role": "user", "content": "hi"}]
OTHER: list[Any] = [{"role": "user", "content": "another question"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def limits(key: str, **others: int) -> KeyLimits:
    return KeyLimits(sha256=hashlib.sha256(key.encode()).hexdigest(), **others)


def test_the_model_of_a_request_is_found_by_its_name() -> None:
    async def work() -> None:
        async with served([said("a"), said("b")], models=("one", "two")) as at:
            assert [m.id for m in (await at.openai.models.list()).data] == ["one", "two"]
            assert [m.id async for m in at.anthropic.models.list()] == ["one", "two"]
            for name in ("two", "one"):
                answer = await at.openai.chat.completions.create(model=name, messages=USER)
                assert answer.model == name
            with pytest.raises(openai.NotFoundError, match="'one', 'two'"):
                await at.openai.chat.completions.create(model="three", messages=USER)
            with pytest.raises(openai.NotFoundError, match="did you mean 'two'"):
                await at.openai.chat.completions.create(model="twoo", messages=USER)
        async with served(models=[f"model {name}" for name in "abcdefghi"]) as at:
            with pytest.raises(openai.NotFoundError) as unknown:
                await at.openai.chat.completions.create(model="three", messages=USER)
            assert "'model h' (8 of 9)" in unknown.value.message
            assert "GET /v1/models lists all" in unknown.value.message

    run(work)


def test_each_response_has_the_id_of_its_log_line_and_errors_of_anthropic_have_it_in_the_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[str] = []

    async def work() -> None:
        async with served([said("a"), said("b")]) as at:
            answer = await at.openai.chat.completions.create(model=MODEL, messages=USER)
            message = await at.anthropic.messages.create(model=MODEL, messages=USER, max_tokens=9)
            found.extend([answer._request_id or "", message._request_id or ""])
            for wrong in ({"messages": []}, {"model": "other"}):
                with pytest.raises(openai.APIStatusError) as of_openai:
                    await at.openai.chat.completions.create(**{"model": MODEL, "messages": USER, **wrong})  # type: ignore[call-overload]
                with pytest.raises(anthropic.APIStatusError) as of_anthropic:
                    await at.anthropic.messages.create(**{"model": MODEL, "messages": USER, "max_tokens": 9, **wrong})  # type: ignore[call-overload]
                found.extend([of_openai.value.request_id or "", of_anthropic.value.request_id or ""])
                assert of_anthropic.value.body["request_id"] == found[-1]  # type: ignore[index]
            for path in ("completion", "message", "models/other", "chat/completions"):
                refused = await at.http.get(path)
                assert refused.headers["x-request-id"] == refused.headers["request-id"]
                found.append(refused.headers["request-id"])
                assert refused.json().get("request_id") == (found[-1] if path == "message" else None)
        async with served(policy=Lost()) as at:
            body = {"model": MODEL, "messages": USER, "max_tokens": 9, "stream": True}
            lost = await at.http.post("/messages", json=body)
            found.append(lost.headers["request-id"])
            assert f'"request_id":"{found[-1]}"' in lost.text.splitlines()[-2]

    with caplog.at_level(logging.INFO, logger="etude.gateway"):
        run(work)
    lines = [r.getMessage() for r in caplog.records if r.name == "etude.gateway"]
    assert [line.split(" request=")[1].split()[0] for line in lines] == found
    assert len(set(found)) == len(found) == 11
    assert all(one.startswith("req_") for one in found)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", None])
def test_reasoning_that_a_client_sends_back_continues_the_turn_with_its_sampled_tokens(field: str | None) -> None:
    async def work() -> None:
        answer = said("<think>\nhm <b\n</think>\n\nlook" + CALLS)
        async with served([answer, said("then"), said("so")]) as at:
            ask: dict[str, Any] = {"model": MODEL, "tools": TOOLS}
            first = (await at.openai.chat.completions.create(**ask, messages=USER)).choices[0].message
            said_first = first.model_dump(exclude_none=True, exclude={"reasoning_content"})
            said_first |= {} if field is None else {field: "hm <b"}
            results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls or ()]
            await at.openai.chat.completions.create(**ask, messages=[*USER, said_first, *results])
            before, after = (list(request.prompt_ids) for request in at.engine.requests)
            assert after[: len(before) + len(answer)] == [*before, *answer]
            assert at.engine.requests[1].session_id == at.engine.requests[0].session_id
            # in a conversation that is not known here, the template writes what the client sends
            await at.openai.chat.completions.create(**ask, messages=[*OTHER, said_first, *results])
            assert ("hm <b" in qwen().decode(at.engine.requests[2].prompt_ids)) is (field is not None)

    run(work)


def test_keys_have_rates_and_quotas_which_are_told_in_each_dialect() -> None:
    keys = {"slow": limits("s" * 20, requests_per_minute=1), "small": limits("t" * 20, tokens_per_day=60)}

    async def work() -> None:
        async with served([said("a")] * 3, keys=Keys(keys), key="s" * 20) as at:
            await at.anthropic.messages.create(model=MODEL, max_tokens=9, messages=USER)  # sends x-api-key
            with pytest.raises(openai.RateLimitError) as rate:
                await at.openai.chat.completions.create(model=MODEL, messages=USER)
            assert 1 <= int(rate.value.response.headers["retry-after"]) <= 60
            assert "\n  hint: try again after" in rate.value.message
            with pytest.raises(anthropic.RateLimitError, match="1 requests per minute") as of_anthropic:
                await at.anthropic.messages.create(model=MODEL, max_tokens=9, messages=USER)
            assert of_anthropic.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
            other = at.openai.with_options(api_key="t" * 20)
            first = await other.responses.create(model=MODEL, input="hi", max_output_tokens=8)
            assert first.usage is not None
            most = 60 - first.usage.input_tokens  # as much as a day has
            with pytest.raises(openai.RateLimitError) as quota:
                await other.responses.create(model=MODEL, input="hi", max_output_tokens=60)
            assert quota.value.code == "insufficient_quota"
            assert "or raise tokens_per_day in the file of keys: a day has fewer tokens" in quota.value.message
            with pytest.raises(openai.RateLimitError, match="hint: ask for a shorter answer, or wait for the next day"):
                await other.responses.create(model=MODEL, input="hi", max_output_tokens=most)
            assert int(quota.value.response.headers["retry-after"]) <= 86_400
            with pytest.raises(openai.AuthenticationError):
                await at.openai.with_options(api_key="u" * 20).models.list()

    run(work)


def test_several_answers_reserve_their_tokens_once_and_are_told_if_no_day_has_as_many() -> None:
    async def work() -> None:
        keys = Keys({"me": limits("k" * 20, tokens_per_day=100)})
        async with served([said("a")] * 2, keys=keys, key="k" * 20) as at:
            key, ask = keys.find(b"k" * 20), {"model": MODEL, "messages": USER, "max_tokens": 20}
            for stream in (False, True):
                refused = await at.http.post("/chat/completions", json={**ask, "n": 5, "stream": stream})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) > 1
                message = refused.json()["error"]["message"]
                assert "0 are used, 0 reserved for running requests, and this one may take 1" in message
                assert "a day has fewer tokens" in message
            assert (at.engine.requests, key.num_tokens, key.num_reserved) == ([], 0, 0)
            answer = await at.http.post("/chat/completions", json={**ask, "n": 2})
            assert (key.num_tokens, key.num_reserved) == (answer.json()["usage"]["total_tokens"], 0)

    run(work)


def test_what_a_request_has_reserved_is_not_awaited_by_itself() -> None:
    key = Keys({"a": limits("k", tokens_per_day=100)}).find(b"k")
    key.reserve(60)
    with pytest.raises(RequestRefused, match="0 reserved for running requests, and this one may take 110") as refused:
        key.reserve(50, own=60)
    assert refused.value.retry_s > 1
    assert "a day has fewer tokens" in refused.value.hint
    with pytest.raises(RequestRefused, match="60 reserved for running requests, and this one may take 50") as waits:
        key.reserve(50)
    assert (waits.value.retry_s, waits.value.hint) == (1, "try again when those have ended")


def test_a_minute_and_a_day_give_back_what_was_used() -> None:
    now = [1000.0]
    key = Keys(
        {"a": limits("k", requests_per_minute=2, tokens_per_day=10)}, clock=lambda: now[0], wall=lambda: now[0]
    ).find(b"k")
    key.add_request()
    key.add_request()
    with pytest.raises(RequestRefused):
        key.add_request()
    now[0] += 61
    key.add_request()
    key.add_tokens(10)
    with pytest.raises(RequestRefused) as used:
        key.add_request()
    assert used.value.retry_s == pytest.approx(86_400 - 1061)
    now[0] += 86_400
    key.add_request()


@pytest.mark.parametrize("jump_s", [-3 * 86_400, -86_400, -3_600, 5, 46_800, 86_400])
def test_a_clock_that_jumps_neither_refuses_a_key_for_longer_nor_gives_it_a_quota_twice(jump_s: float) -> None:
    at, wall = [50.0], [20_000 * 86_400.0 + 43_200]  # noon
    both = {"clock": lambda: at[0], "wall": lambda: wall[0]}
    key = Keys({"a": limits("k", requests_per_minute=1, tokens_per_day=10)}, **both).find(b"k")

    def wait(seconds: float) -> None:
        at[0], wall[0] = at[0] + seconds, wall[0] + seconds

    key.add_request()
    wall[0] += jump_s
    wait(59)
    with pytest.raises(RequestRefused, match="requests per minute"):
        key.add_request()
    wait(2)
    key.add_request()
    key.add_tokens(10)
    for back_and_forth in (jump_s, -jump_s, -jump_s, jump_s):
        wall[0] += back_and_forth
        with pytest.raises(RequestRefused, match="tokens of today"):
            key.add_request()
    wait(43_200)
    key.add_request()
    key.add_tokens(10)
    wait(43_000)
    with pytest.raises(RequestRefused, match="tokens of today"):
        key.add_request()
    wait(86_400)
    key.add_request()


def test_no_number_of_requests_at_once_takes_more_than_the_quota_of_a_key() -> None:
    let, seen = asyncio.Event(), 0

    class Waiting:
        async def complete(self, request: CompletionRequest) -> Completion:
            nonlocal seen
            seen += 1
            await let.wait()
            return await ScriptedEngine([said("a")], context_tokens=4096).generate(request)

    async def work() -> None:
        keys = Keys({"me": limits("k" * 20, tokens_per_day=100)})
        config = GatewayConfig(port=0, max_running=100)
        async with served(policy=Waiting(), keys=keys, key="k" * 20, config=config) as at:
            ask: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20}
            key = keys.find(b"k" * 20)
            asked = [asyncio.create_task(at.openai.chat.completions.create(**ask)) for _ in range(30)]
            done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            while len(done) + seen < 30:
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            assert 0 < key.num_reserved <= 100
            refused = [task.exception() for task in done]
            assert all(isinstance(one, openai.RateLimitError) and one.code == "insufficient_quota" for one in refused)
            assert all("reserved for running requests" in str(one) for one in refused)
            let.set()
            answers = await asyncio.gather(*waiting)
            assert len(answers) == seen
            used = sum(one.usage.total_tokens for one in answers if one.usage is not None)
            assert (key.num_tokens, key.num_reserved) == (used, 0)

    run(work)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there are no API keys"),
        ('[a]\nsha256 = "abc"', "a.sha256 is not a SHA-256"),
        (f'[a]\nsha256 = "{"0" * 64}"\ntokens_per_dya = 3', "tokens_per_dya"),
        ("[a]\nrequests_per_minute = 3", r"\[a\]: .* `sha256`"),
        (f'[a]\nsha256 = "{"0" * 64}"\n[b]\nsha256 = "{"0" * 64}"', r"the same key: \[a\] and \[b\]\n"),
        (f'[a]\nsha256 = "{"0" * 64}"\nrequests_per_minute = -1', "below 0"),
        ("[a", "not valid TOML"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        Keys.read(tmp_path / "keys.toml")


def test_a_file_of_keys_that_is_missing_is_named_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file of keys at .*nokeys\.toml") as missing:
        Keys.read(tmp_path / "nokeys.toml")
    assert 'sha256 = "..."' in missing.value.hint


def test_each_request_is_one_log_line_without_content_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    ids: list[str] = []

    async def work() -> None:
        async with served([said("a secret")] * 2, keys=Keys({"me": limits("k" * 20)}), key="k" * 20) as at:
            answer = await at.openai.chat.completions.create(model=MODEL, messages=USER)
            stream = await at.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
            ids.extend([answer.id, [chunk async for chunk in stream][-1].id])
            with pytest.raises(openai.BadRequestError):
                await at.openai.responses.create(model=MODEL, input=[])
            assert await at.openai.models.list()
            with pytest.raises(openai.NotFoundError):
                await at.openai.models.retrieve("other")
            assert (await at.http.get("v1/models")).status_code == 404
            assert (await at.http.put("models")).status_code == 405
            page = (await at.http.get(str(at.http.base_url).removesuffix("/v1/") + "/metrics")).text
            assert 'etude_gateway_requests_total{dialect="chat",status="200"} 2.0' in page
            assert 'etude_gateway_requests_total{dialect="responses",status="400"} 1.0' in page
            for dialect, status in (("models", 200), ("models", 404), ("none", 404), ("none", 405)):
                assert f'etude_gateway_requests_total{{dialect="{dialect}",status="{status}"}} 1.0' in page
            assert f'etude_gateway_tokens_total{{kind="answer"}} {2.0 * len(said("a secret"))}' in page
            assert f'etude_gateway_running{{model="{MODEL}"}} 0.0' in page
            assert at.gateway.num_open == 0

    with caplog.at_level(logging.INFO, logger="etude.gateway"):
        run(work)
    lines = [r.getMessage() for r in caplog.records if r.name == "etude.gateway"]
    assert [line.split(" prompt=")[0] for line in lines] == [
        f"POST dialect=chat model={MODEL} key=me status=200",
        f"POST dialect=chat model={MODEL} key=me status=200",
        "POST dialect=responses model=- key=me status=400",
        "GET dialect=models model=- key=me status=200",
        "GET dialect=models model=- key=me status=404",
        "GET dialect=none model=- key=- status=404",
        "PUT dialect=none model=- key=- status=405",
    ]
    assert [line.split(" id=")[1] for line in lines] == [
        *ids,
        "-",
        "-",
        "-",
        "- path='/v1/v1/models'",
        "- path='/v1/models'",
    ]
    assert f"answer={len(said('a secret'))} summary=0 ms=" in lines[1]
    assert not any("secret" in line or "hi" in line.split() for line in lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_charged_for_what_was_sampled_for_it(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    keys = Keys({"me": limits("k" * 20)})

    async def work() -> None:
        policy: Any = Endless() if stream else Held()
        async with served(policy=policy, keys=keys, key="k" * 20) as at:
            body = {"model": MODEL, "messages": USER, "stream": stream, "max_tokens": 99}
            if stream:
                async with at.http.stream("POST", "/chat/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if "content" in line and '"content":""' not in line:
                            break
            else:
                asked = asyncio.create_task(at.http.post("/chat/completions", json=body))
                await policy.asked.wait()
                asked.cancel()
            async with asyncio.timeout(100):
                while at.gateway.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            page = (await at.http.get(str(at.http.base_url).removesuffix("/v1/") + "/metrics")).text
            assert 'etude_gateway_requests_total{dialect="chat",status="499"} 1.0' in page
            num_sampled = policy.num_sampled if stream else 0
            assert f'etude_gateway_tokens_total{{kind="answer"}} {float(num_sampled)}' in page
            num_prompt = len(qwen().encode_prompt(USER, {}))
            assert keys.find(b"k" * 20).num_tokens == num_prompt + num_sampled
            assert f"status=499 prompt={num_prompt} cached=0 answer={num_sampled} summary=0" in caplog.text
            assert not stream or num_sampled

    with caplog.at_level(logging.INFO, logger="etude.gateway"):
        run(work)


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_after_a_stop_text_are_not_charged(stream: bool) -> None:
    keys = Keys({"me": limits("k" * 20)})

    async def work() -> None:
        policy = StreamingPolicy(ScriptedEngine([said("one STOP" + " two" * 50)]))
        async with served(policy=policy, keys=keys, key="k" * 20) as at:
            body = {"model": MODEL, "messages": USER, "stream": stream, "stop": ["STOP"], "max_tokens": 99}
            assert (await at.http.post("/chat/completions", json=body)).status_code == 200
            async with asyncio.timeout(100):
                while at.gateway.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            num_charged = keys.find(b"k" * 20).num_tokens - len(qwen().encode_prompt(USER, {}))
            assert num_charged == policy.num_sampled < len(said("one STOP two"))

    run(work)


def test_requests_that_the_server_cancels_at_its_end_get_an_error_and_no_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        for policy, stream in ((Endless(), True), (Held(), False)):
            served_model = ServedModel(policy, qwen(), name=MODEL, context_tokens=4096)  # type: ignore[arg-type]
            config = GatewayConfig(port=0, drain_s=0.05)
            body = {"model": MODEL, "messages": USER, "stream": stream}
            async with httpx.AsyncClient(timeout=300) as client:
                async with serving(create_app([served_model], config=config), config=config) as url:
                    asked = asyncio.create_task(client.post(f"{url}/chat/completions", json=body))
                    async with asyncio.timeout(100):
                        while not policy.num_running:  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                answer = await asked
            assert answer.status_code == (200 if stream else 503)
            assert "the gateway is stopping" in answer.text
            assert policy.num_running == 0

    run(work)
    assert "Traceback" not in caplog.text
    assert "ASGI" not in caplog.text


class Held:
    """A policy that answers when it is released."""

    def __init__(self) -> None:
        self.let, self.num_running = asyncio.Event(), 0
        self.asked = asyncio.Event()

    async def complete(self, request: CompletionRequest) -> Completion:
        self.num_running += 1
        self.asked.set()
        try:
            await self.let.wait()
        finally:
            self.num_running -= 1
        return await ScriptedEngine([said("late")]).generate(request)


def test_a_gateway_that_drains_finishes_what_runs_and_refuses_what_is_new() -> None:
    async def work() -> None:
        held = Held()
        async with served(policy=held) as at:
            running = asyncio.create_task(at.openai.chat.completions.create(model=MODEL, messages=USER))
            await held.asked.wait()
            draining = asyncio.create_task(at.gateway.drain(5))
            await asyncio.sleep(0)
            with pytest.raises(anthropic.APIStatusError) as refused:
                await at.anthropic.messages.create(model=MODEL, max_tokens=9, messages=USER)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "5"
            assert refused.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
            health = await at.http.get(str(at.http.base_url).removesuffix("/v1/") + "/health")
            assert health.status_code == 503
            assert not draining.done()
            held.let.set()
            assert (await running).choices[0].message.content == "late"
            await draining

    run(work)


def test_pages_of_an_allowed_origin_may_ask() -> None:
    async def work() -> None:
        config = GatewayConfig(port=0, cors_origins=("https://good.example",), drain_s=1)
        async with served([said("a")], config=config) as at:
            for origin, allowed in (("https://good.example", True), ("https://bad.example", False)):
                headers = {
                    "origin": origin,
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "authorization, content-type",
                }
                answer = await at.http.options("/chat/completions", headers=headers)
                assert (answer.headers.get("access-control-allow-origin") == origin) is allowed

    run(work)


def test_several_answers_come_whole_and_streamed() -> None:
    async def work() -> None:
        async with served([said("one"), said("two"), said("three"), said("four")]) as at:
            whole = await at.openai.chat.completions.create(model=MODEL, messages=USER, n=2, seed=3)
            assert sorted(c.message.content or "" for c in whole.choices) == ["one", "two"]
            assert [c.index for c in whole.choices] == [0, 1]
            assert sorted(r.sampling.seed for r in at.engine.requests) == [3, 4]
            stream = await at.openai.chat.completions.create(model=MODEL, messages=USER, n=2, stream=True)
            texts = {0: "", 1: ""}
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert sorted(texts.values()) == ["four", "three"]

    run(work)


class Scoring:
    """A policy whose completions have the likeliest tokens."""

    async def complete(self, request: CompletionRequest) -> Completion:
        done = await ScriptedEngine([said("ab STOP cd")]).generate(request)
        shape = (len(done.token_ids), request.sampling.top_logprobs)
        fields = {name: getattr(done, name) for name in done.__struct_fields__}
        return Completion(
            **{**fields, "top_ids": np.zeros(shape, np.int32), "top_logprobs": np.full(shape, -1.5, np.float32)}
        )


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_text(stream: bool) -> None:
    async def work() -> None:
        async with served(policy=Scoring()) as at:
            ask: dict[str, Any] = {
                "model": MODEL,
                "messages": USER,
                "logprobs": True,
                "top_logprobs": 2,
                "stop": "STOP",
            }
            if stream:
                chunks = [c async for c in await at.openai.chat.completions.create(**ask, stream=True)]
                content = next(c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs)
            else:
                content = (await at.openai.chat.completions.create(**ask)).choices[0].logprobs.content
            assert "".join(token.token for token in content) == "ab "
            assert all((token.logprob, len(token.top_logprobs)) == (-0.5, 2) for token in content)
            text = await at.openai.completions.create(model=MODEL, prompt="x", logprobs=1, max_tokens=99)
            scores = text.choices[0].logprobs
            assert "".join(scores.tokens) == text.choices[0].text == "ab STOP cd"
            assert scores.text_offset[:2] == [0, len(scores.tokens[0])]

    run(work)


def test_reasoning_and_parallel_calls_of_a_chat_are_the_same_streamed_and_whole() -> None:
    async def work() -> None:
        answer = said("<think>\nhm <b\n</think>\n\nlook" + CALLS)
        async with served([answer] * 2) as at:
            ask: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS}
            whole = (await at.openai.chat.completions.create(**ask)).choices[0].message
            assert whole.model_extra == {"reasoning_content": "hm <b"}
            assert [json.loads(c.function.arguments)["city"] for c in whole.tool_calls or ()] == ["Paris", "Rome"]  # type: ignore[union-attr]
            reasoning = text = ""
            calls: dict[int, str] = {}
            async for chunk in await at.openai.chat.completions.create(**ask, stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                reasoning += (delta.model_extra or {}).get("reasoning_content", "")
                for call in delta.tool_calls or ():
                    calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")  # type: ignore[union-attr]
            assert (reasoning, text) == ("hm <b", "look")
            assert [json.loads(c)["city"] for c in calls.values()] == ["Paris", "Rome"]

    run(work)


@pytest.mark.parametrize("cut", [3, 9])
def test_reasoning_that_is_cut_off_is_reasoning(cut: int) -> None:
    async def work() -> None:
        async with served([said("<think>\nab cd ef gh ij")] * 2) as at:
            message = (
                (await at.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=cut)).choices[0].message
            )
            assert message.content == ""
            assert "ab cd ef".startswith((message.model_extra or {})["reasoning_content"][:8])
            stream = await at.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=cut, stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == ""

    run(work)


def test_a_request_that_has_ended_reserves_no_more_for_a_summary_that_goes_on() -> None:
    key = Keys({"me": limits("k", tokens_per_day=100)}).find(b"k")
    record = Record("POST", "chat", key=key)
    record.spent.key = key
    record.spent.reserve(60)
    record.end(499, Metrics())
    record.spent.reserve(90)
    assert (key.num_tokens, key.num_reserved) == (0, 0)
    key.reserve(100)


def test_each_dialect_counts_the_tokens_of_reasoning() -> None:
    async def work() -> None:
        thought, cut = said("<think>\nab cd\n</think>")[:-1], said("<think>\nab cd ef gh")
        answers = [[*thought, *said("\n\nhello")]] * 4
        async with served([*answers, said("hello"), cut]) as at:
            ask: dict[str, Any] = {"model": MODEL, "messages": USER}
            chat = (await at.openai.chat.completions.create(**ask)).usage
            assert chat is not None
            assert chat.completion_tokens_details is not None
            assert chat.completion_tokens_details.reasoning_tokens == len(thought)
            whole = (await at.openai.responses.create(model=MODEL, input="hi")).usage
            assert whole is not None
            assert whole.output_tokens_details.reasoning_tokens == len(thought)
            async with at.anthropic.messages.stream(**ask, max_tokens=99) as stream:
                streamed = (await stream.get_final_message()).usage
            told = (await at.anthropic.messages.create(**ask, max_tokens=99)).usage
            for usage in (streamed, told):
                assert usage.output_tokens_details is not None
                assert usage.output_tokens_details.thinking_tokens == len(thought)
            for number in (0, 4):
                usage = (await at.openai.responses.create(model=MODEL, input="hi", max_output_tokens=4)).usage
                assert usage is not None
                assert usage.output_tokens_details.reasoning_tokens == number

    run(work)


def test_a_conversation_that_memory_no_longer_has_is_counted() -> None:
    async def work() -> None:
        config = GatewayConfig(port=0, remembered_tokens=60)
        async with served([said("one"), said("x " * 40), said("two"), said("three")], config=config) as at:
            ask = at.openai.chat.completions.create

            async def forgotten() -> float:
                page = (await at.http.get(str(at.http.base_url).removesuffix("/v1/") + "/metrics")).text
                return float(page.split(f'etude_gateway_forgotten{{model="{MODEL}"}} ')[1].split()[0])

            await ask(model=MODEL, messages=USER)
            again: Any = [*USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
            foreign: Any = [*USER, {"role": "assistant", "content": "I"}, {"role": "user", "content": "y " * 30}]
            await ask(model=MODEL, messages=foreign)  # of another server: nothing was evicted
            assert await forgotten() == 0
            await ask(model=MODEL, messages=again)
            assert await forgotten() == 1
            await ask(model=MODEL, messages=[*again, {"role": "assistant", "content": "two"}, *USER])
            assert await forgotten() == 1

    run(work)


def test_what_a_forced_call_samples_is_parsed_as_a_call(tmp_path: Path) -> None:
    """A walk through random allowed tokens always ends as calls that the chat format reads."""
    pytest.importorskip("llguidance")
    random = np.random.default_rng(0)
    for chat, tools, tokenizer in (
        (qwen(), TOOLS, qwen().tokens.tokenizer),
        (laptop_chat(), standard_tools().to_openai(), laptop_tokenizer()),
    ):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        signatures = chat.signatures(tools)
        matcher = grammars.Compiler(tmp_path / "tokenizer.json", chat.vocab_size).compile(
            chat.call_grammar(signatures, max_calls=2)
        )
        num_whole = 0
        for _ in range(20):
            at, ids = matcher.copy(), list[int]()
            while len(ids) < 300:
                allowed, may_end = at.mask()
                if may_end and (not allowed.any() or random.random() < 0.3):
                    num_whole += 1
                    reply = chat.parse([*ids, chat.stop_token_ids[0]], signatures, strict=False)
                    assert 1 <= len(reply.calls) <= 2
                    strict = chat.parse([*ids, chat.stop_token_ids[0]], signatures)
                    assert strict.error == "" or (strict.error == "one call a turn" and len(reply.calls) == 2)
                    break
                token = int(random.choice(np.flatnonzero(allowed)))
                at.consume(token)
                ids.append(token)
        assert num_whole > 3


class Endless:
    """A policy that streams tokens for ever."""

    def __init__(self) -> None:
        self.num_running = self.num_begun = self.num_sampled = 0

    async def complete(self, request: CompletionRequest) -> Completion:
        raise AssertionError("a stream was asked for")

    async def stream(self, request: CompletionRequest) -> AsyncIterator[list[int] | Completion]:
        self.num_running += 1
        self.num_begun += 1
        try:
            while True:
                self.num_sampled += 1
                yield said("a")[:1]
                await asyncio.sleep(0.01)
        finally:
            self.num_running -= 1


@pytest.mark.parametrize("clients", [50, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_clients_that_vanish_leave_no_running_request(clients: int) -> None:
    async def work() -> None:
        policy = Endless()
        config = GatewayConfig(port=0, max_running=20, max_waiting=2000, drain_s=5)
        bodies = {
            "/chat/completions": {"model": MODEL, "messages": USER, "stream": True},
            "/messages": {"model": MODEL, "messages": USER, "max_tokens": 99, "stream": True},
            "/responses": {"model": MODEL, "input": "hi", "stream": True},
        }
        async with served(policy=policy, config=config) as at:

            async def vanish(number: int) -> None:
                path = list(bodies)[number % 3]
                body = json.dumps(bodies[path]).encode()
                host, port = at.http.base_url.host, at.http.base_url.port
                reader, writer = await asyncio.open_connection(host, port)
                head = f"POST /v1{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                if number % 2:  # in the middle of the stream; the others before its first byte
                    await reader.readuntil(b"data: ")
                writer.transport.abort()

            for start in range(0, clients, 50):
                await asyncio.gather(*(vanish(n) for n in range(start, min(clients, start + 50))))
            async with asyncio.timeout(100):
                while policy.num_running or at.gateway.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            [model] = at.gateway.models.values()
            assert (model.num_running, model.num_waiting) == (0, 0)
            assert policy.num_begun >= clients // 2

    run(work, limit_s=280)


def test_headers_of_a_page_without_a_key_are_not_needed() -> None:
    async def work() -> None:
        async with served([], key="none") as at:
            async with httpx.AsyncClient(base_url=at.http.base_url) as bare:
                answer = await bare.post("/messages", content=b"{", headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["type"] == "error"

    run(work)
