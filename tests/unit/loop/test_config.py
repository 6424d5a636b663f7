"""A run's settings: what a resumed run takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.config import build, leaves, to_toml
from etude.errors import ConfigError, Exit, LedgerError, RunError
from etude.experience import Ledger
from etude.loop.config import RunConfig, config_to_resume, read_config
from etude.loop.limits import build_config
from etude.loop.preflight import check_ledger
from etude.loop.reward_settings import check_stages
from etude.numerics.config import Quantise
from etude.run import RunFolder

GIVEN = {"seed": 3, "rl": {"steps": 7}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of seed 3 and 7 steps, made by an etude whose default of `rl.checkpoint_every` was 4."""
    text = (
        to_toml(RunConfig(seed=3))
        .replace("steps = 45", "steps = 7")
        .replace("checkpoint_every = 5", "checkpoint_every = 4")
    )
    return RunFolder.create(tmp_path / "r", config_toml=text, seed=3, given=leaves(GIVEN))


def test_a_default_that_changed_since_does_not_keep_a_run_from_being_resumed(run: RunFolder) -> None:
    for given in (GIVEN, {}, {"rl": {"steps": 7}, "seed": 3, "fleet": {"engines": ["reference", "reference"]}}):
        assert config_to_resume(run, given).rl.checkpoint_every == 4
        assert config_to_resume(run, given).rl.steps == 7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (GIVEN | {"rl": {"steps": 8}}, "rl.steps is 8, the run has 7"),
        ({"seed": 3}, "rl.steps is 45, the run has 7"),
        (GIVEN | {"start": "/x"}, "start is '/x', the run has not set"),
        (GIVEN | {"rl": {"steps": 7, "checkpoint_every": 5}}, "rl.checkpoint_every is 5, the run has 4"),
    ],
)
def test_settings_that_differ_from_those_the_run_was_started_with_are_refused_by_name(
    run: RunFolder, given: dict[str, object], said: str
) -> None:
    with pytest.raises(RunError) as caught:
        config_to_resume(run, given)
    assert caught.value.facts == said
    assert "etude run --resume" in caught.value.hint


def test_a_run_that_did_not_record_what_it_was_given_is_resumed_by_what_agrees(tmp_path: Path) -> None:
    old = RunFolder.create(tmp_path / "old", config_toml=to_toml(RunConfig(seed=3)), seed=3)
    assert config_to_resume(old, {"seed": 3}).seed == 3
    with pytest.raises(RunError, match="seed is 4"):
        config_to_resume(old, {"seed": 4})


def test_an_unknown_setting_is_refused_before_configs_are_compared(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        config_to_resume(run, {"sede": 3})


def test_a_config_with_a_key_that_is_no_more_names_the_etude_that_wrote_it(run: RunFolder) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("checkpoint_every = 4", "save_every = 4"))
    with pytest.raises(RunError) as caught:
        read_config(run)
    wrote = run.identity()["etude"]
    assert f"was written by etude {wrote}" in caught.value.what
    assert "unknown key 'rl.save_every'" in caught.value.facts
    assert f"resume with etude {wrote}" in caught.value.hint


def test_a_config_that_is_torn_or_gone_is_named(run: RunFolder) -> None:
    (run / "config.toml").write_text("seed = [")
    with pytest.raises(RunError, match="is damaged"):
        read_config(run)
    (run / "config.toml").unlink()
    with pytest.raises(RunError, match="is missing"):
        read_config(run)


def test_a_config_that_was_changed_in_the_run_folder_is_not_gone_on_with(run: RunFolder) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("steps = 7", "steps = 9"))
    with pytest.raises(RunError, match="was changed since the run was made"):
        config_to_resume(run, {})


def test_settings_alone_are_compared_without_what_the_config_would_have_said(run: RunFolder) -> None:
    assert config_to_resume(run, {"seed": 3}, complete=False).rl.steps == 7
    with pytest.raises(RunError) as caught:
        config_to_resume(run, {"seed": 4}, complete=False)
    assert caught.value.facts == "seed is 4, the run has 3"


def test_a_run_with_weights_and_no_ledger_is_not_gone_on_with(run: RunFolder) -> None:
    check_ledger(run)
    (run / "weights" / "pointers").mkdir(parents=True)
    (run / "weights" / "pointers" / "policy").write_bytes(b"x")
    with pytest.raises(RunError, match="no ledger"):
        check_ledger(run)
    (run / "ledger.sqlite").touch()
    with pytest.raises(LedgerError, match="no such table"):
        check_ledger(run)
    (run / "ledger.sqlite").unlink()
    Ledger(run / "ledger.sqlite", capacity=8).close()
    check_ledger(run)


@pytest.mark.parametrize("where", ["head", "middle", "end"])
def test_a_damaged_ledger_is_found_before_anything_is_started(run: RunFolder, where: str) -> None:
    (run / "weights" / "pointers").mkdir(parents=True)
    (run / "weights" / "pointers" / "policy").write_bytes(b"x")
    ledger = Ledger(run / "ledger.sqlite", capacity=8)
    for i in range(400):
        ledger.remember(f"key {i}", "x" * 400)
    ledger.close()
    check_ledger(run)
    data = bytearray((run / "ledger.sqlite").read_bytes())
    start = {"head": 0, "middle": len(data) // 2 // 4096 * 4096}.get(where, len(data) - 4096)
    damaged = data[:start] if where == "end" else data[:start] + b"\xa5" * 4096 + data[start + 4096 :]
    (run / "ledger.sqlite").write_bytes(damaged)
    with pytest.raises(LedgerError, match="is not a valid ledger") as caught:
        check_ledger(run)
    assert "copy" in caught.value.hint
    assert main(["run", "--resume", str(run.path)]) == Exit.FAILED
    assert not (run / "logs").exists()
    assert not (run / "events").exists()


def test_the_budget_of_parity_that_is_held_is_written_down() -> None:
    dtype = {"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}}
    exact = build(RunConfig, dtype)
    assert exact.with_parity_budget() == exact, "every number must be the same: no budget is held"
    for given in ({"numerics": {"mode": "native"}}, {"parity": {"over_budget": "fall_back"}}):
        config = build(RunConfig, dtype | given)
        assert "k3 = 0.005\nratio_p99 = 0.5\n" in to_toml(config.with_parity_budget())
    mine = build(RunConfig, dtype | {"numerics": {"mode": "native"}, "parity": {"k3": 0.1}})
    assert "k3 = 0.1\nratio_p99 = 0.5\n" in to_toml(mine.with_parity_budget())


def test_a_dense_model_among_settings_of_experts_is_told_what_it_wants() -> None:
    with pytest.raises(ConfigError, match="needs num_experts = 0 and top_k = 0"):
        build(RunConfig, {"model": {"family": "qwen3", "num_experts": 8}})


def test_dtypes_that_cannot_agree_are_refused_with_the_mode_in_which_they_may_differ() -> None:
    with pytest.raises(ConfigError, match="'exact' needs the same dtype in both"):
        build(RunConfig, {"engine": {"dtype": "bfloat16"}})


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ([], "engines has 0 entries: a run has 1 to 64"),
        (["reference"] * 65, "engines has 65 entries"),
        (["vlm"], "fleet.engines[0] = 'vlm' is unknown\n  hint: did you mean 'vllm'?"),
        ("vllm", 'expected a list, got "vllm"'),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_name(fleet: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, {"fleet": {"engines": fleet}})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("numerics", "hint"),
    [({}, "numerics.mode = 'native'"), ({"mode": "native", "quantise": "mxfp8"}, "numerics.quantise = 'none'")],
)
def test_an_engine_that_cannot_compute_as_the_run_asks_is_refused(numerics: dict[str, str], hint: str) -> None:
    fleet = {"engines": ["reference", "vllm"]}
    with pytest.raises(ConfigError, match="'reference', 'vllm'") as caught:
        build(RunConfig, {"fleet": fleet, "numerics": numerics})
    assert hint in caught.value.hint
    assert build(RunConfig, {"fleet": fleet, "numerics": {"mode": "native"}}).max_running == 96


@pytest.mark.parametrize(
    ("kind", "argument"),
    [("vllm", '--speculative-config={"method": "ngram"}'), ("vllm", "-sc.method=ngram"), ("sglang", "--spec_algo")],
)
def test_speculation_of_vllms_and_sglangs_own_is_refused_by_name(kind: str, argument: str) -> None:
    given = {"fleet": {"engines": [kind]}, "numerics": {"mode": "native"}}
    with pytest.raises(ConfigError, match=f"{kind}.arguments has") as caught:
        build(RunConfig, given | {kind: {"arguments": ["--tensor-parallel-size=1", argument]}})
    assert argument in str(caught.value)
    assert build(RunConfig, given | {kind: {"arguments": ["-scheduler", "--spot=1"]}})


def test_terms_that_compare_siblings_are_refused_by_name_where_first_rewards_decide() -> None:
    own, effort = {"name": "tone", "kind": "examples.plugins.rewards:FewTurns"}, {"name": "effort", "kind": "effort"}
    rank = {"name": "rank", "kind": "tests.loop.test_group_rewards:Rank"}
    pairs = {"name": "rank", "kind": {"kind": "judge", "mode": "pairwise"}}
    lone = {"name": "rank", "kind": {"kind": "judge", "mode": "pointwise"}}

    def staged(*terms: dict[str, Any], size: int = 2) -> RunConfig:
        return build(RunConfig, {"experience": {"min_group_size": size}, "rewards": {"terms": [*terms]}})

    gate = rank | {"weight": 0.0}
    for terms in ([effort, own, rank], [pairs], [gate, own | {"when": "rank"}]):
        with pytest.raises(
            ConfigError, match=r"the reward term 'rank' cannot be used with experience\.min_group"
        ) as bad:
            check_stages(staged(*terms))
        assert "when = 'grade' in 'rank'" in bad.value.hint
        check_stages(staged(*terms, size=0))
    for terms in ([gate], [rank | {"when": "grade"}], [lone, own]):
        check_stages(staged(*terms))


def test_terms_that_count_for_unsolved_rollouts_decide_and_so_do_their_gates() -> None:
    own, effort = {"name": "tone", "kind": "examples.plugins.rewards:FewTurns"}, {"name": "effort", "kind": "effort"}
    gated = [own | {"when": "submitted"}, own | {"name": "b", "when": "c"}, own | {"name": "c", "weight": 0.0}]
    found = build(RunConfig, {"rewards": {"terms": [effort, *gated]}}).rewards
    assert found.beside_grades == ("tone", "b")
    assert [one.name for one in found.deciding(1)] == ["tone", "b", "c"]
    gate = own | {"name": "gate", "weight": 0.0, "when": "tests"}
    for terms in ([own | {"weight": 0.0}], [own | {"when": "grade"}], [gate, own | {"when": "gate"}]):
        assert build(RunConfig, {"rewards": {"terms": [effort, *terms]}}).rewards.deciding(1) == ()
    late = build(RunConfig, {"rewards": {"terms": [own | {"from_step": 5}]}}).rewards
    assert [len(late.deciding(step)) for step in (4, 5)] == [0, 1]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({}, "set experience.credit = 'all-pairs' or 'best-worst'"),
        ({"experience": {"credit": "fork"}}, "set experience.credit = 'all-pairs' or 'best-worst'"),
        ({"experience": {"credit": "all-pairs", "kl": 0.1}}, "set experience.kl = 0"),
        ({"experience": {"credit": "all-pairs", "min_group_size": 2}}, "set experience.min_group_size = 0"),
        (
            {
                "experience": {"credit": "all-pairs"},
                "rewards": {"terms": [{"name": "reads", "kind": "repeated-reads", "weight": 0.0, "hints": 0.5}]},
            },
            "set hints = 0.0",
        ),
    ],
)
def test_credit_that_does_not_fit_the_dpo_loss_is_refused(given: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=r"learner\.policy_loss = 'dpo'") as caught:
        build(RunConfig, given | {"learner": {"policy_loss": "dpo"}})
    assert hint in caught.value.hint
    build(RunConfig, {"learner": {"policy_loss": "dpo"}, "experience": {"credit": "best-worst"}})


FORKS = {"harness": {"forks": 4, "summary_tokens": 32}, "experience": {"credit": "fork"}}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"experience": {}}, "set experience.credit = 'fork'"),
        ({"experience": {"credit": "fork", "min_group_size": 2}}, "set experience.min_group_size = 0"),
        ({"experience": {"credit": "fork", "kl": 0.1}}, "set experience.kl = 0"),
        ({"machines": {"backend": "remote"}}, "set machines.backend to 'namespace' or 'microvm'"),
        ({"machines": {"backend": "gvisor", "images": "store"}}, "set machines.backend to 'namespace' or 'microvm'"),
    ],
)
def test_settings_with_which_machines_cannot_be_forked_are_refused(given: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=r"harness\.forks = 4") as caught:
        build(RunConfig, FORKS | given)
    assert caught.value.hint == f"{hint}, or harness.forks = 1"
    config = build(RunConfig, FORKS)
    assert config.ledger_slots == 4 * config.experience.window.max_open_groups * config.experience.group_size


@pytest.mark.parametrize(
    ("harness", "reason"),
    [
        ({"forks": 4}, "needs summary_tokens above 0"),
        ({"forks": 4, "summary_tokens": 32, "program": "a.b:C"}, "needs program = 'loop'"),
        ({"forks": 0}, "forks"),
    ],
)
def test_an_agent_program_that_cannot_be_forked_is_refused(harness: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(RunConfig, FORKS | {"harness": harness})


def test_rollouts_under_way_follow_the_room_that_a_vllm_has_for_keys_and_values() -> None:
    given = {"fleet": {"engines": ["reference", "vllm"]}, "numerics": {"mode": "native"}}
    sizes = {"engine": {"max_sequences": 16, "context_tokens": 1024}}
    assert build(RunConfig, given | sizes).own_contexts == 32
    assert build(RunConfig, given | sizes | {"vllm": {"kv_tokens": 8 * 1024}}).own_contexts == 24
    with pytest.raises(ConfigError, match=r"vllm.kv_tokens = 512 is too small for one full context"):
        build(RunConfig, given | sizes | {"vllm": {"kv_tokens": 512}})


def test_weights_that_engines_cannot_hold_bit_by_bit_are_refused() -> None:
    native, whole = {"mode": "native"}, {"weights": "f32"}
    build(RunConfig, {"numerics": native, "engine": {"dtype": "bfloat16"}})
    build(RunConfig, {"learner": whole})
    build(RunConfig, {"numerics": native, "learner": {"lora_rank": 4}, "engine": {"dtype": "float16"}})
    for engine, learner in (("bfloat16", whole), ("float16", {})):
        with pytest.raises(ConfigError, match="cannot be represented exactly"):
            build(RunConfig, {"numerics": native, "learner": learner, "engine": {"dtype": engine}})


def test_a_learner_of_several_ranks_may_quantise() -> None:
    config = build_config({"learner": {"ranks": 2}, "numerics": {"quantise": "mxfp8"}})
    assert (config.learner.ranks, config.numerics.quantise) == (2, Quantise.MXFP8)


def test_limits_that_a_missing_checkpoint_would_give_are_no_error_of_the_limits(tmp_path: Path) -> None:
    given = {"start": str(tmp_path / "nowhere"), "harness": {"context_tokens": 32768}}
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        build_config(given)
