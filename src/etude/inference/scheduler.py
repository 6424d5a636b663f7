"""Schedules requests: decides what the next forward pass computes. It has no tensors, threads or clock.

Continuous batching at token granularity: a step is one flat batch with one token of each decoding sequence, and chunks
of prompts. Sequences join and leave between any two steps. Where a prompt is cut depends on its positions alone, never
on what else is in the batch.

Production has strict priority over rollouts. It gets the first free slot, then the slot of an idle session, then that
of a running rollout, which starts again later (with the same seed, so it gets the same tokens under the same weights).
While a prompt of production is computed, rollouts stop, with their KV kept. Afterwards both share the steps.

Everything is bounded: slots, prompt tokens per step, and the waiting queue of each class. Beyond it requests are
refused.

A slot is a row of the KV cache, as long as the longest context. A session keeps its slot between two calls, so that the
next call computes only new tokens. When a slot is needed, the least recently used idle session loses its slot. KV is
only valid for one version: a swap of the weights drops all idle sessions. Running sequences continue over keys of both
versions, and their slots are dropped at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from etude.inference.errors import EngineBusy, EngineLate
from etude.inference.shaping import Shaping
from etude.records.completion import Completion, CompletionRequest, Traffic, Version, VersionSpan
from etude.records.wire import I32


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the KV cache.

    - `session_id`: the session whose context it has, or whose request runs in it; "" for a free slot.
    - `busy`: whether a request runs in it.
    - `stale`: whether it has keys of an older version of the weights.
    - `kept`: the tokens of an idle session, [T]: position i of the KV belongs to ``kept[i]``. None for other slots."""

    index: int
    session_id: str = ""
    busy: bool = False
    stale: bool = False
    kept: I32 | None = None


class SlotTable:
    """All KV slots, and the idle sessions that keep some of them.

    >>> table = SlotTable(2)
    >>> slot, num_cached = table.acquire("s", np.array([5, 6, 7], np.int32))
    >>> slot.index, num_cached
    (0, 0)
    >>> table.release(slot, np.array([5, 6, 7, 8], np.int32))
    >>> table.acquire("s", np.array([5, 6, 7, 8, 9], np.int32))[1]
    4
    """

    def __init__(self, num_slots: int) -> None:
        self._free = [Slot(i) for i in range(num_slots)]  # sorted: low indices first keeps running slots together
        self._idle: dict[str, Slot] = {}  # by session, least recently used first
        self._busy: set[Slot] = set()

    @property
    def num_available(self) -> int:
        """The number of slots that requests could get now: free ones and those of idle sessions."""
        return len(self._free) + len(self._idle)

    def idle(self, session_id: str) -> Slot | None:
        """Return the slot of an idle session, or None."""
        return self._idle.get(session_id)

    def acquire(self, session_id: str, prompt_ids: I32, *, spare: str | None = None) -> tuple[Slot, int] | None:
        """Take a slot for a request, and return it with the number of leading prompt tokens whose KV it has.

        Returns None when all slots are busy. The idle session `spare` loses its slot only when there is no other. The
        last token of a prompt always counts as new, since the request needs its logits."""
        slot, num_cached = self._idle.pop(session_id, None), 0
        if slot is not None:
            num_cached = _num_extended(slot, prompt_ids)
        elif self._free:
            slot = self._free.pop(0)
        elif self._idle:
            slot = self._idle.pop(next((s for s in self._idle if s != spare), next(iter(self._idle))))
        else:
            return None
        slot.session_id, slot.busy, slot.stale, slot.kept = session_id, True, False, None
        self._busy.add(slot)
        return slot, num_cached

    def release(self, slot: Slot, kept: I32 | None = None) -> None:
        """Release the slot of a request that ended.

        `kept` are the tokens whose KV the slot has, to keep it for the session. None frees the slot."""
        self._busy.remove(slot)
        slot.busy = False
        if kept is None or slot.stale:
            self._free_slot(slot)
            return
        before = self._idle.pop(slot.session_id, None)  # two concurrent calls of one session: keep the later
        if before is not None:
            self._free_slot(before)
        slot.kept = kept
        self._idle[slot.session_id] = slot

    def swapped(self) -> None:
        """Handle a change of the weights: drop idle sessions and mark busy slots as stale."""
        for slot in self._idle.values():
            self._free_slot(slot)
        self._idle.clear()
        for slot in self._busy:
            slot.stale = True

    def _free_slot(self, slot: Slot) -> None:
        slot.session_id, slot.stale, slot.kept = "", False, None
        self._free.append(slot)
        self._free.sort(key=lambda s: s.index)


def _num_extended(slot: Slot, prompt_ids: I32) -> int:
    """Return how many leading prompt tokens the slot has: all that it kept, or 0 if the prompt does not extend them."""
    kept = slot.kept
    if kept is None or len(prompt_ids) < len(kept) or not np.array_equal(prompt_ids[: len(kept)], kept):
        return 0
    return min(len(kept), len(prompt_ids) - 1)


def num_shared_tokens(one: I32, other: I32) -> int:
    """Return the length of the common prefix of two contexts.

    >>> num_shared_tokens(np.array([5, 6, 7], np.int32), np.array([5, 6, 9, 9], np.int32))
    2
    """
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine, waiting or running, with its state.

    - `arrived`: in seconds, by the clock of the scheduler's caller.
    - `future`: gets the completion, or the error.
    - `slot`: the KV slot in which it runs. None: it is waiting.
    - `num_cached`: prompt tokens whose KV was reused; `num_computed`: positions whose KV is in the slot.
    - `token_ids`, `logprobs`: of the tokens sampled so far.
    - `spans`: which version sampled which tokens, for the versions before the current one; `num_spanned`: their tokens.
    - `kv_epoch`: how often the weights changed since its oldest KV was computed.
    - `shaping`: the state of a request that is not sampled plainly, or None.
    - `likeliest`: for each token the likeliest ones, as pairs (log-probability, id), if the request wants them.
    - `on_tokens`: called on the engine's thread after each step that sampled for it, or None."""

    request: CompletionRequest
    arrived: float
    future: Future[Completion] = field(default_factory=Future)
    slot: Slot | None = None
    num_cached: int = 0
    num_computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    num_spanned: int = 0
    kv_epoch: int = 0
    shaping: Shaping | None = None
    likeliest: list[list[tuple[float, int]]] = field(default_factory=list)
    on_tokens: Callable[[], None] | None = None

    @property
    def num_prompt(self) -> int:
        """The number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def row(self) -> int:
        """The index of its slot. The sequence must have one."""
        assert self.slot is not None, f"request {self.request.request_id} has no slot"
        return self.slot.index

    @property
    def stale(self) -> bool:
        """Whether its slot has keys of an older version."""
        return self.slot is not None and self.slot.stale

    @property
    def finished(self) -> bool:
        """Whether a stop token was sampled or the token limit was reached."""
        sampling, ids = self.request.sampling, self.token_ids
        return bool(ids) and (len(ids) >= sampling.max_tokens or ids[-1] in sampling.stop_token_ids)

    @property
    def phase(self) -> str:
        """A description of its progress, for errors."""
        if self.slot is None:
            return "waiting for a KV slot"
        if self.num_computed < self.num_prompt:
            return f"{self.num_computed} of {self.num_prompt} prompt tokens computed"
        return f"{len(self.token_ids)} of {self.request.sampling.max_tokens} tokens sampled"

    def is_late(self, now: float, stepped: float) -> bool:
        """Return whether there was no step for the request's `deadline_s`. `stepped`: when the latest step ended."""
        return now - max(self.arrived, stepped) >= self.request.deadline_s

    @property
    def production(self) -> bool:
        """Whether the request is of production."""
        return self.request.traffic is Traffic.PRODUCTION

    def restart(self) -> None:
        """Reset everything that was computed and sampled."""
        self.slot, self.num_cached, self.num_computed, self.kv_epoch = None, 0, 0, 0
        self.token_ids, self.logprobs, self.spans, self.num_spanned, self.likeliest = [], [], [], 0, []
        if self.shaping is not None:
            self.shaping.restart()

    def append(self, token: int, logprob: float) -> None:
        """Append a sampled token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.shaping is not None and not self.finished:
            self.shaping.add(token)

    def close_span(self, version: Version) -> None:
        """Record that `version` sampled all tokens since the last span.

        A version that computed but sampled nothing gets an empty span, if it is the first."""
        n = len(self.token_ids) - self.num_spanned
        if n or (self.num_computed and not self.spans):
            self.spans.append(VersionSpan(version, n, self.kv_epoch))
            self.num_spanned += n

    def context(self) -> I32:
        """Return the tokens whose KV is in the slot, in order, [num_computed] int32."""
        tokens = np.concatenate([self.request.prompt_ids, np.array(self.token_ids, np.int32)])
        return tokens[: self.num_computed].astype(np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The positions [start, stop) of a sequence's prompt, computed in one step.

    The last chunk of a prompt also samples the first token."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether it is the last chunk of its prompt."""
        return self.stop == self.sequence.num_prompt


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
    order of slot) and the `chunks` of prompts. There are no copies without chunks."""

    decode: list[Sequence]
    chunks: list[Chunk]
    copies: list[Copy] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class Scheduler:
    """Admits requests to KV slots and plans steps. An engine has one.

    - `chunk_tokens`: prompts are cut at multiples of this position.
    - `step_tokens`: the most prompt tokens of a step.
    - `max_waiting`: the most requests of a class (rollouts, production) that wait for a slot."""

    def __init__(self, *, num_slots: int, chunk_tokens: int, step_tokens: int, max_waiting: int) -> None:
        self.slots = SlotTable(num_slots)
        self.chunk_tokens, self.step_tokens, self.max_waiting = chunk_tokens, step_tokens, max_waiting
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._copies: list[Copy] = []  # for the next plan
        self.num_preempted = 0  # number of preempted rollouts

    def submit(self, sequence: Sequence) -> None:
        """Add a request to the queue. Raises `EngineBusy` when the queue of its class is full.

        Requests that get a slot at the next plan do not count."""
        num_waiting = sum(s.production == sequence.production for s in self.waiting)
        if num_waiting >= self.max_waiting + self.slots.num_available:
            raise EngineBusy(
                f"request {sequence.request.request_id} was refused",
                f"{num_waiting} requests of its class wait for {len(self.running)} running ones",
                hint="send it to another engine or a little later; or raise max_waiting",
            )
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Give slots to waiting requests and return the plan of the next step, which may be empty."""
        self._admit()
        first = [s for s in self.running if s.production and s.num_computed < s.num_prompt]
        running = [s for s in self.running if s.production] if first else self.running
        decode = [s for s in running if s.num_computed >= s.num_prompt]
        decode.sort(key=lambda s: s.row)
        chunks: list[Chunk] = []
        budget = self.step_tokens
        for sequence in running:
            if sequence.num_computed < sequence.num_prompt:
                chunk = self._next_chunk(sequence)
                if chunks and chunk.stop - chunk.start > budget:
                    break
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
        copies, self._copies = self._copies, []
        return Plan(decode, chunks, copies)

    def finish(self, sequence: Sequence) -> None:
        """Remove a request, finished or not. Its slot stays with its session, or becomes free."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        keep = sequence.request.keep_session and sequence.num_computed > 0
        self.slots.release(sequence.slot, sequence.context() if keep else None)

    def remove_departed(self, now: float, *, stepped: float) -> list[Sequence]:
        """Remove and return sequences that were cancelled or are late. Late ones fail.

        `now` and `stepped` (the end of the latest step) are in seconds. A sequence that waits for a slot is not late
        while others make progress."""
        gone = [s for s in (*self.waiting, *self.running) if s.future.cancelled() or s.is_late(now, stepped)]
        for sequence in gone:
            self.finish(sequence)
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(late(sequence))
        return gone

    def remove_outdated(self, step: int) -> list[Sequence]:
        """Remove and return sequences that demand a later version than `step`, the one that is now loaded.

        A restarted learner may continue from an older step than it had published. No token may be sampled by an older
        version than demanded."""
        gone = [s for s in (*self.waiting, *self.running) if s.request.min_step > step]
        for sequence in gone:
            self.finish(sequence)
        return gone

    def swapped(self, old: Version) -> None:
        """Handle a change of the weights between two steps. `old` is the version of all tokens so far."""
        for sequence in self.running:
            sequence.close_span(old)
            sequence.kv_epoch += sequence.num_computed > 0
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
        request = sequence.request
        source = self._fork_source(request) if self.slots.num_available else None
        got = self.slots.acquire(request.session_id, request.prompt_ids, spare=request.fork_from)
        if got is None:
            return False
        sequence.slot, sequence.num_cached = got
        if source is not None:
            row, sequence.num_cached = source
            if row != sequence.row:
                self._copies.append(Copy(row, sequence.row, sequence.num_cached))
        sequence.num_computed = sequence.num_cached
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _fork_source(self, request: CompletionRequest) -> tuple[int, int] | None:
        """Return the row to copy keys from for a new session, and the number of positions it can use.

        None when the session has a slot already, or when no KV of `fork_from` under the current version exists."""
        if request.fork_from is None or self.slots.idle(request.session_id) is not None:
            return None
        held = [(s.row, s.context()) for s in self.running if s.request.session_id == request.fork_from and not s.stale]
        if (idle := self.slots.idle(request.fork_from)) is not None and idle.kept is not None:
            held.append((idle.index, idle.kept))
        new = request.prompt_ids[:-1]  # the last token is always computed: its logits are what the request wants
        row, num_tokens = max(
            ((row, num_shared_tokens(ids, new)) for row, ids in held), key=lambda s: s[1], default=(0, 0)
        )
        return (row, num_tokens) if num_tokens else None

    def _preempt(self) -> bool:
        """Preempt the rollout that loses least. It waits first in the queue and starts again.

        A streamed request cannot be preempted, since its tokens were sent."""
        able = [s for s in self.running if not s.production and s.on_tokens is None]
        if not able:
            return False
        victim = min(able, key=lambda s: s.num_computed)
        assert victim.slot is not None, "it runs"
        self.running.remove(victim)
        self.slots.release(victim.slot)
        victim.restart()
        self.waiting.appendleft(victim)
        self.num_preempted += 1
        return True

    def _next_chunk(self, sequence: Sequence) -> Chunk:
        start = sequence.num_computed
        boundary = (start // self.chunk_tokens + 1) * self.chunk_tokens
        return Chunk(sequence, start, min(boundary, sequence.num_prompt))


def late(sequence: Sequence) -> EngineLate:
    """Return the error of a late request."""
    request = sequence.request
    return EngineLate(
        f"request {request.request_id} passed its deadline of {request.deadline_s:g} s without a step of the engine",
        sequence.phase,
        hint="is the engine paused? see its log; or give the request more time",
    )
