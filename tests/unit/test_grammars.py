from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from etude import grammars
from etude.grammars import GrammarError, Tool
from etude.harness.chat import SPECIAL_TOKENS
from etude.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a b c"] * 9, folder, vocab_size=300, special_tokens=SPECIAL_TOKENS, chat_template="")
    return folder / "tokenizer.json"


def matches(compiler: grammars.Compiler, grammar: str, ids: list[int]) -> bool:
    """Whether the tokens are a whole sentence of the grammar, by its masks."""
    matcher = compiler.compile(grammar)
    for token in ids:
        if not matcher.mask()[0][token]:
            return False
        matcher.consume(token)
    return matcher.mask()[1]


def spelt(compiler_file: Path, text: str) -> list[int]:
    """One token for each byte of an ASCII text."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(compiler_file))
    found = [loaded.token_to_id("Ġ" if c == " " else "Ċ" if c == "\n" else c) for c in text]
    assert None not in found
    return found


def test_each_kind_of_grammar_takes_its_texts_and_no_others(tokenizer):
    compiler = grammars.Compiler(tokenizer, 310)
    for grammar, good, bad in [
        (grammars.from_regex("(a|bc)/"), ["a/", "bc/"], ["a", "ab/", ""]),
        (grammars.from_json_schema({"enum": ["x", 1]}), ['"x"', "1"], ["2", '"x" ', "11"]),
        (grammars.from_json_schema(True), ["null", "[1]"], ["nul"]),
        (grammars.any_json_object(), ["{}", '{"a": [true]}', '{\n  "a":1}'], ["[]", "1", "{} "]),
        (grammars.from_lark('start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", "()"]),
    ]:
        grammars.check(grammar)
        grammars.check(grammar, tokenizer)
        assert [matches(compiler, grammar, spelt(tokenizer, text)) for text in good] == [True] * len(good)
        assert [matches(compiler, grammar, spelt(tokenizer, text)) for text in bad] == [False] * len(bad)


def test_tool_calls_in_published_formats(tokenizer):
    compiler = grammars.Compiler(tokenizer)
    schema = {"properties": {"q": {"enum": ["x"]}}, "required": ["q"], "additionalProperties": False}
    tools = [Tool("f", schema), Tool("g", {"type": "object", "maxProperties": 0, "additionalProperties": False})]
    for call, options, good in [
        ("<tool_call>\nBOTH\n</tool_call>", {}, '<tool_call>\n{"name": "f", "arguments": {"q":"x"}}\n</tool_call>'),
        ("NAME:0 ARGUMENTS.", {"opening": "[", "closing": "]", "max_calls": 2}, '[f:0 {"q": "x"}.\ng:0 {}.]'),
        ("NAME", {"lead": "[ab/]*!"}, "ab/!f"),
    ]:
        grammar = grammars.from_tool_calls(tools, call, tokens={}, **options)
        grammars.check(grammar)
        assert matches(compiler, grammar, spelt(tokenizer, good))
        assert not matches(compiler, grammar, spelt(tokenizer, good.replace("f", "h")))
    own = grammars.from_tool_calls(
        [Tool("f", pattern="( [a-c]+)?")],
        "<|call|>NAMEARGUMENTS",
        tokens={"<|call|>": 4, "<|end|>": 5},
        closing="<|end|>",
    )
    assert matches(compiler, own, [4, *spelt(tokenizer, "f ab"), 5])
    assert matches(compiler, own, [4, *spelt(tokenizer, "f"), 5])
    assert not matches(compiler, own, [*spelt(tokenizer, "<|call|>f"), 5])


def test_a_call_or_an_answer_under_a_schema_matches_either_and_no_other_text(tokenizer):
    compiler = grammars.Compiler(tokenizer)
    calls = grammars.from_tool_calls([Tool("f"), Tool("g")], "NAME ARGUMENTS", tokens={}, lead="[ab/]*!")
    grammar = grammars.with_answer(calls, {"$ref": "#/$defs/one", "$defs": {"one": {"enum": ["x", 1]}}})
    grammars.check(grammar)
    for text, good in {'"x"': True, "1": True, "!g {}": True, "ab!f {}": True, "2": False, '!"x"': False}.items():
        assert matches(compiler, grammar, spelt(tokenizer, text)) is good, text
    assert matches(compiler, grammars.with_answer(calls, True), spelt(tokenizer, "[1]"))
    for wrong in ((grammars.from_regex("a"), True), (grammars.from_lark('other: "a"'), True), (calls, False)):
        with pytest.raises(GrammarError, match="cannot be joined to one grammar"):
            grammars.with_answer(*wrong)


@pytest.mark.parametrize("tools", [[], [Tool("a"), Tool("a")]])
def test_tools_without_a_name_of_their_own_are_refused(tools):
    with pytest.raises(GrammarError, match="no grammar can be made"):
        grammars.from_tool_calls(tools, "NAME", tokens={})
    with pytest.raises(GrammarError, match="no grammar can be made"):
        grammars.from_tool_calls([Tool("a")], "call", tokens={})


SHORT = {"properties": {"q": {"type": "string", "maxLength": 2}}, "required": ["q"], "additionalProperties": False}
CALLS = grammars.from_tool_calls([Tool("f", SHORT), Tool("g")], "<|call|>BOTH", tokens={"<|call|>": 4}, max_calls=2)


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.from_json_schema({"type": "object", **SHORT}),
        grammars.from_json_schema(True),
        grammars.from_regex("(a|bc)*/\n?[^<]{2,3}|<.end.>"),
        grammars.from_regex(""),
        grammars.from_regex("[ab]\\\n\\//"),
        grammars.from_lark('start: "{" inner "}" // a } comment\ninner: "%lark {" | /[}{]x/ | start'),
        CALLS,
        grammars.with_answer(CALLS, SHORT),
    ],
)
def test_lark_with_stop_tokens_allows_what_the_grammar_does_and_then_a_stop_token(grammar, tokenizer):
    stops, draw = [3, 5], random.Random(0)
    compiler = grammars.Compiler(tokenizer, 310)
    for _ in range(3):
        one = compiler.compile(grammar)
        two = compiler.compile(grammars.from_lark(grammars.to_lark(grammar, stops)))
        for _ in range(40):
            allowed, may_end = one.mask()
            with_stops = allowed.copy()
            with_stops[stops] |= may_end
            assert (two.mask()[0] == with_stops).all()
            assert not two.mask()[1], "it ends with a stop token only"
            token = draw.choice(with_stops.nonzero()[0].tolist())
            two.consume(token)
            if token in stops:
                break
            one.consume(token)


NO_GRAMMARS = [
    "",
    "[]",
    "{}",
    "null",
    '{"lark": 1}',
    '{"json_schema": "x"}',
    '{"regex": "a", "lark": ""}',
    '{"other": "a"}',
    "x" * 300_000,
    '{"json_schema": ' * 20_000,
    '{"regex": "\\ud800"}',
]


@pytest.mark.parametrize("text", NO_GRAMMARS)
def test_a_text_that_is_no_grammar_is_refused_in_three_parts(text, tokenizer):
    for check in (grammars.check, lambda one: grammars.check(one, tokenizer)):
        with pytest.raises(GrammarError) as caught:
            check(text)
        assert caught.value.facts
        assert len(str(caught.value)) < 700


def test_a_folder_without_a_tokeniser_is_named(tmp_path):
    with pytest.raises(GrammarError, match="no grammar can be used with this tokeniser") as caught:
        grammars.check(grammars.any_json_object(), tmp_path / "tokenizer.json")
    assert "tokenizer.json" in caught.value.facts


def test_a_matcher_and_its_copy_go_on_apart(tokenizer):
    matcher = grammars.Compiler(tokenizer).compile(grammars.from_regex("ab|ac"))
    a, b, c = spelt(tokenizer, "abc")
    matcher.consume(a)
    other = matcher.copy()
    matcher.consume(b)
    other.consume(c)
    assert matcher.mask()[1]
    assert other.mask()[1]
    with pytest.raises(GrammarError):
        matcher.consume(c)
    assert json.loads(grammars.from_regex("ab|ac")) == {"regex": "ab|ac"}


@pytest.mark.parametrize("kind", ["regex", "lark", "json_schema"])
def test_a_grammar_with_half_of_a_surrogate_pair_is_refused_for_every_server(kind):
    value = '{"const": "\\ud83d"}' if kind == "json_schema" else '"\\ud83d"'
    with pytest.raises(GrammarError, match="the text is not a grammar"):
        grammars.to_lark(f'{{"{kind}": {value}}}', [7])


def test_a_schema_does_not_choose_how_json_is_written(tokenizer):
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "x-guidance": {"item_separator": ";"}}
    matcher = grammars.Compiler(tokenizer, 310).compile(grammars.from_json_schema(schema))
    for token in Tokenizer.from_file(str(tokenizer)).encode("[1,1]", add_special_tokens=False).ids:
        matcher.consume(token)
    assert matcher.mask()[1], "it may end"


@pytest.mark.parametrize(
    ("message", "facts"),
    [
        ("NoExtensionBias\n<non-verbose/>", "it refers to itself before any text, so no text ends it"),
        ("Parser Error: Current row has 12007 items; max is 2000", "at one place of the text 12007 of its rules may"),
        ("no rule x", "no rule x"),
    ],
)
def test_what_the_parser_says_is_told_in_plain_words(message: str, facts: str) -> None:
    assert grammars._invalid(message).facts.startswith(facts)
