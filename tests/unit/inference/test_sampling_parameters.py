"""The parameters of `Sampling` in the reference engine, through a tiny model with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer as HuggingFace
from uvicorn.lifespan.off import LifespanOff

from etude import grammars
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference import EngineConfig, HttpEngine, MalformedRequest
from etude.inference import compiled_grammars as compiled_module
from etude.inference.app import build_app
from etude.inference.device_runner import DeviceRunner
from etude.inference.engine import ReferenceEngine
from etude.inference.errors import InvalidGrammar
from etude.inference.runner import Runner
from etude.inference.scheduler import Scheduler
from etude.models import Transformer, hf_views
from etude.records import Completion, CompletionRequest
from etude.records.wire import pack, unpack
from etude.training.tokenizer import train_tokenizer
from etude.weights import Tensor

from .helpers import TINY, ask, engine, everything, version
from .test_adopting import bf16

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b", 3]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "deep": {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
                 "additionalProperties": False},
    },
    "required": ["name", "kind", "sizes", "deep"],
    "additionalProperties": False,
}  # fmt: skip
WIDE = dataclasses.replace(TINY, vocab_size=600)  # more than the tokeniser has, as in published checkpoints


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ['{"name": "abc", "kind": 3}\n<tool_call> def run(x): return [1, 2]\n'] * 20
    train_tokenizer(texts, folder, vocab_size=400, special_tokens=SPECIAL_TOKENS, chat_template="")
    return folder / "tokenizer.json"


def with_vocabulary(tokenizer: Path | None, **settings: object) -> ReferenceEngine:
    model = Transformer(WIDE, seed=1)
    config = EngineConfig(**{"max_sequences": 8, "context_tokens": 512, **settings})
    return ReferenceEngine(model, version=version(0), config=config, tokenizer=tokenizer)


def sampled(name: str, *args: int, vocab_size: int = 64, **sampling: object) -> CompletionRequest:
    """A request of `ask`, with these parameters of sampling."""
    request = ask(name, *args, vocab_size=vocab_size)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))


@contextlib.asynccontextmanager
async def served_over_http(engine: ReferenceEngine) -> AsyncIterator[str]:
    """Serve a running engine; the value is its URL."""
    config = uvicorn.Config(build_app(engine), ws="none", port=0, log_level="critical")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = LifespanOff(config)
    await server.startup()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    await server.shutdown()


async def served(engine: ReferenceEngine, *requests: CompletionRequest) -> list[Completion]:
    async with engine:
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))


def run(engine: ReferenceEngine, *requests: CompletionRequest) -> list[Completion]:
    return asyncio.run(served(engine, *requests))


def text_of(tokenizer: Path, completion: Completion, stop: int) -> str:
    ids = completion.token_ids.tolist()
    assert ids[-1] == stop
    return HuggingFace.from_file(str(tokenizer)).decode(ids[:-1], skip_special_tokens=False)


PARAMETERS: list[dict[str, object]] = [
    {"top_p": 0.6},
    {"top_k": 3},
    {"min_p": 0.2},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.8},
    {"logit_bias": ((5, 8.0), (6, -100.0))},
    {"min_tokens": 5, "stop_token_ids": tuple(range(40))},
    {"top_logprobs": 4},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5, "temperature": 1.4, "top_logprobs": 2},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {},
]


def test_requests_of_all_kinds_get_the_same_tokens_alone_and_in_one_batch():
    requests = [sampled(f"r{i}", 6 + i, 12, **given) for i, given in enumerate(PARAMETERS)]
    together = run(engine(max_sequences=16), *requests)
    for request, found in zip(requests, together, strict=True):
        [alone] = run(engine(max_sequences=1), request)
        assert found.token_ids.tolist() == alone.token_ids.tolist()
        assert pack(found.logprobs) == pack(alone.logprobs)
        assert found.top_ids.tolist() == alone.top_ids.tolist()


def test_plain_requests_keep_their_bits_beside_others():
    plain = [ask(f"p{i}", 5 + i, 10) for i in range(3)]
    others = [sampled(f"r{i}", 6 + i, 12, **given) for i, given in enumerate(PARAMETERS[:4])]
    alone, beside = run(engine(), *plain), run(engine(), *plain, *others)[:3]
    assert [pack((a.token_ids, a.logprobs)) for a in alone] == [pack((b.token_ids, b.logprobs)) for b in beside]


class TableModel:
    """In place of a model: the logits of a position depend on its token alone, so no attention is computed."""

    def __init__(self, model: Transformer) -> None:
        self.operators, self.config = model.operators, model.config
        self._table = torch.randn(64, 64, generator=torch.Generator().manual_seed(4)) * 2

    def __call__(self, tokens: torch.Tensor, cache: object, *, rows: torch.Tensor | None) -> tuple[Any, Any]:
        routes = torch.zeros(len(tokens), self.config.num_moe_layers, self.config.top_k, dtype=torch.uint8)
        logits = self._table[tokens]
        return (logits if rows is None else logits[rows]), routes


def test_the_runner_of_a_device_samples_the_same_tokens():
    requests = [sampled(f"r{i}", 6 + i, 12, **given) for i, given in enumerate(PARAMETERS)]
    answers = []
    for kind in (Runner, DeviceRunner):
        running = engine(max_sequences=16)
        model = Transformer(TINY, seed=1)
        running._runner = kind(model, num_slots=16, context_tokens=512)
        running._runner.model = TableModel(model)
        running._runner.kv.vendor = True  # else the kernels that nothing calls here would be loaded
        answers.append(run(running, *requests))
    for one, other in zip(*answers, strict=True):
        assert pack((one.token_ids, one.logprobs)) == pack((other.token_ids, other.logprobs))
        assert pack((one.top_ids, one.top_logprobs)) == pack((other.top_ids, other.top_logprobs))


def greedy_by_hand(request: CompletionRequest, model: Transformer) -> list[int]:
    """The greedy tokens by vLLM's formulas, written out for one request and without a cache."""
    sampling, context, out = request.sampling, request.prompt_ids.tolist(), list[int]()
    bias = dict(sampling.logit_bias)
    while len(out) < sampling.max_tokens:
        with torch.inference_mode():
            row = model(torch.tensor([*context, *out]))[0][-1].float().tolist()
        for token in range(len(row)):
            value = row[token] + bias.get(token, 0.0)
            if token in context or token in out:
                value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
            count = out.count(token)
            row[token] = value - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)
            if len(out) < sampling.min_tokens and token in sampling.stop_token_ids:
                row[token] = -math.inf
        out.append(max(range(len(row)), key=row.__getitem__))
        if out[-1] in sampling.stop_token_ids:
            break
    return out


@pytest.mark.parametrize(
    "given",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.1, "frequency_penalty": -0.2},
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.7},
        {"logit_bias": ((3, 2.5), (9, -50.0)), "repetition_penalty": 1.3},
        {"min_tokens": 4, "stop_token_ids": tuple(range(0, 64, 2))},
    ],
)
def test_greedy_tokens_are_those_of_the_formulas_for_penalties_biases_and_min_tokens(given):
    model = Transformer(TINY, seed=1)
    request = sampled("greedy", 8, 14, temperature=0.0, **given)
    [found] = run(engine(model), request)
    assert found.token_ids.tolist() == greedy_by_hand(request, model)


def test_log_probabilities_are_the_models_own_whatever_was_asked_for():
    requests = [
        sampled("one", 8, 12, top_p=0.3, logit_bias=((4, 20.0),), temperature=0.8, top_logprobs=20),
        sampled("two", 8, 12, repetition_penalty=2.0, top_k=2, temperature=1.0),
    ]
    model = Transformer(TINY, seed=1)
    for request, found in zip(requests, run(engine(model), *requests), strict=True):
        context = [*request.prompt_ids.tolist(), *found.token_ids.tolist()]
        with torch.inference_mode():
            rows = model(torch.tensor(context))[0].float()[len(request.prompt_ids) - 1 : -1]
        logprobs = (rows / request.sampling.temperature).log_softmax(-1)
        expected = logprobs[range(len(rows)), found.token_ids.tolist()]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)
        if request.sampling.top_logprobs:
            np.testing.assert_allclose(found.top_logprobs, logprobs.topk(20).values, atol=1e-5)


def test_the_likeliest_tokens_have_descending_probabilities_of_at_most_one_in_sum():
    [found] = run(engine(), sampled("top", 8, 20, top_logprobs=20))
    assert found.top_ids.shape == found.top_logprobs.shape == (20, 20)
    assert found.top_ids.dtype == np.int32
    sums = np.exp(found.top_logprobs.astype(np.float64)).sum(1)
    assert (sums <= 1 + 1e-5).all()
    assert (sums > 20 / 64).all()
    assert (np.diff(found.top_logprobs) <= 0).all()
    for token, logprob, ids, logprobs in zip(
        found.token_ids, found.logprobs, found.top_ids, found.top_logprobs, strict=True
    ):
        assert len(set(ids.tolist())) == 20
        if token in ids:
            assert logprobs[ids.tolist().index(token)] == logprob
    assert unpack(pack(found), Completion).top_ids.tolist() == found.top_ids.tolist()


def test_a_wanted_end_comes_after_min_tokens_and_not_before():
    everything_stops = tuple(range(64))
    [early, late, biased] = run(
        engine(),
        sampled("a", 8, 12, stop_token_ids=everything_stops[:-1]),
        sampled("a", 8, 12, stop_token_ids=everything_stops[:-1], min_tokens=7),
        sampled("b", 8, 12, stop_token_ids=(5,), min_tokens=7, logit_bias=((5, 100.0),)),
    )
    assert len(early.token_ids) <= len(late.token_ids)
    assert late.token_ids[:7].tolist() == [63] * 7, "the only token that ends nothing"
    assert (len(biased.token_ids), int(biased.token_ids[-1])) == (8, 5)


BAD = [
    {"top_p": 0.0},
    {"top_p": 1.0001},
    {"top_p": math.nan},
    {"top_k": -1},
    {"top_k": 2**40},
    {"min_p": -0.1},
    {"min_p": math.nan},
    {"frequency_penalty": math.inf},
    {"frequency_penalty": -2.1},
    {"presence_penalty": math.nan},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": math.nan},
    {"repetition_penalty": 1e300},
    {"logit_bias": ((64, 1.0),)},
    {"logit_bias": ((-1, 1.0),)},
    {"logit_bias": ((2**70, 1.0),)},
    {"logit_bias": ((3, math.nan),)},
    {"logit_bias": ((3, math.inf),)},
    {"logit_bias": ((3, 1.0), (3, 2.0))},
    {"min_tokens": -1},
    {"min_tokens": 13},
    {"top_logprobs": -1},
    {"top_logprobs": 21},
    {"top_logprobs": 2**66},
    {"temperature": math.nan, "top_k": 2},
    {"grammar": "x" * 300_000, "stop_token_ids": (1,)},
    {"grammar": "no grammar", "stop_token_ids": (1,)},
    {"grammar": '{"regex": 3}', "stop_token_ids": (1,)},
    {"grammar": grammars.any_json_object()},
]


def test_invalid_parameters_are_refused_by_name_before_the_request_waits():
    async def check() -> None:
        async with engine() as running:
            for given in BAD:
                with pytest.raises(MalformedRequest) as caught:
                    await running.generate(sampled("bad", 8, 12, **given))
                error = caught.value
                assert error.what
                assert error.facts
                assert error.hint
                assert len(str(error)) < 1000
            assert running.counters.requests == running.counters.failed == 0
            assert len((await running.generate(ask("good"))).token_ids) == 8

    asyncio.run(check())


# Grammars


def test_json_under_a_schema_always_parses_and_is_valid(tokenizer):
    grammar = grammars.from_json_schema(SCHEMA)
    requests = [
        sampled(f"j{i}", 5, 400, grammar=grammar, temperature=1.5, stop_token_ids=(5,), vocab_size=300)
        for i in range(6)
    ]
    for found in run(with_vocabulary(tokenizer), *requests, ask("plain", 5, 40, vocab_size=300))[:-1]:
        value = json.loads(text_of(tokenizer, found, 5))
        jsonschema.validate(value, SCHEMA)


def test_a_constrained_request_gets_the_same_tokens_in_any_batch_and_after_a_swap(tokenizer):
    grammar = grammars.from_json_schema(SCHEMA)
    asked = [sampled(f"g{i}", 5, 60, grammar=grammar, stop_token_ids=(5,), vocab_size=300, top_p=0.9) for i in range(3)]
    together = run(with_vocabulary(tokenizer), *asked, ask("beside", 30, 60, vocab_size=300))[:3]
    for request, found in zip(asked, together, strict=True):
        [alone] = run(with_vocabulary(tokenizer, max_sequences=1), request)
        assert alone.token_ids.tolist() == found.token_ids.tolist()

    async def swapped() -> Completion:
        model, other = (Transformer(WIDE, seed=seed) for seed in (1, 2))
        new = {n: Tensor("bf16", tuple(v.shape), bf16(v)) for n, v in hf_views(other).items()}
        config = EngineConfig(max_sequences=2, context_tokens=512)
        async with ReferenceEngine(model, version=version(0), config=config, tokenizer=tokenizer) as running:
            long = msgspec.structs.replace(asked[0].sampling, max_tokens=400)
            parts = running.stream(msgspec.structs.replace(asked[0], sampling=long))
            await anext(parts)
            await asyncio.wrap_future(running.swap(everything(model, new, 1)))
            *_, last = [part async for part in parts]
            assert isinstance(last, Completion)
            return last

    found = asyncio.run(swapped())
    assert [span.version.step for span in found.spans] == [0, 1]
    jsonschema.validate(json.loads(text_of(tokenizer, found, 5)), SCHEMA)


def test_a_preempted_request_goes_on_in_its_grammar(tokenizer):
    request = sampled("a", 5, 60, grammar=grammars.from_json_schema(SCHEMA), stop_token_ids=(5,),
                      vocab_size=300)  # fmt: skip
    found = with_vocabulary(tokenizer)

    def tokens(preempt_after: int) -> list[int]:
        running = asyncio.run(found._running(request))
        scheduler = Scheduler(num_slots=1, context_tokens=512, chunk_tokens=16, step_tokens=16, max_waiting=4)
        scheduler.submit(running)
        while not running.finished:
            found._runner.step(scheduler.plan())
            if len(running.token_ids) == preempt_after:
                assert scheduler._preempt()
                assert len(running.token_ids) == preempt_after
        return running.token_ids

    assert tokens(4) == tokens(0)
    found.close()


def test_tool_calls_are_forced_token_by_token(tokenizer):
    tools = [
        grammars.Tool("run", {"properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}),
        grammars.Tool("look", {"properties": {}, "additionalProperties": False}),
    ]
    hermes = grammars.from_tool_calls(tools, "<tool_call>\nBOTH\n</tool_call>", tokens={}, max_calls=2)
    own = grammars.from_tool_calls(
        [grammars.Tool("run", pattern="( [a-z]{1,3}){1,2}")], "<|call|>NAMEARGUMENTS", tokens={"<|call|>": 4}
    )
    either = grammars.with_answer(own, {"enum": ["yes", "no"]})
    given = {"stop_token_ids": (5,), "temperature": 1.5, "vocab_size": 300}
    answers = run(
        with_vocabulary(tokenizer),
        *(sampled(f"h{i}", 5, 300, grammar=hermes, **given) for i in range(3)),
        *(sampled(f"o{i}", 5, 60, grammar=own, **given) for i in range(3)),
        *(sampled(f"e{i}", 5, 60, grammar=either, **given) for i in range(16)),
    )
    for found in answers[:3]:
        for call in text_of(tokenizer, found, 5).split("</tool_call>")[:-1]:
            value = json.loads(call.strip().removeprefix("<tool_call>"))
            assert value in [
                {"name": "run", "arguments": {"x": 1}},
                {"name": "run", "arguments": {"x": 2}},
                {"name": "look", "arguments": {}},
            ]
    for found in answers[3:6]:
        assert found.token_ids[0] == 4
        assert text_of(tokenizer, found, 5).startswith("<|call|>run ")
    texts = [text_of(tokenizer, found, 5) for found in answers[6:]]
    called = [text.startswith("<|call|>run ") for text in texts]
    assert all(call or text in ('"yes"', '"no"') for call, text in zip(called, texts, strict=True))
    assert 0 < sum(called) < len(called)


def test_a_special_token_is_never_spelt_by_text_that_a_grammar_forces(tokenizer):
    grammar = grammars.from_json_schema({"const": "a<|end|>b"})
    [found] = run(
        with_vocabulary(tokenizer),
        sampled("c", 5, 60, grammar=grammar, stop_token_ids=(5,), vocab_size=300),
    )
    assert json.loads(text_of(tokenizer, found, 5)) == "a<|end|>b"


INVALID = [
    grammars.from_json_schema({"type": "strin"}),
    grammars.from_json_schema({"$ref": "http://127.0.0.1:1/schema"}),
    grammars.from_json_schema({"type": "integer", "minimum": 3, "maximum": 2}),
    grammars.from_json_schema({"not": {}}),
    grammars.from_json_schema(False),
    grammars.from_regex("["),
    grammars.from_regex("(?=a)b"),
    grammars.from_lark("start: <[9999]>"),
    grammars.from_lark("start: a\na: b\nb: a"),
    grammars.from_lark("start: nothing"),
    grammars.from_lark('start: "a'),
    grammars.from_lark(""),
]


def test_invalid_grammars_are_refused_and_the_engine_goes_on(tokenizer):
    async def check() -> None:
        async with with_vocabulary(tokenizer) as running:
            for grammar in INVALID:
                with pytest.raises(InvalidGrammar) as caught:
                    await running.generate(sampled("bad", 5, 8, grammar=grammar, stop_token_ids=(5,)))
                assert caught.value.facts
            # it compiles, and becomes too complex while the text grows
            growing = grammars.from_regex("(a+)+b{100000}")
            with pytest.raises(InvalidGrammar, match="cannot follow its grammar"):
                await running.generate(sampled("grow", 5, 64, grammar=growing, stop_token_ids=(5,)))
            assert len((await running.generate(ask("good", vocab_size=300))).token_ids) == 8
            assert len(running._scheduler.running) == 0

    asyncio.run(check())


def test_an_engine_without_a_tokeniser_refuses_grammars_only():
    async def check() -> None:
        async with engine() as running:
            with pytest.raises(InvalidGrammar, match="takes no grammars"):
                await running.generate(sampled("a", 5, 8, grammar=grammars.any_json_object(), stop_token_ids=(5,)))
            await running.generate(ask("good"))

    asyncio.run(check())


def test_random_grammars_neither_end_the_engine_nor_a_neighbour(tokenizer):
    rng = random.Random(3)
    pieces = ["start", ":", " ", "a", '"x"', "/[a-z]+/", "|", "(", ")", "*", "{1,3}", "\n", "%json ", '{"type":"null"}',
              "<[4]>", "<[400]>", "%ignore", "\\", "[", "\u00e9", "~", "?", "lazy", "<|end|>"]  # fmt: skip
    texts = ["start: " + "".join(rng.choice(pieces) for _ in range(rng.randrange(12))) for _ in range(40)]
    asked = [
        sampled(f"f{i}", 5, 12, grammar=make(text), stop_token_ids=(5,))
        for i, text in enumerate(texts)
        for make in (grammars.from_lark, grammars.from_regex)
    ]

    async def check() -> tuple[int, Completion]:
        async with with_vocabulary(tokenizer) as running:
            answers = await asyncio.gather(*(running.generate(one) for one in asked), return_exceptions=True)
            assert {type(one) for one in answers} <= {Completion, InvalidGrammar}
            return sum(isinstance(one, Completion) for one in answers), await running.generate(ask("good"))

    num_served, good = asyncio.run(check())
    assert 5 < num_served < len(asked)
    assert len(good.token_ids) == 8


def test_a_grammar_that_takes_too_long_is_refused_and_the_cache_is_bounded(tokenizer, monkeypatch):
    async def check() -> None:
        async with with_vocabulary(tokenizer) as running:
            monkeypatch.setattr(compiled_module, "MAX_COMPILED", 2)
            for i in range(4):
                regex = grammars.from_regex(f"a{{{i + 1}}}")
                done = await running.generate(sampled(f"c{i}", 5, 12, grammar=regex, stop_token_ids=(5,)))
                assert text_of(tokenizer, done, 5) == "a" * (i + 1)
            assert len(running._grammars._compiled) == 2
            monkeypatch.setattr(compiled_module, "COMPILE_S", 0.01)
            compile_grammar = running._grammars._compile
            monkeypatch.setattr(running._grammars, "_compile", lambda text: time.sleep(0.5) or compile_grammar(text))
            with pytest.raises(InvalidGrammar, match="was not compiled within"):
                await running.generate(sampled("late", 5, 12, grammar=grammars.from_regex("b"), stop_token_ids=(5,)))

    asyncio.run(check())


def test_over_http_a_constrained_request_is_served_and_an_invalid_grammar_keeps_its_type(tokenizer):
    good = sampled("g", 5, 40, grammar=grammars.from_regex("[a-c]{4}"), stop_token_ids=(5,), top_logprobs=3)
    bad = sampled("b", 5, 40, grammar=grammars.from_regex("["), stop_token_ids=(5,))
    huge = sampled("h", 5, 40, grammar="x" * (grammars.MAX_BYTES + 1), stop_token_ids=(5,))

    async def check() -> Completion:
        async with with_vocabulary(tokenizer) as running, served_over_http(running) as url, HttpEngine(url) as client:
            for request in (bad, huge):
                with pytest.raises(InvalidGrammar):
                    await client.generate(request)
            return await client.generate(good)

    done = asyncio.run(check())
    assert len(text_of(tokenizer, done, 5)) == 4
    assert done.top_ids.shape == (len(done.token_ids), 3)
