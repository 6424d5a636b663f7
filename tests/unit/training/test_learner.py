"""The learner on real, tiny weights: ratios, replay, resuming, publishing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from etude.errors import CheckpointError, ParityError, StoreError, WeightsError
from etude.models import ModelConfig, Transformer, hf_views, save_model
from etude.numerics import Mode, NumericsConfig
from etude.records import Batch, Sample
from etude.records.rollout import Path as TokenPath
from etude.records.sample import StepReport
from etude.seams import Learner
from etude.stores import MemoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import CorrectionKind, LiveWeights, OptimizerKind
from etude.training.exports import export
from etude.weights import Channel, Follower, lineage
from etude.weights.tensors import same_bits

SIZES = ModelConfig(
    vocab_size=31,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    expert_size=12,
    num_experts=4,
    top_k=2,
    context_tokens=64,
)
CONFIG = LearnerConfig(lr=1e-2, replay_routes=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")
    return tmp_path / "start"


@pytest.fixture
def learner(checkpoint: Path) -> TorchLearner:
    learner = TorchLearner(CONFIG, channel=Channel(MemoryStore()))
    learner.load(checkpoint)
    return learner


@torch.no_grad()
def sampled(learner: TorchLearner, seed: int, advantage: float = 1.0, *, temperature: float = 1.0) -> Sample:
    """A sample as an engine with the learner's weights would have produced it: two sampled stretches, then nothing."""
    generator = np.random.default_rng(seed)
    length = int(generator.integers(12, 20))
    tokens = torch.from_numpy(generator.integers(0, SIZES.vocab_size, length))
    logits, routes = learner.model.eval()(tokens[:-1])
    logprobs = (logits / temperature).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    mask = np.zeros(length, bool)
    mask[4:7] = mask[9:] = True
    path = TokenPath(
        token_ids=tokens.numpy().astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.concatenate([[0], logprobs.numpy()]), 0).astype(np.float32),
        steps=np.where(mask, learner.step, -1).astype(np.int32),
        kv_epochs=np.zeros(length, np.int32),
        routes=np.concatenate([routes.numpy(), np.full((1, 2, 2), 255, np.uint8)]),
    )
    return Sample.uniform(f"g.{seed}", path, advantage)


def batch(*samples: Sample) -> Batch:
    return Batch(
        batch_id="b000001",
        step=1,
        samples=samples,
        rollout_ids=tuple(s.rollout_id for s in samples),
        num_loss_tokens=sum(int(s.path.mask.sum()) for s in samples),
    )


def changed(sample: Sample, **fields: object) -> Sample:
    return msgspec.structs.replace(sample, path=msgspec.structs.replace(sample.path, **fields))


def test_it_is_a_learner(learner: TorchLearner) -> None:
    assert isinstance(learner, Learner)


def test_on_its_own_samples_the_ratio_is_one_and_no_expert_flips(learner: TorchLearner) -> None:
    samples = [sampled(learner, seed) for seed in range(5)]
    report = learner.forward_backward(batch(*samples))
    assert report.fresh_ratio_max is not None
    assert report.fresh_ratio_max == pytest.approx(report.ratio_max, abs=1e-9)
    assert report.ratio_max < 1e-5
    assert abs(report.k1) < 1e-6
    assert 0 <= report.k3 < 1e-9
    assert report.flipped_share == 0
    assert report.clip_share == 0
    assert report.num_sampled == sum(int(s.path.mask.sum()) for s in samples)
    assert report.num_tokens == sum(len(s.path.token_ids) - 1 for s in samples)
    assert 0 < report.entropy < np.log(SIZES.vocab_size)
    assert report.loss == pytest.approx(-1.0, abs=1e-4)  # r = 1 and advantage 1, over all tokens


@pytest.mark.parametrize("optimizer", OptimizerKind)
def test_a_steps_share_of_the_learning_rate_is_the_share_of_its_change(
    checkpoint: Path, optimizer: OptimizerKind
) -> None:
    def moved(share: float) -> tuple[float, torch.Tensor]:
        config = replace(CONFIG, optimizer=optimizer, weights=LiveWeights.F32, warmup_steps=0)
        learner = TorchLearner(config)
        learner.load(checkpoint)
        before = learner.optimizer.live.clone()
        given = msgspec.structs.replace(batch(sampled(learner, 0), sampled(learner, 1, -0.5)), lr_share=share)
        learner.forward_backward(given)
        return learner.optim_step()["lr"], learner.optimizer.live - before

    (whole_lr, whole), (lr, quarter) = moved(1.0), moved(0.25)
    assert lr == 0.25 * whole_lr
    assert float(whole.norm()) > 0
    torch.testing.assert_close(quarter, 0.25 * whole, rtol=1e-3, atol=1e-7)
    assert float(quarter.norm()) == pytest.approx(0.25 * float(whole.norm()), rel=1e-3)


def test_each_step_takes_its_own_share_of_the_learning_rate(learner: TorchLearner) -> None:
    shares = []
    for share in (0.5, 1.0, 0.25):
        learner.forward_backward(msgspec.structs.replace(batch(sampled(learner, 0)), lr_share=share))
        shares.append(learner.optim_step()["lr"])
    warm = [min(1.0, (step + 1) / CONFIG.warmup_steps) if CONFIG.warmup_steps else 1.0 for step in range(3)]
    assert shares == pytest.approx([CONFIG.lr * one * part for one, part in zip(warm, (0.5, 1.0, 0.25), strict=True)])


def test_a_wrong_logprob_on_fresh_weights_stops_the_step_by_name(learner: TorchLearner) -> None:
    good, bad = sampled(learner, 0), sampled(learner, 1)
    logprobs = bad.path.logprobs.copy()
    logprobs[10] += 0.5
    with pytest.raises(ParityError, match=r"rollout g\.1"):
        learner.forward_backward(batch(good, changed(bad, logprobs=logprobs)))
    assert not learner.optimizer.grad.any()


def test_without_a_correction_nothing_is_cut_and_with_one_a_token_its_sampler_got_wrong_moves_nothing(
    checkpoint: Path,
) -> None:
    def trained(correction: CorrectionKind, **fields: object) -> tuple[StepReport, torch.Tensor]:
        learner = TorchLearner(replace(CONFIG, correction=correction), numerics=NumericsConfig(Mode.NATIVE))
        learner.load(checkpoint)
        whole, odd = sampled(learner, 0), sampled(learner, 1)
        logprobs, mask = odd.path.logprobs.copy(), odd.path.mask.copy()
        logprobs[10] -= 3.0
        mask[10] = fields.get("keep", True)
        other = msgspec.structs.replace(odd.path, logprobs=logprobs, mask=mask)
        both = (whole, Sample.uniform(odd.rollout_id, other, 1.0))
        num_loss_tokens = int(whole.path.mask.sum() + odd.path.mask.sum())
        report = learner.forward_backward(msgspec.structs.replace(batch(*both), num_loss_tokens=num_loss_tokens))
        return report, learner.optimizer.grad.clone()

    plain, plain_grad = trained(CorrectionKind.NONE)
    masked, masked_grad = trained(CorrectionKind.MASKED)
    without, without_grad = trained(CorrectionKind.NONE, keep=False)
    assert (plain.cut_share, plain.dropped_share) == (0.0, 0.0)
    assert plain.effective_share < 0.5 < 0.99 < without.effective_share
    assert masked.dropped_share == pytest.approx(1 / masked.num_sampled)
    assert masked.effective_share == pytest.approx(1 - 1 / masked.num_sampled, abs=1e-4)
    assert masked.cut_share == pytest.approx(np.exp(3) / (np.exp(3) + masked.num_sampled - 1), rel=1e-4)
    assert masked.clip_share == 0
    assert torch.allclose(masked_grad, without_grad, atol=1e-7)
    truncated, _ = trained(CorrectionKind.TRUNCATED)
    assert truncated.cut_share == pytest.approx((np.exp(3) - 2) / (np.exp(3) + masked.num_sampled - 1), rel=1e-4)
    _, lost_grad = trained(CorrectionKind.MASKED_SEQUENCES)
    assert torch.count_nonzero(lost_grad) > 0
    assert not torch.allclose(lost_grad, plain_grad, atol=1e-5)


def test_the_hard_check_spares_stale_mixed_and_foreign_samples(learner: TorchLearner) -> None:
    first = learner.publish([])
    sample = sampled(learner, 1)
    off = changed(sample, logprobs=sample.path.logprobs - 0.5 * sample.path.mask)
    epochs = sample.path.kv_epochs.copy()
    epochs[5] = 1
    stale = changed(off, steps=np.where(sample.path.mask, 7, -1).astype(np.int32))
    for spared in (stale, changed(off, kv_epochs=epochs), changed(off, digest="ab" * 32)):
        assert learner.forward_backward(batch(spared)).fresh_ratio_max is None
    with pytest.raises(ParityError):
        learner.forward_backward(batch(changed(off, digest=first.version.digest)))


def test_a_position_without_a_route_is_named(learner: TorchLearner) -> None:
    sample = sampled(learner, 2)
    for value, what in ((255, "lacks the chosen experts"), (SIZES.num_experts, "does not exist")):
        routes = sample.path.routes.copy()
        routes[3, 1] = value
        with pytest.raises(ParityError, match=f"{what} at position 3"):
            learner.forward_backward(batch(changed(sample, routes=routes)))


def test_routes_of_another_model_are_refused_and_ignored_when_replay_is_off(checkpoint: Path) -> None:
    learner = TorchLearner(CONFIG)
    learner.load(checkpoint)
    sample = sampled(learner, 2)
    bare = changed(sample, routes=np.zeros((len(sample.path.token_ids), 0, 0), np.uint8))
    with pytest.raises(ParityError, match="routes of another model"):
        learner.forward_backward(batch(bare))
    live = TorchLearner(replace(CONFIG, replay_routes=False))
    live.load(checkpoint)
    report = live.forward_backward(batch(bare))
    assert report.ratio_max < 1e-5
    assert report.flipped_share == 0


def test_replayed_routes_are_used_and_flips_are_counted(learner: TorchLearner) -> None:
    sample = sampled(learner, 3)
    routes = sample.path.routes.copy()
    routes[:-1] = (routes[:-1] + 1) % SIZES.num_experts
    newer = changed(sample, routes=routes, steps=np.where(sample.path.mask, 5, -1).astype(np.int32))
    report = learner.forward_backward(batch(newer))
    assert report.flipped_share > 0.5
    assert report.ratio_max > 1e-3
    assert report.replayed_share == 1.0
    assert report.live_ratio_max is not None
    assert report.live_ratio_max < 1e-5  # without them it is what the sampler said


def test_the_token_budget_changes_nothing_but_memory(checkpoint: Path) -> None:
    gradients = []
    for budget in (1, 30, 10_000):
        learner = TorchLearner(replace(CONFIG, budget_tokens=budget))
        learner.load(checkpoint)
        samples = [sampled(learner, seed, advantage=seed - 2.0) for seed in range(5)]
        learner.forward_backward(batch(*samples))
        gradients.append(learner.optimizer.grad.clone())
    assert gradients[0].abs().max() > 0
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)
    assert torch.allclose(gradients[1], gradients[2], atol=1e-6)


def test_rewarded_samples_become_likelier_and_punished_ones_less(learner: TorchLearner) -> None:
    good, bad = sampled(learner, 10, 1.0), sampled(learner, 11, -1.0)
    before = [sum(learner.probe(s.path.token_ids.tolist())) for s in (good, bad)]
    facts = []
    for _ in range(3):
        learner.forward_backward(batch(good, bad))
        facts.append(learner.optim_step())
    after = [sum(learner.probe(s.path.token_ids.tolist())) for s in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert learner.step == 3
    assert facts[0]["grad_norm"] > 0
    assert facts[2]["lr"] == 1e-2


def test_the_ratio_is_of_the_distribution_sampled_from(checkpoint: Path) -> None:
    learner = TorchLearner(CONFIG, temperature=0.7)
    learner.load(checkpoint)
    assert learner.forward_backward(batch(sampled(learner, 1, temperature=0.7))).ratio_max < 1e-5


def gradient(checkpoint: Path, *samples: Sample, temperature: float = 1.0) -> tuple[StepReport, torch.Tensor]:
    learner = TorchLearner(CONFIG, temperature=temperature, refuse_mismatch=False)
    learner.load(checkpoint)
    return learner.forward_backward(batch(*samples)), learner.optimizer.grad.clone()


def test_each_token_is_weighted_by_its_own_advantage(checkpoint: Path, learner: TorchLearner) -> None:
    one, other = sampled(learner, 0), sampled(learner, 1)
    given = np.linspace(-1.0, 2.0, len(one.advantages), dtype=np.float32)
    report, found = gradient(checkpoint, msgspec.structs.replace(one, advantages=given), other)
    assert report.loss == pytest.approx(-(given.sum() + len(other.advantages)) / report.num_sampled, abs=1e-5)

    # the loss is linear in the advantages: token by token it adds up to the same gradient
    total = torch.zeros_like(found)
    for place, value in enumerate(given):
        alone = np.zeros_like(given)
        alone[place] = value
        total += gradient(checkpoint, msgspec.structs.replace(one, advantages=alone), sampled(learner, 1, 0.0))[1]
    total += gradient(checkpoint, sampled(learner, 0, 0.0), other)[1]
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)
    _, all_alike = gradient(checkpoint, one, other)
    assert not torch.allclose(found, all_alike, atol=1e-3)


def test_a_token_is_compared_at_the_temperature_that_it_was_sampled_at(checkpoint: Path, learner: TorchLearner) -> None:
    def at(temperature: float, seed: int, *, recorded: bool = True) -> Sample:
        sample = sampled(learner, seed, temperature=temperature)
        own = np.full_like(sample.advantages, temperature)
        return msgspec.structs.replace(sample, temperatures=own if recorded else None)

    report, _ = gradient(checkpoint, at(0.7, 1), at(1.0, 2, recorded=False), at(1.3, 3))
    assert report.ratio_max < 1e-5
    hot, cold = at(1.3, 1), at(0.7, 1)
    first = np.arange(len(hot.advantages)) < 3  # two turns of one path, each with its own temperature
    logprobs = hot.path.logprobs.copy()
    logprobs[4:7] = cold.path.logprobs[4:7]
    own = np.where(first, np.float32(0.7), np.float32(1.3))
    mixed = changed(msgspec.structs.replace(hot, temperatures=own), logprobs=logprobs)
    assert gradient(checkpoint, mixed)[0].ratio_max < 1e-5
    assert gradient(checkpoint, hot, temperature=0.9)[0].ratio_max < 1e-5
    assert gradient(checkpoint, msgspec.structs.replace(hot, temperatures=None))[0].ratio_max > 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_runs_own_temperature_on_each_token_changes_no_bit(
    checkpoint: Path, learner: TorchLearner, temperature: float
) -> None:
    plain = [sampled(learner, seed, seed - 1.5, temperature=temperature) for seed in range(3)]
    named = [msgspec.structs.replace(s, temperatures=np.full_like(s.advantages, temperature)) for s in plain]
    (one, grad), (two, same) = (gradient(checkpoint, *each, temperature=temperature) for each in (plain, named))
    assert torch.equal(grad, same)
    assert (one.loss, one.entropy, one.ratio_max) == (two.loss, two.entropy, two.ratio_max)


def test_a_batch_without_samples_trains_nothing_and_reports_it(learner: TorchLearner) -> None:
    report = learner.forward_backward(batch())
    assert (report.num_sampled, report.loss, report.ratio_max, report.fresh_ratio_max) == (0, 0.0, 0.0, None)


def test_the_published_weights_are_those_that_the_learner_computes_with(checkpoint: Path) -> None:
    store = MemoryStore()
    learner = TorchLearner(CONFIG, channel=Channel(store))
    learner.load(checkpoint)
    follower = Follower(store)
    root = learner.publish([])
    learner.forward_backward(batch(sampled(learner, 0)))
    learner.optim_step()
    second = learner.publish(["g.0"])
    assert (root.version.step, second.version.step) == (0, 1)
    assert learner.version == second.version
    follower.advance()
    for name, view in hf_views(learner.model).items():
        codes = torch.from_numpy(follower.tensors[name].codes.astype(np.int32)) << 16
        assert torch.equal(codes.view(torch.float32).view(view.shape), view), name


def test_weights_published_beside_training_are_those_of_the_time_of_the_offer(checkpoint: Path) -> None:
    opened = threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            assert opened.wait(30.0)
            super().put(key, data)

    store = Slow()
    learner = TorchLearner(CONFIG, channel=Channel(store))
    learner.load(checkpoint)
    held = export(learner.model, CONFIG.weights)
    learner.offer(["g.0"])
    learner.forward_backward(batch(sampled(learner, 0)))
    learner.optim_step()
    assert learner.version is None
    opened.set()
    assert learner.published().version == learner.version
    follower = Follower(store)
    follower.advance()
    assert all(same_bits(follower.tensors[name], tensor) for name, tensor in held.items())
    assert learner.publish(["g.1"]).version.step == 1
    learner.close()


def test_a_publish_that_failed_is_never_taken_for_the_one_before_and_may_be_offered_again(checkpoint: Path) -> None:
    class Refusing(MemoryStore):
        full = False

        def put(self, key: str, data: bytes) -> None:
            if self.full:
                raise StoreError("no space left", hint="free disk space")
            super().put(key, data)

    store = Refusing()
    learner = TorchLearner(CONFIG, channel=Channel(store))
    learner.load(checkpoint)
    first = learner.publish([]).version
    learner.forward_backward(batch(sampled(learner, 0)))
    learner.optim_step()
    store.full = True
    learner.offer(["g.0"])
    with pytest.raises(StoreError, match="no space left"):
        learner.published()
    with pytest.raises(WeightsError, match="no version is being published"):
        learner.published()
    assert learner.version == first
    learner.offer(["g.0"])
    with pytest.raises(StoreError, match="no space left"):
        learner.offer(["g.0"])  # it waits for the one before
    store.full = False
    assert learner.publish(["g.0"]).version.step == 1
    assert [manifest.rollout_ids for manifest in lineage(store, "policy")] == [(), ("g.0",)]
    learner.close()


def test_a_learner_begins_anew_whatever_its_last_publish_failed_with(checkpoint: Path) -> None:
    class Broken(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise MemoryError(key)

    learner = TorchLearner(CONFIG, channel=Channel(Broken()))
    learner.load(checkpoint)
    learner.offer(["g.0"])
    learner.close()
    learner.load(checkpoint)
    assert learner.version is None


def test_a_learner_that_begins_anew_waits_for_what_it_still_publishes(checkpoint: Path) -> None:
    opened, closed = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            assert opened.wait(30.0)
            super().put(key, data)

    store = Slow()
    learner = TorchLearner(CONFIG, channel=Channel(store))
    learner.load(checkpoint)
    learner.offer(["g.0"])
    end = threading.Thread(target=lambda: (learner.close(), closed.set()))
    end.start()
    assert not closed.is_set()
    opened.set()
    end.join(30.0)
    assert closed.is_set()
    assert [manifest.rollout_ids for manifest in lineage(store, "policy")] == [("g.0",)]
    with pytest.raises(WeightsError, match="no version is being published"):
        learner.published()


def test_publishing_without_a_channel_says_so(checkpoint: Path) -> None:
    learner = TorchLearner(CONFIG)
    learner.load(checkpoint)
    with pytest.raises(WeightsError, match="no channel"):
        learner.publish([])


@pytest.mark.parametrize("weights", list(LiveWeights))
def test_a_reloaded_learner_goes_on_to_the_bit(tmp_path: Path, checkpoint: Path, weights: LiveWeights) -> None:
    first, second = (TorchLearner(replace(CONFIG, weights=weights), num_steps=4) for _ in range(2))
    first.load(checkpoint)
    samples = [sampled(first, seed) for seed in range(3)]
    for learner in (first, second):
        for _ in range(2):
            if learner is first:
                learner.forward_backward(batch(*samples))
                learner.optim_step()
        if learner is first:
            learner.save(tmp_path / "saved")
        else:
            learner.load(tmp_path / "saved")
        stale = [changed(s, steps=np.where(s.path.mask, 0, -1).astype(np.int32)) for s in samples]
        learner.forward_backward(batch(*stale))
        learner.optim_step()
    assert first.step == second.step == 3
    assert torch.equal(first.optimizer.state()["master"], second.optimizer.state()["master"])


def test_the_last_published_version_survives_a_restart(tmp_path: Path, learner: TorchLearner) -> None:
    published = learner.publish([])
    learner.save(tmp_path / "saved")
    again = TorchLearner(CONFIG)
    again.load(tmp_path / "saved")
    assert again.version == published.version


def test_a_damaged_or_foreign_checkpoint_leaves_the_learner_as_it_was(tmp_path: Path, learner: TorchLearner) -> None:
    learner.save(tmp_path / "saved")
    before = learner.model
    (tmp_path / "saved" / "learner.json").write_text('{"format": 1, "step": "x"}')
    with pytest.raises(CheckpointError, match=r"learner\.json is damaged"):
        learner.load(tmp_path / "saved")
    assert learner.model is before
    learner.save(tmp_path / "saved")
    other = TorchLearner(replace(CONFIG, weights=LiveWeights.F32))
    with pytest.raises(CheckpointError, match="weights = 'bf16'"):
        other.load(tmp_path / "saved")


def test_nothing_works_before_a_load() -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        TorchLearner(CONFIG).probe([1, 2])


def test_a_path_that_two_weights_of_one_step_sampled_is_not_held_to_ratio_one(learner: TorchLearner) -> None:
    """An engine that adopts step 0 in mid-rollout goes from what it started with to what was published: one step, two
    digests, so the path names none."""
    first = learner.publish([])
    off = changed(sampled(learner, 1), digest="")
    logprobs = np.where(off.path.mask, off.path.logprobs - np.float32(0.5), 0).astype(np.float32)
    report = learner.forward_backward(batch(changed(off, logprobs=logprobs)))
    assert report.fresh_ratio_max is None
    with pytest.raises(ParityError):
        learner.forward_backward(batch(changed(off, logprobs=logprobs, digest=first.version.digest)))


def test_replay_is_for_native_numbers_and_stops_at_a_lag_token_by_token(checkpoint: Path) -> None:
    config = replace(CONFIG, replay_routes=None)
    reports = []
    for mode in Mode:
        learner = TorchLearner(config, numerics=NumericsConfig(mode=mode), refuse_mismatch=False)
        learner.load(checkpoint)
        sample = sampled(learner, 3)
        learner.step = 5
        steps = np.where(np.arange(len(sample.path.mask)) < 9, 3, 4).astype(np.int32)
        reports.append(learner.forward_backward(batch(changed(sample, steps=steps))))
    exact, native = reports
    assert exact.replayed_share == 0.0
    assert exact.live_k3 is None
    assert native.replayed_share == pytest.approx((native.num_tokens - 8) / native.num_tokens)
    assert native.live_k3 is not None


def test_implausible_experts_are_counted_and_not_used(checkpoint: Path) -> None:
    shares = []
    for plausible in (0.0, 1.0):
        learner = TorchLearner(replace(CONFIG, replay_plausible=plausible), refuse_mismatch=False)
        learner.load(checkpoint)
        sample = sampled(learner, 3)
        routes = sample.path.routes.copy()
        routes[:-1] = (routes[:-1] + 1) % SIZES.num_experts
        report = learner.forward_backward(batch(changed(sample, routes=routes)))
        shares.append(report.replaced_share)
        assert (report.ratio_max < 1e-5) == (plausible == 1.0)
    assert shares[0] == 0.0 < shares[1] < 1.0


@pytest.mark.parametrize("optimizer", OptimizerKind)
def test_a_batch_without_a_gradient_moves_no_weight_and_no_moment_and_is_published_as_it_is(
    checkpoint: Path, optimizer: OptimizerKind
) -> None:
    store = MemoryStore()
    learner = TorchLearner(replace(CONFIG, optimizer=optimizer), channel=Channel(store))
    learner.load(checkpoint)
    learner.forward_backward(batch(sampled(learner, 0), sampled(learner, 1, -1.0)))
    learner.optim_step()
    first = learner.publish(["g.0", "g.1"])
    follower = Follower(store)
    follower.advance()
    state = {name: vector.clone() for name, vector in learner.optimizer.state().items()}
    for samples in ((), (sampled(learner, 2, 0.0),)):
        learner.forward_backward(batch(*samples))
        assert learner.optim_step()["grad_norm"] == 0.0
    assert all(torch.equal(vector, state[name]) for name, vector in learner.optimizer.state().items())
    assert (learner.step, learner.optimizer.num_steps) == (3, 1)
    again = learner.publish(["g.2"])
    assert again.version.digest == first.version.digest
    assert (again.version.step, again.changed_share, again.object_bytes < first.snapshot_bytes / 10) == (3, 0.0, True)
    follower.advance()
    assert follower.version == again.version
    assert lineage(store, "policy")[-1].rollout_ids == ("g.2",)
    learner.forward_backward(batch(sampled(learner, 3)))
    assert learner.optim_step()["grad_norm"] > 0.0
    assert not torch.equal(learner.optimizer.state()["first"], state["first"])
