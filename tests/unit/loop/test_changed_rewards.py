"""Reward settings that are given to a run that is resumed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from etude import cli as etude
from etude.cli.run import changed_rewards
from etude.config import leaves, to_toml
from etude.errors import ConfigError, InputError, RunError, RunRefused
from etude.loop.config import RunConfig, build, config_to_resume, read_config
from etude.loop.reward_settings import FILE, RewardSettings, check_hints, read_changes, record_change
from etude.rewards import Composition
from etude.rewards.config import RewardsConfig
from etude.run import RunFolder


def given(weight: float, **more: Any) -> dict[str, Any]:
    term = {"name": "brief", "weight": weight, "kind": "examples.plugins.rewards:FewTurns"}
    return {"rewards": {"terms": [term]}, **more}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    config = build(RunConfig, given(0.5))
    return RunFolder.create(tmp_path / "r", config_toml=to_toml(config), seed=0, given=leaves(given(0.5)))


def test_only_reward_settings_may_change_in_a_run(run: RunFolder) -> None:
    assert config_to_resume(run, given(0.25)).rewards == build(RunConfig, given(0.5)).rewards
    with pytest.raises(RunRefused, match="was made with other settings") as caught:
        config_to_resume(run, given(0.25, seed=7))
    assert "seed is 7" in caught.value.facts


def test_settings_that_differ_from_the_config_and_the_last_change_are_a_change(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(run)
    assert changed_rewards(run, config, given(0.5)) == []
    [change] = changed_rewards(run, config, given(0.25))
    assert (change.from_step, change.rewards.terms[0].weight) == (1, 0.25)
    record_change(run, change.rewards, from_step=1, last_step=lambda: 0, num_steps=9)
    assert changed_rewards(run, config, given(0.25)) == []
    assert not capsys.readouterr().out
    assert changed_rewards(run, config, given(0.5)) == [], "the file with which the run began says nothing new"
    assert "later changes of the run stay in force" in capsys.readouterr().out
    assert RewardSettings(run, config).composition(1).weights == {"brief": 0.25}


def test_effort_and_process_terms_charge_for_work_by_name_or_path_and_with_any_weight(tmp_path: Path) -> None:
    kinds = {"a": "effort", "b": "etude.rewards.process:RepeatedReads", "c": "judge"}
    settings = {"rubric": "facts.toml", "url": "http://localhost/v1", "model": "m"}
    terms = [
        {"name": n, "kind": {"kind": k} | (settings if k == "judge" else {}), "weight": 0.0} for n, k in kinds.items()
    ]
    config = build(RunConfig, {"rewards": {"terms": [*terms, *given(0.5)["rewards"]["terms"]]}})
    folder = RunFolder.create(tmp_path / "charged", config_toml=to_toml(config), seed=0, given={})
    assert RewardSettings(folder, config).composition(1).charges == ("a", "b")


def test_rewards_that_do_not_fit_the_loss_of_the_run_are_refused(tmp_path: Path) -> None:
    pairs = {"learner": {"policy_loss": "dpo"}, "experience": {"credit": "all-pairs"}}
    folder = RunFolder.create(tmp_path / "r", config_toml=to_toml(build(RunConfig, pairs)), seed=0, given=leaves(pairs))
    hinted = {"name": "reads", "kind": "repeated-reads", "weight": 0.0, "hints": 0.5}
    rewards = build(RunConfig, {"rewards": {"terms": [hinted]}}).rewards
    with pytest.raises(ConfigError, match=r"learner\.policy_loss = 'dpo'"):
        record_change(folder, rewards, from_step=1, last_step=lambda: 0, num_steps=9)
    assert read_changes(folder) == []


class Hinting:
    gives_hints, version = True, "1"


@pytest.mark.parametrize(
    ("kind", "gives"),
    [
        ("repeated-reads", True),
        ("etude.rewards.process:NoTestsRun", True),
        (f"{__name__}:Hinting", True),
        ("effort", False),
        ("judge", False),
        ("examples.plugins.rewards:FewTurns", False),
    ],
)
def test_hints_of_a_term_that_gives_none_are_refused(run: RunFolder, kind: str, gives: bool) -> None:
    term = {"name": "own", "kind": kind, "hints": 0.5}
    rewards = build(RunConfig, {"rewards": {"terms": [term]}}).rewards
    if gives:
        check_hints(rewards)
        return
    with pytest.raises(ConfigError, match=r"the reward term 'own' has hints = 0\.5"):
        check_hints(rewards)
    if kind == "effort":  # a judge needs its settings first
        with pytest.raises(ConfigError, match="gives no hints, so the setting has no effect"):
            record_change(run, rewards, from_step=1, last_step=lambda: 0, num_steps=9)
    check_hints(build(RunConfig, {"rewards": {"terms": [term | {"hints": 0.0}]}}).rewards)


@pytest.mark.parametrize("kind", ["malformed-calls", "repeated-reads", "reverted-edits", "tests-never-run"])
def test_hints_without_a_text_are_refused(run: RunFolder, kind: str) -> None:
    def rewards(hints: float, **settings: str) -> RewardsConfig:
        term = {"name": "own", "kind": {"kind": kind, **settings}, "hints": hints}
        return build(RunConfig, {"rewards": {"terms": [term]}}).rewards

    with pytest.raises(ConfigError, match=r"the reward term 'own' has hints = 0\.5: its text is hint = \"\""):
        record_change(run, rewards(0.5, hint=""), from_step=1, last_step=lambda: 0, num_steps=9)
    assert read_changes(run) == []
    for allowed in (rewards(0.0, hint=""), rewards(0.5, hint="Look again."), rewards(0.5)):
        check_hints(allowed)


def test_a_change_that_another_process_records_meanwhile_is_not_lost(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, codes = importlib.import_module("etude.cli.rewards"), []
    real = commands.record_change

    def slowly(*args: Any, **settings: Any) -> Any:
        monkeypatch.setattr(commands, "record_change", real)
        codes.append(etude.main(["rewards", "set", str(run.path), "brief.missing=wait"]))
        return real(*args, **settings)

    monkeypatch.setattr(commands, "record_change", slowly)
    assert etude.main(["rewards", "set", str(run.path), "brief.weight=0.25"]) == 0
    [term] = RewardSettings(run, read_config(run)).at(1).terms
    assert (term.weight, term.missing == "wait") == (0.25, codes == [0]), "the first was recorded, or refused"
    assert "are being changed" in capsys.readouterr().err


def test_a_term_is_removed_from_a_run(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def say(*args: str) -> tuple[int, str]:
        return etude.main(["rewards", "set", str(run.path), *args]), "".join(capsys.readouterr())

    code, said = say("--remove", "brif")
    assert (code, "did you mean 'brief'?" in said) == (2, True)
    code, said = say("--remove", "brief", "--from-step", "3")
    assert (code, said) == (0, "from step 3 on:\n  brief: removed\n")
    settings = RewardSettings(run, read_config(run))
    assert [[one.name for one in settings.measured(step)] for step in (2, 3)] == [["brief"], []]
    assert [dict(settings.composition(step).weights) for step in (2, 3)] == [{"brief": 0.5}, {}]
    assert etude.main(["rewards", "list", str(run.path)]) == 0
    assert "removed from 3 on" in " ".join(capsys.readouterr().out.split())
    code, said = say("--remove", "brief", "--from-step", "3")
    assert (code, "no terms but those of the graders" in said) == (2, True)


@pytest.mark.parametrize(("removed", "left"), [(["auditor"], ["clear"]), (["auditor", "clear"], [])])
def test_a_term_is_removed_with_the_audits_that_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], removed: list[str], left: list[str]
) -> None:
    kind = "examples.plugins.rewards:FewTurns"
    rewards = {
        "terms": [{"name": "clear", "kind": kind}, {"name": "auditor", "kind": kind, "weight": 0.0}],
        "audits": [{"term": "clear", "by": "auditor", "tolerance": 0.1}, {"term": "clear", "by": "grade"}],
    }
    config = build(RunConfig, {"rewards": rewards})
    run = RunFolder.create(tmp_path / "r", config_toml=to_toml(config), seed=0, given={})
    assert etude.main(["rewards", "set", str(run.path), *(f"--remove={name}" for name in removed)]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name}: removed\n" in said for name in removed)
    assert "audit clear by auditor: removed, since it names a removed term" in said
    now = RewardSettings(run, config).at(1)
    assert [one.name for one in now.terms] == left
    assert [one.name for one in now.audits] == ["clear by grade"] * len(left)
    assert ("audit clear by grade: removed" in said) is not bool(left)


def test_a_credit_scheme_that_does_not_exist_is_named_with_the_nearest(run: RunFolder) -> None:
    commands = importlib.import_module("etude.cli.rewards")
    for value, hint in (("rlo", "did you mean 'rloo'?"), ("zzz", "known: all-pairs, best-worst, dr-grpo")):
        with pytest.raises(InputError, match=f"there is no credit scheme '{value}'") as caught:
            commands._changed(Composition(), read_config(run), {"credit": value}, set(), 1)
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kl": 0.1}, "the KL penalty cannot be recomputed: .* the run had kl = 0"),
        ({"kl": float("nan")}, "is not a number from 0 on"),
        ({"kl": -1}, "is not a number from 0 on"),
        ({"quarantine": 3}, "cannot be recomputed"),
        ({"grade": {"weight": 0.5}}, "cannot be recomputed"),
        ({"brief": {"when": "tets"}}, "has no stored term 'tets'"),
        ({"brief": {"when": "brief"}}, "form a circle: brief -> brief"),
        ({"brief": {"when": "tests"}, "tests": {"when": "brief"}}, "form a circle"),
    ],
)
def test_settings_with_which_no_step_can_be_recomputed_are_refused(
    run: RunFolder, changes: dict[str, Any], what: str
) -> None:
    commands, config = importlib.import_module("etude.cli.rewards"), read_config(run)
    with pytest.raises(InputError, match=what) as caught:
        commands._changed(Composition(), config, changes, {"brief", "grade", "tests"}, 1)
    assert caught.value.hint
    how, _ = commands._changed(
        Composition(), config, {"kl": 0.5, "brief": {"when": "tests"}}, {"brief", "k1", "tests"}, 1
    )
    assert (how.kl, how.when) == (0.5, {"brief": "tests"})


def test_a_weight_that_is_no_number_is_not_recomputed(run: RunFolder) -> None:
    commands = importlib.import_module("etude.cli.rewards")
    with pytest.raises(InputError, match=r"--set brief\.weight = 'much' is not a finite number"):
        commands._changed(Composition(), read_config(run), {"brief": {"weight": "much"}}, {"brief"}, 1)


def test_a_damaged_record_of_changes_is_named(run: RunFolder) -> None:
    record_change(run, build(RunConfig, given(0.25)).rewards, from_step=3, last_step=lambda: 0, num_steps=9)
    path = run / FILE
    path.write_text(path.read_text().replace('"from_step": 3', '"from_step": 4'))
    with pytest.raises(RunError, match=r"rewards\.json"):
        read_changes(run)
    path.write_text("[{]")
    with pytest.raises(RunError, match=r"rewards\.json is damaged"):
        read_changes(run)
