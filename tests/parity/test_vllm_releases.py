"""Releases on a real vLLM, through `etude serve`, with requests all the time."""

from __future__ import annotations

import pytest
from benchmarks.production.release_engines import measure
from tests import vllm_server


@pytest.mark.slow
@pytest.mark.timeout(3600)
@vllm_server.NEEDS_VLLM
def test_users_of_vllm_get_their_version_through_canary_promotion_and_rollback() -> None:
    found = measure("vllm", seconds=8.0)
    assert found["failed"] == 0, found
    assert found["wrong"] == 0, found
    assert found["of_no_version"] == 0, found
    assert found["settled_requests"] > 0
    assert all(found["answers_of_steps_1_2_3"]), found
    rollbacks = {name: one for name, one in found["phases"].items() if name.startswith("rollback")}
    assert sum(one["requests_running"] for one in rollbacks.values()) > 0, "rollbacks with requests in flight"
