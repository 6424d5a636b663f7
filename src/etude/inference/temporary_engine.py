"""Runs an engine of any kind for a limited time, for checks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import EngineError
from etude.inference.client import HttpEngine
from etude.inference.config import SERVERS, EngineKind
from etude.inference.external.process import START_S

POLL_S, STOP_S = 0.1, 20.0


@dataclass(frozen=True)
class TemporaryEngine:
    """An engine that runs while a block of `temporary_engine` runs: its client, its process, and its log file."""

    engine: HttpEngine
    process: asyncio.subprocess.Process
    log: Path


@contextlib.asynccontextmanager
async def temporary_engine(
    checkpoint: Path, folder: Path, *arguments: str, kind: EngineKind = EngineKind.VLLM, env: Sequence[str] = ()
) -> AsyncIterator[TemporaryEngine]:
    """Run an engine over a checkpoint while the block runs, and stop it at exit.

    `folder` gets its log and its ready file. `arguments` are further arguments of its server, and `env` environment
    variables such as "A=b". Raises `EngineError` when it exits before it serves, `TimeoutError` when it does not serve
    in time."""
    ready, log = folder / f"{kind}.ready", folder / f"{kind}.log"
    ready.unlink(missing_ok=True)
    argv = [sys.executable, "-m", SERVERS[kind], "--checkpoint", str(checkpoint)]
    variables = dict(os.environ) | dict(one.split("=", 1) for one in env)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv, "--ready-file", str(ready), *arguments, stdout=output, stderr=output, env=variables
        )
    try:
        async with asyncio.timeout(START_S):
            while not ready.exists():
                if process.returncode is not None:
                    error_text = log.read_text(errors="replace").rpartition("error: ")[2].strip()
                    raise EngineError(f"a {kind} engine did not start", error_text[-1500:], hint=f"see its log {log}")
                await asyncio.sleep(POLL_S)
        async with HttpEngine(json.loads(ready.read_text())["url"]) as engine:
            yield TemporaryEngine(engine, process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
