"""The configs and checkpoints from which a run refuses to start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import build
from etude.errors import ConfigError, Exit, InputError
from etude.inference.config import Speculation
from etude.loop.config import EvalsConfig, RunConfig
from etude.loop.preflight import (
    check_attention,
    check_experts,
    check_heads,
    check_mid_training,
    check_start,
    log_short_splits,
    log_unused_model_settings,
)
from etude.models.config import ModelConfig
from etude.models.family_lookup import family_of
from etude.records.task import Answer, Split, Task
from etude.tasks import RepairSource
from etude.testing import ListSource


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}, "architecture Gemma3ForCausalLM"),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias = True"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, "does not describe a"),
    ],
)
def test_a_start_of_another_architecture_is_a_setting_that_cannot_be(
    tmp_path: Path, about: dict[str, object], says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="start = ") as refused:
        check_start(tmp_path, context_tokens=64)
    assert refused.value.exit_code == Exit.BAD_INPUT
    assert says in str(refused.value)


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    check_experts(ModelConfig(num_experts=8), 4)
    with pytest.raises(ConfigError, match="expert_parallel = 3") as refused:
        check_experts(ModelConfig(num_experts=8), 3)
    assert "8 experts" in str(refused.value)
    assert "a divisor" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["model.hidden_size", "model.num_layers", "seed"],
            ["these settings are not used: model.hidden_size = 160 (it has 128)"],
        ),
        (["model.num_layers"], []),
        ([], []),
    ],
)
def test_settings_of_the_model_that_the_checkpoint_overrules_are_told(given: list[str], told: list[str]) -> None:
    said: list[str] = []
    config = RunConfig(start=Path("checkpoint"), model=ModelConfig(hidden_size=160, num_layers=3))
    log_unused_model_settings(config, ModelConfig(hidden_size=128, num_layers=3), given, said.append)
    assert [line.partition("; ")[2] for line in said] == told


def test_mid_training_of_a_start_needs_a_corpus_of_its_own(tmp_path: Path) -> None:
    corpus, phases = {"corpus": str(tmp_path)}, {"phases": [{"name": "main"}]}
    with pytest.raises(ConfigError, match=r"mid_training\.corpus is set and `start` is not"):
        build(RunConfig, {"mid_training": corpus})
    with pytest.raises(ConfigError, match="phase 'main' of mid_training has no corpus: a run with `start`"):
        build(RunConfig, {"start": "checkpoint", "mid_training": phases})
    assert build(RunConfig, {"mid_training": phases}).mid_trains
    assert not build(RunConfig, {"start": "checkpoint"}).mid_trains
    config = build(RunConfig, {"start": "checkpoint", "mid_training": corpus | phases})
    assert config.mid_trains
    with pytest.raises(InputError, match=r"no corpus in .*: it has no manifest\.json"):
        check_mid_training(config, ModelConfig(), [], print)
    said: list[str] = []
    unused = build(RunConfig, {"start": "checkpoint", "mid_training": {"lr": 1.0}})
    check_mid_training(unused, ModelConfig(), ["mid_training.lr", "seed"], said.append)
    assert said == ["start is set and mid_training.corpus is not: no mid-training; not used: mid_training.lr"]


@pytest.mark.parametrize(
    ("settings", "heads", "says"),
    [
        ({"engine": {"speculation": "heads"}}, 0, "'heads' is not possible: the model has no MTP heads"),
        ({"learner": {"ranks": 2}}, 1, "learner.ranks = 2 is not possible: the model has 1 MTP heads"),
        (
            {"fleet": {"engines": ["vllm"]}, "numerics": {"mode": "native"}},
            1,
            "and vLLM has no memory for their weights",
        ),
    ],
)
def test_mtp_heads_that_a_run_cannot_use_are_refused_before_it_starts(
    settings: dict[str, Any], heads: int, says: str
) -> None:
    check_heads(build(RunConfig, {"engine": {"speculation": "heads"}}), ModelConfig(mtp_heads=1))
    check_heads(build(RunConfig, {"mid_training": {"mtp_heads": 1}, "engine": {"speculation": "heads"}}), ModelConfig())
    config = build(RunConfig, settings)
    check_heads(replace(config, engine=replace(config.engine, speculation=Speculation.OFF)), ModelConfig())
    with pytest.raises(ConfigError) as refused:
        check_heads(config, ModelConfig(mtp_heads=heads))
    assert says in str(refused.value)


def test_the_context_of_engines_may_be_that_after_mid_training() -> None:
    longer = {"phases": [{"name": "main"}, {"name": "long", "rope_factor": 2.0}, {"name": "last"}]}
    given = {"engine": {"context_tokens": 2048}, "model": {"context_tokens": 1024}}
    assert build(RunConfig, given | {"mid_training": longer}).mid_training.longest(1024) == 512
    with pytest.raises(ConfigError, match=r"larger than model\.context_tokens = 1024"):
        build(RunConfig, given)


@pytest.mark.parametrize(
    ("evals", "told"),
    [
        (EvalsConfig(heldout_tasks=1, during_tasks=1, every=1), []),
        (EvalsConfig(heldout_tasks=3, during_tasks=1, every=1), ["evals.heldout_tasks = 3: repair has only 2 heldout"]),
        (
            EvalsConfig(heldout_tasks=2, during_tasks=9, every=1),
            ["evals.during_tasks = 9: repair has only 1 validation"],
        ),
        (EvalsConfig(heldout_tasks=2, during_tasks=9, every=0), []),  # no evaluation asks for them
    ],
)
def test_an_evaluation_of_more_tasks_than_there_are_is_told(evals: EvalsConfig, told: list[str]) -> None:
    splits = (Split.TRAIN, Split.VALIDATION, Split.HELDOUT, Split.HELDOUT)
    about = {"source": "", "index": 0, "family": "own", "instruction": "f", "files": {}, "exports": ("m.py",)}
    source = ListSource((Task(split=split, **about), Answer(reference={})) for split in splits)
    said: list[str] = []
    given = ["evals.heldout_tasks", "evals.during_tasks", "evals.every"]
    log_short_splits(RunConfig(evals=evals), source, given, said.append)
    assert [line.partition(" tasks;")[0] for line in said] == told
    log_short_splits(RunConfig(evals=evals), RepairSource(seed=0), given, said.append)  # it has no end
    log_short_splits(RunConfig(evals=evals), source, [], said.append)  # nobody asked: defaults
    assert len(said) == len(told)


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        ("qwen3_next", {"engine": {"speculation": "look-up"}}, "engine.speculation = 'look-up'"),
        ("qwen3_next", {"learner": {"ranks": 2, "context_parallel": 2}}, "learner.context_parallel = 2"),
    ],
)
def test_what_a_models_attention_cannot_do_is_refused(family: str, changed: dict[str, object], says: str) -> None:
    check_attention(build(RunConfig, changed), ModelConfig())
    with pytest.raises(ConfigError) as raised:
        check_attention(build(RunConfig, changed), family_of(family).tiny())
    assert says in raised.value.what
