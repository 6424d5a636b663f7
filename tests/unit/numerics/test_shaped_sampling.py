from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.numerics.sampling import sample, uniform
from etude.numerics.shaped_sampling import Shape, change_logits, sample_shaped, truncate

V = 40


def shape(rows: int, *, changes: list[tuple[int, int, float, float, float]] = (), **given) -> Shape:
    """A neutral shape of some rows, except for what is given. `changes`: (row, token, bias, repetition, penalty)."""

    def each(name: str, neutral: float, dtype: torch.dtype) -> torch.Tensor:
        value = given.get(name, neutral)
        return torch.as_tensor(value if np.ndim(value) else [value] * rows, dtype=dtype)

    columns = list(zip(*changes, strict=True)) or [()] * 5
    temperature = each("temperature", 1.0, torch.float32)
    return Shape(
        uniform_R=torch.as_tensor(given.get("uniform", uniform([7] * rows, range(rows)))),
        temperature_R=torch.where(temperature == 0, 1.0, temperature),
        greedy_R=temperature == 0,
        min_p_R=each("min_p", 0.0, torch.float64),
        top_k_R=each("top_k", V, torch.int64),
        top_p_R=each("top_p", 1.0, torch.float64),
        sorts="top_k" in given or "top_p" in given,
        forbidden_RV=given.get("forbidden"),
        rows_N=torch.tensor(columns[0], dtype=torch.int64),
        tokens_N=torch.tensor(columns[1], dtype=torch.int64),
        bias_N=torch.tensor(columns[2], dtype=torch.float32),
        repetition_N=torch.tensor(columns[3], dtype=torch.float32),
        penalty_N=torch.tensor(columns[4], dtype=torch.float32),
    )


def logits(rows: int, seed: int = 0, size: int = V) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def kept(values: torch.Tensor, **given) -> torch.Tensor:
    """The truncated distributions as probabilities."""
    weights = truncate(values, shape(len(values), **given)).double()
    return weights / weights.sum(-1, keepdim=True)


def test_truncations_are_those_of_transformers():
    warpers = pytest.importorskip("transformers.generation.logits_process")
    values, ids = logits(50), torch.zeros(50, 1, dtype=torch.int64)
    for found, warper in [
        (kept(values, top_k=5), warpers.TopKLogitsWarper(5)),
        (kept(values, top_p=0.7), warpers.TopPLogitsWarper(0.7)),
        (kept(values, min_p=0.1), warpers.MinPLogitsWarper(0.1)),
    ]:
        expected = warper(ids, values.clone()).double().softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-6)
    both = warpers.TopPLogitsWarper(0.8)(ids, warpers.TopKLogitsWarper(7)(ids, values.clone()))
    torch.testing.assert_close(kept(values, top_k=7, top_p=0.8), both.double().softmax(-1), atol=1e-9, rtol=1e-6)


def test_the_repetition_penalty_is_that_of_transformers_and_the_others_are_subtracted():
    warpers = pytest.importorskip("transformers.generation.logits_process")
    values, seen = logits(1), torch.tensor([[3, 5, 3, 9]])
    expected = warpers.RepetitionPenaltyLogitsProcessor(1.7)(seen, values.clone())
    changes = [(0, token, 0.0, 1.7, 0.0) for token in (3, 5, 9)]
    assert torch.equal(change_logits(values, shape(1, changes=changes)), expected)
    less = change_logits(values, shape(1, changes=[(0, 3, 0.5, 2.0, 0.25)]))
    biased = values[0, 3] + 0.5
    assert less[0, 3] == (biased / 2 if biased > 0 else biased * 2) - 0.25
    less[0, 3] = values[0, 3]
    assert torch.equal(less, values)


@pytest.mark.parametrize("given", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5, "top_p": 0.9}])
def test_tokens_are_sampled_as_often_as_the_formula_says(given):
    count = 20_000
    row = logits(1, seed=3, size=V)
    temperature = given.get("temperature", 1.0)
    expected = kept(row / temperature, **{k: v for k, v in given.items() if k != "temperature"})[0]
    rows = row.expand(count, V)
    tokens = torch.cat(
        [
            sample_shaped(rows[at : at + 16], shape(16, **given, uniform=uniform([1] * 16, range(at, at + 16))))
            for at in range(0, count, 16)
        ]
    )
    found = torch.bincount(tokens, minlength=V).double() / count
    assert (found[expected == 0] == 0).all()
    assert (found - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def test_a_neutral_shape_samples_the_tokens_of_plain_sampling():
    values = logits(200, seed=5)
    seeds, positions = [9] * 200, np.arange(200)
    plain, _ = sample(values, [1.0] * 200, seeds, positions)
    assert torch.equal(sample_shaped(values, shape(200, uniform=uniform(seeds, positions))), plain)


def test_a_row_samples_the_same_token_in_any_batch():
    rows = 45  # more than are computed at once
    values = logits(rows, seed=1).bfloat16().float()  # with ties
    forbidden = logits(rows, seed=2) > 3
    given = {
        "top_k": torch.randint(1, V, (rows,)),
        "top_p": torch.rand(rows) * 0.9 + 0.1,
        "min_p": torch.rand(rows) * 0.1,
        "temperature": [0.0, 0.7, 1.5] * 15,
        "uniform": uniform([3] * rows, range(rows)),
    }
    changes = [(row, token, 1.0, 1.3, 0.2) for row in range(rows) for token in range(row % 5)]
    together = sample_shaped(values, shape(rows, changes=changes, forbidden=forbidden, **given))
    for row in range(rows):
        own = {name: value[row : row + 1] for name, value in given.items()}
        mine = [(0, *one[1:]) for one in changes if one[0] == row]
        alone = shape(1, changes=mine, forbidden=forbidden[row : row + 1], **own)
        assert sample_shaped(values[row : row + 1], alone)[0] == together[row]
        assert not forbidden[row, together[row]]


def test_a_forbidden_token_is_never_sampled_even_when_nothing_else_is_likely():
    values = torch.full((64, V), -1e4)
    values[:, 3] = 1e4
    forbidden = torch.zeros(64, V, dtype=torch.bool)
    forbidden[:, 3] = True
    tokens = sample_shaped(values, shape(64, forbidden=forbidden, temperature=[0.0, 1.0] * 32))
    assert 3 not in tokens.tolist()
    assert len(set(tokens.tolist())) > 10


def test_logits_that_are_not_finite_give_a_token_and_no_error():
    values = logits(4)
    values[0, 1], values[1], values[2, 5] = torch.nan, torch.nan, torch.inf
    tokens = sample_shaped(values, shape(4, top_p=0.9, top_k=5))
    assert ((tokens >= 0) & (tokens < V)).all()


def test_top_k_alone_keeps_what_sorting_keeps():
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(3)).round(decimals=1)  # with ties
    sorting = shape(5, top_k=[1, 7, 20, 2, V], top_p=1.0)
    kept = truncate(logits, replace(sorting, most_k=V))
    assert torch.equal(kept, truncate(logits, sorting))
    assert ((kept > 0).sum(1) >= torch.tensor([1, 7, 20, 2, V])).all()
    assert (kept[0] == 0).any()
