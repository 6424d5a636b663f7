"""Code of a plug-in that would hold a process's event loop is named, and interrupted or run in a thread."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.harness.tokeniser import laptop_chat

from etude.config import Plugin, build, to_toml
from etude.errors import PluginError
from etude.harness import Call, Workbench, standard_tools
from etude.loop import worker
from etude.loop.blocked import interrupt_blocking
from etude.loop.config import RunConfig, open_tasks
from etude.loop.rollout_scheduler import siblings
from etude.records.task import Split
from etude.run import RunFolder
from etude.tasks import plugin_source
from etude.telemetry import Telemetry
from etude.testing import MemoryMachine, MemoryRuntime

TOOL = """
import asyncio
import time

from etude.harness.commands import Parameter, Signature


class Waits:
    signature = Signature("wait", "Waits.", (Parameter("how"),))

    async def run(self, bench, how):
        for _ in range(20):
            await asyncio.sleep(0.1) if how == "with await" else time.sleep(0.1)
        return "waited"
"""


SOURCE = """
import time

from etude.records.task import Task


class Blocks:
    name = "blocks"

    def size(self, split):
        return 1

    def task(self, split, index):
        return Task(source="blocks", split=split, index=index, family="f", instruction="i", files={}, exports=())

    def answer(self, task):
        raise NotImplementedError

    def baseline(self, task, kind, *, seed):
        yield "ls", {}
        time.sleep(5)
        yield "submit", {}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waiting_tool.py").write_text(TOOL)
    importlib.invalidate_caches()
    yield build(RunConfig, {"harness": {"tools": ["ls", {"kind": "waiting_tool:Waits"}]}, "fleet": {"hung_s": 1.0}})
    sys.modules.pop("waiting_tool", None)


def called(config: RunConfig, how: str) -> str:
    async def run() -> str:
        interrupt_blocking(config)
        await asyncio.sleep(0)
        bench = Workbench(MemoryMachine({}), (), set(), "key", 10.0, 400)
        return await standard_tools((Plugin("waiting_tool:Waits"),)).run(Call("wait", {"how": how}), bench)

    return asyncio.run(run())


def test_a_plugin_that_waits_without_await_is_named_before_its_process_is_killed(config: RunConfig) -> None:
    with pytest.raises(PluginError, match="tool waiting_tool:Waits failed") as error:
        called(config, "without")
    assert "waiting_tool.py, line 13 has blocked its process for" in error.value.facts


def test_a_plugin_that_waits_with_await_is_left_alone(config: RunConfig) -> None:
    assert called(config, "with await") == "waited"


def test_other_code_that_holds_the_loop_is_left_alone(config: RunConfig) -> None:
    async def run() -> None:
        interrupt_blocking(config)
        time.sleep(1.5)  # noqa: ASYNC251  on purpose

    asyncio.run(run())


def test_a_baseline_script_that_blocks_is_named_while_its_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "blocking_source.py").write_text(SOURCE)
    importlib.invalidate_caches()
    monkeypatch.setattr(plugin_source, "CALL_S", 0.5)
    monkeypatch.setattr(worker, "runtime_from_config", lambda _: MemoryRuntime())
    monkeypatch.setattr(worker.ChatFormat, "load", lambda _: laptop_chat())
    config = build(RunConfig, {"tasks": {"source": {"kind": "blocking_source:Blocks"}}})
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)
    num_beats = 0

    async def work() -> None:
        nonlocal num_beats
        telemetry = Telemetry(tmp_path / "events.jsonl", process="worker-0")
        _, baseline = (await worker.handlers(run, "worker-0", telemetry))["baseline"]
        task = open_tasks(config, canaries=False).task(Split.TRAIN, 0)
        [spec] = siblings("g0", task, 1, seed=0, temperature=1.0)
        played = asyncio.ensure_future(baseline(spec, "oracle"))
        while not played.done():
            await asyncio.sleep(0.01)
            num_beats += 1
        await played

    with pytest.raises(PluginError, match="task source blocking_source:Blocks hangs") as error:
        asyncio.run(work())
    assert "the script of its baseline has not returned within 0.5 s" in error.value.facts
    assert num_beats >= 4, "the worker's event loop went on meanwhile"
