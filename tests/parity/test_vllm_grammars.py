"""Grammars and stop texts in a real vLLM: it writes what the reference engine does, and speaks through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests import vllm_server
from tests.parity import chats
from tests.unit.gateway.sdk import MODEL, Served, served

from etude import grammars
from etude.file_checksums import write_sums
from etude.harness import ChatFormat
from etude.inference import EngineConfig, Fleet
from etude.inference.engine import ReferenceEngine
from etude.inference.errors import InvalidGrammar
from etude.inference.external.engine import ExternalEngine
from etude.inference.vllm.process import VllmProcess
from etude.inference.weight_sync import initial_version
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.checkpoint import load_model, save_model
from etude.records import Completion, CompletionRequest, Sampling
from etude.records.completion import StopReason
from etude.stores import DirectoryStore
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.weights import Channel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), vllm_server.NEEDS_VLLM]
SIZES = ModelConfig(
    vocab_size=320,  # more than the tokeniser has, as in published checkpoints
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    expert_size=32,
    num_experts=4,
    top_k=2,
    context_tokens=1024,
)
CONFIG = EngineConfig(max_sequences=4, context_tokens=1024)
CITIES = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
SCORE = {"type": "object", "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 99}},
         "required": ["score"], "additionalProperties": False}  # fmt: skip
TOOLS = [grammars.Tool("weather", CITIES), grammars.Tool("now", {"maxProperties": 0})]
ASKED: list[Any] = [{"role": "user", "content": "the weather?"}]
Story = Callable[[ExternalEngine, Path], Awaitable[None]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "checkpoint"
    torch.set_num_threads(1)
    save_model(Transformer(SIZES, seed=1), folder, dtype="f32")
    chats.make(folder, "qwen")
    write_sums(folder)  # with those of the tokeniser's files
    return folder


@pytest.fixture(scope="module")
def vllm(checkpoint: Path) -> Iterator[VllmProcess]:
    with vllm_server.serving(checkpoint, CONFIG) as server:
        vllm_server.wait(server)
        yield server


@pytest.fixture
def tell(vllm: VllmProcess, checkpoint: Path, tmp_path: Path) -> Callable[[Story], None]:
    """Runs a story with an adapter over the server."""

    async def run(story: Story) -> None:
        store = DirectoryStore(tmp_path / "store")
        Channel(store).publish(export(load_model(checkpoint), LiveWeights.F32), step=0, parent=None, rollout_ids=[])
        following = vllm_server.following(vllm, checkpoint, CONFIG, store, tmp_path / "store")
        async with asyncio.timeout(300), following as engine:
            await story(engine, checkpoint)

    return lambda story: asyncio.run(run(story))


@asynccontextmanager
async def reference(checkpoint: Path) -> AsyncIterator[ReferenceEngine]:
    model, tokenizer = load_model(checkpoint), checkpoint / "tokenizer.json"
    version = initial_version(hf_views(model).items())
    async with ReferenceEngine(model, version=version, config=CONFIG, tokenizer=tokenizer) as engine:
        yield engine


def ask(chat: ChatFormat, name: str, grammar: str, **sampling: Any) -> CompletionRequest:
    own: dict[str, Any] = {"max_tokens": 400, "stop_token_ids": chat.stop_token_ids, "temperature": 0.0, **sampling}
    ids = np.array(chat.encode(f"the weather {name}"), np.int32)
    return CompletionRequest(
        request_id=name, session_id=name, prompt_ids=ids, sampling=Sampling(grammar=grammar, **own)
    )


def every_kind(chat: ChatFormat) -> dict[str, str]:
    """A grammar of each kind, whose texts are short even if a model draws them at random."""
    tokens = {name: chat.tokens.tokenizer.token_to_id(name) for name in ("<tool_call>", "</tool_call>")}
    calls = grammars.from_tool_calls(TOOLS, "<tool_call>\nBOTH\n</tool_call>", tokens=tokens, max_calls=2)
    return {
        "schema": grammars.from_json_schema(CITIES),
        "regex": grammars.from_regex("(a|bc){2,9}/[^\n<]{1,20}"),
        "lark": grammars.from_lark('start: "(" start ")" | "}" %json {"type": "boolean"}'),
        "calls": calls,
        "calls or an answer": grammars.with_answer(calls, SCORE),
        "only text": grammars.from_regex("<.im_end.>"),
    }


def masked_logprobs(
    model: Transformer, request: CompletionRequest, completion: Completion, matcher: grammars.Matcher
) -> list[float]:
    """The log-probabilities of a completion's tokens among those that the grammar allowed."""
    ids, num_prompt, found = completion.token_ids.tolist(), len(request.prompt_ids), []
    with torch.inference_mode():
        logits = model(torch.tensor([*request.prompt_ids.tolist(), *ids]))[0]
    for position, token in enumerate(ids):
        allowed, may_end = matcher.mask()
        allowed = allowed.copy()
        allowed[list(request.sampling.stop_token_ids)] |= may_end
        row = logits[num_prompt + position - 1] / (request.sampling.temperature or 1.0)
        row[torch.from_numpy(~allowed)] = -torch.inf
        found.append(row.log_softmax(-1)[token].item())
        if token not in request.sampling.stop_token_ids:
            matcher.consume(token)
    return found


def test_greedy_texts_under_every_kind_of_grammar_are_those_of_the_reference_engine(tell: Any) -> None:
    async def story(engine: ExternalEngine, checkpoint: Path) -> None:
        chat = ChatFormat.load(checkpoint)
        requests = [ask(chat, name, grammar) for name, grammar in every_kind(chat).items()]
        async with reference(checkpoint) as other:
            expected = await asyncio.gather(*map(other.generate, requests))
        found = await asyncio.gather(*map(engine.generate, requests))
        for request, one, two in zip(requests, expected, found, strict=True):
            assert two.token_ids.tolist() == one.token_ids.tolist(), request.request_id
            assert two.stop_reason is one.stop_reason is StopReason.STOP, chat.decode(two.token_ids.tolist())

    tell(story)


def test_sampled_texts_are_valid_and_have_the_log_probabilities_of_the_masked_distribution(tell: Any) -> None:
    async def story(engine: ExternalEngine, checkpoint: Path) -> None:
        chat, model = ChatFormat.load(checkpoint), load_model(checkpoint)
        compiler = grammars.Compiler(checkpoint / "tokenizer.json", SIZES.vocab_size)
        ends = (chat.tokens.tokenizer.token_to_id("<|im_start|>"), *chat.stop_token_ids)
        requests = [
            ask(chat, name, grammar, temperature=0.8, seed=seed, stop_token_ids=ends, top_logprobs=3)
            for name, grammar in every_kind(chat).items()
            for seed in range(4)
        ]
        found = await asyncio.gather(*map(engine.generate, requests))
        for request, one in zip(requests, found, strict=True):
            matcher = compiler.compile(request.sampling.grammar)
            assert one.stop_reason is StopReason.STOP, request.request_id
            assert one.logprobs.tolist() == pytest.approx(masked_logprobs(model, request, one, matcher), abs=1e-4)
            assert matcher.mask()[1], "the text may end where it ended"
            if request.request_id == "schema":
                jsonschema.validate(json.loads(chat.decode(one.token_ids.tolist()[:-1])), CITIES)
        assert {int(one.token_ids[-1]) for one in found} == set(ends), "each stop token ends some text"

    tell(story)


def test_a_grammar_that_is_invalid_or_becomes_too_complex_fails_its_own_request_only(tell: Any) -> None:
    async def story(engine: ExternalEngine, checkpoint: Path) -> None:
        chat = ChatFormat.load(checkpoint)
        going = asyncio.ensure_future(engine.generate(ask(chat, "plain", "", max_tokens=100)))
        for grammar in (
            grammars.from_lark("start: missing"),
            grammars.from_regex("(?=a)b"),
            grammars.from_json_schema({"not": {"type": "string"}}),
            grammars.from_json_schema(False),
            grammars.from_regex("a{1,3}b{100000}"),  # it compiles, and becomes too complex while the text grows
        ):
            with pytest.raises(InvalidGrammar):
                await engine.generate(ask(chat, "bad", grammar))
        assert len((await going).token_ids) == 100

    tell(story)


async def of_chat(
    at: Served, stream: bool, *, schema: Any, tools: list[str], choice: str, **more: Any
) -> tuple[str, list[Any]]:
    given: dict[str, Any] = {"messages": ASKED, "model": MODEL, "max_tokens": 400, **more}
    if schema is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if tools:
        given["tools"] = [{"type": "function", "function": {"name": name, "parameters": CITIES}} for name in tools]
        named = {"type": "function", "function": {"name": choice}}
        given |= {"tool_choice": named if choice in tools else choice, "parallel_tool_calls": False}
    if not stream:
        message = (await at.openai.chat.completions.create(**given)).choices[0].message
        return message.content or "", [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    text, calls = "", list[list[str]]()
    async for chunk in await at.openai.chat.completions.create(**given, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
    return text, [tuple(call) for call in calls]


async def of_responses(
    at: Served, stream: bool, *, schema: Any, tools: list[str], choice: str, **more: Any
) -> tuple[str, list[Any]]:
    given: dict[str, Any] = {"input": "the weather?", "model": MODEL, "max_output_tokens": 400, **more}
    if schema is not None:
        given["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    if tools:
        given["tools"] = [{"type": "function", "name": name, "parameters": CITIES, "strict": True} for name in tools]
        named = {"type": "function", "name": choice}
        given |= {"tool_choice": named if choice in tools else choice, "parallel_tool_calls": False}
    text = ""
    if stream:
        async for event in await at.openai.responses.create(**given, stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.completed":
                response = event.response
        assert text == response.output_text
    else:
        response = await at.openai.responses.create(**given)
    return response.output_text, [(i.name, i.arguments) for i in response.output if i.type == "function_call"]


async def of_messages(
    at: Served, stream: bool, *, schema: Any, tools: list[str], choice: str, **more: Any
) -> tuple[str, list[Any]]:
    given: dict[str, Any] = {"messages": ASKED, "model": MODEL, "max_tokens": 400, **more}
    if "stop" in given:
        given["stop_sequences"] = [given.pop("stop")]
    if "temperature" in given:  # the SDK has no such argument
        given["extra_body"] = {"temperature": given.pop("temperature")}
    if schema is not None:
        given["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if tools:
        given["tools"] = [{"name": name, "input_schema": CITIES} for name in tools]
        kind = (
            {"type": "tool", "name": choice} if choice in tools else {"type": {"required": "any"}.get(choice, choice)}
        )
        given["tool_choice"] = {**kind, "disable_parallel_tool_use": True}
    if stream:
        async with at.anthropic.messages.stream(**given) as events:
            content = (await events.get_final_message()).content
    else:
        content = (await at.anthropic.messages.create(**given)).content
    text = "".join(block.text for block in content if block.type == "text")
    return text, [(block.name, json.dumps(block.input)) for block in content if block.type == "tool_use"]


@pytest.mark.parametrize("dialect", [of_chat, of_responses, of_messages])
def test_schemas_and_forced_calls_hold_in_each_dialect_whole_and_streamed(tell: Any, dialect: Any) -> None:
    async def story(engine: ExternalEngine, checkpoint: Path) -> None:
        chat, kinds = ChatFormat.load(checkpoint), set[bool]()
        async with served(policy=Fleet({"engine-0": engine}), chat=chat, context_tokens=1024) as at:
            for stream in (False, True):
                text, calls = await dialect(at, stream, schema=SCORE, tools=[], choice="auto")
                jsonschema.validate(json.loads(text), SCORE)
                assert calls == []
                for choice in ("required", "forecast"):
                    text, calls = await dialect(at, stream, schema=None, tools=["weather", "forecast"], choice=choice)
                    assert text == ""
                    [(name, arguments)] = calls
                    assert name in ({"forecast"} if choice == "forecast" else {"weather", "forecast"})
                    jsonschema.validate(json.loads(arguments), CITIES)
                for _ in range(8):
                    text, calls = await dialect(at, stream, schema=SCORE, tools=["weather"], choice="auto")
                    jsonschema.validate(json.loads(calls[0][1] if calls else text), CITIES if calls else SCORE)
                    kinds.add(bool(calls))
        assert kinds == {False, True}

    tell(story)


@pytest.mark.parametrize("dialect", [of_chat, of_messages])
def test_a_stop_text_ends_the_request_in_vllm_and_is_not_sent(tell: Any, dialect: Any) -> None:
    async def story(engine: ExternalEngine, checkpoint: Path) -> None:
        chat = ChatFormat.load(checkpoint)
        plain: dict[str, Any] = {"schema": None, "tools": [], "choice": "auto", "temperature": 0}
        async with served(policy=Fleet({"engine-0": engine}), chat=chat, context_tokens=1024) as at:
            whole, _ = await dialect(at, False, **plain)
            pieces = (whole[begin : begin + 3] for begin in range(len(whole) // 4, len(whole) // 2))
            stop = next(piece for piece in pieces if piece.isascii() and piece.strip() == piece)
            assert engine.counters.tokens > 0
            for stream in (False, True):
                before = engine.counters.tokens
                text, _ = await dialect(at, stream, **plain, stop=stop)
                assert text == whole[: whole.index(stop)]
                assert engine.counters.tokens - before < 300, "it was ended long before its 400 tokens"
                assert engine.num_requests == 0

    tell(story)
