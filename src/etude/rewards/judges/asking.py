"""Sends a judge's question to a model: over HTTP with the API of OpenAI or Anthropic, or to a `Policy`.

aiohttp is the client, as for engines: it is a dependency of `etude[train]` anyway. The vendors' SDKs would add their
own retries under those of `Judge`, which counts every try against a budget and a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import enum
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from etude import grammars
from etude.errors import ContextFull, EngineError, InputError, MalformedRequest
from etude.records.completion import CompletionRequest, Sampling, StopReason
from etude.records.wire import I32
from etude.rewards.judges.questions import Question
from etude.rewards.judges.verdicts import Form, Likeliest, encodable
from etude.seams import Policy

if TYPE_CHECKING:
    import aiohttp

MAX_REPLY_BYTES = 4 << 20
MAX_TOKENS = 2_048
"""The most tokens of an answer, with those of the reasoning where the server counts them."""
TOP_LOGPROBS = 20
"""Number of likeliest tokens to request: the largest number that OpenAI, vLLM and etude give."""
_BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_CUT = {"length", "max_tokens", "model_context_window_exceeded"}
_ENDED = {"stop", "end_turn", "stop_sequence"}


class Dialect(enum.StrEnum):
    """The API that a server speaks. OPENAI: chat completions. ANTHROPIC: messages."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True)
class Reply:
    """The answer of a model: its text, the model's name, and the numbers of tokens, as the server reports them.

    Counts are None if the server does not report them. `num_input` includes `num_cached`. `likeliest`: the likeliest
    first tokens with their log-probabilities, for questions of the form `Form.TOKEN`; () for others."""

    text: str
    model: str
    num_input: int | None = None
    num_cached: int | None = None
    num_output: int | None = None
    likeliest: Likeliest = ()


class NoReply(Exception):
    """Raised when a model gives no answer; the message says why.

    `retry`: whether it may answer the same question later. `after_s`: how many seconds the server asks to wait.
    `charged`: whether the call may nevertheless have cost money. `reply`: the tokens that the server counted; None:
    none."""

    def __init__(
        self, why: str, *, retry: bool, after_s: float | None = None, charged: bool, reply: Reply | None = None
    ) -> None:
        super().__init__(why)
        self.retry, self.after_s, self.charged, self.reply = retry, after_s, charged, reply


class Asker(Protocol):
    """The interface of a model that answers a judge's questions.

    `identity`: texts that identify everything on which the answers depend; they are part of a judge's version.
    `max_output`: the most tokens that an answer of a form may have, which a budget reserves."""

    @property
    def identity(self) -> tuple[str, ...]: ...

    def max_output(self, form: Form) -> int: ...

    async def ask(self, question: Question) -> Reply:
        """Send a question once, and return the reply. Cancelling ends the request.

        Raises `NoReply` if the model does not answer."""
        ...


@dataclass
class HttpAsker:
    """Asks a model at a URL. Implements `Asker`.

    `url` is the base URL that the vendor's SDK takes: with ``/v1`` for OpenAI's dialect, without for Anthropic's.
    `key` is sent as the API key; "" for none. `options` are further fields of the body, such as temperature."""

    url: str
    model: str
    dialect: Dialect = Dialect.OPENAI
    key: str = field(default="", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)
    _num_open: int = field(default=0, init=False, repr=False)

    @property
    def identity(self) -> tuple[str, ...]:
        """The dialect, URL, model and options of the requests."""
        return (self.dialect, self.url.rstrip("/"), self.model, json.dumps(self.options, sort_keys=True, default=str))

    def max_output(self, form: Form) -> int:
        """The most tokens of an answer. Limits in `options` replace those of etude."""
        own = 1 if form is Form.TOKEN else MAX_TOKENS
        name = "max_completion_tokens" if self.dialect is Dialect.OPENAI else "max_tokens"
        limits = (self.options.get(name, own), self.options.get("max_tokens"))
        return max((one for one in limits if type(one) is int), default=own)

    async def ask(self, question: Question) -> Reply:
        import aiohttp

        openai = self.dialect is Dialect.OPENAI
        path = "/chat/completions" if openai else "/v1/messages"
        body = self._openai(question) if openai else self._anthropic(question)
        headers = {"content-type": "application/json"}
        if not openai:
            headers |= {"anthropic-version": "2023-06-01"} | ({"x-api-key": self.key} if self.key else {})
        elif self.key:
            headers["authorization"] = f"Bearer {self.key}"
        try:
            async with (
                self._connected() as session,
                session.post(
                    self.url.rstrip("/") + path, data=json.dumps(body), headers=headers, allow_redirects=False
                ) as answer,
            ):
                data = await answer.content.read(MAX_REPLY_BYTES + 1)
                while len(data) <= MAX_REPLY_BYTES and (more := await answer.content.read(MAX_REPLY_BYTES)):
                    data += more
                status, after = answer.status, answer.headers.get("retry-after")
        except aiohttp.ClientConnectorError as error:
            raise NoReply(f"the judge cannot be reached: {error}", retry=True, charged=False) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"the connection to the judge broke: {type(error).__name__}: {error}"
            raise NoReply(why, retry=True, charged=True) from None
        if status != 200:
            why = f"the judge answered with status {status}: {self._shown(data)}"
            raise NoReply(why, retry=status in _BUSY, after_s=_after_s(after), charged=False)
        if len(data) > MAX_REPLY_BYTES:
            raise NoReply(f"the judge's answer is longer than {MAX_REPLY_BYTES} bytes", retry=True, charged=True)
        try:
            found = json.loads(data)
            return _of_openai(found, question.form) if openai else _of_anthropic(found)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
            why = f"the judge's answer is not of the dialect {self.dialect}: {self._shown(data)}"
            raise NoReply(why, retry=True, charged=True) from None

    def _openai(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": question.messages}
        if question.form is Form.TOKEN:
            body |= {"max_completion_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
        else:
            body["max_completion_tokens"] = MAX_TOKENS
        if question.schema is not None:
            form = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body | dict(self.options)

    def _anthropic(self, question: Question) -> dict[str, Any]:
        messages = [{"role": "user", "content": question.user}]
        body = {"model": self.model, "max_tokens": MAX_TOKENS, "system": question.system, "messages": messages}
        if question.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": question.schema}}
        return body | dict(self.options)

    def _shown(self, data: bytes) -> str:
        text = " ".join(data[:2000].decode(errors="replace").split())
        return (text.replace(self.key, "***") if self.key else text)[:300]

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield connections that all calls under way share. The last call closes them."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0))
        self._num_open += 1
        session = self._session
        try:
            yield session
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._session = None
                await session.close()


def _of_openai(found: Mapping[str, Any], form: Form) -> Reply:
    used = found.get("usage") or {}
    [choice] = found["choices"]
    message, ended = choice["message"], choice.get("finish_reason")
    reply = Reply(
        text=message.get("content") or "",
        model=encodable(str(found.get("model") or "")),
        num_input=_count(used.get("prompt_tokens")),
        num_cached=_count((used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
        num_output=_count(used.get("completion_tokens")),
        likeliest=_likeliest(choice) if form is Form.TOKEN else (),
    )
    if form is Form.TOKEN and not reply.likeliest:
        raise NoReply(str(_no_logprobs(reply.model)), retry=False, charged=True, reply=reply)
    return _checked(reply, ended, message.get("refusal"), whole=form is not Form.TOKEN)


def _likeliest(choice: Mapping[str, Any]) -> Likeliest:
    """Return the likeliest first tokens of a choice of chat completions; () if the server gives none."""
    first = next(iter((choice.get("logprobs") or {}).get("content") or ()), None)
    if first is None or not first.get("top_logprobs"):
        return ()
    found = [(one["token"], one["logprob"]) for one in first["top_logprobs"]]
    if (first["token"], first["logprob"]) not in found:
        found.append((first["token"], first["logprob"]))
    for text, logprob in found:
        if not isinstance(text, str) or not isinstance(logprob, int | float) or not logprob <= 1e-3:  # NaN, too
            raise TypeError(f"the log-probability of token {text!r} is {logprob!r}, expected a number")
    return tuple((text, float(logprob)) for text, logprob in found)


def _no_logprobs(model: str) -> InputError:
    return InputError(
        "the judge returns no probabilities of its tokens",
        f"{model or 'the model'} answered without logprobs.content[0].top_logprobs, which form = 'token' needs",
        hint="write form = 'value' or 'json', or serve the model with vLLM, SGLang or etude serve",
    )


def _of_anthropic(found: Mapping[str, Any]) -> Reply:
    used = found.get("usage") or {}
    text = "".join(block["text"] for block in found["content"] if block["type"] == "text")
    fresh, cached = _count(used.get("input_tokens")), _count(used.get("cache_read_input_tokens") or 0)
    reply = Reply(
        text=text,
        model=encodable(str(found.get("model") or "")),
        num_input=None if fresh is None or cached is None else fresh + cached,
        num_cached=cached,
        num_output=_count(used.get("output_tokens")),
    )
    return _checked(reply, found.get("stop_reason"), None)


def _checked(reply: Reply, ended: object, refusal: object, *, whole: bool = True) -> Reply:
    """Return a complete reply, or without `whole` also one that was cut off. Raises `NoReply` for any other."""
    if not isinstance(reply.text, str):
        raise TypeError("the content of an answer is not a text")
    if refusal or ended in ("refusal", "content_filter"):
        why = f"the judge refuses: {encodable(str(refusal or ended))[:200]}"
        raise NoReply(why, retry=False, charged=True, reply=reply)
    if ended in _CUT and not whole:
        return reply
    if ended in _CUT:
        raise NoReply("the judge's answer was cut off", retry=False, charged=True, reply=reply)
    if ended not in _ENDED:
        raise NoReply(f"the judge's answer ended with {str(ended)[:80]!r}", retry=True, charged=True, reply=reply)
    return reply


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _after_s(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which is a number or a date; None for none or nonsense."""
    if header is None:
        return None
    if header.strip().replace(".", "", 1).isdecimal():
        return min(float(header), 86_400.0)
    try:
        at = email.utils.parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, at.timestamp() - time.time()), 86_400.0)


class Encoding(Protocol):
    """The methods of a chat format (`etude.capture.Chat`) that `PolicyAsker` needs."""

    stop_token_ids: tuple[int, ...]

    def encode_prompt(
        self, messages: Sequence[dict[str, Any]], signatures: Any, *, max_tokens: int | None = None
    ) -> I32: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class PolicyAsker:
    """Asks a `Policy`, your own model, as the judge. Answers are sampled greedily, under a grammar of their form.

    Answers of the form `Form.TOKEN` are sampled without a grammar: with one, vLLM and SGLang would return probabilities
    to which the grammar is already applied.

    `name` identifies the weights, such as a checkpoint's digest; it is part of the judge's version. `max_tokens`: the
    most tokens of an answer."""

    policy: Policy
    chat: Encoding
    name: str
    max_tokens: int = 256

    @property
    def identity(self) -> tuple[str, ...]:
        """ "policy" and the name of the model."""
        return ("policy", self.name)

    def max_output(self, form: Form) -> int:
        """The most tokens of an answer."""
        return 1 if form is Form.TOKEN else self.max_tokens

    async def ask(self, question: Question) -> Reply:
        one_token = question.form is Form.TOKEN
        name = f"judge-{uuid.uuid4().hex}"
        request = CompletionRequest(
            request_id=name,
            session_id=name,
            prompt_ids=await asyncio.to_thread(self.chat.encode_prompt, question.messages, {}),
            sampling=Sampling(
                max_tokens=1 if one_token else self.max_tokens,
                stop_token_ids=self.chat.stop_token_ids,
                temperature=0.0,
                grammar=_grammar(question),
                top_logprobs=TOP_LOGPROBS if one_token else 0,
            ),
            routes_from=None,
            keep_session=False,
        )
        try:
            done = await self.policy.complete(request)
        except EngineError as error:
            why, retry = f"the judge did not answer: {error}", not isinstance(error, ContextFull | MalformedRequest)
            raise NoReply(why, retry=retry, charged=False) from None
        stops = set(self.chat.stop_token_ids)
        text = self.chat.decode(token for token in done.token_ids.tolist() if token not in stops)
        likeliest: Likeliest = ()
        if one_token and not len(done.top_ids):
            raise NoReply(str(_no_logprobs(self.name)), retry=False, charged=False)
        if one_token:
            pairs = zip(done.top_ids[0].tolist(), done.top_logprobs[0].tolist(), strict=True)
            likeliest = tuple((self.chat.decode([token]), logprob) for token, logprob in pairs)
        reply = Reply(text, self.name, len(request.prompt_ids), done.num_cached, len(done.token_ids), likeliest)
        return _checked(reply, "stop" if done.stop_reason is StopReason.STOP else "length", None, whole=not one_token)


def _grammar(question: Question) -> str:
    """Return the grammar of an answer: JSON of the schema, or a value alone. "" for free text."""
    if question.schema is not None:
        return grammars.from_json_schema(question.schema)
    values = question.domain.schema.get("enum")
    return grammars.from_regex("|".join(map(str, values))) if question.form == "value" and values else ""
