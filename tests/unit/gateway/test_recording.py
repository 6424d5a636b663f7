"""What a gateway offers to its recorder, over HTTP, and that a recorder in trouble costs no request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.small_disk import fill, small_disk
from tests.unit.gateway.test_gateway import CHAT, USER, run, text

from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.records.served import ServedAnswer
from etude.testing import ScriptedEngine, StreamingPolicy


class Kept:
    def __init__(self) -> None:
        self.answers: list[ServedAnswer] = []

    def offer(self, answer: ServedAnswer) -> None:
        self.answers.append(answer)

    def counts(self) -> dict[str, int]:
        return {"captured": len(self.answers), "dropped": 3}


@asynccontextmanager
async def recorded(recorder: Any, said: list[list[int]], *, key: str = "") -> AsyncIterator[openai.AsyncOpenAI]:
    config = GatewayConfig(port=0)
    policy = StreamingPolicy(ScriptedEngine(said, context_tokens=4096))
    model = ServedModel(policy, CHAT, name="laptop", context_tokens=512, config=config)
    app = create_app([model], config=config, keys=Keys.of(key) if key else None, recorder=recorder)
    async with (
        serving(app, config=config) as url,
        openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=300) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, *, stream: bool, user: str = "") -> tuple[str, str]:
    """The id and the text of an answer."""
    headers = {"x-etude-user": user} if user else {}
    made: Any = await client.chat.completions.create(
        model="laptop", messages=USER, max_tokens=20, stream=stream, extra_headers=headers
    )
    if not stream:
        return made.id, made.choices[0].message.content
    parts = [part async for part in made]
    return parts[0].id, "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_offered_with_who_asked_and_what_was_read_and_sampled(stream: bool) -> None:
    async def work() -> None:
        kept = Kept()
        async with recorded(kept, [text("done")]) as client:
            response_id, said = await ask(client, stream=stream, user="bob")
        (answer,) = kept.answers
        assert said == answer.reply["content"] == "done"
        assert answer.response_id in response_id
        assert (answer.organisation, answer.user, answer.model, answer.dialect) == ("local", "bob", "laptop", "chat")
        assert (answer.index, answer.finish) == (0, "stop")
        assert answer.prompt_ids.tolist() == CHAT.encode_prompt(USER).tolist()
        assert answer.completion.token_ids.tolist() == text("done")
        assert json.loads(json.dumps(answer.messages)) == USER

    run(work)


def test_every_answer_of_a_request_is_offered_and_the_key_names_the_organisation() -> None:
    async def work() -> None:
        kept = Kept()
        async with recorded(kept, [text("a"), text("b")], key="secret") as client:
            await client.chat.completions.create(model="laptop", messages=USER, n=2, max_tokens=9)
        assert sorted(one.index for one in kept.answers) == [0, 1]
        assert {one.organisation for one in kept.answers} == {"key"}
        assert {one.user for one in kept.answers} == {""}
        assert len({one.response_id for one in kept.answers}) == 1

    run(work)


def test_a_refused_request_is_not_offered() -> None:
    async def work() -> None:
        kept = Kept()
        async with recorded(kept, []) as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=USER)
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="laptop", messages=USER, max_tokens=100_000)
        assert kept.answers == []

    run(work)


def test_the_metrics_have_the_counts_of_the_recorder() -> None:
    pytest.importorskip("prometheus_client")

    async def work() -> None:
        async with recorded(Kept(), [text("a")]) as client:
            await ask(client, stream=False)
            async with httpx.AsyncClient() as raw:
                page = (await raw.get(f"{str(client.base_url).removesuffix('/v1/')}/metrics")).text
        assert 'etude_gateway_capture{what="captured"} 1.0' in page
        assert 'etude_gateway_capture{what="dropped"} 3.0' in page

    run(work)


def test_a_conversation_is_captured_under_the_consent_of_its_user(tmp_path: Path) -> None:
    async def work() -> None:
        with PrivacyFolder(tmp_path / "privacy") as folder:
            folder.consent.set(Subject.of("local"), Level.TRAIN)
            folder.consent.set(Subject.of("local", "eve"), Level.OFF)
            writer = CaptureWriter(tmp_path / "privacy")
            async with recorded(writer, [text("to bob"), text("to eve"), text("to nobody")]) as client:
                response_id, _ = await ask(client, stream=True, user="bob")
                await ask(client, stream=False, user="eve")
                await ask(client, stream=False)
            assert await asyncio.to_thread(writer.close, 60)
            assert writer.counts() == {"captured": 1, "no_consent": 2, "dropped": 0, "refused": 0, "failed": 0}
            (record,) = folder.records.of(folder.keys.names(Subject.of("local")))
            assert record.names == folder.keys.names(Subject.of("local", "bob"))
            assert record.response_id in response_id
            content = folder.records.read(record)
            assert content.token_ids is not None
            assert content.token_ids.tolist() == text("to bob")
            assert json.loads(content.messages) == USER

    run(work)


def until_captured(writer: CaptureWriter) -> None:
    end = time.monotonic() + 60
    while not writer.counts()["captured"]:
        assert time.monotonic() < end, "nothing was captured"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_turns_capture_off_and_every_request_is_served(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(disk: Path) -> None:
        with PrivacyFolder(disk / "privacy") as folder:
            folder.consent.set(Subject.of("local"), Level.TRAIN)
            writer = CaptureWriter(disk / "privacy")
            async with recorded(writer, [text(f"answer {i}") for i in range(40)]) as client:
                await ask(client, stream=stream, user="bob")
                await asyncio.to_thread(until_captured, writer)
                ballast = fill(disk)
                for i in range(1, 40):
                    assert (await ask(client, stream=stream, user=f"user {i}"))[1] == f"answer {i}"
                assert not await asyncio.to_thread(writer.close, 60)
            counts = writer.counts()
            assert counts["failed"] > 0
            assert counts["captured"] + counts["failed"] == 40
            ballast.unlink()
            records = folder.records.of(folder.keys.names(Subject.of("local")))
            assert len(records) == counts["captured"]
            assert [folder.records.read(one).finish for one in records] == ["stop"] * len(records)

    with small_disk(tmp_path / "disk", "2m") as disk:
        run(lambda: work(disk))
    assert "capture is off" in caplog.text


def test_a_writer_that_waits_for_its_disk_delays_no_answer(tmp_path: Path) -> None:
    async def work() -> None:
        with PrivacyFolder(tmp_path / "privacy") as folder:
            folder.consent.set(Subject.of("local"), Level.TRAIN)
            with folder.keys.lock():  # the writer waits for it, as for a slow disk
                writer = CaptureWriter(tmp_path / "privacy", max_queued=2)
                async with recorded(writer, [text(f"answer {i}") for i in range(100)]) as client:
                    for i in range(100):
                        assert (await ask(client, stream=False, user="bob"))[1] == f"answer {i}"
                assert writer.counts()["dropped"] >= 100 - 2 - 64
            assert await asyncio.to_thread(writer.close, 60)
            counts = writer.counts()
            assert counts["captured"] + counts["dropped"] == 100

    run(work)
