"""A run whose agent program is a process beside the worker, trained over its HTTP endpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from etude.errors import Exit

pytestmark = pytest.mark.timeout(1800)
UNBOUNDED = ("--set", "machines.require_memory_bound=false")  # what runs in the machines is ours
AGENT = Path(__file__).parents[2] / "examples" / "command" / "agent.py"
BUSY = f"""
import json, os, runpy, threading, urllib.request

def ask(messages, **more):
    body = json.dumps({{"model": "small", "messages": messages, **more}}).encode()
    headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.loads(urllib.request.urlopen(urllib.request.Request(url, body, headers)).read())
    return answer["choices"][0]["message"]

talk = [{{"role": "system", "content": "m"}}, {{"role": "user", "content": "1"}}]
talk += [ask(talk, max_tokens=4), {{"role": "user", "content": "2"}}]
ask(talk)
ask(talk)
agents = [threading.Thread(target=ask, args=([{{"role": "user", "content": "m1 2"}}],)) for _ in range(2)]
[agent.start() for agent in agents]
[agent.join() for agent in agents]
ask([{{"role": "system", "content": "title"}}, {{"role": "user", "content": "1"}}], max_tokens=4)
runpy.run_path({str(AGENT)!r}, run_name="__main__")
"""


def test_a_program_that_only_speaks_http_is_trained_and_its_steps_replay(
    game: Any, cli_in: Callable[[Path], Any], tmp_path: Path
) -> None:
    here, run = cli_in(tmp_path), tmp_path / "runs" / "r"
    (tmp_path / "busy.py").write_text(BUSY)
    program = 'harness.program={kind="command", argv=["{python}", "{cwd}/busy.py"], warm=["json", "urllib.request"]}'
    sets = ("harness.max_turns=8", "harness.rollout_deadline_s=300", "rl.steps=2", "evals.every=0")
    limits = [part for one in sets for part in ("--set", one)]
    done = here("run", game.config, "--name", "r", "--set", program, *limits, *UNBOUNDED)
    assert done.returncode == Exit.DONE, done.stderr + done.stdout
    assert here("replay", run, "2").returncode == Exit.DONE
    assert here("fsck", run).returncode == Exit.DONE
    shown = here("rollouts", "show", run, "g000000.0").stdout
    assert "log of the agent program, attempt 0:" in shown
    assert "sampling asked:" in shown
    assert "exit code 0" in shown
    lines = [line.strip() for line in shown.splitlines()]
    assert "branch from turn 0, the prompt of turn 1 again" in lines
    begun = {line.partition(": ")[2].split(" of turn")[0] for line in lines if line.startswith("conversation ")}
    assert {"begins with another message", "the prompt"} <= begun, "two sub-agents with one prompt"
    assert " cached), sampled" in shown
    report = (run / "report.html").read_text()
    assert "One task in training" in report
    assert "branch from turn 0" in report
    kinds = pq.read_table(run / "traces" / "batch-000002.parquet", columns=["kind"])["kind"].to_pylist()
    assert {"act", "side"} <= set(kinds)
