"""A real vLLM serves a model of DeepSeek-V3's shape, and follows its versions under requests in flight."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import vllm_server

from etude.errors import EngineError
from etude.evals.parity import budget_of, compare
from etude.inference.config import EngineConfig
from etude.inference.external.engine import ExternalEngine
from etude.inference.vllm.process import VllmProcess
from etude.models import ModelConfig, Transformer
from etude.models.checkpoint import save_model
from etude.models.components import Latent, Routing, Scores, Yarn
from etude.models.weight_views import hf_views
from etude.records.adapter import B
from etude.records.completion import CompletionRequest, Sampling, Version
from etude.stores import DirectoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.weights import Channel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), vllm_server.NEEDS_VLLM]
LATENT = Latent(kv_rank=512, nope_dim=16, rope_dim=64, value_dim=24, q_rank=48)
SIZES = ModelConfig(
    family="deepseek_v3", vocab_size=256, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=80,
    dense_layers=(0,), dense_size=96, expert_size=64, num_experts=8, top_k=3, num_shared=1, context_tokens=256,
    routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=4, top_groups=2),
    latent=LATENT,
    yarn=Yarn(factor=4.0, original_tokens=64, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
TEXT = [(7 * i * i + 3 * i) % 256 for i in range(128)]
CONFIG = EngineConfig(max_sequences=4, context_tokens=256)
SWAPS = 4


def random_model(seed: int) -> Transformer:
    """A model whose selection biases are as random as its weights."""
    model = Transformer(SIZES, seed=seed).eval()
    for name, bias in hf_views(model).items():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(seed))
    return model


def ask(name: str, max_tokens: int) -> CompletionRequest:
    prompt, seed = np.random.default_rng(sum(name.encode())).integers(0, 256, 24), sum(name.encode())
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(), seed=seed)
    return CompletionRequest(request_id=name, session_id=name, prompt_ids=prompt.astype(np.int32), sampling=sampling)


async def check(engine: ExternalEngine, vllm: VllmProcess, version: Version, model: torch.nn.Module) -> None:
    """Every byte is the version's; so are the log-probabilities of prompts and of decoded tokens, and the routes."""
    assert [wrong for rank in await vllm.call("etude_check") for wrong in rank] == []
    held, scored = await engine.verify(TEXT)
    assert held == version
    done = await engine.generate(request := ask(f"alone {version.step}", 48))
    assert [span.version for span in done.spans] == [version]
    text, ids = torch.tensor(TEXT), torch.from_numpy(np.concatenate([request.prompt_ids, done.token_ids])).long()
    with torch.inference_mode():
        prompt, (decoded, routes) = model(text)[0].log_softmax(-1), model(ids)
    right = prompt[:-1].gather(1, text[1:, None])[:, 0].tolist()
    after = decoded.log_softmax(-1)[23:-1].gather(1, ids[24:, None])[:, 0].tolist()
    assert budget_of("float32").holds(compare(scored, right))
    assert budget_of("float32").holds(compare(done.logprobs, after)), "vLLM decodes with copies or views of kv_b_proj"
    assert done.routes is not None
    assert np.array_equal(np.sort(done.routes, -1), np.sort(routes.numpy()[:-1], -1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_swaps_of_latent_attention_under_requests_write_every_tensor_and_compute_the_version(
    tmp_path: Path, ranks: int
) -> None:
    async def story(vllm: VllmProcess) -> None:
        folders = (tmp_path / "model", CONFIG, store, tmp_path / "store")
        async with asyncio.timeout(900), vllm_server.following(vllm, *folders) as engine:
            await check(engine, vllm, versions[0], random_model(1))
            running = [asyncio.ensure_future(engine.generate(ask(f"running {i}", 220))) for i in range(2)]
            for step in range(1, SWAPS + 1):
                while len(running) < 2 + step and not any(task.done() for task in running):
                    running.append(asyncio.ensure_future(engine.generate(ask(f"later {step}", 120))))
                model = random_model(1 + step)
                tensors = export(model, LiveWeights.F32)
                versions.append(channel.publish(tensors, step=step, parent=versions[-1], rollout_ids=[]).version)
                assert await engine.adopt(step, deadline_s=120.0) == versions[-1]
                await check(engine, vllm, versions[-1], model)
            swapped = 0
            for done in await asyncio.gather(*running):
                at = [versions.index(span.version) for span in done.spans]
                assert at == list(range(at[0], at[0] + len(at)))
                assert sum(span.num_tokens for span in done.spans) == len(done.token_ids)
                swapped += len(at) > 1
            assert swapped, "no swap came under a request"

    save_model(random_model(0), tmp_path / "model", dtype="f32")
    store = DirectoryStore(tmp_path / "store")
    channel = Channel(store)
    first = export(random_model(1), LiveWeights.F32)
    versions = [channel.publish(first, step=0, parent=None, rollout_ids=[]).version]
    arguments = [f"--tensor-parallel-size={ranks}"]
    with vllm_server.serving(tmp_path / "model", CONFIG, arguments=arguments) as vllm:
        asyncio.run(story(vllm))


def test_adapters_are_merged_into_the_matrices_of_latent_attention(tmp_path: Path) -> None:
    save_model(random_model(0), tmp_path / "model", dtype="f32")
    store = DirectoryStore(tmp_path / "store")
    settings = LearnerConfig(weights=LiveWeights.F32, lora_rank=4, lora_alpha=8.0)
    learner = TorchLearner(settings, channel=Channel(store))
    learner.load(tmp_path / "model")

    async def story(vllm: VllmProcess) -> None:
        for step in range(2):
            learner.step = step
            for name, view in learner.trainable.views().items():
                if name.endswith(B):
                    view.normal_(0.0, 0.05 * (step + 1), generator=torch.Generator().manual_seed(len(name)))
            learner.trainable.sync_model()
            version = learner.publish([]).version
            folders = (tmp_path / "model", CONFIG, store, tmp_path / "store")
            async with asyncio.timeout(400), vllm_server.following(vllm, *folders) as engine:
                await check(engine, vllm, version, learner.model)

    with vllm_server.serving(tmp_path / "model", CONFIG) as vllm:
        asyncio.run(story(vllm))
    adapted = {name.split(".")[-3] for name in learner.trainable.views()}
    assert {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"} <= adapted


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"latent": replace(LATENT, kv_rank=32)}, r"512 \+ 64 numbers .*, and the model's have 32 \+ 64"),
        ({"yarn": None}, "RoPE without YaRN rotates queries of latent attention wrongly"),
    ],
)
def test_what_the_cpu_build_computes_wrongly_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    save_model(Transformer(replace(SIZES, **changed), seed=0), tmp_path / "model", dtype="f32")
    with pytest.raises(EngineError, match=why), vllm_server.serving(tmp_path / "model", CONFIG):
        pass
