"""What `etude parity` compares: flags first, then a run's own settings, then defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli import main
from etude.cli.commands import build_parser
from etude.cli.parity import _settings
from etude.config import to_toml
from etude.errors import InputError
from etude.inference.config import EngineConfig
from etude.loop.config import RunConfig
from etude.loop.parity import ParityConfig
from etude.models import ModelConfig, Transformer, save_model
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig, Quantise
from etude.run import RunFolder

SIZES = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, expert_size=32,
    num_experts=8, top_k=2, context_tokens=64,
)  # fmt: skip
MIXED = RunConfig(
    numerics=NumericsConfig(Mode.NATIVE),
    engine=EngineConfig(dtype=ComputeDtype.BFLOAT16),
    parity=ParityConfig(ratio_p99=0.25),
)


def run_of(folder: Path, config: RunConfig) -> Path:
    """A run folder that has its first checkpoint."""
    run = RunFolder.create(folder, config_toml=to_toml(config), seed=0)
    save_model(Transformer(SIZES), run / "checkpoints" / "mid", dtype="bf16")
    return run.path


def asked(*words: object) -> tuple[object, ...]:
    one = _settings(build_parser().parse_args(["parity", *map(str, words)]))
    return one.mode, one.dtype, one.learner_dtype, one.quant, one.budget.ratio_p99


def test_a_runs_own_settings_are_taken_where_no_flag_says_otherwise(tmp_path: Path) -> None:
    mixed = run_of(tmp_path / "mixed", MIXED)
    assert asked(mixed) == ("native", "bfloat16", "float32", "none", 0.25)
    assert asked(mixed, "--dtype", "float16") == ("native", "float16", "float16", "none", 0.25)
    assert asked(mixed, "--learner-dtype", "bfloat16") == ("native", "bfloat16", "bfloat16", "none", 0.25)
    assert asked(mixed, "--mode", "exact", "--dtype", "float32") == ("exact", "float32", "float32", "none", 0.0)
    low = run_of(tmp_path / "low", RunConfig(numerics=NumericsConfig(quantise=Quantise.MXFP8)))
    assert asked(low) == ("exact", "float32", "float32", "mxfp8", 0.0)
    assert asked(low, "--engine", "transformers") == ("native", "float32", "float32", "none", 1e-3)
    with pytest.raises(InputError, match="needs one dtype"):
        asked(mixed, "--mode", "exact")


def test_an_engine_in_bf16_under_a_float32_learner_is_near_and_no_operator_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "mixed", MIXED)
    assert main(["parity", str(run), "--json", "--prompts", "3", "--tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["operators_shown"], found["findings"]) == ("near", True, [])
    assert found["ways"]["batched"]["live"]["num_differing"] > 0
