"""The same seed twice at ``max_lag = 0``: the same bytes, whatever the scheduling in between was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.stores import DirectoryStore
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)


def learned(cli_in: Callable[[Path], Any], cwd: Path, *args: str | Path) -> dict[str, Any]:
    """Run it; digests of every version and of the result, and what each rollout came to."""
    cwd.mkdir()
    args = (*args, "--set", "fleet.hung_s=300")  # nothing dies
    done = cli_in(cwd)("run", *args, "--name", "r", timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = cwd / "runs" / "r"
    events = [json.loads(line) for line in (run / "events" / "conductor.jsonl").read_text().splitlines()]
    rollouts = {
        e["rollout_id"]: (e["reward"], e["turns"], e["sampled"], e["ending"]) for e in events if e["kind"] == "rollout"
    }
    assert not any(e.get("state") == "restart" for e in events), "nothing died"
    return {
        "versions": [m.version.digest for m in lineage(DirectoryStore(run / "weights"), "policy")],
        "final": hashlib.sha256((run / "checkpoints" / "final" / "model.safetensors").read_bytes()).hexdigest(),
        "rollouts": dict(sorted(rollouts.items())),
    }


def test_a_synchronous_run_repeats_to_the_byte(game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]) -> None:
    sets = ("--set", "experience.max_lag=0", "--set", "rl.steps=2", "--set", "evals.every=9")
    first, second = (learned(cli_in, tmp_path / name, game.config, *sets) for name in "ab")
    assert len(set(first["versions"])) == 3, "every step changed the weights"
    assert len({rollout for rollout in first["rollouts"].values()}) > 1, "rollouts differ from each other"
    assert first == second


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_longer_synchronous_run_repeats_to_the_byte_and_another_seed_does_not(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]
) -> None:
    sets = ("--set", "experience.max_lag=0", "--set", "rl.steps=10", "--set", "experience.group_size=8")
    first, second = (learned(cli_in, tmp_path / name, game.config, *sets) for name in "ab")
    assert first == second
    other = learned(cli_in, tmp_path / "c", game.config, *sets, "--set", "seed=4")
    assert other["final"] != first["final"]
