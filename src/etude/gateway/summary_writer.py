"""Samples summaries of conversations in production (`etude.capture.summaries.Writer`)."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from etude.capture import Chat, Message, ParsedReply, SummaryLimits, TurnTree
from etude.capture.context import HISTORY, MAX_ATTEMPTS, Carried
from etude.capture.tree import Node
from etude.gateway.answers import Spent
from etude.gateway.errors import cancelled
from etude.records.completion import CompletionRequest, Sampling, StopReason, Traffic
from etude.records.rollout import TurnKind
from etude.seams import Policy


@dataclass(frozen=True)
class SummaryWriter:
    """Counts tokens and samples summaries for one request. Implements `etude.capture.summaries.Writer`.

    `tools` are the request's tools in OpenAI's format, and `signatures` the same tools for the chat format. `run` runs
    a function in a tokeniser thread. The tokens of summaries are added to `spent`. Summaries are sampled as in
    training. The seed is a digest of the conversation, so a summary that is sampled again is the same."""

    policy: Policy
    chat: Chat
    tree: TurnTree
    limits: SummaryLimits
    tools: Sequence[dict[str, Any]]
    signatures: Any
    deadline_s: float
    run: Callable[[Callable[[], Any]], Awaitable[Any]]
    spent: Spent
    max_attempts: int = MAX_ATTEMPTS

    @property
    def payer(self) -> str:
        return "" if self.spent.key is None else self.spent.key.name

    async def num_tokens(self, messages: list[Message]) -> int:
        """Return the number of tokens of a prompt. Raises `ContextFull` for one that is certainly too long."""
        count = partial(self.tree.prompt_tokens, messages, self.signatures, tools=self.tools)
        number: int = await self.run(partial(count, max_tokens=self.limits.context_tokens))
        return number

    async def ask(self, messages: list[Message], attempt: int) -> tuple[Node, ParsedReply]:
        """Sample a summary and return (its node, the parsed completion).

        Raises `RequestRefused` when the engine cancels the request, and the errors of the policy."""
        prompt = await self.run(partial(self.tree.prompt, messages, self.signatures, tools=self.tools))
        digest = hashlib.blake2b(f"summary {attempt} ".encode() + prompt.key, digest_size=8).digest()
        request = CompletionRequest(
            request_id=f"{prompt.session_id}/{uuid.uuid4().hex}",
            session_id=prompt.session_id,
            prompt_ids=prompt.token_ids,
            sampling=Sampling(
                max_tokens=self.limits.summary_tokens,
                stop_token_ids=self.chat.stop_token_ids,
                temperature=self.limits.temperature,
                seed=int.from_bytes(digest, "little") >> 1,
            ),
            routes_from=None,
            deadline_s=self.deadline_s,
            keep_session=False,
            fork_from=prompt.fork_from,
            traffic=Traffic.PRODUCTION,
        )
        self.spent.reserve(len(request.prompt_ids) + request.sampling.max_tokens)
        completion = await self.policy.complete(request)
        self.spent.summary += len(request.prompt_ids) + len(completion.token_ids)
        if completion.stop_reason is StopReason.CANCELLED:
            raise cancelled(completion.engine)
        reply = self.chat.parse(completion.token_ids, self.signatures)
        message: Message = {"role": "assistant", "content": reply.text}
        sampling = request.sampling
        return self.tree.record(prompt, completion, message, sampling=sampling, kind=TurnKind.SUMMARY), reply

    async def carry(self, summary: str, number: int, covered: Sequence[Message]) -> Carried:
        """Return the text and numbers with which the conversation continues after a summary. The model gets them in the
        same wording as in training.

        The wording gives the number of turns left. A client has no limit of turns, so the number counts down from the
        limit of training and then starts again. The wording also names a file with the history, although there is no
        such file outside of training."""
        num_turns = number + sum(message["role"] == "assistant" for message in covered)
        return Carried(summary, number, self.limits.max_turns - num_turns % self.limits.max_turns, HISTORY)
