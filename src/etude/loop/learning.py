"""The learner process: holds the weights, trains them, publishes them.

Torch works in one thread of its own, so that the process sees at once when the conductor goes: `Learning` is what is
done there, `handlers` the calls that lead to it. Knows nothing of rollouts in flight, of the ledger or of engines.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from etude.inference.config import ComputeDtype
from etude.loop import child
from etude.loop.config import RunConfig, read_config
from etude.loop.wire import Handler
from etude.numerics import check_row_invariance
from etude.records import Batch, Sample
from etude.records.sample import Published, StepReport
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry
from etude.training import TorchLearner
from etude.training.reference import Reference
from etude.weights import Channel


class Learning:
    """The learner of a run, from its checkpoint on. Every method runs in the torch thread."""

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry) -> None:
        self.run, self.config, self.telemetry = run, config, telemetry
        self._learner: TorchLearner | None = None
        self._channel: Channel | None = None
        self._reference: Reference | None = None

    @property
    def learner(self) -> TorchLearner:
        if self._learner is None:
            raise RuntimeError("begin comes first")
        return self._learner

    def begin(self, checkpoint: str) -> int:
        """Load a checkpoint; the version step it stands at."""
        self._channel = Channel(DirectoryStore(self.run / "weights"))
        self._learner = TorchLearner(
            self.config.learner,
            channel=self._channel,
            num_steps=self.config.rl.steps,
            temperature=self.config.rl.temperature,
            hold_fresh_to_one=self.config.engine.dtype is ComputeDtype.FLOAT32,
        )
        self._learner.load(checkpoint)
        if self.config.experience.max_lag == 0:
            check_row_invariance(self._learner.model.config.products)
        return self._learner.step

    def forward_backward(self, batch: Batch) -> StepReport:
        return self.learner.forward_backward(batch)

    def optim_step(self) -> Mapping[str, float]:
        return self.learner.optim_step()

    def publish(self, rollout_ids: tuple[str, ...]) -> Published:
        published = self.learner.publish(rollout_ids)
        facts = {name: getattr(published, name) for name in published.__struct_fields__}
        self.telemetry.event("weights.publish", **facts, step=published.version.step)
        if self._channel is not None and self._channel.mended:
            self.telemetry.event("weights.mend", step=published.version.step, reason=self._channel.mended)
            self._channel.mended = ""
        return published

    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities that the learner's own weights give a text's tokens."""
        return self.learner.probe(token_ids)

    def k1(self, samples: list[Sample]) -> dict[str, float]:
        """Σ log π − log π_ref of each rollout, against the starting checkpoint."""
        if self._reference is None:
            start = self.run / "checkpoints" / "mid"
            self._reference = Reference(start, temperature=self.config.rl.temperature)
        return self._reference.k1(samples)

    def save(self, path: str) -> None:
        self.learner.save(path)


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    torch.set_num_threads(1)
    threads = ThreadPoolExecutor(1, thread_name_prefix="torch")
    learning = Learning(run, read_config(run), telemetry)

    def in_torch_thread(work: Callable[..., object]) -> Handler:
        async def call(*arguments: object) -> object:
            return await asyncio.get_running_loop().run_in_executor(threads, functools.partial(work, *arguments))

        return call

    async def ready() -> bool:
        return True

    return {
        "ready": ((), ready),
        "begin": ((str,), in_torch_thread(learning.begin)),
        "forward_backward": ((Batch,), in_torch_thread(learning.forward_backward)),
        "optim_step": ((), in_torch_thread(learning.optim_step)),
        "publish": ((tuple[str, ...],), in_torch_thread(learning.publish)),
        "probe": ((list[int],), in_torch_thread(learning.probe)),
        "k1": ((list[Sample],), in_torch_thread(learning.k1)),
        "save": ((str,), in_torch_thread(learning.save)),
    }


if __name__ == "__main__":
    child.main(handlers)
