"""A real SGLang behind its adapter, where ETUDE_SGLANG names an environment: swaps, classes, ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import vllm_server
from tests.faults.test_vllm import SIZES, TEXT, publish
from tests.faults.test_vllm_runs import NATIVE, UP_S, assert_held
from tests.running import Running

from etude.errors import EngineBehind, EngineError
from etude.inference.client import HttpEngine
from etude.inference.config import EngineKind
from etude.inference.external.environment import SGLANG, environment
from etude.inference.temporary_engine import temporary_engine
from etude.models import Transformer
from etude.models.checkpoint import save_model
from etude.records.completion import Completion, CompletionRequest, Sampling, Traffic, Version

WHY_NOT = vllm_server.why_not(environment(None, SGLANG))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
KIND = {"kind": EngineKind.SGLANG}


def served(folder: Path) -> list[str]:
    """A tiny model's directory, and the arguments to serve it."""
    save_model(Transformer(SIZES, seed=0), folder / "model", dtype="f32")
    return ["--context-tokens", "256", "--max-sequences", "2", "--store", str(folder / "store")]


def ask(name: str, max_tokens: int, num_prompt: int = 8, **fields: object) -> CompletionRequest:
    prompt = np.random.default_rng(sum(name.encode())).integers(0, 256, num_prompt).astype(np.int32)
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(), temperature=fields.pop("temperature", 1.0))  # type: ignore[arg-type]
    return CompletionRequest(request_id=name, session_id=name, prompt_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


async def holds(engine: HttpEngine, version: Version, right: list[float]) -> None:
    """The engine comes to a version, and computes it."""
    assert await engine.adopt(version.step, deadline_s=60.0) == version
    held, logprobs = await engine.verify(TEXT)
    assert held == version
    assert np.abs(np.array(logprobs) - right).max() < 1e-4


def test_a_real_sglang_follows_versions_under_requests_in_flight(tmp_path: Path) -> None:
    async def story(engine: HttpEngine) -> None:
        await holds(engine, *first)
        assert {"adopt", "pause-keep", "spans", "stream", "verify"} <= set((await engine.info()).capabilities)
        long = asyncio.ensure_future(engine.generate(ask("long", 240)))
        while not (await engine.info()).num_running:  # noqa: ASYNC110 - it is another process's
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        second = publish(tmp_path, seed=1)
        await holds(engine, *second)
        done = await long
        assert [span.version for span in done.spans] == [first[0], second[0]], "it kept what it had, and went on"
        assert sum(span.num_tokens for span in done.spans) == len(done.token_ids) == 240
        greedy = await engine.generate(ask("greedy", 16, temperature=0.0))
        context, model = ask("greedy", 1).prompt_ids.tolist(), Transformer(SIZES, seed=1).eval()
        for token in greedy.token_ids.tolist():
            with torch.inference_mode():
                assert int(model(torch.tensor(context))[0][-1].argmax()) == token
            context.append(token)
        assert len((await engine.verify((TEXT * 2)[:256]))[1]) == 255, "a text as long as the context"
        full = await engine.generate(ask("full", 56, 200))
        assert len(full.token_ids) == 56
        with pytest.raises(EngineBehind):
            await engine.generate(ask("later", 4, min_step=9))
        with pytest.raises(EngineError, match="passed its deadline"):
            await engine.generate(ask("late", 240, deadline_s=0.2))

    async def run() -> None:
        async with asyncio.timeout(500), temporary_engine(tmp_path / "model", tmp_path, *arguments, **KIND) as running:
            await story(running.engine)

    arguments, first = served(tmp_path), publish(tmp_path, seed=0)
    asyncio.run(run())


def test_production_has_its_first_token_before_rollouts_that_hold_every_seat_and_nothing_outlives_a_killed_adapter(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(500),
            temporary_engine(tmp_path / "model", tmp_path, *served(tmp_path), **KIND) as running,
        ):
            engine, processes = running.engine, vllm_server.left(running.process.pid)
            rollouts = [asyncio.ensure_future(engine.generate(ask(f"rollout {n}", 240))) for n in range(4)]
            while (await engine.info()).num_running < 2:  # noqa: ASYNC110 - it is another process's
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            async with contextlib.aclosing(engine.stream(ask("p", 8, traffic=Traffic.PRODUCTION))) as parts:
                assert await anext(parts)
                assert not any(one.done() for one in rollouts)
                assert isinstance([part async for part in parts][-1], Completion)
            assert [len((await one).token_ids) for one in rollouts] == [240] * 4
            os.kill(running.process.pid, signal.SIGKILL)
            assert len(processes) >= 4, "the adapter, SGLang's server, its scheduler, its detokenizer"
            assert await vllm_server.gone(processes, within_s=10.0) == []

    asyncio.run(run())


def test_a_run_on_sglang_is_held_to_the_budget(wide_game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]) -> None:
    run = Running(cli_in(tmp_path), wide_game.config)
    try:
        run.begin("rl.steps=4", *NATIVE, "learner.replay_routes=false", 'fleet.engines=["sglang"]')
        assert run.end(UP_S + 200) == 0, run.said
        run.assert_sound()
        assert_held(run.events("engine.probe"), "engine-0", at_least=4)
    finally:
        run.stop()
