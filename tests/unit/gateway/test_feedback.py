"""Signals over HTTP: about answers of every API, forged ones, of any shape, and on a full disk."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.small_disk import fill, small_disk
from tests.unit.gateway.sdk import MODEL, qwen, run, said
from tests.unit.gateway.test_fuzz import mutated
from tests.unit.gateway.test_serving import limits

from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.signals import FeedbackFile, FeedbackWriter
from etude.testing import ScriptedEngine, StreamingPolicy

USER: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(
    writer: FeedbackWriter | None,
    answers: int = 100,
    *,
    keys: Keys | None = None,
    key: str = "none",
    recorder: CaptureWriter | None = None,
    origins: tuple[str, ...] = (),
) -> AsyncIterator[httpx.AsyncClient]:
    config = GatewayConfig(port=0, drain_s=2.0, cors_origins=origins)
    policy = StreamingPolicy(ScriptedEngine([said(f"answer {i}") for i in range(answers)], context_tokens=4096))
    model = ServedModel(policy, qwen(), name=MODEL, context_tokens=4096, config=config)
    app = create_app([model], config=config, keys=keys, recorder=recorder, feedback=writer)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        serving(app, config=config) as url,
        httpx.AsyncClient(base_url=url, timeout=300, headers=headers) as http,
    ):
        yield http


async def ask(http: httpx.AsyncClient, user: str = "") -> str:
    """The id of a new answer."""
    headers = {"x-etude-user": user} if user else {}
    answer = await http.post("/chat/completions", json={"model": MODEL, "messages": USER}, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def send(http: httpx.AsyncClient, response_id: str, user: str = "", **changes: Any) -> httpx.Response:
    body = {"id": "s1", "response_id": response_id, "name": "kept", "value": True} | changes
    return await http.post("/feedback", json=body, headers={"x-etude-user": user} if user else {})


def test_answers_of_every_api_streamed_or_not_take_signals(tmp_path: Path) -> None:
    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer) as http:
            url = str(http.base_url)
            of_openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
            of_anthropic = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1/"), api_key="none", max_retries=0)
            ids = [
                (await of_openai.chat.completions.create(model=MODEL, messages=USER)).id,
                (await of_openai.completions.create(model=MODEL, prompt="hi", max_tokens=20)).id,
                (await of_openai.responses.create(model=MODEL, input="hi")).id,
                (await of_anthropic.messages.create(model=MODEL, max_tokens=20, messages=USER)).id,
            ]
            chunks = await of_openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
            ids += {chunk.id async for chunk in chunks}
            async with of_anthropic.messages.stream(model=MODEL, max_tokens=20, messages=USER) as stream:
                ids.append((await stream.get_final_message()).id)
            response = await of_openai.responses.create(model=MODEL, input="hi")
            ids.append(response.output[-1].id or "")  # the item of the message
            assert [one.partition("-")[0].partition("_")[0] for one in ids] == [
                "chatcmpl", "cmpl", "resp", "msg", "chatcmpl", "msg", "msg",
            ]  # fmt: skip
            for number, one in enumerate(ids):
                answer = await send(http, one, id=f"s{number}")
                assert (answer.status_code, answer.json()["data"]) == (200, [{"id": f"s{number}", "status": "stored"}])
            await of_openai.close()
            await of_anthropic.close()
        assert await asyncio.to_thread(writer.close, 60)
        with FeedbackFile(tmp_path / "f.sqlite") as file:
            signals = list(file.signals())
            assert len({one.response_id for one in signals}) == len(ids)
            assert {one.model for one in signals} == {MODEL}
            assert all(one.version for one in signals)
            [summary] = file.summaries()
            assert (summary.name, summary.signals, summary.mean) == ("kept", len(ids), 1.0)

    run(work)


def test_signals_of_others_and_forged_ones_are_refused(tmp_path: Path) -> None:
    keys = Keys({"acme": limits("a" * 20), "other": limits("b" * 20)})

    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer, keys=keys, key="a" * 20) as http:
            response_id = await ask(http, "bob")
            tries = 0
            for user in ("", "eve"):
                tries += (await send(http, response_id, user)).status_code == 404
            http.headers["authorization"] = f"Bearer {'b' * 20}"
            for user in ("", "bob"):
                answer = await send(http, response_id, user)
                tries += answer.status_code == 404
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("answer_not_found", "response_id")
                assert "hint: " in error["message"]
            http.headers["authorization"] = "Bearer wrong"
            tries += (await send(http, response_id, "bob")).status_code == 401
            http.headers["authorization"] = f"Bearer {'a' * 20}"
            for _ in range(300):
                tries += (await send(http, f"chatcmpl-{secrets.token_hex(32)}", "bob")).status_code == 404
            tries += (await send(http, f"chatcmpl-{uuid.uuid4().hex}", "bob")).status_code == 404
            assert tries == 2 + 2 + 1 + 301
            assert (await send(http, response_id, "bob")).status_code == 200
            assert writer.counts()["stored"] == 1
            assert writer.counts()["unknown"] == 2 + 2 + 301
        assert await asyncio.to_thread(writer.close, 60)

    run(work)


def test_an_error_has_its_status_and_names_the_field(tmp_path: Path) -> None:
    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer) as http:
            response_id = await ask(http)
            assert (await send(http, response_id)).status_code == 200
            assert (await send(http, response_id)).json()["data"][0]["status"] == "duplicate"
            conflict = await send(http, response_id, value=0.5)
            assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
            invalid = await send(http, response_id, id="s2", value=2)
            assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "value")
            body = {"signals": [{"id": "s3", "response_id": response_id, "name": "x", "value": 1}] * 2}
            body["signals"][1] = body["signals"][1] | {"id": "s4", "name": "No"}
            invalid = await http.post("/feedback", json=body)
            assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "signals[1].name")
            long = await http.post("/feedback", content=b" " * (1 << 21), headers={"content-type": "application/json"})
            assert long.status_code == 413
            assert (await http.post("/feedback", content=b"{}")).status_code == 415
            assert (await http.get("/feedback")).status_code == 405
            assert writer.counts()["stored"] == 1
        assert await asyncio.to_thread(writer.close, 60)
        async with served(None) as http:
            absent = await send(http, await ask(http))
            assert absent.status_code == 404
            assert "--feedback FILE" in absent.json()["error"]["message"]

    run(work)


def test_signals_do_not_count_for_the_limits_of_a_key_and_are_in_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    keys = Keys({"acme": limits("a" * 20, requests_per_minute=1, tokens_per_day=2000)})

    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer, keys=keys, key="a" * 20, origins=("https://example.org",)) as http:
            response_id = await ask(http)
            for number in range(5):
                assert (await send(http, response_id, id=str(number))).status_code == 200
            page = (await http.get(str(http.base_url).replace("/v1/", "/metrics"))).text
            asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
            allowed = await http.options("/feedback", headers=asked)  # a web page may send signals, too
            assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        assert 'etude_gateway_signals{what="stored"} 5.0' in page
        assert 'etude_gateway_requests_total{dialect="feedback",status="200"} 5.0' in page
        assert await asyncio.to_thread(writer.close, 60)

    run(work)


def test_a_signal_may_come_before_its_stream_has_ended(tmp_path: Path) -> None:
    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer) as http:
            body = {"model": MODEL, "messages": USER, "stream": True}
            async with http.stream("POST", "/chat/completions", json=body) as stream:
                lines = stream.aiter_lines()
                first = json.loads((await anext(lines)).removeprefix("data: "))
                assert (await send(http, first["id"])).json()["data"][0]["status"] == "stored"
                assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
        assert await asyncio.to_thread(writer.close, 60)
        with FeedbackFile(tmp_path / "f.sqlite") as file:
            [signal] = file.signals()
            assert signal.version

    run(work)


def test_captured_answers_and_their_signals_have_the_same_id_and_consent(tmp_path: Path) -> None:
    async def work() -> None:
        with PrivacyFolder(tmp_path / "privacy") as folder:
            folder.consent.set(Subject.of("local"), Level.TRAIN)
            folder.consent.set(Subject.of("local", "eve"), Level.OFF)
            writer = FeedbackWriter(tmp_path / "f.sqlite", privacy=tmp_path / "privacy")
            capture = CaptureWriter(tmp_path / "privacy")
            async with served(writer, recorder=capture) as http:
                told = [
                    (await send(http, await ask(http, user), user)).json()["data"][0]["status"]
                    for user in ("bob", "eve")
                ]
            assert told == ["stored", "no_consent"]
            assert await asyncio.to_thread(capture.close, 60)
            assert await asyncio.to_thread(writer.close, 60)
            with FeedbackFile(tmp_path / "f.sqlite", privacy=folder) as file:
                [signal] = file.signals()
                [record] = folder.records.of_response(signal.response_id)
                assert (record.organisation, record.subject) == (signal.organisation, signal.subject)
                assert record.version == signal.version

    run(work)


def test_a_full_disk_refuses_signals_until_it_is_free_and_serves_every_answer(tmp_path: Path) -> None:
    async def work(disk: Path) -> None:
        writer = FeedbackWriter(disk / "f.sqlite")
        acknowledged = set[str]()
        async with served(writer, 200) as http:

            async def batch(number: int) -> int:
                response_id = await ask(http)
                ids = [f"{number}-{i}" for i in range(50)]
                body = {"signals": [{"id": i, "response_id": response_id, "name": "kept", "value": 1} for i in ids]}
                answer = await http.post("/feedback", json=body)
                acknowledged.update(ids if answer.status_code == 200 else ())
                if answer.status_code != 200:
                    assert int(answer.headers["retry-after"]) >= 1
                    assert "same ids" in answer.json()["error"]["message"]
                return answer.status_code

            assert await batch(0) == 200
            ballast = fill(disk)
            told = [await batch(number) for number in range(1, 100)]
            assert set(told) <= {200, 503}
            assert told[-1] == 503
            ballast.unlink()
            assert await batch(100) == 200
            assert writer.counts()["failed"] == told.count(503)
        assert await asyncio.to_thread(writer.close, 60)
        with FeedbackFile(disk / "f.sqlite") as file:
            assert len(list(file.signals())) == len(acknowledged)

    with small_disk(tmp_path / "disk", "2m") as disk:
        run(lambda: work(disk))


def until_failed(writer: FeedbackWriter, number: int) -> None:
    end = time.monotonic() + 60
    while writer.counts()["failed"] < number:
        assert time.monotonic() < end, "no signal was refused"
        time.sleep(0.01)


def test_while_too_many_signals_wait_further_ones_are_refused_and_answers_are_served(tmp_path: Path) -> None:
    async def work() -> None:
        with PrivacyFolder(tmp_path / "privacy") as folder:
            folder.consent.set(Subject.of("local"), Level.TRAIN)
            writer = FeedbackWriter(tmp_path / "f.sqlite", privacy=tmp_path / "privacy", max_waiting=2)
            async with served(writer) as http:
                ids = [await ask(http) for _ in range(90)]
                with folder.keys.lock():  # the writer waits for it, as for a slow disk
                    sent = [asyncio.create_task(send(http, one, id=one)) for one in ids]
                    await asyncio.to_thread(until_failed, writer, len(ids) - 64 - 2)
                    await ask(http)
                statuses = [answer.status_code for answer in await asyncio.gather(*sent)]
            assert set(statuses) == {200, 503}
            assert statuses.count(200) == writer.counts()["stored"] <= 64 + 2
            assert await asyncio.to_thread(writer.close, 60)

    run(work)


@pytest.mark.parametrize("requests", [2_000, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_body_makes_an_error_of_the_class_500_and_what_is_acknowledged_counts(tmp_path: Path, requests: int) -> None:
    chance, statuses = random.Random(requests), dict[int, int]()

    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        config = GatewayConfig(port=0)
        policy = StreamingPolicy(ScriptedEngine([said("a")] * 8, context_tokens=4096))
        model = ServedModel(policy, qwen(), name=MODEL, context_tokens=4096, config=config)
        app = create_app([model], config=config, feedback=writer)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        stored = 0
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1") as http:
            ids = [await ask(http) for _ in range(8)]
            for _ in range(requests):
                signals: list[Any] = [
                    {
                        "id": str(chance.randrange(requests)),
                        "response_id": chance.choice(ids),
                        "name": chance.choice(["kept", "rated"]),
                        "value": chance.choice([True, 1, 0.5]),
                        **chance.choice([{}, {"at": 1.8e9}, {"answer": 1}]),
                    }
                    for _ in range(chance.randrange(1, 4))
                ]
                body: Any = {"signals": signals} if len(signals) > 1 or chance.random() < 0.5 else signals[0]
                for _ in range(chance.randrange(3)):
                    body = mutated(chance, body)
                data = json.dumps(body).encode()
                if chance.random() < 0.1:
                    cut = chance.randrange(len(data) + 1)
                    data = data[:cut] + bytes([chance.randrange(256)]) + data[cut + chance.randrange(3) :]
                answer = await http.post("/feedback", content=data, headers={"content-type": "application/json"})
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, (data, answer.text)
                if answer.status_code == 200:
                    stored += sum(one["status"] == "stored" for one in answer.json()["data"])
                else:
                    assert answer.json()["error"]["message"]
        assert await asyncio.to_thread(writer.close, 60)
        with FeedbackFile(tmp_path / "f.sqlite") as file:
            assert len(list(file.signals())) == stored > 0

    asyncio.run(work())
    assert min(statuses.get(status, 0) for status in (200, 400, 404, 409)) > requests // 100, statuses
