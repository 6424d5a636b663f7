"""The size of a config's largest step is checked before anything starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.small_rollouts import Kit

from etude.errors import ConfigError
from etude.experience import Window
from etude.experience.config import ExperienceConfig
from etude.experience.credit import Credit
from etude.harness import HarnessConfig
from etude.loop.config import RunConfig
from etude.loop.preflight import TOKEN_BYTES, StepSize, check_step
from etude.models.config import ModelConfig

MODEL = ModelConfig(num_layers=48, num_experts=128, top_k=8)
CONFIG = replace(RunConfig(), experience=ExperienceConfig(groups_per_step=64, group_size=16))


def told(config: RunConfig = CONFIG, **there: int) -> list[str]:
    said: list[str] = []
    check_step(config, MODEL, said.append, **{"memory_bytes": 10**15, "disk_bytes": 10**15, **there})
    return said


def test_a_token_weighs_what_a_path_keeps_of_it() -> None:
    path = Kit.chain([(0, 20)]).path(0)
    arrays = (path.token_ids, path.mask, path.logprobs, path.steps, path.kv_epochs)
    assert sum(array.nbytes for array in arrays) == TOKEN_BYTES * len(path.token_ids)


def test_the_largest_step_has_every_rollout_fill_its_context_with_routes_where_engines_send_them() -> None:
    config = replace(CONFIG, harness=HarnessConfig(context_tokens=500))
    tokens = 64 * 16 * 500
    routes = MODEL.num_moe_layers * MODEL.top_k if config.wants_routes else 0
    assert StepSize.of(config, MODEL) == StepSize(64 * 16, tokens, tokens * (TOKEN_BYTES + routes))
    forked = replace(
        config,
        harness=replace(config.harness, summary_tokens=50, forks=4),
        experience=replace(config.experience, credit=Credit.FORK),
    )
    assert StepSize.of(forked, MODEL).rollouts == 4 * 64 * 16
    wide = replace(MODEL, num_experts=256)
    assert StepSize.of(config, wide).num_bytes == tokens * (TOKEN_BYTES + 2 * routes)
    assert np.iinfo(np.uint8).max == 255


def test_a_step_that_looks_for_signal_weighs_as_many_groups_as_it_may_take() -> None:
    picky = replace(CONFIG, experience=replace(CONFIG.experience, signal_groups=64))
    assert StepSize.of(picky, MODEL).rollouts == Window(2, 64, signal_groups=64).max_groups * 16 == 4 * 64 * 16
    with pytest.raises(ConfigError, match="256 groups of 16: 4096 rollouts"):
        told(picky, max_frame_bytes=4 * 10**6)


def test_what_lies_on_the_disk_is_counted_until_two_checkpoints_lie_behind_it() -> None:
    every, lag = CONFIG.rl.checkpoint_every, CONFIG.experience.max_lag
    [disk] = told(disk_bytes=10**6)
    assert f"rollouts of up to {lag + 1 + 2 * every} steps" in disk


def test_no_warning_is_printed_for_a_step_that_fits() -> None:
    assert told() == []


def test_memory_and_disk_that_the_largest_step_does_not_fit_are_told_by_name() -> None:
    [memory] = told(memory_bytes=10**6)
    assert "harness.context_tokens" in memory
    assert "the learner has one step in memory, and this machine has 0.001 GB of memory" in memory
    [disk] = told(disk_bytes=10**6)
    assert "steps, and 0.001 GB of disk are free here" in disk


def test_a_plan_that_fits_into_no_call_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"64 groups of 16: 1024 rollouts") as refused:
        told(max_frame_bytes=10**6)
    assert "without tokens" in refused.value.facts


def test_a_step_that_goes_on_for_signal_weighs_what_it_takes_at_most() -> None:
    picky = replace(CONFIG, experience=ExperienceConfig(groups_per_step=64, group_size=16, signal_groups=64))
    few, many = (StepSize.of(config, MODEL) for config in (CONFIG, picky))
    assert many.rollouts == picky.experience.window.max_groups * 16 == 4 * few.rollouts
    assert many.num_bytes == 4 * few.num_bytes
