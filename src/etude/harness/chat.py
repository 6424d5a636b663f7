"""The chat format: encodes messages as tokens, and parses sampled tokens.

Messages are in OpenAI's format. A Jinja template, usually the checkpoint's, renders them as text. This module turns the
rendering into token ids under three rules:

- *Tokens are stored once.* After the first prompt only what a turn appends is encoded (`continuation`). In etude's
  format the rendering is checked to be an extension of the earlier one. Sampled tokens are never tokenised again.
- *Structure comes from the template only.* Text that spells a special token (a file that contains ``<|end|>``) is
  encoded as ordinary text. So no tool output can end a message or impersonate another role.
- *A checkpoint's template is untrusted code.* It runs in a sandbox (`template`). A template that uses `tools` gets the
  list of tools; etude's own does not list them.

A checkpoint whose tokeniser has etude's special tokens uses etude's format (`ChatFormat`); every other one uses its own
(`CheckpointChatFormat`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from etude.file_checksums import verify_files
from etude.grammars import Tool, from_lark, from_tool_calls
from etude.harness.call_formats import NONE, call_format_of
from etude.harness.channels import CHANNEL, HARMONY, split_channels
from etude.harness.commands import Call, Signature, read_call, words_grammar, write_words
from etude.harness.template import REASONING, ChatError, ChatTemplate, read_special, read_template, stop_ids
from etude.harness.tokenizer import PLACEHOLDER, SafeTokenizer, match_any
from etude.records.wire import I32

PAD, USER, ASSISTANT, TOOL = "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>"
CALL, END, DOC, SYSTEM = "<|call|>", "<|end|>", "<|doc|>", "<|system|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, TOOL, CALL, END, DOC, SYSTEM)
"""The special tokens, in the order of their ids in a tokeniser that etude trains."""

TOKENISER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files that a chat format is loaded from. Some may be missing."""

_REPLY, _TOOL_OUTPUT, _TOOL_NAME = PLACEHOLDER + "reply", PLACEHOLDER + "output", PLACEHOLDER + "name"
_SYSTEM, _USER = {"role": "system", "content": "?"}, {"role": "user", "content": "?"}
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "description": "?"}}, "required": ["x"]}
_FUNCTION = {"name": "f", "description": "?", "parameters": _SCHEMA}
_TOOLS = {"f": Signature.from_openai({"type": "function", "function": _FUNCTION})}
_BARE_TOKENS = 32  # tokens of a completion by which a call without an opening token is recognised
_MAX_KINDS = 256  # kinds of messages whose continuation is checked; others are rendered with their whole history

Message = dict[str, Any]
"""An OpenAI message: role, content, tool_calls, tool_call_id. Arguments may be a JSON string or a mapping."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed completion. `ChatFormat.parse` returns one.

    - `text`: the text before the first call, or all of it, without the reasoning.
    - `calls`: the tool calls, in order.
    - `error`: the message for the model when a call could not be parsed, else "". With an error, `text` is the complete
      completion and there are no calls.
    - `reasoning`: the text inside ``<think>...</think>``, or ""."""

    text: str
    calls: tuple[Call, ...] = ()
    error: str = ""
    reasoning: str = ""


def chat_template() -> str:
    """Return the Jinja source of etude's chat template, to be saved beside a tokeniser."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


class ChatFormat:
    """etude's chat format: encodes conversations as tokens, and parses completions. `load` makes one from a directory.

    It implements `etude.capture.Chat`. `template` is Jinja source. Where a method takes `signatures`, they are the
    tools by name; None means no tools. Raises `ChatError` when the tokeniser lacks the format's special tokens, or the
    template does not compile."""

    end = END
    """The token that ends a message."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._use_tokenizer(tokenizer)
        missing = [t for t in (CALL, END) if t not in self.tokens.special]
        if missing:
            raise ChatError("the tokeniser has no chat format", f"no {' and '.join(missing)}", hint=_HINT_TOKENS)
        self.end_id, self._call_id = self.tokens.special[END], self.tokens.special[CALL]
        self.stop_token_ids: tuple[int, ...] = (self.end_id,)
        self._template = ChatTemplate(template, limited=template != chat_template())

    def _use_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.tokens = SafeTokenizer(tokenizer)
        self.vocab_size = self.tokens.vocab_size
        self._kept_tools: dict[int, tuple[Mapping[str, Signature], tuple[Signature, ...], list[dict[str, Any]]]] = {}
        self._num_continued: dict[tuple[Any, ...], int] = {}  # turns by their kinds of messages

    @classmethod
    def load(cls, folder: Path | str) -> ChatFormat:
        """Load the chat format from a directory with tokenizer.json and a chat template.

        The result is in etude's format when the tokeniser has etude's special tokens. Otherwise it is in the
        checkpoint's own format, a `CheckpointChatFormat`. Raises `ChatError` for missing, damaged or unusable files."""
        folder = Path(folder)
        verify_files(folder, [name for name in TOKENISER if (folder / name).is_file()], kind=ChatError)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for a missing or damaged file
            raise ChatError(f"no tokeniser in {folder}", str(error), hint=_HINT_FOLDER) from None
        tokens = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        source, with_tools = read_template(folder)
        if ({CALL, END} <= tokens and CHANNEL not in tokens) or "eos_token" not in read_special(folder):
            return cls(tokenizer, source)
        return CheckpointChatFormat(tokenizer, source, with_tools, special=read_special(folder), stops=stop_ids(folder))

    @staticmethod
    def signatures(tools: Iterable[Mapping[str, Any]]) -> dict[str, Signature]:
        """Parse OpenAI's list of tools into signatures by tool name. Raises `ValueError` for an invalid tool."""
        return {s.name: s for s in map(Signature.from_openai, tools)}

    # text and tokens

    def encode(self, text: str, *, max_tokens: int | None = None) -> I32:
        """Encode ordinary text as token ids, [T] int32.

        Text that spells a special token is encoded as ordinary characters.

        Raises `ContextFull`, before it tokenises, for a text that certainly has more than `max_tokens` tokens."""
        self.tokens.check_length(text, max_tokens)
        return np.array(self.tokens.encode(text), np.int32)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Decode token ids to text. Ids outside the vocabulary are skipped, and special tokens too unless `special`."""
        return self.tokens.decode(ids, special=special)

    def document(self, text: str) -> I32:
        """Encode a document for mid-training as token ids, [T] int32: the token ``<|doc|>``, the text, the token
        ``<|end|>``."""
        return np.array([self.tokens.special[DOC], *self.tokens.encode(text), self.end_id], np.int32)

    # messages to tokens

    def encode_conversation(
        self, messages: Sequence[Message], signatures: Mapping[str, Signature] | None = None
    ) -> I32:
        """Encode a finished conversation as token ids, [T] int32, such as a demonstration for mid-training."""
        escaped = self._escape_messages(messages, signatures or {})
        return self.tokens.encode_rendering(self._render(escaped, signatures or {}, generate=False))

    def render_chat(
        self, messages: Sequence[Message], signatures: Mapping[str, Signature] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a finished conversation as a run would see it. Returns the text up to the end of the last answer,
        and the (first, last + 1) characters of each answer with its stop token.

        `SafeTokenizer.encode_rendering` encodes parts of the text; texts of messages are escaped in it. Raises
        `ChatError` for a conversation without an answer, and for a template that cannot be continued after one."""
        tools, at, text = signatures or {}, 0, ""
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            escaped = self._escape_messages(messages[: index + 1], tools)
            prompt = self._render(escaped[:-1], tools, generate=True)
            whole = self._render(escaped, tools, generate=False)
            end = self._end_of_answer(whole)
            if not whole.startswith(prompt) or end <= len(prompt):
                what = "an answer does not begin with the generation prompt, or has no end"
                raise ChatError("the chat template does not render answers as they are sampled", what, hint=_HINT_OWN)
            text += self._after_reply_of_any(messages[:at], messages[at:index], tools, True) if at else prompt
            spans.append((len(text), len(text) + end - len(prompt)))
            text += whole[len(prompt) : end]
            at = index + 1
        if not spans:
            raise ChatError("the conversation has no answer", hint="add a message with the role assistant")
        return text, spans

    def _end_of_answer(self, rendering: str) -> int:
        """Return the end of the last message in a rendering, after its stop token; -1 if there is none."""
        at = rendering.rfind(END)
        return at if at < 0 else at + len(END)

    def encode_prompt(
        self,
        messages: Sequence[Message],
        signatures: Mapping[str, Signature] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> I32:
        """Encode a conversation as token ids, [P] int32. They end with the tokens that begin the model's reply.

        Raises `ContextFull`, before it tokenises, for a prompt that certainly has more than `max_tokens` tokens, and
        `ChatError` for messages that the template cannot render."""
        escaped = self._escape_messages(messages, signatures or {})
        rendering = self._render(escaped, signatures or {}, generate=True)
        return self.tokens.encode_rendering(rendering, max_tokens=max_tokens, begins=True)

    def continuation(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Mapping[str, Signature] | None = None,
        *,
        ended: bool = True,
        max_tokens: int | None = None,
    ) -> I32:
        """Encode the messages `new` as the token ids, [P] int32, to append to a context that ends with a sampled reply.

        They end with the tokens that begin the model's next reply. The sampled reply is the last message of `previous`;
        the result starts after the reply's stop token. With `ended` False, the reply was cut off without a stop token,
        and the result starts with this token. Raises `ContextFull` as `encode_prompt` does. Raises `ChatError` for a
        template that renders `previous` differently when `new` follows, or does not render the end of the reply."""
        rendering = self._after_reply_of_any(previous, new, signatures or {}, ended)
        return self.tokens.encode_rendering(rendering, max_tokens=max_tokens)

    def _after_reply_of_any(
        self, previous: Sequence[Message], new: Sequence[Message], signatures: Mapping[str, Signature], ended: bool
    ) -> str:
        """Return what `_after_reply` returns, but mostly render a short history that ends with the same reply.

        Rendering the whole history and all tools in each turn would take time that grows with them. In all known
        templates the text after a reply depends only on what the short history contains. This is checked against the
        whole history at the 1st, 2nd, 4th, 8th, … use of each kind of messages, over all conversations. The whole
        history is always rendered for a kind once they differ, and for kinds that come after the first `_MAX_KINDS`."""
        short = [*([_SYSTEM] if previous[0]["role"] == "system" else []), _USER, previous[-1]]
        if len(previous) <= len(short):
            return self._after_reply(previous, new, signatures, ended)
        kinds = [(m["role"], bool(m.get("tool_calls")), "reasoning_content" in m) for m in (previous[-1], *new)]
        kind = (
            *(one for i, one in enumerate(kinds) if i == 0 or one != kinds[i - 1]),
            len(short),
            bool(signatures),
            ended,
        )
        count = self._num_continued.get(kind, 0) + 1
        if count < 1 or (count == 1 and len(self._num_continued) >= _MAX_KINDS):
            return self._after_reply(previous, new, signatures, ended)
        self._num_continued[kind] = count
        if count & (count - 1):
            return self._after_reply(short, new, signatures, ended, _TOOLS if signatures else {})
        whole = self._after_reply(previous, new, signatures, ended)
        try:
            same = self._after_reply(short, new, signatures, ended, _TOOLS if signatures else {}) == whole
        except ChatError:
            same = False
        if not same:
            self._num_continued[kind] = -(1 << 62)
        return whole

    def _after_reply(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Mapping[str, Signature],
        ended: bool,
        tools: Mapping[str, Signature] | None = None,
    ) -> str:
        """Return the rendering after the sampled reply, which is the last message of `previous`.

        `tools`: the tools that the template gets; None: those of `signatures`."""
        escaped, tools = self._escape_messages([*previous, *new], signatures), signatures if tools is None else tools
        before = self._render(escaped[: len(previous)], tools, generate=False)
        after = self._render(escaped, tools, generate=True)
        end = before.rfind(END)
        if end < 0 or not after.startswith(before):
            raise ChatError(
                "the chat template changes earlier messages",
                "it renders them differently when a new message follows",
                hint="use a template whose rendering of n messages is a prefix of that of n + 1",
            )
        return after[end + len(END) if ended else end :]

    def encode_call(self, call: Call) -> I32:
        """Encode a tool call as the token ids of a completion with its stop token, [T] int32.

        Tests and scripted agents use it instead of sampling a call."""
        line = " ".join([call.name, *write_words(call.arguments).values()])
        return np.array([self._call_id, *self.tokens.encode(line), self.end_id], np.int32)

    # tokens to messages

    def parse(self, ids: Sequence[int] | I32, signatures: Mapping[str, Signature], *, strict: bool = True) -> Reply:
        """Parse the token ids of a completion, whose last one is normally a stop token. Never raises.

        A completion without a stop token was cut off: its `Reply` has the error "too long". With `strict`, a second
        call is an error (small models would act before they see the output of the first one), and so is a call that
        lacks a required argument. Calls of unknown tools are errors in any case, since the names of their arguments are
        not known."""
        body = [int(i) for i in ids]
        if not body or body[-1] != self.end_id:
            return Reply(self.decode(body, special=True), error="too long")
        del body[-1]
        opened = [at for at, i in enumerate(body) if i in self.tokens.special_ids]
        if not opened:
            return Reply(self.decode(body))
        if any(body[at] != self._call_id for at in opened):
            return Reply(self.decode(body, special=True), error="only calls may follow the text")
        if strict and len(opened) > 1:
            return Reply(self.decode(body, special=True), error="one call a turn")
        calls = []
        for start, stop in itertools.pairwise([*opened, len(body)]):
            call = read_call(self.decode(body[start + 1 : stop]), signatures, strict=strict)
            if isinstance(call, str):
                return Reply(self.decode(body, special=True), error=call)
            calls.append(call)
        return Reply(self.decode(body[: opened[0]]), tuple(calls))

    def in_reasoning(self, prompt_ids: Sequence[int] | I32) -> bool | None:
        """Return None: completions in etude's format have no reasoning."""
        return None

    def call_grammar(self, signatures: Mapping[str, Signature], *, max_calls: int) -> str:
        """Return a grammar (JSON text, see `etude.grammars`) that allows 1 to `max_calls` calls of the given tools, and
        nothing else."""
        lines = [f"start: call{{1,{max_calls}}}"]
        for i, signature in enumerate(signatures.values()):
            lines.append(f"tool{i}: <[{self._call_id}]> {json.dumps(signature.name)}{words_grammar(signature)}")
        lines.append("call: " + " | ".join(f"tool{i}" for i in range(len(signatures))))
        return from_lark("\n".join(lines))

    def num_text_tokens(self, ids: Sequence[int] | I32, *, begun: bool = False) -> int:
        """Return how many leading tokens of a completion come before its first tool call.

        These tokens are text, whatever is sampled later. `ids` may be only a part of a completion. `begun`: whether
        other tokens of it came before."""
        return next((n for n, i in enumerate(ids) if int(i) in self.tokens.special_ids), len(ids))

    def last_message(self, prompt_ids: Sequence[int] | I32) -> str:
        """Return the text of the last complete message of a prompt, such as a tool output."""
        ids = [int(i) for i in prompt_ids]
        end = max((i for i, t in enumerate(ids) if t == self.end_id), default=0)
        start = max((i for i in range(end) if ids[i] in self.tokens.special_ids), default=-1)
        return self.decode(ids[start + 1 : end])

    def readable(self, ids: Iterable[int]) -> str:
        """Return a context as text for display: one message a line, with its role."""
        text = self.decode(ids, special=True).replace(ASSISTANT + CALL, "\n[call] ").replace(self.end, "")
        return self.tokens.spellings.sub(lambda m: f"\n[{m[0].strip('<|>')}] ", text).strip("\n")

    def _escape_messages(self, messages: Sequence[Message], signatures: Mapping[str, Signature]) -> list[Message]:
        """Escape the messages for the template, so that no text in them spells a special token."""
        return [self._escape_message(m, signatures) for m in messages]

    def _render(self, escaped: Sequence[Message], signatures: Mapping[str, Signature], *, generate: bool) -> str:
        return self._template.render(escaped, tools=self._tools(signatures), add_generation_prompt=generate)

    def _tools(self, signatures: Mapping[str, Signature]) -> list[dict[str, Any]]:
        """Return the escaped tools if the template uses them, else an empty list."""
        return self._escaped_tools(signatures) if "tools" in self._template.variables else []

    def _escaped_tools(self, signatures: Mapping[str, Signature]) -> list[dict[str, Any]]:
        """Escape the tools, once for the many requests that have the same."""
        tools = tuple(signatures.values())
        kept = self._kept_tools.get(id(signatures))
        if kept is None or len(kept[1]) != len(tools) or not all(map(operator.is_, kept[1], tools)):
            if len(self._kept_tools) >= _MAX_KINDS:
                self._kept_tools.clear()
            try:
                kept = signatures, tools, [self.tokens.escape_all(tool.to_openai()) for tool in tools]
            except RecursionError:
                hint = "send tools whose schemas are less deep"
                raise ChatError("the tools cannot be rendered", "they are nested too deeply", hint=hint) from None
            self._kept_tools[id(signatures)] = kept  # with the dict, so that no other gets its id
        return kept[2]

    def _escape_message(self, message: Message, signatures: Mapping[str, Signature]) -> Message:
        escaped = {k: self.tokens.escape(v) if isinstance(v, str) else v for k, v in message.items()}
        if message.get("tool_calls"):
            escaped["tool_calls"] = [self._escape_call(c, signatures) for c in message["tool_calls"]]
        return escaped

    def _escape_call(self, call: Mapping[str, Any], signatures: Mapping[str, Signature]) -> Message:
        try:
            name, arguments = str(call["function"]["name"]), call["function"]["arguments"]
            plain = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            words = write_words(plain, signatures.get(name))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            hint = "a tool call is {id, type, function: {name, arguments}}, arguments a JSON object"
            raise ChatError("a tool call cannot be rendered", repr(error), hint=hint) from None
        escaped = {k: self.tokens.escape(word) for k, word in words.items()}
        return {"function": {"name": self.tokens.escape(name), "arguments": escaped}}


class CheckpointChatFormat(ChatFormat):
    """The chat format that a published checkpoint was trained with. `ChatFormat.load` makes one.

    Three things differ from etude's own format:

    - Calls are written in the checkpoint's own format (`call_formats`).
    - A template may render a past turn differently from how it was sampled: Qwen3 drops the reasoning. This is
      accepted, since only what follows a sampled message is taken from the rendering.
    - Added tokens that are not special, such as ``<think>``, are tokens in the template and in assistant messages, and
      ordinary text in all other messages.

    The arguments:

    - `template`: Jinja source; `with_tools`: another template for conversations with tools, or None.
    - `special`: the special tokens that the template may write, by name, such as ``eos_token``, which is required.
    - `stops`: further stop token ids.

    Raises `ChatError` for a tokeniser without the end token, and for a template that does not compile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        with_tools: str | None = None,
        *,
        special: Mapping[str, str],
        stops: Iterable[int] = (),
    ) -> None:
        self._use_tokenizer(tokenizer)
        self.end = special.get("eos_token", "")
        if self.end not in self.tokens.added:
            facts = f"eos_token is {self.end!r}, which is none of its {len(self.tokens.added)} added tokens"
            raise ChatError("the tokeniser has no chat format", facts, hint=_HINT_OWN)
        self.end_id = self.tokens.added[self.end]
        self.stop_token_ids = tuple(dict.fromkeys([self.end_id, *(i for i in stops if i < self.vocab_size)]))
        self._has_channels = CHANNEL in self.tokens.special
        self.calls = HARMONY if self._has_channels else call_format_of(self.tokens.added)
        ends = {END} if self._has_channels else set()  # of a past answer, which ended with another token when sampled
        ends |= {t for t, i in self.tokens.added.items() if i in self.stop_token_ids}
        self._stops = match_any(ends)
        self._openers = frozenset(self.tokens.added[t] for t in self.calls.opening_tokens if t in self.tokens.added)
        self._template = ChatTemplate(template, special=special)
        self._with_tools = self._template if with_tools is None else ChatTemplate(with_tools, special=special)
        self._arguments_as_text = False

    def document(self, text: str) -> I32:
        """Encode a document for mid-training as token ids, [T] int32: the text, then the end token."""
        return np.array([*self.tokens.encode(text), self.end_id], np.int32)

    def _after_reply(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Mapping[str, Signature],
        ended: bool,
        tools: Mapping[str, Signature] | None = None,
    ) -> str:
        """Return the rendering after the stop token of the reply, which is the last message of `previous`.

        The sampled tokens are in the context already, so the template may render them differently. Raises `ChatError`
        when the rendering lacks the reply or its stop token."""
        escaped = self._escape_messages([*previous, *new], signatures)
        end, after = self._after(escaped, len(previous) - 1, signatures if tools is None else tools)
        return after if ended else end + after

    def _end_of_answer(self, rendering: str) -> int:
        return max((match.end() for match in self._stops.finditer(rendering)), default=-1)

    def _after(self, escaped: list[Message], index: int, tools: Mapping[str, Signature]) -> tuple[str, str]:
        """Return the stop token that ends an assistant's message in a rendering, and what follows it."""
        reply = escaped[index]
        calls = reply.get("tool_calls") or ()
        marked = [{**call, "function": {**call["function"], "arguments": {"x": _REPLY}}} for call in calls]
        in_call: Message = {"tool_calls": marked}  # Llama's template drops the text beside a call
        in_text: Message = {"content": _REPLY}
        for place in (in_call, in_text) if calls else (in_text,):
            escaped[index] = {**reply, **place}
            rendering = self._render(escaped, tools, generate=True)
            if (at := rendering.rfind(_REPLY)) >= 0:
                break
        end = self._stops.search(rendering, max(at, 0))
        if at < 0 or end is None:
            what = "the rendering lacks the reply" if at < 0 else f"no {self.end} ends the reply"
            raise ChatError("the chat template cannot be continued after a sampled reply", what, hint=_HINT_OWN)
        return end[0], rendering[end.end() :]

    def encode_call(self, call: Call) -> I32:
        """Encode a tool call as the token ids of a completion with its stop token, [T] int32.

        Raises `ChatError` for a checkpoint without a tool-call format."""
        if self.calls is NONE:
            raise ChatError("the checkpoint has no tool-call format", "no added token opens a call", hint=_HINT_OWN)
        written = self.calls.write(self.tokens.escape(call.name), self.tokens.escape_all(call.arguments))
        return self.tokens.encode_rendering(written + self._around_answers[0])

    def parse(self, ids: Sequence[int] | I32, signatures: Mapping[str, Signature], *, strict: bool = True) -> Reply:
        """Parse the token ids of a completion, whose last one is normally a stop token. Never raises.

        A completion without a stop token was cut off: its `Reply` has the error "too long". With `strict`, a call of an
        unknown tool, or with arguments that do not fit its signature, is an error."""
        body = [int(i) for i in ids]
        if not body or body[-1] not in self.stop_token_ids:
            return Reply(self.decode(body, special=True), error="too long")
        text = self.decode(body[:-1], special=True)
        before, calls = self.calls.read(text, signatures, strict=strict)
        if isinstance(calls, str):
            return Reply(text, error=calls)
        if self._has_channels:
            reasoning, answer = split_channels(before)
        else:
            reasoning, answer = split_reasoning(before if calls else self.decode(body[:-1]))
        return Reply(answer, calls, reasoning=reasoning)

    def in_reasoning(self, prompt_ids: Sequence[int] | I32) -> bool | None:
        """Return whether a prompt ends within the model's reasoning, because the template wrote ``<think>``."""
        return self.decode(prompt_ids[-8:], special=True).rstrip().endswith("<think>")

    def call_grammar(self, signatures: Mapping[str, Signature], *, max_calls: int) -> str:
        """Return a grammar (JSON text, see `etude.grammars`) that allows 1 to `max_calls` calls of the given tools, and
        nothing else.

        Raises `ValueError` for a checkpoint without a tool-call format."""
        if self.calls is NONE:
            raise ValueError("the checkpoint has no tool-call format")
        added = self.tokens.added
        tools = []
        for signature in signatures.values():
            schema = signature.to_openai()["function"].get("parameters") or {}
            lark = self.calls.arguments_grammar(signature, added) if self.calls.argument else ""
            tools.append(Tool(signature.name, {"additionalProperties": False, **schema}, lark=lark))
        return from_tool_calls(
            tools,
            self.calls.call,
            tokens=added,
            opening=self.calls.opening,
            closing=self.calls.closing,
            between=self.calls.between,
            max_calls=1 if self.calls.is_single else max_calls,
        )

    def num_text_tokens(self, ids: Sequence[int] | I32, *, begun: bool = False) -> int:
        """Return how many leading tokens of a completion come before the first one that opens a tool call or is
        special.

        If the completion may become a call without such a token, there are none."""
        if not begun and self.calls.may_be_bare(self.decode(ids[:_BARE_TOKENS], special=True)):
            return 0
        ends = self._openers | self.tokens.special_ids
        return next((n for n, i in enumerate(ids) if int(i) in ends), len(ids))

    def last_message(self, prompt_ids: Sequence[int] | I32) -> str:
        """Return the last tool output in a prompt, or "" when there is none."""
        _, before, behind = self._around_answers
        text = self.decode(prompt_ids, special=True)
        start = text.rfind(before)
        found = text[start + len(before) :].removesuffix(behind) if start >= 0 else ""
        if before.endswith('"') and behind.startswith('"'):  # outputs are JSON strings
            with contextlib.suppress(ValueError):
                return str(json.loads(f'"{found}"'))
        return found

    @cached_property
    def _around_answers(self) -> tuple[str, str, str]:
        """The stop token after a call, and the texts that the template writes before and after a tool output."""
        question = {"role": "user", "content": "?"}
        function = {"name": _TOOL_NAME, "arguments": {}}
        reply = {"role": "assistant", "content": "?", "tool_calls": [{"type": "function", "function": function}]}
        output = {"role": "tool", "content": _TOOL_OUTPUT}
        end, behind_call = self._after([question, reply, output], 1, {})
        before, _, behind = behind_call.partition(_TOOL_OUTPUT)
        return end, before.rpartition(_TOOL_NAME)[2], behind  # without a header that has the tool's name

    def _render(self, escaped: Sequence[Message], signatures: Mapping[str, Signature], *, generate: bool) -> str:
        """Render with arguments as mappings, as transformers recommends, or as JSON text if the template needs that."""
        tools = self._tools(signatures)
        template = self._with_tools if tools else self._template
        try:
            messages = _with_text(escaped) if self._arguments_as_text else escaped
            return template.render(messages, tools=tools, add_generation_prompt=generate)
        except ChatError:
            if self._arguments_as_text or not any(m.get("tool_calls") for m in escaped):
                raise
        rendering = template.render(_with_text(escaped), tools=tools, add_generation_prompt=generate)
        self._arguments_as_text = True
        return rendering

    def _tools(self, signatures: Mapping[str, Signature]) -> list[dict[str, Any]]:
        lists = "tools" in self._template.variables | self._with_tools.variables
        return self._escaped_tools(signatures) if lists else []

    def _escape_message(self, message: Message, signatures: Mapping[str, Signature]) -> Message:
        escape = self.tokens.escape_special if message.get("role") == "assistant" else self.tokens.escape_all
        escaped = {key: escape(value) for key, value in message.items() if key != "tool_calls"}
        if message.get("tool_calls"):
            escaped["tool_calls"] = [self._escape_call(call, signatures) for call in message["tool_calls"]]
            if self._has_channels and any(message.get(name) for name in REASONING):
                escaped["content"] = ""  # beside a call, gpt-oss's template refuses both
        return escaped

    def _escape_call(self, call: Mapping[str, Any], signatures: Mapping[str, Signature]) -> Message:
        try:
            name, arguments = str(call["function"]["name"]), call["function"]["arguments"]
            plain = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            function = {"name": self.tokens.escape(name), "arguments": self.tokens.escape_all(plain)}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            hint = "a tool call is {id, type, function: {name, arguments}}, arguments a JSON object"
            raise ChatError("a tool call cannot be rendered", repr(error), hint=hint) from None
        kept = {key: self.tokens.escape(str(call[key])) for key in ("id",) if call.get(key) is not None}
        return {**kept, "type": "function", "function": function}


_HINT_OWN = "use the chat template that the checkpoint's makers publish, or etude's with its tokens"
_HINT_TOKENS = (
    "train one with etude, or add etude's special tokens to yours, or name an eos_token in tokenizer_config.json"
)
_HINT_FOLDER = "a tokeniser directory has tokenizer.json and chat_template.jinja"


def split_reasoning(text: str) -> tuple[str, str]:
    """Split the text of a completion into (reasoning, answer) at ``</think>``.

    The opening ``<think>`` is optional, since some templates write it as part of the generation prompt.

    >>> split_reasoning("<think>\\n2 + 2\\n</think>\\n\\n4"), split_reasoning("4")
    (('2 + 2', '4'), ('', '4'))
    """
    reasoning, closed, answer = text.partition("</think>")
    if not closed:
        return "", text
    return reasoning.strip().removeprefix("<think>").strip(), answer.lstrip("\n")


def _with_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of all calls as JSON text."""
    return [
        {**m, "tool_calls": [_call_with_text(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _call_with_text(call: Mapping[str, Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
