"""Runs rollouts with a model at a URL: a server with the API of OpenAI or Anthropic samples the turns.

Agent program, tools, machine and limits are those of every rollout. Messages are sent as text, with the tools as JSON.
The server's tokens are not known, so the recorded tokens are the bytes of the text. Such rollouts are read and graded,
but never trained on. Counts of tokens are those that the server reports.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from etude.errors import ConfigError, ContextFull, EngineError, MalformedRequest, nearest
from etude.harness import Call, ChatFormat, Episode, Signature
from etude.harness.call_formats import check_call
from etude.harness.chat import Message, Reply
from etude.records.completion import Completion, CompletionRequest, StopReason, Version, VersionSpan
from etude.records.rollout import Trace
from etude.records.summary import RolloutSummary
from etude.records.view import TurnView
from etude.records.wire import I32

ANSWER_S = 600.0
"""The maximum time of one answer, in seconds."""
PATIENCE_S = 120.0
"""How long, in seconds, a request is retried if the server does not respond, or refuses it temporarily (429, 5xx)."""
SMALLER_TURNS = (1024, 256, 64)
"""If a server refuses a request because its context is too small, these smaller limits of sampled tokens are tried."""
MAX_ANSWER_BYTES = 16 << 20
_TOO_LONG = (b"context", b"too long", b"too large", b"max_tokens:")
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_OPTIONAL = ("seed", "temperature", "max_completion_tokens")
"""Parameters that some servers refuse. After a refusal they are left out or renamed."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model at a URL.

    - `url`: base URL of the API, with or without the path, such as "https://api.openai.com/v1".
    - `model`: the model's name on the server. `dialect`: "chat" (OpenAI's chat completions) or "messages"
      (Anthropic's).
    - `key_variable`: the environment variable with the API key; "": none is sent.
    - `parallel`: the maximum number of requests that run at the same time."""

    url: str
    model: str
    dialect: str = "chat"
    key_variable: str = ""
    parallel: int = 8

    def __post_init__(self) -> None:
        if self.dialect not in _WIRES:
            raise ConfigError(f"dialect {self.dialect!r} is unknown", hint=nearest(self.dialect, _WIRES))
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is not a URL", hint="give e.g. https://api.openai.com/v1")

    def unreachable(self) -> str:
        """Try to connect to the server, for at most 5 seconds. Returns why it failed; "" if it did not."""
        parts = urllib.parse.urlsplit(self.url)
        try:
            address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection(address, timeout=5.0).close()
        except (OSError, ValueError) as error:
            return str(error)
        return ""


class Usage(NamedTuple):
    """Numbers of tokens of one answer, as the server reports them.

    `prompt`: all prompt tokens. `cached`: prompt tokens read from a cache; None: unknown. `sampled`: sampled tokens."""

    prompt: int
    cached: int | None
    sampled: int


class Answer(msgspec.Struct, frozen=True):
    """An answer of a server. `calls`: (name, arguments as JSON text). `cut_off`: it reached the limit of tokens."""

    text: str
    calls: tuple[tuple[str, str], ...]
    usage: Usage
    cut_off: bool


class TextRequest(CompletionRequest, frozen=True, kw_only=True):
    """A request that also has the messages and tools in OpenAI's format. A `UrlPolicy` sends these, not the tokens."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]


class UrlPolicy:
    """A `Policy` that samples at a server with a URL. It accepts only a `TextRequest`, which `UrlEpisode` makes.

    Connections belong to the event loop of the first call."""

    def __init__(self, endpoint: Endpoint, chat: ChatFormat) -> None:
        self.endpoint, self.chat = endpoint, chat
        self._wire = _WIRES[endpoint.dialect]
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(endpoint.parallel)
        self._left_out = set[str]()
        self._answers: dict[str, Answer] = {}  # by request id, until its rollout is forgotten

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def complete(self, request: CompletionRequest) -> Completion:
        """Send a request to the server, and return its answer as a completion whose tokens are bytes.

        Raises `ContextFull` for a conversation that is too long for the server, and `EngineError` for one that does not
        answer in time or refuses the request."""
        assert isinstance(request, TextRequest), "requests come from a UrlEpisode"
        async with self._slots:
            answer = await self._ask(request)
        self._answers[request.request_id] = answer
        calls = [part for call in answer.calls for part in self.chat.encode_call(_as_call(*call))[:-1]]
        ids = [*self.chat.encode(answer.text), *calls]
        token_ids: I32 = np.array(ids if answer.cut_off else [*ids, self.chat.stop_token_ids[0]], np.int32)
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            routes=np.zeros((0, 1, 1), np.uint8),
            routes_start=len(request.prompt_ids) + len(token_ids) - 1,
            spans=(VersionSpan(Version(0, "0" * 8, "0" * 64), len(token_ids)),),
            stop_reason=StopReason.LENGTH if answer.cut_off else StopReason.STOP,
            engine=self.endpoint.model,
            num_cached=answer.usage.cached or 0,
        )

    def answer(self, request_id: str) -> Answer:
        """Return the server's answer to an earlier request, by its id. Raises `KeyError` if there is none."""
        return self._answers[request_id]

    def counted(
        self, trace: Trace, summary: RolloutSummary, turns: Sequence[TurnView]
    ) -> tuple[RolloutSummary, tuple[TurnView, ...]]:
        """Return summary and turns of a rollout with the numbers of tokens that the server reported.

        It also deletes the stored answers of the rollout."""
        usages = [self._answers.pop(turn.completion.request_id).usage for turn in trace.turns]
        total = sum(usage.sampled for usage in usages)
        counted = tuple(
            msgspec.structs.replace(view, num_prompt=one.prompt, num_cached=one.cached, num_sampled=one.sampled)
            for view, one in zip(turns, usages, strict=True)
        )
        return msgspec.structs.replace(summary, num_sampled=total), counted

    async def _ask(self, request: TextRequest) -> Answer:
        """Send a request with the turn's token limit, then with smaller limits if the server's context is too small."""
        most = request.sampling.max_tokens
        for cap in (most, *(smaller for smaller in SMALLER_TURNS if smaller < most)):
            sampling = msgspec.structs.replace(request.sampling, max_tokens=cap)
            try:
                return await self._ask_once(msgspec.structs.replace(request, sampling=sampling))
            except ContextFull as error:
                full = error
        raise full

    async def _ask_once(self, request: TextRequest) -> Answer:
        give_up, pause = time.monotonic() + PATIENCE_S, 0.5
        while True:
            body = {k: v for k, v in self._wire.body(self.endpoint.model, request).items() if k not in self._left_out}
            if "max_completion_tokens" in self._left_out:
                body["max_tokens"] = request.sampling.max_tokens
            status, content = await self._post(body)
            if status == 200:
                return self._read(content)
            refused = next((name for name in _OPTIONAL if name in body and name.encode() in content), None)
            if status in (400, 422) and refused is not None and not _says_too_long(status, content):
                self._left_out.add(refused)
                continue
            if (status not in _AGAIN and status != 0) or time.monotonic() + pause > give_up:
                raise self._refusal(status, content)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 20.0)

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Send a request. Returns (0, why) when there is no answer."""
        key = os.environ.get(self.endpoint.key_variable, "") if self.endpoint.key_variable else ""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=30.0)
            self._session = aiohttp.ClientSession(timeout=timeout)
        url = f"{self.endpoint.url.rstrip('/').removesuffix('/v1')}/v1{self._wire.path}"
        try:
            async with self._session.post(url, json=body, headers=self._wire.headers(key)) as answer:
                content = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(content) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                    content += more
                return answer.status, content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, f"{type(error).__name__}: {error}".encode()

    def _read(self, content: bytes) -> Answer:
        try:
            return self._wire.read(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            facts = f"{type(error).__name__}: {error}; it begins with {content[:80]!r}"
            hint = "use a server that follows the API, with the numbers of tokens (usage) in each answer"
            raise EngineError(f"the answer of {self.endpoint.url} cannot be read", facts, hint=hint) from None

    def _refusal(self, status: int, content: bytes) -> EngineError:
        text = content[:400].decode(errors="replace")
        if _says_too_long(status, content):
            what = f"{self.endpoint.url} refuses a conversation that is too long"
            return ContextFull(what, text, hint="use a model with a longer context")
        if status == 0:
            facts, hint = f"tried for {PATIENCE_S:g} s: {text}", "check the URL, and that the server is up"
            return EngineError(f"{self.endpoint.url} does not answer", facts, hint=hint)
        if status in _AGAIN:
            facts, hint = f"tried for {PATIENCE_S:g} s: {text}", "try again later, or look at the server's rate limits"
            return EngineError(f"{self.endpoint.url} still answers with status {status}", facts, hint=hint)
        hint = "correct the setting that the server's message names"
        if status in (401, 403):
            variable = self.endpoint.key_variable
            hint = (
                f"check the API key in ${variable}" if variable else "name the API key's variable: --key-variable NAME"
            )
        elif status == 404:
            hint = "check the URL and the name of the model"
        kind = EngineError if status in (401, 403, 404) else MalformedRequest
        what = f"{self.endpoint.url} refuses requests with status {status}"
        return kind(f"{what}: {said}" if (said := _message(content)) else what, text, hint=hint)


def _message(content: bytes) -> str:
    """The first line of the message in a server's error, at most 200 characters; "" if there is none."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return "".join(message.splitlines()[:1])[:200].encode(errors="replace").decode()


def _says_too_long(status: int, content: bytes) -> bool:
    return status in (400, 413, 422) and any(word in content.lower() for word in _TOO_LONG)


class UrlEpisode(Episode):
    """An `Episode` (one rollout's loop of turns) whose turns a `UrlPolicy` samples.

    Tool calls are taken from the server's answer, not parsed from text."""

    async def _complete(
        self,
        request: CompletionRequest,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        stops: Sequence[str],
        in_reasoning: bool | None,
    ) -> Completion:
        fields = {name: getattr(request, name) for name in CompletionRequest.__struct_fields__}
        text = TextRequest(**fields, messages=tuple(_as_sent(messages)), tools=tuple(map(dict, tools)))
        return await super()._complete(text, messages, tools, stops=stops, in_reasoning=in_reasoning)

    def _parse(self, completion: Completion, signatures: Mapping[str, Signature], *, strict: bool) -> Reply:
        policy = _innermost(self.policy)
        answer = policy.answer(completion.request_id)
        if answer.cut_off:
            return Reply(answer.text, error="too long" if strict or answer.calls else "")
        calls = list[Call]()
        for name, arguments in answer.calls:
            call = check_call(name, _arguments(arguments), signatures)
            if isinstance(call, str) and not strict and name in signatures:
                call = Call(name, _arguments(arguments))
            if isinstance(call, str):
                return Reply(answer.text, error=call)
            calls.append(call)
        return Reply(answer.text, tuple(calls))


def _as_sent(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, with errors of malformed calls as messages of the user: servers refuse results without a call."""
    called = set[str]()
    for message in messages:
        called.update(call["id"] for call in message.get("tool_calls") or ())
        alone = message["role"] == "tool" and message.get("tool_call_id") not in called
        yield {"role": "user", "content": message.get("content")} if alone else message


def _innermost(policy: object) -> UrlPolicy:
    """The `UrlPolicy` in the wrappers of an agent program (`harness.programs.DeadlinePausingPolicy`)."""
    while not isinstance(policy, UrlPolicy):
        policy = policy._policy  # type: ignore[attr-defined]
    return policy


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"": text}  # fits no signature
    return found if isinstance(found, dict) else {"": text}


def _as_call(name: str, arguments: str) -> Call:
    return Call(name, _arguments(arguments))


def read_endpoint(folder: Path) -> Endpoint | None:
    """Read the endpoint that `write_endpoint` wrote into a run folder; None if there is none."""
    try:
        return msgspec.json.decode((folder / "endpoint.json").read_bytes(), type=Endpoint)
    except FileNotFoundError:
        return None


def write_endpoint(folder: Path, endpoint: Endpoint) -> None:
    """Write an endpoint into a run folder, with the tokeniser and chat template that its rollouts are recorded with."""
    (folder / "endpoint.json").write_bytes(msgspec.json.encode(endpoint))
    write_byte_tokeniser(folder)


def write_byte_tokeniser(folder: Path) -> None:
    """Write a byte-level tokeniser (a token is a byte) and its chat template into a run folder.

    Rollouts that no checkpoint sampled, such as those of a model at a URL, are recorded with them."""
    tokeniser = folder / "tokenizer"
    tokeniser.mkdir(exist_ok=True)
    _byte_tokenizer().save(str(tokeniser / "tokenizer.json"))
    (tokeniser / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END, "chat_template": _TEMPLATE}))


_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _byte_tokenizer() -> Any:
    """A tokeniser whose tokens are bytes, with ChatML's special tokens and those of Hermes' tool calls."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([_BEGIN, _END])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return made


# the two dialects


class _Chat:
    """OpenAI's chat completions."""

    path = "/chat/completions"

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    def body(self, model: str, request: TextRequest) -> dict[str, Any]:
        sampling = request.sampling
        body = {
            "model": model,
            "messages": [_openai_message(message) for message in request.messages],
            "max_completion_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed & 0x7FFFFFFF,
        }
        return {**body, "tools": list(request.tools)} if request.tools else body

    def read(self, content: bytes) -> Answer:
        body = json.loads(content)
        choice, usage = body["choices"][0], body["usage"]
        message = choice["message"]
        calls = tuple(
            (str(one["function"]["name"]), str(one["function"]["arguments"])) for one in message.get("tool_calls") or ()
        )
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        counts = Usage(
            _count(usage["prompt_tokens"]), _count(cached, maybe=True), _count(usage["completion_tokens"]) or 0
        )
        return Answer(_text(message.get("content")), calls, counts, choice.get("finish_reason") == "length")


class _Messages:
    """Anthropic's messages."""

    path = "/messages"

    def headers(self, key: str) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01", **({"x-api-key": key} if key else {})}

    def body(self, model: str, request: TextRequest) -> dict[str, Any]:
        system = "\n".join(_text(m.get("content")) for m in request.messages if m["role"] == "system")
        messages = list[dict[str, Any]]()
        for message in request.messages:
            if message["role"] == "system":
                continue
            role, parts = _anthropic_message(message)
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += parts
            else:
                messages.append({"role": role, "content": parts})
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": request.sampling.max_tokens}
        body["temperature"] = min(request.sampling.temperature, 1.0)
        if system:
            body["system"] = system
        functions = [tool["function"] for tool in request.tools]
        if functions:
            empty = {"type": "object", "properties": {}}
            body["tools"] = [
                {
                    "name": one["name"],
                    "description": one.get("description") or "",
                    "input_schema": one.get("parameters") or empty,
                }
                for one in functions
            ]
        return body

    def read(self, content: bytes) -> Answer:
        body = json.loads(content)
        usage = body["usage"]
        text = "".join(_text(part["text"]) for part in body["content"] if part["type"] == "text")
        calls = tuple(
            (str(part["name"]), json.dumps(part["input"])) for part in body["content"] if part["type"] == "tool_use"
        )
        read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
        prompt = _count(usage["input_tokens"]) + _count(read or 0) + _count(written or 0)
        counts = Usage(prompt, _count(read, maybe=True), _count(usage["output_tokens"]))
        return Answer(text, calls, counts, body.get("stop_reason") == "max_tokens")


_WIRES: dict[str, _Chat | _Messages] = {"chat": _Chat(), "messages": _Messages()}


def _count(value: Any, *, maybe: bool = False) -> Any:
    """Check a count of tokens. Raises `ValueError`."""
    if value is None and maybe:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
        raise ValueError(f"{value!r} is not a number of tokens")
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"the content is of type {type(value).__name__}, expected a text")
    return value.encode(errors="replace").decode()


def _openai_message(message: Message) -> Message:
    calls = message.get("tool_calls")
    sent = {key: value for key, value in message.items() if key in ("role", "content", "tool_call_id")}
    if calls:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_json(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _anthropic_message(message: Message) -> tuple[str, list[dict[str, Any]]]:
    """Return the role and the parts of a message in Anthropic's form."""
    text = _text(message.get("content"))
    if message["role"] == "tool":
        return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        inputs = _arguments(arguments) if isinstance(arguments, str) else dict(arguments)
        parts.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": inputs})
    return message["role"], parts or [{"type": "text", "text": "(no text)"}]
