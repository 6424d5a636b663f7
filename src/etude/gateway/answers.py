"""The model's answer to a request, before it is written in the format of a vendor's API."""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from etude.capture import Chat, Cut, Message, ParsedReply, cut_at_stop
from etude.capture.streams import THOUGHT, split_unfinished
from etude.capture.summaries import Shortened
from etude.gateway.keys import KeyUse
from etude.records.completion import Completion, Sampling, StopReason
from etude.records.wire import I32


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The identity of one response: `id` (hexadecimal, 32 characters or more), `model` (its name for clients),
    `created` (Unix time in s)."""

    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class SummaryUse:
    """The number of summaries in the model's context, and the tokens used to write new ones for this answer.

    `number`: all summaries in the context. `num_prompt`, `num_sampled`: prompt tokens and sampled tokens of all
    requests for new summaries, also of those whose summary was refused."""

    number: int = 0
    num_prompt: int = 0
    num_sampled: int = 0

    @classmethod
    def of(cls, shortened: Shortened) -> SummaryUse:
        """Return the summaries of a shortened conversation."""
        sampled = sum(len(node.completion.token_ids) for node in shortened.written)
        return cls(shortened.number, sum(node.num_tokens for node in shortened.written) - sampled, sampled)


@dataclass(slots=True)
class Spent:
    """The numbers of tokens that a request has used so far. They count even if its answer is not complete.

    - `prompt`: tokens of the prompt.
    - `cached`: tokens of the prompt whose KV was reused.
    - `sampled`: sampled tokens of all answers to the request.
    - `summary`: tokens read and sampled for summaries, also for those that were refused.
    - `reserved`: the tokens that were reserved for the request in the quota of `key`. `is_reserved`: those of its
      answers are among them.
    - `key`: the API key whose quota counts them; None: no quota."""

    prompt: int = 0
    cached: int = 0
    sampled: int = 0
    summary: int = 0
    reserved: int = 0
    is_reserved: bool = False
    key: KeyUse | None = None

    def reserve(self, num_tokens: int) -> None:
        """Reserve tokens that the request may use (`KeyUse.reserve`). Raises `RequestRefused`."""
        if self.key is not None:
            self.key.reserve(num_tokens, own=self.reserved)
            self.reserved += num_tokens


class TokenLogprob(NamedTuple):
    """A sampled token as text, and its log-probability (natural logarithm).

    `top`: the likeliest tokens at its position with their log-probabilities, the likeliest first."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion of the model as text, reasoning and tool calls. `make_answer` makes one.

    - `text`: the text without reasoning and tool calls, and without the stop text.
    - `reasoning`: the text of the model's reasoning, or "".
    - `calls`: tool calls, each as ``{"name": str, "arguments": dict}``.
    - `finish`: "stop", "length" or "tool_calls".
    - `prompt_ids`: the token ids that the model read, [P] int32.
    - `completion`: what the policy returned, up to the end of a stop text; `sampling`: how it was sampled.
    - `num_reasoning`: the number of sampled reasoning tokens, including marks such as ``</think>``.
    - `summaries`: the summaries in the prompt (`SummaryUse`).
    - `logprobs`: log-probabilities of the sampled tokens up to a stop text or the stop token. None: the client did not
      ask for them.
    - `cut`: how a stop text of the request cuts the completion off; None if none does."""

    text: str
    reasoning: str
    calls: tuple[dict[str, Any], ...]
    finish: str
    prompt_ids: I32
    completion: Completion
    sampling: Sampling
    num_reasoning: int = 0
    logprobs: list[TokenLogprob] | None = None
    summaries: SummaryUse = SummaryUse()
    cut: Cut | None = None

    @property
    def stop_text(self) -> str | None:
        """The stop text of the request that cut the answer off; None if none did."""
        return None if self.cut is None else self.cut.stop_text

    @property
    def fingerprint(self) -> str | None:
        """The version of the weights that sampled the last token, as text (`system_fingerprint` in OpenAI's API); None
        if no token was sampled."""
        spans = self.completion.spans
        return str(spans[-1].version) if spans else None

    def message(self) -> Message:
        """Return the message as a later request will repeat it, in the form of `ChatRequest.messages`.

        The gateway records the turn under this message, to find the turn when a later request repeats it."""
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})

    def calls_with_ids(self, prefix: str, head: ResponseHead, index: int = 0) -> list[tuple[str, str, str]]:
        """Return (id, name, arguments as JSON text) of each tool call.

        An id is made of `prefix`, the end of the response's id, `index` (the number of the answer) and the number of
        the call."""
        before = f"{prefix}{head.id[-12:]}" + (f"{index}_" if index else "")
        return [
            (f"{before}{number}", call["name"], json.dumps(call["arguments"], ensure_ascii=False))
            for number, call in enumerate(self.calls)
        ]


def make_answer(
    completion: Completion,
    *,
    chat: Chat,
    signatures: Any,
    stop: Sequence[str],
    prompt_ids: I32,
    sampling: Sampling,
    reply: ParsedReply | None = None,
    cut: Cut | None = None,
    logprobs: bool = False,
    summaries: SummaryUse = SummaryUse(),
) -> Answer:
    """Parse a completion into text, reasoning and tool calls, and cut the text off before the first stop text.

    - `signatures`: the tools, as returned by `chat.signatures`; None: the completion is taken as plain text.
    - `stop`: the stop texts.
    - `prompt_ids`: the token ids that the model read, [P] int32. `sampling`: how the completion was sampled.
    - `reply`: the parsed completion; None: `chat` parses it.
    - `cut`: how a stop text cuts the completion off, if known.
    - `logprobs`: whether the answer has log-probabilities.

    A malformed tool call is returned as text. A tool call that was cut off is left out."""
    if reply is None and signatures is not None:
        reply = chat.parse(completion.token_ids, signatures, strict=False)
    calls: tuple[dict[str, Any], ...] = ()
    reasoning = ""
    if reply is not None and not reply.error:
        calls = tuple({"name": call.name, "arguments": call.arguments} for call in reply.calls)
        text, reasoning = reply.text, reply.reasoning
    else:
        thinking = None if reply is None else chat.in_reasoning(prompt_ids)
        ids = completion.token_ids
        if reply is not None and completion.stop_reason is StopReason.LENGTH:  # a call that was cut off is no text
            ids = ids[: chat.num_text_tokens(ids.tolist())]
        reasoning, text = split_unfinished(chat.decode(ids), thinking)
    if cut is None and stop:
        thinking = None if signatures is None else chat.in_reasoning(prompt_ids)
        cut = cut_at_stop(chat, completion, text, stop, num_prompt=len(prompt_ids), in_reasoning=thinking)
    if cut is not None:
        text, calls, completion = cut.text, (), cut.sampled
    length = completion.stop_reason is StopReason.LENGTH and cut is None
    return Answer(
        text=text,
        reasoning=reasoning,
        calls=calls,
        finish="tool_calls" if calls else "length" if length else "stop",
        prompt_ids=prompt_ids,
        completion=completion,
        sampling=sampling,
        num_reasoning=_num_reasoning(completion, chat, reasoning, alone=not (text or calls)) if reasoning else 0,
        summaries=summaries,
        logprobs=_logprobs(completion, chat, cut) if logprobs else None,
        cut=cut,
    )


def _num_reasoning(completion: Completion, chat: Chat, reasoning: str, *, alone: bool) -> int:
    """Return the number of sampled reasoning tokens of a completion that begins with reasoning, with its end mark.

    Without this mark, as in the format of gpt-oss, it is the number of tokens of the text `reasoning`, or of the whole
    completion if it has nothing else (`alone`)."""
    ids = completion.token_ids.tolist()
    before, mark, _ = chat.decode(ids).partition(THOUGHT)
    if not mark:
        return len(ids) - (completion.stop_reason is StopReason.STOP) if alone else len(chat.encode(reasoning))
    end = len(before) + len(mark)
    return bisect.bisect_left(range(len(ids)), end, key=lambda n: len(chat.decode(ids[:n])))


def _logprobs(completion: Completion, chat: Chat, cut: Cut | None) -> list[TokenLogprob]:
    """Return the log-probabilities of the tokens before the stop token, or of those that have text before the cut."""
    ids = completion.token_ids.tolist()
    length = len(ids) - (completion.stop_reason is StopReason.STOP)
    if cut is not None:
        length = len(cut.kept.token_ids) + bool(cut.rest)
    return [
        TokenLogprob(
            chat.decode([ids[i]]),
            float(completion.logprobs[i]),
            [
                (chat.decode([int(token)]), float(logprob))
                for token, logprob in zip(completion.top_ids[i], completion.top_logprobs[i], strict=True)
            ]
            if len(completion.top_ids)
            else [],
        )
        for i in range(length)
    ]


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return a token in the format in which OpenAI's APIs list log-probabilities.

    Its field `bytes` is None for a token that is only a part of a character."""

    def one(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    return {**one(token.text, token.logprob), "top_logprobs": [one(*top) for top in token.top]}


def summary_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the field `summaries` of a response's `usage` object; {} if there is no summary and none was tried.

    It has the number of summaries in the context, and the tokens that were read and sampled to write new ones, refused
    ones included."""
    number = answers[0].summaries.number
    num_prompt = sum(answer.summaries.num_prompt for answer in answers)
    if not number and not num_prompt:
        return {}
    sampled = sum(answer.summaries.num_sampled for answer in answers)
    return {"summaries": {"number": number, "prompt_tokens": num_prompt, "completion_tokens": sampled}}


def num_sampled(answers: Sequence[Answer]) -> int:
    """Return the number of sampled tokens of all answers to one request."""
    return sum(len(answer.completion.token_ids) for answer in answers)
