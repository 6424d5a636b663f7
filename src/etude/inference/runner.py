"""Computes a planned step on a CPU: tokens in, sampled tokens out. It owns the arrays behind the slots.

Requests, threads and versions are handled elsewhere (`scheduler`, `engine`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import accumulate, count

import numpy as np
import torch

from etude.inference.heads import Heads
from etude.inference.kv import I64, KVCache, Span, StepCache
from etude.inference.sampler import finish_sampling, is_special
from etude.inference.scheduler import Chunk, Draft, Plan, Sequence
from etude.models import Transformer
from etude.models.finite import first_non_finite
from etude.numerics.sampling import sample
from etude.records.wire import Routes


class Runner:
    """The model, its KV cache, and the tokens and routes of each slot, on a CPU. `device_runner.runner_for` makes one.

    A slot is the memory of one running sequence. With `drafts` the runner keeps what the model's MTP heads need, and
    `heads` drafts with them. `state_every`: that of `KVCache`. Shapes: L layers with a router, K experts per token."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int,
        context_tokens: int,
        drafts: bool = False,
        state_every: int = 0,
    ) -> None:
        self.model = model.eval()
        size: dict[str, int] = {"num_slots": num_slots, "context_tokens": context_tokens}
        further = {"heads": len(model.mtp) if drafts else 0, "state_every": state_every}
        self.kv = KVCache(model.local, model.operators, **size, **further)
        self.heads = Heads(model, self.kv, **size) if drafts else None
        sizes = (num_slots, context_tokens)
        self._non_finite = NonFiniteReporter(model)
        self._tokens = np.zeros(sizes, np.int64)
        per_token = (model.config.num_moe_layers, model.config.top_k)
        self._routes = np.zeros((*sizes, *per_token), model.config.route_dtype)

    def routes(self, sequence: Sequence) -> Routes:
        """Return a copy of the routes (chosen experts) that a request wants, [num_computed - routes_from, L, K].

        It is empty when the request wants none."""
        start, stop = sequence.request.routes_from, sequence.num_computed
        return self._routes[sequence.row, stop if start is None else start : stop].copy()

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[Sequence]:
        """Run the forward pass of a plan and sample. Returns the sequences that sampled tokens.

        The sampled tokens are appended to `token_ids` of their sequences."""
        for copy in plan.copies:
            self.kv.copy(copy.source, copy.target, copy.stop)
            self._routes[copy.target, : copy.stop] = self._routes[copy.source, : copy.stop]
            if self.heads is not None:
                self.heads.copy(copy.source, copy.target, copy.stop)
        slots = np.array([s.row for s in plan.decode], np.int64)
        positions = np.array([s.num_computed for s in plan.decode], np.int64)
        parts: list[Chunk | Draft] = [*plan.chunks, *plan.drafts]
        cache = StepCache(self.kv, slots, positions, [Span(p.sequence.row, p.start, p.stop) for p in parts])
        for part in parts:
            self._tokens[part.sequence.row, part.start : part.stop] = part.token_ids
        tokens = torch.from_numpy(self._tokens[cache.row_slots, cache.row_positions])
        rows = None if not plan.chunks else torch.from_numpy(sampling_rows(plan))
        if self.heads is None:
            logits, routes = self.model(tokens, cache, rows=rows)
        else:
            done = self.model.run(tokens, cache, rows=rows)
            logits, routes = done.logits, done.routes
            for chunk in plan.chunks:
                self.heads.cut(chunk.sequence.row, chunk.start)
            self.heads.keep(cache.row_slots, cache.row_positions, done.stream)
        self._routes[cache.row_slots, cache.row_positions] = routes.numpy()
        for sequence in plan.decode:
            sequence.num_computed += 1
        for chunk in plan.chunks:
            chunk.sequence.num_computed = chunk.stop
        sampling = plan.decode + [c.sequence for c in plan.chunks if c.last]
        if sampling or plan.drafts:
            self._sample(sampling, plan.drafts, logits)
        return sampling + [d.sequence for d in plan.drafts]

    def _sample(self, sequences: list[Sequence], drafts: list[Draft], logits_RV: torch.Tensor) -> None:
        num, (owners, own) = len(sequences), sampled_positions(sequences, [s.num_computed for s in sequences], drafts)
        samplings, positions = [s.request.sampling for s in owners], np.array(own, np.int64)
        temperatures, seeds = [a.temperature for a in samplings], [a.seed for a in samplings]
        tokens, logprobs = sample(logits_RV, temperatures, seeds, positions, self.model.operators)
        if drafts:
            self._verify(drafts, logits_RV[num:], tokens[num:], logprobs[num:])
            logits_RV, tokens, logprobs, positions = logits_RV[:num], tokens[:num], logprobs[:num], positions[:num]
        tokens, logprobs = finish_sampling(sequences, logits_RV, tokens, logprobs, self.model.operators)
        sampled: list[int] = tokens.tolist()
        for sequence, token, logprob in zip(sequences, sampled, logprobs.tolist(), strict=True):
            sequence.append(token, logprob)
            if not math.isfinite(logprob):
                self._non_finite.report(sequence)
        has_next = positions < self._tokens.shape[1]  # the last token of a full context is never computed
        slots = np.array([s.row for s in sequences], np.int64)
        self._tokens[slots[has_next], positions[has_next]] = tokens.numpy()[has_next]

    def _verify(
        self, drafts: list[Draft], logits_RV: torch.Tensor, tokens_R: torch.Tensor, logprobs_R: torch.Tensor
    ) -> None:
        def finish(sequences: list[Sequence], rows: list[int]) -> tuple[list[int], list[float]]:
            parts = logits_RV[rows], tokens_R[rows], logprobs_R[rows]
            tokens, logprobs = finish_sampling(sequences, *parts, self.model.operators)
            return tokens.tolist(), logprobs.tolist()

        append_verified(drafts, tokens_R.tolist(), logprobs_R.tolist(), finish, self._non_finite)
        for sequence in (draft.sequence for draft in drafts):
            if sequence.num_computed < self._tokens.shape[1]:
                self._tokens[sequence.row, sequence.num_computed] = sequence.token_ids[-1]

    def synchronize(self) -> None:
        """Wait until all computation is done. Nothing to do on a CPU."""

    @torch.inference_mode()
    def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability at temperature 1 of each token but the first, computed without the KV cache."""
        tokens = torch.tensor(token_ids)
        logits, _ = self.model(tokens)
        scores: list[float] = self.model.operators.log_softmax(logits[:-1]).gather(1, tokens[1:, None])[:, 0].tolist()
        return scores


class NonFiniteReporter:
    """Logs once in which operator the first NaN or Inf of a forward pass arises. The learner refuses such tokens."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._reported = model, False

    def report(self, sequence: Sequence) -> None:
        """Report a sequence whose latest token has a log-probability that is not finite. Only the first call prints."""
        if self._reported:
            return
        self._reported = True
        if self._model.parallel.degree > 1:
            return print(f"error: logits are not finite (request {sequence.request.request_id})", file=sys.stderr)
        context = [*sequence.request.prompt_ids.tolist(), *sequence.token_ids[:-1]]
        tokens = torch.tensor(context).to(self._model.embedding.device)
        found = first_non_finite(lambda watch: self._model.run(tokens, hook=watch))
        where = f"{found.name}, {found.facts}" if found else "not reproduced when the context is computed again"
        request = f"request {sequence.request.request_id}, {len(context)} tokens"
        print(f"error: logits are not finite ({request}); the first: {where}", file=sys.stderr, flush=True)


def sampling_rows(plan: Plan) -> I64:
    """Return the indices of the rows whose logits are needed: all decoding rows, the last row of each prompt, and all
    rows of drafts."""
    rows, at = list(range(len(plan.decode))), len(plan.decode)
    for chunk in plan.chunks:
        at += chunk.stop - chunk.start
        if chunk.last:
            rows.append(at - 1)
    for draft in plan.drafts:
        rows += range(at, at + len(draft.token_ids))
        at += len(draft.token_ids)
    return np.array(rows, np.int64)


def sampled_positions(
    sequences: list[Sequence], positions: list[int], drafts: list[Draft]
) -> tuple[list[Sequence], list[int]]:
    """Return two lists with one entry per row: the sequence that gets the row's token, and the position of this token.

    `sequences` have one row each, with these `positions`. After them come the rows of `drafts`, one per token."""
    for draft in drafts:
        sequences = sequences + [draft.sequence] * len(draft.token_ids)
        positions = positions + list(range(draft.start + 1, draft.stop + 1))
    return sequences, positions


def append_verified(
    drafts: list[Draft],
    tokens: list[int],
    logprobs: list[float],
    finish: Callable[[list[Sequence], list[int]], tuple[list[int], list[float]]],
    non_finite: NonFiniteReporter,
) -> None:
    """Append to each drafted sequence the tokens that its rows sampled, up to the first one that differs from its
    draft. The result is the same as if each of these tokens had been sampled in a step of its own.

    `tokens` and `logprobs`: the results for all rows, sampled without penalties, truncation and grammars. `finish`
    samples the rows of sequences with such settings again; it is called for a row when the sequence has all tokens
    before it."""
    firsts = accumulate((len(draft.token_ids) for draft in drafts), initial=0)
    going = list(zip(drafts, firsts, strict=False))  # with the row that computes its latest token
    for depth in count():
        for draft, _ in going:
            draft.sequence.num_computed += 1
        if special := [(draft.sequence, row) for draft, row in going if is_special(draft.sequence)]:
            rows = [row + depth for _, row in special]
            for row, token, logprob in zip(rows, *finish([s for s, _ in special], rows), strict=True):
                tokens[row], logprobs[row] = token, logprob
        for draft, row in going:
            draft.sequence.append(tokens[row + depth], logprobs[row + depth])
            if not math.isfinite(logprobs[row + depth]):
                non_finite.report(draft.sequence)
        going = [
            (draft, row)
            for draft, row in going
            if draft.token_ids[depth + 1 : depth + 2] == [tokens[row + depth]] and not draft.sequence.ended
        ]
        if not going:
            return
