"""Shared prefixes are computed once, with the gradient, the logits and the metrics of paths computed one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models import Transformer, attention, save_model
from etude.models.attention import PackedTree
from etude.numerics import Exact, Mode, Native, NumericsConfig
from etude.numerics.operators import Operators
from etude.records import Batch, Sample
from etude.records.rollout import Path as TokenPath
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import LiveWeights
from etude.training.flat_batch import FlatBatch, flatten_samples, num_forwarded
from etude.training.packing import Cost, pack_prefixes
from etude.training.prefix_tree import PrefixOrder, PrefixTree, prefix_order
from etude.training.reference import Reference
from etude.training.routes import RouteReplay

from ..models.families import DEEPSEEK, FAMILIES
from .test_learner import SIZES, batch, changed

CONFIG = LearnerConfig(weights=LiveWeights.F32)
NATIVE = NumericsConfig(Mode.NATIVE)


def plain(name: str, tokens: list[int], mask: list[bool], advantage: float = 1.0) -> Sample:
    """A sample without routes."""
    path = TokenPath(
        token_ids=np.array(tokens, np.int32),
        mask=np.array(mask),
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        steps=np.where(mask, 0, -1).astype(np.int32),
        kv_epochs=np.zeros(len(tokens), np.int32),
        routes=np.zeros((0, 0, 0), np.uint8),
    )
    return Sample.uniform(name, path, advantage)


def forest(draw: np.random.Generator, vocabulary: int, num: int = 7, most: int = 40) -> list[Sample]:
    """Samples of which each but the first few continues another from a random token on."""
    found: list[Sample] = []
    for i in range(num):
        before: list[int] = []
        kept: list[bool] = []
        if found and draw.random() < 0.8:
            other = found[int(draw.integers(len(found)))].path
            stop = int(draw.integers(1, len(other.token_ids) + 1))
            before, kept = other.token_ids[:stop].tolist(), other.mask[:stop].tolist()
        new = int(draw.integers(2, max(3, most - len(before))))
        tokens = (before + draw.integers(0, vocabulary, new).tolist())[:most]
        mask = (kept + (draw.random(new) < 0.7).tolist())[:most]
        if draw.random() < 0.3:  # context only, as in a later branch of a rollout
            mask[: len(before)] = [False] * min(len(before), most)
        mask[0], mask[-1] = False, True
        found.append(plain(f"g.{i}", tokens, mask, float(draw.normal())))
    return found


def both(samples: list[Sample], replay: RouteReplay | None = None) -> tuple[FlatBatch, FlatBatch]:
    return flatten_samples(samples, replay), flatten_samples(samples, replay, share_prefixes=True)


# the layout


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8))
def test_every_path_is_found_in_the_tree_and_no_token_is_there_twice(paths: list[list[int]]) -> None:
    samples = [plain("g", [*path, 0], [False] * len(path) + [True]) for path in paths]
    found = prefix_order(samples, [len(path) for path in paths], None)
    tree = PrefixTree.of(found)
    distinct = {tuple(path[:stop]) for path in paths for stop in range(1, len(path) + 1)}
    assert found.num_unique == sum(tree.pieces) == len(tree.first_N) == len(distinct)
    tokens_N = torch.tensor([token for path in paths for token in path])[tree.first_N]
    positions_N = PackedTree(tree.pieces, tree.branches, Native()).positions
    starts = np.cumsum([0, *tree.pieces])
    whole = []
    for branch in tree.branches:
        whole.append([at for piece in branch.seen for at in range(starts[piece], starts[piece + 1])])
        assert len(whole[-1]) == branch.start + branch.length
    for path, index in zip(paths, torch.split(tree.index_P, [len(path) for path in paths]), strict=True):
        assert tokens_N[index].tolist() == path
        assert positions_N[index].tolist() == list(range(len(path)))
        assert any(one[: len(index)] == index.tolist() for one in whole)
    assert tree.counts_N.sum() == sum(map(len, paths))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 29)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(10, 80),
)
def test_bins_hold_each_path_once_within_the_budget(given: list[tuple[int, int]], shares: int, budget: int) -> None:
    lengths = tuple(length for length, _ in given)
    shared = [0] + [min(now, *pair) for pair, (_, now) in zip(pairwise(lengths), given[1:], strict=True)]
    found = PrefixOrder(tuple(range(len(lengths))), tuple(shared), lengths)
    rows = pack_prefixes(found, shares=shares, budget_tokens=budget, cost=Cost(100.0))
    assert sorted(i for row in rows for one in row for i in one) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == shares
        for one in row:
            new = sum(lengths[i] - (shared[i] if at else 0) for at, i in enumerate(one))
            assert new <= budget or len(one) == 1


def test_siblings_of_one_prompt_are_forwarded_together() -> None:
    found = PrefixOrder(tuple(range(32)), tuple([0, *[1000] * 7] * 4), (1100,) * 32)
    rows = pack_prefixes(found, shares=2, budget_tokens=2000, cost=Cost(1e4))
    assert [sorted(one) for row in rows for one in row] == [[*range(at, at + 8)] for at in (0, 8, 16, 24)]


# the model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("operators", "bound"),
    [(Native(torch.float64), 1e-7), (Native(), 1e-6), (Exact(), 1e-6)],
    ids=["native-f64", "native-f32", "exact-f32"],
)
def test_the_gradient_over_a_tree_is_that_of_its_paths(family: str, operators: Operators, bound: float) -> None:
    model = Transformer(FAMILIES[family], seed=3, operators=operators, dtype=operators.dtype)
    if FAMILIES[family].linear_layers and bound > 1e-7:
        bound *= 10  # the norm of a small output of the delta rule enlarges its rounding
    samples = forest(np.random.default_rng(5), FAMILIES[family].vocab_size)
    found = []
    for rows in both(samples):
        model.zero_grad()
        done = model.train().run(rows.tokens_N, rows.cache(operators), None, rows.rows_R, counts=rows.counts_N)
        logprobs = done.logits.log_softmax(-1).gather(1, rows.targets_R[:, None])[:, 0]
        loss = (logprobs * rows.advantages_R).sum() + (0 if done.balance is None else 0.3 * done.balance)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((done.logits.detach(), gradient, rows.num_forwarded))
    (logits, gradient, each), (shared_logits, shared_gradient, once) = found
    assert once < 0.8 * each
    assert float((gradient - shared_gradient).norm() / gradient.norm()) < bound
    if operators.exact:
        assert torch.equal(logits, shared_logits)
    else:
        assert torch.allclose(logits, shared_logits, rtol=0, atol=10 * bound)


def test_long_branches_have_the_bits_of_their_paths_in_exact_mode() -> None:
    sizes = replace(DEEPSEEK, context_tokens=1024)
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 24, 700).tolist()
    samples = [
        plain("g", [*prompt[:at], *draw.integers(0, 24, new).tolist()], [False] * at + [True] * new)
        for at, new in ((700, 40), (700, 150), (333, 9), (520, 1), (64, 300))
    ]
    model = Transformer(sizes, seed=1)
    bits = [model.run(r.tokens_N, r.cache(model.operators), None, r.rows_R).logits for r in both(samples)]
    assert torch.equal(*bits)


def test_copies_of_long_prefixes_are_made_again_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(FAMILIES["qwen3-moe"], seed=3)
    rows = both(forest(np.random.default_rng(5), 24))[1]
    stored: list[int] = []

    def store(tensor: torch.Tensor) -> torch.Tensor:
        stored.append(tensor.numel())
        return tensor

    found = []
    for most in (attention.MOST_COPIES, 0):
        monkeypatch.setattr(attention, "MOST_COPIES", most)
        model.zero_grad()
        stored.clear()
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            logits = model.run(rows.tokens_N, rows.cache(model.operators), None, rows.rows_R).logits
        logits.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((gradient, sum(stored)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] < found[0][1]


# the learner


def learner_of(tmp_path: Path, config: LearnerConfig = CONFIG, numerics: NumericsConfig = NATIVE, **more: object):
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")
    learner = TorchLearner(config, numerics=numerics, **more)
    learner.load(tmp_path / "start")
    return learner


@torch.no_grad()
def engine_samples(learner: TorchLearner, seed: int = 0, *, most: int = 40) -> list[Sample]:
    """Samples with the log-probabilities and routes of the learner's own weights, as an engine records them."""
    found = []
    for sample in forest(np.random.default_rng(seed), SIZES.vocab_size, most=most):
        tokens, mask = torch.from_numpy(sample.path.token_ids).long(), sample.path.mask
        done = learner.model.eval().run(tokens[:-1])
        logprobs = learner.model.operators.log_softmax(done.logits).gather(1, tokens[1:, None])[:, 0]
        missing = np.full((1, *done.routes.shape[1:]), 255, np.uint8)
        logprobs_T = np.where(mask, np.concatenate([[0], logprobs.numpy()]), 0).astype(np.float32)
        found.append(changed(sample, logprobs=logprobs_T, routes=np.concatenate([done.routes.numpy(), missing])))
    return found


def stale(sample: Sample, draw: np.random.Generator) -> Sample:
    """A sample whose sampler was so far off that some of its ratios are clipped."""
    logprobs = sample.path.logprobs + 0.4 * draw.standard_normal(len(sample.path.mask)) * sample.path.mask
    return changed(sample, logprobs=logprobs.astype(np.float32), steps=np.where(sample.path.mask, 5, -1).astype("i4"))


@pytest.mark.parametrize("numerics", [NATIVE, NumericsConfig()], ids=str)
def test_the_learners_gradient_and_report_are_those_of_paths_one_by_one(
    tmp_path: Path, numerics: NumericsConfig
) -> None:
    save_model(Transformer(SIZES, seed=9), tmp_path / "other", dtype="f32")
    config = replace(CONFIG, balance=0.1, kl=0.2, replay_routes=True)
    learner = learner_of(tmp_path, config, numerics, reference=Reference(tmp_path / "other"))
    draw = np.random.default_rng(1)
    given = batch(*(stale(sample, draw) for sample in engine_samples(learner)))
    found = []
    for share in (False, True):
        learner.share_prefixes = share
        report = learner.forward_backward(given)
        found.append((report, learner.optimizer.grad.clone()))
        learner.optimizer.clear()
    (each, gradient), (once, shared) = found
    assert each.clip_share > 0.02
    assert float((gradient - shared).norm() / gradient.norm()) < 1e-6
    assert each.num_forwarded == each.num_tokens == once.num_tokens > 1.3 * once.num_forwarded
    assert once.forwarded_per_unique == 1.0 < each.forwarded_per_unique
    for name in set(each.__struct_fields__) - {"cpu_s", "num_forwarded", "forwarded_per_unique"}:
        was, now = getattr(each, name), getattr(once, name)
        assert now == (was if was is None else pytest.approx(was, rel=1e-4, abs=1e-6)), name


def test_in_exact_mode_the_ratio_on_the_learners_own_weights_stays_one_to_the_bit(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, numerics=NumericsConfig())
    report = learner.forward_backward(batch(*engine_samples(learner)))
    assert report.num_forwarded < report.num_tokens
    assert report.fresh_ratio_max == report.ratio_max == 0.0


def test_a_sampled_token_of_two_samples_weighs_the_sum_of_both_terms(tmp_path: Path) -> None:
    learner = learner_of(tmp_path)
    (one, *_) = engine_samples(learner)
    twin = Sample.uniform("g.twin", one.path, 0.5)
    once = batch(Sample.uniform("g.0", one.path, 1.0), twin)
    report = learner.forward_backward(once)
    assert report.num_forwarded * 2 == report.num_tokens
    gradient = learner.optimizer.grad.clone()
    learner.optimizer.clear()
    alone: Batch = batch(Sample.uniform("g.0", one.path, 1.5))
    learner.forward_backward(alone)
    assert torch.allclose(2 * gradient, learner.optimizer.grad, rtol=1e-4, atol=1e-7)  # of half as many tokens


def test_tokens_with_other_routes_to_replay_are_not_shared(tmp_path: Path) -> None:
    learner = learner_of(tmp_path)
    (one, *_) = engine_samples(learner)
    routes = one.path.routes.copy()
    routes[3, 0] = routes[3, 0][::-1]
    pair = [one, changed(one, routes=routes)]
    ends = [num_forwarded(sample) for sample in pair]
    replay = RouteReplay(SIZES, step=0, max_lag=0)
    assert prefix_order(pair, ends, None).shared == (0, ends[0])
    assert prefix_order(pair, ends, replay).shared == (0, 3)
    assert prefix_order(pair, ends, RouteReplay(SIZES, step=9, max_lag=0)).shared[1] > 3  # too old to be replayed


def test_a_batch_without_a_shared_prefix_keeps_its_bits(tmp_path: Path) -> None:
    learner = learner_of(tmp_path)
    apart = [changed(s, token_ids=np.concatenate([[i], s.path.token_ids[1:]]).astype(np.int32))
             for i, s in enumerate(engine_samples(learner))]  # fmt: skip
    gradients = []
    for share in (True, False):
        learner.share_prefixes = share
        report = learner.forward_backward(batch(*apart))
        assert report.num_forwarded == report.num_tokens
        assert report.forwarded_per_unique == 1.0
        gradients.append(learner.optimizer.grad.clone())
        learner.optimizer.clear()
    assert torch.equal(*gradients)


def test_errors_name_the_sample_that_sampled_a_token(tmp_path: Path) -> None:
    rows = flatten_samples(
        [plain("a", [1, 2, 3], [False, False, True]), plain("b", [1, 2, 4], [False, False, True])], share_prefixes=True
    )
    assert rows.rows_R.tolist() == [1, 1]
    assert [rows.place(1, sample) for sample in (None, 0, 1)] == [(0, 1), (0, 1), (1, 1)]
