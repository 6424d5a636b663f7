"""The benchmark of the engine chooses the best of its peers; each way to run transformers samples what it is asked."""

from __future__ import annotations

import json

import pytest
from benchmarks.inference import engine

from etude.models import ModelConfig, Transformer
from etude.models.checkpoint import save_model

SIZES = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
                    expert_size=16, num_experts=4, top_k=2, context_tokens=256)  # fmt: skip


def speed(wall, cpu):
    return {"tokens_per_s": wall, "tokens_per_cpu_s": cpu}


def test_the_ways_that_are_measured_in_full_are_the_best_of_the_trial():
    tried = {"a": speed(10, 10), "b": speed(30, 20), "c": speed(20, 40), "d": speed(40, 30)}
    assert engine.promising(tried) == ["c", "d"]
    assert engine.promising({**tried, "e": speed(50, 5)}) == ["c", "d", "e"]


def test_the_ratio_is_of_the_fastest_peer_by_wall_and_by_cpu():
    row = {
        "etude": {"exact": speed(1000, 900), "native": speed(2000, 2700)},
        "transformers": {"float32, dynamic cache, eager": speed(500, 450)},
        "vllm": {"1, float32, eager": speed(800, 1800), "1, bfloat16, eager": speed(2000, 1000)},
    }
    found = engine.against(row)
    assert found["best_peer"] == {
        "tokens_per_s": "vLLM, 1, bfloat16, eager",
        "tokens_per_cpu_s": "vLLM, 1, float32, eager",
    }
    assert found["ratio_to_best_peer"] == {"exact": speed(0.5, 0.5), "native": speed(1.0, 1.5)}
    assert found["ratio_to_best_float32_peer"] == {"exact": speed(1.25, 0.5), "native": speed(2.5, 1.5)}
    assert engine.against({**row, "transformers": {}, "vllm": {}})["best_peer"] == {}


@pytest.mark.slow
def test_a_row_has_etude_the_ways_that_were_tried_and_the_best_of_them(monkeypatch):
    monkeypatch.setitem(engine.MODELS, "tiny", SIZES)
    monkeypatch.setattr(engine, "SAMPLED_TOKENS", 8)
    monkeypatch.setattr(engine, "TRIAL_TOKENS", 4)
    monkeypatch.setattr(engine, "SHORT_TOKENS", 2)
    ways = [
        engine.Way("eager"),
        engine.Way("grouped_mm", "bfloat16", "static"),
        engine.Way("batched_mm", cache="paged"),
    ]
    row = engine.measure("tiny", 2, 1, ways, compiles=False)
    assert list(row["transformers_tried"]) == [way.name for way in ways]
    assert set(row["transformers"]) == set(engine.promising(row["transformers_tried"]))
    assert engine.against({**row, "vllm": {}})["ratio_to_best_peer"]["native"]["tokens_per_s"] > 0
    json.dumps(row)


@pytest.mark.parametrize("cache", ["dynamic", "static", "paged"])
def test_each_cache_of_transformers_samples_as_many_tokens_as_it_is_asked(tmp_path, cache):
    save_model(Transformer(SIZES, seed=0), tmp_path, dtype="f32")
    engine.theirs(SIZES, tmp_path, engine.Way("eager", cache=cache))(2, 3)


def test_compiled_is_the_best_way_with_a_static_cache_that_can_be():
    ways = [engine.Way(e, d, c) for e in engine.EXPERTS for d in ("float32", "bfloat16") for c in ("dynamic", "static")]
    tried = {way.name: speed(1, 10) for way in ways}
    tried[engine.Way("eager", "float32", "static").name] = speed(9, 90)
    tried[engine.Way("grouped_mm", "float32", "dynamic").name] = speed(9, 80)
    tried[engine.Way("grouped_mm", "bfloat16", "static").name] = speed(5, 70)
    assert engine.compiled(ways, tried) == engine.Way("grouped_mm", "bfloat16", "compiled")


def test_what_copies_the_experts_of_each_token_is_tried_where_there_are_few():
    assert engine.ways_for(1) == engine.WAYS
    assert {way.experts for way in engine.ways_for(16)} == {"grouped_mm", "eager"}
