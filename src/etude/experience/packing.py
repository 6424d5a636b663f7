"""From groups to the rows that one optimiser step trains on.

`make_batch` gives credit and keeps the samples that carry a gradient; `pack` cuts them into microbatches. Both are
pure and deterministic: the same groups give the same batch. Knows nothing of the ledger, of the window, or of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from etude.experience.admission import Straggler, bounded, masked
from etude.experience.credit import Scheme, advantages, dr_grpo
from etude.experience.groups import Group
from etude.records.rollout import Path, Rollout, Trace
from etude.records.sample import Batch, Sample


def pack(samples: Sequence[Sample], *, budget_tokens: int) -> list[list[Sample]]:
    """Microbatches whose padded size (rows × longest row) is at most `budget_tokens`.

    Rows are sorted by length, so that little is padding; a row longer than the budget is alone in its microbatch.
    """
    order = sorted(samples, key=lambda sample: (len(sample.path.token_ids), sample.rollout_id))
    microbatches: list[list[Sample]] = []
    for sample in order:
        rows = len(microbatches[-1]) + 1 if microbatches else 0
        if rows and rows * len(sample.path.token_ids) <= budget_tokens:
            microbatches[-1].append(sample)
        else:
            microbatches.append([sample])
    return microbatches


def paths(trace: Trace) -> Iterator[Path]:
    """Every root-to-leaf path, with each sampled token in the loss of exactly one of them.

    A branch (a summary, a sub-agent) repeats the turns it shares with an earlier one; there they are context.
    """
    seen: set[int] = set()
    for leaf in trace.leaves():
        keep: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
        at: int | None = leaf
        while at is not None:
            turn = trace.turns[at]
            keep.append(np.full(len(turn.prompt_ids) + len(turn.completion.token_ids), at not in seen))
            seen.add(at)
            at = turn.parent
        path = trace.path(leaf)
        yield path if all(k.all() for k in keep) else masked(path, np.concatenate(keep[::-1]))


def make_batch(
    groups: Sequence[Group],
    *,
    batch_id: str,
    step: int,
    max_lag: int,
    scheme: Scheme = dr_grpo,
    straggler: Straggler = Straggler.WAIT,
) -> Batch:
    """The batch that makes version step `step`, trained at learner step `step - 1`.

    Samples of non-zero advantage only; every rollout of the groups is consumed, and every token that a valid rollout
    sampled counts in the normaliser, so that a step with little signal is a small step.
    """
    samples: list[Sample] = []
    num_loss_tokens = 0
    for group in groups:
        for (rollout, _), advantage in zip(group.valid, advantages(group.rewards, scheme), strict=True):
            num_loss_tokens += rollout.num_sampled
            if advantage:
                samples += _samples(rollout, advantage, step - 1, max_lag, straggler)
    return Batch(
        batch_id=batch_id,
        step=step,
        samples=tuple(sorted(samples, key=lambda sample: sample.rollout_id)),
        rollout_ids=tuple(sorted(i for group in groups for i in group.rollout_ids)),
        num_loss_tokens=num_loss_tokens,
    )


def _samples(
    rollout: Rollout, advantage: float, learner_step: int, max_lag: int, straggler: Straggler
) -> Iterator[Sample]:
    for whole in paths(rollout.trace):
        path = bounded(whole, learner_step=learner_step, max_lag=max_lag, straggler=straggler)
        if path.mask.any():
            yield Sample(rollout_id=rollout.rollout_id, path=path, advantage=advantage)
