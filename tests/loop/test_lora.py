"""Runs of adapters: trained by the real conductor and learner, redone to the bit, exported; and one from end to end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.conftest import SMALL, Cli, Game, write_task
from tests.parity.test_lora import FAMILIES, LORA, shape_b_as_trained, start_of
from tests.played_run import PlayedRun

from etude import cli
from etude.config import build
from etude.errors import CheckpointError, ConfigError
from etude.loop.config import RunConfig
from etude.loop.export import export_adapter, export_checkpoint, export_version
from etude.loop.replay import replay_step
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.models.adapter_files import read_adapter
from etude.models.headers import check_rank, hf_weight_shapes
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.training import LiveWeights, TorchLearner
from etude.weights import lineage

SETS = ("rl.steps=3", "rl.checkpoint_every=2", "evals.every=50", "experience.max_lag=0", "learner.lora_rank=2")
DENSE = ModelConfig(**SMALL, family="qwen3", num_experts=0, top_k=0, expert_size=32, context_tokens=128)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dense(game: Game, tmp_path_factory: pytest.TempPathFactory) -> Game:
    """The game with a dense model that nobody has trained."""
    start = tmp_path_factory.mktemp("dense") / "start"
    save_model(Transformer(DENSE, seed=1), start, dtype="bf16", assets=game.start)
    return dataclasses.replace(game, start=start)


@pytest.fixture(scope="module")
def done(dense: Game, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of three steps with checkpoints at 2 and 3."""
    run = PlayedRun.create(tmp_path_factory.mktemp("played") / "r", dense, *SETS, "learner.kl=0.01")

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    run.assert_sound(3)
    return run.folder


@pytest.mark.timeout(1800)
def test_a_run_of_adapters_on_a_dense_model_is_redone_to_the_bit_from_any_checkpoint(done: RunFolder) -> None:
    for start in ("mid", "step-000002"):
        assert replay_step(done, 3, start=Path(start)).equal
    sizes = [
        sum(o.num_bytes for o in manifest.ways[0].objects)
        for manifest in lineage(DirectoryStore(done / "weights"), "policy")
    ]
    whole = (done / "checkpoints" / "mid" / "model.safetensors").stat().st_size
    assert len(sizes) == 4
    assert max(sizes) < whole / 2


@pytest.mark.timeout(1800)
def test_exported_adapters_are_the_trained_ones_merged_or_alone(
    done: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_checkpoint(done.path, tmp_path / "result", dtype="bf16")
    export_version(done, 3, tmp_path / "version", dtype="bf16")
    weights = (tmp_path / "result" / "model.safetensors").read_bytes()
    assert (tmp_path / "version" / "model.safetensors").read_bytes() == weights
    assert weights != (done / "checkpoints" / "mid" / "model.safetensors").read_bytes()
    assert cli.main(["export", str(done.path), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert cli.main(["export", f"{done.path}@3", str(tmp_path / "again"), "--adapter"]) == 0
    (mine, config), (theirs, same) = (read_adapter(tmp_path / name)[::-1] for name in ("adapter", "again"))
    assert config == same
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not list((tmp_path / "adapter").glob("learner.*"))
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["r"], told["peft_type"], "down_proj" in told["target_modules"]) == (2, "LORA", True)
    save_model(load_model(tmp_path / "adapter"), tmp_path / "merged", dtype="bf16")
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == weights
    with pytest.raises(CheckpointError, match="is not an adapter"):
        export_adapter(tmp_path / "merged", tmp_path / "none")
    capsys.readouterr()
    assert cli.main(["export", str(done.path), str(tmp_path / "low"), "--adapter", "--quantise", "mxfp8"]) != 0
    assert "an adapter cannot be quantised" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
def test_an_adapter_merged_by_numpy_is_the_model_that_transformers_computes(tmp_path: Path, sizes: ModelConfig) -> None:
    transformers = pytest.importorskip("transformers")
    learner = TorchLearner(dataclasses.replace(LORA, weights=LiveWeights.F32))
    learner.load(start_of(tmp_path, sizes, dtype="f32"))
    shape_b_as_trained(learner)
    learner.save(tmp_path / "step-1")
    export_adapter(tmp_path / "step-1", tmp_path / "adapter")
    base, pairs = (
        load_file(tmp_path / "start" / "model.safetensors"),
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
    )
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for name in [name for name in pairs if name.endswith(".lora_A.weight")]:
        product = pairs[name.replace("lora_A", "lora_B")] @ pairs[name]
        base[name.removeprefix("base_model.model.").replace(".lora_A", "")] += told["lora_alpha"] / told["r"] * product
    save_file(base, tmp_path / "start" / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    tokens = torch.arange(40) * 7 % 64
    with torch.no_grad():
        ours = learner.model.eval()(tokens)[0]
        assert np.abs((theirs(tokens[None]).logits[0] - ours).numpy()).max() < 2e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learner": {"lora_rank": -1}}, "learner.lora_rank"),
        ({"learner": {"lora_rank": 4, "lora_alpha": 0.0}}, "learner.lora_alpha"),
        ({"learner": {"lora_rank": 4, "lora_on": "router"}}, "lora_on"),
        ({"learner": {"lora_rank": 4, "balance_bias": 1e-3}}, "LoRA does not change routers"),
        (
            {"learner": {"lora_rank": 4}, "numerics": {"quantise": "mxfp8"}},
            "adapters are merged into weights that are not quantised",
        ),
    ],
)
def test_invalid_adapter_settings_are_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(RunConfig, settings)


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
def test_a_rank_at_which_an_adapter_is_no_smaller_than_its_matrix_is_refused(sizes: ModelConfig) -> None:
    least = min(math.prod(shape) // sum(shape) for name, shape in hf_weight_shapes(sizes) if "_proj" in name)
    check_rank(sizes, least)
    with pytest.raises(ConfigError, match=f"an adapter of rank above {least} is not smaller"):
        check_rank(sizes, least + 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_adapters_from_end_to_end_is_stopped_gone_on_with_evaluated_and_served(
    game: Game, cli_in: Callable[[Path], Cli], tmp_path: Path
) -> None:
    etude = cli_in(tmp_path)
    sets = ["--set", "learner.lora_rank=4", "--set", "learner.lr=4e-3"]
    first = etude("run", game.config, "--name", "r", *sets, "--set", "rl.steps=2", timeout_s=1500)
    assert first.returncode == 0, first.stderr
    told = etude("ledger", "audit", "runs/r")
    assert "0 lost, 0 trained twice" in told.stdout
    again = etude("replay", "runs/r", "2", timeout_s=1500)
    assert "identical to the bit" in again.stdout
    for split in ("train", "heldout"):  # the held-out tasks of the game have the contents of training tasks
        for i in range(4):
            write_task(tmp_path / "other" / f"{split}{i}", split, 3, name=f"{split}{i}")
    suite = 'name = "other"\npurpose = "correctness"\nsplits = ["heldout"]\n[tasks]\nsource = "other"\n'
    (tmp_path / "other.toml").write_text(suite)
    rated = etude("eval", "other.toml", "--checkpoint", "runs/r", timeout_s=1500)
    assert rated.returncode == 0, rated.stderr
    assert json.loads(rated.stdout)["version"].startswith("v000002")
