"""Records of rollouts: one try at a task, its trace, and how it ended."""

from __future__ import annotations

import enum
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
"""In `Path.steps`: it is not known who read the token. So is what nobody sampled and has an apparent step of -1."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model and its output. A call that could not be parsed is kept, with its error as output."""

    name: str  # "" when the call could not be parsed
    arguments: dict[str, str | int]
    output: str
    malformed: bool = False


class TurnKind(enum.StrEnum):
    """The purpose of a turn."""

    ACT = "act"  # it works at the task
    SUMMARY = "summary"  # it writes the text with which a cleared context goes on
    SIDE = "side"  # beside the task: a title, a classification


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a trace: the tokens it adds, nothing else. `parent` None is a root.

    The context of a turn is its ancestors' tokens, then `prompt_ids`, then what the completion sampled.
    """

    parent: int | None  # index of the parent in Trace.turns
    prompt_ids: I32  # [P] what the harness appended: rendered messages and the generation prompt
    completion: Completion
    sampling: Sampling  # as the engine used it
    calls: tuple[ToolCall, ...] = ()  # in the order in which the model made them; empty: it spoke without a call
    kind: TurnKind = TurnKind.ACT


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A path from root to leaf of a trace: exactly the tokens that the model read and sampled, as arrays over T
    tokens."""

    token_ids: I32  # [T]
    mask: Bools  # [T] True where the policy sampled the token
    logprobs: F32  # [T] 0.0 where mask is False
    steps: I32  # [T] version step that sampled the token; of others, the first that read it, or `UNKNOWN`;
    # of a version of a lost lineage its apparent step, which may be negative (`experience.lineage`)
    kv_epochs: I32  # [T] of sampled tokens: swaps that the keys they attended to had lived through
    routes: Routes  # [T, MoE layers, top_k], `missing_route` where none is known (the last token); [0, …] without any
    digest: str = ""  # content digest of the one version that sampled every token; "" when several did, or unknown

    @property
    def oldest_steps(self) -> I32:
        """[T] the oldest version step behind each token: of the keys that it attended to in its completion, or its own.

        A token of epoch 0 attends to keys that its own version computed; one of a later epoch also to those before it,
        back to the last token of epoch 0.
        """
        # A stretch begins at each token of epoch 0. Each lies 2^33 below the one before, so that the running minimum
        # never reaches back into an earlier stretch.
        stretch = np.cumsum(self.kv_epochs == 0) * np.int64(2**33)
        oldest: I32 = (np.minimum.accumulate(self.steps - stretch) + stretch).astype(np.int32)
        return oldest


class Trace(msgspec.Struct, frozen=True):
    """A rollout as a tree of turns. Made by rollouts, stored whole, read by credit and packing.

    A linear rollout is a chain: turn i has parent i - 1. A summary or a sub-agent is a branch.
    """

    turns: tuple[Turn, ...]

    def leaves(self) -> list[int]:
        """Indices of the turns that no other turn continues."""
        parents = {t.parent for t in self.turns}
        return [i for i in range(len(self.turns)) if i not in parents]

    def chain(self, leaf: int) -> list[int]:
        """Indices of the turns from the root to `leaf`."""
        found = [leaf]
        while (parent := self.turns[found[-1]].parent) is not None:
            found.append(parent)
        return found[::-1]

    def path(self, leaf: int) -> Path:
        """The path from the root to `leaf`. Raises `ValueError` when token, route and span counts disagree."""
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
    """Where a path's routes will be laid, all missing; for no token when no completion has any."""
    for turn in chain:
        routes = turn.completion.routes
        if len(routes):
            return np.full((num_tokens, *routes.shape[1:]), missing_route(routes.dtype), routes.dtype)
    return np.zeros((0, 0, 0), np.uint8)


def _take_routes(completion: Completion, routes: Routes, known: Bools, end: int) -> None:
    """Lay a completion's routes into its path's, where none are `known` yet. They reach to `end`, the position that
    predicted its last token: a token that was taken back has taken its route along."""
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
    """Why the agent stopped. Every one of these the agent can cause, so every one is graded."""

    SUBMITTED = "submitted"
    TURNS = "turns"  # the turn limit
    CONTEXT = "context"  # the context limit
    DEADLINE = "deadline"  # the wall-clock limit of the rollout
    STOPPED = "stopped"  # the agent program returned without a submission


class Boundary(enum.StrEnum):
    """Where a rollout became invalid. Each needs host-side evidence that the agent could not have caused."""

    PROVIDER = "provider"  # no engine answered
    MACHINE = "machine"  # the machine or its launcher failed outside the agent's reach
    TASK = "task"  # its hidden tests or its verifier do not work, without any file of the agent's either
    GRADER = "grader"  # the grader's own process failed
    STORE = "store"
    WORKER = "worker"  # the process that ran the rollout died
    RUN = "run"  # the run was stopped


class Graded(msgspec.Struct, frozen=True, kw_only=True, tag="graded"):
    """The rollout was judged. `terms` are the raw parts of its reward, the grader's grade first. The reward itself is
    composed from them, see `etude.rewards`. Raises `ValueError` where the first term is no known grade."""

    terms: tuple[Term, ...]
    trust: Trust

    def __post_init__(self) -> None:
        if not self.terms or self.terms[0].name != GRADE or self.terms[0].value is None:
            raise ValueError(f"the first term of a judged rollout must be its {GRADE}, a number")

    @classmethod
    def of(
        cls, grade: float, measures: Mapping[str, float] = NO_MEASURES, *, trust: Trust, reason: str, version: str = ""
    ) -> Graded:
        """Make a verdict. `reason`: one line, such as "all 12 hidden tests pass"; `measures`: further numbers by name;
        `version`: of the grader. A measure that is not finite is unknown.

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
        """What the grader gave."""
        value = self.terms[0].value
        assert value is not None, "checked when it was made"
        return value

    @property
    def reason(self) -> str:
        """Why the grader gave it, in one line."""
        return self.terms[0].evidence

    @property
    def values(self) -> dict[str, float | None]:
        """The values of all terms by name; None where unknown."""
        return {term.name: term.value for term in self.terms}

    def with_terms(self, *terms: Term) -> Graded:
        """The same with further terms, which replace those of the same names."""
        names = {term.name for term in terms}
        return Graded(terms=(*(one for one in self.terms if one.name not in names), *terms), trust=self.trust)


class Invalid(msgspec.Struct, frozen=True, kw_only=True, tag="invalid"):
    """The rollout says nothing about the policy. It is kept as data and stays out of baselines."""

    boundary: Boundary
    reason: str
    evidence: str  # what the host saw: exit status, errno, the deadline's name


Outcome = Graded | Invalid


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to run. Made by the conductor, read by workers. Ids: group "g000012", rollout "g000012.3"."""

    rollout_id: str
    group_id: str
    attempt: int  # 0, then one more each time the rollout is requeued
    task: Task
    seed: int
    temperature: float
    min_step: int = 0
    pin_step: int | None = None
    keep_routes: bool = True


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout as a worker returns it: what happened, before anybody has judged it."""

    rollout_id: str
    group_id: str
    attempt: int
    task: Task
    trace: Trace
    ending: Ending
    exports: dict[str, bytes]  # path -> content from the frozen machine, as declared and capped; records.exports
    wall_s: float
    tool_s: float  # of which spent in tools
    invalid: Invalid | None = None  # set when it failed outside the agent's reach; then exports is empty

    @property
    def num_turns(self) -> int:
        return len(self.trace.turns)

    @property
    def num_sampled(self) -> int:
        """Tokens the policy sampled."""
        return sum(len(t.completion.token_ids) for t in self.trace.turns)

    @property
    def num_malformed(self) -> int:
        """Tool calls that could not be parsed."""
        return sum(call.malformed for turn in self.trace.turns for call in turn.calls)
