"""The benchmarks for a GPU run from end to end on a model of no size, here; what they count is right."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu import learner as gpu_learner
from benchmarks.gpu import parity as gpu_parity
from benchmarks.gpu import swap as gpu_swap
from benchmarks.gpu.model import TINY, Peaks, Work, qwen, random_model
from benchmarks.report import commit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from etude.models import Transformer
from etude.numerics.native import Native

CPU = torch.device("cpu")
MADE_UP = Peaks("a chip", 1e12, 1e11, 0.8e12, 0.9e11)


def test_the_work_of_a_forward_is_what_torch_counts() -> None:
    model = random_model(TINY, Native(), torch.float32, CPU).eval()
    tokens, rows = torch.arange(16), torch.arange(0, 16, 4)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model(tokens, rows=rows)  # with a gradient: kernels of our own are not counted
    ours = Work(TINY).forward(16, 4, pairs=16 * 16)  # torch counts those that a mask hides, too
    assert counted.get_total_flops() == ours


def test_bytes_and_parameters_of_the_shapes_are_those_of_models_made_of_them() -> None:
    made = Transformer(TINY, seed=None)
    assert Work(TINY).weight_bytes == 2 * (sum(p.numel() for p in made.parameters()) - made.embedding.numel())
    kept = TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim
    assert Work(TINY).kept_bytes == 2 * kept
    assert 9.2e9 < qwen(14, 2048).num_parameters < 9.4e9
    assert 4.3e9 < gpu_learner.FULL.sizes.num_parameters < 4.4e9


def test_at_the_critical_batch_computing_takes_as_long_as_reading_weights() -> None:
    work = Work(qwen(14, 2048))
    batch = work.critical_batch(989.4e12, 4.8e12)
    assert work.forward(batch, batch, 0) / 989.4e12 == pytest.approx(work.weight_bytes / 4.8e12, rel=1e-3)
    assert gpu_engine.bound(Work(TINY), 4, 10, MADE_UP)[0] == pytest.approx(
        (Work(TINY).weight_bytes + 40 * Work(TINY).kept_bytes) / 1e11
    )


def test_each_part_runs_on_a_tiny_model() -> None:
    learner = gpu_learner.measure(gpu_learner.QUICK, CPU, MADE_UP)
    assert learner["mfu_step"] >= 0
    assert learner["max_abs_dlogprob"] < 0.1
    engine = gpu_engine.measure(gpu_engine.QUICK, CPU, MADE_UP)
    assert [row["batch"] for row in engine["decode"]] == [1, 3]
    parity = gpu_parity.measure(gpu_parity.QUICK, CPU)
    assert parity["exact"]["differing"] == 0
    assert 0 < parity["native"]["max_abs_dlogprob"] < 0.2
    swaps = asyncio.run(gpu_swap.under_load(gpu_swap.QUICK, CPU))
    assert (swaps["differing_after_the_last"], swaps["requests_failed"]) == (0, 0)
    assert swaps["spans_of_the_first"] == 1 + gpu_swap.QUICK.swaps


def test_a_part_that_hangs_or_fails_costs_itself_alone_and_is_told() -> None:
    hangs = gpu.run(gpu.Part("hangs", ("http.server", "0", "--bind", "127.0.0.1"), 1.0), quick=False, limit_s=1.0)
    assert hangs["ended"] == "over its limit"
    fails = gpu.run(gpu.Part("fails", ("json.tool", "nowhere.json"), 30.0), quick=False, limit_s=30.0)
    assert fails["ended"] != 0
    assert "nowhere.json" in fails["last_words"]


def test_parts_that_went_well_at_this_commit_and_on_this_device_are_not_done_again(tmp_path: Path) -> None:
    path, parts = (
        tmp_path / "gpu.json",
        {"good": {"ended": 0}, "bad": {"ended": 1}, "late": {"ended": "over its limit"}},
    )
    assert gpu.kept(path, "a chip") == {}
    path.write_text(json.dumps({"commit": commit(), "device": "a chip", "parts": parts}))
    assert gpu.kept(path, "a chip") == {"good": {"ended": 0}}
    assert gpu.kept(path, "another chip") == {}
    path.write_text(json.dumps({"commit": "0" * 12, "device": "a chip", "parts": parts}))
    assert gpu.kept(path, "a chip") == {}
