"""A model of one's own as a judge, over `Policy`: its prompt, the grammar of its answer, and its failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from tests.parity import chats
from tests.unit.rewards.judges.injections import INJECTIONS

from etude.harness import ChatFormat
from etude.records import Completion, CompletionRequest
from etude.rewards.judges import Aspect, Evidence, Form, Judge, JudgeStore, Limits, PolicyAsker, Rubric, Verdict
from etude.rewards.judges.questions import QuestionMaker
from etude.testing import EnginePolicy, ScriptedEngine

ASPECT = Aspect("facts", "How many facts does it have?")
RUBRIC = Rubric((ASPECT,))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """The chat format of a checkpoint of Qwen's shape, with its special tokens."""
    return ChatFormat.load(chats.make(tmp_path_factory.mktemp("chat"), "qwen"))


def judged(
    chat: ChatFormat, tmp_path: Path, answers: list[str], form: Form, text: str = "fact"
) -> tuple[Verdict, ScriptedEngine]:
    end = chat.stop_token_ids[0]
    engine = ScriptedEngine([[*chat.encode(answer).tolist(), end] for answer in answers])
    asker = PolicyAsker(EnginePolicy(engine), chat, name="a digest")
    store = JudgeStore(tmp_path / "judges.sqlite")
    judge = Judge(RUBRIC, asker, store, form=form, limits=Limits(deadline_s=60.0), first_wait_s=0.01)
    found = asyncio.run(judge.score(ASPECT, Evidence.of_text(text)))
    store.close()
    return found, engine


def test_a_policy_answers_greedily_under_the_grammar_of_the_form(chat: ChatFormat, tmp_path: Path) -> None:
    found, engine = judged(chat, tmp_path, ["4"], Form.VALUE)
    assert found.value == 4
    [request] = engine.requests
    assert (request.sampling.temperature, request.keep_session) == (0.0, False)
    assert json.loads(request.sampling.grammar) == {"regex": "1|2|3|4|5"}
    text = chat.decode(request.prompt_ids, special=True)
    assert "How many facts does it have?" in text
    assert "| fact" in text


def test_an_answer_in_json_is_sampled_under_its_schema_and_needs_the_code(chat: ChatFormat, tmp_path: Path) -> None:
    wrong = '{"reason": "r", "verdict": 5, "code": "000000"}'
    found, engine = judged(chat, tmp_path, [wrong] * 3, Form.JSON)
    assert found.value is None
    assert "of no question" in found.reason
    schema = json.loads(engine.requests[0].sampling.grammar)["json_schema"]
    assert schema["properties"]["verdict"]["enum"] == [1, 2, 3, 4, 5]


class Weighing(ScriptedEngine):
    """Says that the likeliest tokens are these, with these probabilities."""

    shares: dict[int, float]

    def completion(self, request: CompletionRequest, tokens: list[int]) -> Completion:
        done = super().completion(request, tokens)
        fields = {name: getattr(done, name) for name in done.__struct_fields__}
        logprobs = np.log(np.array([list(self.shares.values())], np.float32))
        return Completion(**fields | {"top_ids": np.array([list(self.shares)], np.int32), "top_logprobs": logprobs})


def test_the_value_of_one_token_is_read_from_the_likeliest_tokens(chat: ChatFormat, tmp_path: Path) -> None:
    one, five, other = (int(chat.encode(text)[0]) for text in ("1", "5", "x"))
    engine = Weighing([[five]])
    engine.shares = {five: 0.6, one: 0.2, other: 0.15}
    asker = PolicyAsker(EnginePolicy(engine), chat, name="a digest")
    judge = Judge(RUBRIC, asker, JudgeStore(tmp_path / "judges.sqlite"), form=Form.TOKEN)
    found = asyncio.run(judge.score(ASPECT, Evidence.of_text("fact")))
    again = asyncio.run(judge.score(ASPECT, Evidence.of_text("fact")))
    judge.store.close()
    assert found.value == again.value == pytest.approx(4.0)
    assert again.cached
    [request] = engine.requests
    assert (request.sampling.max_tokens, request.sampling.top_logprobs, request.sampling.grammar) == (1, 20, "")


def test_an_engine_without_probabilities_gives_no_verdict_of_one_token(chat: ChatFormat, tmp_path: Path) -> None:
    found, engine = judged(chat, tmp_path, ["4"], Form.TOKEN)
    assert (found.value, found.retry, len(engine.requests)) == (None, False, 1)
    assert "a digest answered without" in found.reason


def test_an_engine_that_fails_makes_the_verdict_unknown(chat: ChatFormat, tmp_path: Path) -> None:
    store = JudgeStore(tmp_path / "judges.sqlite")
    asker = PolicyAsker(EnginePolicy(ScriptedEngine([])), chat, name="a digest")
    judge = Judge(RUBRIC, asker, store, form=Form.VALUE, limits=Limits(deadline_s=0.3), first_wait_s=0.05)
    found = asyncio.run(judge.score(ASPECT, Evidence.of_text("fact")))
    assert (found.value, found.retry) == (None, True)
    assert "has no answer left" in found.reason


def test_no_injected_text_is_a_special_token_of_the_prompt(chat: ChatFormat) -> None:
    special = {
        token for token in range(chat.vocab_size) if chat.decode([token]) == "" != chat.decode([token], special=True)
    }
    assert len(special) == 3

    def of(text: str) -> list[int]:
        maker = QuestionMaker(RUBRIC, Form.VALUE, 2000, (), b"secret")
        question = maker.about_one(ASPECT, Evidence.of_text(text))
        messages = [{"role": "system", "content": question.system}, {"role": "user", "content": question.user}]
        return [token for token in chat.encode_prompt(messages).tolist() if token in special]

    plain = of("fact")
    assert len(plain) >= 3
    assert [name for name, text in INJECTIONS.items() if of(text) != plain] == []
