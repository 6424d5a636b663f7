"""Conversations that outgrow the context of a served model which learnt to summarise them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from examples.long.tasks import FILE, Logs
from tests.unit.gateway.sdk import run
from tests.unit.harness.tokeniser import laptop_chat
from tests.unit.rollouts.reader import Reader

from etude.capture import SummaryLimits
from etude.capture.context import REQUEST, longest_exchange, stops_of, trigger_tokens
from etude.environments.memory import MemoryMachine
from etude.errors import ContextFull
from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.gateway.answers import Spent
from etude.gateway.summary_writer import SummaryWriter
from etude.harness import Call, HarnessConfig, Workbench, standard_tools
from etude.loop.rollout_scheduler import siblings
from etude.records import Completion, CompletionRequest
from etude.records.served import ServedAnswer
from etude.records.task import Split, Task
from etude.rollouts import run_rollout
from etude.testing import MemoryRuntime, ScriptedEngine, StreamingPolicy

CHAT = laptop_chat()
TOOLS = standard_tools(("cat", "edit", "submit"))
LIMITS = SummaryLimits(context_tokens=320, summary_tokens=60, turn_tokens=80, max_turns=60)
SOURCE = Logs(num_logs=13)
LINE = "[summary 1, 57 turns left, history: .etude/history.txt]"
OFF = {"x-etude-summaries": "off"}


@asynccontextmanager
async def served(
    policy: Any,
    *,
    of: SummaryLimits | None = LIMITS,
    context_tokens: int = 320,
    keys: Keys | None = None,
    recorder: Any = None,
    **settings: Any,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic, ServedModel]]:
    config = GatewayConfig(port=0, drain_s=2.0, **settings)
    model = ServedModel(policy, CHAT, name="long", context_tokens=context_tokens, config=config, summaries=of)
    async with (
        serving(create_app([model], config=config, keys=keys, recorder=recorder), config=config) as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as of_openai,
        anthropic.AsyncAnthropic(
            base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=300
        ) as of_anthropic,
    ):
        yield of_openai, of_anthropic, model


class Kept:
    """Keeps the answers that the gateway offers."""

    def __init__(self) -> None:
        self.answers: list[ServedAnswer] = []

    def offer(self, answer: ServedAnswer) -> None:
        self.answers.append(answer)


class Work:
    """A client's agent: its task, a machine, and its whole conversation, which it sends each time."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.machine = MemoryMachine({path: text.encode() for path, text in task.files.items()})
        self.bench = Workbench.of(task, self.machine, key="client", deadline_s=60, output_chars=400)
        self.messages: list[Any] = [{"role": "user", "content": task.instruction}]

    async def act(self, name: str, arguments: dict[str, Any]) -> str:
        return await TOOLS.run(Call(name, arguments), self.bench)

    @property
    def right(self) -> bool:
        return self.machine.files[FILE].decode() == SOURCE.answer(self.task).reference[FILE]


async def chat(client: openai.AsyncOpenAI, work: Work, **options: Any) -> list[Any]:
    """Work with chat completions until the model submits; returns the usages."""
    usages = []
    while not work.bench.submitted:
        answer = await client.chat.completions.create(
            model="long", messages=work.messages, tools=TOOLS.to_openai(), **options
        )
        usages.append(answer.usage)
        message = answer.choices[0].message
        work.messages.append(message.model_dump(exclude_none=True))
        assert message.tool_calls
        for call in message.tool_calls:
            output = await work.act(call.function.name, json.loads(call.function.arguments))
            work.messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return usages


async def talk(client: anthropic.AsyncAnthropic, work: Work) -> list[Any]:
    """Work with streamed messages of Anthropic until the model submits; returns the usages."""
    tools: list[Any] = [
        {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in TOOLS.to_openai())
    ]
    usages = []
    while not work.bench.submitted:
        async with client.messages.stream(model="long", max_tokens=80, messages=work.messages, tools=tools) as stream:
            usages += [event.usage async for event in stream if event.type == "message_delta"]
            answer = await stream.get_final_message()
        work.messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": await work.act(block.name, dict(block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        work.messages.append({"role": "user", "content": results})
    return usages


def asked(reader: Reader) -> list[str]:
    """The prompts that asked for a summary."""
    return [text for text in reader.texts if text.endswith(f"{REQUEST}\n[assistant]")]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_client_solves_a_task_three_times_the_context_and_sends_nothing_but_its_history(dialect: str) -> None:
    reader, kept = Reader(CHAT, SOURCE.num_logs), Kept()

    async def body() -> None:
        async with served(reader, recorder=kept) as (of_openai, of_anthropic, _):
            work = Work(SOURCE.task(Split.HELDOUT, 0))
            usages = await chat(of_openai, work) if dialect == "chat" else await talk(of_anthropic, work)
            assert work.right
            numbers = [(usage.model_extra or {}).get("summaries", {"number": 0})["number"] for usage in usages]
            assert numbers == sorted(numbers)
            assert numbers[-1] == len(asked(reader)) >= 3, "none is written twice"
            assert len(reader.texts) == len(usages) + len(asked(reader))
            written = [usage.model_extra["summaries"] for usage in usages if (usage.model_extra or {}).get("summaries")]
            assert sum(one["completion_tokens"] > 0 for one in written) == len(asked(reader))
            paid = [one.summary_tokens for one in kept.answers if one.summary_tokens != (0, 0)]
            assert len(kept.answers) == len(usages)
            assert paid == [
                (one["prompt_tokens"], one["completion_tokens"]) for one in written if one["completion_tokens"]
            ]

    run(body)
    assert all(len(CHAT.encode(text)) < 500 for text in reader.texts)


def test_the_prompts_are_those_of_training() -> None:
    reader, trained = Reader(CHAT, SOURCE.num_logs), Reader(CHAT, SOURCE.num_logs)
    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    seeds = (seed for seed in range(1000) if trigger_tokens(seed, context_tokens=320) >= 0.79 * 320)
    spec = msgspec.structs.replace(spec, group_seed=next(seeds))
    names = ("context_tokens", "summary_tokens", "turn_tokens", "max_turns")
    harness = HarnessConfig(tools=("cat", "edit", "submit"), **{name: getattr(LIMITS, name) for name in names})
    asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=trained, chat=CHAT, harness=harness))

    async def body() -> None:
        async with served(reader) as (client, _, _):
            await chat(client, Work(task))

    run(body)
    assert reader.texts == trained.texts


def test_turns_are_counted_from_the_beginning_when_those_of_training_are_used_up() -> None:
    async def left(num_turns: int) -> int:
        model = ServedModel(None, CHAT, name="m", context_tokens=320, summaries=LIMITS)  # type: ignore[arg-type]
        writer = SummaryWriter(None, CHAT, model._tree, LIMITS, [], {}, 1.0, model.run_in_thread, Spent())  # type: ignore[arg-type]
        carried = await writer.carry("so far", 2, [*ask("go"), *[*say(1), *ask("on")] * num_turns])
        assert carried.turns_left is not None
        return carried.turns_left

    assert [asyncio.run(left(n)) for n in (10, 57, 58, 59)] == [48, 1, 60, 59]


def test_without_summaries_the_same_task_is_refused_as_too_long() -> None:
    async def body() -> None:
        task = SOURCE.task(Split.HELDOUT, 0)
        async with served(Reader(CHAT, SOURCE.num_logs)) as (client, _, _):
            with pytest.raises(openai.BadRequestError) as refused:
                await chat(client, Work(task), extra_headers=OFF)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="send on or off"):
                await chat(client, Work(task), extra_headers={"x-etude-summaries": "maybe"})
        for options in ({"of": None}, {"summaries": False}):
            reader = Reader(CHAT, SOURCE.num_logs)
            async with served(reader, **options) as (_, of_anthropic, _):
                with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                    await talk(of_anthropic, Work(task))
            assert not asked(reader)

    run(body)


async def history(num_logs: int = 13) -> list[Any]:
    """The messages of a whole task, as a client has them at its end."""
    async with served(Reader(CHAT, num_logs)) as (client, _, _):
        work = Work(Logs(num_logs=num_logs).task(Split.HELDOUT, 0))
        await chat(client, work)
    return work.messages[:-2]  # without the submission


def test_a_gateway_that_knows_nothing_writes_the_same_summaries_again() -> None:
    live, again, known = (Reader(CHAT, SOURCE.num_logs) for _ in range(3))

    async def body() -> None:
        async with served(live) as (client, _, _):
            work = Work(SOURCE.task(Split.HELDOUT, 0))
            await chat(client, work)
        messages = work.messages[:-2]
        async with served(again) as (client, _, model):
            for _ in range(2):
                answer = await client.chat.completions.create(model="long", messages=messages, tools=TOOLS.to_openai())
                assert answer.choices[0].message.tool_calls
                assert answer.choices[0].message.tool_calls[0].function.name == "submit"
            tree = model._tree
            while len(tree):
                tree._evict(next(iter(tree._nodes)))
            await client.chat.completions.create(model="long", messages=messages, tools=TOOLS.to_openai())
            assert model._summaries is not None
            assert all(node in tree for node, _ in model._summaries._stored.values()), "evicted ones are dropped"
        assert known.texts == []

    run(body)
    assert len(asked(live)) >= 3
    assert asked(again) == 2 * asked(live), "written once, used once, and after the eviction written once more"


def test_requests_with_the_same_history_wait_for_one_summary() -> None:
    async def body() -> None:
        messages, reader = await history(), Reader(CHAT, SOURCE.num_logs)
        async with served(reader) as (client, _, _):
            several = client.chat.completions.create(model="long", messages=messages, tools=TOOLS.to_openai(), n=3)
            one = client.chat.completions.create(model="long", messages=messages, tools=TOOLS.to_openai())
            answers = await asyncio.gather(several, one)
            assert len(asked(reader)) == len(set(asked(reader))) >= 3
            tokens = [answer.usage.model_extra["summaries"]["completion_tokens"] for answer in answers]  # type: ignore[index, union-attr]
            assert sorted(map(bool, tokens)) == [False, True], "only one of them is charged"

    run(body)


class Held:
    """A policy that waits with its summaries until it is let, and with nothing else."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.let, self.asked, self.cancelled = policy, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def complete(self, request: CompletionRequest) -> Completion:
        if CHAT.readable(request.prompt_ids).rstrip().endswith(f"{REQUEST}\n[assistant]"):
            self.asked.set()
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        done: Completion = await self.policy.complete(request)
        return done


def test_a_stream_has_signs_of_life_while_a_summary_is_written() -> None:
    async def body() -> None:
        messages, held = await history(), Held(Reader(CHAT, SOURCE.num_logs))
        async with served(held, ping_s=0.05) as (client, of_anthropic, _):
            options: dict[str, Any] = {"model": "long", "messages": messages, "tools": TOOLS.to_openai()}
            http = httpx.AsyncClient(base_url=str(client.base_url), timeout=300)
            async with http, http.stream("POST", "chat/completions", json={**options, "stream": True}) as response:
                lines = response.aiter_lines()
                assert [await anext(lines) for _ in range(3)] == [": keep-alive", "", ": keep-alive"]
                held.let.set()
                assert "tool_calls" in "".join([line async for line in lines])
            held.let.clear()
            stream = of_anthropic.messages.stream(
                model="long", max_tokens=20, messages=[*ask("x " * 90), *say(60), *ask("go")]
            )
            async with stream as events:
                asyncio.get_running_loop().call_later(0.2, held.let.set)
                assert (await events.get_final_message()).content

    run(body)


def say(num_words: int) -> list[Any]:
    return [{"role": "assistant", "content": "y " * num_words}]


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_summary_that_takes_too_long_ends_with_the_deadline_of_the_request_and_is_cancelled() -> None:
    async def body() -> None:
        messages, held = await history(), Held(Reader(CHAT, SOURCE.num_logs))
        async with served(held, deadline_s=0.6) as (client, _, model):
            with pytest.raises(openai.InternalServerError, match=r"within 0\.6 s"):
                await client.chat.completions.create(model="long", messages=messages, tools=TOOLS.to_openai())
            async with asyncio.timeout(60):
                await held.cancelled.wait()
            assert model._summaries is not None
            assert not model._summaries._running
            assert model.num_running == 0

    run(body)


def text(words: str) -> list[int]:
    return [*CHAT.encode(words).tolist(), CHAT.end_id]


BAD = {
    "empty": text(""),
    "too long": CHAT.encode("very " * 60).tolist(),
    "tool call": CHAT.encode_call(Call("submit", {})).tolist(),
}
TALK = [*ask("one"), *say(30), *ask("two"), *say(60), *ask("three")]  # due, and it fits without a summary


@pytest.mark.parametrize("fault", BAD)
def test_a_refused_summary_is_sampled_again(fault: str) -> None:
    engine = ScriptedEngine([BAD[fault], text("one and two are done"), text("ok")])

    async def body() -> None:
        async with served(StreamingPolicy(engine)) as (client, _, _):
            answer = await client.chat.completions.create(model="long", messages=TALK)
            assert answer.choices[0].message.content == "ok"

    run(body)
    one, two, last = engine.requests
    assert one.prompt_ids.tolist() == two.prompt_ids.tolist()
    assert one.sampling.seed != two.sampling.seed
    assert one.sampling.max_tokens == LIMITS.summary_tokens
    assert CHAT.readable(last.prompt_ids).startswith(f"[user] one\nthree\n{LINE}\none and two are done")


@pytest.mark.parametrize("fault", BAD)
def test_after_three_refused_summaries_the_conversation_goes_on_while_it_fits_and_is_then_refused(fault: str) -> None:
    engine = ScriptedEngine([BAD[fault]] * 3 + [text("ok")] * 2 + [BAD[fault]] * 3)

    async def body() -> None:
        async with served(StreamingPolicy(engine)) as (client, _, _):
            for _ in range(2):
                answer = await client.chat.completions.create(model="long", messages=TALK)
                assert answer.choices[0].message.content == "ok"
            assert len(engine.requests) == 5, "the same place is not tried again"
            longer = [*TALK, *say(5), *ask("four " * 20)]
            with pytest.raises(openai.BadRequestError, match=f"its summary was refused: {fault}") as refused:
                await client.chat.completions.create(model="long", messages=longer, max_tokens=100)
            assert refused.value.code == "context_length_exceeded"

    run(body)


def test_refused_summaries_count_for_the_key_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine([BAD["empty"]] * 3)
    keys = Keys.of("none")
    talk = [*TALK, *ask("four " * 20)]

    async def body() -> None:
        async with served(StreamingPolicy(engine), keys=keys) as (client, _, _):
            says = "100 are requested for the answer, and its summary was refused: empty\\n  hint: ask for an answer of"
            with pytest.raises(openai.BadRequestError, match=says):
                await client.chat.completions.create(model="long", messages=talk, max_tokens=100)

    with caplog.at_level("INFO", logger="etude.gateway"):
        run(body)
    assert len(engine.requests) == 3
    taken = sum(len(request.prompt_ids) for request in engine.requests) + 3 * len(BAD["empty"])
    assert keys.find(b"none").num_tokens == taken
    assert f"status=400 prompt=0 cached=0 answer=0 summary={taken} ms=" in caplog.text


def test_what_the_user_said_last_does_not_depend_on_the_summary() -> None:
    engine = ScriptedEngine([text("nothing"), text("ok"), text("ok")])

    async def body() -> None:
        async with served(StreamingPolicy(engine)) as (client, _, _):
            await client.chat.completions.create(model="long", messages=TALK)
            await client.chat.completions.create(model="long", messages=[*TALK, *say(2), *ask("four")])

    run(body)
    assert CHAT.readable(engine.requests[1].prompt_ids).startswith(f"[user] one\nthree\n{LINE}\nnothing\n")
    assert "[user] four\n" in CHAT.readable(engine.requests[2].prompt_ids)
    assert engine.requests[2].prompt_ids.tolist()[: len(engine.requests[1].prompt_ids)] == (
        engine.requests[1].prompt_ids.tolist()
    )


def test_a_summary_is_used_when_the_answer_to_it_was_dropped() -> None:
    engine = ScriptedEngine([text("nothing"), text("ok"), text("ok")])

    async def body() -> None:
        async with served(StreamingPolicy(engine)) as (client, _, _):
            await client.chat.completions.create(model="long", messages=TALK)
            await client.chat.completions.create(model="long", messages=[*TALK, *ask("hurry")])

    run(body)
    after = CHAT.readable(engine.requests[2].prompt_ids)
    assert after.startswith(f"[user] one\nthree\n{LINE}\nnothing\nhurry\n[assistant]")


def test_a_very_long_message_is_left_for_after_the_summary() -> None:
    """It does not fit beside the request for a summary, so what comes before it is summarised."""
    talk = [*ask("one"), *say(40), *ask("two"), *say(2), *ask("z " * 100)]
    engine = ScriptedEngine([text("done"), text("ok"), text("ok")])

    async def body() -> None:
        async with served(StreamingPolicy(engine)) as (client, _, _):
            answer = await client.chat.completions.create(model="long", messages=talk, max_tokens=20)
            assert answer.choices[0].message.content == "ok"

    run(body)
    before, *_, after = (CHAT.readable(request.prompt_ids) for request in engine.requests)
    assert "zz" not in before.replace(" ", "")
    assert "zz" in after.replace(" ", "")


def test_a_first_message_that_fills_the_context_is_refused_as_it_is_without_summaries() -> None:
    async def body() -> None:
        for messages in (ask("x " * 400), [{"role": "system", "content": "s"}, *say(200), *say(1)]):
            async with served(StreamingPolicy(ScriptedEngine([]))) as (client, _, _):
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(model="long", messages=messages)

    run(body)


def test_places_of_summaries_are_before_turns_of_the_model() -> None:
    talk = [*ask("a"), *say(1), *ask("b"), *say(1), *say(1), *ask("c")]
    assert stops_of(talk, 0) == [3, 4, 6]
    assert stops_of(talk, 4) == [6]
    assert stops_of(talk, 6) == stops_of(talk[:1], 0) == []


def test_the_longest_exchange_is_a_share_of_the_tokens() -> None:
    talk = [*ask("a" * 84), *say(0), *ask("b" * 184), *say(0), *ask("c" * 68)]
    assert longest_exchange(talk, 416) == 216
    assert longest_exchange(talk[:1], 400) == 0


def test_an_engine_whose_context_is_full_at_a_summary_is_a_context_error() -> None:
    class Full:
        async def complete(self, request: CompletionRequest) -> Completion:
            raise ContextFull("the engine is full", "it has 9 tokens", hint="none")

    async def body() -> None:
        async with served(Full()) as (client, of_anthropic, _):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="long", messages=TALK)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await of_anthropic.messages.create(model="long", max_tokens=9, messages=TALK)

    run(body)
