"""Mid-training on two ranks: the bytes of one process in exact mode, with any sharding, from any checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.corpus.test_chats import built as chats_built
from tests.unit.corpus.test_chats import chat
from tests.unit.training import spawned
from tests.unit.training.test_mid_training_phases import SIZES, built, config, tokenizer

from etude.errors import ConfigError
from etude.models import load_model
from etude.numerics.config import Mode, NumericsConfig
from etude.training import LearnerConfig, MidTrained, MidTrainingConfig, mid_train
from etude.training.config import LossTokens, MidTrainingPhase, OptimizerKind

__all__ = ["built", "config", "tokenizer"]  # fixtures
LEARNER = LearnerConfig(device="cpu", budget_tokens=128, lora_alpha=7.0)


def trained(config: MidTrainingConfig, out: Path, tokenizer: Path, **settings: Any) -> MidTrained:
    """Two ranks, or one process that computes the parts of both, if nothing else is said."""
    return mid_train(
        config, None, out, **{"model": SIZES, "ranks": 2, "assets": tokenizer, "learner": LEARNER, **settings}
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_two_ranks_train_the_bytes_of_one_process_on_what_is_said(tmp_path: Path, optimizer: OptimizerKind) -> None:
    """A phase on chats and texts, and then one with its loss on the answers: replicated, with FSDP2, and with experts
    on ranks of their own."""
    phases = [{"name": name, "tokens": 2400, "mix": {"talk": 3, "own": 1}} for name in ("main", "sft")]
    corpus = chats_built(tmp_path, [chat(i) for i in range(16)], texts=4, phases=phases)
    both = (MidTrainingPhase("main", num_tokens=1200), MidTrainingPhase("sft", num_tokens=1200, loss=LossTokens.SAID))
    config = MidTrainingConfig(
        corpus=corpus.folder, batch_tokens=300, document_tokens=128, lr=3e-3, warmup_steps=2, eval_every=4,
        checkpoint_every=4, heldout_documents=1, phases=both, optimizer=optimizer,
    )  # fmt: skip
    tokenizer, model = tmp_path / "checkpoint", replace(SIZES, context_tokens=128)
    one = trained(config, tmp_path / "one", tokenizer, alone=True, model=model)
    main = trained(replace(config, phases=both[:1]), tmp_path / "main", tokenizer, alone=True, model=model)
    assert one.num_steps > main.num_steps
    assert one.digest != main.digest, "the second phase changed the weights"
    experts = replace(LEARNER, ranks=2, expert_parallel=2)
    for name, settings in {"two": {}, "rows": {"replicated": False}, "experts": {"learner": experts}}.items():
        assert trained(config, tmp_path / name, tokenizer, model=model, **settings) == one, name
        assert_same_weights(tmp_path / name, tmp_path / "one")


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = (load_model(path).state_dict() for path in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_two_ranks_train_the_bytes_of_one_process_through_both_phases(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path, optimizer: OptimizerKind
) -> None:
    """Each rank holds the model; and FSDP2 shards it, with experts on ranks of their own, too."""
    config = replace(config, optimizer=optimizer)
    one = trained(config, tmp_path / "one", tokenizer, alone=True)
    two = trained(config, tmp_path / "two", tokenizer)
    assert two == one
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    experts = replace(LEARNER, ranks=2, expert_parallel=2)
    for name, settings in {"rows": {"replicated": False}, "experts": {"learner": experts}}.items():
        assert trained(config, tmp_path / name, tokenizer, **settings) == one
        assert (tmp_path / name / "model-00002-of-00002.safetensors").is_file()
        assert_same_weights(tmp_path / name, tmp_path / "one")


def test_adapters_are_trained_over_ranks_and_merged_into_the_result(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path
) -> None:
    trained(replace(config, phases=config.phases[:1]), tmp_path / "start", tokenizer, alone=True)
    config = replace(config, lora_rank=3, lr=3e-2)
    settings = {"start": tmp_path / "start"}
    one = trained(config, tmp_path / "one", tokenizer, alone=True, **settings)
    assert trained(config, tmp_path / "two", tokenizer, **settings) == one
    assert trained(config, tmp_path / "rows", tokenizer, replicated=False, **settings) == one
    for name in ("two", "rows"):
        assert_same_weights(tmp_path / name, tmp_path / "one")
    before, after = load_model(tmp_path / "start"), load_model(tmp_path / "one")
    assert after.config == SIZES.extended(2.0)
    assert torch.equal(after.norm, before.norm.bfloat16().float()), "norms have no adapters"
    assert not torch.equal(after.blocks[0].experts.down, before.blocks[0].experts.down)
    with pytest.raises(ConfigError, match="lora_rank = 3 trains adapters of a new model"):
        trained(config, tmp_path / "new", tokenizer)


def test_tokens_of_a_text_may_be_on_two_ranks(config: MidTrainingConfig, tokenizer: Path, tmp_path: Path) -> None:
    config = replace(config, phases=config.phases[:1], balance=0.0, balance_bias=0.0)
    texts = replace(LEARNER, ranks=2, context_parallel=2)
    one = trained(config, tmp_path / "one", tokenizer, ranks=1)
    for replicated in (True, False):
        two = trained(config, tmp_path / f"two-{replicated}", tokenizer, learner=texts, replicated=replicated)
        assert (two.num_steps, two.num_tokens) == (one.num_steps, one.num_tokens)
        assert two.loss == pytest.approx(one.loss, rel=1e-3)
        assert two.heldout_loss == pytest.approx(one.heldout_loss, rel=1e-3)


@pytest.mark.parametrize("evaluations", [2, 5], ids=["in the first phase", "in the second phase"])
@pytest.mark.parametrize("lora_rank", [0, 3], ids=["all weights", "adapters"])
def test_ranks_resume_in_any_phase_what_one_process_began_and_one_process_what_ranks_began(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path, evaluations: int, lora_rank: int
) -> None:
    trained(replace(config, phases=config.phases[:1]), tmp_path / "start", tokenizer, alone=True)
    config, start = replace(config, lora_rank=lora_rank), {"start": tmp_path / "start"}
    whole = trained(config, tmp_path / "whole", tokenizer, alone=True, **start)
    probe = partial(spawned.die, [evaluations])
    with pytest.raises(spawned.Killed):
        trained(config, tmp_path / "killed", tokenizer, alone=True, copy_probe=probe, **start)
    assert [path.name for path in (tmp_path / "killed.partial").iterdir()] == [f"step-{2 * evaluations - 2:06d}"]
    shutil.copytree(tmp_path / "killed.partial", tmp_path / "rows.partial")
    assert trained(config, tmp_path / "killed", tokenizer, **start) == whole
    assert trained(config, tmp_path / "rows", tokenizer, replicated=False, **start) == whole
    assert_same_weights(tmp_path / "rows", tmp_path / "whole")


@pytest.mark.parametrize("replicated", [True, False])
def test_checkpoints_of_killed_ranks_are_gone_on_with(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path, replicated: bool
) -> None:
    """All ranks end at an evaluation in the second phase; other ranks, and one process, go on."""
    whole = trained(config, tmp_path / "whole", tokenizer, alone=True)
    with pytest.raises(Exception, match="a rank died"):
        trained(
            config, tmp_path / "two", tokenizer, replicated=replicated, copy_probe=partial(spawned.end_process, [5])
        )
    shutil.copytree(tmp_path / "two.partial", tmp_path / "one.partial")
    assert trained(config, tmp_path / "one", tokenizer, alone=True) == whole
    assert trained(config, tmp_path / "two", tokenizer, replicated=not replicated) == whole


def test_the_settings_of_the_learner_are_used(config: MidTrainingConfig, tokenizer: Path, tmp_path: Path) -> None:
    """A device that does not exist here is refused, and native mode computes other bits than exact mode."""
    config = replace(config, phases=config.phases[:1])
    exact = trained(config, tmp_path / "exact", tokenizer, ranks=1)
    native = trained(config, tmp_path / "native", tokenizer, ranks=1, numerics=NumericsConfig(mode=Mode.NATIVE))
    assert native.digest != exact.digest
    assert native.loss == pytest.approx(exact.loss, rel=1e-2)
    recomputed = trained(config, tmp_path / "recomputed", tokenizer, ranks=1, learner=replace(LEARNER, recompute=True))
    assert recomputed == exact
    absent = replace(LEARNER, device="cuda:99")
    with pytest.raises(ConfigError, match='device = "cuda:99" is not possible'):
        trained(config, tmp_path / "absent", tokenizer, ranks=1, learner=absent)
    with pytest.raises(ConfigError, match="ranks = 3 is not a multiple of expert_parallel = 2"):
        trained(config, tmp_path / "three", tokenizer, ranks=3, learner=replace(LEARNER, ranks=2, expert_parallel=2))
