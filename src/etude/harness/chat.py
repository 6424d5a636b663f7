"""The chat format: messages to tokens, once, and sampled tokens back to what was said.

Messages have OpenAI's shape. A Jinja template, which a checkpoint may bring itself, renders them; this file turns the
rendering into token ids under three rules.

- *Tokens are stored once.* After the first prompt only what a turn appends is ever encoded (`continuation`), and the
  rendering is checked to be a pure extension of the earlier one. What the model sampled is never re-tokenised.
- *Structure comes from the template only.* Text that spells a special token (a file that contains ``<|end|>``) is
  encoded as ordinary text, so no tool output can end a message or speak for somebody else.
- *A checkpoint's template is outside code*: it runs in a sandbox (`template`). One that names `tools` is given them;
  etude's own does not list them.

A checkpoint whose tokeniser has etude's tokens talks in etude's form; any other talks in its own (`imported`). Knows
nothing of machines, engines or torch.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from etude.errors import ContextFull
from etude.file_checksums import verify_files
from etude.harness.commands import Call, Signature, read_call, write_words
from etude.harness.template import ChatError, ChatTemplate, read_special, read_template
from etude.harness.token_bound import chars_per_token
from etude.records.wire import I32

PAD, USER, ASSISTANT, TOOL = "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>"
CALL, END, DOC, SYSTEM = "<|call|>", "<|end|>", "<|doc|>", "<|system|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, TOOL, CALL, END, DOC, SYSTEM)
"""The special tokens, in the order of their ids in a tokeniser that etude trains."""

TOKENISER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files of a directory that a format is read from, those of them that are there."""

_MARK = "\ue000"  # private use: hides text that spells a special token while the template renders
STAND_IN = "\ue001"  # begins what stands for a text while a template renders; no outside text holds it unmarked
_LONG_CHARS = 16_384  # from here on tokenising takes tens of milliseconds
_SHORT_CHARS = 256  # texts up to here are remembered: tool answers repeat ("ok", an instruction)
_marked = re.compile(f"{_MARK}({_MARK}?)")

Message = dict[str, Any]
"""An OpenAI message: role, content, tool_calls, tool_call_id. Arguments may be a JSON string or a mapping."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a completion says.

    `text` is what was said before the call, or all of it. With `error` the call could not be read: `text` is then the
    whole completion, and the error is what the model is told.
    """

    text: str
    call: Call | None = None
    error: str = ""


def chat_template() -> str:
    """The Jinja source of etude's chat format, to be saved beside a tokeniser."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


class ChatFormat:
    """Encodes conversations and reads completions. Made from a tokeniser directory; read by harness and gateway."""

    end = END
    """The token that ends a message."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """Raises `ChatError` when the tokeniser lacks the format's tokens or the template does not compile."""
        self._take_tokens(tokenizer)
        missing = [t for t in (CALL, END) if t not in self._special]
        if missing:
            raise ChatError("the tokeniser has no chat format", f"no {' and '.join(missing)}", hint=_HINT_TOKENS)
        self.end_id, self._call_id = self._special[END], self._special[CALL]
        self.stop_token_ids: tuple[int, ...] = (self.end_id,)
        self._template = ChatTemplate(template, counted=template != chat_template())

    def _take_tokens(self, tokenizer: Tokenizer) -> None:
        """Learn which texts are tokens of their own."""
        tokenizer.encode_special_tokens = True  # a special token's spelling in a text is ordinary text
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[str, int] = {t.content: i for i, t in added.items() if t.content}
        self._special: dict[str, int] = {t.content: i for i, t in added.items() if t.special and t.content}
        self._special_ids = frozenset(self._special.values())
        self._literal, self._literal_special = _any_of(self._added), _any_of(self._special)
        self._unsaid = _any_of(self._added.keys() - self._special.keys())  # the tokeniser finds these in any text
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
        self._short = lru_cache(maxsize=4096)(self._encode_plain)

    @classmethod
    def load(cls, folder: Path | str) -> ChatFormat:
        """Load the chat format of a directory with tokenizer.json and a chat template. Raises `ChatError`."""
        folder = Path(folder)
        verify_files(folder, [name for name in TOKENISER if (folder / name).is_file()], kind=ChatError)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for a missing or damaged file
            raise ChatError(f"no tokeniser in {folder}", str(error), hint=_HINT_FOLDER) from None
        tokens = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        source, with_tools = read_template(folder)
        if {CALL, END} <= tokens or "eos_token" not in read_special(folder):
            return cls(tokenizer, source)
        from etude.harness.imported import ImportedFormat  # it is one of these

        return ImportedFormat(tokenizer, source, with_tools, special=read_special(folder), stops=stop_ids(folder))

    @staticmethod
    def signatures(tools: Iterable[Mapping[str, Any]]) -> dict[str, Signature]:
        """The signatures in OpenAI's `tools` list, by name. Raises `ValueError` for what is no tool."""
        return {s.name: s for s in map(Signature.from_openai, tools)}

    # text and tokens

    def encode(self, text: str, *, most: int | None = None) -> I32:
        """The tokens of ordinary text, [T] int32. A special token's spelling in it is ordinary text too. Raises
        `ContextFull`, before any work, for a text that surely has more than `most` tokens."""
        self._check_length(text, most)
        return np.array(self._plain(text), np.int32)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless asked for. Ids outside the vocabulary vanish."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=not special))

    def document(self, text: str) -> I32:
        """A mid-training document, ``<|doc|>text<|end|>``, [T] int32."""
        return np.array([self._special[DOC], *self._plain(text), self.end_id], np.int32)

    # messages to tokens

    def whole(self, messages: Sequence[Message], signatures: Mapping[str, Signature] | None = None) -> I32:
        """A finished conversation, [T] int32: how demonstrations become mid-training documents."""
        hidden = self._hidden(messages, signatures or {})
        return self._encode_rendering(self._render(hidden, signatures or {}, generate=False))

    def first(
        self,
        messages: Sequence[Message],
        signatures: Mapping[str, Signature] | None = None,
        *,
        most: int | None = None,
    ) -> I32:
        """The root of a context: the messages and the generation prompt, [P] int32. Raises `ContextFull`, before it is
        tokenised, for one that surely has more than `most` tokens."""
        hidden = self._hidden(messages, signatures or {})
        return self._encode_rendering(self._render(hidden, signatures or {}, generate=True), most=most)

    def continuation(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Mapping[str, Signature] | None = None,
        *,
        ended: bool = True,
        most: int | None = None,
    ) -> I32:
        """Only what `new` appends after `previous`, whose last message the model sampled, [P] int32; `most` as in
        `first`.

        It starts after the stop token that the model sampled; `ended` False says that it sampled none (it was cut off),
        and the stop token is appended here. Raises `ChatError` for a template that rewrites earlier messages.
        """
        hidden = self._hidden([*previous, *new], signatures or {})
        before = self._render(hidden[: len(previous)], signatures or {}, generate=False)
        after = self._render(hidden, signatures or {}, generate=True)
        end = before.rfind(END)
        if end < 0 or not after.startswith(before):
            raise ChatError(
                "the chat template does not only append",
                "a new message changes how earlier ones are rendered",
                hint="use a template whose rendering of n messages is a prefix of that of n + 1",
            )
        return self._encode_rendering(after[end + len(END) if ended else end :], most=most)

    def spell(self, call: Call) -> I32:
        """The completion that makes a call, stop token included, [T] int32: what a script says in a policy's place."""
        line = " ".join([call.name, *write_words(call.arguments).values()])
        return np.array([self._call_id, *self._plain(line), self.end_id], np.int32)

    # tokens to what was said

    def parse(self, ids: Sequence[int] | I32, signatures: Mapping[str, Signature]) -> Reply:
        """Parse a completion's token ids, with or without the stop token. Never raises: any ids give a `Reply`."""
        body = [int(i) for i in ids]
        if not body or body[-1] != self.end_id:
            return Reply(self.decode(body, special=True), error="too long")
        del body[-1]
        structure = [i for i in body if i in self._special_ids]
        if not structure:
            return Reply(self.decode(body))
        if structure != [self._call_id]:
            return Reply(self.decode(body, special=True), error="one call a turn")
        at = body.index(self._call_id)
        call = read_call(self.decode(body[at + 1 :]), signatures)
        if isinstance(call, str):
            return Reply(self.decode(body, special=True), error=call)
        return Reply(self.decode(body[:at]), call)

    def leading_text(self, ids: Sequence[int] | I32) -> int:
        """How many of a completion's first tokens are said to the reader, whatever follows: those before a call."""
        return next((n for n, i in enumerate(ids) if int(i) in self._special_ids), len(ids))

    def last_message(self, prompt_ids: Sequence[int] | I32) -> str:
        """The text of the last message before a prompt's generation prompt: what a policy was just told."""
        ids = [int(i) for i in prompt_ids]
        end = max((i for i, t in enumerate(ids) if t == self.end_id), default=0)
        start = max((i for i in range(end) if ids[i] in self._special_ids), default=-1)
        return self.decode(ids[start + 1 : end])

    def readable(self, ids: Iterable[int]) -> str:
        """A whole context for people: one message a paragraph, special tokens as names. Never parsed."""
        text = self.decode(ids, special=True).replace(ASSISTANT + CALL, "\n[call] ").replace(self.end, "")
        return self._literal.sub(lambda m: f"\n[{m[0].strip('<|>')}] ", text).strip("\n")

    # inside

    def _hidden(self, messages: Sequence[Message], signatures: Mapping[str, Signature]) -> list[Message]:
        """The messages as a template may see them: no text in them spells a special token."""
        return [self._hide_message(m, signatures) for m in messages]

    def _render(self, hidden: Sequence[Message], signatures: Mapping[str, Signature], *, generate: bool) -> str:
        return self._template.render(hidden, tools=self._tools(signatures), add_generation_prompt=generate)

    def _tools(self, signatures: Mapping[str, Signature]) -> list[dict[str, Any]]:
        """The tools as the template may see them."""
        lists = "tools" in self._template.variables
        return [self._hide_all(s.to_openai()) for s in signatures.values()] if lists else []

    def _hide_message(self, message: Message, signatures: Mapping[str, Signature]) -> Message:
        hidden = {k: self._hide(v) if isinstance(v, str) else v for k, v in message.items()}
        if message.get("tool_calls"):
            hidden["tool_calls"] = [self._hide_call(c, signatures) for c in message["tool_calls"]]
        return hidden

    def _hide_call(self, call: Mapping[str, Any], signatures: Mapping[str, Signature]) -> Message:
        try:
            name, arguments = str(call["function"]["name"]), call["function"]["arguments"]
            plain = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            words = write_words(plain, signatures.get(name))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            hint = "a tool call is {id, type, function: {name, arguments}}, arguments a JSON object"
            raise ChatError("a tool call cannot be rendered", repr(error), hint=hint) from None
        return {"function": {"name": self._hide(name), "arguments": {k: self._hide(w) for k, w in words.items()}}}

    def _hide_all(self, value: Any) -> Any:
        """`_hide` in every text of nested plain data."""
        if isinstance(value, Mapping):
            return {self._hide(str(k)): self._hide_all(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._hide_all(v) for v in value]
        return self._hide(value) if isinstance(value, str) else value

    def _hide(self, text: str) -> str:
        """Break the spelling of added tokens in outside text, so that the rendering holds the template's only."""
        return self._broken(text, self._literal)

    def _broken(self, text: str, literal: re.Pattern[str]) -> str:
        if _MARK in text:
            text = text.replace(_MARK, _MARK + _MARK)
        if STAND_IN in text:
            text = text.replace(STAND_IN, STAND_IN + _MARK)
        return literal.sub(lambda m: m[0][0] + _MARK + m[0][1:], text)

    def _encode_rendering(self, rendering: str, *, most: int | None = None) -> I32:
        self._check_length(rendering, most)
        ids: list[int] = []
        for i, piece in enumerate(self._literal.split(rendering)):
            if i % 2:
                ids.append(self._added[piece])
            elif piece:
                ids.extend(self._plain(_marked.sub(r"\1", piece) if _MARK in piece else piece))
        return np.array(ids, np.int32)

    def _plain(self, text: str) -> tuple[int, ...]:
        return self._short(text) if len(text) <= _SHORT_CHARS else self._encode_plain(text)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Cut inside whatever spells a token that the tokeniser would find in text."""
        cuts = [0, *(m.start() + 1 for m in self._unsaid.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        return tuple(i for piece in pieces for i in self._ids(piece))

    def _ids(self, text: str) -> Sequence[int]:
        """A long text lets other threads work meanwhile, which only this call does."""
        if len(text) > _LONG_CHARS:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _chars_per_token(self) -> float:
        return chars_per_token(self._tokenizer)

    def _check_length(self, text: str, most: int | None) -> None:
        """Raises `ContextFull` for a text or a rendering that surely has more than `most` tokens."""
        if most is None or len(text) <= most:
            return
        num_chars = len(text) / (2 if _MARK in text else 1)  # each mark stands beside a character of the text
        least = math.ceil(num_chars / self._chars_per_token)
        if least > most:
            facts = f"{len(text):,} characters are at least {least:,} tokens"
            raise ContextFull(f"the text does not fit a context of {most} tokens", facts, hint="send less text")


_HINT_TOKENS = (
    "train one with etude, or add etude's special tokens to yours, or name an eos_token in tokenizer_config.json"
)
_HINT_FOLDER = "a tokeniser directory holds tokenizer.json and chat_template.jinja"


def stop_ids(folder: Path) -> list[int]:
    """The ids that a checkpoint's files say end a completion."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        found += [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0]
    return list(dict.fromkeys(found))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches each of some texts, the longest first; nothing when there are none."""
    pattern = "|".join(re.escape(t) for t in sorted(tokens, key=lambda t: (-len(t), t)))
    return re.compile(f"({pattern})" if pattern else r"((?!))")
