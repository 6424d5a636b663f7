"""Reward settings of a config that a run would only fail, or silently go without, later."""

from __future__ import annotations

from typing import Any

import pytest

from etude.config import build
from etude.errors import ConfigError
from etude.plugins import Kind, Plugin, make
from etude.rewards.config import RewardsConfig

EFFORT = {"name": "effort", "kind": "effort"}
OTHER = {"name": "other", "kind": "malformed-calls", "weight": 0.0}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"terms": [EFFORT | {"name": ""}]}, "the name of term '' is not valid: use letters"),
        ({"terms": [EFFORT | {"name": "my.term"}]}, "the name of term 'my.term' is not valid: use letters"),
        ({"terms": [EFFORT | {"weight": 0.0, "target": 0.5}]}, "its weight is 0: set the weight above 0"),
        ({"terms": [EFFORT | {"weight": 1.5}]}, "a rollout that gives up may get more than a solved one"),
        (
            {"terms": [EFFORT | {"weight": 1.5, "kind": "etude.rewards.effort:Effort"}]},
            "a rollout that gives up may get more than a solved one",
        ),
        ({"terms": [EFFORT | {"when": "grad"}]}, "did you mean 'grade'?"),
        ({"terms": [EFFORT | {"limit": 100.0}]}, "kind = {kind = 'effort', limit = ...}"),
        ({"terms": EFFORT}, r"write [[rewards.terms]] with double brackets"),
        ({"terms": [EFFORT], "audits": [{"term": "efort", "by": "grade"}]}, "did you mean 'effort'?"),
        ({"audits": [{"term": "effort", "by": "grade"}]}, "which does not exist: there are none"),
        ({"terms": [EFFORT], "audits": [{"term": "effort", "by": "tests", "tolerance": 0.1}]}, "known: effort, grade"),
        ({"terms": [EFFORT, OTHER], "audits": [{"term": "effort", "by": "other"}]}, "needs a tolerance"),
    ],
)
def test_terms_and_audits_that_cannot_work_are_refused_with_what_to_write(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(RewardsConfig, settings, "rewards")
    assert says in str(refused.value)
    assert "hint: " in str(refused.value)


@pytest.mark.parametrize("gate", ["grade", "tests", "pass", "submitted", "verifiers.length", "other"])
def test_a_gate_is_a_term_or_a_measure_of_the_graders(gate: str) -> None:
    assert build(RewardsConfig, {"terms": [EFFORT | {"when": gate}, OTHER]}).gates == {"effort": gate}


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("tests-never-run", {"pattern": "("}, "is not a regular expression"),
        ("effort", {"k": 0.0}, "it must be more than 0.0"),
        ("effort", {"thinking": 0.0, "answer": 0.0, "tool_output": 0.0, "call": 0.0, "turn": 0.0}, "all prices"),
    ],
)
def test_built_in_terms_refuse_settings_with_which_they_would_fail(
    kind: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(Kind.REWARD, Plugin(kind, settings))
    assert says in str(refused.value)
