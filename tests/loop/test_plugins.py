"""Whole runs with plug-ins: they train, errors name the plug-in, and the run resumes once it is repaired."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import Exit

pytestmark = pytest.mark.timeout(1800)
MINE = '''
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Loss:
    """The plain policy gradient; raises at a step of the whole run, counted over forward passes."""

    weight: float = 1.0

    def __call__(self, tokens):
        from etude.training.losses import PolicyLoss

        if Path("broken").exists():
            raise LookupError("no such weight")
        ratio_R = (tokens.logprobs_R.detach() - tokens.sampler_logprobs_R).exp()
        gain = (self.weight * ratio_R * tokens.advantages_R * tokens.logprobs_R).sum()
        return PolicyLoss(-gain / tokens.normaliser, ratio_R, ratio_R > 2)


class Weights:
    def __call__(self, log_ratio_R, sequence_R):
        from etude.training.corrections import Corrected

        ratio_R = log_ratio_R.exp()
        return Corrected(ratio_R.clamp(max=1.5), ratio_R)


class Same:
    async def run(self, episode):
        while episode.ending is None:
            await episode.act(await episode.ask())


from etude.models.families.qwen3_moe import Qwen3Moe

class Family(Qwen3Moe):
    model_type = "mine_moe"
    hf_class = "MineForCausalLM"
    renamed = {".mlp.": ".moe."}


class Breaks:
    """A tracker that writes a file and breaks the loss once a step is trained."""

    def start(self, run):
        self.out = Path(run.folder) / "numbers.txt"

    def log(self, step, values):
        import json

        with self.out.open("a") as file:
            file.write(json.dumps([step, dict(values)]) + "\\n")
        raise ConnectionError("no route to the server")

    def finish(self, outcome):
        (self.out.parent / "outcome").write_text(outcome)
'''
PARTS = (
    "--set",
    'learner.policy_loss={kind="mine:Loss", weight=1.5}',
    "--set",
    "learner.correction=mine:Weights",
    "--set",
    'harness.tools=["edit", "submit", "write", {kind="examples.plugins.tools:Grep", most=3}]',
    "--set",
    'trackers=["mine:Breaks", "examples.plugins.trackers:Csv"]',
    "--set",
    "harness.program=mine:Same",
    "--set",
    "model.family=mine:Family",
    "--set",
    "harness.context_tokens=112",
    "--set",
    "rl.steps=2",
)


@pytest.fixture
def here(tmp_path: Path, cli_in: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "src")]))
    (tmp_path / "mine.py").write_text(MINE)
    return type(cli_in(tmp_path))(tmp_path, dict(os.environ))


def test_a_run_trains_with_a_users_parts_and_goes_on_after_one_has_failed(game, here):
    run = here.cwd / "runs" / "own"
    (here.cwd / "broken").touch()
    failed = here("run", game.config, "--name", "own", *PARTS)
    assert failed.returncode == Exit.FAILED, failed.stderr
    assert "policy loss mine:Loss failed: computing the loss raised LookupError" in failed.stderr
    assert "resume with: etude run --resume" in failed.stderr
    assert "warning: tracker mine:Breaks failed: its log raised ConnectionError" in failed.stderr
    assert (run / "outcome").read_text() == "failed"

    (here.cwd / "broken").unlink()
    (here.cwd / "mine.py").write_text(f"{MINE}\nMENDED = True\n")
    refused = here("run", "--resume", run)
    assert refused.returncode == Exit.OTHER_RUN, refused.stderr
    assert "was made with another version of a plug-in: now mine:" in refused.stderr
    assert "now mine:Loss (no installed package, source " in refused.stderr
    done = here("run", "--resume", run, "--changed-plugins")
    assert done.returncode == Exit.DONE, done.stderr
    assert (run / "outcome").read_text() == "finished"
    rows = list(csv.reader((run / "numbers.csv").read_text().splitlines()))
    assert {name.partition("/")[0] for name, _, _ in rows} == {"rl", "eval"}
    assert [step for name, step, _ in rows if name == "rl/loss"] == ["1", "2"]
    records = json.loads((run / "plugins.json").read_text())
    paths = [f"mine:{name}" for name in ("Loss", "Weights", "Same", "Family", "Breaks")]
    paths += [f"examples.plugins.{name}" for name in ("tools:Grep", "trackers:Csv")]
    assert [sorted(one["path"] for one in record["plugins"]) for record in records] == [sorted(paths)] * 2
    assert here("replay", run, "2").returncode == Exit.DONE
    assert here("fsck", run).returncode == Exit.DONE
