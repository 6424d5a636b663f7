"""Training of multi-token prediction heads: they learn, and the trunk has the same bytes with and without them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError
from etude.models import Transformer, hf_views, load_model, save_model
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.numerics.config import Mode, NumericsConfig
from etude.stores import MemoryStore
from etude.telemetry import Telemetry, read_events
from etude.training import LearnerConfig, MidTrainingConfig, TorchLearner, core, mid_train, write_corpus
from etude.training.config import LiveWeights, MtpLoss, OptimizerKind
from etude.training.process_group import SingleProcess
from etude.training.sharded.fsdp import meta_model
from etude.training.sharded.mesh import Mesh
from etude.weights import Channel

from ..models.families import DEEPSEEK
from . import test_learner
from .test_learner import batch, changed, sampled
from .test_mid_training import CONFIG, SIZES, document

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks import by name, and inherit the path
spawned = importlib.import_module("spawned")

HEADED = replace(test_learner.SIZES, mtp_heads=2)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", [document(i) for i in range(90)], heldout=[document(5)])
    return tmp_path / "corpus"


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return load_tensors(folder / "model.safetensors")


def same_trunk(with_heads: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> bool:
    """Whether all tensors of a model without heads have the same bytes in one with heads."""
    return with_heads.keys() > plain.keys() and all(torch.equal(with_heads[name], one) for name, one in plain.items())


@pytest.mark.parametrize("loss", [MtpLoss.DISTILL, MtpLoss.TOKENS])
@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_mid_training_has_the_same_trunk_with_heads_and_the_heads_learn(
    tmp_path: Path, corpus: Path, loss: MtpLoss, optimizer: OptimizerKind
) -> None:
    config, model = replace(CONFIG, mtp=loss, optimizer=optimizer), replace(DEEPSEEK, mtp_heads=2)
    telemetry = Telemetry(tmp_path / "events" / "l.jsonl", process="learner")
    mid_train(config, corpus, tmp_path / "plain", model=DEEPSEEK, ranks=1)
    mid_train(config, corpus, tmp_path / "heads", model=model, ranks=1, telemetry=telemetry)
    telemetry.close()
    assert same_trunk(weights(tmp_path / "heads"), weights(tmp_path / "plain"))
    losses = [event["mtp_loss"] for event in read_events(tmp_path / "events") if event["kind"] == "mid.step"]
    assert losses[-1] < 1.6  # chance is 3.2
    fresh = hf_views(Transformer(model, seed=0))
    moved = {name for name, one in weights(tmp_path / "heads").items() if name in fresh and not fresh[name].equal(one)}
    assert {"model.layers.2.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"} < moved


def test_two_ranks_train_the_same_heads(tmp_path: Path, corpus: Path) -> None:
    model = replace(SIZES, mtp_heads=1)
    one, two = (mid_train(CONFIG, corpus, tmp_path / f"{n}", model=model, ranks=n) for n in (1, 2))
    assert two.num_steps == one.num_steps  # ranks that end with different weights are an error
    name = "model.layers.2.eh_proj.weight"
    assert torch.allclose(weights(tmp_path / "1")[name], weights(tmp_path / "2")[name], atol=0.05)


def test_a_killed_mid_training_goes_on_with_its_heads(tmp_path: Path, corpus: Path) -> None:
    model = replace(SIZES, mtp_heads=1)
    whole = mid_train(CONFIG, corpus, tmp_path / "whole", model=model, ranks=1)
    with pytest.raises(spawned.Killed):
        mid_train(CONFIG, corpus, tmp_path / "killed", model=model, ranks=1, copy_probe=partial(spawned.die, [2]))
    assert mid_train(CONFIG, corpus, tmp_path / "killed", model=model, ranks=1) == whole
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]


def test_mid_training_gives_heads_to_a_checkpoint_without_them(tmp_path: Path, corpus: Path) -> None:
    save_model(Transformer(SIZES, seed=3), tmp_path / "start", dtype="f32")
    config = replace(CONFIG, num_tokens=1000)
    for name, heads in (("plain", None), ("headed", 1)):
        asked = replace(config, mtp_heads=heads)
        mid_train(asked, corpus, tmp_path / name, model=SIZES, ranks=1, start=tmp_path / "start")
    assert same_trunk(weights(tmp_path / "headed"), weights(tmp_path / "plain"))
    found = load_model(tmp_path / "headed")
    assert found.config == replace(SIZES, mtp_heads=1)
    mid_train(
        replace(config, mtp_heads=0), corpus, tmp_path / "off", model=found.config, ranks=1, start=tmp_path / "headed"
    )
    assert weights(tmp_path / "off").keys() == weights(tmp_path / "plain").keys()
    with pytest.raises(ConfigError, match="cannot have MTP heads"):
        MidTrainingConfig(mtp_heads=1).models(replace(SIZES, family="olmoe", qk_norm=True))


def trained(
    folder: Path, config: LearnerConfig, numerics: NumericsConfig, *, steps: int = 2
) -> tuple[TorchLearner, list[dict[str, float]]]:
    learner = TorchLearner(config, numerics=numerics, refuse_mismatch=False, channel=Channel(MemoryStore()))
    learner.load(folder)
    reports = []
    for step in range(steps):
        samples = [sampled(learner, seed) for seed in range(step, step + 3)]
        learner.forward_backward(batch(*samples, *samples))  # a tree, in which both share all tokens
        reports.append(learner.optim_step())
    return learner, reports


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("settings", [{}, {"weights": LiveWeights.F32, "optimizer": OptimizerKind.MUON}])
def test_rl_has_the_same_trunk_with_heads_and_the_heads_follow_the_policy(
    tmp_path: Path, mode: Mode, settings: dict[str, object]
) -> None:
    save_model(Transformer(HEADED, seed=4), tmp_path / "headed", dtype="f32")
    save_model(Transformer(test_learner.SIZES, seed=4), tmp_path / "plain", dtype="f32")
    config = replace(test_learner.CONFIG, **settings)  # type: ignore[arg-type]
    numerics = NumericsConfig(mode=mode)
    (headed, of_headed), (plain, of_plain) = (
        trained(tmp_path / name, config, numerics, steps=3) for name in ("headed", "plain")
    )
    assert same_trunk(hf_views(headed.model), hf_views(plain.model))
    for one, other in zip(of_headed, of_plain, strict=True):
        assert {**one, "mtp_loss": 0.0} == {**other, "mtp_loss": 0.0}
    assert headed.exported().keys() > plain.exported().keys()
    assert of_headed[-1]["mtp_loss"] < of_headed[0]["mtp_loss"]


def test_heads_that_are_off_or_beside_adapters_stay_as_they_are(tmp_path: Path) -> None:
    save_model(Transformer(HEADED, seed=4), tmp_path / "headed", dtype="f32")
    for settings in ({"mtp": MtpLoss.OFF}, {"lora_rank": 2}):
        config = replace(test_learner.CONFIG, weights=LiveWeights.F32, **settings)  # type: ignore[arg-type]
        learner, reports = trained(tmp_path / "headed", config, NumericsConfig())
        assert "mtp_loss" not in reports[0]
        expected = hf_views(Transformer(HEADED, seed=4))
        found = hf_views(learner.model)
        heads = [name for name in expected if name.startswith(("model.layers.2.", "model.layers.3."))]
        assert heads
        assert all(torch.equal(found[name], expected[name]) for name in heads)


@pytest.mark.parametrize("weights", list(LiveWeights))
def test_a_reloaded_learner_goes_on_with_its_heads_to_the_bit(tmp_path: Path, weights: LiveWeights) -> None:
    save_model(Transformer(HEADED, seed=4), tmp_path / "start", dtype="f32")
    config = replace(test_learner.CONFIG, weights=weights)
    first, _ = trained(tmp_path / "start", config, NumericsConfig())
    first.save(tmp_path / "saved")
    second = TorchLearner(config)
    second.load(tmp_path / "saved")
    samples = [sampled(first, seed) for seed in range(3)]
    stale = [changed(s, steps=np.where(s.path.mask, 0, -1).astype(np.int32)) for s in samples]
    for learner in (first, second):
        learner.forward_backward(batch(*stale))
        learner.optim_step()
    assert all(torch.equal(view, hf_views(second.model)[name]) for name, view in hf_views(first.model).items())


def test_the_other_ranks_read_a_checkpoint_once_rank_0_has_written_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, seen = list[str](), list[list[str]]()

    @contextlib.contextmanager
    def propagate_errors(group: SingleProcess, what: str) -> Iterator[None]:
        together.append(what)
        yield
        together.pop()

    def save(*args: Any) -> None:
        seen.append([*together])
        save_tensors(*args)

    monkeypatch.setattr(SingleProcess, "propagate_errors", propagate_errors)
    monkeypatch.setattr(core, "save_tensors", save)
    save_model(Transformer(HEADED, seed=4), tmp_path / "start", dtype="f32")
    learner, _ = trained(tmp_path / "start", test_learner.CONFIG, NumericsConfig())
    seen.clear()
    learner.save(tmp_path / "saved")
    assert seen == [["files"]]


def test_several_ranks_refuse_a_model_with_heads_by_name(tmp_path: Path) -> None:
    save_model(Transformer(HEADED, seed=4), tmp_path / "start", dtype="f32")
    with pytest.raises(ConfigError, match="cannot be loaded on several ranks: it has 2 MTP heads"):
        meta_model(tmp_path / "start", Transformer(HEADED, seed=None).operators, Mesh.__new__(Mesh))
