"""How suites are played: which config, which models, and which tasks are refused because they were trained on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.config import build, to_plain, to_toml
from etude.errors import ConfigError, SuiteRefused
from etude.evals.costs import NO_PRICE
from etude.evals.suites import BUILT_IN, Suite, read_suite
from etude.experience import Ledger
from etude.loop.config import EvalsConfig, RunConfig
from etude.loop.evaluation import Baseline, RunEngines, run_price
from etude.loop.locations import ledger_location
from etude.loop.suites import (
    URL_CONTEXT,
    URL_TURN_TOKENS,
    Subject,
    config_for,
    refuse_trained,
    run_of,
    settings_of,
    subjects_of,
    suite_tasks,
)
from etude.records.task import Split
from etude.rollouts.model_url import Endpoint
from etude.run import RunFolder
from etude.tasks.config import TasksConfig
from etude.tasks.example_tasks import write_examples

ENDPOINT = Endpoint(url="http://127.0.0.1:1", model="big")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    write_examples(root)
    return root


def made(path: Path, source: str) -> RunFolder:
    config = RunConfig(tasks=TasksConfig(source=source))
    run = RunFolder.create(path, config_toml=to_toml(config), seed=0)
    (run / "checkpoints" / "mid").mkdir(parents=True)
    return run


def tasks_in(suite: Suite, run: RunFolder, **changes: Any) -> Any:
    suite = read_suite("own", [f"{key}={value}" for key, value in changes.items()])
    return suite, suite_tasks(suite, config_for(suite, settings_of(run), Subject("x", run / "checkpoints" / "mid")))


def test_tasks_of_a_source_that_ends_are_refused_if_they_are_in_its_training_split(
    folder: Path, tmp_path: Path
) -> None:
    run = made(tmp_path / "r", str(folder))
    own = read_suite("own")
    suite, tasks = tasks_in(own, run, splits='["train", "heldout"]')
    with pytest.raises(SuiteRefused, match="48 of 64 tasks that r was trained on"):
        refuse_trained(suite, tasks, run)
    suite, tasks = tasks_in(own, run, splits='["heldout", "validation"]')
    refuse_trained(suite, tasks, run)
    assert len(tasks) == 24


def test_tasks_that_an_earlier_run_was_trained_on_are_refused(folder: Path, tmp_path: Path) -> None:
    run = made(tmp_path / "first", str(folder))
    for name in ("second", "third"):  # each starts where the one before ended
        config = RunConfig(tasks=TasksConfig(source="repair"), start=run / "checkpoints" / "mid")
        run = RunFolder.create(tmp_path / name, config_toml=to_toml(config), seed=0)
        (run / "checkpoints" / "mid").mkdir(parents=True)
    suite = read_suite("own", ['splits=["train"]', f'tasks={{source="{folder}"}}'])
    tasks = suite_tasks(suite, config_for(suite, settings_of(run), Subject("x", run / "checkpoints" / "mid")))
    with pytest.raises(SuiteRefused, match="48 of 48 tasks that first was trained on"):
        refuse_trained(suite, tasks, run)
    (tmp_path / "first" / "config.toml").write_text("[")
    notes = list[str]()
    refuse_trained(suite, tasks, run, notes.append)
    assert (
        f"of the run of {tmp_path / 'first' / 'checkpoints' / 'mid'}, from which training went on, are not" in notes[0]
    )


def test_another_variant_of_a_trained_problem_is_refused(folder: Path, tmp_path: Path) -> None:
    run, own = made(tmp_path / "r", str(folder)), read_suite("own")
    suite, tasks = tasks_in(own, run, splits='["heldout"]')
    _, trained = tasks_in(own, run, splits='["train"]')
    variant = msgspec.structs.replace(tasks[0], problem=trained[5].problem)
    with pytest.raises(SuiteRefused, match="1 of 16 tasks"):
        refuse_trained(suite, [variant, *tasks[1:]], run)


def test_of_an_endless_source_what_rl_has_admitted_and_its_training_split_are_refused(tmp_path: Path) -> None:
    run, own = made(tmp_path / "r", "repair"), read_suite("own")
    place = ledger_location(run)
    assert isinstance(place, Path)
    with contextlib.closing(Ledger(place, capacity=4)) as ledger:
        ledger.move_cursor(Split.TRAIN, 30)
    _, trained = tasks_in(own, run, splits='["train"]', num_tasks=40)
    suite, tasks = tasks_in(own, run, num_tasks=16)
    refuse_trained(suite, tasks, run)
    moved = msgspec.structs.replace(trained[29], split=Split.HELDOUT, source="elsewhere")
    with pytest.raises(SuiteRefused, match="1 of 16 tasks"):
        refuse_trained(suite, [moved, *tasks[1:]], run)
    with pytest.raises(SuiteRefused, match="40 of 40 tasks"):
        refuse_trained(suite, trained, run)


def test_training_tasks_that_are_too_many_to_be_compared_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, own = made(tmp_path / "r", "repair"), read_suite("own")
    place = ledger_location(run)
    assert isinstance(place, Path)
    with contextlib.closing(Ledger(place, capacity=4)) as ledger:
        ledger.move_cursor(Split.TRAIN, 30)
    suite, tasks = tasks_in(own, run, num_tasks=4)
    assert refuse_trained(suite, tasks, run) == 0
    monkeypatch.setattr("etude.loop.suites.MOST_COMPARED", 20)
    _, trained = tasks_in(own, run, splits='["train"]', num_tasks=30)
    moved = [msgspec.structs.replace(one, split=Split.HELDOUT, source="elsewhere") for one in trained]
    assert refuse_trained(suite, [*tasks, *moved[:7]], run) == 10
    with pytest.raises(SuiteRefused, match="1 of 5 tasks"):
        refuse_trained(suite, [*tasks, moved[10]], run)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_suite_has_a_prompt_for_the_prompted_baseline_and_models_at_a_url(
    name: str, tmp_path: Path
) -> None:
    suite, run = read_suite(name), made(tmp_path / "r", "repair")
    (run / "checkpoints" / "final").mkdir()
    models = subjects_of(run.path, label="", beside=True, prompt=suite.prompt)
    prompts = [config_for(suite, settings_of(run), one, source="repair").harness.prompt for one in models]
    assert [bool(one) for one in prompts] == [False, False, True]
    at_url = config_for(suite, settings_of(run), Subject("b", ENDPOINT), source="repair").harness
    assert at_url.prompt == prompts[2] == suite.prompt
    assert "submit" in suite.prompt
    assert "submit" in at_url.tools


def test_the_terms_of_a_suite_replace_those_of_the_run_and_need_no_stages(tmp_path: Path) -> None:
    terms = {"terms": [{"name": "tone", "kind": "examples.plugins.rewards:FewTurns"}]}
    given = to_plain(RunConfig()) | {"rewards": {"terms": [{"name": "reads", "kind": "repeated-reads"}]}}
    given["experience"] = {**given["experience"], "min_group_size": 2}
    suite = build(Suite, {"name": "x", "purpose": "correctness", "rewards": terms})
    assert [one.name for one in config_for(suite, given, Subject("a", tmp_path)).rewards.terms] == ["tone"]
    assert config_for(read_suite("repair"), given, Subject("a", tmp_path)).rewards.terms == ()


def test_a_suite_replaces_tasks_limits_and_seed_and_a_url_its_limits_of_tokens(tmp_path: Path) -> None:
    suite = read_suite("interruption", ["seed=5"])
    given = to_plain(RunConfig())
    ours = config_for(suite, given, Subject("a", tmp_path))
    assert (ours.tasks.source, ours.seed, ours.harness.prompt) == ("interruption", 5, "")
    assert ours.harness.tools == ("ls", "cat", "write", "submit")
    assert ours.harness.turn_tokens == RunConfig().harness.turn_tokens
    theirs = config_for(suite, given, Subject("b", ENDPOINT))
    assert theirs.harness.turn_tokens == URL_TURN_TOKENS
    assert theirs.harness.prompt == suite.prompt
    assert config_for(suite, given, Subject("c", tmp_path, prompted=True)).harness.prompt == suite.prompt
    assert config_for(read_suite("own"), given, Subject("a", tmp_path), source="following").tasks.source == "following"
    script = config_for(suite, given, Subject("d", Baseline.ORACLE))
    assert {"write", "run", "edit", "submit"} <= {*script.harness.tools}
    assert (script.engine.context_tokens, script.harness.prompt) == (URL_CONTEXT, "")
    with pytest.raises(ConfigError, match=r"harness\.max_trns"):
        config_for(Suite("x", suite.purpose, harness={"max_trns": 3}), given, Subject("a", tmp_path))


def test_the_untrained_model_stands_beside_a_run_and_not_beside_a_lone_checkpoint(tmp_path: Path) -> None:
    run = made(tmp_path / "r", "repair")
    final = run / "checkpoints" / "final"
    final.mkdir()
    found = subjects_of(run.path, label="", beside=True, prompt="do it")
    assert [one.label for one in found] == ["r@final", "r@untrained", "r@untrained, prompted"]
    assert [one.model for one in found] == [final, run / "checkpoints" / "mid", run / "checkpoints" / "mid"]
    assert [one.prompted for one in found] == [False, False, True]
    [one] = subjects_of(final, label="mine", beside=False, prompt="")
    assert (one.label, one.run is not None and one.run.path) == ("mine", run.path)
    lone = tmp_path / "lone"
    lone.mkdir()
    assert run_of(lone) is None
    with pytest.raises(SuiteRefused, match=r"untrained model of .* is unknown"):
        subjects_of(lone, label="", beside=True, prompt="")


def test_evaluations_of_a_run_are_priced_by_its_table_and_without_one_unknown(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("machine_second = 0.5\n[models.policy]\noutput = 3.0\n[gpu_hours]\nh100 = 2.5\n")
    found = run_price(RunConfig(evals=EvalsConfig(prices=path)))
    assert (found.machine_second, found.tokens.output, found.tokens.input, found.gpu_hour) == (0.5, 3.0, None, 2.5)
    assert run_price(RunConfig()) == NO_PRICE


def test_settings_of_other_engines_than_a_runs_are_refused_where_these_are_borrowed(tmp_path: Path) -> None:
    run, suite = made(tmp_path / "run", "bash-repair"), read_suite("own")
    borrowing = Subject("r@running", RunEngines(run, 0.5, 60.0), run)
    assert config_for(suite, settings_of(run), borrowing).fleet.engines == ("reference", "reference")
    longer = {"context_tokens": 4096}
    for changes in ({"fleet": {"engines": ["reference"]}}, {"engine": longer, "model": longer}):
        given = settings_of(run)
        for section, values in changes.items():
            given[section] = {**given[section], **values}
        with pytest.raises(ConfigError, match="does not describe the engines of the run") as refused:
            config_for(suite, given, borrowing)
        assert refused.value.hint.startswith("leave out --config")
