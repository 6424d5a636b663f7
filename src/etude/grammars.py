"""Grammars that constrain what a model samples: from JSON schemas, regular expressions and lists of tools.

A grammar is one string, so that a request can carry it (`records.Sampling.grammar`). It is a JSON object with one key:

- ``{"json_schema": SCHEMA}``: JSON that is valid under the schema, without space before or after it.
- ``{"regex": PATTERN}``: text that the pattern matches as a whole, in the syntax of Rust's regex crate.
- ``{"lark": TEXT}``: a context-free grammar in llguidance's variant of Lark. ``<[7]>`` is the token with id 7.

The functions `from_...` make grammars and need no library. `check` and `Compiler` need llguidance
(https://github.com/guidance-ai/llguidance), which limits the work of each grammar and each token. No function reads
more than its arguments: a schema's reference to another host is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import EtudeError

MAX_BYTES = 256 * 1024
"""Size limit of a grammar: one of this size compiles in about a second."""
KINDS = ("json_schema", "regex", "lark")
_WHITESPACE = r"[ \n\t]{0,16}"
"""The whitespace allowed between two parts of JSON. Without a limit a model could write it up to its token limit."""
_END = "<|etude: end of the grammar|>"
_HIDDEN = "\ue000"  # private use
_PLACEHOLDERS = re.compile("(NAME|ARGUMENTS|BOTH)")


class GrammarError(EtudeError):
    """A grammar is invalid, too large, matches nothing, or cannot be used with the tokeniser."""


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call.

    `schema` is the JSON schema of its arguments; None allows any object. If the tool-call format is not JSON, `pattern`
    or `lark` is used in its place: a regular expression of the arguments, or the right side of a rule in Lark.
    """

    name: str
    schema: Mapping[str, Any] | None = None
    pattern: str = ""
    lark: str = ""


def from_json_schema(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of JSON that is valid under a schema.

    >>> from_json_schema({"type": "integer"})
    '{"json_schema": {"type": "integer"}}'
    """
    return json.dumps({"json_schema": schema if isinstance(schema, bool) else dict(schema)}, ensure_ascii=False)


def any_json_object() -> str:
    """Return the grammar of any JSON object."""
    return from_json_schema({"type": "object"})


def from_regex(pattern: str) -> str:
    """Return the grammar of all texts that a regular expression matches from beginning to end."""
    return json.dumps({"regex": pattern}, ensure_ascii=False)


def from_lark(text: str) -> str:
    """Return the grammar that `text` describes in llguidance's Lark syntax. Its first rule must be `start`."""
    return json.dumps({"lark": text}, ensure_ascii=False)


def from_tool_calls(
    tools: Sequence[Tool],
    call: str,
    *,
    tokens: Mapping[str, int],
    opening: str = "",
    closing: str = "",
    between: str = "\n",
    max_calls: int = 1,
    lead: str = "",
) -> str:
    """Return the grammar of a completion that consists of one to `max_calls` calls of `tools`.

    `call` is the text of one call, in which NAME stands for the tool's name, ARGUMENTS for its arguments, and BOTH for
    the JSON object ``{"name": NAME, "arguments": ARGUMENTS}``. `opening` stands before the first call, `between`
    between two calls, `closing` after the last. `lead` is a regular expression of the text that the model may write
    before `opening`; "" allows none.

    `tokens` maps texts to token ids. Wherever one of these texts occurs in `call`, `opening`, `closing` or `between`,
    the model must write it as this one token.

    >>> print(json.loads(from_tool_calls([Tool("now")], "<|call|>NAME", tokens={"<|call|>": 4}))["lark"])
    start: calls
    calls: call
    call: tool0
    tool0: <[4]> "now"

    Raises `GrammarError` when there are no tools, two have one name, or `call` has neither NAME nor BOTH.
    """
    names = [tool.name for tool in tools]
    if not names or len(set(names)) < len(names) or max_calls < 1 or not re.search("NAME|BOTH", call):
        raise GrammarError(
            "no grammar can be made of these tool calls",
            f"tools {names[:8]}, max_calls {max_calls}, call {call[:80]!r}",
            hint="give tools of different names, max_calls of at least 1, and a call with NAME or BOTH",
        )
    more = f" ({literal(between, tokens)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    around = ["lead" if lead else "", literal(opening, tokens), "calls", literal(closing, tokens)]
    lines = [f"start: {' '.join(filter(None, around))}", f"calls: call{more}"]
    lines.append("call: " + " | ".join(f"tool{i}" for i in range(len(tools))))
    if lead:
        lines.append(f"lead: {_lark_regex(lead)}")
    for i, tool in enumerate(tools):
        parts = [_part(piece, tool, f"args{i}", tokens) for piece in _PLACEHOLDERS.split(call)]
        lines.append(f"tool{i}: " + " ".join(filter(None, parts)))
        if any(f"args{i}" in part.split() for part in parts):
            pattern = _lark_regex(tool.pattern) if tool.pattern else ""
            lines.append(f"args{i}: " + (tool.lark or pattern or _arguments(tool.schema)))
    return from_lark("\n".join(lines))


def with_answer(calls: str, schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of a completion that the grammar `calls` matches, or that is JSON valid under a schema.

    `calls`: a grammar of kind "lark" whose first line is its rule `start`, as `from_tool_calls` makes it. Raises
    `GrammarError` for another grammar, and for a schema that no JSON fulfils.

    >>> print(json.loads(with_answer(from_lark('start: "now"'), {"type": "null"}))["lark"].partition(", ")[0])
    start: called | answer
    called: "now"
    answer: %json {"type": "null"
    """
    kind, text = kind_of(calls)
    start, _, rest = text.partition("\n") if kind == "lark" else ("", "", "")
    if not start.startswith("start:") or schema is False:
        facts = "no JSON is valid under the schema" if schema is False else calls[:80]
        raise GrammarError("tool calls and a JSON answer cannot be joined to one grammar", facts, hint=_HINT_GRAMMAR)
    answer = json_value({} if schema is True else schema)
    lines = ["start: called | answer", start.replace("start:", "called:", 1), f"answer: {answer}"]
    return from_lark("\n".join([*lines, *filter(None, [rest])]))


def to_lark(grammar: str, stop_token_ids: Sequence[int]) -> str:
    """Translate a grammar to llguidance's Lark, with one of the stop tokens at the end of each text.

    `grammar`: of any kind (JSON schema, regular expression or Lark), as the functions `from_...` return it. Use it for
    a server that would otherwise accept only the tokeniser's own end token after the text.

    >>> print(to_lark(from_regex("a+"), [5, 7]))
    start: sentence (<[5]> | <[7]>)
    sentence: /a+/

    Raises `GrammarError` for a text that is not a grammar, and for the JSON schema `false`, which allows no JSON."""
    kind, value = kind_of(grammar)
    if value is False:
        raise _invalid("no JSON is valid under this schema")
    if kind == "json_schema":
        sentence = json_value({} if value is True else value)
    else:
        sentence = _lark_regex(value) if kind == "regex" else f"%lark {{\n{value}\n}}"
    return f"start: sentence ({' | '.join(f'<[{token}]>' for token in stop_token_ids)})\nsentence: {sentence}"


def _part(piece: str, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
    """Return a piece of a call's text as Lark. `arguments`: the name of the rule of the tool's arguments."""
    if piece == "NAME":
        return literal(tool.name, {})
    if piece == "ARGUMENTS":
        return arguments
    if piece == "BOTH":
        before = '{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
        return f"{literal(before, {})} {arguments} {literal('}', {})}"
    return literal(piece, tokens)


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a Lark expression for a text: strings, and token ids for the parts that are tokens.

    >>> literal("so<|end|>", {"<|end|>": 5})
    '"so" <[5]>'
    """
    found = (
        re.split("|".join(f"({re.escape(t)})" for t in sorted(tokens, key=len, reverse=True)), text)
        if tokens
        else [text]
    )
    return " ".join(
        f"<[{tokens[part]}]>" if part in tokens else json.dumps(part, ensure_ascii=False) for part in found if part
    )


def text_before(end: str, tokens: Mapping[str, int]) -> str:
    """Return a Lark expression for any text without `end`, and then `end`: as one token, if it is one of `tokens`.

    The first character of `end` must occur only once in `end`. In the text, it may occur wherever `end` does not
    follow.

    >>> text_before("</a>", {"</a>": 5})
    '/[^<]*(?:<(?:[^<\\\\/][^<]*|\\\\/(?:[^<a][^<]*|a(?:[^<>][^<]*)?)?)?)*/ <[5]>'
    """
    first, inner = re.escape(end[0]), ""
    for char in map(re.escape, reversed(end[1:])):
        inner = f"(?:[^{first}{char}][^{first}]*{f'|{char}{inner}' if inner else ''})?"
    text = f"[^{first}]*(?:{first}{inner})*"
    return f"{_lark_regex(text)} {literal(end, tokens)}" if end in tokens else _lark_regex(text + re.escape(end))


def _lark_regex(pattern: str) -> str:
    """Return a regular expression as Lark, between slashes."""
    changes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    found = re.sub(r"\\.|/|\n", lambda m: changes.get(m[0], m[0]), pattern, flags=re.DOTALL)
    return f"/{found}/"


def _arguments(schema: Mapping[str, Any] | None) -> str:
    """Return the Lark of the JSON object of a call's arguments."""
    return json_value({"type": "object", **(schema or {})})


def json_value(schema: Mapping[str, Any]) -> str:
    """Return a Lark expression for JSON that is valid under a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def kind_of(grammar: str) -> tuple[str, Any]:
    """Return (kind, content) of a grammar: one of `KINDS`, and the schema (a mapping or bool), the pattern or the Lark
    text.

    Raises `GrammarError` for any other text, and for one larger than `MAX_BYTES`."""
    size = len(grammar.encode(errors="replace"))
    if size > MAX_BYTES:
        raise GrammarError("the grammar is too large", f"{size} bytes, the limit is {MAX_BYTES}", hint=_HINT)
    try:
        [(kind, value)] = json.loads(grammar).items()
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair, which servers refuse, is an error
    except (ValueError, AttributeError, RecursionError) as error:
        raise GrammarError(
            "the text is not a grammar", f"{type(error).__name__}: {str(error)[:200]}", hint=_HINT
        ) from None
    if kind not in KINDS or not isinstance(value, (dict, bool) if kind == "json_schema" else str):
        raise GrammarError("the text is not a grammar", f"{kind[:80]!r} of type {type(value).__name__}", hint=_HINT)
    return kind, value


def check(grammar: str, tokenizer: Path | None = None) -> None:
    """Check that a grammar is valid and matches some text. Raises `GrammarError` if not.

    `tokenizer`: a tokenizer.json, whose tokens the grammar is checked against. It takes about a second to load for a
    vocabulary of 150,000: make a `Compiler` to check many grammars. Without it, token ids are not checked.
    """
    if tokenizer is not None:
        Compiler(tokenizer).compile(grammar)
        return
    with _guarded():
        message = _llguidance().LLMatcher.validate_grammar(_native(grammar), None, limits=_limits())
        if message and "unknown special token" not in message and "Token range" not in message:
            raise _invalid(message)


class Compiler:
    """Compiles grammars for one tokeniser. Not thread-safe.

    `tokenizer`: the path of a tokenizer.json. `vocab_size`: the size of the model's vocabulary, which may be larger
    than the tokeniser's. Raises `GrammarError` when the file cannot be read, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Path, vocab_size: int | None = None) -> None:
        library = _llguidance()
        try:
            from tokenizers import Tokenizer

            loaded = Tokenizer.from_file(str(tokenizer))
            # A token of its own says where a sentence may end, since the tokens that end a text differ by request.
            loaded.add_special_tokens([_END])
            end = loaded.token_to_id(_END)
            assert end is not None, "it was added"
            self._end = end
            self.vocab_size = vocab_size or self._end
            data, size = _hide_special_tokens(loaded.to_str()), max(self._end + 1, self.vocab_size)
            with _guarded():
                self._tokens = library.LLTokenizer(data, n_vocab=size, eos_token=self._end)
        except GrammarError:
            raise
        except Exception as error:  # noqa: BLE001 - tokenizers raises only this
            facts = f"{tokenizer}: {type(error).__name__}: {str(error)[:200]}"
            raise GrammarError("no grammar can be used with this tokeniser", facts, hint=_HINT_TOKENIZER) from None

    def compile(self, grammar: str) -> Matcher:
        """Compile a grammar. Raises `GrammarError` when it is invalid, too complex, or matches no text."""
        with _guarded():
            native = _llguidance().LLMatcher(self._tokens, _native(grammar), log_level=0, limits=_limits())
            if native.is_error():
                raise _invalid(native.get_error())
        matcher = Matcher(native, self._end, self.vocab_size)
        allowed, may_end = matcher.mask()
        if not may_end and not allowed.any():
            raise _invalid("it matches no text")
        return matcher


class Matcher:
    """The state of matching one text against a compiled grammar, token by token. `Compiler.compile` makes one."""

    def __init__(self, native: Any, end: int, vocab_size: int) -> None:
        """`native`: llguidance's matcher. `end`: the id of the token that stands for the end of a sentence."""
        self._native, self._end, self._vocab_size = native, end, vocab_size

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        return Matcher(self._native.deep_copy(), self._end, self._vocab_size)

    def mask(self) -> tuple[npt.NDArray[np.bool_], bool]:
        """Return whether each token may come next, [V] bool, and whether the text may end here.

        Raises `GrammarError` when the grammar has become too complex."""
        with _guarded():
            packed = np.frombuffer(self._native.compute_bitmask(), np.uint8)
            self._check()
        allowed = np.unpackbits(packed, bitorder="little").view(np.bool_)
        may_end = bool(allowed[self._end])
        allowed[self._end] = False  # no token of the model, or one of its unused ids
        return allowed[: self._vocab_size], may_end

    def consume(self, token: int) -> None:
        """Add one token to the matched text. Raises `GrammarError` when it may not come next."""
        with _guarded():
            self._native.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._native.is_error():
            raise _invalid(self._native.get_error() or "the text does not match it")


def _hide_special_tokens(tokenizer: str) -> str:
    """Return a tokenizer.json in which no text spells a special token. llguidance tokenises text that a grammar forces,
    and would take the token for the text."""
    data = json.loads(tokenizer)
    names = {token["content"]: _HIDDEN + token["content"] for token in data["added_tokens"] if token["special"]}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocab = data["model"].get("vocab")
    if isinstance(vocab, dict):
        data["model"]["vocab"] = {names.get(name, name): i for name, i in vocab.items()}
    elif isinstance(vocab, list):
        data["model"]["vocab"] = [[names.get(name, name), *rest] for name, *rest in vocab]
    return json.dumps(data, ensure_ascii=False)


_JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE, "lenient": False}
_HINT = f"make it with a function of etude.grammars, of at most {MAX_BYTES} bytes"
_HINT_GRAMMAR = "simplify the grammar or the schema; docs/guides/sampling.md says which keywords are supported"
_HINT_TOKENIZER = "put the tokenizer.json of the model into the checkpoint's folder"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError("grammars need llguidance", hint="pip install 'etude[train]', or only llguidance") from None
    return llguidance


def _limits() -> Any:
    return _llguidance().LLParserLimits(verbose_errors=False)


def _native(grammar: str) -> str:
    """Return the grammar in llguidance's own form."""
    kind, value = kind_of(grammar)
    maker = _llguidance().LLMatcher
    try:
        if value is False:
            raise _invalid("no JSON is valid under this schema")
        if kind == "json_schema":
            schema = {**({} if value is True else value), "x-guidance": _JSON_OPTIONS}  # in place of the schema's own
            found = maker.grammar_from_json_schema(json.dumps(schema))
        else:
            found = (maker.grammar_from_regex if kind == "regex" else maker.grammar_from_lark)(value)
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error)) from None
    return str(found)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Turn every exception of llguidance into a `GrammarError`. A panic in Rust is a `BaseException`."""
    try:
        yield
    except (GrammarError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001
        raise _invalid(f"{type(error).__name__}: {error}") from None


def _invalid(message: str) -> GrammarError:
    facts = " ".join(message.replace("<non-verbose/>", " ").split())[:300] or "its parser refused it"
    if "NoExtensionBias" in facts:
        facts = "it refers to itself before any text, so no text ends it"
    elif row := re.search(r"Current row has (\d+) items", facts):
        facts = f"at one place of the text {row[1]} of its rules may go on, which is too many"
    return GrammarError("the grammar is invalid or too complex", facts, hint=_HINT_GRAMMAR)
