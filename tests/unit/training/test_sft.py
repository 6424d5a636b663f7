"""Loss on what the assistant says: gradients, ranks, resuming and held-out chats."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.corpus.test_chats import built, chat
from tests.unit.corpus.test_rollouts import Run
from tests.unit.corpus.test_rollouts import built as built_of_rollouts

from etude.corpus import Corpus
from etude.errors import ConfigError, CorpusError
from etude.models import ModelConfig, Transformer, hf_views, load_model
from etude.models.attention import Packed
from etude.training import MidTrained, MidTrainingConfig, mid_train
from etude.training.batches import split_documents
from etude.training.config import LossTokens, MidTrainingPhase
from etude.training.corpus import Documents
from etude.training.mid_training_phases import open_documents, plan_phases
from etude.training.process_group import SINGLE_PROCESS
from etude.training.token_batch import flatten_texts

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks import by name, and inherit the path
spawned = importlib.import_module("spawned")
mid_training = importlib.import_module("etude.training.mid_training")

SIZES = ModelConfig(
    vocab_size=300,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    expert_size=12,
    num_experts=4,
    top_k=2,
    context_tokens=256,
)
SAID = MidTrainingPhase("sft", num_tokens=6000, loss=LossTokens.SAID)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Chats and texts in two phases of the same documents."""
    mix = {"talk": 3, "own": 1}
    phases = [{"name": name, "tokens": 9000, "mix": mix} for name in ("main", "sft")]
    return built(tmp_path_factory.mktemp("sft"), [chat(i) for i in range(40)], texts=6, phases=phases)


@pytest.fixture
def config(corpus: Corpus) -> MidTrainingConfig:
    return MidTrainingConfig(
        corpus=corpus.folder,
        batch_tokens=600,
        document_tokens=256,
        lr=3e-3,
        warmup_steps=2,
        balance=0.0,
        eval_every=4,
        checkpoint_every=2,
        heldout_documents=2,
        phases=(SAID,),
    )


def trained(config: MidTrainingConfig, out: Path, corpus: Corpus, **settings: Any) -> MidTrained:
    assets = corpus.folder.parent / "checkpoint"
    return mid_train(config, None, out, **{"model": SIZES, "ranks": 1, "assets": assets, **settings})


def opened(config: MidTrainingConfig, corpus: Corpus) -> Any:
    plans = plan_phases(config, None, model=SIZES, tokenizer=corpus.folder.parent / "checkpoint")
    return open_documents(plans, model=SIZES, heldout_documents=config.heldout_documents)


def test_the_gradient_of_a_step_is_that_of_the_mean_over_said_tokens_by_hand(
    config: MidTrainingConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = corpus.folder.parent / "checkpoint"
    job = mid_training.Job(config, SIZES, tmp_path / "mid", assets=assets)
    mid_training.begin(job)
    run, found = mid_training.TextTraining(job, SINGLE_PROCESS), dict[str, torch.Tensor]()
    optimizer = run.core.optimizer
    monkeypatch.setattr(
        optimizer,
        "step",
        lambda lr: found.update({n: g.clone() for n, g in optimizer.by_parameter(optimizer.grad).items()}) or 0.0,
    )
    run.train_step()
    model, total, count = Transformer(SIZES, seed=0).train(), torch.zeros(()), 0
    for start, stop in run.batches[0].tolist():
        tokens, said = run.documents.train[0].read(start, stop)
        logits, _ = model(torch.from_numpy(tokens[:-1]), Packed([len(tokens) - 1], model.operators))
        logprobs = F.log_softmax(logits, -1)
        for place in np.flatnonzero(said[1:]).tolist():
            total = total - logprobs[place, tokens[place + 1]]
            count += 1
    (total / count).backward()
    loss = (total / count).detach()
    assert 0 < count < mid_training._num_tokens(run.batches[0])
    assert run.loss == pytest.approx(float(loss), rel=1e-5)
    expected = {name: one.grad for name, one in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is not None:
            torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-6)
    assert any(grad is not None and grad.abs().max() > 1e-4 for grad in expected.values())


def test_masked_tokens_have_no_logits(config: MidTrainingConfig, corpus: Corpus) -> None:
    (documents,) = opened(config, corpus).train
    spans = split_documents(documents, document_tokens=256)[:3]
    rows = flatten_texts(documents, spans)
    said = np.concatenate([documents.read(*span)[1][1:] for span in spans.tolist()])
    assert rows.rows_R.tolist() == np.flatnonzero(said).tolist()
    num_said = len(rows.rows_R)
    assert num_said == documents.num_targets(spans).sum() > 0


def test_a_phase_on_what_is_said_reads_the_chats_only_and_one_on_all_reads_everything(
    config: MidTrainingConfig, corpus: Corpus
) -> None:
    both = replace(config, phases=(MidTrainingPhase("main", num_tokens=900), SAID))
    everything, said = opened(both, corpus).train
    texts, chats = (corpus.phase("main").sources[name].documents for name in ("own", "talk"))
    assert texts > 2
    assert chats < len(everything.spans) < texts + chats, "two different documents are held out"
    assert 0 < len(said.spans) <= corpus.phase("sft").sources["talk"].documents
    assert all(said.read(*span)[1].any() for span in said.spans.tolist())
    assert all(everything.read(*span)[1].all() for span in everything.spans.tolist())


def test_it_learns_to_answer_and_the_loss_of_held_out_answers_falls(
    config: MidTrainingConfig, corpus: Corpus, tmp_path: Path
) -> None:
    short = trained(replace(config, phases=(replace(SAID, num_tokens=600),)), tmp_path / "short", corpus)
    long = trained(replace(config, phases=(replace(SAID, num_tokens=20_000),)), tmp_path / "long", corpus)
    assert short.heldout_loss is not None
    assert long.heldout_loss is not None
    assert long.heldout_loss < 0.7 * short.heldout_loss


def test_solved_rollouts_are_imitated_and_the_others_are_not(config: MidTrainingConfig, tmp_path: Path) -> None:
    """Of each task the rollout that was solved says something else than the one that was not."""
    run = Run(tmp_path / "runs" / "own")
    run.record(1, {task: [1.0, 0.0] for task in "abcdefgh"})
    solved = built_of_rollouts(run)
    config = replace(config, corpus=solved.folder, heldout_documents=0, phases=(replace(SAID, num_tokens=12_000),))
    done = mid_train(config, None, tmp_path / "mid", model=SIZES, ranks=1, assets=run.folder / "tokenizer")
    model = load_model(tmp_path / "mid")

    def loss(said: str) -> float:
        path = run.rollout("g000010.0", "a", said).trace.path(1)
        tokens = torch.from_numpy(path.token_ids).long()
        logits, _ = model(tokens[:-1], Packed([len(tokens) - 1], model.operators))
        each = F.cross_entropy(logits, tokens[1:], reduction="none")
        return float(each[torch.from_numpy(path.mask[1:])].mean().detach())

    assert done.loss < 3.0  # of ln 300 = 5.7 before
    assert loss("a0") + 0.1 < loss("a1")


def test_two_ranks_train_what_one_trains(config: MidTrainingConfig, corpus: Corpus, tmp_path: Path) -> None:
    one = trained(config, tmp_path / "one", corpus)
    two = trained(config, tmp_path / "two", corpus, ranks=2)
    assert (two.num_steps, two.num_tokens) == (one.num_steps, one.num_tokens)
    assert two.loss == pytest.approx(one.loss, rel=1e-3)
    assert two.heldout_loss == pytest.approx(one.heldout_loss, rel=1e-3)
    a, b = hf_views(load_model(tmp_path / "one")), hf_views(load_model(tmp_path / "two"))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-2


def test_a_killed_run_resumes_in_its_phase_and_ends_with_the_same_bytes(
    config: MidTrainingConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = replace(config, phases=(MidTrainingPhase("main", num_tokens=1800), SAID))
    whole = trained(config, tmp_path / "whole", corpus)
    with pytest.raises(spawned.Killed):
        trained(config, tmp_path / "killed", corpus, copy_probe=partial(spawned.die, [2]))
    assert trained(config, tmp_path / "killed", corpus) == whole
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert one == two
    steps = json.loads((tmp_path / "whole" / "mid_training.json").read_text())["num_steps"]
    assert steps > 8, "it was killed in the second phase or before its end"


def test_a_held_out_chat_is_cut_around_its_first_answer(tmp_path: Path) -> None:
    chats = [chat(i) for i in range(20)]
    for one in chats:
        one["messages"][0]["content"] = "Be brief. " * 30  # 300 tokens before the first answer
    long = built(tmp_path, chats)
    config = MidTrainingConfig(
        corpus=long.folder, batch_tokens=128, document_tokens=64, heldout_documents=1, eval_every=9, warmup_steps=1,
        phases=(replace(SAID, num_tokens=256),),
    )  # fmt: skip
    (heldout,) = opened(config, long).heldout
    assert heldout.lengths.tolist() == [64]
    assert 0 < heldout.num_targets(heldout.spans)[0] < 63
    done = trained(config, tmp_path / "mid", long)
    assert done.heldout_loss is not None
    assert 3.0 < done.heldout_loss < 8.0


def test_a_phase_without_anything_said_is_refused_before_any_rank_starts(
    corpus: Corpus, config: MidTrainingConfig, tmp_path: Path
) -> None:
    texts = built(tmp_path, [chat(3)], texts=5, phases=[{"name": "sft", "tokens": 500, "mix": {"own": 1}}])
    with pytest.raises(ConfigError, match="has no token that an assistant said"):
        trained(replace(config, corpus=texts.folder), tmp_path / "mid", texts)
    with pytest.raises(ConfigError, match='has loss = "said", and no corpus of chats'):
        plan_phases(replace(config, corpus=None), tmp_path, model=SIZES, tokenizer=None)


def test_damaged_marks_are_refused_before_any_rank_starts(config: MidTrainingConfig, tmp_path: Path) -> None:
    own = built(tmp_path, [chat(i) for i in range(4)])
    path = own.folder / "all-00000.said"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CorpusError, match=r"all-00000\.said is damaged"):
        trained(replace(config, corpus=own.folder), tmp_path / "mid", own)


def test_marks_of_documents_in_memory_leave_out_the_first_token() -> None:
    said = np.array([True, False, True, True, False])
    documents = Documents(np.arange(5, dtype=np.uint16), np.array([0, 3, 5]), said=said)
    assert documents.learned.tolist() == [False, False, True, False, False]
