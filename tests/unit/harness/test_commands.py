from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.harness.call_formats import HERMES
from etude.harness.commands import Call, Parameter, Signature, read_call, write_words
from etude.harness.tools import standard_tools

TOOLS = standard_tools().signatures
MIXED = Signature(
    "mixed",
    "",
    (
        Parameter("path"),
        Parameter("count", kind="integer"),
        Parameter("tags", kind="array"),
        Parameter("text"),
    ),
)


def test_the_last_argument_takes_the_rest_of_the_text_newlines_included() -> None:
    call = read_call("write a.py def f():\n    return 'x  y'\n", TOOLS)
    assert call == Call("write", {"path": "a.py", "text": "def f():\n    return 'x  y'\n"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no such tool: "),
        ("lss", "no such tool: lss"),
        ("ls all", "ls takes nothing"),
        ("cat", "usage: cat PATH"),
        ("edit calc.py 3", "usage: edit PATH LINE TEXT"),
        ('edit "calc.py 3 x', "usage: edit PATH LINE TEXT"),
        ('edit "a"b 3 x', "usage: edit PATH LINE TEXT"),
        ("x" * 200, "no such tool: " + "x" * 40),
    ],
)
def test_a_malformed_call_is_told_what_is_wrong_in_a_few_characters(line: str, told: str) -> None:
    assert read_call(line, TOOLS) == told


def test_arguments_of_other_types_are_json_and_checked() -> None:
    signatures = {"mixed": MIXED}
    assert read_call('mixed "a b" 3 ["x y"] the rest', signatures) == Call(
        "mixed", {"path": "a b", "count": 3, "tags": ["x y"], "text": "the rest"}
    )
    assert read_call("mixed a true [] b", signatures) == "count is not of type integer"
    assert read_call("mixed a 1 {} b", signatures) == "tags is not of type array"


def test_an_optional_argument_may_be_left_out_at_the_end_or_be_null_before_it() -> None:
    find = Signature("find", "", (Parameter("where", required=False), Parameter("what", required=False)))
    assert read_call("find", {"find": find}) == Call("find", {})
    assert read_call("find null null", {"find": find}) == Call("find", {"what": "null"})
    assert read_call("find src", {"find": find}) == Call("find", {"where": "src"})


values = st.fixed_dictionaries(
    {
        "path": st.text(max_size=12),
        "count": st.integers(),
        "tags": st.lists(st.text(max_size=6) | st.integers() | st.booleans(), max_size=3),
        "text": st.text(max_size=30),
    }
)


@given(values)
def test_a_written_call_is_read_back_whatever_its_arguments_are(arguments: dict[str, object]) -> None:
    words = write_words(arguments, MIXED)
    assert read_call(" ".join(["mixed", *words.values()]), {"mixed": MIXED}) == Call("mixed", arguments)


@given(st.text(max_size=80), st.sampled_from(["", "edit ", "mixed ", 'mixed "', "mixed a [", "cat {"]))
def test_any_text_is_a_call_or_an_error_text(tail: str, head: str) -> None:
    assert isinstance(read_call(head + tail, {**TOOLS, "mixed": MIXED}), Call | str)


def test_a_deeply_nested_argument_is_an_error_text() -> None:
    assert isinstance(read_call("mixed a 1 " + "[" * 200_000, {"mixed": MIXED}), str)


def test_a_signature_survives_the_shape_of_openai() -> None:
    edit = TOOLS["edit"]
    assert Signature.from_openai(edit.to_openai()) == edit


@pytest.mark.parametrize(("tool", "lacks"), [({"function": {}}, "name"), ({"type": "function"}, "function")])
def test_a_key_that_a_tool_lacks_is_named_in_words(tool: dict[str, object], lacks: str) -> None:
    with pytest.raises(ValueError, match=f"this one has no key '{lacks}'"):
        Signature.from_openai(tool)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    json_values
    | st.fixed_dictionaries({"function": json_values})
    | st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(), "parameters": json_values})})
)
def test_any_json_is_a_signature_or_a_value_error(tool: object) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(Signature.from_openai(tool), Signature)  # type: ignore[arg-type]


def test_arguments_that_cannot_be_written_as_text_are_refused_with_the_reason() -> None:
    assert read_call(r'write "\ud800" x', TOOLS) == "path holds half of a character"
    assert read_call(r'mixed a 1 ["\udfff"] x', {"mixed": MIXED}) == "tags holds half of a character"
    assert read_call(r'mixed a 1 [{"\ud800": 1}] x', {"mixed": MIXED}) == "tags holds half of a character"
    assert read_call(f"mixed a 1 {'[' * 200}{']' * 200} x", {"mixed": MIXED}) == "tags is nested too deeply"
    assert isinstance(read_call(r'write "\ud83d\ude00" x', TOOLS), Call)


def test_json_calls_with_invalid_text_are_refused_with_the_reason() -> None:
    def told(call: str) -> object:
        return HERMES.read(f"<tool_call>{call}</tool_call>", TOOLS)[1]

    assert told(r'{"name": "write", "arguments": {"path": "a\ud800", "text": "x"}}') == "path holds half of a character"
    assert told(r'{"name": "\ud800", "arguments": {}}') == "no such tool: ?"
    assert told('{"name": "ls", "arguments": {"' + "x" * 9 + '": 1}}') == "ls takes nothing"
