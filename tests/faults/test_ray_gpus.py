"""An engine on a Ray cluster has the GPUs that its arguments ask for. GPUs are numbers to Ray: none is needed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT = """
import asyncio, sys
from pathlib import Path
import ray
from etude.errors import ConfigError
from etude.loop.config import RunConfig
from etude.config import build
from etude.inference.config import EngineKind
from etude.loop import ray_cluster
from etude.loop.ray_placement import RayPlacement
from etude.loop.placement import Program

folder = Path(sys.argv[1])
ray.init("local", num_cpus=2, num_gpus=8, resources={"engine": 8.0, "worker": 1.0}, include_dashboard=False,
         log_to_driver=False)

async def seen(name, devices):
    there, log = RayPlacement(folder), folder / f"{name}.log"
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    process = await there.start(Program(name, ["-c", code], log, devices=devices), lambda reason: asyncio.sleep(0))
    await process.wait()
    await there.close()
    return log.read_text().split()[-1]

def config(*arguments):
    return build(RunConfig, {"vllm": {"arguments": list(arguments)}, "fleet": {"engines": ["vllm"]},
                             "numerics": {"mode": "native"}})

four = config("--tensor-parallel-size=4")
print(len(asyncio.run(seen("engine-0", four.devices_of(EngineKind.VLLM))).split(",")))
print(len(asyncio.run(seen("engine-1", 1)).split(",")))
print(ray_cluster.capacity("engine"), ray_cluster.capacity("engine", 1), ray_cluster.capacity("engine", 4))
print("GPU 8" in ray_cluster.offers())
try:
    ray_cluster._enough_gpus(config("-tp", "16"))
except ConfigError as error:
    print(error.what)
ray_cluster._enough_gpus(four)
ray.shutdown()
"""


def test_an_engine_has_as_many_gpus_as_its_parallel_sizes_ask_for(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["4", "1", "8 8 2", "True", "no node has the 16 GPUs of an engine"]
