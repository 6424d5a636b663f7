"""bf16 masters with stochastic rounding, 8-bit moments, and state in host memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.learner.sharded_ranks import batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from etude.cli.plan import training_of
from etude.errors import CheckpointError
from etude.models import ModelConfig, Transformer, save_model
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.plan.arithmetic import parameter_bytes
from etude.records import Batch
from etude.training import LearnerConfig, TorchLearner, moments, optimizer_state
from etude.training.config import LiveWeights, Masters, MidTrainingConfig, Moments
from etude.training.moments import Moment, block_size, decode, encode
from etude.training.optimizer import AdamW
from etude.training.rounding import noise, noise_key, round_to_bf16

CPU = torch.device("cpu")
SIZES = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, expert_size=32,
    num_experts=4, top_k=2, context_tokens=1024,
)  # fmt: skip
NARROW = NumericsConfig(mode=Mode.NATIVE)
COMPACT: dict[str, Any] = {"masters": Masters.BF16, "moments": Moments.INT8}
ALL_STATES: list[dict[str, Any]] = [COMPACT, {"masters": Masters.BF16}, {"moments": Moments.INT8}]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 40))


def gradient(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
    (1e-2 * model(x)).square().sum().backward()


def test_stochastic_rounding_keeps_the_expectation_and_takes_only_neighbours() -> None:
    values = torch.tensor([1.0 + 2**-12, -3.0 - 2**-9, 1e-30, 0.3, 2.0, 0.0, -1e20])
    drawn = noise(noise_key(3, 1, "w"), 0, 1 << 16, len(values), CPU)
    rounded = round_to_bf16(values.repeat(1 << 16, 1), drawn.weights)
    assert torch.equal(rounded, rounded.bfloat16().float())
    low, high = rounded.amin(0), rounded.amax(0)
    assert bool(((low <= values) & (values <= high)).all())
    gap = (high - low).double()
    error = (rounded.double().mean(0) - values.double()).abs()
    assert bool((error <= 5 * 0.5 * gap / math.sqrt(1 << 16)).all()), "five standard deviations of the mean"
    exact = values == values.bfloat16().float()
    assert bool((gap[exact] == 0).all())
    assert bool((gap[~exact] > 0).all())


def test_every_pattern_of_bits_is_as_frequent_and_independent_of_its_neighbours() -> None:
    bits = noise(noise_key(0, 7, "layers.0"), 5, 1 << 12, 256, CPU)
    for uniform in (bits.weights.float() * 2.0**-16, bits.first, bits.second):
        counts = torch.histc(uniform, 64, 0.0, 1.0)
        mean = uniform.numel() / 64
        assert float(((counts - mean) ** 2 / mean).sum()) < 63 + 5 * math.sqrt(2 * 63), "chi squared of 63"
        for other in (uniform.roll(1, 0), uniform.roll(1, 1)):
            assert abs(float(torch.corrcoef(torch.stack([uniform.flatten(), other.flatten()]))[0, 1])) < 5e-3
    three = torch.stack([(bits.weights.float()).flatten(), bits.first.flatten(), bits.second.flatten()])
    assert float((torch.corrcoef(three) - torch.eye(3)).abs().max()) < 5e-3


@pytest.mark.parametrize("signed", [True, False])
def test_decoded_moments_have_the_expectation_of_the_numbers(signed: bool) -> None:
    numbers = torch.logspace(-5, 0, 64) * (torch.tensor([1.0, -1.0]).repeat(32) if signed else 1.0)
    uniform = noise(9, 0, 1 << 14, 64, CPU).first
    codes, scales = encode(numbers.repeat(1 << 14, 1), uniform, signed=signed)
    assert codes.dtype is (torch.int8 if signed else torch.uint8)
    found = decode(codes, scales, signed=signed).double()
    deviation = found.std(0) / math.sqrt(1 << 14)
    assert bool(((found.mean(0) - numbers.double()).abs() <= 5 * deviation + 1e-6 * numbers.abs()).all())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 2.0**120, width=32), min_size=1, max_size=20), st.integers(0, 1 << 30))
def test_no_number_is_a_code_apart_from_its_value(numbers: list[float], key: int) -> None:
    values = torch.tensor([numbers])
    codes, scales = encode(values, noise(key, 0, 1, len(numbers), CPU).second, signed=False)
    for away in (-1, 1):
        near = decode((codes.int() + away).clamp(0, 255).to(torch.uint8), scales, signed=False)
        on_side = (values - near) * away
        tolerance = 1e-5 * values + 1e-37
        assert bool(((on_side <= tolerance) | (codes == (0 if away < 0 else 255)) | (codes == 1)).all())
    if max(numbers) > 1e-30:
        assert bool((codes >= 1).all()), "a root of 0 would be divided by"


def test_a_moment_decays_where_codes_are_further_apart_than_a_step_of_decay() -> None:
    moment = Moment(torch.Size([64, 256]), signed=False, quantised=True, device=CPU)
    whole = slice(0, 64)
    spread = torch.logspace(-6, 0, 256).repeat(64, 1)
    spread[:, -1] = 1.0
    for step in range(60):
        value = spread.clone() if step == 0 else moment.read(whole, CPU).mul_(0.95)
        value[:, -1] = 1.0  # the scale stays
        moment.write(whole, value, noise(step, 0, 64, 256, CPU).second)
    left = moment.read(whole, CPU)[:, 100:-1].mean(0) / spread[0, 100:-1]
    assert float(left.mean()) == pytest.approx(0.95**59, rel=0.15)


def test_blocks_are_parts_of_rows() -> None:
    for shape in ([5, 2048], [8, 3, 160], [64, 24, 7], [3, 17], [1, 1]):
        assert math.prod(shape[1:]) % block_size(torch.Size(shape)) == 0
    assert not Moment(torch.Size([300]), signed=True, quantised=True, device=CPU).is_quantised


def test_ten_steps_with_8_bit_moments_stay_near_those_of_float32() -> None:
    wide, narrow = layers(), layers()
    start = torch.cat([p.detach().flatten() for p in layers().parameters()])
    one = AdamW(wide, weights=LiveWeights.F32)
    other = AdamW(narrow, weights=LiveWeights.F32, moments=Moments.INT8)
    for seed in range(10):
        for model, optimizer in ((wide, one), (narrow, other)):
            gradient(model, seed)
            optimizer.step(1e-3)
    a, b = (torch.cat([p.detach().flatten() for p in model.parameters()]) - start for model in (wide, narrow))
    assert float((a - b).norm() / a.norm()) < 0.08
    assert float(nn.functional.cosine_similarity(a, b, 0)) > 0.995


def test_a_block_state_of_float32_numbers_takes_the_steps_of_the_fused_kernel() -> None:
    wide, blocks = layers(), layers()
    one = AdamW(wide, weights=LiveWeights.F32, weight_decay=0.1, grad_clip=0.01)
    other = AdamW(blocks, weights=LiveWeights.F32, weight_decay=0.1, grad_clip=0.01)
    other.kept = optimizer_state.BlockState(
        other._layout, live_is_master=True, rounds=False, quantised=False, offload=False, seed=0
    )
    for seed in range(5):
        for model, optimizer in ((wide, one), (blocks, other)):
            gradient(model, seed)
            optimizer.step(1e-2)
    for a, b in zip(wide.parameters(), blocks.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_updates_below_half_a_step_of_bf16_add_up_in_bf16_masters() -> None:
    model = nn.Linear(1, 4096, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = AdamW(model, weights=LiveWeights.BF16, masters=Masters.BF16, grad_clip=0.0)
    for _ in range(40):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step(1e-4)
    weights = model.weight.detach()
    assert torch.equal(weights, weights.bfloat16().float())
    assert 1 - float(weights.double().mean()) == pytest.approx(40 * 1e-4, rel=0.05)


@pytest.mark.parametrize("state", ALL_STATES)
def test_a_restored_optimiser_goes_on_to_the_bit(state: dict[str, Any]) -> None:
    model, other = layers(), layers()
    one, restored = (AdamW(net, weights=LiveWeights.BF16, seed=5, **state) for net in (model, other))
    for seed in range(2):
        gradient(model, seed)
        one.step(1e-2)
    restored.live.copy_(one.live)
    restored.restore({key: value.clone() for key, value in one.state().items()})
    for net, optimizer in ((model, one), (other, restored)):
        gradient(net, 3)
        optimizer.step(1e-2)
    assert torch.equal(one.live, restored.live)
    found = restored.state()
    assert all(torch.equal(value, found[key]) for key, value in one.state().items())
    again = AdamW(layers(), weights=LiveWeights.BF16, seed=6, **state)
    again.live.copy_(one.live)
    again.restore(one.state(), live=False)
    gradient(again._model, 4)
    gradient(model, 4)
    again.step(1e-2)
    one.step(1e-2)
    pairs = [(one.live, again.live), *((value, again.state()[key]) for key, value in one.state().items())]
    assert not all(torch.equal(a, b) for a, b in pairs), "the seed counts"


@pytest.mark.parametrize("state", [{}, *ALL_STATES])
@pytest.mark.parametrize("chunk", [1 << 12, 1 << 16])
def test_neither_offload_nor_the_size_of_chunks_changes_a_bit(
    state: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = layers(), layers()
    one = AdamW(model, weights=LiveWeights.BF16, weight_decay=0.1, **state)
    away = AdamW(other, weights=LiveWeights.BF16, weight_decay=0.1, offload=True, **state)
    for seed in range(3):
        gradient(model, seed)
        one.step(1e-2)
    monkeypatch.setattr(optimizer_state, "CHUNK", chunk)
    monkeypatch.setitem(moments.CHUNKS, "cpu", chunk // 8)
    for seed in range(3):
        gradient(other, seed)
        away.step(1e-2)
    assert torch.equal(one.live, away.live)


def test_a_learner_holds_what_its_settings_say(tmp_path: Path) -> None:
    save_model(Transformer(SIZES, seed=1), tmp_path / "start", dtype="f32")
    base = LearnerConfig(dtype=ComputeDtype.BFLOAT16)

    def held(setting: dict[str, Any], numerics: NumericsConfig) -> float:
        learner = TorchLearner(replace(base, **setting), numerics=numerics)
        learner.load(tmp_path / "start")
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in every(learner)}
        return sum(found.values()) / learner.model.config.num_parameters

    float32 = {"weights": LiveWeights.F32}
    for setting, numerics, planned in [
        ({}, NARROW, 20.0),
        (float32, NARROW, 16.0),
        ({"moments": Moments.INT8}, NARROW, 14.03),
        ({"masters": Masters.BF16}, NARROW, 14.0),
        (COMPACT, NARROW, 8.03),
        (COMPACT, NumericsConfig(), 10.03),
    ]:
        training = training_of(replace(base, **setting), numerics)
        assert sum(parameter_bytes(training, 1).values()) == pytest.approx(planned, rel=1e-3)
        assert held(setting, numerics) == pytest.approx(planned, rel=0.03)


def every(learner: TorchLearner) -> list[torch.Tensor]:
    optimizer = learner.optimizer
    return [*learner.model.parameters(), optimizer.live, optimizer.grad, *optimizer.state().values()]


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="keeps no float32 weights to publish: set weights = 'bf16'"):
        LearnerConfig(weights=LiveWeights.F32, masters=Masters.BF16)
    narrow = MidTrainingConfig().learner(LearnerConfig(masters=Masters.BF16), ranks=1)
    assert (narrow.weights, narrow.masters) == (LiveWeights.BF16, Masters.BF16)
    assert MidTrainingConfig().learner(LearnerConfig(), ranks=1).weights is LiveWeights.F32


def test_a_checkpoint_of_another_precision_of_masters_or_moments_is_refused_by_name(tmp_path: Path) -> None:
    save_model(Transformer(SIZES, seed=1), tmp_path / "start", dtype="f32")
    one = TorchLearner(LearnerConfig(**COMPACT))
    one.load(tmp_path / "start")
    one.save(tmp_path / "saved")
    for setting, said in (({"masters": Masters.BF16}, "moments = '8bit'"), ({"moments": Moments.INT8}, "masters")):
        with pytest.raises(CheckpointError, match=f"saved with learner.{said}"):
            TorchLearner(LearnerConfig(**setting)).load(tmp_path / "saved")


@pytest.mark.parametrize(("dtype", "numerics"), [("float32", NumericsConfig()), ("bfloat16", NARROW)])
def test_a_resumed_learner_publishes_the_same_bytes_which_are_its_masters(
    tmp_path: Path, dtype: str, numerics: NumericsConfig
) -> None:
    save_model(Transformer(SIZES, seed=1), tmp_path / "start", dtype="f32")
    given = batches(tmp_path / "start", [40, 33], steps=3, numerics=numerics, dtype=dtype)
    config = LearnerConfig(lr=1e-2, dtype=ComputeDtype(dtype), replay_routes=False, **COMPACT)

    def learner(path: Path) -> TorchLearner:
        made = TorchLearner(config, numerics=numerics, refuse_mismatch=False)
        made.load(path)
        return made

    def stepped(one: TorchLearner, batch: Batch) -> None:
        one.forward_backward(batch)
        one.optim_step()

    one = learner(tmp_path / "start")
    stepped(one, given[0])
    one.save(tmp_path / "saved")
    other = learner(tmp_path / "saved")
    for batch in given[1:]:
        stepped(one, batch)
        stepped(other, batch)
    live = one.optimizer.live
    assert live.dtype is getattr(torch, dtype)
    assert torch.equal(live.float(), live.bfloat16().float()), "what is published is all that the optimiser has"
    assert not any(key.startswith("master") for key in one.optimizer.state())
    published, again = one.exported(), other.exported()
    assert published.keys() == again.keys()
    assert all(bytes(published[name].codes) == bytes(again[name].codes) for name in published)
    codes = torch.cat(
        [torch.from_numpy(one.codes.view("i2").copy()) for one in published.values() if one.dtype == "bf16"]
    )
    assert torch.equal(codes.sort().values, live.bfloat16().view(torch.int16).sort().values)
