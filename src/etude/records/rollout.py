"""Rollouts: one try at a task, its trace, and how it ended."""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from etude.records.completion import MISSING_ROUTE, Completion
from etude.records.task import Task, Trust
from etude.records.wire import F32, I32, U8, Bools


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call the model made and what came back. A malformed call is kept as one, with the error it was told."""

    name: str  # "" when the call could not be parsed
    arguments: dict[str, str | int]
    output: str
    malformed: bool = False


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a trace: the tokens it adds, nothing else. `parent` None is a root.

    The context of a turn is its ancestors' tokens, then `prompt_ids`, then what the completion sampled.
    """

    parent: int | None  # index of the parent in Trace.turns
    prompt_ids: I32  # [P] what the harness appended: rendered messages and the generation prompt
    completion: Completion
    call: ToolCall | None = None  # None: the model spoke without calling a tool


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A root-to-leaf path: exactly what the model saw and said, as arrays over its T tokens."""

    token_ids: I32  # [T]
    mask: Bools  # [T] True where the policy sampled the token
    logprobs: F32  # [T] 0.0 where mask is False
    steps: I32  # [T] version step that sampled the token, -1 where mask is False
    kv_epochs: I32  # [T] 0 where mask is False
    routes: U8  # [T, layers, top_k], MISSING_ROUTE where no engine computed the position (the last token)
    digest: str = ""  # content digest of the one version that sampled every token; "" when several did, or unknown


class Trace(msgspec.Struct, frozen=True):
    """A rollout as a tree of turns. Made by rollouts, stored whole, read by credit and packing.

    A linear rollout is a chain: turn i has parent i - 1. A summary or a sub-agent is a branch.
    """

    turns: tuple[Turn, ...]

    def leaves(self) -> list[int]:
        """Indices of the turns nobody continues."""
        parents = {t.parent for t in self.turns}
        return [i for i in range(len(self.turns)) if i not in parents]

    def path(self, leaf: int) -> Path:
        """The path from the root to `leaf`. Raises `ValueError` when token, route and span counts disagree."""
        chain: list[Turn] = []
        at: int | None = leaf
        while at is not None:
            chain.append(self.turns[at])
            at = self.turns[at].parent
        chain.reverse()
        num_tokens = sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in chain)
        token_ids, mask = np.empty(num_tokens, np.int32), np.zeros(num_tokens, bool)
        logprobs, epochs = np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.int32)
        steps = np.full(num_tokens, -1, np.int32)
        at_token = 0
        for turn in chain:
            start = at_token + len(turn.prompt_ids)
            token_ids[at_token:start] = turn.prompt_ids
            at_token = start + len(turn.completion.token_ids)
            token_ids[start:at_token] = turn.completion.token_ids
            mask[start:at_token] = True
            logprobs[start:at_token] = turn.completion.logprobs
            for span in turn.completion.spans:
                steps[start : start + span.num_tokens] = span.version.step
                epochs[start : start + span.num_tokens] = span.kv_epoch
                start += span.num_tokens
        shape = chain[0].completion.routes.shape[1:]
        routes = np.full((num_tokens, *shape), MISSING_ROUTE, np.uint8)
        for turn in chain:
            c = turn.completion
            end = c.routes_start + len(c.routes)
            if end > num_tokens or c.routes.shape[1:] != shape:
                raise ValueError(f"completion {c.request_id}: routes {c.routes.shape} reach past the path")
            fresh = (
                routes[c.routes_start : end, 0, 0] == MISSING_ROUTE
                if len(shape) == 2 and 0 not in shape
                else np.ones(0, bool)
            )
            routes[c.routes_start : end][fresh] = c.routes[fresh]
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


class Ending(enum.StrEnum):
    """Why the agent stopped. Every one of these the agent can cause, so every one is graded."""

    SUBMITTED = "submitted"
    TURNS = "turns"  # the turn limit
    CONTEXT = "context"  # the context limit
    DEADLINE = "deadline"  # the wall-clock limit of the rollout


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
    """The rollout was judged. `terms` are the raw parts of the reward, so that credit can be recomputed."""

    reward: float
    terms: dict[str, float]
    trust: Trust
    reason: str  # one line: "all 12 hidden tests pass", "calc.py does not import: SyntaxError"


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
        return sum(t.call is not None and t.call.malformed for t in self.trace.turns)
