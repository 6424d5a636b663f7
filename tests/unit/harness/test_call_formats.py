"""Tool calls in the formats of published checkpoints: read, written, streamed, and forced by a grammar."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity import chats
from tests.unit.harness.tokeniser import laptop_chat, laptop_tokenizer

from etude.capture.streams import StreamedText
from etude.grammars import Compiler
from etude.harness import Call, ChatFormat
from etude.harness.call_formats import DEEPSEEK, GLM, HERMES, KIMI, LLAMA, MINIMAX, CallFormat, call_format_of
from etude.harness.commands import Parameter, Signature, write_words

FORMATS = [HERMES, DEEPSEEK, KIMI, GLM, MINIMAX, LLAMA]
EDIT = Signature(
    "edit",
    "",
    (
        Parameter("path"),
        Parameter("line", kind="integer"),
        Parameter("VALUE", kind="array", required=False),
        Parameter("text", required=False),
    ),
)
TOOLS = {"edit": EDIT, "ls": Signature("ls", "")}
CALL = Call("edit", {"path": "a.py", "line": 3, "VALUE": [1, "x"], "text": "\n  return a <b\n"})
WRITTEN = {
    "glm": "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n<arg_key>line</arg_key>\n"
    '<arg_value>3</arg_value>\n<arg_key>VALUE</arg_key>\n<arg_value>[1, "x"]</arg_value>\n<arg_key>text</arg_key>\n'
    "<arg_value>\n  return a <b\n</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">a.py</parameter>\n'
    '<parameter name="line">3</parameter>\n<parameter name="VALUE">[1, "x"]</parameter>\n'
    '<parameter name="text">\n  return a <b\n</parameter>\n</invoke>\n</minimax:tool_call>',
    "llama": '{"name": "edit", "parameters": {"path": "a.py", "line": 3, "VALUE": [1, "x"], '
    '"text": "\\n  return a <b\\n"}}',
}


@pytest.mark.parametrize("form", [GLM, MINIMAX, LLAMA], ids=lambda form: form.name)
def test_a_call_has_the_published_text_and_values_have_the_types_of_their_parameters(form: CallFormat) -> None:
    assert form.write(CALL.name, CALL.arguments) == WRITTEN[form.name]
    assert form.read(WRITTEN[form.name], TOOLS) == ("", (CALL,))
    unknown = form.read(WRITTEN[form.name], {}, strict=False)[1]
    line: Any = 3 if form is LLAMA else "3"
    assert isinstance(unknown[0], Call)
    assert unknown[0].arguments["line"] == line


@pytest.mark.parametrize("form", [HERMES, DEEPSEEK, KIMI, GLM, MINIMAX], ids=lambda form: form.name)
def test_several_calls_are_read_in_order_after_the_text(form: CallFormat) -> None:
    calls = [CALL, Call("ls", {}), CALL]
    written = [form.write(c.name, c.arguments).removeprefix(form.opening).removesuffix(form.closing) for c in calls]
    text = "so\n" + form.opening + form.between.join(written) + form.closing
    assert form.read(text, TOOLS) == ("so\n", tuple(calls))


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (GLM, "<tool_call>ls</tool_call>", (Call("ls", {}),)),
        (GLM, "<tool_call>\nls\n</tool_call>\n", (Call("ls", {}),)),
        (
            GLM,
            "<tool_call>edit<arg_key>path</arg_key><arg_value>a<arg_key>b</arg_value>"
            "<arg_key>line</arg_key><arg_value>3</arg_value></tool_call>",
            (Call("edit", {"path": "a<arg_key>b", "line": 3}),),
        ),
        (GLM, "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a", "the call cannot be read"),
        (GLM, "<tool_call>ls\nmore</tool_call>", "the call cannot be read"),
        (
            GLM,
            '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
            'no such tool: {"name": "ls", "arguments": {}}',
        ),
        (GLM, WRITTEN["glm"].replace(">3<", ">three<"), "line is not of type integer"),
        (GLM, WRITTEN["glm"].replace("path", "file"), "usage: edit PATH LINE VALUE TEXT"),
        (GLM, WRITTEN["glm"].replace("edit", "edti"), "no such tool: edti"),
        (GLM, "<arg_key>", ()),
        (MINIMAX, '<minimax:tool_call><invoke name="ls"></invoke></minimax:tool_call>', (Call("ls", {}),)),
        (MINIMAX, "<minimax:tool_call></minimax:tool_call>", "the call cannot be read"),
        (MINIMAX, WRITTEN["minimax"].replace("</invoke>", ""), "the call cannot be read"),
        (MINIMAX, WRITTEN["minimax"].replace(">3<", "> 3\n<").replace(">[1", ">\n[1"), (CALL,)),
        (MINIMAX, 'write <invoke name="x"> for a call', ()),
        (LLAMA, '<|python_tag|>{"name": "ls", "parameters": {}}', (Call("ls", {}),)),
        (LLAMA, ' {"type": "function", "name": "ls", "parameters": {}}\n', (Call("ls", {}),)),
        (LLAMA, '{"name": "ls", "parameters": {}}; {"name": "ls", "parameters": {}}', "one call a turn"),
        (LLAMA, "<|python_tag|>print(1)", "the call cannot be read"),
        (LLAMA, '{"name": "ls", "parameters": {}} so', (Call("ls", {}),)),
        (LLAMA, '{"name": "ls", "parameters": {"a": }}', "the call's arguments are no JSON"),
        (LLAMA, '{"names": ["ls"]}', ()),
        (LLAMA, 'call {"name": "ls", "parameters": {}}', ()),
        (HERMES, '<tool_call>{"name": "ls", "arguments": {}} {"name"}</tool_call>', "one call a turn"),
    ],
)
def test_what_a_completion_says_is_its_calls_or_what_is_wrong_with_them(
    form: CallFormat, text: str, expected: object
) -> None:
    before, found = form.read(text, TOOLS)
    assert found == expected
    assert before == ("" if isinstance(found, tuple) and found else text)


def test_a_checkpoint_is_recognised_by_its_tokens() -> None:
    for tokens, form in (
        (chats.QWEN_TOKENS, HERMES),
        (chats.GLM_TOKENS, GLM),
        (chats.MINIMAX_TOKENS, MINIMAX),
        (chats.LLAMA_TOKENS, LLAMA),
        (chats.DEEPSEEK_TOKENS, DEEPSEEK),
        ({"<|tool_calls_section_begin|>": True}, KIMI),
    ):
        assert call_format_of(tokens) is form
    assert call_format_of({"<|im_end|>"}).name == "none"


texts = st.text(max_size=20) | st.lists(
    st.sampled_from(
        ["<", "/", "</arg_value", "</param", "<tool_call>", "<invoke ", "\n", "{", '"', "\\", "VALUE", "é"]
    ),
    max_size=6,
).map("".join)
values = st.fixed_dictionaries(
    {"path": texts, "line": st.integers()},
    optional={"VALUE": st.lists(texts | st.booleans(), max_size=3), "text": texts},
)


@settings(max_examples=150)
@given(st.lists(values, min_size=1, max_size=3), st.sampled_from(FORMATS))
def test_written_calls_are_read_back(arguments: list[dict[str, Any]], form: CallFormat) -> None:
    def holds_a_mark(value: Any) -> bool:
        return any(mark in str(value) for mark in ("</arg_value>", "</parameter>", "</tool_call>", "\ud800"))

    calls = [Call("edit", one) for one in arguments if not any(map(holds_a_mark, one.values()))]
    calls = calls[:1] if form.is_single else calls
    written = [form.write(c.name, c.arguments).removeprefix(form.opening).removesuffix(form.closing) for c in calls]
    assert form.read(form.opening + form.between.join(written) + form.closing, TOOLS)[1] == tuple(calls) or not calls


@settings(max_examples=150)
@given(st.sampled_from([GLM, MINIMAX, LLAMA]), st.data())
def test_any_text_is_read_as_calls_or_as_an_error(form: CallFormat, data: st.DataObject) -> None:
    pieces = [WRITTEN[form.name][i : i + 9] for i in range(0, 200, 9)]
    cut = data.draw(st.lists(st.sampled_from([*pieces, *form.opening_tokens, WRITTEN[form.name], "x"]), max_size=12))
    before, found = form.read("".join(cut), TOOLS, strict=data.draw(st.booleans()))
    assert isinstance(found, str) or all(isinstance(call, Call) for call in found)
    assert "".join(cut).startswith(before)


def test_the_time_to_read_many_unfinished_arguments_grows_with_their_number_only() -> None:
    unfinished = "<tool_call>edit\n" + "<arg_key>a</arg_key><arg_value>b</arg_value>" * 20_000
    assert GLM.read(unfinished, TOOLS)[1] == "the call cannot be read"


@pytest.fixture(scope="module")
def chat_formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatFormat, Path]]:
    base = tmp_path_factory.mktemp("formats")
    return {
        name: (ChatFormat.load(chats.make(base / name, name)), base / name / "tokenizer.json") for name in chats.KINDS
    }


@pytest.mark.parametrize("name", chats.KINDS)
def test_a_stream_has_the_text_before_the_calls_and_nothing_else(
    chat_formats: dict[str, tuple[ChatFormat, Path]], name: str
) -> None:
    chat = chat_formats[name][0]
    called = chat.encode_call(CALL).tolist()
    said = chat.encode('so {"name": "x"} and {').tolist()
    completions = {
        "call": called,
        "text": [*said, chat.end_id],
        "json": [*chat.encode('{"a": 1}').tolist(), chat.end_id],
    }
    if name not in ("harmony", "llama"):
        completions["both"] = [*said, *called]
    for ids in completions.values():
        for size in (1, 3, len(ids)):
            stream, streamed = StreamedText(chat, []), ""
            reply = chat.parse(ids, TOOLS)
            for at in range(0, len(ids), size):
                streamed += stream.add(ids[at : at + size])[1]
                assert reply.text.startswith(streamed)
            assert streamed == reply.text
            assert reply.calls == ((CALL,) if ids[-len(called) :] == called else ())


CHOICES = ChatFormat.signatures(
    [
        {"type": "function", "function": {"name": "now"}},
        {
            "type": "function",
            "function": {
                "name": "go",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "where": {"type": "string", "enum": ["<up>", "down"]},
                        "steps": {"type": "integer", "minimum": 1, "maximum": 3},
                        "fast": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                    "required": ["where", "steps"],
                },
            },
        },
    ]
)


@pytest.mark.parametrize("name", chats.KINDS)
def test_every_text_that_the_grammar_of_calls_allows_is_read_as_calls(
    chat_formats: dict[str, tuple[ChatFormat, Path]], name: str
) -> None:
    chat, tokenizer = chat_formats[name]
    compiler = Compiler(tokenizer, chat.vocab_size)
    grammar = compiler.compile(chat.call_grammar(CHOICES, max_calls=2))
    for seed in range(12):
        matcher, ids, draw = grammar.copy(), [], random.Random(seed)
        while True:
            allowed, may_end = matcher.mask()
            if may_end and (not allowed.any() or draw.random() < 0.5):
                break
            plain = (
                [i for i in allowed.nonzero()[0].tolist() if chat.decode([i]).strip()] if draw.random() < 0.9 else []
            )
            ids.append(draw.choice(plain or allowed.nonzero()[0].tolist()))
            matcher.consume(ids[-1])
        reply = chat.parse([*ids, chat.end_id], CHOICES)
        assert not reply.error, chat.decode(ids, special=True)
        assert 1 <= len(reply.calls) <= (1 if name in ("harmony", "llama") else 2)


@pytest.mark.parametrize("name", chats.KINDS)
def test_the_grammar_of_calls_allows_written_calls_and_none_of_a_wrong_type(
    chat_formats: dict[str, tuple[ChatFormat, Path]], name: str
) -> None:
    chat, tokenizer = chat_formats[name]
    compiled = Compiler(tokenizer, chat.vocab_size).compile(chat.call_grammar(TOOLS, max_calls=1))

    def allows(call: Call) -> bool:
        matcher = compiled.copy()
        for token in chat.encode_call(call).tolist()[:-1]:
            if not matcher.mask()[0][token]:
                return False
            matcher.consume(token)
        return matcher.mask()[1]

    assert allows(CALL)
    assert allows(Call("ls", {}))
    assert allows(Call("edit", {"path": "<</arg_valu</paramete<", "line": -1}))
    assert not allows(Call("edit", {"path": "a", "line": "x"}))
    assert not allows(Call("edit", {"path": "a"}))
    assert not allows(Call("sl", {}))


def test_a_forced_call_in_words_has_a_text_of_the_enum_or_const_of_its_tool(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    chat = laptop_chat()
    laptop_tokenizer().save(str(tmp_path / "tokenizer.json"))
    texts = ["up", "two words", 'a "b"\n', "é", "null", ""]
    properties = {
        "first": {"enum": texts},
        "other": {"type": "string", "const": "x"},
        "last": {"type": ["string", "null"], "enum": [*texts, None]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["first"]}
    signatures = chat.signatures([{"type": "function", "function": {"name": "go", "parameters": parameters}}])
    compiled = Compiler(tmp_path / "tokenizer.json", chat.vocab_size).compile(
        chat.call_grammar(signatures, max_calls=1)
    )

    def allows(**arguments: str) -> bool:
        matcher, words = compiled.copy(), write_words(arguments, signatures["go"]).values()
        opening = int(chat.encode_call(Call("go", {}))[0])
        for token in [opening, *chat.tokens.encode(" ".join(["go", *words]))]:
            if not matcher.mask()[0][token]:
                return False
            matcher.consume(token)
        return bool(matcher.mask()[1])

    assert [text for text in texts if not allows(first=text, other="x")] == []
    assert [text for text in texts if not allows(first="up", other="x", last=text)] == []
    assert allows(first="up", last="two words")
    assert not allows(first="down")
    assert not allows(first="up", other="y")
    assert not allows(first="up", other="x", last="down")
