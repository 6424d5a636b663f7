"""A learner's adapter is published and merged into fused and stacked memory, as in a vLLM worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.parity.test_lora import DENSE, LORA, QWEN, shape_b_as_trained, start_of

from etude.errors import WeightsError
from etude.models import ModelConfig, hf_views
from etude.stores import MemoryStore
from etude.training import TorchLearner
from etude.weights import Channel, Follower
from etude.weights.follow import vllm_worker
from etude.weights.follow.vllm_worker import WorkerExtension, _Memory, _Rows, _WeightSync

SIZES = replace(QWEN, num_layers=1, num_kv_heads=2)


class Worker(WorkerExtension):
    """One layer's projections and experts, fused like vLLM's; its packing functions only record their calls."""

    def __init__(self, store: MemoryStore, base: Path, sizes: ModelConfig) -> None:
        head, d, f, e = sizes.head_dim, sizes.hidden_size, sizes.expert_size, sizes.num_experts
        queries, keys = sizes.num_heads * head, sizes.num_kv_heads * head
        at = "model.layers.0."
        self.live = {
            f"{at}self_attn.qkv_proj.weight": np.zeros((queries + 2 * keys, d), np.uint16),
            f"{at}self_attn.o_proj.weight": np.zeros((d, queries), np.uint16),
            f"{at}mlp.experts.w13_weight": np.zeros((e, 2 * f, d), np.uint16),
            f"{at}mlp.experts.w2_weight": np.zeros((e, d, f), np.uint16),
            "model.embed_tokens.weight": np.zeros((sizes.vocab_size, d), np.uint16),
        }
        self.packed: list[str] = []
        packing = {(name,): partial(self.packed.append, name) for name in self.live}
        memory = _Memory(dict(self.live), packing)
        make = partial(Follower, store, can_undo=False)
        self.etude_weight_sync = _WeightSync(make, memory, _Rows(queries, keys, 1), 0, base=base)

    def come(self) -> dict[str, object] | None:
        self.etude_prepare()
        waiting = self.etude_weight_sync._preparing
        assert waiting is not None
        waiting.exception(10)
        return self.etude_prepared()


def bf16(learner: TorchLearner, names: list[str]) -> np.ndarray:
    views = hf_views(learner.model)
    return np.concatenate([views[f"model.layers.0.{name}.weight"].numpy() for name in names])


def values(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_versions_are_merged_packed_once_and_undone(tmp_path: Path, dtype: str) -> None:
    store = MemoryStore()
    learner = TorchLearner(LORA, channel=Channel(store))
    learner.load(start_of(tmp_path, SIZES, dtype=dtype))
    worker = Worker(store, tmp_path / "start", SIZES)
    experts = [f"mlp.experts.{e}.{part}_proj" for e in range(4) for part in ("gate", "up")]
    seen = []
    for step in range(3):
        if step:
            shape_b_as_trained(learner)
            learner.step = step
            learner.optimizer.live.mul_(step)
            learner.trainable.sync_model()
        version = learner.publish([]).version
        assert worker.come() == vllm_worker._version_fields(version)
        worker.packed.clear()
        worker.etude_adopt()
        rest = (
            [] if dtype == "bf16" or step else ["model.embed_tokens.weight"]
        )  # no adapter's: rounded as the learner has it
        assert sorted(worker.packed) == sorted([*(name for name in worker.live if "layers" in name), *rest]), (
            "each once"
        )
        assert worker.etude_check() == []
        at = "model.layers.0."
        qkv = values(worker.live[f"{at}self_attn.qkv_proj.weight"])
        theirs = bf16(learner, [f"self_attn.{x}_proj" for x in "qkv"])
        both = values(worker.live[f"{at}mlp.experts.w13_weight"]).reshape(-1, SIZES.hidden_size)
        for found, expected in ((qkv, theirs), (both, bf16(learner, experts))):
            assert np.abs(found - expected).max() <= np.abs(expected).max() * 2**-8, "within a rounding"
            assert (found == expected).mean() > 0.99
        embedding = worker.live["model.embed_tokens.weight"]
        assert np.array_equal(values(embedding), learner.model.embedding.numpy()) or dtype == "bf16"
        seen.append(qkv)
    assert not np.array_equal(seen[1], seen[2])
    worker.etude_undo()
    assert np.array_equal(values(worker.live["model.layers.0.self_attn.qkv_proj.weight"]), seen[1])


def test_a_checkpoint_that_is_not_the_base_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    learner = TorchLearner(LORA, channel=Channel(store))
    learner.load(start_of(tmp_path, SIZES))
    learner.publish([])
    (tmp_path / "other").mkdir()
    worker = Worker(store, start_of(tmp_path / "other", SIZES, seed=6), SIZES)
    with pytest.raises(WeightsError, match="the adapter was trained on the base") as refused:
        worker.come()
    assert "hint: start the engine from the checkpoint" in str(refused.value)


def test_an_engine_without_a_place_for_a_matrix_says_which(tmp_path: Path) -> None:
    store, sizes = MemoryStore(), replace(DENSE, num_layers=1)
    learner = TorchLearner(LORA, channel=Channel(store))
    learner.load(start_of(tmp_path, sizes))
    learner.publish([])
    worker = Worker(store, tmp_path / "start", replace(sizes, num_experts=0))
    with pytest.raises(WeightsError, match="no place for"):
        worker.come()
