"""The built-in reward term `effort`: what a solved task cost, in tokens, calls and turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from etude.errors import ConfigError
from etude.records.reward import Score
from etude.records.rollout import Graded, Rollout

NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
RATE = 0.2
"""The largest change of a self-tuned weight in one step, as a share of its upper limit."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """The effort of a rollout as a negative value: −grade · min(1, C(x) / C(limit)), where x is its effort in tokens.

    C(x) = ((1 + kx)^(1−q) − 1) / (k(1−q)); for q = 1 it is ln(1 + kx) / k. Its slope is (1 + kx)^−q, so the first
    tokens cost most, and a long task costs less per token. x is the sum of thinking tokens, answer tokens, tokens of
    tool outputs, calls and turns, each times its price. The value of a rollout of grade 0 is 0. With a weight of at
    most 1 a solved rollout never gets less than one that gave up, so giving up early never pays.

    - `k`: 1/k tokens is the effort from which the cost flattens. `q`: how strongly it flattens; 0 charges every token
      the same.
    - `limit`: the effort, in tokens, at and above which the value is −grade.
    - `thinking`, `answer`: price of a sampled token. `tool_output`: of a token that the agent program appended after
      the first turn. `call`: of a tool call, `turn`: of a model call, both in tokens.
    - `thinking_end`: the token id that ends the model's reasoning; −1: all sampled tokens count as answer.

    Raises `ConfigError` if all five prices are 0."""

    k: Positive = 0.01
    q: NotNegative = 0.5
    limit: Positive = 4096.0
    thinking: NotNegative = 1.0
    answer: NotNegative = 1.0
    tool_output: NotNegative = 0.1
    call: NotNegative = 5.0
    turn: NotNegative = 5.0
    thinking_end: int = -1

    def __post_init__(self) -> None:
        if not any((self.thinking, self.answer, self.tool_output, self.call, self.turn)):
            facts = "thinking, answer, tool_output, call and turn are 0, so the term is always 0"
            raise ConfigError("all prices of the effort term are 0", facts, hint="set at least one of them above 0")

    @property
    def version(self) -> str:
        """A text that changes with the formula and its settings. It is stored with each value."""
        return "1"

    def cost(self, effort: float) -> float:
        """Return C(x) for an effort in tokens.

        >>> round(Effort(k=1.0, q=0.5).cost(3.0), 9), round(Effort(q=0.0).cost(7.0), 9)
        (2.0, 7.0)
        """
        if self.q == 1.0:
            return math.log1p(self.k * effort) / self.k
        return math.expm1((1.0 - self.q) * math.log1p(self.k * effort)) / (self.k * (1.0 - self.q))

    def effort(self, rollout: Rollout) -> float:
        """Return the effort of a rollout, in tokens."""
        turns = rollout.trace.turns
        thinking = answer = tool_output = 0
        for turn in turns:
            ids = turn.completion.token_ids
            ends = (ids == self.thinking_end).nonzero()[0]
            thought = int(ends[0]) + 1 if len(ends) else 0
            thinking, answer = thinking + thought, answer + len(ids) - thought
            tool_output += len(turn.prompt_ids) if turn.parent is not None else 0
        calls = sum(len(turn.calls) for turn in turns)
        prices = (self.thinking, self.answer, self.tool_output, self.call, self.turn)
        amounts = (thinking, answer, tool_output, calls, rollout.num_turns)
        return math.fsum(price * amount for price, amount in zip(prices, amounts, strict=True))

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        effort = self.effort(rollout)
        share = min(1.0, self.cost(effort) / self.cost(self.limit))
        evidence = f"effort of {effort:g} tokens, {share:.3f} of the cost of {self.limit:g}"
        return Score(value=min(0.0, -max(0.0, graded.grade) * share), evidence=evidence)


class Tuned(msgspec.Struct, frozen=True):
    """The state, before a step, of a weight that is adjusted each step (`TermConfig.target`).

    `first_tokens`: mean sampled tokens of the solved rollouts of the first step that had one; None before it."""

    weight: float = 0.0
    first_tokens: float | None = None


def next_weight(state: Tuned, solved_tokens: Sequence[int], *, target: float, limit: float) -> Tuned:
    """Adjust a weight for the next step, from the number of sampled tokens of each rollout that solved its task.

    The weight rises while solved rollouts take more tokens than `target` on average, and falls while they take fewer,
    from 0 to `limit`. A target below 1 is a share of the mean in the first step. Without a solved rollout the weight
    does not change.

    >>> next_weight(Tuned(), [300, 100], target=100.0, limit=0.5)
    Tuned(weight=0.1, first_tokens=200.0)
    >>> round(next_weight(Tuned(0.1, 200.0), [90], target=0.5, limit=0.5).weight, 9)
    0.09
    """
    if not solved_tokens:
        return state
    mean = math.fsum(solved_tokens) / len(solved_tokens)
    first = mean if state.first_tokens is None else state.first_tokens
    wanted = target * first if target < 1.0 else target
    error = min(1.0, max(-1.0, mean / wanted - 1.0))
    return Tuned(min(limit, max(0.0, state.weight + RATE * limit * error)), first)
