"""The code in the guide to numerics runs as printed, and its budgets are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etude.cli.commands import build_parser
from etude.evals.parity import budget_of
from etude.inference.server import _parser as server_parser
from etude.models import ModelConfig, Transformer, save_model

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "numerics.md").read_text()


def test_the_guides_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, ranks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(alone, {})
    assert capsys.readouterr().out.startswith("equal [0.0, 0.0, 0.0, 0.0]\n")
    sizes = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)
    model = Transformer(replace(sizes, expert_size=32, num_experts=4, top_k=2))
    save_model(model, tmp_path / "checkpoint", dtype="f32")
    (tmp_path / "this.py").write_text(ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "this.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_guide_is_one() -> None:
    commands = re.findall(r"^etude ((?:parity|replay) [^|#\n]*)", GUIDE, re.M)
    assert len(commands) == 9
    for command in commands:
        build_parser().parse_args(command.replace("STEP", "30").split())
    [server] = re.findall(r"^python -m etude.inference.server (.*)$", GUIDE, re.M)
    assert server_parser().parse_args(server.split()).show_operators


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_budgets_of_the_guide_are_those_that_hold(dtype: str) -> None:
    for key in ("k3", "ratio_p99"):
        row = next(line for line in GUIDE.splitlines() if line.startswith(f"| `{key}` |"))
        [said] = re.findall(rf"\b{dtype} ([\d.e-]+)", row)
        assert float(said) == getattr(budget_of(dtype), key)
