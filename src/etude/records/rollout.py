"""Records of rollouts: one attempt at a task, its trace, and how it ended."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from etude.records.completion import Completion, Sampling, missing_route
from etude.records.reward import GRADE, Term
from etude.records.task import Task, Trust
from etude.records.wire import F32, I32, Bools, Routes

NO_MEASURES: Mapping[str, float] = MappingProxyType({})
UNKNOWN = -1
"""Value in `Path.steps` of a token that no known version read. A token that was not sampled and whose version has the
apparent step -1 counts as unknown too."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model and its output.

    A malformed call is kept, with the parse error as its output. `name` is "" when the call could not be parsed."""

    name: str
    arguments: dict[str, str | int]
    output: str
    malformed: bool = False


class TurnKind(enum.StrEnum):
    """The purpose of a turn.

    ACT works at the task. SUMMARY writes the text with which a cleared context continues. REFUSED is a summary that was
    not used, since it was empty, too long or a tool call: it gets no credit for what came after it. SIDE does something
    beside the task, such as a title or a classification."""

    ACT = "act"
    SUMMARY = "summary"
    REFUSED = "refused"
    SIDE = "side"


class Start(enum.StrEnum):
    """The reason why a turn continues the engine session of its parent turn, or why it does not.

    FIRST: the first turn of the tree. NEXT: it continues its parent. FORK: its parent has another continuation already.
    The other values are for new roots. TOOLS: the tools differ from those of all earlier requests. SYSTEM: the first
    message differs from that of all earlier requests. HISTORY: the first message is known, but no turn of the model is
    repeated."""

    FIRST = "first"
    NEXT = "next"
    FORK = "fork"
    TOOLS = "tools"
    SYSTEM = "system"
    HISTORY = "history"


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, as a node of the tree of a `Trace`.

    It stores only the tokens that it adds to its parent's context. The context of a turn is the tokens of its
    ancestors, then `prompt_ids`, then the sampled tokens. `parent`: the index of the parent in `Trace.turns`; None for
    a root. `prompt_ids`: the tokens of the new messages and of the generation prompt. `sampling`: the parameters that
    the engine used. `calls`: tool calls in the order of the completion; empty for text only. `start`: why it continues
    its parent's session or not; None if unknown.

    When a client cuts a turn off at a stop text, the sampled tokens of that text are recorded as a turn of their own,
    without `prompt_ids` and without a continuation: these tokens are trained on, but are in no context."""

    parent: int | None
    prompt_ids: I32
    completion: Completion
    sampling: Sampling
    calls: tuple[ToolCall, ...] = ()
    kind: TurnKind = TurnKind.ACT
    start: Start | None = None


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens from a root of a `Trace` to one of its leaves, as arrays: exactly what the model read and sampled.

    All arrays have T elements, one per token.

    - `mask`: True where the policy sampled the token.
    - `logprobs`: the sampler's log-probability; 0.0 where `mask` is False.
    - `steps`: the step of the weights' version that sampled the token. For other tokens, the step of the first version
      that read the token, or `UNKNOWN`. The step of a version that was lost in a restart may be negative
      (`experience.lineage`).
    - `kv_epochs`: for sampled tokens, how often weights were swapped since the oldest key that the token attended to.
    - `routes`: [T, MoE layers, top_k] expert indices; `missing_route` where unknown (the last token); [0, …] without
      routes.
    - `digest`: the digest of the version that sampled all tokens; "" for several versions, or unknown."""

    token_ids: I32  # [T]
    mask: Bools
    logprobs: F32
    steps: I32
    # `UNKNOWN`; for a version of a lost lineage its apparent step, which may be negative (`experience.lineage`)
    kv_epochs: I32
    routes: Routes
    digest: str = ""

    @property
    def oldest_steps(self) -> I32:
        """For each token, the oldest step of a version that it depends on, [T]: its own version, or that of a key that
        it attended to.

        A token with `kv_epochs` 0 attends only to keys of its own version. Any other token also attends to the keys of
        earlier tokens, back to the last one with `kv_epochs` 0."""
        # A segment starts at each token of epoch 0. Each segment is shifted 2^33 below the one before, so that the
        # running minimum never takes a value of an earlier segment.
        offset = np.cumsum(self.kv_epochs == 0) * np.int64(2**33)
        oldest: I32 = (np.minimum.accumulate(self.steps - offset) + offset).astype(np.int32)
        return oldest


class Trace(msgspec.Struct, frozen=True):
    """The model calls of a rollout, as a tree of turns. A linear rollout is a chain: turn i has parent i - 1.

    A summary of the context or a sub-agent starts a branch."""

    turns: tuple[Turn, ...]

    def leaves(self) -> list[int]:
        """Return the indices of the turns without children."""
        parents = {t.parent for t in self.turns}
        return [i for i in range(len(self.turns)) if i not in parents]

    def chain(self, leaf: int) -> list[int]:
        """Return the indices of the turns from the root to the turn `leaf`, both included."""
        found = [leaf]
        while (parent := self.turns[found[-1]].parent) is not None:
            found.append(parent)
        return found[::-1]

    def path(self, leaf: int) -> Path:
        """Return the tokens from the root to the turn `leaf`, as arrays.

        Raises `ValueError` when the routes of a completion do not fit its tokens."""
        chain = [self.turns[at] for at in self.chain(leaf)]
        num_tokens = sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in chain)
        token_ids, mask = np.empty(num_tokens, np.int32), np.zeros(num_tokens, bool)
        logprobs, epochs = np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.int32)
        steps = np.full(num_tokens, UNKNOWN, np.int32)
        routes = _no_routes(chain, num_tokens)
        known = np.zeros(len(routes), bool)
        at_token = 0
        for turn in chain:
            start = at_token + len(turn.prompt_ids)
            token_ids[at_token:start] = turn.prompt_ids
            if turn.completion.spans:
                steps[at_token:start] = turn.completion.spans[0].version.step
            at_token = start + len(turn.completion.token_ids)
            token_ids[start:at_token] = turn.completion.token_ids
            mask[start:at_token] = True
            logprobs[start:at_token] = turn.completion.logprobs
            for span in turn.completion.spans:
                steps[start : start + span.num_tokens] = span.version.step
                epochs[start : start + span.num_tokens] = span.kv_epoch
                start += span.num_tokens
            _take_routes(turn.completion, routes, known, at_token - 1)
        digests = {s.version.digest for turn in chain for s in turn.completion.spans}
        return Path(
            token_ids=token_ids,
            mask=mask,
            logprobs=logprobs,
            steps=steps,
            kv_epochs=epochs,
            routes=routes,
            digest=digests.pop() if len(digests) == 1 else "",
        )


def _no_routes(chain: list[Turn], num_tokens: int) -> Routes:
    """Return an array for the routes of a path, all `missing_route`; of length 0 when no completion has routes."""
    for turn in chain:
        routes = turn.completion.routes
        if len(routes):
            return np.full((num_tokens, *routes.shape[1:]), missing_route(routes.dtype), routes.dtype)
    return np.zeros((0, 0, 0), np.uint8)


def _take_routes(completion: Completion, routes: Routes, known: Bools, end: int) -> None:
    """Copy a completion's routes into the routes of its path, at positions that are not `known` yet.

    They must reach to `end`, the position that predicted the last token. Raises `ValueError`."""
    new, start = completion.routes, completion.routes_start
    if not len(new):
        return
    if start < 0 or start + len(new) != end or new.shape[1:] != routes.shape[1:] or new.dtype != routes.dtype:
        raise ValueError(
            f"completion {completion.request_id}: routes {new.dtype} {new.shape} from {start} do not fit its tokens, "
            f"which were computed up to {end}"
        )
    fresh = ~known[start:end]
    routes[start:end][fresh] = new[fresh]
    known[start:end] = True


class Ending(enum.StrEnum):
    """Why the agent stopped. The agent can cause each of these, so a rollout with any of them is graded.

    SUBMITTED: it called `submit`. TURNS, CONTEXT, DEADLINE: it reached the limit of turns, of context tokens, or of
    time: that of the run, or one of the agent program's own. STOPPED: the agent program ended in another way without a
    submission."""

    SUBMITTED = "submitted"
    TURNS = "turns"
    CONTEXT = "context"
    DEADLINE = "deadline"
    STOPPED = "stopped"


class Boundary(enum.StrEnum):
    """Which part of the system made a rollout invalid.

    Each needs evidence that the agent cannot have caused the failure. PROVIDER: no engine answered. MACHINE: the
    sandbox or its launcher failed. TASK: the hidden tests or the verifier fail even without the agent's files. GRADER:
    the grader's own process failed. STORE: the rollout could not be stored. WORKER: the process that ran the rollout
    died. RUN: the run was stopped."""

    PROVIDER = "provider"
    MACHINE = "machine"
    TASK = "task"
    GRADER = "grader"
    STORE = "store"
    WORKER = "worker"
    RUN = "run"


class Graded(msgspec.Struct, frozen=True, kw_only=True, tag="graded"):
    """The outcome of a rollout that was graded. `terms` are the raw parts of its reward; the first is the grade.

    `etude.rewards` composes the reward from them. `trust`: how far the grade can be trusted. Raises `ValueError` when
    the first term is not a known grade."""

    terms: tuple[Term, ...]
    trust: Trust

    def __post_init__(self) -> None:
        if not self.terms or self.terms[0].name != GRADE or self.terms[0].value is None:
            raise ValueError(f"the first term of a judged rollout must be its {GRADE}, a number")

    @classmethod
    def of(
        cls, grade: float, measures: Mapping[str, float] = NO_MEASURES, *, trust: Trust, reason: str, version: str = ""
    ) -> Graded:
        """Create the outcome of a rollout from a grader's result.

        `grade`: usually from 0 to 1. `measures`: further reward terms by name; NaN and infinities become None
        (unknown). `trust`: whether the agent's code ran in the grader. `reason`: why this grade was given, in one line,
        such as "all 12 hidden tests pass". `version`: the grader's version.

        >>> Graded.of(0.0, {"tests": 0.5}, trust=Trust.DATA, reason="1 of 2 hidden tests pass").values
        {'grade': 0.0, 'tests': 0.5}
        """
        terms = [Term(name=GRADE, value=grade, version=version, evidence=reason)]
        for name, value in measures.items():
            known = math.isfinite(value)
            evidence = "" if known else f"the grader gave {value}"
            terms.append(Term(name=name, value=value if known else None, version=version, evidence=evidence))
        return cls(terms=tuple(terms), trust=trust)

    @property
    def grade(self) -> float:
        """The grade that the grader gave."""
        value = self.terms[0].value
        assert value is not None, "checked when it was made"
        return value

    @property
    def reason(self) -> str:
        """The reason for the grade, in one line."""
        return self.terms[0].evidence

    @property
    def values(self) -> dict[str, float | None]:
        """The values of all terms by name; None where unknown."""
        return {term.name: term.value for term in self.terms}

    def with_terms(self, *terms: Term) -> Graded:
        """Return a copy with further terms. They replace terms of the same names."""
        names = {term.name for term in terms}
        return Graded(terms=(*(one for one in self.terms if one.name not in names), *terms), trust=self.trust)


class Invalid(msgspec.Struct, frozen=True, kw_only=True, tag="invalid"):
    """The outcome of a rollout that failed outside the agent's reach, so that it says nothing about the policy.

    It is stored, but not trained on and not part of baselines. `boundary`: the part of the system that failed.
    `reason`: one line. `evidence`: the observation of the host, such as an exit status, an errno, or the name of a
    deadline."""

    boundary: Boundary
    reason: str
    evidence: str


Outcome = Graded | Invalid


class Unforked(enum.StrEnum):
    """Why the machine of a rollout was not forked after its first summary, although `harness.forks` is set.

    The rollout then goes on alone, on its machine. GONE: the agent has ended its machine. TOO_LARGE: the state of the
    machine cannot be saved, mostly because of its size. The agent can cause both."""

    GONE = "gone"
    TOO_LARGE = "too-large"


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a rollout that it shares with other rollouts: everything up to its first summary.

    After the summary the machine was forked, and each of these rollouts is one continuation. `origin`: id of the
    rollout that sampled the shared part; it is the first continuation itself. `num_turns`: the first turns of the trace
    are shared, so many. `num_sampled`: number of tokens that the policy sampled in them."""

    origin: str
    num_turns: int
    num_sampled: int


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout to run, as the conductor (the process that controls a run) sends it to a worker.

    Ids look like "g000012" for a group and "g000012.3" for its rollout 3. `attempt`: 0, then one more each time the
    rollout is run again. `group_seed`: for draws that all rollouts of the group share. `min_step`: the lowest version
    step of weights that may sample it. `pin_step`: the only version step that may sample it, for evaluations; None: any
    from `min_step` on. `keep_routes`: whether completions must have routes (the expert indices of each token).
    `forks`: how many continuations to run after the first summary, each on a fork of the machine: "g000012.3",
    "g000012.3.1", "g000012.3.2"."""

    rollout_id: str
    group_id: str
    attempt: int
    task: Task
    seed: int
    temperature: float
    group_seed: int = 0
    min_step: int = 0
    pin_step: int | None = None
    keep_routes: bool = True
    forks: int = 1

    def continuation(self, number: int) -> RolloutSpec:
        """Return the spec of a continuation after the fork of the machine. Continuation 0 is this rollout itself.

        Each has a seed of its own, from this rollout's seed and the number."""
        if not number:
            return self
        digest = hashlib.blake2b(f"{self.seed}|continuation {number}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        return msgspec.structs.replace(self, rollout_id=f"{self.rollout_id}.{number}", seed=seed)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout as a worker returns it, before it is graded.

    `exports`: path → content of the files that the task declares, read from the frozen machine (`records.exports`).
    `tool_s`: seconds of `wall_s` that were spent in tool calls. `invalid`: set when the rollout failed outside the
    agent's reach; then `exports` is empty. `fork`: what it shares with other rollouts; None: nothing. `unforked`:
    why its machine was not forked; None: it was, or was not to be."""

    rollout_id: str
    group_id: str
    attempt: int
    task: Task
    trace: Trace
    ending: Ending
    exports: dict[str, bytes]
    wall_s: float
    tool_s: float
    invalid: Invalid | None = None
    fork: Fork | None = None
    unforked: Unforked | None = None

    @property
    def num_turns(self) -> int:
        """The number of model calls. A stop text that cut a turn off is recorded as a turn of the trace, but does not
        count as a call."""
        return sum(turn.parent is None or len(turn.prompt_ids) > 0 for turn in self.trace.turns)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(t.completion.token_ids) for t in self.trace.turns)

    @property
    def num_malformed(self) -> int:
        """Number of tool calls that could not be parsed."""
        return sum(call.malformed for turn in self.trace.turns for call in turn.calls)
