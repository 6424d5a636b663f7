"""A real vLLM that follows a channel under live requests computes what a fresh one does with the same version."""

from __future__ import annotations

import pytest
from benchmarks.weights.vllm_follow import LATENT, SIZES, measure
from tests import vllm_server

from etude.inference.external.environment import environment
from etude.models import ModelConfig


@pytest.mark.slow
@pytest.mark.timeout(1800)
@vllm_server.NEEDS_VLLM
@pytest.mark.parametrize("sizes", [SIZES, LATENT], ids=["grouped", "latent"])
def test_vllm_swapped_under_requests_scores_like_a_fresh_one(sizes: ModelConfig) -> None:
    found = measure(environment().folder, num_versions=2, sizes=sizes)
    assert found["adopted"] == 3
    assert found["wrong_tensors"] == 0
    assert found["requests"]["failed"] == 0
    assert found["requests"]["over_a_swap"] > 0
    assert found["all_complete"]
    assert found["max_difference_from_a_fresh_engine"] == 0
    assert found["max_difference_from_the_first_version"] > 0
