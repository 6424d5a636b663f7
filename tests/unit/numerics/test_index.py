"""The choice of keys by an indexer: by its formula, in packed texts, and with the same bits for any rows and keys."""

from __future__ import annotations

import pytest
import torch

from etude.models.attention import Branch, Packed, PackedTree
from etude.numerics import Native
from etude.numerics.exact.operators import Exact
from etude.numerics.exact.options import AttentionOptions, Index
from etude.numerics.operators import Operators

LENGTHS, HEADS, KEY, VALUE, TOP = [150, 9, 70], 3, 12, 7, 20
NUM = sum(LENGTHS)
both = pytest.mark.parametrize("operators", [Exact(), Native()], ids=["exact", "native"])


def index_of(operators: Operators, seed: int = 0) -> Index:
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(NUM, 24, 11), (NUM, 24), (NUM, 11)]  # of many heads one is above 0, so that no scores are equal
    q, weights, k = (torch.randn(shape, generator=drawn) for shape in shapes)
    return Index(q, weights, k, TOP, operators.index_scores)


def by_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index) -> torch.Tensor:
    """Attention of one text, [T, H, C], float64: each token to the keys with the largest scores."""
    scores = torch.einsum("mji,ti->mjt", index.q_MJI.double(), index.k_TI.double()).relu()
    scores = torch.einsum("mj,mjt->mt", index.weights_MJ.double(), scores)
    seen = torch.zeros_like(scores, dtype=torch.bool)
    for m, row in enumerate(scores):
        seen[m, row[: m + 1].topk(min(TOP, m + 1)).indices] = True
    logits = torch.einsum("mha,tha->hmt", q.double(), k.double().expand(-1, HEADS, -1)) * KEY**-0.5
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hmt,thc->mhc", weights, v.double().expand(-1, HEADS, -1))


@both
def test_tokens_of_packed_texts_attend_to_the_keys_with_the_largest_scores(operators: Operators) -> None:
    drawn = torch.Generator().manual_seed(1)
    shapes = [(NUM, HEADS, KEY), (NUM, 1, KEY), (NUM, 1, VALUE)]
    given = [torch.randn(shape, generator=drawn).requires_grad_() for shape in shapes]
    index = index_of(operators)
    found = Packed(LENGTHS, operators).attend(0, *given, options=AttentionOptions(None, None, index))
    texts = torch.split(torch.arange(NUM), LENGTHS)
    expected = torch.cat([by_formula(*(t[rows] for t in given), index.part(rows, index.k_TI[rows])) for rows in texts])
    assert torch.allclose(found.double(), expected, atol=1e-5)
    weights = torch.randn(found.shape, generator=drawn)
    gradients = torch.autograd.grad((found * weights).sum(), given)
    for one, other in zip(gradients, torch.autograd.grad((expected * weights).sum(), given), strict=True):
        assert torch.allclose(one, other.float(), atol=1e-4)


def test_in_exact_mode_a_text_in_a_tree_has_the_bits_that_it_has_alone() -> None:
    """Two texts with 100 common tokens, of which the second has 50 others."""
    operators, drawn = Exact(), torch.Generator().manual_seed(2)
    index = index_of(operators)
    q, k, v = (torch.randn(NUM, *shape, generator=drawn) for shape in [(HEADS, KEY), (1, KEY), (1, VALUE)])
    tree = PackedTree([100, 50, 50], [Branch(0, 150, (0, 1)), Branch(100, 50, (0, 2))], operators)
    part = slice(200)
    options = AttentionOptions(None, None, index.part(part, index.k_TI[part]))
    found = tree.attend(0, q[part], k[part], v[part], options=options)
    rows = torch.cat([torch.arange(100), torch.arange(150, 200)])
    alone = AttentionOptions(None, None, index.part(rows, index.k_TI[rows]))
    assert torch.equal(Packed([150], operators).attend(0, q[rows], k[rows], v[rows], options=alone)[100:], found[150:])


def test_in_exact_mode_a_score_has_the_same_bits_beside_any_rows_and_keys() -> None:
    operators = Exact()
    index = index_of(operators)
    full = operators.index_scores(index.q_MJI, index.weights_MJ, index.k_TI)
    for row, stop in [(0, 1), (5, 13), (100, 128), (NUM - 1, NUM)]:
        one = (index.q_MJI[row : row + 1], index.weights_MJ[row : row + 1])
        assert torch.equal(operators.index_scores(*one, index.k_TI[:stop]), full[row : row + 1, :stop])
        assert torch.equal(operators.index_scores(*one, index.k_TI[None, :stop]), full[row : row + 1, :stop])


def test_of_equal_scores_the_earlier_key_is_chosen_and_hidden_keys_stay_hidden() -> None:
    index = index_of(Exact())
    equal = Index(torch.zeros_like(index.q_MJI[:2]), index.weights_MJ[:2], index.k_TI[:30], TOP, Exact().index_scores)
    mask = torch.zeros(3, 40)
    mask[:, 30:], mask[1, :4] = -torch.inf, -torch.inf
    hidden = equal.hide(mask).isinf()
    assert hidden[0].nonzero().flatten().tolist() == [*range(TOP, 40)]
    assert hidden[1].nonzero().flatten().tolist() == [0, 1, 2, 3, *range(TOP + 4, 40)]
    assert hidden[2].nonzero().flatten().tolist() == [*range(30, 40)], "padding"
