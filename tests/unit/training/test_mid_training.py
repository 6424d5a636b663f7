"""Mid-training on a tiny corpus: it learns, ranks agree, and a killed run ends with the same bytes."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from etude import progress
from etude.errors import DeadlineExceeded, NotFinite, RunError, TaskError
from etude.models import ModelConfig, hf_views, load_model
from etude.telemetry import Telemetry, read_events
from etude.training import LearnerConfig, MidTrained, MidTrainingConfig, mid_train, write_corpus
from etude.training.balance import router_biases
from etude.training.config import OptimizerKind
from etude.training.corpus import Answered
from etude.training.data_parallel import run_ranks
from etude.training.process_group import SINGLE_PROCESS

from ..models.families import DEEPSEEK

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks import by name, and inherit the path
spawned = importlib.import_module("spawned")
mid_training = importlib.import_module("etude.training.mid_training")

SIZES = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    expert_size=12,
    num_experts=4,
    top_k=2,
    context_tokens=32,
)
CONFIG = MidTrainingConfig(
    num_tokens=6000, batch_tokens=200, document_tokens=32, lr=1e-2, warmup_steps=3, eval_every=10, checkpoint_every=4
)


def document(i: int) -> np.ndarray:
    """Counting up from somewhere: the next token is always known."""
    return (np.arange(20, dtype=np.int32) + i) % 24


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", [document(i) for i in range(90)], heldout=[document(5)])
    return tmp_path / "corpus"


def test_it_learns_tells_and_leaves_a_checkpoint(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    telemetry = Telemetry(tmp_path / "events" / "learner.jsonl", process="learner")
    done = mid_train(
        CONFIG,
        corpus,
        tmp_path / "mid",
        model=SIZES,
        ranks=1,
        assets=tmp_path / "tokenizer",
        telemetry=telemetry,
        copy_probe=spawned.first_logit,
    )
    telemetry.close()
    assert done.heldout_loss is not None
    assert done.heldout_loss < 1.0 < np.log(24)
    assert done.copy_probe == pytest.approx(spawned.first_logit(load_model(tmp_path / "mid").eval()))
    assert (tmp_path / "mid" / "tokenizer.json").is_file()
    assert not (tmp_path / "mid.partial").exists()
    events = list(read_events(tmp_path / "events"))
    steps = [e for e in events if e["kind"] == "mid.step"]
    assert steps[-1]["step"] == steps[-1]["num_steps"] == done.num_steps
    assert steps[-1]["tokens"] == done.num_tokens >= CONFIG.num_tokens
    evals = [e for e in events if e["kind"] == "mid.eval"]
    assert evals[-1]["heldout_loss"] < evals[0]["heldout_loss"]


def test_only_the_answer_of_a_document_is_learned(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = draw.integers(0, 20, (90, 20)).astype(np.int32)  # nothing in them can be predicted
    documents = [Answered(np.append(text, np.int32(20 + text[-1] % 2)), 20) for text in texts]
    write_corpus(tmp_path / "corpus", documents[:80], heldout=documents[80:])
    done = mid_train(CONFIG, tmp_path / "corpus", tmp_path / "mid", model=SIZES, ranks=1)
    assert done.heldout_loss is not None
    assert max(done.loss, done.heldout_loss) < 0.3, "the loss of the answers alone; that of the texts is ln 20 = 3"


def test_the_result_of_another_corpus_with_as_many_tokens_is_not_taken(tmp_path: Path) -> None:
    config = replace(CONFIG, num_tokens=200)
    for answer, allowed in ((21, True), (22, False)):
        document = Answered(np.array([*range(20), answer], np.int32), 20)
        write_corpus(tmp_path / "corpus", [document] * 9)
        if allowed:
            mid_train(config, tmp_path / "corpus", tmp_path / "mid", model=SIZES, ranks=1)
    with pytest.raises(RunError, match="was trained with other settings"):
        mid_train(config, tmp_path / "corpus", tmp_path / "mid", model=SIZES, ranks=1)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(SIZES, "adamw"), (DEEPSEEK, "adamw"), (SIZES, "muon")],
    ids=["softmax", "router biases", "muon"],
)
def test_a_killed_run_goes_on_from_its_checkpoint_and_ends_with_the_same_bytes(
    tmp_path: Path, corpus: Path, model: ModelConfig, optimizer: str
) -> None:
    config = replace(CONFIG, optimizer=OptimizerKind(optimizer))
    whole = mid_train(config, corpus, tmp_path / "whole", model=model, ranks=1)
    with pytest.raises(spawned.Killed):
        mid_train(config, corpus, tmp_path / "killed", model=model, ranks=1, copy_probe=partial(spawned.die, [2]))
    assert [p.name for p in (tmp_path / "killed.partial").iterdir()] == ["step-000016"]
    assert not (tmp_path / "killed").exists()
    resumed = mid_train(config, corpus, tmp_path / "killed", model=model, ranks=1)
    assert resumed == whole
    bytes_of = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert bytes_of[0] == bytes_of[1]


def test_progress_of_an_older_version_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(spawned.Killed):
        mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1, copy_probe=partial(spawned.die, [2]))
    path = tmp_path / "mid.partial" / "step-000016" / "progress.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(RunError, match="a checkpoint of another version of etude"):
        mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1)


def test_each_forward_is_a_sign_of_life_however_many_a_step_has(tmp_path: Path, corpus: Path) -> None:
    job = mid_training.Job(CONFIG, SIZES, tmp_path / "mid", corpus=corpus, learner=LearnerConfig(budget_tokens=1))
    mid_training.begin(job)
    run = mid_training.TextTraining(job, SINGLE_PROCESS)
    before = progress.count()
    run.train_step()
    assert progress.count() == before + len(run.batches[0]) > before + 1
    run.evaluate()
    assert progress.count() == before + len(run.batches[0]) + 1


def test_a_run_that_diverges_ends_by_name_and_keeps_its_last_checkpoint(tmp_path: Path, corpus: Path) -> None:
    wild = MidTrainingConfig(**{**CONFIG.__dict__, "lr": 1e36, "warmup_steps": 0, "checkpoint_every": 1})
    with pytest.raises(NotFinite, match=r"layers\.\S+ is not finite at step 2"):
        mid_train(wild, corpus, tmp_path / "mid", model=SIZES, ranks=1)
    assert [p.name for p in (tmp_path / "mid.partial").iterdir()] == ["step-000001"]


def test_a_family_with_biases_is_balanced_by_them(tmp_path: Path, corpus: Path) -> None:
    short = MidTrainingConfig(**{**CONFIG.__dict__, "num_tokens": 1000, "balance": 0.0, "balance_bias": 2**-8})
    steps = mid_train(short, corpus, tmp_path / "mid", model=DEEPSEEK, ranks=1).num_steps
    (bias,) = router_biases(load_model(tmp_path / "mid"))
    moves = bias * 2**8
    assert moves.any()
    assert (moves == moves.round()).all()
    assert moves.abs().max() <= steps


def test_a_finished_run_is_not_trained_again_and_other_settings_are_refused(tmp_path: Path, corpus: Path) -> None:
    done = mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1)
    assert mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1) == done
    with pytest.raises(RunError, match="other settings"):
        mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1, seed=1)


def test_progress_of_other_settings_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(spawned.Killed):
        mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1, copy_probe=partial(spawned.die, [2]))
    with pytest.raises(RunError, match="a checkpoint that was made with other settings"):
        mid_train(CONFIG, corpus, tmp_path / "mid", model=SIZES, ranks=1, seed=1)


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_two_ranks_agree_and_learn_what_one_learns(tmp_path: Path, corpus: Path, optimizer: OptimizerKind) -> None:
    short = replace(CONFIG, num_tokens=1000, balance=0.0, optimizer=optimizer)
    one = mid_train(short, corpus, tmp_path / "one", model=SIZES, ranks=1)
    two = mid_train(short, corpus, tmp_path / "two", model=SIZES, ranks=2, copy_probe=spawned.first_logit)
    assert two.num_steps == one.num_steps
    assert two.loss == pytest.approx(one.loss, rel=1e-3)
    assert two.heldout_loss == pytest.approx(one.heldout_loss, rel=1e-3)
    a, b = hf_views(load_model(tmp_path / "one")), hf_views(load_model(tmp_path / "two"))
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-2
    about = json.loads((tmp_path / "two" / "mid_training.json").read_text())
    assert about.pop("identity")
    assert MidTrained(**about) == two


def test_it_can_start_from_a_checkpoint(tmp_path: Path, corpus: Path) -> None:
    first = mid_train(CONFIG, corpus, tmp_path / "first", model=SIZES, ranks=1)
    more = mid_train(CONFIG, corpus, tmp_path / "more", model=SIZES, ranks=1, start=tmp_path / "first", seed=1)
    assert first.heldout_loss is not None
    assert more.heldout_loss is not None
    assert more.heldout_loss < first.heldout_loss


def test_a_corpus_of_a_larger_vocabulary_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [np.array([1, 99], np.int32)])
    with pytest.raises(TaskError, match="token id 99"):
        mid_train(CONFIG, tmp_path / "corpus", tmp_path / "mid", model=SIZES, ranks=2)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("error", TaskError, "the corpus moved"),
        ("death", RunError, r"a rank died.*1: 9"),
        ("stall", DeadlineExceeded, "no rank made progress"),
    ],
)
def test_a_rank_that_fails_dies_or_stalls_ends_them_all_by_name(how: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(spawned.fail, how, ranks=2, stall_s=3.0 if how == "stall" else 60.0)


def test_ranks_may_take_longer_to_start_than_a_step_may_take() -> None:
    """Each imports torch: a second or two here, minutes on a busy host."""
    assert run_ranks(spawned.size, None, ranks=2, stall_s=0.5) == [2, 2]
