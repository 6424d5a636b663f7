"""A checkpoint of another family, with its own tokens and template: adopted, served, trained and exported like any."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from tests import vllm_server
from tests.conftest import Cli, Game
from tests.loop.spread import SPREAD
from tests.parity import chats

from etude import cli
from etude.config import to_toml
from etude.errors import ConfigError
from etude.evals.parity import budget_of
from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.harness import ChatFormat
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.config import RunConfig
from etude.loop.export import export_checkpoint
from etude.loop.preflight import check_start
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.components import Latent, Routing, Scores, Yarn
from etude.records import Version
from etude.run import RunFolder
from etude.telemetry import Telemetry, read_events
from etude.testing import EnginePolicy

pytestmark = pytest.mark.timeout(1800)

SIZES = ModelConfig(
    vocab_size=300, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=12, expert_size=12,
    num_experts=4, top_k=2, context_tokens=2048, family="deepseek_v3", dense_layers=(0,), dense_size=20,
    num_shared=1, routing=Routing(Scores.SIGMOID), latent=Latent(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6),
)  # fmt: skip
SMALL = {
    "harness.context_tokens": 1500, "engine.context_tokens": 2048, "experience.groups_per_step": 1,
    "experience.group_size": 2, "rl.steps": 1, "rl.checkpoint_every": 1, "evals.heldout_tasks": 1,
    "evals.during_tasks": 1, "evals.baseline_tasks": 1, "harness.max_turns": 2, "harness.turn_tokens": 280,
}  # fmt: skip
TALK = [
    {"role": "user", "content": "the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "mild"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    tokens = chats.make(folder / "tokens", "deepseek")
    save_model(Transformer(SIZES, seed=0), folder / "model", dtype="bf16", assets=tokens)
    return folder / "model"


def test_a_checkpoint_started_from_is_exported_unchanged_with_its_chat_format(checkpoint: Path, tmp_path: Path) -> None:
    check_start(checkpoint, context_tokens=2048)
    with pytest.raises(ConfigError, match="positions for 2048"):
        check_start(checkpoint, context_tokens=2049)
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(RunConfig()), seed=0)
    copy_start_checkpoint(checkpoint, run)
    ours, again = ChatFormat.load(checkpoint), ChatFormat.load(run / "tokenizer")
    assert again.stop_token_ids == ours.stop_token_ids
    assert again.encode_prompt(TALK).tolist() == ours.encode_prompt(TALK).tolist()
    out = export_checkpoint(run.path, tmp_path / "out", dtype="bf16")
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert ChatFormat.load(out).encode_prompt(TALK).tolist() == ours.encode_prompt(TALK).tolist()


def test_layers_of_multi_token_prediction_are_named_on_load_and_on_export(
    checkpoint: Path, game: Game, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, file = tmp_path / "start", tmp_path / "start" / "model.safetensors"
    shutil.copytree(checkpoint, start)
    further = {f"model.layers.2.{name}": torch.ones(3, 3) for name in ("eh_proj.weight", "enorm.weight")}
    save_tensors(load_tensors(file) | further, file)
    (start / "SHA256SUMS").unlink()
    named = "dropped, since config.json has num_nextn_predict_layers = 0: model.layers.2 (2 tensors)"
    sets = [f"{key}={value}" for key, value in {**SMALL, "start": start}.items()]
    assert cli.main(["run", str(game.config), "--dry-run", *(p for one in sets for p in ("--set", one))]) == 0
    assert named in capsys.readouterr().err
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(RunConfig()), seed=0)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    copy_start_checkpoint(start, run, telemetry)
    telemetry.close()
    assert [e["layers"] for e in read_events(run / "events")] == [{"model.layers.2": 2}]
    save_model(load_model(start), run / "checkpoints" / "final", dtype="bf16", assets=start)  # as a learner leaves it
    for source in (start, run.path):
        assert cli.main(["export", str(source), str(tmp_path / f"out-{source.name}")]) == 0
        assert named in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "out-run"), str(tmp_path / "again")]) == 0
    assert capsys.readouterr().err == "", "nothing is left to be left out"


def test_the_gateway_chats_with_a_checkpoint_by_its_own_template(checkpoint: Path) -> None:
    chat = ChatFormat.load(checkpoint)

    async def story() -> None:
        config = GatewayConfig(port=0)
        version = Version(step=0, incarnation="00000000", digest="ab" * 32)
        async with ReferenceEngine(
            load_model(checkpoint), version=version, config=EngineConfig(context_tokens=512)
        ) as engine:
            model = ServedModel(EnginePolicy(engine), chat, name="deepseek", context_tokens=512, config=config)
            app = create_app([model], config=config)
            async with (
                serving(app, config=config) as url,
                openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client,
            ):
                answer = await client.chat.completions.create(model="deepseek", messages=TALK, max_tokens=5, seed=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(chat.encode_prompt(TALK))
        assert 0 < answer.usage.completion_tokens <= 5

    asyncio.run(story())


@pytest.mark.slow
def test_a_run_from_it_goes_to_its_end_and_is_served(
    checkpoint: Path, game: Game, cli_in: Callable[[Path], Cli], tmp_path: Path
) -> None:
    etude = cli_in(tmp_path)
    settings = [f"{key}={value}" for key, value in {**SMALL, "start": checkpoint}.items()]
    settings.append('rewards.terms=[{name = "spread", weight = 0.1, kind = "spread:Spread"}]')
    (tmp_path / "spread.py").write_text(SPREAD)
    ran = etude("run", game.config, "--name", "deepseek", *(part for one in settings for part in ("--set", one)))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    exported = etude("export", "runs/deepseek", "out")
    assert exported.returncode == 0, exported.stderr
    model = load_model(tmp_path / "out")
    assert model.config == SIZES
    assert hf_views(model).keys() == hf_views(load_model(checkpoint)).keys()
    server = etude.start("serve", "out", "--port", "0")
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split()[0]
        with openai.OpenAI(base_url=url if url.endswith("/v1") else url + "/v1", api_key="none", timeout=300) as client:
            model_name = client.models.list().data[0].id
            answer = client.chat.completions.create(model=model_name, messages=TALK, max_tokens=5)  # type: ignore[arg-type]
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


@pytest.mark.slow
@vllm_server.NEEDS_VLLM
def test_a_run_with_vllm_engines_replays_the_routes_of_latent_models_within_the_budget(
    game: Game, cli_in: Callable[[Path], Cli], tmp_path: Path
) -> None:
    latent = Latent(kv_rank=512, nope_dim=16, rope_dim=64, value_dim=16)  # the widths that vLLM's CPU build decodes
    sizes = replace(SIZES, hidden_size=32, head_dim=80, expert_size=32, latent=latent, yarn=Yarn(4.0, 512))
    tokens = chats.make(tmp_path / "tokens", "deepseek")
    save_model(Transformer(sizes, seed=0), tmp_path / "model", dtype="f32", assets=tokens)
    wanted = {**SMALL, "start": tmp_path / "model", "rl.steps": 3, "numerics.mode": "native"}
    settings = [f"{key}={value}" for key, value in wanted.items()] + ['fleet.engines=["vllm"]']
    settings.append('rewards.terms=[{name = "spread", weight = 0.1, kind = "spread:Spread"}]')
    (tmp_path / "spread.py").write_text(SPREAD)
    etude = cli_in(tmp_path)
    ran = etude("run", game.config, "--name", "x", *(part for one in settings for part in ("--set", one)))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    events = list(read_events(tmp_path / "runs" / "x" / "events"))
    probes = [e for e in events if e["kind"] == "engine.probe"]
    assert {e["step"] for e in probes} == {0, 1, 2, 3}
    assert all(e["k3"] <= budget_of("float32").k3 for e in probes)
    steps = [e for e in events if e["kind"] == "rl.step" and e["num_sampled"]]
    assert steps, "the weights changed"
    assert all(e["replayed_share"] == 1.0 for e in steps)
    fresh = [e["k3"] for e in steps if {*e["lag"]} == {"0"}]
    assert fresh, "sampled by the version that they train"
    assert max(fresh) <= budget_of("float32").k3


@pytest.mark.slow
def test_a_run_with_an_engine_of_two_ranks_trains_on_what_they_sampled_to_the_bit(
    checkpoint: Path, game: Game, cli_in: Callable[[Path], Cli], tmp_path: Path
) -> None:
    wanted = {**SMALL, "start": checkpoint, "rl.steps": 3, "experience.max_lag": 0}
    wanted |= {"engine.tensor_parallel": 2, "numerics.degree": 2}
    settings = [f"{key}={value}" for key, value in wanted.items()] + ['fleet.engines=["reference"]']
    settings.append('rewards.terms=[{name = "spread", weight = 0.1, kind = "spread:Spread"}]')
    (tmp_path / "spread.py").write_text(SPREAD)
    etude = cli_in(tmp_path)
    ran = etude("run", game.config, "--name", "x", *(part for one in settings for part in ("--set", one)))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    events = list(read_events(tmp_path / "runs" / "x" / "events"))
    probes = [e for e in events if e["kind"] == "engine.probe"]
    assert {e["step"] for e in probes} == {0, 1, 2, 3}, "every version was adopted"
    assert max(e["ratio_max"] for e in probes) == 0.0
    steps = [e for e in events if e["kind"] == "rl.step" and e["num_sampled"]]
    assert steps, "the weights changed"
    assert max(e["fresh_ratio_max"] for e in steps) == 0.0
