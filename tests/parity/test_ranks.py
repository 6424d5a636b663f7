"""Two ranks that share a model, by parts of each layer or by whole experts, compute the bits of one rank: over an
engine's cache and in a learner's packed forward; and their gradients are its gradients."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity import ranked
from tests.parity.ranked import Case, Told
from tests.parity.test_exact import DEEPSEEK, GLM, GPT_OSS, QWEN

from etude.errors import ConfigError
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.tensor_parallel import shard_dimension, shard_tensor
from etude.numerics.config import NumericsConfig, Quantise
from etude.numerics.exact.operators import Exact
from etude.numerics.factory import operators_for
from etude.numerics.formats import FORMATS
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.numerics.parallel import Parallel, Split
from etude.numerics.quantisation import QuantisedOperators
from etude.training.data_parallel import run_ranks

LATENTS = replace(DEEPSEEK, num_heads=4, num_kv_heads=4)
assert LATENTS.latent is not None
WHOLE_QUERIES = replace(LATENTS, latent=replace(LATENTS.latent, q_rank=None))
CASES = {
    "qwen float32 tensor": Case(QWEN, Exact(degree=2), Split.TENSOR),
    "qwen bfloat16 tensor": Case(QWEN, Exact(torch.bfloat16, degree=2), Split.TENSOR),
    "qwen bfloat16 expert": Case(QWEN, Exact(torch.bfloat16), Split.EXPERT),
    "deepseek float32 tensor": Case(WHOLE_QUERIES, Exact(degree=2), Split.TENSOR),
    "deepseek float16 tensor": Case(LATENTS, Exact(torch.float16, degree=2), Split.TENSOR),
    "deepseek float32 expert": Case(LATENTS, Exact(), Split.EXPERT),
    "glm bfloat16 tensor": Case(GLM, Exact(torch.bfloat16, degree=2), Split.TENSOR),
    "gpt-oss bfloat16 tensor": Case(GPT_OSS, Exact(torch.bfloat16, degree=2), Split.TENSOR),
    "gpt-oss float32 expert": Case(GPT_OSS, Exact(), Split.EXPERT),
    "native": Case(QWEN, Native(), Split.TENSOR),
}
both_ways = pytest.mark.parametrize("name", [name for name in CASES if name != "native"])


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[Told, list[Told]]]:
    """What one rank says, and each of two."""
    by_rank = run_ranks(ranked.everything, CASES, ranks=2, stall_s=900.0)
    return {name: (ranked.alone(case), [told[name] for told in by_rank]) for name, case in CASES.items()}


def together(name: str, ranks: list[Told], what: str) -> list[list[object]]:
    """What ranks say of all texts: each of all, or each of its own."""
    said = [getattr(rank, what) for rank in ranks]
    return said if CASES[name].split is Split.TENSOR else [[*said[0], *said[1]]]


@both_ways
def test_two_ranks_compute_the_bits_of_one(name: str, told: dict[str, tuple[Told, list[Told]]]) -> None:
    one, two = told[name]
    assert [scores[-ranked.NUM :] for scores in one.learner] == [logprobs for _, logprobs in one.engine]
    for what in ("engine", "learner"):
        for said in together(name, two, what):
            assert said == getattr(one, what)


@both_ways
def test_gradients_of_two_ranks_are_those_of_one_and_the_same_again(
    name: str, told: dict[str, tuple[Told, list[Told]]]
) -> None:
    one, two = told[name]
    assert one.repeated
    assert all(rank.repeated for rank in two)
    limit = 3e-6 if "float32" in name else 3e-2  # of the largest: activations' gradients are rounded to the dtype
    for tensor, whole in one.gradients.items():
        if CASES[name].split is Split.TENSOR:
            wanted = [shard_tensor(tensor, torch.from_numpy(whole), Parallel(2, rank)).numpy() for rank in range(2)]
            found = [rank.gradients[tensor] for rank in two]
        else:
            wanted, found = [whole], [sum(rank.gradients[tensor] for rank in two if tensor in rank.gradients)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert np.abs(ours - theirs).max() <= limit * np.abs(whole).max(), tensor


def test_native_operators_differ_which_shows_that_these_tests_can_fail(
    told: dict[str, tuple[Told, list[Told]]],
) -> None:
    one, two = told["native"]
    assert all(rank.engine != one.engine for rank in two)
    assert all(rank.learner != one.learner for rank in two)


def test_sums_in_another_order_differ_which_shows_why_there_is_a_tree() -> None:
    x, weight = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(0)).unbind()
    shares = [Exact(degree=4).linear_partial(a, w, 4) for a, w in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    in_a_row = shares[0] + shares[1] + shares[2] + shares[3]  # as a ring of ranks adds
    assert not torch.equal(in_a_row, Exact(degree=4).linear_partial(x, weight, 1))
    in_a_tree = (shares[0] + shares[1]) + (shares[2] + shares[3])
    assert torch.equal(in_a_tree, Exact(degree=4).linear_partial(x, weight, 1))


def test_a_rank_that_does_not_answer_is_an_error_in_the_other_that_names_the_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=ranked.lose, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        ranks[0].join(timeout=900)
        assert ranks[0].exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    hung, _, died, _ = (tmp_path / "said").read_text().splitlines()
    assert hung.startswith("True rank 0 of 2 timed out waiting for the other ranks: attention.out: the deadline")
    assert died.startswith("True rank 0 of 2 timed out waiting for the other ranks: mlp.down")


@pytest.mark.parametrize("config", [QWEN, LATENTS, WHOLE_QUERIES, GPT_OSS])
@pytest.mark.parametrize("split", Split)
def test_what_is_saved_whole_is_read_by_any_number_of_ranks(config: ModelConfig, split: Split, tmp_path: Path) -> None:
    whole = Transformer(config, seed=5, operators=Exact(degree=2))
    save_model(whole, tmp_path / "whole", dtype="f32")
    tensors, found = hf_views(whole), dict[str, list[torch.Tensor]]()
    for rank in range(2):
        parallel = Parallel(2, rank, split)
        model = load_model(tmp_path / "whole", operators=whole.operators, parallel=parallel)
        assert model.parity == whole.parity
        for name, view in hf_views(model).items():
            assert torch.equal(view, shard_tensor(name, tensors[name], parallel))
            found.setdefault(name, []).append(view)
    for name, parts in found.items():
        dimension = shard_dimension(name, Parallel(2, 0, split))
        assert torch.equal(parts[0] if dimension is None else torch.cat(parts, dimension), tensors[name])
    assert found.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("changed", "degree", "split", "hint"),
    [
        ({"num_kv_heads": 1}, 2, Split.TENSOR, "num_kv_heads = 1 cannot be divided by 2"),
        ({"expert_size": 21}, 2, Split.TENSOR, "expert_size = 21 cannot be divided by 2"),
        ({}, 3, Split.TENSOR, "use 1, 2, 4, ... tensor-parallel ranks"),
        ({}, 4, Split.TENSOR, "set numerics.degree = 4"),
        ({}, 4, Split.EXPERT, "a number of ranks that divides the number of experts"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_with_a_hint(
    changed: dict[str, int], degree: int, split: Split, hint: str
) -> None:
    with pytest.raises(ConfigError, match=hint.replace(".", r"\.")):
        Transformer(replace(QWEN, **changed), seed=None, operators=Exact(degree=2), parallel=Parallel(degree, 0, split))


def test_exact_operators_without_a_tree_over_ranks_are_refused() -> None:
    class Elsewhere(Exact):
        linear_partial = Operators.linear_partial

    with pytest.raises(ConfigError, match="elsewhere float32 degree 2 over 2 ranks"):
        Elsewhere(degree=2).linear_partial(torch.ones(3, 4), torch.ones(2, 4), 2)


def test_a_scale_of_whole_rows_cannot_be_shared_and_one_of_blocks_can() -> None:
    with pytest.raises(ValueError, match="nvfp4"):
        NumericsConfig(quantise=Quantise.NVFP4, degree=2)
    with pytest.raises(ValueError, match="degree = 3"):
        NumericsConfig(degree=3)
    with pytest.raises(ConfigError, match=r"numerics\.degree = 1"):
        QuantisedOperators(Exact(degree=2), FORMATS[Quantise.NVFP4])
    operators = operators_for(NumericsConfig(quantise=Quantise.MXFP8, degree=2), torch.bfloat16)
    x, weight = torch.randn(2, 70, 128, generator=torch.Generator().manual_seed(0)).unbind()
    x = x.bfloat16()
    shares = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    first, second = (operators.linear_partial(a, w, 2) for a, w in shares)
    assert torch.equal((first + second).bfloat16(), operators.linear_partial(x, weight, 1))
