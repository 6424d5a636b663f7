"""Whole runs with a real vLLM: one that joins from elsewhere and leaves, on a cluster, and with adapters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import vllm_server
from tests.home import TOKEN, Home
from tests.ray_nodes import ray_nodes
from tests.running import Running

from etude.errors import EngineBehind
from etude.evals.parity import budget_of
from etude.inference import HttpEngine
from etude.inference.registry_messages import State
from etude.records import CompletionRequest, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), vllm_server.NEEDS_VLLM]
NATIVE = ("numerics.mode=native", "evals.every=1000")
UP_S = 300.0  # a vLLM takes half a minute on an idle machine


@pytest.fixture
def home(wide_game: Any, tmp_path: Path, cli_in: Callable[[Path], Any], monkeypatch: Any) -> Iterator[Home]:
    monkeypatch.setenv("ETUDE_TOKEN", TOKEN)
    made = Home(cli_in(tmp_path), wide_game.config, tmp_path)
    yield made
    made.close()


@pytest.fixture
def running(wide_game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]) -> Iterator[Running]:
    run = Running(cli_in(tmp_path), wide_game.config)
    yield run
    run.stop()


def probes(events: list[dict[str, Any]], engine: str, since: float = 0.0) -> list[dict[str, Any]]:
    """What an engine computed of versions, by the learner's account, after a time."""
    return [e for e in events if e["engine"] == engine and e["t"] > since]


def assert_held(events: list[dict[str, Any]], engine: str, *, at_least: int) -> None:
    """An engine was asked at versions after the first, and computed what the learner does."""
    found, budget = probes(events, engine), budget_of("float32")
    assert len({e["step"] for e in found}) >= at_least, found
    assert all(e["k3"] <= budget.k3 and e["ratio_p99"] <= budget.ratio_p99 for e in found), found


def told(run: Running, child: str, state: str) -> list[dict[str, Any]]:
    """Events of a process that came to be in a state."""
    return [e for e in run.events("process") if (e["name"], e["state"]) == (child, state)]


async def refused(url: str, *, min_step: int) -> None:
    """A request for a version that is not there is answered with 409."""
    ids, sampling = np.arange(8, dtype=np.int32), Sampling(max_tokens=4, stop_token_ids=())
    asked = CompletionRequest(
        request_id="r", session_id="r", prompt_ids=ids, sampling=sampling, min_step=min_step, deadline_s=20.0
    )
    async with HttpEngine(url, token=TOKEN) as engine:
        with pytest.raises(EngineBehind, match=f"step {min_step} on"):
            await engine.generate(asked)


def test_vllm_engines_from_elsewhere_join_follow_serve_and_are_drained_or_lost(home: Home) -> None:
    def served() -> set[str]:
        return {name for e in home.events("rollout") for name in e["engines"]}

    home.begin("rl.steps=100000", *NATIVE, engines='["reference"]')
    far = home.engine("far", "--poll-s", "0.05", kind="vllm")  # knows two URLs and no checkpoint
    home.until(lambda: home.states("far")[-1:] == [State.SERVING], "a vLLM to catch up", UP_S)
    home.until(lambda: "far" in served(), "it to serve")
    step = home.step
    home.until(lambda: home.step >= step + 3, "versions that it follows")
    url = next(e["url"] for e in home.events("fleet.state") if e["engine"] == "far")
    asyncio.run(refused(url, min_step=10**6))
    home.drain("far")
    assert far.wait(60) == 0
    assert home.states("far")[-2:] == [State.DRAINING, State.LEFT]
    assert_held(home.events("engine.probe"), "far", at_least=3)

    ready = home.tmp_path / "near.ready"  # one that runs already, registered by a process beside it
    argv = [sys.executable, "-m", "etude.inference.vllm.server", "--name", "near", "--ready-file", str(ready)]
    argv += ["--checkpoint", str(home.path / "checkpoints" / "mid"), "--store", str(home.path / "weights")]
    argv += ["--context-tokens", "128", "--max-sequences", "8", "--needs-routes"]
    near = home.program("near", argv, os.environ)
    home.until(ready.exists, "a vLLM to be up", UP_S)
    at = json.loads(ready.read_text())["url"]
    join = ("fleet", "join", f"http://127.0.0.1:{home.port}", at, "--name", "near")
    home.program("near-join", [sys.executable, "-m", "etude.cli", *join], os.environ)
    home.until(lambda: "near" in served(), "it to serve")
    near.send_signal(signal.SIGKILL)
    home.until(lambda: home.states("near")[-1] is State.LOST, "the loss to be seen")
    step = home.step
    home.until(lambda: home.step > step, "another step")
    home.assert_sound(stop=True)
    assert {e["outcome"] for e in home.events("rollout")} == {"graded"}


def test_a_vllm_engine_on_a_cluster_is_started_again_when_it_is_killed(
    wide_game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]
) -> None:
    with ray_nodes() as nodes:
        cli = cli_in(tmp_path)
        run = Running(type(cli)(cli.cwd, {**cli.env, **nodes.env}), wide_game.config)
        node = nodes.add("a", learner=1, engine=2, worker=1, grader=1)
        try:
            engines = 'fleet.engines=["reference", "vllm"]'
            run.begin("rl.steps=100000", *NATIVE, engines, on=nodes.address)
            run.until(lambda: run.step >= 2, "step 2", UP_S)
            run.hit("engine-1")
            run.until(lambda: len(told(run, "engine-1", "ready")) == 2, "its successor", UP_S)
            since = told(run, "engine-1", "ready")[-1]["t"]
            run.until(lambda: probes(run.events("engine.probe"), "engine-1", since), "it to be asked", UP_S)
            assert run.interrupt() == 130, run.said
            assert_held(run.events("engine.probe"), "engine-1", at_least=2)
            run.assert_nothing_left(deadline_s=30.0)
        finally:
            run.stop()
            node.end()


def test_a_run_that_trains_adapters_with_a_vllm_engine_is_held_to_the_budget(running: Running) -> None:
    running.begin("rl.steps=5", *NATIVE, "learner.lora_rank=4", "learner.lr=2e-3", 'fleet.engines=["vllm"]')
    assert running.end(UP_S + 200) == 0, running.said
    running.assert_sound()
    assert_held(running.events("engine.probe"), "engine-0", at_least=5)
    assert not told(running, "engine-0", "restart")
    adapters = json.loads((running.path / "checkpoints" / "final" / "adapter_config.json").read_text())
    assert adapters["r"] == 4
