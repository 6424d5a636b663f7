"""Log-probabilities of a checkpoint directory's model. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from etude.evals.bases.measures import F64, Bools
from etude.models import load_model
from etude.numerics.config import Mode, NumericsConfig
from etude.numerics.factory import operators_for

SCORED_ROWS = 512
"""Tokens whose logits are in memory at once: a row has one float32 per token of the vocabulary."""


class TorchScorer:
    """A `Scorer` of a checkpoint directory, on the GPU in bf16 if there is one, otherwise on the CPU in float32.

    `context_tokens`: the largest number of tokens in a forward pass; the model's own limit, if that is smaller. Raises
    `CheckpointError` if the checkpoint cannot be loaded."""

    def __init__(self, path: Path, *, context_tokens: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        operators = operators_for(NumericsConfig(Mode.NATIVE), dtype, device=self.device)
        self.model = load_model(path, operators=operators, device=self.device).eval()
        self.context_tokens = min(context_tokens, self.model.config.context_tokens)

    def logprobs(self, ids: Sequence[int], first: int) -> F64:
        """Return the log-probability of each of `ids[first:]`. See `Scorer.logprobs`."""
        parts = [
            self.model.operators.log_softmax(logits).gather(1, targets[:, None])[:, 0]
            for logits, targets in self._scored(ids, first)
        ]
        return torch.cat(parts).double().numpy(force=True)

    def likeliest(self, ids: Sequence[int], first: int) -> Bools:
        """Return for each of `ids[first:]` whether the model finds no token more likely. See `Scorer.likeliest`."""
        parts = [logits.argmax(-1) == targets for logits, targets in self._scored(ids, first)]
        return torch.cat(parts).numpy(force=True)

    @torch.no_grad()
    def _scored(self, ids: Sequence[int], first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the logits and targets of at most `SCORED_ROWS` of `ids[first:]` at a time."""
        tokens = torch.tensor(list(ids), device=self.device)
        rows = torch.arange(first - 1, len(ids) - 1, device=self.device)
        done = self.model.run(tokens[:-1], rows=rows)
        yield from zip(torch.split(done.logits, SCORED_ROWS), torch.split(tokens[first:], SCORED_ROWS), strict=True)
