"""Judges as reward terms: what a config may say, single rollouts and groups, and what is unknown."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.judge_server import ScriptedJudge, work

from etude.config import Plugin, build
from etude.errors import ConfigError
from etude.plugins import Kind, make
from etude.records import Graded, Rollout
from etude.records.reward import Measured
from etude.records.task import Trust
from etude.rewards import NamedTerm, measure_group
from etude.rewards.config import RewardsConfig
from etude.rewards.judges.rubrics import read_rubric
from etude.seams import GroupRewardTerm, InRun, RewardTerm
from etude.testing.rewards import finished

RUBRIC = """
about = "Texts with facts."
[[aspects]]
name = "facts"
question = "How many facts does it have?"
levels = {1 = "one or none", 5 = "five or more"}
[[aspects.examples]]
text = "fact"
score = 1
reason = "it has one"
"""
GRADED = Graded.of(1.0, trust=Trust.DATA, reason="all tests pass")


@pytest.fixture
def rubric(tmp_path: Path) -> Path:
    path = tmp_path / "facts.toml"
    path.write_text(RUBRIC)
    return path


def term(rubric: Path, url: str, /, **settings: Any) -> Any:
    given = {"rubric": str(rubric), "url": f"{url}/v1", "model": "m", "cache": str(rubric.parent / "judges.sqlite")}
    return make(Kind.REWARD, Plugin("judge", given | {"evidence": ["files"]} | settings))


def rollout(number: int, text: str) -> Rollout:
    made = finished(num_turns=1, exports={"own.py": text.encode()})
    return msgspec.structs.replace(made, rollout_id=f"g000000.{number}")


def measured(rubric: Path, texts: list[str], server: ScriptedJudge | None = None, **settings: Any) -> list[Measured]:
    async def use() -> list[Measured]:
        async with (server or ScriptedJudge()).serve() as running:
            made = term(rubric, running.url, **settings)
            rollouts = [rollout(i, text) for i, text in enumerate(texts)]
            found = await measure_group([NamedTerm("facts", made)], rollouts, [GRADED] * len(texts))
            made.judge.store.close()
            return [one for [one] in found]

    return asyncio.run(use())


def test_a_judge_scores_each_rollout_from_0_to_1_with_the_reason(rubric: Path) -> None:
    found = measured(rubric, [work(1), work(3), work(5)])
    assert [one.term.value for one in found] == [0.0, 0.5, 1.0]
    assert found[1].term.evidence == "facts 3: as scripted"


@pytest.mark.parametrize("mode", ["pairwise", "ranking"])
def test_a_group_is_compared_in_both_orders_and_equal_works_have_equal_values(rubric: Path, mode: str) -> None:
    server = ScriptedJudge()
    found = measured(rubric, [work(2), work(5), work(2), work(1)], server, mode=mode)
    assert [one.term.value for one in found] == [0.5, 1.0, 0.5, 0.0]
    assert len(server.bodies) == (6 if mode == "pairwise" else 2)
    assert isinstance(term(rubric, "http://h", mode=mode), GroupRewardTerm)
    assert [one.term.value for one in measured(rubric, [work(3)], mode=mode)] == [0.5]


@pytest.mark.parametrize("mode", ["pointwise", "pairwise", "ranking"])
def test_a_judge_that_is_away_makes_the_term_unknown_and_asks_for_another_try(rubric: Path, mode: str) -> None:
    found = measured(rubric, [work(1), work(2)], ScriptedJudge(fault=lambda _: 503), mode=mode, deadline_s=0.2)
    assert [(one.term.value, one.retry) for one in found] == [(None, True)] * 2
    assert all("judge: no verdict within 0.2 s" in one.term.evidence for one in found)


def test_a_budget_below_the_most_that_a_call_may_cost_makes_the_term_unknown(rubric: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("[models.m]\ninput = 10.0\noutput = 30.0\n")
    found = measured(rubric, [work(1)], prices=str(tmp_path / "prices.toml"), budget=0.001)
    assert [(one.term.value, one.retry) for one in found] == [(None, False)]
    told = found[0].term.evidence
    most = r"one call may cost up to \$0\.0\d+, more than the 0.001 dollars that are left of the budget"
    assert re.search(most, told)


def test_a_key_is_read_without_space_and_refused_when_it_fits_no_header(
    rubric: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret\r\n")
    assert term(rubric, "http://h", key_env="JUDGE_KEY").judge.asker.key == "secret"
    monkeypatch.setenv("JUDGE_KEY", "secret\nX-Other: 1")
    with pytest.raises(ConfigError, match="JUDGE_KEY has no API key") as refused:
        term(rubric, "http://h", key_env="JUDGE_KEY")
    assert "secret" not in str(refused.value)


def test_several_aspects_are_weighted_and_one_unknown_makes_all_unknown(rubric: Path) -> None:
    more = '[[aspects]]\nname = "kind"\nquestion = "Is it kind?"\nlowest = 0\nhighest = 5\nweight = 3.0\n'
    rubric.write_text(RUBRIC + more)
    [found] = measured(rubric, [work(5)])
    assert found.term.value == 1.0
    [found] = measured(rubric, [work(4)], ScriptedJudge(bias=lambda text, draw: 0))
    assert found.term.value is None, "0 is out of the scale of the first aspect"
    assert "outside of 1 to 5" in found.term.evidence


def test_a_term_is_told_its_run_so_that_money_counts_by_run(rubric: Path, tmp_path: Path) -> None:
    made = term(rubric, "http://host")
    assert isinstance(made, InRun)
    assert isinstance(made, RewardTerm)
    made.enter(tmp_path / "run-7", lambda ids: "text")
    assert made.judge.account == "facts by m at host, run-7"


def test_the_version_changes_with_the_rubric_the_evidence_and_the_mode(rubric: Path) -> None:
    versions = {term(rubric, "http://h", **one).version for one in ({}, {"evidence": ["task"]}, {"mode": "ranking"})}
    rubric.write_text(RUBRIC.replace("How many", "Count how many"))
    versions.add(term(rubric, "http://h").version)
    assert len(versions) == 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "api.example.com"}, "is not the URL of an API"),
        ({"url": "https://user:secret@host/v1"}, "is not the URL of an API"),
        ({"url": "https://:secret@host/v1"}, "is not the URL of an API"),
        ({"url": "https://host/v1?key=secret"}, "is not the URL of an API"),
        ({"url": "http://[::1"}, "is not the URL of an API"),
        ({"model": ""}, "model is empty"),
        ({"key_env": "NO_SUCH_KEY_HERE"}, "NO_SUCH_KEY_HERE is not set"),
        ({"budget": 5.0}, "prices of 'm' are unknown"),
        ({"evidence": []}, "task, trace, files, tests"),
        ({"evidence": ["files", "files"]}, "task, trace, files, tests"),
        ({"dialect": "gemini"}, "anthropic"),
        ({"mode": "pairs"}, "pairwise"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"at_once": 0}, "at_once"),
        ({"temprature": 1.0}, "temprature"),
        ({"rubric": "nowhere.toml"}, "no rubric at nowhere.toml"),
        ({"prices": "nowhere.toml"}, "no table of prices at nowhere.toml"),
        ({"key_env": "sk-proj-secret"}, "key_env must be the name of an environment variable"),
        ({"options": {"stream": True}}, "options must not contain stream"),
        ({"cache": "nowhere/judges.sqlite"}, "does not exist, or is not writable"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_before_a_run(rubric: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        term(rubric, "http://host", **settings)
    assert named in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("about = 'nothing'", "has no aspects"),
        ("aspects = 3", "expected a list"),
        ("[aspects]\nname = 'a'\nquestion = 'q'", "bad.toml: aspects: expected a list"),
        ("[[aspects]]\nname = 'a'", "question"),
        ("[[aspects]]\nname = 'a'\nquestion = ' '", "has no question"),
        ("[[aspects]]\nname = 'a'\nquestion = 'q'\nlowest = 5", "lowest = 5 is not below highest = 5"),
        ("[[aspects]]\nname = 'a'\nquestion = 'q'\nlevels = {9 = 'x'}", "has level '9'"),
        ("[[aspects]]\nname = 'a'\nquestion = 'q'\nweight = 0.0", "has weight 0"),
        ("[[aspects]]\nname = 'a'\nquestion = 'q'\nwieght = 1.0", "wieght"),
        ("[[aspects]]\nname = 'a'\nquestion = 'q'\nexamples = [{text = 't', score = 7}]", "example of score 7"),
        ("[[aspects]]\nname = 'a'\nquestion = 'q'\n" * 2, "2 aspects have the name 'a'"),
        (f"[[aspects]]\nname = 'a'\nquestion = '{'q' * 30_000}'", "shorten it"),
        ("[[aspects]", "is not valid TOML"),
    ],
)
def test_a_rubric_that_asks_nothing_or_is_malformed_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_rubric(path)
    assert named in str(refused.value)


def audited(rubric: Path, weight: float = 0.0, **auditor: Any) -> RewardsConfig:
    """Settings in which the judge "facts" is audited by "auditor", a judge with other settings."""
    kind = {"kind": "judge", "rubric": str(rubric), "url": "http://h/v1", "model": "m"}
    terms = [
        {"name": "facts", "kind": kind, "weight": 1.0},
        {"name": "auditor", "kind": kind | {"model": "other"} | auditor, "weight": weight},
    ]
    return build(RewardsConfig, {"terms": terms, "audits": [{"term": "facts", "by": "auditor", "tolerance": 0.1}]})


def test_an_auditor_must_be_another_model_without_a_weight(rubric: Path) -> None:
    assert audited(rubric).audits[0].name == "facts by auditor"
    assert audited(rubric, model="m", url="http://h:8000/v1").audits
    with pytest.raises(ConfigError, match=r"set its weight and its hints to 0\.0"):
        audited(rubric, weight=0.5)
    same = [
        {},
        {"url": "http://h/v1/"},
        {"url": "http://H:80/v1"},
        {"url": "HTTP://h./v1"},
        {"url": "http://h", "dialect": "anthropic"},
        {"kind": "etude.rewards.judges.terms:judge"},
    ]
    for one in same:
        with pytest.raises(ConfigError, match="is the same model as 'facts'"):
            audited(rubric, model="m", **one)


def test_an_audit_of_values_that_mean_different_things_is_refused(rubric: Path) -> None:
    with pytest.raises(ConfigError, match="'facts' has mode = 'pointwise', and 'auditor', which audits it, 'ranking'"):
        audited(rubric, mode="ranking")
    counts = [{"name": "a", "kind": "malformed-calls"}, {"name": "b", "kind": "examples.plugins.rewards:FewTurns"}]
    counts[1]["weight"] = 0.0  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="the values of 'a' are counts or costs"):
        build(RewardsConfig, {"terms": counts, "audits": [{"term": "a", "by": "b", "tolerance": 0.1}]})


def test_a_verdict_of_one_token_is_the_mean_of_the_scale_under_its_probabilities(rubric: Path) -> None:
    server = ScriptedJudge(tokens=lambda said: {said: 0.6, " 1": 0.2, "The": 0.15})
    found = measured(rubric, [work(5), work(1)], server, form="token")
    assert [one.term.value for one in found] == [pytest.approx(0.75), 0.0]
    assert "5: 0.600" in found[0].term.evidence
    body = server.bodies[0]
    assert (body["max_completion_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)


def test_a_server_without_probabilities_makes_the_verdict_unknown_and_says_what_to_do(rubric: Path) -> None:
    server = ScriptedJudge(tokens=lambda said: None)
    [found] = measured(rubric, [work(5)], server, form="token")
    assert (found.term.value, found.retry, len(server.bodies)) == (None, False, 1)
    assert "the judge returns no probabilities of its tokens: scripted-1 answered without" in found.term.evidence
    assert "hint: write form = 'value'" in found.term.evidence


def test_a_model_that_would_say_something_else_than_a_score_has_no_verdict(rubric: Path) -> None:
    server = ScriptedJudge(tokens=lambda said: {"The": 0.7, said: 0.3})
    [found] = measured(rubric, [work(5)], server, form="token")
    assert found.term.value is None
    assert "the scores have 30% of the next token's probability; the likeliest are 'The' 0.70" in found.term.evidence


def test_scores_that_a_server_does_not_list_are_not_taken_for_impossible(rubric: Path) -> None:
    few = [{"5": 0.55}, {"5": 0.55, "The": 0.25}, {"5": 0.55, "The": 0.25, "4": 0.1}, {"5": 0.55, "The": 0.3, "4": 0.1}]
    found = [
        measured(rubric, [work(n)], ScriptedJudge(tokens=lambda _, t=t: t), form="token") for n, t in enumerate(few, 1)
    ]
    assert [one.term.value for [one] in found] == [None, None, None, pytest.approx(1 - 0.1 / 0.65 / 4, abs=1e-6)]
    assert "lists too few likely tokens, 1: 4 scores, which are not listed, may have 45%" in found[0][0].term.evidence


def test_a_tuned_judge_is_asked_without_explanations(rubric: Path) -> None:
    server = ScriptedJudge()
    measured(rubric, [work(2)], server, form="token", tuned=True)
    [message] = server.bodies[0]["messages"]
    assert message["content"].splitlines()[0] == "facts"
    assert "| fact" in message["content"]
    assert "How many" not in message["content"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"form": "token", "mode": "ranking"}, "mode = 'ranking'"),
        ({"form": "token", "dialect": "anthropic"}, "dialect = 'anthropic'"),
        ({"tuned": True}, "tuned = true needs form = 'token'"),
    ],
)
def test_a_form_that_cannot_be_asked_is_refused(rubric: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        term(rubric, "http://h", **settings)


def test_scores_of_several_digits_are_no_tokens(rubric: Path) -> None:
    rubric.write_text(RUBRIC.replace("levels", "highest = 10\nlevels"))
    with pytest.raises(ConfigError, match="needs scores of one digit") as refused:
        term(rubric, "http://h", form="token")
    assert refused.value.facts == "the scale of aspect 'facts' is 1 to 10"
