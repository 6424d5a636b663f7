"""A learner that is told the wrong rewards: the real one, but each batch's advantages are dealt out anew.

Which sample got which advantage is permuted over the whole batch, keyed by the step: what is learned has the size of
the real gradient and, in expectation, nothing of its direction. Everything else is the real run.
"""

from __future__ import annotations

import msgspec
import numpy as np

from etude.loop import child, learner
from etude.records import Batch, Sample
from etude.records.sample import StepReport
from etude.training import TorchLearner


def shuffled(batch: Batch) -> Batch:
    """The batch with its samples' advantages permuted."""
    order = np.random.default_rng(batch.step).permutation(len(batch.samples))
    dealt = [batch.samples[int(i)].advantages[0] for i in order]  # a sample has one, for all of its tokens
    samples = (Sample.uniform(s.rollout_id, s.path, float(a)) for s, a in zip(batch.samples, dealt, strict=True))
    return msgspec.structs.replace(batch, samples=tuple(samples))


class ShuffledLearner(TorchLearner):
    """Accumulates the gradient of each batch with its advantages permuted."""

    def forward_backward(self, batch: Batch) -> StepReport:
        return super().forward_backward(shuffled(batch))


if __name__ == "__main__":
    learner.TorchLearner = ShuffledLearner  # type: ignore[misc]  # in this process, which is the learner
    child.main(learner.handlers, "ranks-at", "ranks-away")
