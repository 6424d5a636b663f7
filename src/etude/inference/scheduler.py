"""Schedules requests: decides what the next forward pass computes. It has no tensors, threads or clock.

Continuous batching at token granularity: a step is one flat batch with one token of each decoding sequence, and chunks
of prompts. Sequences join and leave between any two steps. Where a prompt is cut depends on its positions alone, never
on what else is in the batch.

Production has strict priority over rollouts. It gets the first free slot, then the slot of an idle session, then that
of a running rollout. The rollout keeps the tokens that it has sampled. Later the engine computes their keys again, like
those of its prompt, and continues; the tokens after them depend on its seed and their positions alone.
While a prompt of production is computed, rollouts stop, with their KV kept. Afterwards both share the steps.

Everything is bounded: slots, prompt tokens per step, and the waiting queue of each class. If the queue is full,
further requests are refused.

A request begins with the longest prefix of its prompt whose KV any slot holds (`slots`), so that a next turn computes
only its new tokens, and siblings compute their common prompt once. If another request is computing the same beginning
of a prompt, a request waits in its own slot until that beginning is computed, the other request ends, or the weights
change. No request waits for one that waits itself, and production does not wait for rollouts.

KV is only valid for one version: a swap of the weights empties all slots. Running sequences continue over keys of both
versions, which no other request gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from etude.inference.errors import EngineBusy, EngineLate
from etude.inference.shaping import Shaping
from etude.inference.slots import BLOCK, Prefix, Slot, SlotTable
from etude.records.completion import Completion, CompletionRequest, Traffic, Version, VersionSpan
from etude.records.wire import I32, Routes


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine, waiting or running, with its state.

    - `arrived`: in seconds, by the clock of the scheduler's caller.
    - `future`: gets the completion, or the error.
    - `slot`: the KV slot in which it runs. None: it is waiting.
    - `begun`: whether its first chunk was planned. Until then its slot still holds the KV of an earlier request.
    - `awaited`: another sequence whose KV this one will copy, and the number of its tokens that must be computed
      before.
    - `num_cached`: tokens whose KV was reused when it began; `num_computed`: positions whose KV is in the slot.
    - `num_kept`: the number of tokens that it had sampled when it was preempted for the last time.
    - `token_ids`, `logprobs`: the tokens sampled so far, and their log-probabilities.
    - `spans`: which version sampled which tokens, for the versions before the current one. `num_spanned`: the number of
      tokens in `spans`.
    - `kv_epoch`: the number of weight swaps since its oldest KV was computed.
    - `kept_routes`: the routes of positions that were computed before it was preempted; None if it never was.
    - `shaping`: the state of its penalties and grammar; None if it has none (`Sampling.plain`).
    - `likeliest`: for each token the likeliest ones, as pairs (log-probability, id), if the request wants them.
    - `on_tokens`: called on the engine's thread after each step that sampled for it, or None."""

    request: CompletionRequest
    arrived: float
    future: Future[Completion] = field(default_factory=Future)
    slot: Slot | None = None
    begun: bool = False
    awaited: tuple[Sequence, int] | None = None
    num_cached: int = 0
    num_computed: int = 0
    num_kept: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    num_spanned: int = 0
    kv_epoch: int = 0
    kept_routes: Routes | None = None
    shaping: Shaping | None = None
    likeliest: list[list[tuple[float, int]]] = field(default_factory=list)
    on_tokens: Callable[[], None] | None = None

    @property
    def num_prompt(self) -> int:
        """The number of prompt tokens of the request."""
        return len(self.request.prompt_ids)

    @property
    def num_prefill(self) -> int:
        """The number of tokens that are computed before it samples: its prompt, and tokens from before a preemption."""
        return self.num_prompt + self.num_kept

    @property
    def prefill_ids(self) -> I32:
        """The tokens that are computed before it samples, [num_prefill]."""
        if not self.num_kept:
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, np.array(self.token_ids[: self.num_kept], np.int32)])

    @property
    def row(self) -> int:
        """The index of the sequence's slot. The sequence must be running."""
        assert self.slot is not None, f"request {self.request.request_id} has no slot"
        return self.slot.index

    @property
    def stale(self) -> bool:
        """Whether the sequence's slot has keys and values that older weights computed."""
        return self.kv_epoch > 0

    @property
    def finished(self) -> bool:
        """Whether a stop token was sampled or the token limit was reached."""
        sampling, ids = self.request.sampling, self.token_ids
        return bool(ids) and (len(ids) >= sampling.max_tokens or ids[-1] in sampling.stop_token_ids)

    @property
    def num_missing(self) -> int:
        """The largest number of tokens that the sequence can still get."""
        return self.request.sampling.max_tokens - len(self.token_ids)

    @property
    def ended(self) -> bool:
        """Whether the sequence gets no further token, because it is finished or its grammar failed."""
        return self.finished or (self.shaping is not None and self.shaping.failure is not None)

    @property
    def phase(self) -> str:
        """A text that describes the progress of the sequence, for errors."""
        if self.slot is None:
            return "waiting for a KV slot"
        if self.num_computed < self.num_prefill:
            return f"{self.num_computed} of {self.num_prefill} prompt tokens computed"
        return f"{len(self.token_ids)} of {self.request.sampling.max_tokens} tokens sampled"

    def is_late(self, now: float, stepped: float) -> bool:
        """Return whether no step of the engine has ended for as many seconds as the request's `deadline_s`. `now`,
        `stepped`: the present time, and when the latest step ended."""
        return now - max(self.arrived, stepped) >= self.request.deadline_s

    @property
    def production(self) -> bool:
        """Whether the request comes from the gateway (production), not from a rollout."""
        return self.request.traffic is Traffic.PRODUCTION

    def suspend(self) -> None:
        """Give up the slot and its KV. The sampled tokens are kept."""
        self.slot, self.begun, self.awaited = None, False, None
        self.num_cached, self.num_computed, self.kv_epoch = 0, 0, 0
        self.token_ids = list(self.token_ids)  # a drafter that knows the old list begins anew
        self.num_kept = len(self.token_ids)
        if not self.num_kept:
            self.spans.clear()

    def append(self, token: int, logprob: float) -> None:
        """Append a sampled token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.shaping is not None and not self.finished:
            self.shaping.add(token)

    def close_span(self, version: Version) -> None:
        """Record that `version` sampled all tokens since the last span.

        A version that computed but sampled nothing gets an empty span, if it computed the oldest keys."""
        n = len(self.token_ids) - self.num_spanned
        if n or (self.num_computed and not self.kv_epoch and self.num_spanned == self.num_kept):
            before = self.spans[-1] if self.spans else None
            if before is not None and before == VersionSpan(version, before.num_tokens, self.kv_epoch):
                self.spans[-1] = VersionSpan(version, before.num_tokens + n, self.kv_epoch)
            else:
                self.spans.append(VersionSpan(version, n, self.kv_epoch))
            self.num_spanned += n


@dataclass(frozen=True, slots=True)
class Chunk:
    """The positions [start, stop) of what a sequence computes before it samples (`Sequence.prefill_ids`), in one step.

    The last chunk also samples the next token."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether it is the last chunk of its prompt."""
        return self.stop == self.sequence.num_prefill

    @property
    def token_ids(self) -> I32:
        """The tokens that are computed."""
        return self.sequence.prefill_ids[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Draft:
    """The latest token of a decoding sequence, at position `start`, and drafts of the tokens after it.

    All `token_ids` are computed in one step, and each row samples the token after its own. The sequence gets these
    tokens up to the first one that differs from its draft (`runner.append_verified`)."""

    sequence: Sequence
    start: int
    token_ids: list[int]

    @property
    def stop(self) -> int:
        """The position after the last draft."""
        return self.start + len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        """How many of the tokens are drafts."""
        return len(self.token_ids) - 1

    @property
    def num_accepted(self) -> int:
        """How many of the drafts were accepted. Valid after the step."""
        return self.sequence.num_computed - self.start - 1


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the keys, values and routes of positions [0, stop) from KV slot `source` to KV slot `target`."""

    source: int
    target: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step computes. `Scheduler.plan` makes one; it is false when there is nothing to compute.

    First the `copies` are made, in order. Then one forward pass computes one token of each sequence in `decode` (in
    order of slot), the `chunks` of prompts, and the `drafts` of further decoding sequences, which `Scheduler.plan`
    leaves empty (`speculation` adds them). There are no copies without chunks."""

    decode: list[Sequence]
    chunks: list[Chunk]
    copies: list[Copy] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks or self.drafts)


class Scheduler:
    """Admits requests to KV slots and plans steps. An engine has one.

    - `num_slots`, `context_tokens`: the number of slots of the KV cache, and the positions of each.
    - `chunk_tokens`: prompts are computed in chunks that end at multiples of this number.
    - `step_tokens`: the maximum number of prompt tokens of a step.
    - `max_waiting`: the maximum number of requests of a class (rollouts, production) that wait for a slot.
    - `share`: False to compute every prompt whole; for comparisons.
    - `grain`: KV is reused for prefixes whose length is a multiple of this number of tokens (`SlotTable`): 1, or
      `chunk_tokens` for a model with recurrent layers.
    - `on_preempt`: called with a rollout that is about to lose its slot."""

    def __init__(
        self,
        *,
        num_slots: int,
        context_tokens: int,
        chunk_tokens: int,
        step_tokens: int,
        max_waiting: int,
        share: bool = True,
        grain: int = 1,
        on_preempt: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self.slots = SlotTable(num_slots, context_tokens, share=share, grain=grain)
        self.chunk_tokens, self.step_tokens, self.max_waiting = chunk_tokens, step_tokens, max_waiting
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0  # number of preempted rollouts
        self._on_preempt = on_preempt

    def submit(self, sequence: Sequence) -> None:
        """Add a request to the queue. Raises `EngineBusy` when the queue of its class is full.

        Requests that will get a slot at the next `plan` do not count as waiting."""
        num_waiting = sum(s.production == sequence.production for s in self.waiting)
        if num_waiting >= self.max_waiting + self.slots.num_available:
            raise EngineBusy(
                f"request {sequence.request.request_id} was refused",
                f"{num_waiting} requests of its class ({sequence.request.traffic}) wait, and {len(self.running)} run",
                hint="send it to another engine or a little later; or raise max_waiting",
            )
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Give slots to waiting requests and return the plan of the next step, which may be empty."""
        self._record_progress()
        self._admit()
        first = [s for s in self.running if s.production and s.num_computed < s.num_prefill]
        running = [s for s in self.running if s.production] if first else self.running
        decode = [s for s in running if s.num_computed >= s.num_prefill]
        decode.sort(key=lambda s: s.row)
        plan = Plan(decode, [], [])
        budget = self.step_tokens
        for sequence in running:
            if sequence.num_computed >= sequence.num_prefill:
                continue
            prefix = Prefix(sequence.row, sequence.num_computed) if sequence.begun else self._find_prefix(sequence)
            if prefix is None:
                continue
            chunk = self._next_chunk(sequence, prefix.num_tokens)
            if plan.chunks and chunk.stop - chunk.start > budget:
                break
            if not sequence.begun:
                self._begin(sequence, prefix, plan.copies)
            plan.chunks.append(chunk)
            budget -= chunk.stop - chunk.start
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Remove a request, finished or not, and free its slot. The KV stays in the slot; if the request asks for it,
        the slot is reserved for the session."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self._record(sequence)
        self.running.remove(sequence)
        self.slots.release(sequence.slot, keep=sequence.request.keep_session and sequence.begun)
        sequence.begun = False

    def remove_departed(self, now: float, *, stepped: float) -> list[Sequence]:
        """Remove and return sequences that were cancelled or are late. The futures of late ones get an error.

        `now` and `stepped` (the end of the latest step) are in seconds. A sequence that waits for a slot is not late
        while others make progress."""
        gone = [s for s in (*self.waiting, *self.running) if s.future.cancelled() or s.is_late(now, stepped)]
        for sequence in gone:
            self.finish(sequence)
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(late(sequence))
        return gone

    def remove_outdated(self, step: int) -> list[Sequence]:
        """Remove and return sequences that require a later version than the loaded one, whose step is `step`.

        There are such sequences if a restarted learner continues from an older step than it had published. Their tokens
        must not be sampled by an older version than required."""
        gone = [s for s in (*self.waiting, *self.running) if s.request.min_step > step]
        for sequence in gone:
            self.finish(sequence)
        return gone

    def swapped(self, old: Version) -> None:
        """Handle a change of the weights between two steps. `old` is the version of all tokens so far."""
        for sequence in self.running:
            sequence.close_span(old)
            sequence.begun = sequence.num_computed > 0
            sequence.kv_epoch += sequence.begun
        self.slots.swapped()

    def _admit(self) -> None:
        """Give slots to waiting requests: production first, then sessions that keep a slot, then by arrival."""
        if not self.waiting:
            return
        for sequence in [s for s in self.waiting if s.production]:
            if not (self._take_slot(sequence) or (self._preempt() and self._take_slot(sequence))):
                return
        for only_kept in (True, False):
            for sequence in list(self.waiting):
                if only_kept and self.slots.idle(sequence.request.session_id) is None:
                    continue
                if not self._take_slot(sequence):
                    return

    def _take_slot(self, sequence: Sequence) -> bool:
        sequence.slot = self.slots.acquire(sequence.request.session_id, sequence.prefill_ids[:-1])
        if sequence.slot is None:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _find_prefix(self, sequence: Sequence) -> Prefix | None:
        """Return the prefix with which a sequence begins now.

        None when it should wait, since another sequence is computing at least a block more of its prompt."""
        if sequence.awaited is not None:
            other, num_tokens = sequence.awaited
            if other.begun and not other.stale and other.num_computed < num_tokens:
                return None
            sequence.awaited = None
        ids = sequence.prefill_ids[:-1]  # the last token is always computed: its logits are wanted
        shared = self.slots.shared(ids)
        prefix = self.slots.longest(sequence.slot, ids, shared)
        computing = (
            s
            for s in self.running
            if s.begun and s.num_computed < s.num_prefill and not s.stale and s.production >= sequence.production
        )
        nearest = max(computing, key=lambda s: shared[s.row], default=None)
        if nearest is None or shared[nearest.row] < prefix.num_tokens + BLOCK:
            return prefix
        sequence.awaited = nearest, int(shared[nearest.row])
        return None

    def _begin(self, sequence: Sequence, prefix: Prefix, copies: list[Copy]) -> None:
        """Begin to compute a sequence with the keys of a prefix, and add the copy of them if one is needed."""
        assert sequence.slot is not None, "it runs"
        if prefix.num_tokens and prefix.row != sequence.row:
            copies.append(Copy(prefix.row, sequence.row, prefix.num_tokens))
        self.slots.begin(sequence.slot, sequence.prefill_ids, prefix)
        sequence.begun, sequence.num_cached, sequence.num_computed = True, prefix.num_tokens, prefix.num_tokens

    def _record_progress(self) -> None:
        """Record what running sequences have computed, if a sequence is about to look for a prefix."""
        if self.waiting or any(not s.begun for s in self.running):
            for sequence in self.running:
                self._record(sequence)

    def _record(self, sequence: Sequence) -> None:
        if sequence.begun and not sequence.stale:
            assert sequence.slot is not None, "it runs"
            known, num = self.slots.written(sequence.slot) - sequence.num_prompt, sequence.num_computed
            sampled = sequence.token_ids[known : max(known, num - sequence.num_prompt)]
            self.slots.extend(sequence.slot, sampled, held=num)

    def _preempt(self) -> bool:
        """Preempt the rollout that has the least to compute again. It waits first in the queue."""
        able = [s for s in self.running if not s.production]
        if not able:
            return False
        victim = min(able, key=lambda s: s.num_computed)
        assert victim.slot is not None, "it runs"
        self._on_preempt(victim)
        self._record(victim)
        self.running.remove(victim)
        self.slots.release(victim.slot, keep=False)
        victim.suspend()
        self.waiting.appendleft(victim)
        self.num_preempted += 1
        return True

    def _next_chunk(self, sequence: Sequence, start: int) -> Chunk:
        boundary = (start // self.chunk_tokens + 1) * self.chunk_tokens
        return Chunk(sequence, start, min(boundary, sequence.num_prefill))


def late(sequence: Sequence) -> EngineLate:
    """Return the error of a late request."""
    request = sequence.request
    return EngineLate(
        f"request {request.request_id} passed its deadline of {request.deadline_s:g} s without a step of the engine",
        sequence.phase,
        hint="resume the engine if it is paused, see the engine's log, or give the request more time",
    )
