"""A real vLLM for tests: one server for all of a session's worlds, each of which follows a store of its own with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from etude.errors import EngineError
from etude.inference import EngineConfig
from etude.inference.external.engine import ExternalEngine
from etude.inference.external.environment import Environment, environment, link_package
from etude.inference.external.serving import initial_version, read_model_config
from etude.inference.vllm.process import VllmProcess, start
from etude.inference.vllm.server import EXTENSION, VllmWeightSync
from etude.seams import BlobStore
from etude.weights.follow.head_tracker import HeadTracker

NONE: Mapping[str, str] = MappingProxyType({})


def why_not(held: Environment) -> str:
    """Why no server can be started from an environment; "" where one can."""
    try:
        held.require()
    except EngineError as error:
        return f"{error.what}: {error.facts}"
    return ""


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    config: EngineConfig,
    *,
    extension: str = EXTENSION,
    modules: Mapping[str, str] = NONE,
    arguments: Sequence[str] = (),
) -> Iterator[VllmProcess]:
    """A vLLM server over a checkpoint, as the adapter starts it; it may not be up yet. `modules`: the text of what else
    its workers can import. `arguments`: more of vLLM's own."""
    with tempfile.TemporaryDirectory(prefix="etude-vllm-") as folder:
        for name, text in modules.items():
            (link_package(Path(folder)) / f"{name}.py").write_text(text)
        vllm = start(
            environment(),
            checkpoint,
            name="engine-0",
            model=read_model_config(checkpoint),
            config=config,
            kv_tokens=config.max_sequences * config.context_tokens,
            threads=1,
            folder=Path(folder),
            extension=extension,
            arguments=arguments,
        )
        try:
            yield vllm
        finally:
            vllm.process.kill()
            vllm.process.wait()


@contextlib.asynccontextmanager
async def following(
    vllm: VllmProcess, checkpoint: Path, config: EngineConfig, store: BlobStore, place: Path
) -> AsyncIterator[ExternalEngine]:
    """An adapter over a server that is shared, following a store; the server is as it was afterwards."""
    engine = ExternalEngine(
        vllm,
        name="engine-0",
        model=read_model_config(checkpoint),
        config=config,
        version=initial_version(checkpoint),
        kv_tokens=config.max_sequences * config.context_tokens,
        parity="vllm",
    )
    follower = VllmWeightSync(engine, HeadTracker(store, "policy"), str(place), poll_s=0.01)
    try:
        await vllm.wait_until_ready()
        await engine.thaw()
        await engine.start()
        await follower.start_at_head()
        yield engine
    finally:
        await follower.stop()
        await vllm.disconnect()


def wait(vllm: VllmProcess) -> None:
    """Until it serves."""

    async def well() -> None:
        await vllm.wait_until_ready()
        await vllm.disconnect()

    asyncio.run(well())


def stopper(vllm: VllmProcess) -> tuple[Callable[[], None], Callable[[], None]]:
    """(hang, unhang): stop what computes, without its leave, and let it go on."""

    def tell(number: int) -> None:
        for process in psutil.Process(vllm.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(process.pid, number)

    return lambda: tell(signal.SIGSTOP), lambda: tell(signal.SIGCONT)


def left(pid: int) -> list[psutil.Process]:
    """A process and its descendants that live."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def total(page: str, name: str) -> float:
    """The sum of a counter of vLLM's own, from its page of metrics."""
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    )


async def gone(processes: list[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Those that still live after so long."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, within_s)
    return list(alive)


NEEDS_VLLM = pytest.mark.skipif(bool(why_not(environment())), reason=why_not(environment()))
