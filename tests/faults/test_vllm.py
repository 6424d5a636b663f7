"""A real vLLM behind its adapter, and what goes wrong: kills, models it cannot load, weights that were not packed."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests import vllm_server

from etude.errors import EngineError
from etude.evals.parity import Parity, budget_of, compare
from etude.inference.config import EngineConfig
from etude.inference.errors import EngineBusy
from etude.inference.temporary_engine import temporary_engine
from etude.inference.vllm.process import VllmProcess
from etude.models import ModelConfig, Transformer
from etude.models.checkpoint import save_model
from etude.records.adapter import B
from etude.records.completion import Completion, CompletionRequest, Sampling, Traffic, Version
from etude.stores import DirectoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.weights import Channel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), vllm_server.NEEDS_VLLM]
SIZES = ModelConfig(vocab_size=256, hidden_size=64, num_layers=2, num_experts=4, expert_size=64, context_tokens=256)
TEXT = [(7 * i * i + 3 * i) % 256 for i in range(128)]
UNPACKED = """
from etude.inference.vllm.worker import WorkerExtension as Usual
from etude.weights.follow import vllm_worker


class WorkerExtension(Usual):
    def etude_follow(self, *args):
        vllm_worker._pack_experts = lambda *_: None
        super().etude_follow(*args)
"""


def checkpoint(folder: Path) -> list[str]:
    """A tiny model's directory, and the arguments to serve it."""
    save_model(Transformer(SIZES, seed=0), folder / "model", dtype="f32")
    return ["--context-tokens", "256", "--max-sequences", "4"]


def publish(folder: Path, seed: int) -> tuple[Version, list[float]]:
    """A version, and the log-probabilities that it gives the text."""
    model = Transformer(SIZES, seed=seed).eval()
    channel = Channel(DirectoryStore(folder / "store"))
    version = channel.publish(export(model, LiveWeights.F32), step=seed, parent=None, rollout_ids=[]).version
    with torch.inference_mode():
        scores = model(torch.tensor(TEXT))[0].log_softmax(-1)
    return version, scores[:-1].gather(1, torch.tensor(TEXT)[1:, None])[:, 0].tolist()


def test_experts_that_were_not_packed_again_are_found_by_the_probe_alone(tmp_path: Path) -> None:
    async def probed(vllm: VllmProcess, store: DirectoryStore) -> tuple[Parity, list[str]]:
        async with asyncio.timeout(400):
            async with vllm_server.following(vllm, tmp_path / "model", config, store, tmp_path / "store") as engine:
                held, logprobs = await engine.verify(TEXT)
                assert held == version
                (differing,) = await vllm.call("etude_check")
                return compare(logprobs, right), differing

    checkpoint(tmp_path)
    config, store = EngineConfig(max_sequences=4, context_tokens=256), DirectoryStore(tmp_path / "store")
    version, right = publish(tmp_path, seed=1)
    budget = budget_of("float32")
    with vllm_server.serving(tmp_path / "model", config) as vllm:
        found, differing = asyncio.run(probed(vllm, store))
        assert (budget.holds(found), differing) == (True, [])
    bypassed = {"extension": "unpacked.WorkerExtension", "modules": {"unpacked": UNPACKED}}
    with vllm_server.serving(tmp_path / "model", config, **bypassed) as vllm:
        found, differing = asyncio.run(probed(vllm, store))
        assert (budget.holds(found), differing) == (False, []), "every byte is right"
        assert found.k3 > 100 * budget.k3


def test_nothing_outlives_an_adapter_that_is_killed(tmp_path: Path) -> None:
    async def run() -> None:
        async with temporary_engine(tmp_path / "model", tmp_path, *checkpoint(tmp_path)) as running:
            processes = vllm_server.left(running.process.pid)
            assert len(processes) >= 4, "the adapter, vLLM's server, its core, a worker"
            os.kill(running.process.pid, signal.SIGKILL)
            assert await vllm_server.gone(processes, within_s=10.0) == []

    asyncio.run(run())


def test_an_adapter_whose_vllm_was_killed_ends_and_fails_what_was_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        async with temporary_engine(tmp_path / "model", tmp_path, *checkpoint(tmp_path)) as running:
            sampling = Sampling(max_tokens=200, stop_token_ids=())
            ids = np.arange(8, dtype=np.int32)
            request = CompletionRequest(request_id="r", session_id="r", prompt_ids=ids, sampling=sampling)
            task = asyncio.ensure_future(running.engine.generate(request))
            while not (await running.engine.info()).num_running:  # noqa: ASYNC110 - it is another process's
                await asyncio.sleep(0.01)
            for child in psutil.Process(running.process.pid).children(recursive=True):
                child.kill()
            with pytest.raises(EngineError):
                await task
            assert await asyncio.wait_for(running.process.wait(), 30.0) != 0

    asyncio.run(run())


def test_a_model_that_vllm_cannot_load_ends_the_start_with_vllms_own_words(tmp_path: Path) -> None:
    async def run() -> None:
        save_model(Transformer(replace(SIZES, head_dim=24), seed=0), tmp_path / "model", dtype="f32")
        with pytest.raises(EngineError, match="did not start") as caught:
            async with temporary_engine(tmp_path / "model", tmp_path, "--context-tokens", "256"):
                pass
        assert "Unsupported CPU attention configuration: head_dim=24" in caught.value.facts
        assert "hint:" in caught.value.facts

    asyncio.run(run())


def test_published_adapters_are_merged_into_the_live_weights_of_a_real_vllm(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    store, config = DirectoryStore(tmp_path / "store"), EngineConfig(max_sequences=4, context_tokens=256)
    settings = LearnerConfig(weights=LiveWeights.F32, lora_rank=4, lora_alpha=8.0)
    learner = TorchLearner(settings, channel=Channel(store))
    learner.load(tmp_path / "model")
    before = learner.probe(TEXT)

    async def story(vllm: VllmProcess) -> None:
        for step in range(2):
            learner.step = step
            for name, view in learner.trainable.views().items():
                if name.endswith(B):
                    view.normal_(0.0, 0.02 * (step + 1), generator=torch.Generator().manual_seed(len(name)))
            learner.trainable.sync_model()
            version, right = learner.publish([]).version, learner.probe(TEXT)
            assert not budget_of("float32").holds(compare(before, right)), "it is another model"
            async with (
                asyncio.timeout(400),
                vllm_server.following(vllm, tmp_path / "model", config, store, tmp_path / "store") as engine,
            ):
                held, logprobs = await engine.verify(TEXT)
                assert held == version
                assert budget_of("float32").holds(compare(logprobs, right))

    with vllm_server.serving(tmp_path / "model", config) as vllm:
        asyncio.run(story(vllm))


def test_production_gets_its_first_token_before_running_rollouts_whose_tokens_do_not_change(
    tmp_path: Path,
) -> None:
    def ask(name: str, num_prompt: int, max_tokens: int, traffic: Traffic = Traffic.ROLLOUT) -> CompletionRequest:
        prompt, seed = np.random.default_rng(sum(name.encode())).integers(0, 256, num_prompt), sum(name.encode())
        return CompletionRequest(
            request_id=name,
            session_id=name,
            prompt_ids=prompt.astype(np.int32),
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(), seed=seed),
            traffic=traffic,
        )

    async def story(vllm: VllmProcess) -> None:
        folder = (tmp_path / "model", config, DirectoryStore(tmp_path / "store"), tmp_path / "store")
        async with asyncio.timeout(400), vllm_server.following(vllm, *folder) as engine:
            rollouts = [ask(f"rollout {number}", 8, 240) for number in range(4)]
            alone = [await engine.generate(request) for request in rollouts]
            first = asyncio.gather(*(engine.generate(request) for request in rollouts))
            async with asyncio.timeout(60):
                while vllm_server.total(await engine.metrics(), "vllm:generation_tokens_total") < 1200:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)  # another process counts: each has a quarter
            later = [ask(f"later {number}", 8, 200) for number in range(config.max_waiting)]
            rest = asyncio.gather(*(engine.generate(request) for request in later))
            await asyncio.sleep(0)
            with pytest.raises(EngineBusy):
                await engine.generate(ask("one more", 8, 8))
            served = vllm_server.total(await engine.metrics(), "vllm:request_success_total")
            long = ask("production", 200, 20, Traffic.PRODUCTION)  # as long a prompt as there is room for
            parts = engine.stream(long)
            assert await anext(parts)
            assert vllm_server.total(await engine.metrics(), "vllm:request_success_total") == served, "nobody had ended"
            assert isinstance([part async for part in parts][-1], Completion)
            assert engine.counters.production_requests == 1
            assert vllm_server.total(await engine.metrics(), "vllm:num_preemptions_total") >= 1
            for done, before in zip(await first, alone, strict=True):
                assert np.array_equal(done.token_ids, before.token_ids)
                assert np.allclose(done.logprobs, before.logprobs, rtol=0, atol=1e-4)
                assert np.array_equal(done.routes, before.routes)
            assert [len(done.token_ids) for done in await rest] == [200] * config.max_waiting

    checkpoint(tmp_path)
    publish(tmp_path, seed=1)
    config = EngineConfig(max_sequences=4, context_tokens=256, max_waiting=6)
    with vllm_server.serving(tmp_path / "model", config) as vllm:
        asyncio.run(story(vllm))
