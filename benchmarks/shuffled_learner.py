"""A learner that is told the wrong rewards: the real one, but each batch's advantages are dealt out anew.

Which sample got which advantage is permuted over the whole batch, keyed by the step: what is learned has the size of
the real gradient and, in expectation, nothing of its direction. Everything else is the real run.
"""

from __future__ import annotations

import msgspec
import numpy as np

from etude.loop import child, learning
from etude.records import Batch
from etude.records.sample import StepReport
from etude.run import RunFolder
from etude.telemetry import Telemetry


def shuffled(batch: Batch) -> Batch:
    """The batch with its samples' advantages permuted."""
    order = np.random.default_rng(batch.step).permutation(len(batch.samples))
    dealt = [batch.samples[int(i)].advantage for i in order]
    samples = (msgspec.structs.replace(s, advantage=a) for s, a in zip(batch.samples, dealt, strict=True))
    return msgspec.structs.replace(batch, samples=tuple(samples))


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    found = await learning.handlers(run, name, telemetry)
    kinds, real = found["forward_backward"]

    async def forward_backward(batch: Batch) -> StepReport:
        report: StepReport = await real(shuffled(batch))  # type: ignore[assignment]
        return report

    return found | {"forward_backward": (kinds, forward_backward)}


if __name__ == "__main__":
    child.main(handlers)
