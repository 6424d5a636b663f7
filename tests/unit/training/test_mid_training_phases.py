"""Mid-training on corpora of `etude corpus build`, in phases: what is held out, what is refused, and how it resumes."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.unit.corpus import make

from etude.config import build
from etude.corpus import Corpus, build_corpus
from etude.errors import ConfigError, CorpusError, InputError
from etude.models import ModelConfig, load_model
from etude.training import MidTrained, MidTrainingConfig, mid_train, write_corpus
from etude.training.config import MidTrainingPhase
from etude.training.mid_training_phases import open_documents, plan_phases, verify_corpora
from etude.training.process_group import SINGLE_PROCESS

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
    context_tokens=32,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus with the phases "main", in which documents come twice, and "long"; its tokenizer is in `tokenizer`."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "tokenizer").mkdir()
    make.tokenizer(folder / "tokenizer" / "tokenizer.json")
    for name, count, words in (("lines", 60, 8), ("long", 20, 30)):
        (folder / name).mkdir()
        for i in range(count):
            text = " ".join(f"{name} {i * 37 + j * j}" for j in range(words))
            (folder / name / f"{i}.txt").write_text(text)
    sources = [
        {"name": name, "kind": {"kind": "folder", "path": str(folder / name)}, "max_epochs": 2.0}
        for name in ("lines", "long")
    ]
    phases = [
        {"name": "main", "tokens": 9000, "mix": {"lines": 1}},
        {"name": "long", "tokens": 20_000, "mix": {"long": 1}},
    ]
    config = make.config(
        folder,
        tokenizer={"path": str(folder / "tokenizer")},
        sources=sources,
        phases=phases,
        near={"threshold": 1.0},
        quality={"max_repeated": 1.0},
        shard_tokens=4000,
    )
    return build_corpus(config, folder / "out", jobs=1)


@pytest.fixture
def tokenizer(built: Corpus) -> Path:
    return built.folder.parent / "tokenizer"


@pytest.fixture
def config(built: Corpus) -> MidTrainingConfig:
    main = MidTrainingPhase("main", num_tokens=1500, decay_from=1.0)
    long = MidTrainingPhase("long", num_tokens=900, document_tokens=64, batch_tokens=300, lr=1e-3, rope_factor=2.0)
    return MidTrainingConfig(
        corpus=built.folder,
        batch_tokens=200,
        document_tokens=32,
        lr=1e-2,
        warmup_steps=3,
        eval_every=2,
        checkpoint_every=2,
        phases=(main, long),
    )


def texts_of(corpus: Corpus, phase: str) -> list[tuple[int, ...]]:
    return [tuple(shard.document(i).tolist()) for shard in corpus.shards(phase) for i in range(len(shard))]


def trained(config: MidTrainingConfig, out: Path, tokenizer: Path, **settings: object) -> MidTrained:
    return mid_train(config, None, out, **{"model": SIZES, "ranks": 1, "assets": tokenizer, **settings})


def test_held_out_documents_are_in_no_phase_however_often_they_come(
    built: Corpus, config: MidTrainingConfig, tokenizer: Path
) -> None:
    plans = plan_phases(config, None, model=SIZES, tokenizer=tokenizer)
    documents = open_documents(plans, model=SIZES, heldout_documents=64)
    (heldout,) = documents.heldout
    found = {name: texts_of(built, name) for name in ("main", "long")}
    assert len(set(found["main"])) < len(found["main"]), "documents come again"
    assert len(heldout) == len({*found["main"], *found["long"]}) // 20 >= 2
    held = {tuple(heldout[i].tolist()) for i in range(len(heldout))}
    for plan, train in zip(plans, documents.train, strict=True):
        kept = [tuple(train.read(*map(int, span))[0].tolist()) for span in train.spans]
        assert kept == [one for one in found[plan.settings.name] if one[:64] not in held]
    assert sum(len(train.spans) for train in documents.train) < sum(map(len, found.values()))


def test_it_learns_from_shards_and_the_loss_of_held_out_documents_falls(
    built: Corpus, tokenizer: Path, tmp_path: Path
) -> None:
    config = MidTrainingConfig(
        corpus=built.folder, batch_tokens=400, document_tokens=32, lr=1e-2, warmup_steps=3, eval_every=10,
        phases=(MidTrainingPhase("main", num_tokens=None),),
    )  # fmt: skip
    done = trained(config, tmp_path / "mid", tokenizer)
    assert 0.8 * built.phase("main").tokens < done.num_tokens < built.phase("main").tokens, "each document once"
    assert done.heldout_loss is not None
    assert max(done.heldout_loss, done.loss) < 0.75 * np.log(SIZES.vocab_size)


def test_a_vocabulary_that_does_not_fit_sixteen_bits_is_trained(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    path = make.tokenizer(tmp_path / "tokenizer" / "tokenizer.json", [f"<|{i}|>" for i in range(70_000)] + [make.END])
    make.texts(tmp_path / "texts", 3)
    corpus = build_corpus(make.config(tmp_path, tokenizer={"path": str(path)}), tmp_path / "out", jobs=1)
    vocab_size = corpus.manifest.tokenizer.vocab_size
    assert corpus.manifest.tokenizer.end_id == vocab_size - 1 > 1 << 16
    model = replace(SIZES, vocab_size=vocab_size, hidden_size=4, head_dim=2, tie_embeddings=True)
    config = MidTrainingConfig(corpus=corpus.folder, num_tokens=30, batch_tokens=30, document_tokens=30)
    plans = plan_phases(config, None, model=model, tokenizer=path.parent)
    (documents,) = open_documents(plans, model=model, heldout_documents=0).train
    (start, stop), *_ = documents.spans.tolist()
    assert documents.read(start, stop)[0][-1] == corpus.manifest.tokenizer.end_id
    assert trained(config, tmp_path / "mid", path.parent, model=model).num_steps == 1


def test_phases_have_their_own_rates_lengths_and_rope_which_the_result_keeps(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path
) -> None:
    rates: dict[str, list[float]] = {"main": [], "long": []}
    longest: dict[str, int] = {}

    class Reporting(mid_training.TextTraining):  # type: ignore[misc, name-defined]
        def _report(self, **values: float) -> None:
            rates[self.plans[self.phase].settings.name].append(values["lr"])

    out = tmp_path / "mid"
    job = mid_training.Job(config, SIZES, out, assets=tokenizer)
    mid_training.begin(job)
    run = Reporting(job, SINGLE_PROCESS)
    for spans in run.batches:
        run.train_step()
        name = run.plans[run.phase].settings.name
        longest[name] = max(longest.get(name, 0), int((spans[:, 1] - spans[:, 0]).max()))
        assert run.core.model.config.context_tokens == (32 if name == "main" else 64)
        assert len(run.core.model.cos) == run.core.model.config.context_tokens
    assert longest == {"main": 32, "long": 64}
    assert rates["main"] == pytest.approx([1e-2 * min(1, (i + 1) / 3) for i in range(len(rates["main"]))])
    assert max(rates["long"]) <= 1e-3
    assert rates["long"][0] == pytest.approx(1e-3 / 3)
    assert rates["long"][-1] < rates["long"][-2], "it decays"
    run.finish()
    made = load_model(tmp_path / "mid").config
    assert made == SIZES.extended(2.0)
    assert made.yarn is not None
    assert (made.yarn.factor, made.yarn.original_tokens, made.context_tokens) == (2.0, 32, 64)


@pytest.mark.parametrize("evaluations", [2, 5], ids=["in the first phase", "in the second phase"])
def test_a_killed_run_resumes_in_any_phase_and_ends_with_the_same_bytes(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path, evaluations: int
) -> None:
    whole = trained(config, tmp_path / "whole", tokenizer)
    with pytest.raises(spawned.Killed):
        trained(config, tmp_path / "killed", tokenizer, copy_probe=partial(spawned.die, [evaluations]))
    ((progress,),) = [list((tmp_path / "killed.partial").iterdir())]
    assert progress.name == f"step-{2 * evaluations - 2:06d}"
    assert trained(config, tmp_path / "killed", tokenizer) == whole
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert one == two


def test_one_phase_with_the_same_settings_trains_the_same_bits_as_none(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [(np.arange(20, dtype=np.int32) + i) % 24 for i in range(40)])
    config = MidTrainingConfig(num_tokens=900, batch_tokens=100, document_tokens=32, warmup_steps=2)
    none = mid_train(config, tmp_path / "corpus", tmp_path / "none", model=SIZES, ranks=1)
    phases = (MidTrainingPhase("only", num_tokens=900),)
    one = mid_train(replace(config, phases=phases), tmp_path / "corpus", tmp_path / "one", model=SIZES, ranks=1)
    assert one == none


def test_a_model_that_starts_from_a_checkpoint_is_trained_on(
    config: MidTrainingConfig, tokenizer: Path, tmp_path: Path
) -> None:
    first = trained(replace(config, phases=config.phases[:1]), tmp_path / "first", tokenizer)
    more = trained(replace(config, phases=config.phases[:1]), tmp_path / "more", tokenizer, start=tmp_path / "first")
    assert more.heldout_loss is not None
    assert first.heldout_loss is not None
    assert more.heldout_loss < first.heldout_loss


def test_corpora_that_cannot_be_trained_on_are_refused_before_any_rank_starts(
    built: Corpus, config: MidTrainingConfig, tokenizer: Path, tmp_path: Path
) -> None:
    def refused(error: type[Exception], match: str, tokens: Path = tokenizer, **changes: object) -> None:
        with pytest.raises(error, match=match):
            trained(replace(config, **changes), tmp_path / "mid", tokens)  # type: ignore[arg-type]

    refused(InputError, "no corpus in .*: it has no manifest.json", corpus=tmp_path)
    (tmp_path / "half" / "work").mkdir(parents=True)
    refused(InputError, "its build has not ended", corpus=tmp_path / "half")
    refused(ConfigError, "has several phases: its phases are main, long", phases=())
    refused(ConfigError, "has no phase 'mian'", phases=(MidTrainingPhase("mian"),))
    refused(ConfigError, "without tokenizer cannot be trained", tmp_path)
    (tmp_path / "other").mkdir()
    make.tokenizer(tmp_path / "other" / "tokenizer.json", [make.END])
    refused(CorpusError, "is not the tokenizer of .*: its SHA-256 is", tmp_path / "other")
    with pytest.raises(CorpusError, match="larger than that of the model: 260 tokens, the model has 200"):
        trained(config, tmp_path / "mid", tokenizer, model=replace(SIZES, vocab_size=200))
    assert not (tmp_path / "mid.partial").exists()


def test_a_damaged_shard_is_refused_if_a_phase_reads_it(
    built: Corpus, config: MidTrainingConfig, tokenizer: Path, tmp_path: Path
) -> None:
    shutil.copytree(built.folder, tmp_path / "corpus")
    shard = tmp_path / "corpus" / "long-00000.tokens"
    data = bytearray(shard.read_bytes())
    data[-8] ^= 1
    shard.write_bytes(data)
    config = replace(config, corpus=tmp_path / "corpus")
    with pytest.raises(CorpusError, match=r"long-00000\.tokens is damaged"):
        trained(config, tmp_path / "mid", tokenizer)
    plans = plan_phases(replace(config, phases=config.phases[:1]), None, model=SIZES, tokenizer=tokenizer)
    verify_corpora(plans, model=SIZES)


def test_settings_of_phases_that_do_not_fit_are_refused_by_name(
    built: Corpus, config: MidTrainingConfig, tokenizer: Path
) -> None:
    def refused(match: str, model: ModelConfig = SIZES, **changes: object) -> None:
        phases = (config.phases[0], replace(config.phases[1], **changes))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=match):
            plan_phases(replace(config, phases=phases), None, model=model, tokenizer=tokenizer)

    refused("'long' of mid_training has document_tokens = 65: the model has positions for 64", document_tokens=65)
    refused("document_tokens = 64: a batch has batch_tokens = 60", batch_tokens=60)
    refused("rope_factor = 2: it has YaRN", model=SIZES.extended(4.0))
    with pytest.raises(ConfigError, match=r"2 of mid_training\.phases are called 'a'"):
        build(MidTrainingConfig, {"phases": [{"name": "a"}, {"name": "a"}]})
    falling = [{"name": "a", "rope_factor": 4.0}, {"name": "b"}, {"name": "c", "rope_factor": 2.0}]
    with pytest.raises(ConfigError, match=r"phase 'c' of mid_training has rope_factor = 2 after 4 of phase 'a': the"):
        build(MidTrainingConfig, {"phases": falling})
    assert build(MidTrainingConfig, {"phases": falling[::-1]}).settings()[-1].rope_factor == 4.0


def test_a_held_out_document_is_in_no_epoch_though_fill_in_the_middle_reorders_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    make.tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(f"word {i * 37 + j * j}" for j in range(12)))
    config = make.config(
        tmp_path,
        tokenizer={"path": str(tmp_path / "tokenizer")},
        sources=[{"name": "texts", "kind": {"kind": "folder", "path": str(tmp_path / "texts")}, "max_epochs": 3.0}],
        phases=[{"name": "main", "tokens": 1_000_000, "mix": {"texts": 1}}],
        near={"threshold": 1.0},
        quality={"max_repeated": 1.0},
        fim={"rate": 1.0},
    )
    corpus = build_corpus(config, tmp_path / "out")
    texts, names = texts_of(corpus, "main"), []
    for shard in corpus.manifest.phases[0].shards:
        names += [one["id"] for one in corpus.provenance(shard)]
    assert len(set(texts)) > len(set(names)) == 40, "the same document in another order"
    mid = MidTrainingConfig(corpus=corpus.folder, batch_tokens=200, document_tokens=32)
    plans = plan_phases(mid, None, model=SIZES, tokenizer=tmp_path / "tokenizer")
    documents = open_documents(plans, model=SIZES, heldout_documents=2)
    (heldout,), (train,) = documents.heldout, documents.train
    held = {tuple(heldout[i].tolist()) for i in range(len(heldout))}
    held_names = {name for name, text in zip(names, texts, strict=True) if text[:32] in held}
    assert len(held_names) == len(held) == 2
    kept = sorted(tuple(train.read(*map(int, span))[0].tolist()) for span in train.spans)
    assert kept == sorted(text for name, text in zip(names, texts, strict=True) if name not in held_names)
