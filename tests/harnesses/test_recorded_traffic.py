"""Requests that real agents have sent, sent again: to a rollout's endpoints, and to a gateway that streams.

The events of the streams are those that the vendors' own packages describe."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import msgspec
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter
from tests.harnesses import traffic
from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.fronts import SAID, gateway, recorder
from tests.harnesses.played import ANSWERS, Front, config_of, play

from etude.harness import HarnessConfig
from etude.plugins import Plugin

EVENTS: dict[str, TypeAdapter[Any]] = {
    "/v1/chat/completions": TypeAdapter(openai.types.chat.ChatCompletionChunk),
    "/v1/responses": TypeAdapter(openai.types.responses.ResponseStreamEvent),
    "/v1/messages": TypeAdapter(anthropic.types.RawMessageStreamEvent),
}
ANSWERED: dict[str, TypeAdapter[Any]] = {
    "/v1/chat/completions": TypeAdapter(openai.types.chat.ChatCompletion),
    "/v1/responses": TypeAdapter(openai.types.responses.Response),
    "/v1/messages": TypeAdapter(anthropic.types.Message),
}


def file_of(name: str) -> Path:
    return traffic.RECORDED / f"{name.lower().replace(' ', '-')}.json"


def replayed(name: str) -> HarnessConfig:
    """The agent that sends the file of `name` again, in place of the agent in its config."""
    config = config_of(name)
    argv = [sys.executable, traffic.__file__, str(file_of(name))]
    return dataclasses.replace(config, program=Plugin("command", {"argv": argv}))


def listening(front: Front, answers: list[tuple[str, str]]) -> Front:
    """The same front, with a note of the path and the text of each answer."""

    async def noted(endpoints: Any, scope: Any, receive: Any, send: Any) -> None:
        parts = bytearray()

        async def sent(message: Any) -> None:
            parts.extend(message.get("body", b""))
            await send(message)

        await front(endpoints, scope, receive, sent)
        answers.append(("/v1/" + scope["path"].split("/v1/")[-1], parts.decode()))

    return noted


def events(text: str) -> Iterator[str]:
    """The data of the events of a stream, without those that vendors do not describe: its end, and pings."""
    for line in text.splitlines():
        if line.startswith("data: ") and line not in ("data: [DONE]", 'data: {"type":"ping"}'):
            yield line.removeprefix("data: ")


@pytest.mark.parametrize("name", ANSWERS)
def test_requests_of_a_real_agent_are_turns_of_one_branch_again(name: str) -> None:
    exchanges = traffic.read(file_of(name))
    played = play(replayed(name), ANSWERS[name])
    assert sum(played.statuses.values()) == len(exchanges), played.log
    assert (played.num_turns, played.attributed) == (len(exchanges), 1.0), played.log
    assert (played.num_failed, played.num_resampled, played.num_side) == (0, 0, 0), played.statuses
    assert played.rows == played.branches == 1, played.starts


@pytest.mark.parametrize("name", ANSWERS)
def test_a_gateway_answers_a_real_agent_with_what_its_vendors_package_describes(name: str) -> None:
    answers = list[tuple[str, str]]()
    exchanges = traffic.read(file_of(name))
    played = play(replayed(name), ANSWERS[name], front=listening(gateway(ANSWERS[name]), answers))
    assert [status for status in played.statuses if not status.endswith(" 200")] == [], played.log
    assert len(answers) == len(exchanges)
    for (path, text), exchange in zip(answers, exchanges, strict=True):
        if exchange.body.get("stream"):
            found = [EVENTS[path].validate_json(event, strict=True) for event in events(text)]
            assert len(found) > 3
        else:
            ANSWERED[path].validate_json(text, strict=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", AGENTS)
def test_a_real_agent_reads_the_streams_of_a_gateway(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := AGENTS[name].why_not():
        pytest.skip(why)
    monkeypatch.chdir(FOLDER)
    played = play(config_of(name), ANSWERS[name], front=gateway(ANSWERS[name]))
    assert played.fixed, played.log
    assert {status.rsplit(" ", 1)[1] for status in played.statuses} == {"200"}, played.statuses


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", AGENTS)
def test_a_real_agent_still_sends_what_was_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := AGENTS[name].why_not():
        pytest.skip(why)
    monkeypatch.chdir(FOLDER)
    exchanges = list[traffic.Exchange]()
    play(config_of(name), ANSWERS[name], front=recorder(exchanges))
    recorded = traffic.read(file_of(name))
    assert [one.path for one in exchanges] == [one.path for one in recorded]
    assert [one.body.keys() for one in exchanges] == [one.body.keys() for one in recorded]


def test_long_texts_are_left_out_and_what_the_model_said_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    prompt, said = "You are an agent. " * 9, f"{SAID[0]}: {'x' * 99}"
    body = {"model": "m", "messages": [{"role": "system", "content": prompt}, {"role": "assistant", "content": said}]}
    scope = {"method": "POST", "path": "/r/g1/secret/v1/chat/completions", "query_string": b"beta=true"}
    headers = [(b"authorization", b"Bearer secret"), (b"user-agent", b"agent/1"), (b"cookie", b"a=b")]
    answer = b'{"id": "chatcmpl-0123456789ab", "choices": []}'
    found = traffic.record({**scope, "headers": headers}, msgspec.json.encode(body), answer, SAID)
    assert found is not None
    assert (found.path, found.headers) == ("/v1/chat/completions?beta=true", {"user-agent": "agent/1"})
    assert found.ids == ["chatcmpl-0123456789ab"]
    assert found.body["messages"][1]["content"] == said
    assert found.body["messages"][0]["content"].startswith(f"<{len(prompt)} characters, ")
    monkeypatch.setattr(traffic, "RECORDED", tmp_path)
    assert traffic.read(traffic.write("An agent", [found, found])) == [found, found]
    assert traffic.record({**scope, "path": "/v1/models", "headers": []}, b"{}", b"", SAID) is None
