"""Speculative decoding at length, beside grammars, and with a drafter of a user's own."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from examples.plugins.drafters import Bigrams
from tests.parity.same_bits import asked, sharp

from etude import grammars
from etude.config import Plugin
from etude.errors import PluginError
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference import EngineConfig
from etude.inference.config import Speculation
from etude.inference.engine import ReferenceEngine
from etude.inference.look_up import Drafter, LookUp
from etude.inference.metrics import Counters
from etude.inference.serving import add_arguments, config_of, speculation
from etude.inference.speculation import PluginDrafter
from etude.models import Transformer
from etude.numerics.exact.operators import Exact
from etude.records import Completion, CompletionRequest
from etude.training.tokenizer import train_tokenizer

from .drafted import ByHand, Known, NoCosts, answers_of, said
from .helpers import TINY, ask, version

STOP = 5


def sampled(
    model: Transformer, requests: Many[CompletionRequest], drafter: Drafter | None, tokenizer: Path | None = None
) -> tuple[list[Completion], Counters]:
    """The completions of an engine that samples all requests together, and its counters."""

    async def story() -> list[Completion]:
        config = EngineConfig(max_sequences=17, context_tokens=2048)
        engine = ReferenceEngine(model, version=version(0), config=config, drafter=drafter, tokenizer=tokenizer)
        if engine._speculator is not None:
            engine._speculator.costs = NoCosts()
        async with engine:
            done = await asyncio.gather(*(engine.generate(request) for request in requests))
        counters.append(engine.counters)
        return list(done)

    counters: list[Counters] = []
    return asyncio.run(story()), counters[0]


# at length


@pytest.mark.parametrize("num_tokens", [180, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_long_completions_have_the_same_bits_with_and_without_drafts(num_tokens: int, temperature: float) -> None:
    each = min(num_tokens // 6, 2000)
    few = dataclasses.replace(TINY, vocab_size=8)  # so that tokens drawn at temperature 1 repeat themselves
    rng, model = np.random.default_rng(0), sharp(few, Exact())
    prompts = [np.tile(rng.integers(0, few.vocab_size, 12), 3).astype(np.int32) for _ in range(num_tokens // each)]
    requests = [asked(i, prompt, tokens=each, temperature=temperature) for i, prompt in enumerate(prompts)]
    expected, _ = sampled(model, requests, None)
    found, counters = sampled(model, requests, LookUp())
    assert sum(len(done.token_ids) for done in found) == num_tokens // each * each
    few_accepted = min(num_tokens // 50, 100)  # a drafter stops if it does not pay
    assert counters.drafted_tokens > counters.accepted_tokens > few_accepted
    for one, other in zip(found, expected, strict=True):
        assert said(one) == said(other)


# beside grammars


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ['{"a": [1, 22, 333], "b": "x"}'] * 9
    train_tokenizer(texts, folder, vocab_size=300, special_tokens=SPECIAL_TOKENS, chat_template="")
    return folder / "tokenizer.json"


class Interrupted(Known):
    """Drafts known completions, and in some places a token that no grammar allows, or one drawn at random."""

    forbidden = 0

    def draft(self, slot: int, most: int) -> list[int]:
        found = super().draft(slot, most)
        kind = self.rng.integers(4)
        if found and kind:
            at = int(self.rng.integers(len(found)))
            found[at] = int(self.rng.integers(300)) if kind == 1 else 0  # the special token of padding
            self.forbidden += found[at] == 0
        return found


ARRAY = {"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 30}


@pytest.mark.parametrize("grammar", ["", grammars.from_json_schema(ARRAY)], ids=["none", "array"])
def test_drafts_that_a_grammar_forbids_change_no_token(tokenizer: Path, grammar: str) -> None:
    model = Transformer(dataclasses.replace(TINY, vocab_size=300), seed=1)
    requests = []
    for i in range(4):
        request = ask(f"r{i}", 4 + i, 30, vocab_size=300)
        more = {
            "grammar": grammar,
            "stop_token_ids": (STOP,) if grammar else (),
            "temperature": (0.0, 0.7, 1.0, 1.5)[i],
        }
        requests.append(msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **more)))
    expected, _ = sampled(model, requests, None, tokenizer)
    drafter = Interrupted(answers_of(requests, expected), right=1.0)
    found, counters = sampled(model, requests, drafter, tokenizer)
    assert drafter.forbidden > 3
    assert counters.drafted_tokens > counters.accepted_tokens > 20
    assert list(map(said, found)) == list(map(said, expected))
    if grammar:
        assert all(0 not in done.token_ids for done in found)


# drafters of a user's own

OWN = """
class Own:
    def __init__(self, mode: str = "wrong"):
        self.mode = mode

    def begin(self, slot, token_ids):
        pass

    def extend(self, slot, token_ids):
        if self.mode == "raises":
            raise ValueError("no more")

    def draft(self, slot, most):
        return {"wrong": [3] * most, "raises": [3], "text": "ab"}[self.mode]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"drafters_{random.SystemRandom().randrange(1 << 40)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return f"{name}:Own"


def test_a_drafter_of_a_users_own_is_used_and_changes_no_token(own: str) -> None:
    request = ask("r", np.tile(np.arange(4, dtype=np.int32), 8), 60, temperature=0.0)
    [expected] = ByHand().answers(request)
    for path, kind in ((own, None), ("examples.plugins.drafters:Bigrams", Bigrams)):
        served = ByHand(speculation=Plugin(path))
        assert said(served.answers(request)[0]) == said(expected)
        assert served.engine.counters.drafted_tokens > 30
        assert (served.engine.counters.accepted_tokens > 10) == (kind is Bigrams)


def test_a_drafter_that_fails_is_named(own: str) -> None:
    for mode, facts in (
        ("raises", "its method extend raised ValueError: no more"),
        ("text", "its method draft raised"),
    ):
        drafter = PluginDrafter(Plugin(own, {"mode": mode}))
        drafter.begin(0, [1])
        with pytest.raises(PluginError, match=f"drafter {own} failed") as error:
            (drafter.extend if mode == "raises" else drafter.draft)(0, [2] if mode == "raises" else 2)  # type: ignore[operator]
        assert facts in error.value.facts


def test_the_setting_of_an_engines_process_is_a_name_or_an_import_path() -> None:
    def config(*words: str) -> Any:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return config_of(parser.parse_args(words)).speculation

    assert config() is config("--speculation", "off") is Speculation.OFF
    assert config("--speculation", "look-up") is Speculation.LOOK_UP
    assert config("--speculation", "heads") is Speculation.HEADS
    assert config("--speculation", "my_package.drafters:Mine") == Plugin("my_package.drafters:Mine")
    with pytest.raises(argparse.ArgumentTypeError, match="is none of off, heads, look-up, and no import path"):
        speculation("look up")
