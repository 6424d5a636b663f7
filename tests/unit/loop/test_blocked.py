"""Code of a plug-in that holds a process's event loop is interrupted where it is, and named."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etude.config import Plugin, build
from etude.errors import PluginError
from etude.harness import Call, Workbench, standard_tools
from etude.loop.blocked import interrupt_blocking
from etude.loop.config import RunConfig
from etude.testing import MemoryMachine

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
