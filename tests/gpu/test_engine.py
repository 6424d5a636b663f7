"""The reference engine on a device: training's bits in exact mode, close to them natively; graphs and swaps on a GPU.

Without a GPU Triton's interpreter computes the engine's steps in exact mode; what needs a chip is skipped by name.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")

from tests.unit.models.families import FAMILIES

from etude.inference import EngineConfig
from etude.inference.device_runner import DeviceRunner, padded_sizes
from etude.inference.engine import ReferenceEngine
from etude.inference.operator_trace import engine_results
from etude.inference.scheduler import Scheduler, Sequence
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.attention import Packed
from etude.numerics.gpu import ExactGpu
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.records.completion import CompletionRequest, Sampling, Version
from etude.weights import Update
from etude.weights.delta.arrays import tensor_of
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
on_a_gpu = pytest.mark.skipif(
    not GPU, reason="no GPU here: graphs, the vendor's kernels and bfloat16 products need one"
)
SMALL = ModelConfig(
    vocab_size=512, hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, expert_size=128,
    num_experts=16, top_k=4, context_tokens=512,
)  # fmt: skip
FIRST = Version(0, "0" * 8, "0" * 64)


def request(i: int, num_prompt: int, max_tokens: int, vocab_size: int, temperature: float = 1.0) -> CompletionRequest:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(), temperature=temperature, seed=i)
    prompt = np.random.default_rng(i).integers(0, vocab_size, num_prompt).astype(np.int32)
    return CompletionRequest(request_id=f"r{i}", session_id=f"r{i}", prompt_ids=prompt, sampling=sampling)


def scheduling(chunk_tokens: int) -> Scheduler:
    return Scheduler(num_slots=4, context_tokens=24, chunk_tokens=chunk_tokens, step_tokens=chunk_tokens, max_waiting=8)


def served(
    runner: DeviceRunner, requests: list[CompletionRequest], chunk_tokens: int, scheduler: Scheduler | None = None
) -> list[Sequence]:
    """All of them together, prompts in chunks beside decoding rows."""
    scheduler = scheduler or scheduling(chunk_tokens)
    sequences = [Sequence(one, arrived=0.0) for one in requests]
    for sequence in sequences:
        scheduler.submit(sequence)
    while plan := scheduler.plan():
        runner.step(plan)
        for sequence in [s for s in scheduler.running if s.finished]:
            routes = runner.routes(sequence)
            assert len(routes) == sequence.num_computed
            sequence.close_span(FIRST)
            scheduler.finish(sequence)
    return sequences


def model(sizes: ModelConfig, operators: Operators) -> Transformer:
    return Transformer(sizes, seed=0, operators=operators).cast(operators.storage_dtype).to(DEVICE).eval()


@torch.no_grad()
def learned(of: Transformer, sequences: list[Sequence]) -> list[list[float]]:
    """Log-probabilities of the sampled tokens by a packed forward, as training computes them."""
    contexts = [[*s.request.prompt_ids.tolist(), *s.token_ids] for s in sequences]
    tokens = torch.tensor([token for context in contexts for token in context[:-1]]).to(DEVICE)
    cache = Packed([len(c) - 1 for c in contexts], of.operators, device=DEVICE)
    logprobs = of.operators.log_softmax(of.run(tokens, cache).logits)
    found, at = [], 0
    for context, sequence in zip(contexts, sequences, strict=True):
        first = at + sequence.num_prompt - 1
        targets = torch.tensor(sequence.token_ids).to(DEVICE)
        found.append(logprobs[first : first + len(targets)].gather(1, targets[:, None])[:, 0].tolist())
        at += len(context) - 1
    return found


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_in_exact_mode_the_engines_log_probabilities_are_trainings_to_the_bit(family: str) -> None:
    sizes = FAMILIES[family]
    held = model(sizes, ExactGpu(torch.bfloat16))
    requests = [request(i, (9, 2, 5)[i], (3, 5, 4)[i], sizes.vocab_size) for i in range(3)]
    runner = DeviceRunner(held, num_slots=4, context_tokens=24)
    together = served(runner, requests, chunk_tokens=4)
    assert [s.logprobs for s in together] == learned(held, together)
    (alone,) = served(DeviceRunner(held, num_slots=1, context_tokens=24), requests[:1], chunk_tokens=16)
    assert alone.logprobs == together[0].logprobs
    assert alone.token_ids == together[0].token_ids


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_fork_has_the_bits_of_a_session_that_computed_its_prefix(family: str) -> None:
    sizes = FAMILIES[family]
    held = model(sizes, ExactGpu(torch.bfloat16))
    runner, scheduler = DeviceRunner(held, num_slots=4, context_tokens=24), scheduling(4)
    first, other = request(0, 19, 3, sizes.vocab_size), request(1, 3, 4, sizes.vocab_size)
    served(runner, [first], 4, scheduler)
    prompt = np.concatenate([first.prompt_ids[:17], other.prompt_ids])
    branch = replace(other, prompt_ids=prompt, fork_from=first.session_id)
    (forked,) = served(runner, [branch], 4, scheduler)
    alone_runner = DeviceRunner(held, num_slots=1, context_tokens=24)
    (alone,) = served(alone_runner, [branch], 16)
    assert (forked.num_cached >= 17, alone.num_cached) == (True, 0)
    assert (forked.token_ids, forked.logprobs) == (alone.token_ids, alone.logprobs)
    assert np.array_equal(runner.routes(forked), alone_runner.routes(alone))


@on_a_gpu
def test_an_engines_operators_are_shown_as_training_computes_them() -> None:
    held = model(FAMILIES["qwen3-moe"], ExactGpu(torch.bfloat16))
    ids, seen = list(range(7)), dict[str, torch.Tensor]()
    with torch.no_grad():
        held.run(torch.tensor(ids).to(DEVICE), hook=lambda name, t: seen.setdefault(name, t.clone()))
    shown = engine_results(held, ids, prompt_tokens=5, chunk_tokens=4)
    assert shown.keys() == seen.keys()
    assert all(torch.equal(shown[name], seen[name]) for name in seen)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_natively_the_engine_is_close_to_training_by_graphs_and_without(dtype: torch.dtype) -> None:
    held = model(SMALL, Native(dtype))
    requests = [request(i, 3 + 40 * i, 40, SMALL.vocab_size, temperature=1.0) for i in range(4)]
    by_graph, plain = (DeviceRunner(held, num_slots=4, context_tokens=256) for _ in range(2))
    assert [g.size for g in by_graph.graphs] == padded_sizes(4)
    plain.graphs.clear()
    tolerance = 0.15 if dtype == torch.bfloat16 else 1e-3
    for runner in (by_graph, plain):
        together = served(runner, requests, chunk_tokens=64)
        for sequence, expected in zip(together, learned(held, together), strict=True):
            assert np.abs(np.array(sequence.logprobs) - np.array(expected)).max() < tolerance


@on_a_gpu
def test_weights_are_swapped_under_the_graphs_that_compute_with_them() -> None:
    held, other = model(SMALL, Native(torch.bfloat16)), Transformer(SMALL, seed=1).cast(torch.bfloat16)
    new = {name: view.clone() for name, view in hf_views(other).items()}
    tensors = {name: tensor_of(name, tensor) for name, tensor in new.items()}
    update = Update(
        Version(1, "0" * 8, "1" * 64), changed={}, replaced=tensors, removed=(), fetch_s=0.0, fetched_bytes=0
    )

    async def story() -> tuple[list[float], list[float], list[int]]:
        config = EngineConfig(max_sequences=4, context_tokens=128)
        async with ReferenceEngine(held, version=FIRST, config=config) as engine:
            swap = Target(Map(named(hf_views(held)))).prepare(update, tensors)
            running = asyncio.ensure_future(engine.generate(request(0, 9, 90, SMALL.vocab_size)))
            await asyncio.sleep(0.05)
            swapped = await asyncio.wrap_future(engine.swap(swap))
            assert swapped.pause_s < 1.0
            done = await running
            after = await engine.generate(request(1, 9, 20, SMALL.vocab_size))
            _, scores = await engine.verify([*after_ids(after)])
        return after.logprobs.tolist(), scores, [span.num_tokens for span in done.spans]

    def after_ids(completion: object) -> list[int]:
        return [*request(1, 9, 20, SMALL.vocab_size).prompt_ids.tolist(), *completion.token_ids.tolist()]  # type: ignore[attr-defined]

    sampled, scored, spans = asyncio.run(story())
    assert len(spans) == 2
    assert sum(spans) == 90
    assert np.abs(np.array(sampled) - np.array(scored[8:])).max() < 0.15
    assert all(torch.equal(view.cpu(), new[name]) for name, view in hf_views(held).items())


@on_a_gpu
def test_engine_and_learner_of_one_device_are_of_one_parity_class_that_names_the_chip_and_the_programs() -> None:
    named_class = model(SMALL, ExactGpu(torch.bfloat16)).parity
    assert named_class == model(SMALL, ExactGpu(torch.bfloat16)).parity
    assert "cuda-sm" in named_class
    assert "triton-" in named_class
