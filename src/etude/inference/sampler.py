"""Samples the rows of a step with penalties, grammars or truncation, and finds the likeliest tokens of rows.

Both runners first sample all rows plainly, that is from the model's own logits (`Sampling.plain`). This module replaces
the tokens of the other requests. So a step with plain requests only does the same work, and gives the same bits, as
without this module.

Shapes: R rows that sample, in the order of their sequences; V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from etude.inference.scheduler import Sequence
from etude.numerics.operators import Operators
from etude.numerics.sampling import uniform
from etude.numerics.shaped_sampling import Shape, sample_shaped


def is_special(sequence: Sequence) -> bool:
    """Return whether `finish_sampling` must be called for the sequence."""
    return sequence.shaping is not None or sequence.request.sampling.top_logprobs > 0


def finish_sampling(
    sequences: Many[Sequence],
    logits_RV: torch.Tensor,
    tokens_R: torch.Tensor,
    logprobs_R: torch.Tensor,
    operators: Operators,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample again the rows whose request is not plain (`Sampling.plain`), and store the most probable tokens if
    requested.

    `logits_RV`: the model's logits. `tokens_R`, `logprobs_R`: the results of plain sampling for all rows. Returns
    tokens and log-probabilities, copied where they change, on the device of the logits. `num_computed` of each sequence
    is the position of its new token. The caller appends the tokens to the sequences."""
    special = [i for i, s in enumerate(sequences) if is_special(s)]
    if not special:
        return tokens_R, logprobs_R
    chosen, device = [sequences[i] for i in special], logits_RV.device
    rows = torch.tensor(special, device=device)
    logits = logits_RV[rows]
    temperatures = [s.request.sampling.temperature or 1.0 for s in chosen]
    divisor = torch.tensor(temperatures, dtype=torch.float32)[:, None].to(device)
    all_logprobs = operators.log_softmax(logits, divisor)
    shaped = [i for i, s in enumerate(chosen) if s.shaping is not None]
    if shaped:
        tokens = tokens_R[rows]
        at = torch.tensor(shaped, device=device)
        tokens[at] = sample_shaped(logits[at], _shape([chosen[i] for i in shaped], logits.shape[1], device))
        logprobs = all_logprobs.gather(1, tokens[:, None])[:, 0]
        tokens_R, logprobs_R = tokens_R.clone(), logprobs_R.clone()
        tokens_R[rows], logprobs_R[rows] = tokens, logprobs
    _store_likeliest(chosen, all_logprobs)
    return tokens_R, logprobs_R


def _shape(sequences: Many[Sequence], vocab_size: int, device: torch.device) -> Shape:
    samplings = [s.request.sampling for s in sequences]
    shapings = [s.shaping for s in sequences if s.shaping is not None]
    changes = [shaping.changes() for shaping in shapings]
    tokens, bias, repetition, penalty = (np.concatenate(parts) for parts in zip(*changes, strict=True))
    forbidden = [shaping.forbidden() for shaping in shapings]
    masks = None
    if any(one is not None for one in forbidden):
        nothing = np.zeros(vocab_size, bool)
        masks = torch.from_numpy(np.stack([nothing if one is None else one for one in forbidden])).to(device)
    positions = [s.num_computed for s in sequences]
    cut_alone = all(a.top_k and a.top_p == 1.0 for a in samplings)

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    return Shape(
        uniform_R=tensor(uniform([a.seed for a in samplings], positions), torch.float32),
        temperature_R=tensor([a.temperature or 1.0 for a in samplings], torch.float32),
        greedy_R=tensor([a.temperature == 0.0 for a in samplings], torch.bool),
        min_p_R=tensor([a.min_p for a in samplings], torch.float64),
        top_k_R=tensor([min(a.top_k, vocab_size) or vocab_size for a in samplings], torch.int64),
        top_p_R=tensor([a.top_p for a in samplings], torch.float64),
        sorts=any(a.top_k or a.top_p < 1.0 for a in samplings),
        forbidden_RV=masks,
        rows_N=tensor(np.repeat(np.arange(len(changes)), [len(one.tokens) for one in changes]), torch.int64),
        tokens_N=tensor(tokens, torch.int64),
        bias_N=tensor(bias, torch.float32),
        repetition_N=tensor(repetition, torch.float32),
        penalty_N=tensor(penalty, torch.float32),
        most_k=max(min(a.top_k, vocab_size) for a in samplings) if cut_alone else 0,
    )


def _store_likeliest(sequences: Many[Sequence], logprobs_RV: torch.Tensor) -> None:
    """Append the likeliest tokens of each row to its sequence, with their log-probabilities; ties in order of id."""
    most = max(s.request.sampling.top_logprobs for s in sequences)
    if not most:
        return
    values, ids = logprobs_RV.topk(min(most, logprobs_RV.shape[1]))
    for sequence, row_values, row_ids in zip(sequences, values.tolist(), ids.tolist(), strict=True):
        if count := sequence.request.sampling.top_logprobs:
            found = sorted(zip(row_values[:count], row_ids[:count], strict=True), key=lambda one: (-one[0], one[1]))
            sequence.likeliest.append(found)
