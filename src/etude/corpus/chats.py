"""The document source `chats`: conversations in OpenAI's format, rendered by a checkpoint's chat format.

What the assistant says is marked in the document (`Document.said`), so that a phase of mid-training can have its loss
there only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from etude.corpus.documents import MAX_BYTES, Document, Dropped
from etude.corpus.sources import Lines
from etude.errors import ConfigError, InputError
from etude.file_checksums import file_digest
from etude.harness.chat import TOKENISER, ChatFormat
from etude.harness.template import REASONING, ChatError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)


class _Bad(Exception):
    """A line that is no chat. Its text is the reason of the drop."""


@dataclass(frozen=True)
class Chats(Lines):
    """Files with one chat in each line: `{"messages": [...], "tools": [...]}`, both in OpenAI's format.

    - `files`: patterns of files, or folders, in which all `*.jsonl` are read.
    - `checkpoint`: a folder with tokenizer.json and chat template; the tokenizer must be that of the corpus.
    - `id`, `licence`: names of the fields with a chat's id and licence. A line without an id is named by its file and
      offset.

    Messages after the last answer of the assistant are left out. An answer with `weight` 0 is context that is not
    learned; other weights than 0 and 1 are refused. Raises `InputError` if no file matches."""

    files: tuple[str, ...]
    checkpoint: Path
    id: str = "id"
    licence: str = "licence"

    @cached_property
    def _chat(self) -> ChatFormat:
        return ChatFormat.load(self.checkpoint)

    def check_tokenizer(self, sha256: str) -> None:
        """Raise `ConfigError` if the corpus has another tokenizer than the checkpoint of the chats.

        `sha256`: the SHA-256 of the corpus's tokenizer.json."""
        check_tokenizer(self.checkpoint, sha256, noun="checkpoint of the chats")

    def pieces(self) -> list[list[Any]]:
        """Divide the files into pieces that can be read in parallel.

        Returns [file, first byte, last byte + 1, mtime in ns, digest of the chat format] for each."""
        self._chat  # noqa: B018  raise the error of a damaged checkpoint before anything is read
        paths = [self.checkpoint / name for name in TOKENISER]
        digests = [file_digest(path) if path.is_file() else "" for path in paths]
        made_with = hashlib.sha256("".join(digests).encode()).hexdigest()
        patterns = [f"{name}/**/*.jsonl" if os.path.isdir(name) else name for name in self.files]
        return [[*piece, made_with] for piece in self.ranges(patterns)]

    def parsed(self, name: str, line: bytes | None) -> Document | Dropped:
        if line is None:
            return Dropped(name, "too-large")
        try:
            row = msgspec.json.decode(line.decode())
        except UnicodeDecodeError:
            return Dropped(name, "not-utf-8")
        except (msgspec.DecodeError, RecursionError):
            return Dropped(name, "empty" if not line.strip() else "not-json")
        if not isinstance(row, dict):
            return Dropped(name, "no-messages")
        given, licence = row.get(self.id), row.get(self.licence)
        name = str(given) if isinstance(given, str | int) and str(given) else name
        try:
            name.encode()
            text, said = self._rendered(row)
            if len(text.encode()) > MAX_BYTES:
                return Dropped(name, "too-large")
            return Document(name, text, "", licence if isinstance(licence, str) else "", tuple(said))
        except _Bad as bad:
            return Dropped(name, str(bad))
        except UnicodeEncodeError:  # half of a surrogate pair
            return Dropped(name.encode("utf-8", "replace").decode(), "not-utf-8")
        except ChatError:
            return Dropped(name, "chat-template")

    def _rendered(self, row: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _Bad("no-messages")
        tools = row.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise _Bad("bad-tools")
        try:
            signatures = ChatFormat.signatures(tools)
        except (ValueError, TypeError, KeyError, AttributeError, InputError):
            raise _Bad("bad-tools") from None
        plain = [_message(message) for message in messages]
        if not any(message["role"] == "assistant" for message in plain):
            raise _Bad("no-answer")
        weights = [_weight(message) for message in messages if message["role"] == "assistant"]
        if not any(weights):
            raise _Bad("no-answer")
        text, spans = self._chat.render_chat(plain, signatures)
        return text, [one for span, weight in zip(spans, weights, strict=True) for one in _learned(span, weight)]


def check_tokenizer(folder: Path, sha256: str, *, noun: str) -> None:
    """Raise `ConfigError` if `folder`/tokenizer.json is missing or its SHA-256 is not that of the corpus's tokenizer.

    `sha256`: 64 hex characters. `noun`: what the error calls the folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        facts = f"there is no file {path}" if folder.is_dir() else f"there is no folder {folder}"
        raise ConfigError(f"the {noun} has no tokenizer", facts, hint="give the path of an existing one")
    found = file_digest(path)
    if found != sha256:
        facts = f"the SHA-256 of {path} is {found[:12]}, that of tokenizer.path {sha256[:12]}"
        hint = f"set tokenizer.path to {folder}"
        raise ConfigError(f"the {noun} has another tokenizer than the corpus", facts, hint=hint)


def _weight(message: Mapping[str, Any]) -> int:
    """Return the weight of an answer's loss, as in OpenAI's format: 0 or 1 (default). Raises `_Bad` for others."""
    weight = message.get("weight")
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise _Bad("bad-weight")
    return int(weight)


def _learned(span: tuple[int, int], weight: int) -> list[tuple[int, int]]:
    """Return the ranges of an answer that have loss.

    With weight 0, these are two empty ranges at its ends. So tokens end there as they do with weight 1."""
    start, stop = span
    return [span] if weight else [(start, start), (stop, stop)]


def _message(message: Any) -> dict[str, Any]:
    """Return a message with the fields that templates read and its content as one text. Raises `_Bad`."""
    if not isinstance(message, dict):
        raise _Bad("bad-message")
    if not isinstance(message.get("role"), str) or message["role"] not in ROLES:
        raise _Bad("unknown-role")
    kept = {key: message[key] for key in _KEPT if message.get(key) is not None}
    calls, content = kept.get("tool_calls", []), kept.get("content", "")
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(parts) != len(content):
            raise _Bad("not-text")
        content = "".join(parts)
    texts = [kept.get(key, "") for key in ("tool_call_id", "name", *REASONING)]
    if not isinstance(content, str) or not all(isinstance(text, str) for text in texts):
        raise _Bad("bad-message")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _Bad("bad-message")
    if kept["role"] == "assistant" and not content.strip() and not calls:
        raise _Bad("no-answer")
    return {**kept, "content": content}
