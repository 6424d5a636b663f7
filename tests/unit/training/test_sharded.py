"""A learner on two ranks equals one process: losses, norms, ratios, and in exact mode the bytes."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from benchmarks.learner import sharded_ranks as ranked
from benchmarks.learner.sharded_ranks import Job, Trained
from msgspec.structs import replace as replaced
from tests.unit.models.families import DEEPSEEK, DEEPSEEK32, DENSE, GPT_OSS, NEXT
from tests.unit.training import ranked_learner

from etude.cli.plan import training_of
from etude.errors import CheckpointError
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig, Quantise
from etude.plan.arithmetic import parameter_bytes
from etude.records import Batch
from etude.records.sample import PlacedHint
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import DpoReference, LoraOn, Masters, Moments, OptimizerKind, PolicyLossKind
from etude.training.data_parallel import run_ranks

SIZES = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    expert_size=32,
    num_experts=4,
    top_k=2,
    context_tokens=1024,
)
LENGTHS = [40, 33, 57, 20, 64, 31]
EXACT, NATIVE = NumericsConfig(), NumericsConfig(mode=Mode.NATIVE)
CONFIG = LearnerConfig(lr=1e-2, ranks=2, expert_parallel=2, replay_routes=False, grad_clip=0.3)
LORA = replace(CONFIG, lora_rank=3, lora_alpha=7.0, lr=5e-2)  # by no power of two
SAVED = "adamw"
LOW = NumericsConfig(quantise=Quantise.NVFP4)
COMPACT: dict[str, Any] = {"masters": Masters.BF16, "moments": Moments.INT8}


def jobs_in(folder: Path) -> dict[str, Job]:
    start = folder / "start"
    save_model(Transformer(SIZES, seed=4), start, dtype="f32")
    given = ranked.batches(start, LENGTHS, steps=2, numerics=EXACT)
    adamw = Job(start, folder / SAVED, CONFIG, given, save=folder / "saved")
    long = ranked.batches(start, [600, 40], steps=1, numerics=EXACT)
    rounded = replace(CONFIG, dtype=ComputeDtype.BFLOAT16)
    bf16 = ranked.batches(start, LENGTHS, steps=2, numerics=NATIVE, dtype="bfloat16")
    shared = replace(CONFIG, expert_parallel=1, context_parallel=2)
    pairs = tuple(replaced(one, pairs=tuple(pairwise(one.rollout_ids))) for one in given)
    dpo = replace(CONFIG, policy_loss=PolicyLossKind.DPO, dpo_beta=0.5, budget_tokens=100)
    texts = replace(dpo, expert_parallel=1, context_parallel=2, dpo_reference=DpoReference.SAMPLER)
    hints = tuple(map(with_hints, given))
    low = ranked.batches(start, LENGTHS, steps=2, numerics=LOW)
    mxfp8 = NumericsConfig(quantise=Quantise.MXFP8)
    rows = replace(CONFIG, expert_parallel=1, budget_tokens=100)
    made = {
        SAVED: adamw,
        "muon": replace(adamw, config=replace(CONFIG, optimizer=OptimizerKind.MUON, recompute=True), save=None),
        "rows": replace(adamw, config=rows, save=None),
        "low": replace(adamw, batches=low, numerics=LOW, save=None),
        "low rows": replace(
            adamw, config=replace(rows, optimizer=OptimizerKind.MUON, recompute=True), numerics=mxfp8, save=None
        ),
        "lora": replace(adamw, config=LORA, save=folder / "adapter"),
        "dpo": replace(adamw, config=dpo, batches=pairs, save=None),
        "dpo of texts": replace(adamw, config=texts, batches=pairs, save=None),
        "few": replace(adamw, batches=ranked.batches(start, [40], steps=1, numerics=EXACT), save=None),
        "texts": Job(start, folder / "texts", shared, long),
        "hints": replace(adamw, batches=hints, save=None),
        "hints for texts": Job(start, folder / "hinted", shared, tuple(map(with_hints, long))),
        "bf16": Job(start, folder / "bf16", rounded, bf16, NATIVE),
        "compact": replace(adamw, config=replace(CONFIG, **COMPACT), save=folder / "compact saved"),
        "compact muon": replace(
            adamw, config=replace(CONFIG, optimizer=OptimizerKind.MUON, moments=Moments.INT8, offload=True), save=None
        ),
        "compact rows": replace(adamw, config=replace(rows, masters=Masters.BF16), save=None),
        "compact lora": replace(adamw, config=replace(LORA, **COMPACT), save=folder / "compact adapter"),
        "bf16 compact": Job(start, folder / "narrow", replace(rounded, **COMPACT), bf16, NATIVE),
        "bf16 adapters": Job(start, folder / "low", replace(LORA, dtype=ComputeDtype.BFLOAT16), bf16, NATIVE),
    }
    return {name: replace(job, store=folder / name) for name, job in made.items()}


def with_hints(batch: Batch) -> Batch:
    """The batch with a hint for a part of every other text, and no other credit."""
    samples = [msgspec.structs.replace(one, advantages=0 * one.advantages) for one in batch.samples]
    for i in range(0, len(samples), 2):
        at = len(samples[i].path.mask) // 2
        hint = PlacedHint(at=at, stop=at + 9, token_ids=np.arange(5, dtype=np.int32), weight=0.5)
        samples[i] = msgspec.structs.replace(samples[i], hints=(hint,))
    return msgspec.structs.replace(batch, samples=tuple(samples))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Trained, list[Trained]]]:
    """Of each job: itself, what one process is told, and each of two ranks."""
    jobs = jobs_in(tmp_path_factory.mktemp("sharded"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {
        name: ranked.alone(replace(job, store=job.store.with_suffix(".one"), save=None)) for name, job in jobs.items()
    }
    torch.set_num_threads(threads)
    by_rank = run_ranks(ranked.together, list(jobs.values()), ranks=2, stall_s=900.0)
    return {name: (job, alone[name], [told[i] for told in by_rank]) for i, (name, job) in enumerate(jobs.items())}


@pytest.mark.parametrize(
    "name",
    [
        SAVED,
        "muon",
        "rows",
        "low",
        "low rows",
        "lora",
        "few",
        "dpo",
        "hints",
        "compact",
        "compact muon",
        "compact rows",
        "compact lora",
    ],
)
def test_two_ranks_publish_the_bytes_of_one_process(
    told: dict[str, tuple[Job, Trained, list[Trained]]], name: str
) -> None:
    job, alone, ranks = told[name]
    assert len(set(alone.digests)) == len(job.batches), "every step changes the weights"
    for one in ranks:
        assert one == alone


def test_the_shares_change_a_step_by_rounding_alone(
    told: dict[str, tuple[Job, Trained, list[Trained]]], tmp_path: Path
) -> None:
    job, _, (rank, _) = told[SAVED]
    one = ranked.alone(replace(job, config=replace(CONFIG, ranks=1, expert_parallel=1), store=tmp_path, save=None))
    assert rank.losses == pytest.approx(one.losses, rel=1e-5)
    assert rank.norms == pytest.approx(one.norms, rel=1e-5)


@pytest.mark.parametrize("name", ["texts", "hints for texts"])
def test_tokens_of_a_text_on_two_ranks_have_the_bits_that_they_have_together(
    told: dict[str, tuple[Job, Trained, list[Trained]]], name: str
) -> None:
    _, alone, ranks = told[name]
    for one in ranks:
        assert one.fresh == alone.fresh == [0.0]
        assert one.losses == pytest.approx(alone.losses, rel=1e-5)
        assert one.norms == pytest.approx(alone.norms, rel=1e-5)


def test_pairs_whose_texts_are_on_two_ranks_have_the_loss_that_they_have_together(
    told: dict[str, tuple[Job, Trained, list[Trained]]],
) -> None:
    _, alone, ranks = told["dpo of texts"]
    assert alone.losses[0] == pytest.approx(math.log(2))
    assert alone.losses[1] != pytest.approx(math.log(2), rel=1e-3), "the second step is away from the reference"
    for one in ranks:
        assert one.losses == pytest.approx(alone.losses, rel=1e-5)
        assert one.norms == pytest.approx(alone.norms, rel=1e-5)


@pytest.mark.parametrize("name", ["bf16", "bf16 adapters", "bf16 compact"])
def test_bf16_with_weights_that_travel_as_bf16_stays_near(
    told: dict[str, tuple[Job, Trained, list[Trained]]], name: str
) -> None:
    _, alone, ranks = told[name]
    for one in ranks:
        assert one.losses == pytest.approx(alone.losses, rel=1e-2)
        assert one.norms == pytest.approx(alone.norms, rel=1e-2)


def test_one_process_resumes_a_checkpoint_of_ranks_whose_transformers_files_are_complete(
    told: dict[str, tuple[Job, Trained, list[Trained]]],
) -> None:
    job, alone, _ = told[SAVED]
    assert job.save is not None
    one = TorchLearner(replace(CONFIG, ranks=1, expert_parallel=1))
    one.load(job.save)
    assert (one.step, one.optimizer.num_steps) == (2, 2)
    assert one.version is not None
    assert one.version.digest == alone.digests[-1]
    whole = load_model(job.save, weight_dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), one.model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="optimizer = 'adamw'"):
        TorchLearner(replace(CONFIG, optimizer=OptimizerKind.MUON)).load(job.save)


def test_a_checkpoint_of_another_mesh_is_gone_on_with(
    told: dict[str, tuple[Job, Trained, list[Trained]]], tmp_path: Path
) -> None:
    """Two ranks by experts saved it; one process, two ranks by rows, and two after one go on to the same bytes. The
    same of adapters."""

    def beside(name: str, of: Path) -> Path:
        shutil.copytree(of, tmp_path / name)
        return tmp_path / name

    jobs, wanted = [], []
    for name in (SAVED, "lora", "compact", "compact lora"):
        job, _, _ = told[name]
        assert job.save is not None
        more = replace(job, start=job.save, batches=job.batches[:1], save=None)
        rows = replace(more, config=replace(job.config, expert_parallel=1), store=beside(f"{name}-rows", job.store))
        alone = ranked.alone(replace(more, store=beside(f"{name}-one", job.store), save=tmp_path / f"of-{name}"))
        after = replace(more, start=tmp_path / f"of-{name}", store=beside(f"{name}-after", tmp_path / f"{name}-one"))
        again = ranked.alone(replace(after, store=beside(f"{name}-again", tmp_path / f"{name}-one")))
        jobs += [rows, after]
        wanted += [alone.digests, again.digests]
    for by_rank in run_ranks(ranked.together, jobs, ranks=2, stall_s=900.0):
        assert [one.digests for one in by_rank] == wanted


def test_a_rank_reads_and_holds_what_its_share_needs(tmp_path: Path) -> None:
    """Half of the model in float32 and half of its file, where the whole model would be twice as much and more."""
    small, large = tmp_path / "small", tmp_path / "large"
    save_model(Transformer(SIZES, seed=4), small, dtype="bf16")  # first, for all that is loaded once
    save_model(Transformer(replace(SIZES, hidden_size=256, expert_size=1024, num_experts=16)), large, dtype="bf16")
    stored = (large / "model.safetensors").stat().st_size
    rows = replace(CONFIG, expert_parallel=1)
    starts = [(small, replace(rows, lora_rank=3)), (large, rows)]
    for _, grown in run_ranks(ranked_learner.loaded_bytes, starts, ranks=2):
        assert stored < grown < 1.8 * stored


def test_a_rank_keeps_as_many_bytes_of_a_parameter_as_a_plan_counts(tmp_path: Path) -> None:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="bf16")
    given = ranked.batches(tmp_path / "start", LENGTHS, steps=1, numerics=NATIVE, dtype="bfloat16")
    rows = replace(CONFIG, expert_parallel=1, budget_tokens=100, dtype=ComputeDtype.BFLOAT16)
    planned = {8.03: COMPACT, 14.03: {"moments": Moments.INT8}, 20.0: {}}
    jobs = [Job(tmp_path / "start", tmp_path, replace(rows, **one), given, NATIVE) for one in planned.values()]
    for job, expected in zip(jobs, planned, strict=True):
        each = parameter_bytes(training_of(job.config, NATIVE), 2)
        assert sum(each.values()) == pytest.approx(expected, rel=1e-3)
    for kept in run_ranks(ranked_learner.kept_bytes, jobs, ranks=2, stall_s=900.0):
        assert kept == pytest.approx(list(planned), rel=0.05)


def test_an_error_on_one_rank_is_raised_on_all_and_the_ranks_stay_usable(
    told: dict[str, tuple[Job, Trained, list[Trained]]], tmp_path: Path
) -> None:
    job, alone, _ = told[SAVED]
    by_rank = run_ranks(ranked_learner.troubled, replace(job, store=tmp_path, save=None), ranks=2, stall_s=900.0)
    for said, trained in by_rank:
        assert "ratio on the learner's own weights is off" in said
        assert "g000000.5" in said
        assert trained.digests == alone.digests


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "hung"])
def test_a_rank_that_is_lost_in_a_collective_is_named(
    told: dict[str, tuple[Job, Trained, list[Trained]]], tmp_path: Path, way: str
) -> None:
    job, _, _ = told[SAVED]
    said = ranked_learner.lose_one(replace(job, store=tmp_path, publish=False, save=None), tmp_path, way)
    assert "rank 1 did not join the collective for" in said
    assert "hint:" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": 3, "expert_parallel": 2}, "ranks = 3 is not a multiple of expert_parallel = 2"),
        ({"ranks": 2, "context_parallel": 4}, "ranks = 2 is not a multiple of context_parallel = 4"),
        ({"ranks": 2, "context_parallel": 2, "kl": 0.1}, "kl = 0.1 cannot be combined with context_parallel = 2"),
        ({"optimizer": OptimizerKind.MUON, "lora_rank": 4}, "set optimizer = 'adamw'"),
    ],
)
def test_settings_that_ranks_cannot_share_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LearnerConfig(**settings)


@pytest.mark.slow
def test_four_ranks_on_two_meshes_publish_and_save_what_one_process_does(tmp_path: Path) -> None:
    """Experts over two pairs of ranks, their rows over the others; and texts over two ranks beside that."""
    first = jobs_in(tmp_path)[SAVED]
    four = replace(CONFIG, ranks=4)
    experts = replace(first, config=four, save=tmp_path / "of-four")
    adapters = replace(first, config=replace(LORA, ranks=4), store=tmp_path / "adapters", save=None)
    texts = replace(first, config=replace(four, context_parallel=2), store=tmp_path / "texts", save=None)
    alone = ranked.alone(replace(experts, store=tmp_path / "one", save=None))
    low = ranked.alone(replace(adapters, store=tmp_path / "three"))
    apart = ranked.alone(replace(texts, store=tmp_path / "two"))
    for one, adapted, other in run_ranks(ranked.together, [experts, adapters, texts], ranks=4, stall_s=200.0):
        assert one == alone
        assert adapted == low
        assert other.fresh == apart.fresh
        assert other.losses == pytest.approx(apart.losses, rel=1e-5)
    learner = TorchLearner(replace(CONFIG, ranks=1, expert_parallel=1))
    learner.load(tmp_path / "of-four")
    assert learner.version is not None
    assert learner.version.digest == alone.digests[-1]


@pytest.mark.slow
def test_families_with_latents_biases_and_dense_layers_train_over_ranks(tmp_path: Path) -> None:
    """Latents, shared experts and biases of choosing; a dense model; sinks and biases of experts, which are read from
    stacks; gated delta layers; an indexer. Texts are gathered as latents, and as keys of an indexer that chooses."""
    configs = {"latent": replace(DEEPSEEK, context_tokens=1024), "dense": DENSE, "stacked": GPT_OSS}
    configs |= {"linear": NEXT, "indexed": replace(DEEPSEEK32, context_tokens=1024)}
    for name, config in configs.items():
        model = Transformer(config, seed=4)
        for key, buffer in model.named_buffers():
            if ".indexer_" in key:  # else all scores are zero
                buffer.normal_(generator=torch.Generator().manual_seed(len(key)))
        save_model(model, tmp_path / name, dtype="f32")
    latent, dense, stacked, linear, indexed = (
        ranked.batches(tmp_path / name, [40, 33, 57, 20], steps=2, numerics=EXACT) for name in configs
    )
    long, chosen = (
        ranked.batches(tmp_path / name, [600, 40], steps=1, numerics=EXACT) for name in ("latent", "indexed")
    )
    biased, plain = replace(CONFIG, balance_bias=1e-3), replace(CONFIG, expert_parallel=1)
    texts = replace(plain, context_parallel=2, recompute=True)
    jobs = [
        Job(tmp_path / "latent", tmp_path / "a", biased, latent),
        Job(tmp_path / "latent", tmp_path / "b", replace(biased, optimizer=OptimizerKind.MUON), latent),
        Job(tmp_path / "dense", tmp_path / "c", plain, dense),
        Job(tmp_path / "latent", tmp_path / "e", replace(LORA, recompute=True), latent),
        Job(tmp_path / "dense", tmp_path / "f", replace(LORA, expert_parallel=1, lora_on=LoraOn.ATTENTION), dense),
        Job(tmp_path / "stacked", tmp_path / "g", CONFIG, stacked),
        Job(tmp_path / "stacked", tmp_path / "h", replace(plain, optimizer=OptimizerKind.MUON), stacked),
        Job(tmp_path / "linear", tmp_path / "i", replace(CONFIG, optimizer=OptimizerKind.MUON), linear),
        Job(tmp_path / "indexed", tmp_path / "j", plain, indexed),
        Job(tmp_path / "latent", tmp_path / "d", texts, long),
        Job(tmp_path / "indexed", tmp_path / "k", texts, chosen),
    ]
    alone = [ranked.alone(replace(job, store=job.store.with_suffix(".one"))) for job in jobs]
    for told in run_ranks(ranked.together, jobs, ranks=2, stall_s=900.0):
        assert told[:-2] == alone[:-2]
        for one, other in zip(told[-2:], alone[-2:], strict=True):
            assert one.fresh == [0.0]
            assert one.losses == pytest.approx(other.losses, rel=1e-5)


@pytest.mark.slow
def test_the_guides_program_runs_under_torchrun_and_too_many_ranks_are_refused(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/sharded-learner.md").read_text()
    found = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(found[1])
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")

    def torchrun(ranks: int) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "train.py", "start"]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)

    done = torchrun(2)
    assert done.returncode == 0, done.stderr
    versions = dict(line.split() for line in done.stdout.splitlines())
    assert versions.keys() == {"0", "1"}
    assert len(set(versions.values())) == 1
    assert load_model(tmp_path / "saved").config == SIZES
    refused = torchrun(3)
    assert refused.returncode != 0
    assert "the number of ranks does not match: 3 instead of 2" in refused.stderr
