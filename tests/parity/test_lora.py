"""Adapters, whole: a learner trains A and B and ships them alone, an engine merges them in the pause, and what it
sampled has exactly the learner's probabilities. Gradients against those of the merged matrices themselves."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.parity.test_low_precision import DEEPSEEK, QWEN, rollout
from tests.tiers import first_few
from torch.utils._python_dispatch import TorchDispatchMode

from etude.errors import CheckpointError, ConfigError, WeightsError
from etude.inference.adapters import AdaptedWeights, fetched_base
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.registry_messages import NO_VERSION
from etude.inference.weight_sync import WeightSync
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.components import GatedDelta, Latent
from etude.numerics import ComputeDtype, Mode, NumericsConfig, Quantise
from etude.numerics.factory import operators_for
from etude.records import Batch, Sample, Version
from etude.records.adapter import BASE_CHANNEL, B, lora_names
from etude.stores import MemoryStore
from etude.training import LearnerConfig, LiveWeights, TorchLearner
from etude.training.config import LoraOn
from etude.training.trainable import LoadRequest
from etude.weights import Channel, Follower
from etude.weights.chain.channel import publish_once
from etude.weights.chain.history import stored

DENSE = replace(QWEN, num_kv_heads=2, family="qwen3", num_experts=0, top_k=0, dense_size=48, expert_size=48)
FAMILIES = {"qwen3_moe": replace(QWEN, num_kv_heads=2), "deepseek_v3": DEEPSEEK, "qwen3": DENSE}
WIDER = FAMILIES | {
    "without q_rank": replace(DEEPSEEK, latent=Latent(kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32)),
    "names of its own": replace(QWEN, num_kv_heads=2, family="mixtral"),
    "biases": replace(DENSE, family="qwen2"),
    "gated delta layers": replace(
        QWEN,
        num_kv_heads=2,
        family="qwen3_next",
        num_shared=1,
        rotary_dim=8,
        linear_layers=(0,),
        linear=GatedDelta(key_heads=4, value_heads=8, key_dim=8, value_dim=8),
    ),
}
LORA = LearnerConfig(lr=2e-2, lora_rank=3, lora_alpha=6.0)
START = Version(step=0, incarnation="00000000", digest="00" * 32)


def start_of(tmp_path: Path, sizes: ModelConfig, *, seed: int = 5, dtype: str = "bf16") -> Path:
    save_model(Transformer(sizes, seed=seed), tmp_path / "start", dtype=dtype)
    return tmp_path / "start"


def engine_of(path: Path, store: MemoryStore, dtype: torch.dtype, mode: Mode) -> tuple[ReferenceEngine, WeightSync]:
    model = load_model(path, operators=operators_for(NumericsConfig(mode), dtype))
    engine = ReferenceEngine(model, version=START, config=EngineConfig(context_tokens=96, chunk_tokens=16))

    return engine, WeightSync(engine, hf_views(model), Follower(store), adapted=AdaptedWeights(model))


def batch_of(samples: list[Sample], step: int) -> Batch:
    count = sum(int(sample.path.mask.sum()) for sample in samples)
    return Batch(batch_id="b", step=step, samples=tuple(samples), rollout_ids=(), num_loss_tokens=count)


@pytest.mark.parametrize("dtype", first_few(ComputeDtype, 1), ids=str)
@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
def test_what_an_engine_samples_with_an_adapter_has_exactly_the_learners_probabilities(
    tmp_path: Path, sizes: ModelConfig, dtype: ComputeDtype
) -> None:
    torch.set_num_threads(1)
    start, store = start_of(tmp_path, sizes, dtype="f32"), MemoryStore()
    learner = TorchLearner(replace(LORA, dtype=dtype), channel=Channel(store))
    learner.load(start)
    engine, following = engine_of(start, store, getattr(torch, dtype), Mode.EXACT)

    async def story() -> None:
        async with engine:
            for step in range(3):
                published = learner.publish([])
                assert await asyncio.to_thread(following.step) == published.version
                for name, view in hf_views(learner.model).items():
                    assert torch.equal(hf_views(engine._runner.model)[name], view), name
                samples = await asyncio.gather(*(rollout(engine, n) for n in range(4)))
                report = learner.forward_backward(batch_of(list(samples), step))
                assert report.fresh_ratio_max == 0.0, "every token's ratio is 1 to the bit"
                assert report.flipped_share == 0.0
                text = samples[0].path.token_ids.tolist()
                assert (await engine.verify(text))[1] == learner.probe(text)
                assert learner.optim_step()["grad_norm"] > 0

    asyncio.run(story())
    published = Follower(store)
    published.advance()
    assert {name.rpartition(".lora_")[2] for name in published.tensors} == {"A.weight", "B.weight", "adapter_config"}
    start_views, now = hf_views(load_model(start)), hf_views(learner.model)
    moved = {name for name, view in now.items() if not torch.equal(view, start_views[name].bfloat16().float())}
    assert moved == {name for name in now if "_proj" in name}, "and only those"
    assert len(published.tensors) == 2 * len(moved) + 1


def test_an_engine_without_a_checkpoint_takes_the_base_from_the_store(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    start, store = start_of(tmp_path, DEEPSEEK), MemoryStore()
    learner = TorchLearner(LORA, channel=Channel(store))
    learner.load(start)
    shape_b_as_trained(learner)
    version = learner.publish([]).version
    model = Transformer(DEEPSEEK, seed=9)
    engine = ReferenceEngine(model, version=NO_VERSION, config=EngineConfig(context_tokens=96))
    adapted = AdaptedWeights(model, base=partial(fetched_base, store))
    following = WeightSync(engine, hf_views(model), Follower(store), adapted=adapted)

    async def story() -> None:
        async with engine:
            with pytest.raises(WeightsError, match="channel 'base' has no version"):
                await asyncio.to_thread(following.step)
            base = learner.trainable.base()
            assert base is not None
            for _ in range(2):
                publish_once(store, BASE_CHANNEL, base)
            assert await asyncio.to_thread(following.step) == version

    asyncio.run(story())
    assert len(list(stored(store, BASE_CHANNEL))) == 1, "it is published once"
    for name, view in hf_views(model).items():
        assert torch.equal(view, hf_views(learner.model)[name]), name


def test_a_native_engine_in_bf16_holds_the_learners_merged_weights(tmp_path: Path) -> None:
    start, store = start_of(tmp_path, QWEN), MemoryStore()
    learner = TorchLearner(LORA, channel=Channel(store), numerics=NumericsConfig(Mode.NATIVE))
    learner.load(start)
    shape_b_as_trained(learner)
    version = learner.publish([]).version
    engine, following = engine_of(start, store, torch.bfloat16, Mode.NATIVE)

    async def story() -> None:
        async with engine:
            assert await asyncio.to_thread(following.step) == version

    asyncio.run(story())
    for name, view in hf_views(engine._runner.model).items():
        assert view.dtype is torch.bfloat16
        assert torch.equal(view.float(), hf_views(learner.model)[name]), name


@pytest.mark.parametrize("numerics", [NumericsConfig(), NumericsConfig(Mode.NATIVE), NumericsConfig(degree=2)], ids=str)
@pytest.mark.parametrize("sizes", first_few(WIDER.values(), 2), ids=WIDER)
def test_gradients_are_those_of_the_merged_matrices_by_the_chain_rule(
    tmp_path: Path, sizes: ModelConfig, numerics: NumericsConfig
) -> None:
    torch.set_num_threads(1)
    if sizes.linear_layers and numerics.degree > 1:
        pytest.skip("tensor-parallel ranks cannot divide gated delta layers")
    f32 = {"weights": LiveWeights.F32, "replay_routes": False}
    low = TorchLearner(replace(LORA, **f32), numerics=numerics, refuse_mismatch=False)
    low.load(start_of(tmp_path, sizes, dtype="f32"))
    shape_b_as_trained(low)
    low.save(tmp_path / "adapter")
    full = TorchLearner(LearnerConfig(**f32), numerics=numerics, refuse_mismatch=False)
    save_model(load_model(tmp_path / "adapter"), tmp_path / "merged", dtype="f32")
    full.load(tmp_path / "merged")
    samples = asyncio.run(sampled(low))
    low.forward_backward(batch_of(samples, 0))
    full.forward_backward(batch_of(samples, 0))
    pairs, mine = gradients(low), low.optimizer.live.untyped_storage()
    scale = LORA.lora_alpha / LORA.lora_rank
    for name, dw in gradients(full).items():
        if lora_names(name)[0] in low.trainable.views():
            a, b = (low.trainable.views()[one] for one in lora_names(name))
            assert a.untyped_storage().data_ptr() == mine.data_ptr()
            down, up = (pairs[one] for one in lora_names(name))
            for found, expected in ((down, scale * b.T @ dw), (up, scale * dw @ a.T)):
                assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-9, name
            assert down.abs().max() > 0 or ".experts." in name, name


def shape_b_as_trained(learner: TorchLearner) -> None:
    """Give B numbers, so that A has a gradient."""
    held = learner.trainable
    for name, view in held.views().items():
        if name.endswith(B):
            drawn = torch.empty(view.shape).normal_(0.0, 0.05, generator=torch.Generator().manual_seed(len(name)))
            view.copy_(drawn.bfloat16())
    held.sync_model()


async def sampled(learner: TorchLearner) -> list[Sample]:
    model = learner.model.eval()
    async with ReferenceEngine(model, version=START, config=EngineConfig(context_tokens=96)) as engine:
        return list(await asyncio.gather(*(rollout(engine, n) for n in range(3))))


def gradients(learner: TorchLearner) -> dict[str, torch.Tensor]:
    """What one forward and backward left, by the names of what trains."""
    grad = learner.optimizer.grad
    views = {n: v for n, v in learner.trainable.views().items() if not n.endswith("e_score_correction_bias")}
    starts = {name: view.storage_offset() for name, view in views.items()}
    return {name: grad[starts[name] : starts[name] + view.numel()].view(view.shape) for name, view in views.items()}


def test_a_backward_pass_never_makes_a_tensor_of_the_size_of_a_matrix(tmp_path: Path) -> None:
    sizes = replace(QWEN, hidden_size=256, expert_size=256, num_layers=1)
    start, plain = start_of(tmp_path, sizes), LearnerConfig(replay_routes=False)
    matrix = sizes.hidden_size * sizes.expert_size
    assert largest_made(plain, start) > matrix, "all weights train"
    assert 0 < largest_made(replace(plain, lora_rank=3), start) < matrix


def largest_made(config: LearnerConfig, start: Path) -> int:
    """Numbers of the largest tensor that a backward pass makes."""
    learner = TorchLearner(config, numerics=NumericsConfig(Mode.NATIVE))
    learner.load(start)
    samples = asyncio.run(sampled(learner))
    logits = learner.model.train()(torch.from_numpy(samples[0].path.token_ids.astype("int64")))[0]
    made = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None:
                made.append(out.numel())
            return out

    with Sizes():
        logits.square().sum().backward()
    return max(made)


def test_a_learner_goes_on_from_its_adapters_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    start, store = start_of(tmp_path, QWEN), MemoryStore()
    first, again = (TorchLearner(LORA, channel=Channel(store), seed=seed) for seed in (7, 8))
    first.load(start)
    samples = asyncio.run(sampled(first))
    step(first, samples)
    version = first.publish(["r000"]).version
    first.save(tmp_path / "step-1")
    kept = {
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "learner.json",
        "learner.state",
    }
    assert {file.name for file in (tmp_path / "step-1").iterdir()} == kept, "and no weights of the base"
    step(first, samples)

    again.load(tmp_path / "step-1")
    assert (again.step, again.version) == (1, version)
    step(again, samples)
    assert {n: t.codes.tobytes() for n, t in again.exported().items()} == {
        n: t.codes.tobytes() for n, t in first.exported().items()
    }
    for name, view in hf_views(again.model).items():
        assert torch.equal(view, hf_views(first.model)[name]), name


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
def test_a_frozen_model_in_bf16_trains_the_adapters_to_the_bits_of_one_in_float32(
    tmp_path: Path, sizes: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    start = start_of(tmp_path, sizes)
    narrow, wide = (
        TorchLearner(replace(LORA, dtype=ComputeDtype.BFLOAT16), numerics=NumericsConfig(Mode.NATIVE)) for _ in range(2)
    )
    narrow.load(start)
    monkeypatch.setattr(LoadRequest, "frozen_dtype", torch.float32)
    wide.load(start)
    kinds = {p.dtype for one in (narrow, wide) for p in one.model.parameters()}
    assert kinds == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in narrow.model.parameters()} == {torch.bfloat16}, "2 bytes of each number"
    samples = asyncio.run(sampled(narrow))
    for _ in range(2):
        for learner in (narrow, wide):
            step(learner, samples)
    published, expected = narrow.exported(), wide.exported()
    assert published.keys() == expected.keys()
    for name, tensor in expected.items():
        assert published[name].codes.tobytes() == tensor.codes.tobytes(), name
    for name, view in hf_views(wide.model).items():
        assert torch.equal(hf_views(narrow.model)[name].float(), view.float()), name


def step(learner: TorchLearner, samples: list[Sample]) -> None:
    learner.forward_backward(batch_of(samples, learner.step))
    learner.optim_step()


def test_an_adapters_directory_loads_as_its_base_merged_wherever_the_run_was_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    start_of(run, DENSE).rename(run / "mid")
    learner = TorchLearner(LORA)
    learner.load(run / "mid")
    shape_b_as_trained(learner)
    learner.save(run / "step-000001")
    run.rename(tmp_path / "moved")
    merged = hf_views(load_model(tmp_path / "moved" / "step-000001"))
    for name, view in hf_views(learner.model).items():
        assert torch.equal(merged[name], view), name
    further = TorchLearner(LORA)
    shutil.copytree(tmp_path / "moved" / "step-000001", tmp_path / "start2", ignore=shutil.ignore_patterns("learner.*"))
    with pytest.raises(CheckpointError, match="the base of the adapter"):
        further.load(tmp_path / "start2")


def test_an_adapter_never_meets_another_base(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    start, store = start_of(tmp_path, QWEN), MemoryStore()
    learner = TorchLearner(LORA, channel=Channel(store))
    learner.load(start)
    published = learner.publish([])
    learner.save(tmp_path / "step-1")
    (tmp_path / "other").mkdir()
    other = start_of(tmp_path / "other", QWEN, seed=6)
    engine, following = engine_of(other, store, torch.float32, Mode.EXACT)

    async def story() -> None:
        async with engine:
            with pytest.raises(CheckpointError, match="the adapter belongs to the base") as refused:
                await asyncio.to_thread(following.step)
            assert "hint: use the checkpoint that the adapter was trained on" in str(refused.value)
            assert engine.version == START != published.version, "it goes on with what it holds"

    held = {name: view.clone() for name, view in hf_views(load_model(other)).items()}
    asyncio.run(story())
    assert all(torch.equal(view, held[name]) for name, view in hf_views(engine._runner.model).items())
    shutil.rmtree(start)
    other.rename(start)
    for load in (lambda: load_model(tmp_path / "step-1"), lambda: learner.load(tmp_path / "step-1")):
        with pytest.raises(CheckpointError, match="the adapter belongs to the base"):
            load()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(LORA, lora_rank=4), "rank = 3, the setting is 4"),
        (replace(LORA, lora_alpha=3.0), "alpha = 6.0, the setting is 3.0"),
        (replace(LORA, lora_on=LoraOn.MLP), "modules = .* the setting is .'down_proj', 'gate_proj', 'up_proj'"),
        (replace(LORA, lora_rank=0), "a learner that trains adapters"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_by_what_differs(
    tmp_path: Path, config: LearnerConfig, said: str
) -> None:
    learner = TorchLearner(LORA)
    learner.load(start_of(tmp_path, DENSE))
    learner.save(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=said):
        TorchLearner(config).load(tmp_path / "step-1")


def test_adapters_on_quantised_weights_are_refused(tmp_path: Path) -> None:
    learner = TorchLearner(LORA, numerics=NumericsConfig(quantise=Quantise.MXFP8))
    with pytest.raises(ConfigError, match="'mxfp8' is not possible with lora_rank = 3"):
        learner.load(start_of(tmp_path, DENSE))


@pytest.mark.parametrize(
    ("weights", "dtype", "quantise", "said"),
    [
        (
            LiveWeights.F32,
            torch.bfloat16,
            Quantise.NONE,
            "cannot load an adapter in f32: its own weights are in bfloat16",
        ),
        (
            LiveWeights.BF16,
            torch.float16,
            Quantise.NONE,
            "cannot load an adapter in bf16: its own weights are in float16",
        ),
        (LiveWeights.BF16, torch.float32, Quantise.MXFP8, "its weights are rounded to mxfp8"),
    ],
)
def test_an_engine_that_cannot_hold_what_is_published_says_so_and_is_left_alone(
    tmp_path: Path, weights: LiveWeights, dtype: torch.dtype, quantise: Quantise, said: str
) -> None:
    start, store = start_of(tmp_path, DENSE), MemoryStore()
    learner = TorchLearner(replace(LORA, weights=weights), channel=Channel(store))
    learner.load(start)
    learner.publish([])
    follower = Follower(store)
    follower.advance()
    model = load_model(start, operators=operators_for(NumericsConfig(Mode.NATIVE), dtype))
    with pytest.raises(WeightsError, match=said):
        AdaptedWeights(model, quantise)(follower.tensors)


def test_settings_that_change_under_an_engine_are_refused_and_undone(tmp_path: Path) -> None:
    start, store = start_of(tmp_path, DENSE), MemoryStore()
    channel, engine_store = Channel(store), store
    learners = [TorchLearner(replace(LORA, lora_alpha=alpha), channel=channel) for alpha in (8.0, 6.0)]
    engine, following = engine_of(start, engine_store, torch.float32, Mode.EXACT)

    async def story() -> None:
        async with engine:
            for learner in learners:
                learner.load(start)
                shape_b_as_trained(learner)
            learners[0].publish([])
            await asyncio.to_thread(following.step)
            held = {name: view.clone() for name, view in hf_views(engine._runner.model).items()}
            learners[1].publish([])
            with pytest.raises(
                WeightsError, match="was not adopted: the settings of the published adapter have changed"
            ):
                await asyncio.to_thread(following.step)
            assert all(torch.equal(view, held[name]) for name, view in hf_views(engine._runner.model).items())

    asyncio.run(story())
