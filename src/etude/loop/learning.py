"""The learner process: holds the weights, trains them, publishes them.

Torch works in one thread of its own, so that the process sees at once when the conductor goes. After each publish
it keeps the log-probabilities its weights give the probe text, for the version-matched check against engines.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from etude.loop import child
from etude.loop.config import read_config
from etude.numerics import check_row_invariance
from etude.records import Batch, Sample
from etude.records.sample import Published, StepReport
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry
from etude.training import TorchLearner
from etude.training.reference import Reference
from etude.weights import Channel


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    config = read_config(run)
    torch.set_num_threads(1)
    threads = ThreadPoolExecutor(1, thread_name_prefix="torch")
    learner: TorchLearner | None = None

    async def torch_call(work: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, functools.partial(work, *args))

    def held() -> TorchLearner:
        if learner is None:
            raise RuntimeError("begin comes first")
        return learner

    def _begin(checkpoint: str) -> int:
        nonlocal learner
        channel = Channel(DirectoryStore(run / "weights"))
        learner = TorchLearner(
            config.learner, channel=channel, num_steps=config.rl.steps, temperature=config.rl.temperature
        )
        learner.load(checkpoint)
        if config.experience.max_lag == 0:
            check_row_invariance(learner.model.config.products)
        return int(learner.step)

    async def begin(checkpoint: str) -> int:
        """Load a checkpoint; the version step it stands at."""
        return int(await torch_call(_begin, checkpoint))

    async def forward_backward(batch: Batch) -> StepReport:
        report: StepReport = await torch_call(held().forward_backward, batch)
        return report

    async def optim_step() -> dict[str, float]:
        return dict(await torch_call(held().optim_step))

    def _publish(rollout_ids: tuple[str, ...]) -> Published:
        published = held().publish(rollout_ids)
        facts = {name: getattr(published, name) for name in published.__struct_fields__}
        telemetry.event("weights.publish", **facts, step=published.version.step)
        return published

    async def publish(rollout_ids: tuple[str, ...]) -> Published:
        result: Published = await torch_call(_publish, rollout_ids)
        return result

    @functools.cache
    def reference() -> Reference:
        return Reference(run / "checkpoints" / "mid", temperature=config.rl.temperature)

    async def k1(samples: list[Sample]) -> dict[str, float]:
        """Σ log π − log π_ref of each rollout, against the starting checkpoint."""
        return dict(await torch_call(lambda: reference().k1(samples)))

    async def probe(token_ids: list[int]) -> list[float]:
        """Log-probabilities that the learner's own weights give a text's tokens."""
        return list(await torch_call(held().probe, token_ids))

    async def save(path: str) -> None:
        await torch_call(held().save, path)

    async def ready() -> bool:
        return True

    return {
        "ready": ((), ready),
        "begin": ((str,), begin),
        "forward_backward": ((Batch,), forward_backward),
        "optim_step": ((), optim_step),
        "publish": ((tuple[str, ...],), publish),
        "probe": ((list[int],), probe),
        "k1": ((list[Sample],), k1),
        "save": ((str,), save),
    }


if __name__ == "__main__":
    child.main(handlers)
