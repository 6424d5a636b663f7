"""A run whose agent program is a process beside the worker, trained over its HTTP endpoints."""

from __future__ import annotations

import json
import re
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

SIX_WAYS = f"""
import json, os, runpy, urllib.request

OPENAI, ANTHROPIC, KEY = (os.environ[name] for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY"))
WAYS = {{
    "chat": (OPENAI + "/chat/completions", "messages", "max_tokens"),
    "responses": (OPENAI + "/responses", "input", "max_output_tokens"),
    "messages": (ANTHROPIC + "/v1/messages", "messages", "max_tokens"),
}}

def ask(way, talk, stream):
    url, field, limit = WAYS[way]
    body = json.dumps({{"model": "small", field: talk, limit: 4, "stream": stream}}).encode()
    headers = {{"authorization": "Bearer " + KEY, "content-type": "application/json"}}
    text = urllib.request.urlopen(urllib.request.Request(url, body, headers)).read().decode()
    if not stream:
        found = json.loads(text)
        if way == "chat":
            return found["choices"][0]["message"]["content"] or ""
        parts = found["content"] if way == "messages" else [p for o in found["output"] for p in o.get("content", [])]
        return "".join(part.get("text", "") for part in parts)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {{")]
    if way == "chat":
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    kind = "content_block_delta" if way == "messages" else "response.output_text.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    return "".join(one.get("text", "") if way == "messages" else one for one in deltas)

for number, way in enumerate(WAYS):
    for stream in (False, True):
        talk = [{{"role": "user", "content": "m" + str(2 * number + stream)}}]
        said = ask(way, talk, stream)
        print("asked", way, stream, flush=True)
        if said.strip():
            ask(way, [*talk, {{"role": "assistant", "content": said}}, {{"role": "user", "content": "1"}}], stream)
            print("asked again", way, stream, flush=True)
runpy.run_path({str(AGENT)!r}, run_name="__main__")
"""


def test_the_ratio_is_exactly_one_through_every_dialect_streamed_and_whole(
    game: Any, cli_in: Callable[[Path], Any], tmp_path: Path
) -> None:
    here, run = cli_in(tmp_path), tmp_path / "runs" / "r"
    (tmp_path / "six.py").write_text(SIX_WAYS)
    program = 'harness.program={kind="command", argv=["{python}", "{cwd}/six.py"], warm=["json", "urllib.request"]}'
    sets = ("harness.max_turns=18", "harness.rollout_deadline_s=300", "rl.steps=2", "evals.every=0")
    limits = [part for one in sets for part in ("--set", one)]
    done = here("run", game.config, "--name", "r", "--set", program, *limits, *UNBOUNDED)
    assert done.returncode == Exit.DONE, done.stderr + done.stdout
    found = json.loads((run / "summary.json").read_text())
    assert found["parity"]["fresh_ratio_max"] == found["parity"]["probe_ratio_max"] == 0.0
    assert found["rollouts"]["trained"] > 0
    log = here("rollouts", "show", run, "g000000.0").stdout
    for way in ("chat", "responses", "messages"):
        for stream in (False, True):
            assert f"asked {way} {stream}" in log
    assert log.count("asked again") >= 3
    assert re.search(r"turns (\d+), requests \1, repeated 0, replies tokenised again 0", log), log


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
